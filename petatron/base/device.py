"""Properties of this rank's device and host: kind, peak FLOP/s, memory, CPU instructions.

Model FLOP/s utilization (MFU) divides by the peak the vendor publishes for dense GEMMs. Sparse figures (twice
as high) and figures with half-precision accumulation are not used. A device without an entry has no known peak, and
then MFU is not reported: an invented denominator would be worse than none. A CPU's peak depends on clocks and vector
units that vary from core to core, so it has none either.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from petatron.base.errors import ConfigError, Problem

DeviceKind = Literal["cpu", "cuda"]

# Dense TFLOP/s in the order float32 (without tensor cores), tf32, float16 and bfloat16, float8. 0: not supported.
# The name must match as a whole word, the first match wins, so the narrower name comes first.
_PEAK_TFLOPS: tuple[tuple[str, tuple[float, float, float, float]], ...] = (
    (r"GB200", (80.0, 1250.0, 2500.0, 5000.0)),
    (r"B200", (75.0, 1125.0, 2250.0, 4500.0)),
    (r"B100", (60.0, 875.0, 1750.0, 3500.0)),
    (r"H200 NVL", (60.0, 417.5, 835.5, 1671.0)),
    (r"(H200|GH200)", (66.9, 494.7, 989.4, 1978.9)),
    (r"H100 NVL", (60.0, 417.5, 835.5, 1671.0)),
    (r"(H100|H800) PCIe", (51.2, 378.0, 756.0, 1513.0)),
    (r"(H100|H800)", (66.9, 494.7, 989.4, 1978.9)),
    (r"H20", (44.0, 74.0, 148.0, 296.0)),
    (r"(A100|A800)", (19.5, 156.0, 312.0, 0.0)),
    (r"A40", (37.4, 74.8, 149.7, 0.0)),
    (r"RTX A6000", (38.7, 77.4, 154.8, 0.0)),
    (r"A10", (31.2, 62.5, 125.0, 0.0)),
    (r"L40S", (91.6, 183.0, 362.0, 733.0)),
    (r"L40", (90.5, 90.5, 181.0, 362.0)),
    (r"L4", (30.3, 60.0, 121.0, 242.5)),
    (r"RTX 5090", (104.8, 104.8, 209.5, 419.0)),
    (r"RTX 4090", (82.6, 82.6, 165.2, 330.3)),
    (r"RTX 3090", (35.6, 35.6, 71.0, 0.0)),
    (r"V100-PCIE", (14.0, 0.0, 112.0, 0.0)),
    (r"V100", (15.7, 0.0, 125.0, 0.0)),
    (r"T4", (8.1, 0.0, 65.0, 0.0)),
)
# Slices of a device and cut-down versions share the name but not the speed.
_OTHER_SPEED = re.compile(r"\b(MIG|Laptop|Max-Q|Mobile)\b|4090 D\b", re.IGNORECASE)
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_WITHOUT_BFLOAT16 = re.compile(r"\b(V100|T4)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One device: what it is, how much memory it has, its published peak, and why it was chosen."""

    kind: DeviceKind
    name: str
    memory_bytes: int
    peak_flops: Mapping[str, float] | None
    """Dense FLOP/s by dtype (float32, tf32, float16, bfloat16, float8); None when not published or unclear."""
    reason: str

    def peak(self, dtype_name: str) -> float | None:
        """Returns peak FLOP/s for a dtype, or None when unknown."""
        return None if self.peak_flops is None else self.peak_flops.get(dtype_name)


def peak_flops(name: str) -> dict[str, float] | None:
    """Returns the published dense peaks of a GPU by the name its driver reports."""
    if _OTHER_SPEED.search(name):
        return None
    for pattern, (float32, tf32, half, float8) in _PEAK_TFLOPS:
        if re.search(rf"\b{pattern}\b", name, re.IGNORECASE):
            bfloat16 = 0.0 if _WITHOUT_BFLOAT16.search(name) else half
            by_dtype = {"float32": float32, "tf32": tf32, "float16": half, "bfloat16": bfloat16, "float8": float8}
            return {dtype: tflops * 1e12 for dtype, tflops in by_dtype.items() if tflops}
    return None


def detect_device(kind: Literal["auto", "cpu", "cuda"] = "auto", *, local_rank: int = 0) -> DeviceInfo:
    """Returns the device this rank will use; `auto` selects CUDA when available."""
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and num_cuda == 0:
        raise ConfigError([Problem("--device", "cuda", "needs a CUDA device and none is visible", "Use --device cpu.")])
    if kind == "cpu" or num_cuda == 0:
        why = "--device cpu" if kind == "cpu" else "no CUDA device is visible"
        return DeviceInfo(
            kind="cpu", name=_cpu_name(), memory_bytes=host_memory_bytes(), peak_flops=None, reason=f"{why}; no MFU"
        )
    index = 0 if num_cuda == 1 else local_rank
    if index >= num_cuda:
        rule = f"has no device for local rank {local_rank}: {num_cuda} are visible"
        raise ConfigError([Problem("--device", kind, rule, f"Start at most {num_cuda} ranks (--nproc-per-node).")])
    properties = torch.cuda.get_device_properties(index)
    peaks = peak_flops(properties.name)
    why = f"CUDA device {index} of {num_cuda}"
    return DeviceInfo(
        kind="cuda",
        name=properties.name,
        memory_bytes=properties.total_memory,
        peak_flops=peaks,
        reason=why if peaks else f"{why}; no MFU, because the peak of a {properties.name} is not in the table",
    )


def peak_memory_bytes(kind: DeviceKind) -> int:
    """Returns the most bytes this process has held so far: allocated CUDA memory, or resident memory on a CPU."""
    if kind == "cuda":
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes


@cache
def cpu_instructions() -> frozenset[str]:
    """Returns the instruction sets of this CPU by Linux's names (avx512_bf16 on x86, bf16 on Arm); empty where unknown."""
    return parse_instructions(_cpu_description())


def parse_instructions(description: str) -> frozenset[str]:
    """Returns the instruction sets in a text like /proc/cpuinfo, of its first core.

    >>> sorted(parse_instructions("processor : 0\\nFeatures\\t: fp asimd bf16\\n"))
    ['asimd', 'bf16', 'fp']
    """
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", description, re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def _cpu_description() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _cpu_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _cpu_description(), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def host_memory_bytes() -> int:
    """Returns the memory of this machine, or of the container (cgroup) that this process is limited to."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP_LIMITS:
        try:
            return min(installed, int(Path(path).read_text()))
        except (OSError, ValueError):  # no such file, or the word "max"
            continue
    return installed
