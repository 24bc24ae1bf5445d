"""The models that `petatron bench suite` measures: shapes that fit one device twice, and tiny forms of them for a CPU.

An entry is the flags of a run. Models that do not fit a device beside a peer are cut to their first layers, which their label
says. Estimated seconds are those of an H200 with a peer, from the start of the process to its table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from petatron.bench.measure.arguments import select_names

_TINY = (
    "--device cpu --no-bf16 --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 32 "
    "--vocab-size 256 --micro-batch-size 2"
)
_TINY_HEADS = "--num-query-groups 2 --kv-channels 16"
_TINY_TIMING = "--warmup-seconds 0 --steps 4 --block 2"
_TIMING = "--warmup-seconds 5 --steps 16 --block 4"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteEntry:
    """A model of the suite.

    flags: those of the run on a GPU. tiny_flags: what the form for a CPU has beside the shape that all have.
    has_torchtitan: whether torchtitan can build it; otherwise the peer is transformers.
    """

    name: str
    label: str
    flags: str
    estimated_s: float
    tiny_flags: str = ""
    has_torchtitan: bool = False
    fp8_recipe: str | None = None

    def bench_words(self, *, on_cuda: bool) -> list[str]:
        """Returns the words of `petatron bench train` for this entry, without a peer."""
        preset = self.flags.split()[:2]
        tiny = [*preset, *_TINY.split(), *self.tiny_flags.split(), *_TINY_TIMING.split()]
        words = [*self.flags.split(), *_TIMING.split(), "--breakdown"] if on_cuda else tiny
        return words + ([] if self.fp8_recipe is None else ["--fp8-recipe", self.fp8_recipe])


ENTRIES: Sequence[SuiteEntry] = (
    SuiteEntry(
        name="llama-1b",
        label="Llama-1B, 8 x 4096 tokens, bf16",
        flags="--preset llama-1b --seq-length 4096 --micro-batch-size 8",
        tiny_flags="--num-query-groups 2",
        estimated_s=82,
        has_torchtitan=True,
    ),
    SuiteEntry(
        name="llama-8b",
        label="Llama-8B shape, 8 layers, 2 x 8192, bf16",
        flags="--preset llama-8b-8layer --seq-length 8192 --micro-batch-size 2",
        tiny_flags="--num-query-groups 2",
        estimated_s=68,
        has_torchtitan=True,
    ),
    SuiteEntry(
        name="llama-8b-fp8",
        label="Llama-8B shape, 8 layers, 2 x 8192, FP8 tensorwise",
        flags="--preset llama-8b-8layer --seq-length 8192 --micro-batch-size 2",
        tiny_flags="--num-query-groups 2 --bf16",
        estimated_s=74,
        has_torchtitan=True,
        fp8_recipe="tensorwise",
    ),
    SuiteEntry(
        name="llama-125m",
        label="Llama-125M, 2 x 1024, bf16",
        flags="--preset llama-125m --seq-length 1024 --micro-batch-size 2",
        estimated_s=43,
        has_torchtitan=True,
    ),
    SuiteEntry(
        name="llama-125m-16",
        label="Llama-125M, 16 x 1024, bf16",
        flags="--preset llama-125m --seq-length 1024 --micro-batch-size 16",
        estimated_s=42,
        has_torchtitan=True,
    ),
    SuiteEntry(
        name="mixtral-slice",
        label="Mixtral 8x7B, 2 layers, 1 x 4096, bf16",
        flags="--preset mixtral-slice --seq-length 4096 --micro-batch-size 1",
        tiny_flags="--num-query-groups 2",
        estimated_s=37,
    ),
    SuiteEntry(
        name="qwen3-30b-a3b",
        label="Qwen3-30B-A3B, 2 layers, 2 x 4096, bf16",
        flags="--preset qwen3-30b-a3b --num-layers 2 --seq-length 4096 --micro-batch-size 2",
        tiny_flags=f"{_TINY_HEADS} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32",
        estimated_s=39,
    ),
    SuiteEntry(
        name="qwen3-0.6b",
        label="Qwen3-0.6B, 4 x 4096, bf16",
        flags="--preset qwen3-0.6b --seq-length 4096 --micro-batch-size 4",
        tiny_flags=_TINY_HEADS,
        estimated_s=54,
    ),
    SuiteEntry(
        name="gemma3-1b",
        label="Gemma-3-1B, 2 x 4096, bf16",
        flags="--preset gemma3-1b --seq-length 4096 --micro-batch-size 2",
        tiny_flags="--kv-channels 16 --softmax-scale 0.25 --window-size 8",
        estimated_s=57,
    ),
    SuiteEntry(
        name="gpt-125m",
        label="GPT-125M, 8 x 1024, bf16",
        flags="--preset gpt3-125m --seq-length 1024 --micro-batch-size 8",
        estimated_s=45,
    ),
    SuiteEntry(
        name="llama-350m",
        label="Llama-350M, 8 x 2048, bf16",
        flags="--preset llama-350m --seq-length 2048 --micro-batch-size 8",
        estimated_s=45,
        has_torchtitan=True,
    ),
    SuiteEntry(
        name="llama2-7b",
        label="Llama-2-7B, 8 layers, 2 x 4096, bf16",
        flags="--preset llama2-7b --num-layers 8 --seq-length 4096 --micro-batch-size 2",
        estimated_s=50,
        has_torchtitan=True,
    ),
    SuiteEntry(
        name="qwen3-4b",
        label="Qwen3-4B, 12 layers, 2 x 4096, bf16",
        flags="--preset qwen3-4b --num-layers 12 --seq-length 4096 --micro-batch-size 2",
        tiny_flags=_TINY_HEADS,
        estimated_s=50,
    ),
)
"""In the order in which a time budget is spent on them: ten minutes are enough for the first ten."""


def select_entries(texts: Sequence[str]) -> list[SuiteEntry]:
    """Returns the entries that `--only` names, in the suite's order; without any text, all.

    >>> [entry.name for entry in select_entries(["qwen3-4b,llama-1b"])]
    ['llama-1b', 'qwen3-4b']
    """
    names = select_names(texts, [entry.name for entry in ENTRIES])
    return [entry for entry in ENTRIES if entry.name in names]
