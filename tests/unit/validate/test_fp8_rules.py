"""Rules and notices about FP8."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from petatron.config.derived_defaults import derive_defaults
from petatron.config.schema.fields import fields_by_name, flatten_config, unflatten_config
from petatron.config.setting_bounds_and_conflicts import number_problems
from petatron.config.yaml_file import dump_yaml
from petatron.validate import resolve_config
from petatron.validate.fp8 import check_fp8
from tests.longform import diagonal, later

BASE = shlex.split("--preset tiny-llama --mock-data --lr 1e-3 --train-iters 100 --bf16")


def problems(**changes: object) -> list[str]:
    """Of the base configuration with FP8 and these values."""
    values = flatten_config(resolve_config(BASE)[0].config)
    for name, value in {"fp8_format": "hybrid", **changes}.items():
        values[fields_by_name()[name].path] = value  # pyright: ignore[reportArgumentType]
    config, _ = derive_defaults(unflatten_config(values))
    return [str(problem) for problem in (*number_problems(config), *check_fp8(config))]


def test_what_is_in_order():
    assert problems() == []
    assert problems(fp8_recipe="blockwise", hidden_size=256) == []
    assert problems(fp8_format=None, hidden_size=50) == []
    assert problems(first_last_layers_bf16=True, num_layers=3) == []
    assert problems(fp8_format=None, fp8_param_gather=True) == []
    for recipe in ("tensorwise", "delayed", "blockwise"):
        for strategy in ("optim", "optim_grads", "optim_grads_params"):
            changes = {"fp8_recipe": recipe, "data_parallel_sharding_strategy": strategy, "hidden_size": 256}
            assert problems(fp8_param_gather=True, **changes) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp16": True, "bf16": False}, "--fp8-format hybrid cannot be combined with --fp16. Use --bf16."),
        ({"fp64": True, "bf16": False}, "--fp8-format hybrid cannot be combined with --fp64. Use --bf16."),
        ({"fp8_amax_history_len": 0}, "--fp8-amax-history-len 0 is below 1. Use 1 or more."),
        ({"num_layers_at_end_in_bf16": -1}, "--num-layers-at-end-in-bf16 -1 is below 0. Use 0 or more."),
        ({"num_layers_at_start_in_bf16": -1}, "--num-layers-at-start-in-bf16 -1 is below 0. Use 0 or more."),
        (
            {"first_last_layers_bf16": True, "num_layers": 2},
            "--first-last-layers-bf16 leaves none of --num-layers 2 in FP8 with 2 first and last layers kept out of it. "
            "Lower --num-layers-at-start-in-bf16 or --num-layers-at-end-in-bf16.",
        ),
        (
            {"hidden_size": 100},
            "--fp8-format hybrid with --fp8-recipe tensorwise takes sizes that are multiples of 16, "
            "but --hidden-size is 100. Nearest: 96 or 112.",
        ),
        (
            {"fp8_recipe": "blockwise", "fp8_format": "e4m3", "hidden_size": 192},
            "--fp8-format e4m3 with --fp8-recipe blockwise takes sizes that are multiples of 128, "
            "but --hidden-size is 192. Nearest: 128 or 256.",
        ),
        (
            {"fp8_recipe": "mxfp8", "seq_length": 48},
            "--fp8-format hybrid with --fp8-recipe mxfp8 takes sizes that are multiples of 32, "
            "but a rank's micro-batch has 48 tokens. Nearest: --seq-length 32 or 64, or --micro-batch-size 2.",
        ),
        (
            {"fp8_recipe": "mxfp8", "hidden_size": 80},
            "--fp8-format hybrid with --fp8-recipe mxfp8 takes sizes that are multiples of 32, "
            "but --hidden-size is 80. Nearest: 64 or 96.",
        ),
        (
            {"seq_length": 100, "micro_batch_size": 2},
            "--fp8-format hybrid with --fp8-recipe tensorwise takes sizes that are multiples of 16, "
            "but a rank's micro-batch has 200 tokens. Nearest: --seq-length 96 or 104, or --micro-batch-size 4.",
        ),
        (
            {"seq_length": 40, "context_parallel_size": 2},
            "--fp8-format hybrid with --fp8-recipe tensorwise takes sizes that are multiples of 16, "
            "but a rank's micro-batch has 20 tokens. Nearest: --seq-length 32 or 64, or --micro-batch-size 4.",
        ),
        (
            {"fp8_param_gather": True},
            "--fp8-param-gather has nothing to gather: every rank updates all weights. "
            "Add --use-distributed-optimizer, on two or more data-parallel ranks; or leave it out.",
        ),
        (
            {"fp8_param_gather": True, "data_parallel_sharding_strategy": "optim_grads", "fp8_recipe": "rowwise"},
            "--fp8-param-gather sends numbers with one scale, but --fp8-recipe rowwise gives each one two, its row's and its "
            "column's. Use tensorwise, delayed or blockwise; or leave it out.",
        ),
    ],
)
def test_rules(changes: dict[str, object], message: str):
    assert problems(**changes) == [message]


@pytest.mark.parametrize(
    ("flags", "notice"),
    [
        ("--fp8-amax-history-len 4", "--fp8-amax-history-len has no effect: it is for --fp8-format"),
        ("--first-last-layers-bf16", "--first-last-layers-bf16 has no effect: it is for --fp8-format"),
        ("--fp8-param-gather", "--fp8-param-gather has no effect: it is for --fp8-format"),
        (
            "--fp8-hybrid --fp8-param-gather --use-distributed-optimizer",
            "--fp8-param-gather has no effect: no two ranks hold the same weights, as data-parallel ones do",
        ),
        (
            "--fp8-hybrid --fp8-amax-compute-algo max",
            "--fp8-amax-compute-algo has no effect: it is for --fp8-recipe delayed",
        ),
        (
            "--fp8-hybrid --num-layers-at-end-in-bf16 2",
            "--num-layers-at-end-in-bf16 has no effect: it is for --first-last-layers-bf16",
        ),
        (
            "--fp8-hybrid --fp8-recipe blockwise",
            "--fp8-format hybrid is e4m3 with --fp8-recipe blockwise: hardware multiplies no blocks of e5m2",
        ),
        (
            "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --use-distributed-optimizer",
            "--fp8-param-gather with --fp8-recipe mxfp8 gathers weights in the precision of the run, as Megatron does: each number has "
            "two scales, its row's and its column's",
        ),
    ],
)
def test_settings_without_effect_are_said_aloud(flags: str, notice: str):
    assert notice in resolve_config([*BASE, *flags.split()])[0].notices


@pytest.mark.parametrize("flags", ["--fp8-hybrid", "--fp8-format e4m3"])
def test_fp8_over_fp32_is_said_aloud(flags: str):
    loaded, problems = resolve_config([*BASE[:-1], *flags.split()])
    assert BASE[-1] == "--bf16" and problems == []
    [notice] = loaded.notices
    assert f"{loaded.config.precision.fp8_format} is emulated, and slower than no FP8, in a run in fp32" in notice
    assert notice.endswith("Add --bf16")
    assert resolve_config(BASE[:-1])[0].notices == ()


@pytest.mark.parametrize(
    "flags",
    [
        "--fp8-hybrid --fp8-recipe delayed --fp8-amax-history-len 4 --first-last-layers-bf16 --num-layers-at-end-in-bf16 0",
        "--fp8-format e4m3 --fp8-recipe blockwise",
    ],
)
def test_settings_with_effect_are_not(flags: str):
    assert resolve_config([*BASE, *flags.split()])[0].notices == ()


@diagonal(3)
@pytest.mark.parametrize("multiple", [16, 128])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("samples", [1, later(2), 6, later(16)])
def test_the_sizes_it_proposes_are_in_order(multiple: int, ranks: int, samples: int):
    """Every length and every micro-batch in the message."""
    recipe = "blockwise" if multiple == 128 else "tensorwise"
    changes = {"fp8_recipe": recipe, "hidden_size": 256, "context_parallel_size": ranks, "micro_batch_size": samples}
    refused = 0
    for length in range(2 * ranks, 50 * ranks, 6 * ranks):
        found = problems(seq_length=length, **changes)
        refused += len(found)
        for message in found:
            lengths, batches = message.partition("Nearest: --seq-length ")[2].split(", or --micro-batch-size ")
            for text in lengths.split(" or "):
                assert int(text) % (2 * ranks) == 0 or ranks == 1
                assert problems(**changes | {"seq_length": int(text)}) == []
            for text in batches.rstrip(".").split(" or "):
                assert problems(**changes | {"seq_length": length, "micro_batch_size": int(text)}) == []
    assert refused > 0 or multiple == samples


def asked(flags: str, file: Path | None = None) -> list[str]:
    return [str(it) for it in resolve_config([*BASE, *flags.split()], files=[] if file is None else [file])[1]]


REFUSED = (
    "says how FP8 scales are chosen, but --fp8-format is not set, so nothing would be in FP8. "
    "Add --fp8-format hybrid, or leave it out."
)


def test_a_recipe_asks_for_a_format(tmp_path: Path):
    for recipe in ("tensorwise", "rowwise"):  # the default, too: who names it wants FP8
        assert asked(f"--fp8-recipe {recipe}") == [f"--fp8-recipe {recipe} {REFUSED}"]
    file = tmp_path / "run.yaml"
    file.write_text("precision:\n  fp8_recipe: rowwise\n")
    assert asked("", file) == [f"--fp8-recipe rowwise {REFUSED}"]
    assert asked("--fp8-hybrid", file) == []
    file.write_text("precision:\n  fp8_format: null\n")
    assert asked("--fp8-recipe rowwise", file) == [f"--fp8-recipe rowwise {REFUSED}"]


def test_a_recipe_beside_a_format_that_is_none(tmp_path: Path):
    """A saved configuration has every field, and a flag may turn FP8 off for once."""
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(resolve_config(BASE)[0].config))
    assert "fp8_recipe: tensorwise" in file.read_text() and asked("", file) == []
    file.write_text("precision:\n  fp8_format: hybrid\n  fp8_recipe: rowwise\n")
    assert asked("", file) == [] and asked("--fp8-format none", file) == []
    assert asked("--fp8-format none --fp8-recipe rowwise") == []
    # A format that was meant and misspelt is one problem.
    assert [text.split()[0] for text in asked("--fp8-recipe rowwise --fp8-formt hybrid")] == ["--fp8-formt"]
    assert len(asked("--fp8-recipe rowwise --fp8-format hybird")) == 1


def test_who_turned_bf16_off_is_not_told_to_add_it():
    [notice] = resolve_config([*BASE, "--no-bf16", "--fp8-hybrid"])[0].notices
    assert "is emulated" in notice and "Add" not in notice
