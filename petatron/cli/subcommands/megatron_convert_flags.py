"""Translates the flags of Megatron-LM's `tools/checkpoint/convert.py` to those of `petatron checkpoint convert`.

    python tools/checkpoint/convert.py --model-type GPT --loader core --saver core --load-dir DIR --save-dir DIR
        [--target-tensor-parallel-size 2] [--target-pipeline-parallel-size 2] ...

Flags of processes and checks of that program have no effect on what is written, and are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from petatron.base.errors import ConfigError, Problem
from petatron.cli.subcommands.command_parser import CommandParser

_OWN_FLAGS = ("--model-type", "--loader", "--saver", "--load-dir", "--save-dir")
_MEGATRON, _HUGGING_FACE = "megatron", "huggingface"
_LOADERS = {
    **dict.fromkeys(("core", "mcore", "legacy", "megatron", "torch_dist"), _MEGATRON),
    **dict.fromkeys(("llama_mistral", "mixtral_hf", "hf", "huggingface"), _HUGGING_FACE),
    "petatron": "petatron",
}
_SAVERS = {
    **dict.fromkeys(("core", "mcore", "legacy", "megatron", "torch_dist"), _MEGATRON),
    **dict.fromkeys(("hf", "huggingface"), _HUGGING_FACE),
    "petatron": "petatron",
}
_IGNORED_HELP = "accepted, and changes nothing"
_SPECS = {"transformer_engine": "te", "local": "local"}
_SIZES = {"--tp": "tensor", "--pp": "pipeline", "--ep": "expert"}
_IGNORED_SWITCHES = ("--no-checking", "--add-qkv-bias")
_IGNORED_VALUES = (
    *("--max-queue-size", "--megatron-path", "--model-size", "--position-embedding-type", "--loader-transformer-impl"),
    *("--tokenizer-model", "--vocab-file", "--make-vocab-size-divisible-by"),
)


def is_megatron_command(argv: Sequence[str]) -> bool:
    """Whether words are flags of Megatron's tool; no flag of `petatron checkpoint convert` has such a name.

    >>> is_megatron_command(["--model-type", "GPT", "--load-dir=in"]), is_megatron_command(["in", "out", "--to", "petatron"])
    (True, False)
    """
    return any(word.partition("=")[0] in _OWN_FLAGS for word in argv)


def parser() -> argparse.ArgumentParser:
    root = CommandParser(
        prog="tools/checkpoint/convert.py",
        description="Converts a model, with Megatron-LM's flags.",
        epilog="All other words are flags of `petatron checkpoint convert`, whose own command line (SOURCE TARGET --to FORMAT) is "
        "understood too; it has a --help of its own.",
    )
    add = root.add_argument
    add("--model-type", help="GPT")
    add("--loader", default="megatron", help=f"what the source is: {', '.join(_LOADERS)}")
    add("--saver", default="megatron", help=f"what to write: {', '.join(_SAVERS)}")
    add("--load-dir", metavar="DIR", help="folder to read")
    add("--save-dir", metavar="DIR", help="folder to write; it must not exist yet")
    for size in _SIZES.values():
        add(f"--target-{size}-parallel-size", metavar="N", help=f"{size}-parallel ranks of the files (1)")
    add("--saver-transformer-impl", choices=tuple(_SPECS), help="layers of the Megatron that loads the files")
    add("--true-vocab-size", metavar="N", help="token ids, without padding")
    add("--checkpoint-type", choices=("hf", "meta"), help="of llama_mistral: who wrote the source")
    add("--bf16", action="store_true", help="weights in bfloat16")
    add("--fp16", action="store_true", help="weights in float16")
    for name in _IGNORED_SWITCHES:
        add(name, action="store_true", help=_IGNORED_HELP)
    for name in _IGNORED_VALUES:
        add(name, metavar="X", help=_IGNORED_HELP)
    return root


def from_megatron_flags(argv: Sequence[str]) -> list[str]:
    """Returns the words of `petatron checkpoint convert`; raises `ConfigError` with all that is missing or not there."""
    options, others = parser().parse_known_args(argv)
    if problems := _problems(options):
        raise ConfigError(problems)
    target = _SAVERS[options.saver]
    arguments = [options.load_dir, options.save_dir, "--from", _LOADERS[options.loader], "--to", target]
    given = {flag: getattr(options, f"target_{size}_parallel_size") for flag, size in _SIZES.items()}
    if target == _MEGATRON:
        # Megatron's own saver writes the files of --ckpt-format torch.
        arguments += ["--megatron-format", "torch_dist" if options.saver == "torch_dist" else "legacy"]
        arguments += ["--megatron-spec", _SPECS[options.saver_transformer_impl or "transformer_engine"]]
        if unset := [
            f"--target-{_SIZES[flag]}-parallel-size" for flag, size in given.items() if size is None and flag != "--ep"
        ]:
            print(f"note: {', '.join(unset)} not given: 1 is used, whatever the source has", file=sys.stderr)
    arguments += [word for flag, size in given.items() if size is not None for word in (flag, size)]
    arguments += ["--dtype", "bf16" if options.bf16 else "fp16"] if options.bf16 or options.fp16 else []
    arguments += ["--vocab-size", options.true_vocab_size] if options.true_vocab_size is not None else []
    return [*arguments, *others]


def _problems(options: argparse.Namespace) -> list[Problem]:
    problems = [
        Problem(flag, "", "is not given", f"Add {flag} DIR.")
        for flag, value in (("--load-dir", options.load_dir), ("--save-dir", options.save_dir))
        if value is None
    ]
    if options.model_type not in (None, "GPT"):
        rule = "is not converted: decoder language models are"
        problems.append(Problem("--model-type", options.model_type, rule, "Use GPT."))
    for flag, value, known in (("--loader", options.loader, _LOADERS), ("--saver", options.saver, _SAVERS)):
        if value not in known:
            problems.append(Problem(flag, value, f"is none of {', '.join(known)}", "Use one of them."))
    if options.checkpoint_type == "meta":
        rule = "is Meta's own format, whose pickles are not read"
        problems.append(Problem("--checkpoint-type", "meta", rule, "Use the model's Hugging Face folder, and hf."))
    return problems
