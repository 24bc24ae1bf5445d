"""`petatron bench scale` on worlds that are small enough to be true at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from petatron.base.errors import ConfigError
from petatron.bench.scale import ScaleMeasurement, _verdict, growth_exponent, layout_flags
from petatron.bench.simulated_checkpoint_plan import _boxes_per_rank
from petatron.cli.bench import main
from petatron.models.registry import model_spec
from petatron.sharding.boxes import tiling_problem
from petatron.validate import load_config

TINY = "--model tiny-llama --tp 2 --pp 2 --microbatches 4".split()


def test_every_part_is_measured_at_every_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["scale", "--sizes", "8,4", *TINY, "--json", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr().out
    small, large = json.loads((tmp_path / "found.json").read_text())["sizes"]
    assert (small["ranks"], small["layout"]) == (4, "tp2 pp2 cp1 dp1")
    assert (large["ranks"], large["layout"]) == (8, "tp2 pp2 cp1 dp2")
    for one in (small, large):
        seconds = one["seconds"]
        assert set(seconds) == {
            *("config", "groups", "mesh", "in flight", "schedule", "model"),
            *("read manifest", "load requests", "directory", "load plan"),
            *("survey", "messages", "save plan", "folder entries", "layout", "table", "manifest"),
        }
        later = sum(seconds[part] for part in ("folder entries", "layout", "table", "manifest"))
        saving = later + seconds["survey"] + seconds["messages"] + seconds["save plan"]
        assert one["later_save_s"] == pytest.approx(later, abs=2e-3)
        assert one["save_s"] == pytest.approx(saving, abs=2e-3)
        assert one["start_s"] == pytest.approx(sum(seconds.values()) - saving, abs=2e-3)
        assert one["schedule_bytes"] == 10 * 4 * (2 + 2), "10 bytes for each of a rank's computations and transfers"
        assert one["boxes"] > one["boxes_of_rank"] > 0 and one["table_bytes"] > 1000
        assert one["rows"] > 0 and one["messages"] <= one["ranks"] and one["transfer_peers"] < one["ranks"]
    assert large["communicator_ranks"] > small["communicator_ranks"]
    assert large["manifest_bytes"] > small["manifest_bytes"]
    assert (small["control_peers"], large["control_peers"]) == (3, 5)
    for label in ("start overhead, s", "first save, s", "later saves, s", "  manifest", "growth", "within 10 s"):
        assert label in printed


def test_checkpoints_can_be_left_out(tmp_path: Path):
    main(["scale", "--sizes", "4", *TINY, "--without-checkpoint", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert "manifest" not in found["sizes"][0]["seconds"] and "save" not in found["verdict"]


@pytest.mark.parametrize("sizes", ["", "64,many", "0,8", "-1"])
def test_sizes_that_are_none(sizes: str):
    with pytest.raises(ConfigError, match=r"--sizes .*is not a list of numbers of ranks"):
        main(["scale", f"--sizes={sizes}"])


def test_counts_below_one_are_refused_at_once():
    with pytest.raises(ConfigError) as refused:
        main("scale --sizes x --tp 0 --virtual 0 --microbatches -1".split())
    assert [problem.where for problem in refused.value.problems] == ["--tp", "--virtual", "--microbatches", "--sizes"]


def test_a_world_that_cannot_be_divided_has_less_of_each_parallelism():
    assert layout_flags(4096, tp=8, pp=16, cp=2) == ["--tp", "8", "--pp", "16", "--cp", "2"]
    assert layout_flags(6, tp=8, pp=16, cp=2) == ["--tp", "2", "--pp", "1", "--cp", "1"]


@pytest.mark.parametrize("flags", ["--tp 2 --pp 2", "--tp 4 --pp 1 --cp 2", "--tp 1 --pp 2 --ddp-bucket-size 1000"])
def test_the_made_up_tables_are_the_whole_model(flags: str):
    data = "--mock-data --lr 1e-3 --train-iters 1 --bf16 --use-distributed-optimizer"
    run = load_config(f"{flags} {data}".split(), preset="tiny-llama", world_size=16).config
    shapes = model_spec(run).logical_shapes()
    held = _boxes_per_rank(shapes, run)
    assert len(held) == 16
    for name, shape in shapes.items():
        boxes = [box for rank in held for other, _, box in rank if other == name]
        assert tiling_problem(shape, boxes) is None, name


def test_growth_is_the_power_of_the_world():
    assert growth_exponent([1.0, 1.0], [64, 1024]) == 0
    assert growth_exponent([1.0, 2.0, 32.0], [8, 64, 256]) == pytest.approx(2)
    assert growth_exponent([1.0], [64]) is None and growth_exponent([0.0, 1.0], [64, 128]) is None


def test_the_verdict_names_what_is_too_slow_or_too_steep():
    def measured(size: int, manifest: float) -> ScaleMeasurement:
        return ScaleMeasurement(size, "", {"mesh": 0.1, "manifest": manifest})

    good = _verdict([measured(64, 0.1), measured(4096, 2.0)], checkpoint=True)
    assert good == "start 0.1 s at 64 ranks, within 10 s; save 2.0 s at 4,096 ranks, within 10 s"
    bad = _verdict([measured(1024, 1.0), measured(4096, 16.0)], checkpoint=True)
    assert "save 16.0 s at 4,096 ranks, ABOVE 10 s" in bad and "manifest grows as N^2.0" in bad
    assert "no bar applies" in _verdict([measured(16384, 99.0)], checkpoint=True)


@pytest.mark.parametrize("words", ["scale --sizes 0,x --tp 0", "data --size-mb -1 --workers 0"])
def test_problems_are_told_with_that_of_the_report(words: str):
    with pytest.raises(ConfigError, match="3 problems"):
        main([*words.split(), "--json", "/none/such.json"])
