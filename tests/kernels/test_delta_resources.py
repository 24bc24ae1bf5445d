"""The kernels of the delta rule, compiled for a Hopper GPU on any machine, at the widths of Qwen3-Next and Kimi-Linear.

As in `test_decode_resources.py`, in a process of its own without Triton's interpreter. There launches compile instead of running. The
shared memory of a program fits, and the machine code reads no uniform register that it never wrote (`uniform_registers.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.test_decode_resources import HOPPER, SHARED_BYTES
from tests.kernels.uniform_registers import unwritten_reads
from tests.load_deadline import scaled

SHARED_KERNELS = {
    "_gate_rows",
    "_inverse_norms",
    "_chunk_states",
    "_chunk_outputs",
    "_intra_chunk_v_new_grads",
    "_chunk_state_grads",
}
KERNELS = {
    "chunk_delta_rule": SHARED_KERNELS | {"_ut_transform", "_intra_chunk_grads", "_query_grads", "_key_grads"},
    "chunk_channel_delta_rule": SHARED_KERNELS
    | {"_decayed_qk", "_channel_intra_chunk", "_channel_inter_chunk_grads", "_write_tree_masks"}
    | {"_channel_intra_chunk_grads", "_channel_group_grads"},
}
SIZES = {"a layer": (130, 2, 32), "one chunk of one head": (64, 1, 1)}
"""Length, batch, heads. Triton makes constants of sizes that are 1, and other code of a loop over one chunk."""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("dtype", "sizes", "packed"),
    [
        ("bfloat16", "a layer", True),
        ("bfloat16", "a layer", False),
        ("float32", "a layer", True),
        ("bfloat16", "one chunk of one head", False),
    ],
)
@pytest.mark.parametrize("rule", KERNELS)
def test_programs_fit_on_a_multiprocessor_and_read_what_they_wrote(
    rule: str, dtype: str, sizes: str, packed: bool, tmp_path: Path
):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    arguments = [rule, dtype, sizes, "packed" if packed else "whole"]
    done = subprocess.run(
        [sys.executable, "-m", __name__, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=scaled(600),
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, list[str]]] = json.loads(done.stdout)
    assert found.keys() == KERNELS[rule]
    assert {name: shared for name, (shared, _) in found.items() if shared > SHARED_BYTES} == {}
    assert {name: unwritten for name, (_, unwritten) in found.items() if unwritten} == {}


def listing(*instructions: str) -> str:
    """Instructions as nvdisasm prints them, with labels among them."""
    lines = [
        each if each.endswith(":") else f"        /*{16 * at:04x}*/   {each} ;" for at, each in enumerate(instructions)
    ]
    return "\n".join(lines)


GEMM = "HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], R24, gsb0"
GEMM_OF_REGISTERS = "HGMMA.64x32x16.F32.BF16 R24, R40, gdesc[UR4].tnspB, RZ, !UPT"
LOAD_4, LOAD_6 = "ULDC.64 UR4, c[0x0][0x208]", "UIMAD.WIDE UR6, UR8, 0x2, URZ"


@pytest.mark.parametrize(
    ("instructions", "unwritten"),
    [
        ((LOAD_4, "UMOV UR8, 0x1", LOAD_6, GEMM, "EXIT"), []),
        ((LOAD_4, "UMOV UR6, 0x1", GEMM, "EXIT"), [GEMM]),
        ((LOAD_4, LOAD_6, "EXIT"), [LOAD_6]),
        (("UMOV UR6, 0x1", "R2UR UR7, R9", GEMM_OF_REGISTERS, "EXIT"), []),
        ((LOAD_4, GEMM_OF_REGISTERS, "EXIT"), [GEMM_OF_REGISTERS]),
        (("UMOV UR16, 0x1", "LDG.E R2, desc[UR16][R8.64]", "EXIT"), ["LDG.E R2, desc[UR16][R8.64]"]),
        (("@P0 BRA `(.L_x_1)", "UMOV UR4, 0x1", ".L_x_1:", "STS [R1+UR4], R2", "EXIT"), []),
        (("BRA `(.L_x_1)", "UMOV UR4, 0x1", ".L_x_1:", "STS [R1+UR4], R2", "EXIT"), ["STS [R1+UR4], R2"]),
        ((".L_x_1:", "STS [R1+UR4], R2", "UMOV UR4, 0x1", "@!P0 BRA `(.L_x_1)", "EXIT"), []),
    ],
)
def test_reads_of_uniform_registers_that_nothing_wrote(instructions: tuple[str, ...], unwritten: list[str]):
    assert unwritten_reads(listing(*instructions)) == unwritten


def measure(rule: str, dtype_name: str, sizes: str, packed: str) -> dict[str, tuple[int, list[str]]]:
    """Returns for each kernel of a forward and a backward pass the shared memory of a program, and its reads of unwritten registers."""
    import torch
    from torch import Tensor
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.knobs import nvidia
    from triton.runtime.jit import JITFunction

    kernels = importlib.import_module(f"petatron.kernels.triton.ssm.{rule}")
    found: dict[str, tuple[int, list[str]]] = {}
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
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(compiled.asm["cubin"])
            cubin.flush()
            command = [nvidia.nvdisasm.path, "-c", cubin.name]
            disassembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        shared, unwritten = found.get(kernel.fn.__name__, (0, []))
        found[kernel.fn.__name__] = (
            max(shared, compiled.metadata.shared),
            unwritten + unwritten_reads(disassembly),
        )

    JITFunction.run = compile_only  # pyright: ignore[reportAttributeAccessIssue]
    length, batch, heads = SIZES[sizes]
    v = torch.zeros(length, batch, heads, 128, dtype=getattr(torch, dtype_name))
    qk = v if rule == "chunk_channel_delta_rule" else v[:, :, : max(heads // 2, 1)].contiguous()
    g = torch.zeros(v.shape if rule == "chunk_channel_delta_rule" else v.shape[:3])
    beta, state, starts = torch.zeros(v.shape[:3]), None, None
    if packed == "packed":
        state, starts = torch.zeros(batch, heads, 128, 128), torch.zeros(length, batch, dtype=torch.bool)
    options = {"chunk_size": 64, "starts_SB": starts, "initial_state": state}
    kernels.chunk_delta_rule(qk, qk, v, g, beta, **options)
    kernels.chunk_delta_rule_backward(v, state, qk, qk, v, g, beta, **options)
    return found


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
