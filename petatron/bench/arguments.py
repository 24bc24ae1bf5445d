"""The arguments of every bench. Without torch, so that `petatron bench NAME --help` answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from petatron.base.errors import Problem
from petatron.bench.measure.check_arguments import minimum_problems
from petatron.bench.measure.memory_cases import CASES
from petatron.bench.measure.suite_models import ENTRIES
from petatron.bench.peers import OURS, OWN_BF16, PEER_ATTENTIONS, PEERS

OPERATION_NAMES = (
    "norm",
    "activation",
    "rotary",
    "loss",
    "embedding",
    "weight-grad-gemm",
    "fp8",
    "scan",
    "delta",
    "channel-delta",
    "latent-decode",
    "recurrent-decode",
    "attention",
    "moe",
)
"""What `petatron bench kernels` measures."""
SERVED_PRESET = "tiny-llama"
SUITE_SECONDS = 600.0
_WORLD_SIZES = "64,512,1024,4096,16384"
_RUN_EPILOG = "Every other word is the {}'s own: a preset's name, --seq-length, {}--device{} ..."


class Count(NamedTuple):
    """A flag for a whole number, with its default, the least that it may be, and its help."""

    flag: str
    default: int
    least: int
    help: str


COUNTS: Mapping[str, Sequence[Count]] = {
    "data": (Count("--repeat", 3, 1, "alternations, at least 3"),),
    "checkpoint": (
        Count("--repeat", 4, 1, "rounds, at least 4, rounded up to an even number"),
        Count("--busy-processes", 0, 0, "busy processes of the bench that run during what is timed"),
    ),
    "optimizer": (Count("--repeat", 10, 1, "rounds, at least 4, made even"),),
    "kernels": (Count("--repeat", 10, 1, "rounds, made even"),),
    "train": (
        Count("--steps", 20, 1, "timed steps of each"),
        Count("--block", 5, 1, "steps before the turn changes"),
    ),
    "generate": (
        Count("--prompt-tokens", 64, 1, "length of the prompt"),
        Count("--new-tokens", 32, 2, "tokens to make, at least 2"),
        Count("--repeat", 4, 1, "rounds, made even against a peer"),
        Count("--batch", 1, 1, "prompts at once"),
        Count("--speculative-tokens", 0, 0, "tokens that our side drafts"),
    ),
    "stream": (
        Count("--requests", 256, 1, "requests at once"),
        Count("--shortest", 16, 1, "of prompts and answers"),
        Count("--longest", 2048, 1, "of prompts and answers"),
        Count("--max-batch-size", 256, 1, "that run at once"),
    ),
    "serve": (
        Count("--clients", 64, 1, "clients at once"),
        Count("--requests", 4, 1, "of each client in a round"),
        Count("--prompt-tokens", 64, 1, "length of prompts"),
        Count("--new-tokens", 32, 2, "of the longest answer; others have from half"),
        Count("--repeat", 4, 1, "rounds, made even"),
        Count("--first-tokens", 100, 1, "requests for each time to first token"),
    ),
    "posttrain": (
        Count("--steps", 12, 2, "steps of each run"),
        Count("--first-steps", 4, 1, "of them that are not counted"),
        Count("--repeat", 1, 1, "runs of each side"),
        Count("--rank", 16, 1, "of LoRA"),
        Count("--prompts", 64, 1, "of a step of GRPO"),
        Count("--answers", 8, 2, "to each prompt"),
        Count("--prompt-tokens", 64, 16, "about, of a prompt"),
        Count("--answer-tokens", 512, 1, "of an answer"),
        Count("--peer-rows", 32, 1, "answers that the peer trains on at a time"),
    ),
    "scale": (
        Count("--tp", 8, 1, "tensor parallel at most"),
        Count("--pp", 16, 1, "pipeline parallel at most"),
        Count("--cp", 1, 1, "context parallel at most"),
        Count("--virtual", 1, 1, "stages per pipeline rank"),
        Count("--microbatches", 64, 1, "per step"),
    ),
}
"""By bench."""


def add_arguments(bench: str, parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a bench."""
    for count in COUNTS.get(bench, ()):
        text = f"{count.help} (default: {count.default})"
        parser.add_argument(count.flag, type=int, default=count.default, metavar="N", help=text)
    _ADD_OTHERS[bench](parser)


def count_problems(bench: str, args: argparse.Namespace) -> list[Problem]:
    """Returns problems of the counts that are below their minimum."""
    given = {count.flag: getattr(args, count.flag[2:].replace("-", "_")) for count in COUNTS[bench]}
    return minimum_problems({count.flag: (given[count.flag], count.least) for count in COUNTS[bench]})


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where (default: auto)")


def _add_only(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Adds the `--only` of a bench that measures several things; `select_names` parses it."""
    listed = f"some of {', '.join(names)}, with commas or spaces (default: all)"
    parser.add_argument("--only", action="extend", nargs="+", default=[], metavar="NAME", help=listed)


def _add_repeated(parser: argparse.ArgumentParser, flag: str, metavar: str, text: str) -> None:
    """Adds a flag that may be given again."""
    parser.add_argument(flag, action="append", default=[], metavar=metavar, help=text)


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size-mb", type=float, default=20.0, metavar="MB", help="text to tokenize (default: 20)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes on both sides (default: 2)")
    parser.add_argument("--vocab", type=int, default=8192, metavar="N", help="size of the tokenizer (default: 8192)")
    documents = "documents of the sample index (default: 10 million)"
    parser.add_argument("--documents", type=int, default=10_000_000, metavar="N", help=documents)
    against = (
        "also time the loop of Megatron-LM's tools/preprocess_data.py on the same corpus, with transformers' tokenizer"
    )
    parser.add_argument("--against", choices=("megatron",), help=against)


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gigabytes", type=float, default=2.0, metavar="G", help="size of the checkpoint (default: 2)")
    parser.add_argument("--folder", metavar="F", help="where to write, and so which disk is measured (default: here)")
    parser.add_argument("--only", choices=("save", "load"), help="measure only saving, or only loading (default: both)")
    sessions = (
        "give each of these a session of its own, like a job of somebody else: where the kernel shares the CPU between "
        "sessions, more threads do not get more of it"
    )
    parser.add_argument("--busy-own-sessions", action="store_true", help=sessions)


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parameters", type=float, metavar="N", help="size of the model (1.24e9; on a CPU 4e6)")
    _add_device(parser)
    parser.add_argument("--moments", choices=("fp32", "bf16"), default="fp32", help="format of both (default: fp32)")
    parser.add_argument("--main-grads", choices=("fp32", "bf16"), default="fp32", help="of gradients (default: fp32)")
    parser.add_argument("--offload-fraction", type=float, default=0.0, metavar="F", help="in host memory (default: 0)")


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _RUN_EPILOG.format("run", "--micro-batch-size, ", "")
    peers = f"{', '.join(PEERS[:-1])}, or {OWN_BF16}: our own step without its FP8 flags; several with commas, or given again"
    _add_repeated(parser, "--against", "PEER", peers)
    _add_repeated(parser, "--peer-path", "DIR", "folder with a peer's source; may be given again")
    parser.add_argument("--only", choices=(OURS, *PEERS), help="measure this one alone")
    parser.add_argument("--apart", action="store_true", help="a process of its own for each, one after the other")
    warmup = "real steps before timing (default: 20)"
    parser.add_argument("--warmup-seconds", type=float, default=20.0, metavar="S", help=warmup)
    parser.add_argument("--fp8-recipe", metavar="NAME", help="FP8 hybrid by this recipe, on all sides but bf16")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, on both sides")
    gathered = "torchtitan: no second gathering of weights; more memory"
    parser.add_argument("--peer-keeps-gathered", action="store_true", help=gathered)
    kernels = "torchtitan 0.3: cuDNN's or FlashAttention's kernels, or its default for packed documents (default: sdpa)"
    parser.add_argument("--peer-attention", choices=PEER_ATTENTIONS, default=PEER_ATTENTIONS[0], help=kernels)
    parser.add_argument("--peer-eager", action="store_true", help="torchtitan 0.3: without its CUDA graph; less memory")
    parser.add_argument("--breakdown", action="store_true", help="say where the time of a step goes (CUDA only)")
    host = "say what our step costs the host per layer, by models of 2 and 4 layers"
    parser.add_argument("--host", action="store_true", help=host)
    parser.add_argument("--memory", action="store_true", help="say what holds our memory at the peak of a step")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    _add_device(parser)
    _add_only(parser, tuple(CASES))


def _add_suite(parser: argparse.ArgumentParser) -> None:
    budget = f"time budget; models beyond it are left out (default: {SUITE_SECONDS:.0f})"
    parser.add_argument("--seconds", type=float, metavar="N", help=budget)
    _add_only(parser, [entry.name for entry in ENTRIES])
    parser.add_argument("--out", metavar="DIR", help="folder for suite.json, suite.md and every model's log")
    _add_repeated(parser, "--peer-path", "DIR", "as in bench train")
    rows = (
        "measure nothing: take the rows of this suite.json; given again, of both, the later one's where both measured"
    )
    _add_repeated(parser, "--table", "FILE", rows)
    into = "put the rows into the table between its two comments in this file, among those of the same device"
    parser.add_argument("--into", metavar="FILE", help=into)
    replaced = "with --into: drop the rows that the file has, also those of another device"
    parser.add_argument("--replace", action="store_true", help=replaced)
    _add_device(parser)
    parser.set_defaults(device=None)  # to know whether it was given


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    _add_only(parser, OPERATION_NAMES)
    _add_device(parser)
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    source = "folder with the source of mamba_ssm or fla, measured beside our scan and delta rules; may be given again"
    _add_repeated(parser, "--peer-path", "DIR", source)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _RUN_EPILOG.format("model", "", ", --bf16")
    parser.add_argument("--ragged", action="store_true", help="prompts of several lengths")
    parser.add_argument("--fp8-weights", action="store_true", help="our weights are quantized to FP8")
    peers = (
        "transformers, or with its static cache and torch.compile; our engine without --fp8-weights, or without "
        "--speculative-tokens; training's forward pass"
    )
    parser.add_argument("--against", choices=("hf", "hf-compiled", "bf16", "plain", "forward"), help=peers)


def _add_stream(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _RUN_EPILOG.format("model", "", ", --bf16")
    limit = "after which transformers' continuous batching is given up, and its speed is a bound (default: 600)"
    parser.add_argument("--peer-seconds", type=float, default=600.0, metavar="S", help=limit)
    parser.add_argument("--fp8-weights", action="store_true", help="our weights are quantized to FP8")
    peers = "transformers' continuous batching, or its static batches of 16"
    parser.add_argument("--against", choices=("hf", "hf-static"), help=peers)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "A first word that is a folder is a checkpoint; any other word is the model's own: a preset's name (default: "
        f"{SERVED_PRESET}, random weights), --seq-length, --device, --bf16 ..."
    )
    parser.add_argument("--url", help="a server that runs already, with a key in --api-key-file if it needs one")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="with --url: the key, in its first line")


def _add_posttrain(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _RUN_EPILOG.format("run", "--micro-batch-size, ", "")
    parser.add_argument("kind", choices=("sft", "lora", "grpo"), help="what is measured")
    parser.add_argument("--against", choices=("trl",), help="TRL's trainer, with transformers and PEFT")
    parser.add_argument("--peer-recompute", action="store_true", help="with its gradient checkpointing")
    packing = "how it packs texts: from one long text, or each by itself (default: wrapped)"
    parser.add_argument("--peer-packing", choices=("wrapped", "bfd"), default="wrapped", help=packing)
    batching = "it draws with transformers' continuous batching"
    parser.add_argument("--peer-continuous-batching", action="store_true", help=batching)


def _add_scale(parser: argparse.ArgumentParser) -> None:
    sizes = f"numbers of ranks (default: {_WORLD_SIZES})"
    parser.add_argument("--sizes", default=_WORLD_SIZES, metavar="N,...", help=sizes)
    parser.add_argument("--model", default="llama3-405b", metavar="PRESET", help="preset (default: llama3-405b)")
    parser.add_argument("--without-checkpoint", action="store_true", help="leave saving and loading out")


_ADD_OTHERS: Mapping[str, Callable[[argparse.ArgumentParser], None]] = {
    "data": _add_data,
    "checkpoint": _add_checkpoint,
    "optimizer": _add_optimizer,
    "train": _add_train,
    "memory": _add_memory,
    "suite": _add_suite,
    "kernels": _add_kernels,
    "generate": _add_generate,
    "stream": _add_stream,
    "serve": _add_serve,
    "posttrain": _add_posttrain,
    "scale": _add_scale,
}
TAKES_RUN_FLAGS = frozenset(("train", "generate", "stream", "serve", "posttrain"))
"""Benches that also get the flags which their parser does not know: those of a training run."""
