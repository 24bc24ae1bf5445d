"""The kernels of the delta rule with decays of channels, compiled for a Hopper GPU on any machine, at the widths of Kimi-Linear.

As in `test_decode_resources.py`, in a process of its own without Triton's interpreter. There launches compile instead of running.
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

from tests.kernels.test_decode_resources import HOPPER, SHARED_BYTES

KERNELS = {
    "_gate_rows",
    "_inverse_norms",
    "_decayed_qk",
    "_channel_intra_chunk",
    "_chunk_states",
    "_chunk_outputs",
    "_intra_chunk_v_new_grads",
    "_chunk_state_grads",
    "_channel_inter_chunk_grads",
    "_write_tree_masks",
    "_channel_intra_chunk_grads",
    "_channel_group_grads",
}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_programs_fit_on_a_multiprocessor(dtype: str, tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", __name__, dtype], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    shared: dict[str, int] = json.loads(done.stdout)
    assert shared.keys() == KERNELS
    assert {name: size for name, size in shared.items() if size > SHARED_BYTES} == {}


def measure(dtype_name: str) -> dict[str, int]:
    """Returns the shared memory of a program of each kernel, of a forward and a backward pass."""
    import torch
    from torch import Tensor
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.runtime.jit import JITFunction

    from petatron.kernels.triton.ssm import chunk_channel_delta_rule as kernels

    found: dict[str, int] = {}
    names = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        constants: dict[tuple[int, ...], Any] = {}
        aligned: dict[tuple[int, ...], Any] = {}

        def type_of(value: Any, path: tuple[int, ...]) -> Any:
            if isinstance(value, tuple):
                return tuple(type_of(each, (*path, number)) for number, each in enumerate(value))
            if isinstance(value, Tensor):
                aligned[path] = [["tt.divisibility", 16]]
                return names[value.dtype]
            if value is None or value == 1:
                constants[path] = value
                return "constexpr"
            if value % 16 == 0:
                aligned[path] = [["tt.divisibility", 16]]
            return "fp32" if isinstance(value, float) else "i32"

        given = dict(zip(kernel.arg_names, args)) | options
        signature = {}
        for number, name in enumerate(kernel.arg_names):
            if kernel.params[number].is_constexpr:
                constants[(number,)], signature[name] = given[name], "constexpr"
            else:
                signature[name] = type_of(given[name], (number,))
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
        launch = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
        compiled = compile(source, target=GPUTarget("cuda", HOPPER, 32), options=launch)
        found[kernel.fn.__name__] = compiled.metadata.shared

    JITFunction.run = compile_only  # pyright: ignore[reportAttributeAccessIssue]
    v = torch.zeros(130, 2, 32, 128, dtype=getattr(torch, dtype_name))
    g, beta, state = torch.zeros(v.shape), torch.zeros(v.shape[:3]), torch.zeros(2, 32, 128, 128)
    starts = torch.zeros(130, 2, dtype=torch.bool)
    options = {"chunk_size": 64, "starts_SB": starts, "initial_state": state}
    kernels.chunk_delta_rule(v, v, v, g, beta, **options)
    kernels.chunk_delta_rule_backward(v, state, v, v, v, g, beta, **options)
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
