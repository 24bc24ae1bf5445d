"""The configurations of `petatron bench memory`."""

from __future__ import annotations

from dataclasses import dataclass

_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_1B, _1B_SHAPE = "llama-1b", "--seq-length 4096 --micro-batch-size 8"
_1B_WIDE = "--seq-length 4096 --micro-batch-size 32"
_8B, _8B_SHAPE = "llama-8b-8layer", "--seq-length 8192 --micro-batch-size 2"
_LLAVA, _LLAVA_SHAPE = "llava-7b", "--num-layers 8 --seq-length 2048 --micro-batch-size 4"
_TINY_HEADS = "--num-attention-heads 8 --kv-channels 16 --vocab-size 512"
_TINY_1B = f"--num-layers 2 --hidden-size 128 --ffn-hidden-size 256 {_TINY_HEADS} --seq-length 128 --micro-batch-size 2"
_TINY_16_LAYERS = _TINY_1B.replace("--num-layers 2", "--num-layers 16")
_TINY_8B = f"--num-layers 3 --hidden-size 256 --ffn-hidden-size 896 {_TINY_HEADS} --seq-length 256 --micro-batch-size 1"


@dataclass(frozen=True, slots=True)
class MemoryCase:
    """A configuration: a preset, its shape, a smaller one for a CPU (None where that cannot measure it), and what is special of it."""

    preset: str
    shape: str
    tiny_shape: str | None
    features: str = ""

    @property
    def flags(self) -> str:
        return f"{self.preset} {self.shape} {self.features}".strip()

    @property
    def tiny_flags(self) -> str | None:
        return None if self.tiny_shape is None else f"{self.preset} {self.tiny_shape} {self.features}".strip()


CASES = {
    "1b": MemoryCase(_1B, _1B_SHAPE, _TINY_1B),
    "1b-bf16-moments": MemoryCase(_1B, _1B_SHAPE, _TINY_1B, "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"),
    "1b-optimizer-offload": MemoryCase(
        _1B, _1B_SHAPE, None, "--optimizer-cpu-offload --optimizer-offload-fraction 0.5"
    ),
    "1b-last-two-layers": MemoryCase(
        _1B, _1B_WIDE, _TINY_16_LAYERS, "--train-only layers.14.* layers.15.* --overlap-grad-reduce"
    ),
    "1b-frozen-below": MemoryCase(
        _1B, _1B_WIDE, _TINY_16_LAYERS, "--freeze embedding.* layers.[0-9].* layers.1[0-3].* --overlap-grad-reduce"
    ),
    "1b-mtp": MemoryCase(_1B, "--seq-length 4096 --micro-batch-size 4", _TINY_1B, "--mtp-num-layers 1"),
    "8b": MemoryCase(_8B, _8B_SHAPE, _TINY_8B),
    "8b-two-micro-batches": MemoryCase(_8B, _8B_SHAPE, None, "--global-batch-size 4"),
    "8b-fp8-tensorwise": MemoryCase(_8B, _8B_SHAPE, None, "--fp8-format hybrid --fp8-recipe tensorwise"),
    "8b-fp8-output-head-backward": MemoryCase(_8B, _8B_SHAPE, None, "--fp8-format hybrid --fp8-output-head-backward"),
    "8b-fp8-blockwise": MemoryCase(_8B, _8B_SHAPE, None, "--fp8-format hybrid --fp8-recipe blockwise"),
    "8b-recompute-mlp": MemoryCase(_8B, _8B_SHAPE, None, "--recompute-granularity selective --recompute-modules mlp"),
    "8b-recompute-full": MemoryCase(_8B, _8B_SHAPE, None, _FULL),
    "8b-activation-offload": MemoryCase(_8B, _8B_SHAPE, None, "--cpu-offloading-num-layers 4"),
    "mixtral": MemoryCase("mixtral-slice", "--seq-length 4096 --micro-batch-size 1", _TINY_1B),
    "llava": MemoryCase(_LLAVA, _LLAVA_SHAPE, None),
    "llava-projector": MemoryCase(
        _LLAVA,
        _LLAVA_SHAPE.replace("--micro-batch-size 4", "--micro-batch-size 16"),
        None,
        "--freeze-language-model --freeze-vision-encoder",
    ),
    "hybrid": MemoryCase(
        "nemotron-h-8b",
        "--seq-length 4096 --micro-batch-size 2",
        None,
        "--num-layers 13 --hybrid-layer-pattern M-M-M-M*-M-M-",
    ),
}
