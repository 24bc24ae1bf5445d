"""Arguments of the subcommands that generate text: sampling, sizes of the engine, precision; other words are flags of `petatron train`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from petatron.base.errors import ConfigError, Problem, raise_problems
from petatron.cli.subcommands.command_parser import CHECKPOINT, CommandParser, checkpoint_parser
from petatron.cli.subcommands.run_on_ranks import run_on_ranks
from petatron.config.flags.parse_command_line import known_flags
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from petatron.infer.batch.request_options import RequestOptions
    from petatron.serve.open_engine import ModelSettings, OpenedEngine

_PRECISION_FLAGS = ("--bf16", "--fp16", "--fp64")
_SAMPLING = SamplingParams()
_ENGINE = EngineOptions()
FP8_WEIGHTS_HELP = (
    "quantize the weights of layers to FP8: half the bytes to read for a new token, and less memory; prompts are slower"
)
SPECULATIVE_HELP = "tokens drafted by multi-token prediction and verified in one step; answers stay the same"
GENERATION_CONFIGS = ("auto", "off")
GENERATION_CONFIG_HELP = "whether the model's generation_config.json says how to sample what is not given (auto)"
OTHER_FLAGS = (
    "All other words are flags of `petatron train`, mostly a layout: --tp 2, --pp 2, --ep 2, --dp 2 start as many ranks, and "
    "torchrun and srun work as there. The layout in which the checkpoint was trained does not matter."
)

ADAPTER = "lora"
"""The name of the adapter of a command."""


def generation_parser(
    subcommand: str, usage: str, description: str, *, epilog: str = OTHER_FLAGS, keep_lines: bool = False
) -> CommandParser:
    """Returns the parser of a subcommand that generates: CHECKPOINT, and the arguments of sampling and of the engine."""
    root = checkpoint_parser(subcommand, usage, description, epilog=epilog, keep_lines=keep_lines)
    root.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    _add_sampling_arguments(root)
    _add_engine_arguments(root)
    return root


def _add_sampling_arguments(root: argparse.ArgumentParser) -> None:
    add = root.add_argument_group("sampling").add_argument
    add("--max-tokens", type=int, metavar="N", help="new tokens at most (128, or what there is room for)")
    add("--min-tokens", type=int, metavar="N", help="new tokens at least (0)")
    add("--temperature", type=float, metavar="T", help=f"divides the logits; 0 is greedy ({_SAMPLING.temperature:g})")
    add("--top-k", type=int, metavar="K", help="draw from the K most likely tokens (all)")
    add("--top-p", type=float, metavar="P", help="draw from the most likely tokens of this probability together (1)")
    add("--min-p", type=float, metavar="P", help="draw tokens at least this likely, relative to the likeliest (0)")
    add("--repetition-penalty", type=float, metavar="F", help="divides the logits of tokens that occurred (1)")
    add("--presence-penalty", type=float, metavar="F", help="subtracted for tokens of the answer (0)")
    add("--frequency-penalty", type=float, metavar="F", help="subtracted for each use of a token in the answer (0)")
    add("--generation-config", choices=GENERATION_CONFIGS, default="auto", help=GENERATION_CONFIG_HELP)
    add("--seed", type=int, metavar="N", help=f"draws are a function of it ({_SAMPLING.seed})")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    add("--ignore-eos", action="store_true", help="do not stop at the model's end of text")
    add("--json-schema", type=Path, metavar="FILE", help="the answer is JSON of this schema")
    add("--regex", metavar="REGEX", help="the answer matches this regular expression")


def _add_engine_arguments(root: argparse.ArgumentParser) -> None:
    add = root.add_argument_group("engine").add_argument
    add("--page-size", type=int, metavar="N", help=f"tokens of a page of the cache ({_ENGINE.page_size})")
    add("--num-pages", type=int, metavar="N", help="pages of the cache (what memory allows)")
    add("--max-batch-size", type=int, metavar="N", help=f"sequences that run at once ({_ENGINE.max_sequences})")
    add("--max-batch-tokens", type=int, metavar="N", help=f"tokens of one step ({_ENGINE.max_step_tokens})")
    text = "tokens of prompt and answer together (the model's positions, and one)"
    add("--max-length", type=int, metavar="N", help=text)
    add("--no-prefix-caching", action="store_true", help="compute equal beginnings of prompts again")
    add("--fp8-weights", action="store_true", help=FP8_WEIGHTS_HELP)
    add("--speculative-tokens", type=int, metavar="N", help=f"{SPECULATIVE_HELP} (none)")
    add("--lora", metavar="FOLDER", help="an adapter of PEFT beside the model")
    add("--fp32", action="store_true", help="compute in float32, whatever the weights are stored in")


def engine_options(options: argparse.Namespace) -> EngineOptions:
    """Returns the sizes of the engine; `ConfigError` with all that are wrong."""
    other_names = {"max_sequences": "max_batch_size", "max_step_tokens": "max_batch_tokens"}
    given: dict[str, Any] = {}
    problems: list[Problem] = []
    for name in ("page_size", "num_pages", "max_sequences", "max_step_tokens", "max_length", "speculative_tokens"):
        option, least = other_names.get(name, name), 0 if name == "speculative_tokens" else 1
        value = getattr(options, option)
        if value is not None and value < least:
            flag = f"--{option.replace('_', '-')}"
            problems.append(Problem(flag, str(value), f"is below {least}", "Leave it out for the default."))
        given |= {} if value is None else {name: value}
    raise_problems(problems)
    adapters = () if options.lora is None else ((ADAPTER, options.lora),)
    caching = not options.no_prefix_caching
    return EngineOptions(**given, prefix_caching=caching, fp8_weights=options.fp8_weights, adapters=adapters)


def request_options(options: argparse.Namespace) -> RequestOptions:
    """Returns how prompts are continued; `ConfigError` with all that is wrong, also where a package is missing."""
    from petatron.infer.batch.request_options import OPTIONS, RequestOptions
    from petatron.infer.grammar import check_constraint_library

    values = {name: value for name in OPTIONS if (value := getattr(options, name, None)) is not None}
    problems: list[Problem] = []
    request = RequestOptions(SamplingParams())
    if options.json_schema is not None:
        values["json_schema"] = _read_schema(options.json_schema, problems)
    try:
        request = request.with_options(values)
    except ConfigError as error:
        problems += [replace(problem, where=f"--{problem.where.replace('_', '-')}") for problem in error.problems]
    raise_problems(problems)
    if getattr(options, "lora", None) is not None:
        request = replace(request, params=replace(request.params, adapter=ADAPTER))
    if request.params.constraint is not None:
        check_constraint_library()
    return request


def _read_schema(path: Path, problems: list[Problem]) -> str | None:
    try:
        text = path.read_text()
        json.loads(text)
        return text
    except OSError as error:
        problems.append(Problem("--json-schema", str(path), f"cannot be read: {error.strerror}", "Give a JSON file."))
    except (ValueError, RecursionError) as error:
        problems.append(Problem("--json-schema", str(path), f"is not JSON: {error}", "Give the schema as JSON."))
    return None


@dataclass(frozen=True, slots=True)
class GenerationCommand:
    """What a subcommand was asked: a checkpoint, and flags of the model and its layout."""

    options: argparse.Namespace
    flags: list[str]
    request: RequestOptions
    engine: EngineOptions

    @property
    def dtype(self) -> str | None:
        return "fp32" if self.options.fp32 else None

    @property
    def precision(self) -> str:
        """The name of the precision that was asked for."""
        given = [flag[2:] for flag in self.flags if flag in _PRECISION_FLAGS]
        return self.dtype or (given[0] if given else "that of the weights")

    def with_model_defaults(self, settings: ModelSettings) -> RequestOptions:
        """Returns the options of requests that also end at the model's own ids, and sample as its makers recommend unless flags say
        otherwise."""
        ids = () if self.options.ignore_eos else settings.stop_ids
        changes: dict[str, Any] = {"stop_ids": ids}
        if self.options.generation_config == "auto":
            defaults = settings.sampling_defaults().as_params()
            changes |= {name: value for name, value in defaults.items() if getattr(self.options, name) is None}
        return replace(self.request, params=replace(self.request.params, **changes))


GenerationWork = Callable[[GenerationCommand, "ModelSettings"], Callable[["OpenedEngine"], None]]
"""Checks what can be checked before a model is loaded, on every rank; returns what to do with it on the first one."""


def read_command(parser: CommandParser, argv: Sequence[str]) -> GenerationCommand:
    options, flags = parser.parse_known_args(list(argv))
    others = known_flags()
    unknown = [word for word in flags if word.partition("=")[0] not in others]
    meant = {word: parser.closest_flag(word, others=others) for word in unknown}
    misspelt = {word: flag for word, flag in meant.items() if flag is not None}
    raise_problems(Problem(word, "", "is not a known flag", f"Did you mean {flag}?") for word, flag in misspelt.items())
    if options.fp32 and any(word in _PRECISION_FLAGS for word in flags):
        raise ConfigError([Problem("--fp32", "", "and another precision are two", "Give one.")])
    if flags and not flags[0].startswith("-"):
        raise ConfigError([Problem("CHECKPOINT", flags[0], "is a second checkpoint", "Give one.")])
    return GenerationCommand(options, flags, request_options(options), engine_options(options))


def generate_on_ranks(
    subcommand: str, argv: Sequence[str], command: GenerationCommand, work: GenerationWork, *, interactive: bool
) -> int:
    """Opens the engine on every rank; the first one does the work with it, and the others follow."""
    from petatron.serve.open_engine import model_settings, open_engine

    def read_models() -> list[ModelSettings]:
        checkpoint, weights = command.options.checkpoint, command.options.weights
        return [model_settings(checkpoint, command.flags, options=command.engine, weights=weights)]

    def run_rank(models: Sequence[ModelSettings]) -> int:
        run = work(command, models[0])
        opened = open_engine(models[0], dtype=command.dtype)
        if opened.model.mesh.world.rank == 0:
            run(opened)
            opened.engine.close()
        else:
            opened.engine.follow()
        return 0

    return run_on_ranks(subcommand, argv, read_models, run_rank, interactive=interactive)
