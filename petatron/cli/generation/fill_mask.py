"""`petatron generate --fill-mask`: what an encoder predicts at the masks of texts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.base.terminal_escape import printable
from petatron.cli.generation.arguments import GenerationCommand
from petatron.cli.subcommands.run_on_ranks import run_on_ranks
from petatron.config.schema.sections.masked_language import MASKED_LANGUAGE_MODEL

if TYPE_CHECKING:
    from petatron.data.tokenizer import Tokenizer
    from petatron.infer.encoder.fill_masks import Prediction
    from petatron.serve.open_engine import ModelSettings

_TOP_K = 5
_GENERATION_ALONE = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "n"),
    *(
        "frequency_penalty",
        "seed",
        "stop",
        "json_schema",
        "regex",
        "logprobs",
        "prompts",
        "out",
        "beam_width",
        "prompt",
    ),
)


def check_fill_mask(options: argparse.Namespace) -> Iterator[Problem]:
    """Yields what is given beside `--fill-mask` and is for texts that are continued."""
    for name in _GENERATION_ALONE:
        if getattr(options, name) not in (None, False):
            rule = "is for texts that are continued, and --fill-mask continues none"
            yield Problem(f"--{name.replace('_', '-')}", "", rule, "Leave out one of the two.")


def fill_masks_on_ranks(argv: Sequence[str], command: GenerationCommand) -> int:
    """Fills the masks of all texts, on every rank of the layout, and prints at the first."""
    from petatron.serve.open_engine import model_settings

    def read_models() -> list[ModelSettings]:
        checkpoint, weights = command.options.checkpoint, command.options.weights
        return [model_settings(checkpoint, command.flags, options=command.engine, weights=weights)]

    return run_on_ranks("generate", argv, read_models, lambda models: _run_rank(command, models[0]))


def _run_rank(command: GenerationCommand, settings: ModelSettings) -> int:
    from petatron.infer.encoder.fill_masks import fill_masks
    from petatron.serve.open_engine import load_model

    texts, top_k = command.options.fill_mask, command.options.top_k
    tokenizer, mask_id = _check_model(settings)
    encoded = [_encode(text, tokenizer, mask_id) for text in texts]
    model = load_model(settings, dtype=command.dtype)
    predictions = fill_masks(model, encoded, mask_id=mask_id, top_k=_TOP_K if top_k is None else top_k)
    if model.mesh.world.rank == 0:
        for number, (text, masks) in enumerate(zip(texts, predictions)):
            print("\n" * (number > 0) + "\n".join(_lines(text, masks, tokenizer)), flush=True)
    return 0


def _check_model(settings: ModelSettings) -> tuple[Tokenizer, int]:
    """Returns the tokenizer, and the id of its mask; `ConfigError` if the model or its tokenizer knows no masks."""
    kind, tokenizer = settings.loaded.config.model.model_type, settings.required_tokenizer()
    problems = []
    if kind != MASKED_LANGUAGE_MODEL:
        rule = f"is a model of the type {kind}, and masks are filled by encoders that were trained to"
        problems.append(Problem("CHECKPOINT", settings.checkpoint, rule, "Use --prompt to continue a text."))
    if "mask" not in tokenizer.special_ids:
        rule = "has a tokenizer that names no mask"
        fix = "Name mask_token in its tokenizer_config.json."
        problems.append(Problem("CHECKPOINT", settings.checkpoint, rule, fix))
    if problems:
        raise ConfigError(problems)
    return tokenizer, tokenizer.special_ids["mask"]


def _encode(text: str, tokenizer: Tokenizer, mask_id: int) -> list[int]:
    from petatron.data.prompt.prompt_encoder import check_unicode, surrounding_ids

    before, after = surrounding_ids(tokenizer)
    ids = [*before, *tokenizer.encode(check_unicode(text)), *after]
    if mask_id not in ids:
        raise DataError(
            f"--fill-mask {text!r} has no mask. Write {_token_text(mask_id, tokenizer)} where one token is missing."
        )
    return ids


def _lines(text: str, masks: Sequence[Sequence[Prediction]], tokenizer: Tokenizer) -> Iterator[str]:
    yield printable(text)
    for number, predictions in enumerate(masks, start=1):
        if len(masks) > 1:
            yield f"mask {number}"
        for token, probability in predictions:
            yield f"  {probability:.4f}  {printable(_token_text(token, tokenizer))}"


def _token_text(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([token]).strip() or f"id {token}"
