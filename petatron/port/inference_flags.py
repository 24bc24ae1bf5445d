"""Translates the flags of Megatron's inference scripts to those of `petatron generate` and `petatron serve`, by one table.

A flag is passed on under our name, changes nothing here (with the reason), or is refused with what to use instead. Flags that describe the
model or its training are not needed, since the checkpoint says them; of the other flags of `petatron train`, layout and precision are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from petatron.base.errors import ConfigError, Problem
from petatron.config.flags.parse_command_line import parse_flags
from petatron.config.schema.fields import fields_by_path

RENAMED = {
    "--num-tokens-to-generate": ("--max-tokens", ""),
    "--temperature": ("--temperature", ""),
    "--top-k": ("--top-k", "0"),  # a value that means all tokens is left out
    "--top-p": ("--top-p", "0"),
    "--top-n-logprobs": ("--logprobs", ""),
    "--seed": ("--seed", ""),
    "--inference-max-seq-length": ("--max-length", ""),
    "--inference-max-requests": ("--max-batch-size", ""),
    "--inference-dynamic-batching-max-requests": ("--max-batch-size", ""),
    "--inference-dynamic-batching-max-requests-override": ("--max-batch-size", ""),
    "--inference-dynamic-batching-max-tokens-override": ("--max-batch-tokens", ""),
    "--inference-max-requests-override": ("--max-batch-size", ""),
    "--inference-dynamic-batching-max-tokens": ("--max-batch-tokens", ""),
    "--inference-dynamic-batching-block-size": ("--page-size", ""),
    "--num-speculative-tokens": ("--speculative-tokens", "0"),
    "--out-seq-length": ("--max-tokens", ""),
    "--max-batch-size": ("--max-batch-size", ""),
}
"""Megatron's name -> ours in `petatron generate`, and the value that asks for nothing."""

SERVER_NAMES = {"--max-batch-size": "--max-sequences", "--max-batch-tokens": "--max-step-tokens"}
"""The name in `petatron serve` of what `petatron generate` calls otherwise."""

_MEMORY = "the cache takes what memory allows"
_GRAPHS = "CUDA graphs are recorded where they help"
_REPEAT = "prompts are answered once, as fast as the engine can"
_KERNELS = "kernels are not chosen by flags"
_REPLICAS = "replicas (--dp N) take requests in turn, and need no port of their own"
_NO_PAUSE = "the engine keeps its memory between requests; answers are the same"
_CACHE_TEST = "it makes prompts that test the cache of equal beginnings; the prompts that are given are answered"
COORDINATOR = "--use-coordinator"
"""Asks for several replicas that share the requests; the ranks that are started decide how many, or --dp."""
_PREFIX = "--inference-dynamic-batching-prefix-caching"
WITHOUT_EFFECT = {
    "--max-tokens-to-oom": _MEMORY,
    "--inference-dynamic-batching-buffer-size-gb": _MEMORY,
    "--inference-dynamic-batching-paused-buffer-size-gb": _MEMORY,
    "--inference-dynamic-batching-unified-memory-level": _MEMORY,
    "--inference-buffer-size-gb": _MEMORY,
    "--inference-buffer-guaranteed-fraction": _MEMORY,
    "--inference-buffer-overflow-factor": _MEMORY,
    "--inference-dynamic-batching-buffer-guaranteed-fraction": _MEMORY,
    "--inference-dynamic-batching-buffer-overflow-factor": _MEMORY,
    "--inference-dynamic-batching-mamba-memory-ratio": _MEMORY,
    f"{_PREFIX}-mamba-gb": _MEMORY,
    f"{_PREFIX}-coordinator-policy": _REPLICAS,
    f"{_PREFIX}-routing-alpha": _REPLICAS,
    "--inference-coordinator-port": _REPLICAS,
    COORDINATOR: _REPLICAS,
    "--suspend-resume-interval": _NO_PAUSE,
    "--suspend-timeout": _NO_PAUSE,
    "--rl-kv-cache-management-mode": _NO_PAUSE,
    "--rl-persist-cuda-graphs": _NO_PAUSE,
    "--no-rl-persist-cuda-graphs": _NO_PAUSE,
    "--prefix-cache-compare": _CACHE_TEST,
    "--prefix-cache-stress-copies": _CACHE_TEST,
    "--prefix-cache-stress-groups": _CACHE_TEST,
    "--prefix-cache-stress-prompt-tokens": _CACHE_TEST,
    "--prefix-cache-stress-staged": _CACHE_TEST,
    "--async-mode": "requests are always submitted without waiting for others",
    "--skip-prompt-log-probs": "answers alone have log-probabilities",
    "--moe-enable-routing-replay": "routing is not recorded; answers are the same",
    _PREFIX: "equal beginnings of prompts are always computed once",
    f"{_PREFIX}-eviction-policy": "the page that was not used for longest goes first",
    "--inference-dynamic-batching-num-cuda-graphs": _GRAPHS,
    "--inference-dynamic-batching-cuda-graph-sizing-distribution": _GRAPHS,
    "--inference-cuda-graph-scope": _GRAPHS,
    "--decode-only-cuda-graphs": _GRAPHS,
    "--cuda-graph-impl": _GRAPHS,
    "--cuda-graph-modules": _GRAPHS,
    "--moe-pad-experts-for-cuda-graph-inference": _GRAPHS,
    "--inference-dynamic-batching-sampling-backend": _KERNELS,
    "--inference-grouped-gemm-backend": _KERNELS,
    "--inference-moe-token-dispatcher-type": _KERNELS,
    "--inference-fuse-tp-communication": _KERNELS,
    "--use-flashinfer-fused-rope": _KERNELS,
    "--attention-backend": _KERNELS,
    "--mamba-inference-conv-states-dtype": "windows of convolutions are kept in the precision of the model",
    "--mamba-inference-ssm-states-dtype": "states of Mamba-2 are kept in fp32",
    "--enable-chunked-prefill": "long prompts are always computed in chunks",
    "--use-legacy-static-engine": "there is one engine",
    "--inference-dynamic-batching-async-sched-mode": "there is one way to schedule",
    "--inference-dynamic-batching": "requests are always batched as they come",
    "--inference-logging-step-interval": "the engine writes no log of its steps",
    "--inference-ckpt-non-strict": "what generation does not need is never read",
    "--inference-rng-tracker": "draws are a function of the seed",
    "--inference-repeat-n": _REPEAT,
    "--incoming-requests-per-step": _REPEAT,
    "--incoming-requests-per-sec": _REPEAT,
    "--incoming-requests-duration": _REPEAT,
    "--num-tokens-to-prompt": "prompts are text; those of random tokens are for `petatron bench generate`",
    "--batch-boundaries": _REPEAT,
    "--drain-between-batches": _REPEAT,
    "--no-record-throughput": "speed is measured by `petatron bench generate`",
    "--model-provider": "the checkpoint says which model it is",
    "--output-every-n-results": "all answers are written",
    "--dist-ckpt-strictness": "what generation does not need is never read",
}
"""Flags that are accepted and change nothing, with the reason."""

REFUSED = {
    "--lora-path": "Merge the adapter into the model first.",
}
"""Flags that ask for something else, with what to use."""

_ANSWERS = "--n"
TOKENIZER = (
    *("--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file", "--vocab-extra-ids"),
    *("--tokenizer-special-tokens", "--tokenizer-sentencepiece-legacy", "--tokenizer-hf-no-use-fast"),
)
"""Flags of a tokenizer, which are passed on if it can be read here; otherwise the checkpoint's own takes its place."""

_KEPT_SETTINGS = (
    *("parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"),
    *("parallel.expert_model_parallel_size", "parallel.expert_tensor_parallel_size"),
    *("precision.bf16", "precision.fp16"),
)
_SAMPLING = (
    "--max-tokens",
    "--temperature",
    "--top-k",
    "--top-p",
    "--logprobs",
    "--seed",
    "--stop",
    "--page-size",
    "--ignore-eos",
)
DEFAULTS = {"--max-tokens": "30", "--temperature": "1.0", "--top-k": "1"}
"""Megatron's scripts generate 30 tokens and take the likeliest, unless they are told otherwise."""


@dataclass(slots=True)
class InferenceArguments:
    """A command line of Megatron's: what is read here, and `flags` for `petatron generate` or `serve`."""

    checkpoint: str | None = None
    prompts: list[str] = field(default_factory=list)
    prompt_file: str | None = None
    prompt_limit: int | None = None
    output_path: str | None = None
    return_log_probs: bool = False
    flags: list[str] = field(default_factory=list)
    tokenizer: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def value_of(self, name: str) -> str | None:
        """Returns the value of one of our flags, if it is there."""
        return self.flags[self.flags.index(name) + 1] if name in self.flags else None


def _read_termination_id(arguments: InferenceArguments, value: str) -> None:
    if value == "-1":
        arguments.flags.append("--ignore-eos")
    else:
        fix = "Use --stop-words, or leave it out: answers end at the model's end of text."
        arguments.problems.append(Problem("--termination-id", value, "names an id, and only -1 is understood", fix))


def _read_prompt_limit(arguments: InferenceArguments, value: str) -> None:
    if value.isdecimal() and int(value) > 0:
        arguments.prompt_limit = int(value)
    else:
        rule, fix = "is not a number above 0", "Say how many prompts of the file are answered."
        arguments.problems.append(Problem("--prompt-file-num-truncate", value, rule, fix))


_READ: dict[str, Callable[[InferenceArguments, str], None]] = {
    "--load": lambda arguments, value: setattr(arguments, "checkpoint", value),
    "--output-path": lambda arguments, value: setattr(arguments, "output_path", value),
    "--prompt-file": lambda arguments, value: setattr(arguments, "prompt_file", value),
    "--sample-input-file": lambda arguments, value: setattr(arguments, "prompt_file", value),
    "--sample-output-file": lambda arguments, value: setattr(arguments, "output_path", value),
    "--genfile": lambda arguments, value: setattr(arguments, "output_path", value),
    "--num-samples": lambda arguments, value: arguments.flags.extend((_ANSWERS, value)),
    "--prompt-file-num-truncate": _read_prompt_limit,
    "--termination-id": _read_termination_id,
}


def _flag_groups(argv: Sequence[str]) -> list[tuple[str, str, list[str]]]:
    """Returns each flag as typed, with dashes for underscores, and its values; a value after `=` is one of them."""
    groups: list[tuple[str, str, list[str]]] = []
    for text in argv:
        if text.startswith("--"):
            typed, equals, value = text.partition("=")
            groups.append((typed, typed.replace("_", "-"), [value] if equals else []))
        elif groups:
            groups[-1][2].append(text)
        else:
            groups.append((text, "", []))
    return groups


def read_arguments(argv: Sequence[str]) -> InferenceArguments:
    """Reads a command line of Megatron's inference scripts; problems and notices are in the result."""
    arguments = InferenceArguments()
    for typed, name, values in _flag_groups(argv):
        value = values[0] if values else ""
        if not name:
            arguments.problems.append(Problem(typed, "", "is not a flag", "Flags begin with --."))
        elif name in REFUSED:
            arguments.problems.append(Problem(typed, value, "is not in this version", REFUSED[name]))
        elif name in WITHOUT_EFFECT:
            arguments.notices.append(f"{typed} is accepted and changes nothing: {WITHOUT_EFFECT[name]}")
        elif name == "--prompts":
            arguments.prompts += values
        elif name == "--stop-words":
            arguments.flags += [part for text in values for part in ("--stop", text)]
        elif name == "--return-log-probs":
            arguments.return_log_probs = True
        elif name in TOKENIZER or name.startswith("--tiktoken-"):
            arguments.tokenizer += [name, *values]
        elif name not in RENAMED and name not in _READ:
            arguments.others += [typed, *values]
        elif len(values) != 1:
            arguments.problems.append(Problem(typed, " ".join(values), "takes one value", "Give one."))
        elif name in _READ:
            _READ[name](arguments, value)
        elif not _asks_for_nothing(value, RENAMED[name][1]):
            arguments.flags += [RENAMED[name][0], value]
        else:
            arguments.flags += [RENAMED[name][0], ""]  # said, so that no default takes its place
    if arguments.prompt_file is not None and _ANSWERS in arguments.flags:  # there it is the number of prompts
        at = arguments.flags.index(_ANSWERS)
        _read_prompt_limit(arguments, arguments.flags[at + 1])
        del arguments.flags[at : at + 2]
    return arguments


def _asks_for_nothing(value: str, nothing: str) -> bool:
    try:
        return bool(nothing) and float(value) == float(nothing)
    except ValueError:
        return False


def generate_flags(arguments: InferenceArguments) -> list[str]:
    """Returns the flags of `petatron generate`, with Megatron's defaults; `ConfigError` with every problem of the command line."""
    flags = sampling_flags(arguments)
    if arguments.checkpoint is None:
        arguments.problems.append(Problem("--load", "", "is not given", "Name the folder of a checkpoint."))
    if bool(arguments.prompts) == (arguments.prompt_file is not None):
        rule = "or --prompt-file says what to continue; one of them"
        rule += " alone" if arguments.prompts else " is needed"
        arguments.problems.append(Problem("--prompts", "", rule, "Add --prompts 'Once upon a time', say."))
    if arguments.problems:
        raise ConfigError(arguments.problems)
    return flags


def sampling_flags(arguments: InferenceArguments) -> list[str]:
    """Returns the flags of `petatron generate` besides what is continued, and by which model; problems are added."""
    kept, dropped = _flags_of_train(arguments)
    if dropped:
        arguments.notices.append(f"not needed, the checkpoint says the model: {', '.join(dropped)}")
    flags = list(arguments.flags)
    if "--top-p" in flags and "--top-k" not in flags and arguments.value_of("--top-p"):
        flags += ["--top-k", ""]  # Megatron refuses both, and its default is one of them
    for name, value in DEFAULTS.items():
        flags += [] if name in flags else [name, value]
    flags += [] if "--logprobs" in flags else ["--logprobs", "0"]  # answers then have the ids of their tokens
    return [*_without_empty(flags), *kept, "--generation-config", "off"]


def server_flags(argv: Sequence[str]) -> list[str]:
    """Returns the flags of `petatron serve` for a command line of Megatron's server; sampling is a matter of requests there."""
    flags: list[str] = []
    for typed, name, values in _flag_groups(argv):
        ours = RENAMED.get(name, ("", ""))[0]
        engine = name.startswith("--inference-") or name == "--num-speculative-tokens"
        if name in REFUSED:
            raise ConfigError([Problem(typed, " ".join(values), "is not in this version", REFUSED[name])])
        if engine and ours:
            flags += [SERVER_NAMES.get(ours, ours), *values] if ours != "--page-size" else []
        elif name not in WITHOUT_EFFECT:
            flags += [typed, *values]
    return flags


def serve_flags(arguments: InferenceArguments) -> list[str]:
    """Returns the flags of `petatron serve` for a server's command line that was read; how to sample is left to requests."""
    kept, dropped = _flags_of_train(arguments)
    if dropped:
        arguments.notices.append(f"not needed, the checkpoint says the model: {', '.join(dropped)}")
    pairs = [(name, arguments.value_of(name)) for name in arguments.flags if name.startswith("--")]
    if sampling := [name for name, _ in pairs if name in _SAMPLING]:
        arguments.notices.append(f"each request says it: {', '.join(sampling)}")
    engine = [(SERVER_NAMES.get(name, name), value) for name, value in pairs if name not in _SAMPLING and value]
    return [*(text for pair in engine for text in pair), *kept]


def _without_empty(flags: Sequence[str]) -> list[str]:
    """Returns flags without those whose value is empty."""
    empty = {index for index, text in enumerate(flags) if text == "" and index}
    return [text for index, text in enumerate(flags) if index not in empty and index + 1 not in empty]


def _flags_of_train(arguments: InferenceArguments) -> tuple[list[str], list[str]]:
    """Returns those of layout, precision and tokenizer under our names, and the spellings of the others; problems are added.

    A value of a setting that generation does not read may be wrong.
    """
    parsed = parse_flags(arguments.others)
    unread = {info.flag for path, info in fields_by_path().items() if path not in _KEPT_SETTINGS}
    arguments.problems += [problem for problem in parsed.problems if problem.where.replace("_", "-") not in unread]
    kept: list[str] = []
    for setting in parsed.settings:
        if setting.path in _KEPT_SETTINGS:
            info = fields_by_path()[setting.path]
            kept += [info.flag] if setting.value is True else [info.flag, str(setting.value)]
    dropped = [setting.origin.detail for setting in parsed.settings if setting.path not in _KEPT_SETTINGS]
    if unknown := parse_flags(arguments.tokenizer).problems:
        arguments.notices.append(f"the checkpoint's tokenizer is used: {unknown[0]}")
    else:
        kept += arguments.tokenizer
    return kept, list(dict.fromkeys(map(str, dropped)))
