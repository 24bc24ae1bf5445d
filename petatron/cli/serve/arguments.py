"""The flags of `petatron serve`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.base.untrusted_files import read_limited_bytes
from petatron.cli.generation.arguments import (
    FP8_WEIGHTS_HELP,
    GENERATION_CONFIG_HELP,
    GENERATION_CONFIGS,
    SPECULATIVE_HELP,
)
from petatron.cli.serve.key_file import check_key_file
from petatron.cli.subcommands.command_parser import WEIGHTS_HELP, CommandParser
from petatron.infer.engine_options import EngineOptions
from petatron.infer.split_answer_parts import REASONING_FORMATS
from petatron.infer.tool_calls import TOOL_CALL_FORMATS
from petatron.mesh.launch.environment import api_key_from_env
from petatron.serve.item_names import ITEM_NAMES_FLAG
from petatron.serve.serve_options import BODY_BYTES_WITH_IMAGES, ServeLimits, ServeOptions, flag_of

_MAX_FILE_BYTES = 1 << 20
_LIMITS = {
    "max_body_bytes": "bytes of one request",
    "max_prompt_tokens": "tokens of one prompt",
    "max_tokens": "new tokens of one answer",
    "max_batch": "prompts of one request",
    "max_n": "answers to one prompt",
    "max_open": "sequences waiting and running; more are refused with 429",
    "max_images": "images of one request",
    "max_image_bytes": "bytes of one image",
    "max_image_pixels": "pixels of one image, by its header",
    "max_logprobs": "log-probabilities in the answer to one request",
    "max_connections": "connections and requests open at once; more are refused with 503",
    "max_connections_per_address": "connections from one address",
    "max_header_bytes": "bytes of a request's headers; more are refused with 431",
    "max_headers": "headers of a request",
    "header_timeout_s": "seconds until a request's headers are complete",
    "request_timeout_s": "seconds that a request may take",
    "drain_timeout_s": "seconds that open requests have after SIGTERM",
    "isolation_timeout_s": "seconds to compile a grammar or to render a chat template",
    "isolation_memory_bytes": "bytes of memory for that",
}
_ENGINE = {
    "max_sequences": "sequences of one step",
    "max_step_tokens": "tokens of one step; longer prompts are cut into chunks",
    "max_length": "tokens of prompt and answer together",
    "num_pages": "pages of the key/value cache",
    "speculative_tokens": SPECULATIVE_HELP,
}
# Flags of Megatron's server for what its engine needs to know beforehand, with their values; here requests say it, or memory decides.
MEGATRON_FLAGS = (
    "--inference-max-seq-length",
    "--inference-max-requests",
    "--inference-batch-times-seqlen-threshold",
    "--max-tokens-to-oom",
    "--out-seq-length",
    "--temperature",
    "--top_k",
    "--top_p",
)


def parser() -> argparse.ArgumentParser:
    root = CommandParser(
        prog="petatron serve",
        usage="petatron serve CHECKPOINT [options] [flags of petatron train]",
        description="Serve a model over HTTP: OpenAI's /v1/completions, /v1/chat/completions, /v1/responses and /v1/embeddings, Megatron's "
        "PUT /api, and /metrics. CHECKPOINT is the folder of a run (its newest step), of a step, or of a Hugging Face model.",
        epilog="All other words are flags of `petatron train` that say how the model is computed, for example --tp 2 or --bf16. "
        "A key for clients comes from --api-key-file or PETATRON_API_KEY; it is required unless --host is this machine alone.",
    )
    defaults = ServeOptions()
    add = root.add_argument
    add("--load", help=argparse.SUPPRESS)
    add("--weights", metavar="KIND", help=WEIGHTS_HELP)
    add("--host", default=defaults.host, help=f"address to listen on ({defaults.host})")
    add("--port", type=int, default=defaults.port, help=f"port to listen on; 0: any free one ({defaults.port})")
    add("--api-key-file", type=Path, metavar="FILE", help="keys that clients may send, one a line")
    text = "a name in the Host header besides this machine's own, for clients behind a proxy or DNS; again for more; '*': any"
    add("--allowed-host", action="append", default=[], metavar="NAME", help=text)
    add("--served-model-name", metavar="NAME", help="the model's name in requests and answers (the folder's)")
    add("--chat-template", type=Path, metavar="FILE", help="jinja template for chats, instead of the tokenizer's")
    formats = ("auto", *TOOL_CALL_FORMATS, "none")
    text = "how the model writes calls of tools; auto: as its chat template shows (auto)"
    add("--tool-call-format", choices=formats, default=defaults.tool_call_format, help=text)
    formats = ("auto", *REASONING_FORMATS, "none")
    text = "tags around the model's reasoning, which answers then have apart; auto: as its chat template shows (auto)"
    add("--reasoning-format", choices=formats, default=defaults.reasoning_format, help=text)
    text = "names of a recommender's items, a line each; without it clients of /v1/recommend send numbers"
    add(ITEM_NAMES_FLAG, type=Path, metavar="FILE", help=text)
    add("--generation-config", choices=GENERATION_CONFIGS, default="auto", help=GENERATION_CONFIG_HELP)
    add("--watch", action="store_true", help="follow a training run: swap to its newest sound step between requests")
    add("--watch-interval", type=float, default=5.0, metavar="S", help="seconds between two looks (5)")
    for names, owner in ((_LIMITS, ServeLimits()), (_ENGINE, EngineOptions())):
        for name, text in names.items():
            default = getattr(owner, name)
            shown = "what the model has positions for" if default is None else f"{default:,}"
            shown = "what memory allows" if name == "num_pages" else shown
            if name == "max_body_bytes":  # which depends on the model
                default, shown = None, f"{shown}; {BODY_BYTES_WITH_IMAGES:,} for a model that reads images"
            kind = float if name.endswith("_s") else int
            add(flag_of(name), dest=name, type=kind, default=default, metavar="N", help=f"{text} ({shown})")
    text = "an adapter beside the model, which requests name as theirs; again for more"
    add("--lora", action="append", default=[], metavar="NAME=FOLDER", help=text)
    text = "compute equal beginnings of prompts once for all API keys, not for each: for keys of one owner"
    add("--share-prefixes", action="store_true", help=text)
    add("--no-prefix-caching", action="store_true", help="compute equal beginnings of prompts again")
    add("--fp8-weights", action="store_true", help=FP8_WEIGHTS_HELP)
    for flag in MEGATRON_FLAGS:
        add(flag, dest="ignored", help=argparse.SUPPRESS)
    return root


def checkpoint_folder(given: Sequence[str]) -> Path:
    if len(given) != 1:
        rule, fix = "is given twice" if given else "is not given", "Name it first: petatron serve FOLDER [flags]"
        raise ConfigError([Problem("CHECKPOINT", " ".join(given), rule, fix)])
    path = Path(given[0])
    if not path.is_dir():
        fix = "Give the folder of a run, of one of its steps, or of a Hugging Face model."
        raise ConfigError([Problem("CHECKPOINT", str(path), "is not a folder", fix)])
    return path


def serve_options(args: argparse.Namespace, checkpoint: Path) -> ServeOptions:
    keys = [] if args.api_key_file is None else _read_keys(args.api_key_file)
    if args.api_key_file is not None and not keys:
        fix = "Write one key a line into it."
        raise ConfigError([Problem("--api-key-file", str(args.api_key_file), "has no key", fix)])
    exported = api_key_from_env()
    limits = {name: value for name in _LIMITS if (value := getattr(args, name)) is not None}
    named = "host port served_model_name share_prefixes tool_call_format reasoning_format".split()
    options = ServeOptions(
        **{name: getattr(args, name) for name in named},
        api_keys=(*keys, *([exported] if exported else [])),
        allowed_hosts=tuple(args.allowed_host),
        adapters=tuple(name for name, _ in named_adapters(args.lora)),
        limits=ServeLimits(**limits),
    )
    options.check()
    from petatron.checkpoint.files.step_list import containing_step, list_steps

    is_run = containing_step(checkpoint) is None and bool(list_steps(checkpoint))
    if args.watch and (not args.watch_interval > 0 or not is_run):
        rule = "needs the folder of a run with at least one step, and an interval above 0"
        raise ConfigError([Problem("--watch", str(checkpoint), rule, "Give the folder that --save wrote to.")])
    return options


def _read_keys(path: Path) -> list[str]:
    content = read_text(path, "--api-key-file")
    check_key_file(path)
    return content.split()


def read_text(path: Path, flag: str) -> str:
    try:
        return read_limited_bytes(path, _MAX_FILE_BYTES).decode()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{flag} {path} cannot be read: {why}. Give a text file.") from error


def engine_options(args: argparse.Namespace) -> EngineOptions:
    values = {name: getattr(args, name) for name in _ENGINE}
    caching, adapters = not args.no_prefix_caching, named_adapters(args.lora)
    return EngineOptions(**values, prefix_caching=caching, fp8_weights=args.fp8_weights, adapters=adapters)


def named_adapters(given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Returns the names and folders of adapters; `ConfigError` for what is none, or is named twice."""
    adapters = [(name, str(Path(folder).absolute())) for name, _, folder in (text.partition("=") for text in given)]
    names = [name for name, _ in adapters]
    problems = [
        Problem("--lora", text, "is no NAME=FOLDER", "Write, say, --lora mine=runs/adapter.")
        for text in given
        if not all(text.partition("="))
    ]
    problems += [Problem("--lora", n, "is named twice", "Give each a name.") for n in names if names.count(n) > 1][:1]
    if problems:
        raise ConfigError(problems)
    return tuple(adapters)
