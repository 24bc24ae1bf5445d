"""Kernels of other libraries in `petatron bench kernels`: packages made up here with their names and layouts, and the references of
the real ones where somebody unpacked them.

The made-up scan and delta rule go token by token, with the batch first. Their packages cannot be imported as a whole, as the real
mamba_ssm cannot without its extensions.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from petatron.base.errors import ConfigError
from petatron.bench.kernels import DeviceSpeed, measure_case
from petatron.bench.ops.kernel_case import SMALL_SHAPES, BenchContext
from petatron.bench.ops.peer_recurrences import peer_path_problems
from petatron.bench.ops.recurrences import channel_delta_cases, delta_cases, scan_cases
from petatron.cli.bench import main

CPU = torch.device("cpu")
CARRIED = Path(__file__).parents[2] / ".carry"
MAMBA = """
    import torch
    def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, return_final_states=False):
        groups = x.shape[2] // B.shape[2]
        B, C = (t.repeat_interleave(groups, dim=2) for t in (B, C))
        state, outs = x.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[-1]), []
        for i in range(x.shape[1]):
            decay = (dt[:, i] * A).exp()[..., None, None]
            state = decay * state + torch.einsum("bh,bhp,bhn->bhpn", dt[:, i], x[:, i], B[:, i])
            outs.append(torch.einsum("bhpn,bhn->bhp", state, C[:, i]) + D[:, None] * x[:, i])
        out = torch.stack(outs, dim=1)
        return (out, state) if return_final_states else out
"""
REASON = "Triton of this version makes mistakes in gated backward passes on this device; " + 10 * "long " + "end"
FLA = f"""
    import torch
    class Refused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, o): return o.clone()
        @staticmethod
        def backward(ctx, grad): raise RuntimeError({REASON!r})
    def chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=False, use_qk_l2norm_in_kernel=False):
        assert use_qk_l2norm_in_kernel
        q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
        q, k = (t.repeat_interleave(v.shape[2] // t.shape[2], dim=2) for t in (q, k))
        state, outs = v.new_zeros(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1]), []
        for i in range(v.shape[1]):
            state = g[:, i].exp()[..., None, None] * state
            new = beta[:, i, :, None] * (v[:, i] - torch.einsum("bhn,bhnp->bhp", k[:, i], state))
            state = state + torch.einsum("bhn,bhp->bhnp", k[:, i], new)
            outs.append(torch.einsum("bhn,bhnp->bhp", q[:, i] * q.shape[-1] ** -0.5, state))
        return Refused.apply(torch.stack(outs, dim=1)), state if output_final_state else None
"""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Importing a library changes this process; other tests must not notice."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.split(".")[0] in ("mamba_ssm", "fla"):
            del sys.modules[name]


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


def context(*paths: Path) -> BenchContext:
    return BenchContext.from_device(CPU, allow_compile=False, peer_paths=paths)


def rows(cases: Any, place: BenchContext) -> list[str]:
    return [
        measure_case(case, place).describe(DeviceSpeed(1.0, 1.0)) for case in cases(place, SMALL_SHAPES[0], first=True)
    ]


def test_a_scan_of_another_library_is_compared_and_timed(tmp_path: Path):
    """Its outputs and all its gradients are those of our reference, its package is left alone."""
    init = "__version__ = '2.9.1'\nimport an_extension_that_is_not_here\n"
    files = {"mamba_ssm/__init__.py": init, "mamba_ssm/ops/triton/ssd_combined.py": MAMBA}
    place = context(write(tmp_path, files))
    cases = list(scan_cases(place, SMALL_SHAPES[0], first=True))[:2]
    for case in cases:
        found = measure_case(case, place)
        assert found.failures == {} and list(found.ms) == ["reference", "mamba_ssm 2.9.1"]
        assert found.peer_errors["mamba_ssm 2.9.1"] < 1e-5
        assert "x, error " in found.describe(DeviceSpeed(1.0, 1.0)) and "WRONG" not in found.describe(
            DeviceSpeed(1.0, 1.0)
        )
        assert found.as_json(DeviceSpeed(1.0, 1.0))["peer_errors"] == found.peer_errors
    assert (tmp_path / "mamba_ssm" / "__init__.py").read_text() == init


def test_a_library_that_is_wrong_is_said_to_be_wrong(tmp_path: Path):
    wrong = MAMBA.replace("D[:, None] * x[:, i]", "2 * D[:, None] * x[:, i]")
    files = {"mamba_ssm/__init__.py": "", "mamba_ssm/ops/triton/ssd_combined.py": wrong}
    place = context(write(tmp_path, files))
    assert "mamba_ssm " in rows(scan_cases, place)[0] and ", WRONG: error " in rows(scan_cases, place)[0]


def test_a_library_that_refuses_costs_its_part_of_the_row(tmp_path: Path):
    """The gated backward pass: the reason that it gives is in the row, whole; ours is measured."""
    files = {"fla/__init__.py": "", "fla/ops/gated_delta_rule/__init__.py": FLA, "fla-0.6.0.dist-info/METADATA": ""}
    place = context(write(tmp_path, files))
    forward, backward = rows(delta_cases, place)
    assert "fla 0.6.0 " in forward and "failed" not in forward and "WRONG" not in forward
    assert backward.startswith("reference ") and f"fla 0.6.0 failed: RuntimeError: {REASON}" in backward


def test_folders_without_kernels_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fix = "Give a folder that holds fla/ or mamba_ssm/, for instance an unpacked wheel."
    (tmp_path / "file").touch()
    told = [str(problem) for problem in peer_path_problems([tmp_path, tmp_path / "file", tmp_path / "none"])]
    assert told == [
        f"--peer-path {tmp_path} has no kernels to compare with. {fix}",
        f"--peer-path {tmp_path / 'file'} is not a folder. {fix}",
        f"--peer-path {tmp_path / 'none'} does not exist. {fix}",
    ]
    with pytest.raises(ConfigError, match="--repeat 0 is below 1") as error:
        main(["kernels", "--device", "cpu", "--repeat", "0", "--peer-path", str(tmp_path)])
    assert "has no kernels" in str(error.value)
    write(tmp_path, {"fla/__init__.py": ""})
    assert main(["kernels", "--device", "cpu", "--repeat", "1", "--only", "norm", "--peer-path", str(tmp_path)]) == 0
    assert "note: --peer-path has no effect: it is for scan, delta, channel-delta" in capsys.readouterr().err


def carried(folder: str) -> Path:
    path = CARRIED / folder
    if not path.is_dir():
        pytest.skip(f"{folder}: not unpacked in .carry/")
    return path


def test_the_real_scan_computes_what_ours_does(monkeypatch: pytest.MonkeyPatch):
    """mamba_ssm's own reference in its kernel's place, which needs a GPU."""
    place = context(carried("mamba_ssm"))
    cases = list(scan_cases(place, SMALL_SHAPES[0], first=True))[:2]
    (way,) = cases[0].peers.values()
    with contextlib.suppress(Exception):  # imports it, and fails without a GPU
        cases[0].call(way)
    module: Any = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")

    def scan(
        x: Any, dt: Any, A: Any, B: Any, C: Any, chunk: int, D: Any = None, return_final_states: bool = False
    ) -> Any:
        out = module.ssd_chunk_scan_combined_ref(x, dt, A, B, C, min(chunk, x.shape[1]), D=D)
        return (out, None) if return_final_states else out

    monkeypatch.setattr(module, "mamba_chunk_scan_combined", scan)
    for case in cases:
        found = measure_case(case, place)
        assert found.failures == {} and max(found.peer_errors.values()) < 1e-5


@pytest.mark.parametrize(
    ("cases", "module", "function", "naive"),
    [
        (delta_cases, "gated_delta_rule", "chunk_gated_delta_rule", "naive_recurrent_gated_delta_rule"),
        (channel_delta_cases, "kda", "chunk_kda", "naive_recurrent_kda"),
    ],
)
@pytest.mark.filterwarnings("ignore:Triton is not supported")
def test_the_real_delta_rules_compute_what_ours_do(
    cases: Any, module: str, function: str, naive: str, monkeypatch: Any
):
    """flash-linear-attention's own references in its kernels' place."""
    folder = carried("fla")
    monkeypatch.syspath_prepend(str(folder))
    reference = getattr(importlib.import_module(f"fla.ops.{module}.naive"), naive)

    def rule(
        q: Any, k: Any, v: Any, g: Any, beta: Any, *, output_final_state: bool, use_qk_l2norm_in_kernel: bool
    ) -> Any:
        assert use_qk_l2norm_in_kernel
        q, k = (F.normalize(t, dim=-1).repeat_interleave(v.shape[2] // q.shape[2], dim=2) for t in (q, k))
        return reference(q=q, k=k, v=v, g=g, beta=beta, output_final_state=output_final_state)

    monkeypatch.setitem(sys.modules, f"fla.ops.{module}", SimpleNamespace(**{function: rule}))
    place = context(folder)
    for case in cases(place, SMALL_SHAPES[0], first=True):
        found = measure_case(case, place)
        assert found.failures == {} and max(found.peer_errors.values()) < 1e-5
