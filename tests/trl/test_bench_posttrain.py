"""`petatron bench posttrain` beside TRL's own trainers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from petatron.cli.bench import main
from tests.cli.bench.test_bench_posttrain import ANSWERS, ROWS, TINY

pytestmark = pytest.mark.trl


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("sft", [*ROWS, "--peer-packing", "bfd", "--peer-recompute"]),
        ("lora", ROWS),
        ("grpo", [*ANSWERS, "--peer-rows", "2"]),
    ],
)
def test_both_sides_do_the_same_work(tmp_path: Path, kind: str, flags: list[str]):
    path = tmp_path / "measured.json"
    assert main(["posttrain", kind, *TINY, *flags, "--against", "trl", "--json", str(path)]) == 0
    values = json.loads(path.read_text())
    ours, peer = values["sides"]["petatron"], values["sides"]["trl"]
    assert ours["tokens"] == pytest.approx(peer["tokens"], rel=0.3 if kind == "grpo" else 0)
    assert len(peer["step_s"]) == 2 and values["ratio"] > 0
