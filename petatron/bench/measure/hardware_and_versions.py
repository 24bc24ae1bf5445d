"""The hardware and software of a measurement: the device, its clocks and power under load, kernels and versions."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from petatron.kernels.registry import KernelChoice

_GPU_FIELDS = ("clocks.sm", "power.draw", "temperature.gpu")


def describe_readings(readings: Sequence[tuple[float, ...]]) -> str:
    """Describes readings of nvidia-smi, one row per second: MHz, watts, degrees."""
    if not readings:
        return "clocks and power unknown: there is no nvidia-smi"
    clock, power, heat = map(statistics.median, zip(*readings))
    return f"{clock:,.0f} MHz, {power:.0f} W, {heat:.0f} °C (medians of {len(readings)} readings)"


def parse_readings(text: str) -> list[tuple[float, ...]]:
    """Parses the all-numeric lines of nvidia-smi's CSV; it writes [N/A] for what a device does not report.

    >>> parse_readings("1980, 120.5, 40\\n[N/A], 1, 2\\n")
    [(1980.0, 120.5, 40.0)]
    """
    readings = []
    for line in text.splitlines():
        try:
            values = tuple(float(word) for word in line.split(","))
        except ValueError:
            continue
        if len(values) == len(_GPU_FIELDS):
            readings.append(values)
    return readings


@contextmanager
def sample_gpu(device: torch.device) -> Iterator[list[tuple[float, ...]]]:
    """Samples clocks and power once a second in another process, while the body runs."""
    readings: list[tuple[float, ...]] = []
    command = shutil.which("nvidia-smi") if device.type == "cuda" else None
    if command is None:
        yield readings
        return
    arguments = [command, f"--id={device.index or 0}", f"--query-gpu={','.join(_GPU_FIELDS)}"]
    arguments += ["--format=csv,noheader,nounits", "--loop=1"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield readings
    finally:
        process.terminate()
        readings += parse_readings(process.communicate()[0] or "")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def choice_row(choice: KernelChoice) -> tuple[str, str]:
    """Describes which kernels an operation uses, and why no better ones.

    >>> choice_row(KernelChoice("adamw", "torch fused", None, (("triton", "the device is no GPU"),)))
    ('adamw:', 'torch fused; not triton: the device is no GPU')
    """
    operation, _, why = str(choice).partition(": ")
    return f"{operation}:", why


def versions() -> dict[str, str | None]:
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if torch.backends.cudnn.is_available() else None,
    }
