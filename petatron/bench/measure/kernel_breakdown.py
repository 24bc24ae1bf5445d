"""Breaks a step's time down by kernel class: every kernel of a few profiled steps, classified by name.

Kernels are classified by the names that libraries give them: cuBLAS's GEMMs are nvjet or gemm, cuDNN's attention is sdpa,
torch.compile's begin with triton_ and name the operations they fuse. The first rule that matches decides. Idle is the
time in which no kernel runs at all; where kernels overlap, the classes add up to more than the busy time.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from petatron.bench.measure.run_contenders import BenchRunner
from petatron.bench.measure.timing import synchronize

KERNEL_CLASSES = ("GEMM", "attention", "elementwise", "optimizer", "copies", "communication", "other", "idle")
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_RULES: Sequence[tuple[str, re.Pattern[str]]] = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        ("communication", r"nccl|all_?reduce|all_?gather|reduce_?scatter|send_?recv"),
        ("copies", r"multi_tensor.*copy"),
        ("optimizer", r"adam|multi_tensor|foreach|lpnorm|grad_norm|(?<!cast_)squares"),
        ("elementwise", r"^_[a-z_]+$"),  # all of kernels/triton but the optimizer's
        ("GEMM", r"^triton_tem_"),
        ("elementwise", r"^triton_(poi|red|per|for|mix)_"),
        ("attention", r"sdpa|flash|fmha|attention|attn"),
        ("GEMM", r"nvjet|gemm|cutlass|xmma|cublas|splitk|wgmma|grouped_mm|matmul"),
        ("copies", r"memcpy|memset|copy|CatArray|chunk_cat|split_with_sizes|FillFunctor"),
        (
            "elementwise",
            r"triton|elementwise|vectorized|unrolled|reduce|softmax|norm|rope|rotate|rotary|swiglu|silu|glu_|embedding|index"
            r"|scatter|gather|quanti[sz]e|cross_entropy|nll_loss|permute|cast|amax|update_scale",
        ),
    )
)


def kernel_class(name: str) -> str:
    """Returns the class of a kernel.

    >>> kernel_class("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT"), kernel_class("triton_poi_fused_mm_silu_mul_3")
    ('GEMM', 'elementwise')
    """
    return next((kind for kind, pattern in _RULES if pattern.search(name)), "other")


def break_down_kernels(events: Iterable[Mapping[str, Any]], *, steps: int, top: int = 15) -> dict[str, Any]:
    """Converts events of a Chrome trace (times in microseconds) to the milliseconds of one of the steps they span.

    As JSON: by class, and of the kernels that took the most.
    """
    work = [event for event in events if event.get("ph") == "X" and event.get("cat") in _DEVICE_WORK]
    totals: dict[str, tuple[float, int]] = {}
    classes: dict[str, float] = dict.fromkeys(KERNEL_CLASSES, 0.0)
    for event in work:
        ms = event["dur"] / 1e3 / steps
        before, calls = totals.get(event["name"], (0.0, 0))
        totals[event["name"]] = (before + ms, calls + 1)
        classes[kernel_class(event["name"])] += ms
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in work)
    wall = (max(end for _, end in spans) - spans[0][0]) / 1e3 / steps if spans else 0.0
    classes["idle"] = max(0.0, wall - _busy_time(spans) / 1e3 / steps)
    largest = sorted(totals.items(), key=lambda item: -item[1][0])[:top]
    rows = [
        {"name": name, "class": kernel_class(name), "ms": ms, "calls": calls // steps} for name, (ms, calls) in largest
    ]
    return {"steps": steps, "step_ms": wall, "ms": classes, "top": rows}


def _busy_time(spans: Sequence[tuple[float, float]]) -> float:
    """Returns how long at least one of the spans, sorted by start, was running."""
    covered, reached = 0.0, float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def profile_steps(runner: BenchRunner, *, steps: int = 3) -> dict[str, Any]:
    """Profiles some steps; the profiler's slow first step is excluded by a step before it."""
    runner.run(1)
    synchronize(runner.device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        runner.run(steps)
        synchronize(runner.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return break_down_kernels(events, steps=steps)
