"""Parses what lm_eval passes to a model: `--model_args`, and the `generation_kwargs` of a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from petatron.base.errors import Problem, raise_problems
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams
from petatron.parallel.forward_sequences import BATCH_TOKENS

_AUTO = "auto"
_SAMPLING = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")
_MAX_TOKEN_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SEED = 1234
"""That of lm_eval's own clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArgs:
    """`--model_args` of the model `petatron`, and what lm_eval's own flags add.

    pretrained: the folder of a run, of a step, or of a Hugging Face model. weights: the kind of its state to take as the weights (ema).
    dtype: to compute in; None or auto: that of the weights. device: cpu or cuda; None or lm_eval's default, cuda:0: a GPU if there is
    one. batch_size: sequences of full length in a micro-batch, and sequences that are continued at once; auto: max_batch_size, or
    Petatron's defaults. max_length: inputs at once, by default the model's positions. max_gen_toks: new tokens, where a task says nothing.
    add_bos_token: None is what the tokenizer does. prefix_token_id: what precedes an empty context and a document, by default BOS, else
    the end of a document.
    """

    pretrained: str
    dtype: str | None = None
    weights: str | None = None
    device: str | None = None
    batch_size: int | str | None = None
    max_batch_size: int | None = None
    max_length: int | None = None
    max_gen_toks: int = 256
    add_bos_token: bool | None = None
    prefix_token_id: int | None = None
    tensor_model_parallel_size: int = 1

    @property
    def flags(self) -> list[str]:
        """The flags of `petatron train` that say the same."""
        return ["--device", self.device] if self.device in ("cpu", "cuda") else []

    @property
    def _rows(self) -> int | None:
        return self.batch_size if isinstance(self.batch_size, int) else self.max_batch_size

    def batch_tokens(self, max_length: int) -> int:
        """Returns the tokens of a micro-batch that is scored."""
        return BATCH_TOKENS if self._rows is None else self._rows * max_length

    def engine_options(self, max_length: int) -> EngineOptions:
        """Returns the sizes of the engine; the last new token is never an input, so it needs no position."""
        options = EngineOptions(max_length=max_length + 1)
        return options if self._rows is None else replace(options, max_sequences=self._rows)


def read_model_args(given: Mapping[str, Any], *, world_size: int) -> ModelArgs:
    """Checks what lm_eval hands over; `ConfigError` with everything that is wrong."""
    known = [argument.name for argument in fields(ModelArgs)]
    values = {name: value for name, value in given.items() if name in known and value not in (None, "None")}
    values["dtype"] = None if values.get("dtype") == _AUTO else values.get("dtype")
    size = str(values.get("batch_size", _AUTO))
    values["batch_size"] = int(size) if size.isdigit() else _AUTO
    problems = [
        Problem(name, str(given[name]), "is not an argument of the model petatron", f"Arguments: {', '.join(known)}.")
        for name in given
        if name not in known
    ]
    if not isinstance(values.get("pretrained"), str):
        fix = "Add pretrained=FOLDER: of a run, of a step, or of a Hugging Face model."
        problems.append(Problem("pretrained", "", "is not given", fix))
    if not size.isdigit() and size.partition(":")[0] != _AUTO:
        problems.append(Problem("batch_size", size, "is neither a number nor auto", "Use auto."))
    for name in ("batch_size", "max_batch_size", "max_length", "max_gen_toks"):
        value = values.get(name)
        if value not in (None, _AUTO) and not (_is_int(value) and value >= 1):
            problems.append(Problem(name, str(value), "is not a number of 1 or more", "Leave it out for the default."))
    if not _is_int(values.get("prefix_token_id", 0)):
        problems.append(Problem("prefix_token_id", str(values["prefix_token_id"]), "is not an id", "Give a number."))
    if not isinstance(values.get("add_bos_token", True), bool):
        rule = "is neither True nor False"
        problems.append(
            Problem("add_bos_token", str(values["add_bos_token"]), rule, "Leave it out for the tokenizer's.")
        )
    if values.get("device", "cpu") not in ("cpu", "cuda", "cuda:0"):
        fix = "Use cpu or cuda; CUDA_VISIBLE_DEVICES says which GPU."
        problems.append(Problem("device", str(values["device"]), "is not a device of this model", fix))
    ranks = values.get("tensor_model_parallel_size", 1)
    ranks = world_size if ranks == 1 else ranks
    if ranks != 1:
        rule = "are more ranks than lm_eval drives in one process"
        fix = "Start `petatron serve CHECKPOINT --tp N`, and measure it with --model local-completions."
        problems.append(Problem("tensor_model_parallel_size", str(ranks), rule, fix))
    raise_problems(problems)
    return ModelArgs(**values)


def sampling_params(
    given: Mapping[str, Any], *, default_max_tokens: int, stop_ids: tuple[int, ...], sample: int = 0
) -> SamplingParams:
    """Returns how lm_eval's `generation_kwargs` ask to continue; `ConfigError` for what has no counterpart here.

    Greedy unless a temperature is given, and with `do_sample: false` in any case. `sample` tells repeats of a prompt apart.
    """
    known = ("until", "do_sample", "top_k", "num_beams", *_MAX_TOKEN_NAMES, *_SAMPLING)
    problems = [
        Problem(f"generation_kwargs: {name}", str(given[name]), "is not known here", f"Known: {', '.join(known)}.")
        for name in given
        if name not in known
    ]
    if given.get("num_beams", 1) != 1:
        fix = "Leave it out: answers are greedy or sampled."
        problems.append(Problem("generation_kwargs: num_beams", str(given["num_beams"]), "is a beam search", fix))
    raise_problems(problems)
    until = given.get("until") or []
    values = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
    asked = [given[name] for name in _MAX_TOKEN_NAMES if given.get(name) is not None]
    return SamplingParams(
        **{
            "seed": _SEED,
            **values,
            "temperature": 0.0 if given.get("do_sample") is False else float(given.get("temperature") or 0.0),
            "top_k": given["top_k"] if (given.get("top_k") or 0) > 0 else None,
            "max_new_tokens": int(asked[0]) if asked else default_max_tokens,
            "stop_strings": tuple(text for text in ([until] if isinstance(until, str) else until) if text),
            "stop_ids": stop_ids,
            "sample": sample,
        }
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
