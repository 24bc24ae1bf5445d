"""The threat model is one table, and each of its rows names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADER = ["who", "reaches", "could", "what stops it", "test"]
SUBJECTS = (
    *("one machine", "several machines", "srun", "torchrun", "NCCL's data plane", "The server", "/metrics"),
    *("checkpoint", "Hugging Face", "Megatron checkpoint", "dataset", "YAML", "chat template", "tokenizer.json"),
)


def _rows(text: str) -> list[list[str]]:
    lines = [line.strip() for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def _section() -> str:
    text = (ROOT / "docs" / "security.md").read_text()
    return text.partition("\n## Threat model\n")[2].partition("\n## ")[0]


TABLE = _rows(_section())
ATTACKS = [row for row in TABLE[2:] if not row[0].startswith("**")]


def test_there_is_one_table():
    everywhere = "\n".join((ROOT / name).read_text() for name in ("SECURITY.md", "docs/security.md", "docs/serving.md"))
    assert TABLE[0] == HEADER and len([row for row in _rows(everywhere) if row[0] == "who"]) == 1
    missing = [subject for subject in SUBJECTS if not any(subject in cell for row in TABLE for cell in row)]
    assert not missing and len(ATTACKS) > 25


@pytest.mark.parametrize("row", ATTACKS, ids=lambda row: f"{row[0]}: {row[1]}"[:60])
def test_every_attack_has_a_test_that_exists(row: list[str]):
    assert len(row) == len(HEADER) and all(row)
    named = re.findall(r"`([^`]+)`", row[4])
    absent = [name for name in named if not (name.startswith("tests/") and (ROOT / name).is_file())]
    assert not absent
    stopped = not row[3].startswith(("nothing", "only"))
    assert bool(named) == stopped, "what we stop has a test, and what we do not stop says so"


def test_every_test_of_attacks_is_in_the_table():
    folder = ROOT / "tests" / "security"
    unnamed = [file for file in folder.rglob("test_*.py") if f"`{file.relative_to(ROOT)}`" not in _section()]
    assert unnamed == []
