"""The models that `petatron bench suite` measures: shapes that fit one device twice, and tiny forms of them for a CPU.

Models that do not fit a device beside a peer are cut to their first layers, which their label says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from petatron.bench.measure.check_arguments import select_names

_TINY = (
    "--device cpu --no-bf16 --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 32 "
    "--vocab-size 256 --micro-batch-size 2"
)
_TINY_GROUPS = "--num-query-groups 2"
_TINY_HEADS = f"{_TINY_GROUPS} --kv-channels 16"
_TINY_TIMING = "--warmup-seconds 0 --steps 4 --block 2"
_TIMING = "--warmup-seconds 5 --steps 16 --block 4"


@dataclass(frozen=True, slots=True)
class SuiteEntry:
    """A model of the suite.

    model: its preset with what departs from it. sequences, seq_length: of a micro-batch. estimated_s: on an H200 with a peer, from the
    start of the process to its table. tiny_flags: what the form for a CPU has beside the shape that all have. has_torchtitan: whether
    torchtitan can build it; otherwise the peer is transformers.
    """

    name: str
    label: str
    model: str
    sequences: int
    seq_length: int
    estimated_s: float
    tiny_flags: str = ""
    has_torchtitan: bool = False
    fp8_recipe: str | None = None

    @property
    def flags(self) -> str:
        """Those of the run on a GPU."""
        return f"--preset {self.model} --seq-length {self.seq_length} --micro-batch-size {self.sequences}"

    def bench_flags(self, *, on_cuda: bool) -> list[str]:
        """Returns the flags of `petatron bench train` for this entry, without a peer."""
        tiny = f"--preset {self.model.split()[0]} {_TINY} {self.tiny_flags} {_TINY_TIMING}"
        text = f"{self.flags} {_TIMING} --breakdown" if on_cuda else tiny
        return text.split() + ([] if self.fp8_recipe is None else ["--fp8-recipe", self.fp8_recipe])


_QWEN3_MOE = f"{_TINY_HEADS} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32"
_GEMMA3 = "--kv-channels 16 --softmax-scale 0.25 --window-size 8"
_NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
_T5 = (
    "--encoder-num-layers 1 --decoder-num-layers 1 --decoder-seq-length 16 --kv-channels 16 --relative-attention-num-buckets 8 "
    "--relative-attention-max-distance 12 --logits-scaling 8"
)
"""The output of T5's tied head is divided by the root of the width."""
_LLAVA = (
    "--vision-num-layers 2 --vision-hidden-size 32 --vision-num-attention-heads 2 --vision-ffn-hidden-size 48 --vision-image-size 28 "
    "--projector-hidden-size 64 --image-token-id 255"
)
_8B, _8B_SHAPE = "Llama-8B shape, 8 layers, 2 x 8192", ("llama-8b-8layer", 2, 8192)

ENTRIES: Sequence[SuiteEntry] = (
    SuiteEntry("llama-1b", "Llama-1B, 8 x 4096 tokens, bf16", "llama-1b", 8, 4096, 82, _TINY_GROUPS, True),
    SuiteEntry("llama-8b", f"{_8B}, bf16", *_8B_SHAPE, 68, _TINY_GROUPS, True),
    SuiteEntry("llama-8b-fp8", f"{_8B}, FP8 tensorwise", *_8B_SHAPE, 74, f"{_TINY_GROUPS} --bf16", True, "tensorwise"),
    SuiteEntry("llama-125m", "Llama-125M, 2 x 1024, bf16", "llama-125m", 2, 1024, 43, has_torchtitan=True),
    SuiteEntry("llama-125m-16", "Llama-125M, 16 x 1024, bf16", "llama-125m", 16, 1024, 42, has_torchtitan=True),
    SuiteEntry("mixtral-slice", "Mixtral 8x7B, 2 layers, 1 x 4096, bf16", "mixtral-slice", 1, 4096, 37, _TINY_GROUPS),
    SuiteEntry(
        "qwen3-30b-a3b",
        "Qwen3-30B-A3B, 2 layers, 2 x 4096, bf16",
        "qwen3-30b-a3b --num-layers 2",
        2,
        4096,
        39,
        _QWEN3_MOE,
    ),
    SuiteEntry("qwen3-0.6b", "Qwen3-0.6B, 4 x 4096, bf16", "qwen3-0.6b", 4, 4096, 54, _TINY_HEADS),
    SuiteEntry("gemma3-1b", "Gemma-3-1B, 2 x 4096, bf16", "gemma3-1b", 2, 4096, 57, _GEMMA3),
    SuiteEntry("gpt-125m", "GPT-125M, 8 x 1024, bf16", "gpt3-125m", 8, 1024, 45),
    SuiteEntry("llama-350m", "Llama-350M, 8 x 2048, bf16", "llama-350m", 8, 2048, 45, has_torchtitan=True),
    SuiteEntry(
        "llama2-7b",
        "Llama-2-7B, 8 layers, 2 x 4096, bf16",
        "llama2-7b --num-layers 8",
        2,
        4096,
        50,
        has_torchtitan=True,
    ),
    SuiteEntry("bert-large", "BERT-large, 32 x 512, bf16", f"bert-large {_NO_DROPOUT}", 32, 512, 45, _NO_DROPOUT),
    SuiteEntry("t5-large", "T5-large, 32 x 512 tokens to 128, bf16", "t5-large", 32, 512, 50, _T5),
    SuiteEntry("llava-7b", "LLaVA-7B, 8 layers, 4 x 2048, bf16", "llava-7b --num-layers 8", 4, 2048, 60, _LLAVA),
    SuiteEntry("qwen3-4b", "Qwen3-4B, 12 layers, 2 x 4096, bf16", "qwen3-4b --num-layers 12", 2, 4096, 50, _TINY_HEADS),
)
"""In the order in which a time budget is spent on them: ten minutes are enough for the first ten."""


def select_entries(texts: Sequence[str]) -> list[SuiteEntry]:
    """Returns the entries that `--only` names, in the suite's order; without any text, all.

    >>> [entry.name for entry in select_entries(["qwen3-4b,llama-1b"])]
    ['llama-1b', 'qwen3-4b']
    """
    names = select_names(texts, [entry.name for entry in ENTRIES])
    return [entry for entry in ENTRIES if entry.name in names]
