"""The kernels of decode steps, compiled for a Hopper GPU on any machine: they compile, and the shared memory of a program fits.

The default suite runs Triton's interpreter, which knows neither; so the compiler runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.load_deadline import scaled

HOPPER = 90
SHARED_BYTES = 227 * 1024
"""What one program may have on a Hopper GPU; two programs share 228 KB, of which each takes 1 KB for itself."""
PROGRAMS = {
    "few heads": 2,
    "some heads": 2,
    "many heads": 1,
    "float32": 2,
    "merge": 4,
    "scan": 4,
    "delta": 4,
    "delta by channel": 4,
    "conv": 4,
}
"""How many programs of each kernel are to fit on a multiprocessor."""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_programs_fit_on_a_multiprocessor(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", __name__], env=environment, capture_output=True, text=True, timeout=scaled(600)
    )
    assert done.returncode == 0, done.stderr
    shared: dict[str, int] = json.loads(done.stdout)
    assert shared.keys() == PROGRAMS.keys()
    for name, count in PROGRAMS.items():
        assert shared[name] <= SHARED_BYTES, name
        assert count == 1 or count * (shared[name] + 1024) <= 228 * 1024, name


def shared_bytes(kernel: Any, types: dict[str, Any], sizes: dict[str, Any], *, warps: int = 4, stages: int = 3) -> int:
    """Compiles a kernel whose pointers and strides are multiples of 16, and returns the shared memory of a program.

    types: of parameters, or of the parts of those that are tuples.
    """
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in sizes else types.get(name, "i32") for name in kernel.arg_names}
    aligned: dict[tuple[int, ...], Any] = {}
    for number, kind in enumerate(signature.values()):
        parts = (
            {(number, part): of_part for part, of_part in enumerate(kind)}
            if isinstance(kind, tuple)
            else {(number,): kind}
        )
        aligned |= {path: [["tt.divisibility", 16]] for path, of_part in parts.items() if of_part[0] in "*i"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=sizes, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return compile(source, target=GPUTarget("cuda", HOPPER, 32), options=options).metadata.shared


def measure() -> dict[str, int]:
    """At the widths of DeepSeek-V3, Mamba-2 2.7B and Qwen3-Next."""
    from petatron.kernels.triton.attention import paged_latent_attention, split_kv
    from petatron.kernels.triton.ssm.decode import conv_step, delta_step, scan_step

    def latent(blocking: Any, dtype: str) -> int:
        tensors = (*(f"*{dtype}",) * 4, "*i32", "*i32", "*fp32", "*fp32", f"*{dtype}")
        types = {"tensors": tensors, "scale": "fp32", "strides": ("i32",) * 5}
        sizes = {"LATENT": 512, "COLUMNS": 512, "ROTARY": 64, "ROTARY_COLUMNS": 64, "NUM_HEADS": 128, "WINDOW": 0}
        sizes |= {"HEADS": blocking.heads, "TILE": blocking.tile, "PAGE": 16, "SPLITS": 8, "LEAST": 64}
        options = {"warps": blocking.warps, "stages": blocking.stages}
        return shared_bytes(paged_latent_attention._decode_split, types, sizes | {"USE_PDL": True}, **options)

    half = "*bf16"
    merge_types = {"partial": "*fp32", "lse": "*fp32", "output": half}
    scan_types = {"tensors": (*(half,) * 7, "*fp32", "*i64", half), "strides": ("i32",) * 4}
    delta_types = {**scan_types, "q_scale": "fp32", "eps": "fp32", "strides": ("i32",) * 5}
    conv_types = {"tensors": (half, half, half, half, "*i64", half)}
    merge = {"GROUP": 128, "WIDTH": 512, "COLUMNS": 128, "SPLITS": 64, "ROWS": 64, "USE_PDL": True}
    scan = {"HEADS_PER_GROUP": 80, "HEAD_DIM": 64, "ROWS": 32, "STATE_DIM": 128, "COLUMNS": 128, "USE_PDL": True}
    delta = {"HEADS_PER_KEY": 2, "KEY_DIM": 128, "ROWS": 128, "VALUE_DIM": 128, "CHANNELS": 32, "USE_PDL": True}
    conv = {"TAPS": 4, "CHANNELS": 256, "USE_PDL": True}
    return {
        "few heads": latent(paged_latent_attention._HEADS_16, "bf16"),
        "some heads": latent(paged_latent_attention._HEADS_32, "bf16"),
        "many heads": latent(paged_latent_attention._HEADS_64, "bf16"),
        "float32": latent(paged_latent_attention._FLOAT32, "fp32"),
        "merge": shared_bytes(split_kv.merge_splits, merge_types, merge),
        "scan": shared_bytes(scan_step._scan_step, scan_types, scan),
        "delta": shared_bytes(delta_step._delta_step, delta_types, delta | {"DECAY_BY_ROW": False}),
        "delta by channel": shared_bytes(delta_step._delta_step, delta_types, delta | {"DECAY_BY_ROW": True}),
        "conv": shared_bytes(conv_step._conv_step, conv_types, conv, warps=2),
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
