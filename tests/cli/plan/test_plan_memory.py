"""`petatron plan memory`: the table, the verdict, what would fit, and clear errors."""

from __future__ import annotations

import pytest

from petatron.cli.main import main

CHANGES = "; --micro-batch-size, --seq-length and --global-batch-size change that"
FP8 = "bf16, fp32 master weights, GEMMs in FP8 hybrid"
EIGHT = "llama3-8b --bf16 --vocab-size 128256 --seq-length 4096"


def plan(capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, str, str]:
    code = main(["plan", "memory", *words.split()])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def test_every_pipeline_rank_has_a_row(capsys: pytest.CaptureFixture[str]):
    code, text, _ = plan(capsys, f"{EIGHT} --pp 2 --global-batch-size 8")
    precision, batch, head, first, second, _, hint = text.splitlines()
    assert code == 0 and precision == "planned for bf16, fp32 master weights"
    assert batch == f"planned for 8 micro-batches of 1 x 4,096 tokens per step{CHANGES}"
    assert head.split() == [
        *("pipeline", "rank", "weights", "gradients", "optimizer", "activations", "logits", "workspace", "total", "GB")
    ]
    for rank, line in enumerate((first, second)):
        number, *sizes, total = (float(word) for word in line.split())
        assert number == rank and total == pytest.approx(sum(sizes), abs=0.3)
    assert "--device-memory-gb N" in hint


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("--pp 4", 4),
        ("--pp 2 --dp 3 --micro-batch-size 2", 2),
        ("--pp 2 --pipeline-schedule gpipe", 2),
        ("--pp 2 --num-virtual-stages-per-pipeline-rank 2", 4),
        ("--pp 2 --pipeline-schedule zb-v", 4),
    ],
)
def test_a_pipeline_is_planned_full(capsys: pytest.CaptureFixture[str], flags: str, count: int):
    small = f"tiny-llama --vocab-size 1000 {flags}"
    _, text, _ = plan(capsys, small)
    _, batch, *rows = text.splitlines()
    why = f"to fill the pipeline, since no --global-batch-size is given{CHANGES}"
    per_micro_batch, size = (6, 2) if "--dp 3" in flags else (1, 1)
    assert batch == f"planned for {count} micro-batches of {size} x 128 tokens per step {why}"
    _, given, _ = plan(capsys, f"{small} --global-batch-size {count * per_micro_batch}")
    _, said, *same = given.splitlines()
    assert said == f"planned for {count} micro-batches of {size} x 128 tokens per step{CHANGES}" and same == rows
    _, twice, _ = plan(capsys, f"{small} --global-batch-size {2 * count * per_micro_batch}")
    assert (twice.splitlines()[2:] == rows) == ("gpipe" not in flags)
    _, one, _ = plan(capsys, f"{small} --global-batch-size {per_micro_batch}")
    assert one.splitlines()[2:] != rows and one.splitlines()[1].startswith(f"planned for 1 micro-batch of {size} x ")


def test_a_run_that_fits(capsys: pytest.CaptureFixture[str]):
    code, text, _ = plan(capsys, f"{EIGHT} --device-memory-gb=400")
    assert code == 0 and "\nfits: " in text and "of 400.0 GB" in text


def test_a_run_that_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str]):
    code, text, _ = plan(capsys, f"{EIGHT} --device-memory-gb 140")
    assert code == 1 and "\ndoes not fit: " in text
    assert [line.split(".")[0] for line in text.splitlines()[-3:]] == ["  1", "  2", "  3"]
    code, text, _ = plan(capsys, f"{EIGHT} --device-memory-gb 10")
    assert code == 1 and "No setting and no layout of 1 rank is predicted to fit" in text


@pytest.mark.parametrize(
    ("flags", "planned"),
    [
        ("", "fp32, since no --bf16 or --fp16 is given"),
        ("--bf16", "bf16, fp32 master weights"),
        ("--fp16", "fp16, fp32 master weights"),
        ("--fp64", "fp64"),
        ("--bf16 --fp8-hybrid --fp8-recipe rowwise", f"{FP8} (rowwise)"),
        (
            "--bf16 --fp8-hybrid --fp8-output-head-backward",
            f"{FP8} (tensorwise), those of the output head's backward too",
        ),
        (
            "--bf16 --fp8-hybrid --first-last-layers-bf16 --num-layers-at-start-in-bf16 2 --num-layers 4",
            f"{FP8} (tensorwise), not in the first 2 and last 1 layer",
        ),
        (
            "--bf16 --fp8-hybrid --dp 2 --use-distributed-optimizer --fp8-param-gather",
            f"{FP8} (tensorwise), weights all-gathered in FP8",
        ),
    ],
)
def test_the_precision_comes_first(capsys: pytest.CaptureFixture[str], flags: str, planned: str):
    _, text, _ = plan(capsys, f"tiny-llama --vocab-size 1000 {flags}")
    assert text.splitlines()[0] == f"planned for {planned}"


def test_a_run_in_fp32_is_offered_bf16_first(capsys: pytest.CaptureFixture[str]):
    narrow = f"{EIGHT} --micro-batch-size 4 --device-memory-gb 200"
    code, text, _ = plan(capsys, narrow.replace(" --bf16", ""))
    advice = text.splitlines()[-3:]
    assert (
        code == 1
        and advice[0].startswith("  1. --bf16: frees ")
        and "the fastest of these; computes in bfloat16" in advice[0]
    )
    code, text, _ = plan(capsys, narrow)
    assert code == 0 and "--bf16" not in text


@pytest.mark.parametrize("size", ["much", "0", "-3", "inf", "nan", ""])
def test_sizes_that_are_none(capsys: pytest.CaptureFixture[str], size: str):
    code, _, errors = plan(capsys, f"{EIGHT} --device-memory-gb={size}")
    assert code == 2 and "is not a size above 0. Write, for example, --device-memory-gb 80." in errors


SEVENTY = "llama3-70b --bf16 --world-size 64 --device-memory-gb 80"


def test_layouts_and_pinned_host_memory_are_part_of_the_advice(capsys: pytest.CaptureFixture[str]):
    """Eight ranks that offload 60 layers each pin more than 700 GB of their node; times are compared with what can run."""
    _, text, _ = plan(capsys, SEVENTY)
    first, *others = text.splitlines()[-3:]
    assert first.startswith("  1. --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 2 ")
    assert " --data-parallel-size 4 --global-batch-size 64 " in first and first.endswith(
        "needs 55.1 GB, the fastest of these"
    )
    assert all("slower than that" in line for line in others) and "less time" not in text
    offload = "--cpu-offloading-num-layers 60 --data-parallel-sharding-strategy optim_grads_params"
    (line,) = [line for line in others if offload in line]
    assert "pins 725.8 GB of host memory per node (90.7 GB for each of 8 ranks)" in line
    assert "up to 800.0 of a node's 1000.0 GB are pinned, which is assumed: --host-memory-gb N says another" in text
    flags = first.split(". ", 1)[1].split(":")[0]
    code, text, _ = plan(capsys, f"llama3-70b --bf16 --device-memory-gb 80 {flags}")
    assert code == 0 and "fits: 55.1 GB" in text


def test_a_layout_with_its_state_on_the_host_is_found_where_nothing_else_fits(capsys: pytest.CaptureFixture[str]):
    """70B on one node: no setting of one layout fits, nor any layout that keeps its optimizer state on the devices."""
    node = "llama3-70b --bf16 --seq-length 4096 --device-memory-gb 80"
    code, text, _ = plan(capsys, f"{node} --world-size 8 --host-memory-gb 2000")
    line = next(line for line in text.splitlines() if line.startswith("  1. "))
    flags = line.split(". ", 1)[1].split(":")[0]
    assert code == 1 and "--tensor-model-parallel-size 8 " in flags and "--optimizer-cpu-offload" in flags
    assert "bf16" not in flags, "rounding is the last resort"
    code, text, _ = plan(capsys, f"{node} --host-memory-gb 2000 {flags}")
    assert code == 0 and "fits: 60.8 GB" in text and "needs 60.8 GB" in line
    _, text, _ = plan(capsys, f"{node} --world-size 8 --host-memory-gb 1")
    assert "No setting and no layout of 8 ranks is predicted to fit: use more ranks, or a smaller model." in text
    assert text.endswith("up to 0.8 of a node's 1.00 GB are pinned\n"), "the host is a limit of that, too"


@pytest.mark.slow
@pytest.mark.parametrize(("host", "most"), [(500, 400), (1, 0)])
def test_advice_stays_within_a_smaller_host(capsys: pytest.CaptureFixture[str], host: int, most: int):
    _, text, _ = plan(capsys, f"{SEVENTY} --host-memory-gb {host}")
    pinned = [float(line.split("pins ")[1].split()[0]) for line in text.splitlines() if "pins " in line]
    assert max(pinned, default=0) <= most and "assumed" not in text and "--tensor-model-parallel-size 8" in text


@pytest.mark.slow
def test_layers_that_a_pipeline_does_not_divide_are_split_unevenly(capsys: pytest.CaptureFixture[str]):
    _, text, _ = plan(capsys, "deepseek-v3 --bf16 --world-size 512 --ep 64 --device-memory-gb 80")
    layouts = [line for line in text.splitlines() if "--decoder-last-pipeline-num-layers" in line]
    flags = layouts[0].split(". ", 1)[1].split(":")[0]
    code, text, _ = plan(capsys, f"deepseek-v3 --bf16 --device-memory-gb 80 {flags}")
    assert code == 0 and "fits: " in text


def test_a_run_that_offloads_more_than_the_host_has(capsys: pytest.CaptureFixture[str]):
    offload = "--dp 8 --use-distributed-optimizer --optimizer-cpu-offload --cpu-offloading-num-layers 30"
    code, text, _ = plan(capsys, f"{EIGHT} {offload} --device-memory-gb 80 --host-memory-gb 100")
    assert code == 1 and "per node of 8 ranks: too much; up to 80.0 of a node's 100.0 GB are pinned" in text
    assert "fits the device, not the host: " in text
    code, text, _ = plan(capsys, f"{EIGHT} {offload} --device-memory-gb 80 --host-memory-gb 2000")
    assert code == 0 and "offload pins " in text and "too much" not in text


def test_a_plan_for_several_nodes_needs_no_address(capsys: pytest.CaptureFixture[str]):
    code, text, _ = plan(capsys, f"{EIGHT} --nnodes 4 --nproc-per-node 4 --cpu-offloading-num-layers 4")
    assert code == 0 and "per node of 4 ranks" in text


def test_other_flags_are_those_of_a_run(capsys: pytest.CaptureFixture[str]):
    code, _, errors = plan(capsys, f"{EIGHT} --tensor-model-paralel-size 2")
    assert code == 2 and "--tensor-model-parallel-size" in errors
    code, text, _ = plan(capsys, "--help")
    assert code == 0 and "usage: petatron plan memory" in text
