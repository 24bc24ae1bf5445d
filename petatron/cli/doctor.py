"""`petatron doctor`: reports what this machine supports, what would be used, and what each missing extra costs.

Features are tested, not queried: an attention kernel or a fused optimizer counts as usable when a tiny call on the device
succeeds, because "enabled" flags are true on machines where the kernel then refuses to run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from petatron.base.errors import LaunchError
from petatron.base.version import __version__
from petatron.cli.subcommands import doctor_nccl
from petatron.cli.subcommands.command_parser import CommandParser
from petatron.mesh.launch.environment import read_environment, usable_cores

if TYPE_CHECKING:
    import torch

CORE = ("torch", "numpy", "safetensors", "pyyaml", "tokenizers")
# Extra -> its libraries, and what is unavailable when they are missing.
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "log": (
        ("rich", "tensorboard", "wandb", "matplotlib"),
        "the live terminal view, TensorBoard, Weights & Biases and PNG pictures of curves",
    ),
    "hf": (("transformers",), "comparing with Hugging Face models"),
    "data": (("zstandard",), "reading .zst corpora"),
    "tokenizers": (
        ("sentencepiece",),
        "SentencePiece models of the unigram kind, or that normalize text; those of BPE as Llama 2 has it need nothing",
    ),
    "images": (("pillow",), "images beside text: files of images, and requests with images"),
    "fetch": (("huggingface-hub", "pyarrow"), "downloading public datasets (petatron data fetch)"),
    "triton": (
        ("triton",),
        "fused GPU kernels; what they do is then done with plain operations, in more passes over memory",
    ),
    "serve": (
        ("fastapi", "uvicorn", "prometheus_client", "jinja2", "llguidance"),
        "petatron serve, and answers that match a JSON schema or a regular expression",
    ),
    "lm-eval": (("lm-eval", "tenacity"), "lm-evaluation-harness (petatron lm-eval)"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """One device and what runs on it."""

    kind: str
    name: str
    memory_gb: float
    peak_bf16_tflops: float | None
    reason: str
    attention: tuple[str, ...]
    """Scaled-dot-product backends that ran, in torch's order of preference."""
    fused_adamw: bool
    kernels: tuple[str, ...]
    """The kernels of training in bf16 for each operation, and why nothing better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything `petatron doctor` found; `--json` prints it unchanged."""

    petatron: str
    python: str
    platform: str
    cores: int
    versions: dict[str, str | None]
    devices: tuple[DeviceReport, ...]
    backends: dict[str, bool]
    missing_extras: dict[str, str]
    """Extra -> what is unavailable without it."""
    launched_by: str
    problems: tuple[str, ...]
    working_folder: str
    working_folder_free_gb: float


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the subcommand."""
    root = CommandParser(
        prog="petatron doctor", description="Report versions, devices, backends and what each missing extra costs."
    )
    text = "print one JSON object; with --nccl, to a file"
    root.add_argument("--json", nargs="?", const=True, metavar="FILE", help=text)
    tried = root.add_mutually_exclusive_group()
    text = (
        "try communication between GPUs (a process per GPU, or several on the one there is; or on torchrun's or srun's "
        "ranks): bandwidth of every collective, two steps of training against one process, and a verdict"
    )
    tried.add_argument("--nccl", action="store_true", help=text)
    tried.add_argument("--gloo", action="store_true", help="the same between CPU processes")
    root.add_argument("--ranks", type=int, metavar="N", help="processes to start for that")
    return root


def main(argv: Sequence[str]) -> int:
    """Print the diagnosis, which is no verdict and always 0; or try communication, which is one."""
    options = parser().parse_args(list(argv))
    if options.nccl or options.gloo:
        if options.json is True:
            parser().error("--json needs a FILE here: the table goes to the terminal")
        report = None if options.json is None else Path(options.json)
        return doctor_nccl.check_ranks(device="cuda" if options.nccl else "cpu", ranks=options.ranks, report=report)
    if options.ranks is not None or isinstance(options.json, str):
        parser().error("--ranks and --json FILE are for --nccl and --gloo")
    diagnosis = diagnose()
    print(json.dumps(asdict(diagnosis), indent=2) if options.json else render(diagnosis))
    return 0


def diagnose() -> Diagnosis:
    import torch.distributed as dist

    problems: list[str] = []
    try:
        environment = read_environment()
        launched_by = f"{environment.launcher} (rank {environment.rank} of {environment.world_size})"
    except LaunchError as error:
        launched_by = "unclear"
        problems.append(str(error))
    folder = os.getcwd()
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        problems.append(f"Cannot write in {folder}. Give --save and --log-dir a writable folder.")
    versions: dict[str, str | None] = {}
    for name in (*CORE, *(name for names, _ in EXTRAS.values() for name in names)):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
        versions.setdefault(name, None)
    missing = {
        extra: f"{feature} (missing: {', '.join(absent)})"
        for extra, (names, feature) in EXTRAS.items()
        if (absent := [name for name in names if versions[name] is None])
    }
    gloo, nccl = dist.is_available() and dist.is_gloo_available(), dist.is_available() and dist.is_nccl_available()
    return Diagnosis(
        petatron=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        cores=usable_cores(),
        versions=versions,
        devices=_devices(),
        backends={"gloo": gloo, "nccl": nccl},
        missing_extras=missing,
        launched_by=launched_by,
        problems=tuple(problems),
        working_folder=folder,
        working_folder_free_gb=round(shutil.disk_usage(folder).free / 1e9, 1),
    )


def _devices() -> tuple[DeviceReport, ...]:
    import torch

    from petatron.base.device import detect_device

    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    reports: list[DeviceReport] = []
    for device in (torch.device("cpu"), *(torch.device("cuda", index) for index in range(num_cuda))):
        info = detect_device("cpu") if device.type == "cpu" else detect_device("cuda", local_rank=device.index)
        peak = info.peak("bfloat16")
        reports.append(
            DeviceReport(
                kind=info.kind,
                name=info.name,
                memory_gb=round(info.memory_bytes / 1e9, 1),
                peak_bf16_tflops=None if peak is None else peak / 1e12,
                reason="always there; its peak is unknown, so no MFU" if info.kind == "cpu" else info.reason,
                attention=_attention_backends(device),
                fused_adamw=_succeeds(lambda device=device: _fused_adamw(device)),
                kernels=_kernels(device),
            )
        )
    return tuple(reports)


def _attention_backends(device: torch.device) -> tuple[str, ...]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from petatron.kernels.cpu_matmul import unsupported_reason

    half = torch.bfloat16  # a CPU without its instructions would be slow, and may report that on stderr
    dtype = half if unsupported_reason(device.type, half) is None else torch.float32
    preferred = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }

    def attend(backend: SDPBackend) -> None:
        x = torch.zeros(1, 2, 64, 64, dtype=dtype, device=device)
        with sdpa_kernel(backend):
            torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    return tuple(name for name, backend in preferred.items() if _succeeds(lambda backend=backend: attend(backend)))


def _kernels(device: torch.device) -> tuple[str, ...]:
    import torch

    from petatron.kernels.registry import KernelContext, choose_all_kernels

    chosen = choose_all_kernels(KernelContext.of(device, torch.bfloat16, allow_compile=True))
    return (*map(str, chosen), *_gemm_kernels(device.type, torch.bfloat16))


def _gemm_kernels(device: str, dtype: torch.dtype) -> Iterator[str]:
    """Yields the GEMMs outside the registry: they are PyTorch functions."""
    from petatron.kernels import cpu_matmul, weight_grad_gemm
    from petatron.kernels.moe import grouped_gemm

    name = str(dtype).removeprefix("torch.")
    for reason, fast, slow in (
        (
            cpu_matmul.unsupported_reason(device, dtype),
            f"GEMMs and attention: {name}",
            f"GEMMs and attention: {name} widened to float32, results rounded once; not {name}",
        ),
        (
            grouped_gemm.unsupported_reason(device, dtype),
            "expert GEMMs: one kernel for all experts; one after the other for widths that are no multiples of 8",
            "expert GEMMs: one expert after the other; not one kernel",
        ),
        (
            weight_grad_gemm.unsupported_reason(device),
            "weight gradients: accumulated in float32 by the GEMM that computes them; experts' by another pass",
            "weight gradients: accumulated by a GEMM of operands cast to float32; not one kernel",
        ),
    ):
        yield fast if reason is None else f"{slow}: {reason}"


def _fused_adamw(device: torch.device) -> None:
    import torch

    weight = torch.zeros(4, device=device, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    torch.optim.AdamW([weight], fused=True).step()


def _succeeds(attempt: Callable[[], None]) -> bool:
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch explains at length why a kernel was not selected
            attempt()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def render(diagnosis: Diagnosis) -> str:
    """The diagnosis for people."""
    lines = [f"petatron {diagnosis.petatron}, Python {diagnosis.python}, {diagnosis.platform}, {diagnosis.cores} cores"]
    lines += ["", "Versions"]
    lines += [f"  {name:14} {version or 'not installed'}" for name, version in diagnosis.versions.items()]
    lines += ["", "Devices"]
    for device in diagnosis.devices:
        peak = "" if device.peak_bf16_tflops is None else f", {device.peak_bf16_tflops:.0f} bf16 TFLOP/s"
        lines.append(f"  {device.kind}: {device.name}, {device.memory_gb} GB{peak} ({device.reason})")
        lines.append(f"      attention: {', '.join(device.attention) or 'none ran'}")
        lines.append(f"      AdamW of torch: {'fused' if device.fused_adamw else 'one kernel per operation'}")
        lines += [f"      {kernel}" for kernel in device.kernels]
    backends = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in diagnosis.backends.items())
    lines += ["", f"Communication: {backends}", f"Started by: {diagnosis.launched_by}"]
    lines.append(f"Working folder: {diagnosis.working_folder}, {diagnosis.working_folder_free_gb} GB free")
    install = "Missing extras, and what they cost (pip install 'petatron[NAME]')"
    lines += ["", install if diagnosis.missing_extras else "All extras are installed."]
    lines += [f"  {extra:8} {cost}" for extra, cost in diagnosis.missing_extras.items()]
    if diagnosis.problems:
        lines += ["", "Problems", *(f"  {problem}" for problem in diagnosis.problems)]
    return "\n".join(lines)
