"""Every public name exists, has a docstring with an example, and every example in the package and in the tools of its tests runs."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import petatron

ROOT = Path(petatron.__file__).parent.parent
TEST_TOOLS = (
    *(ROOT / "tests" / "nccl_rules").glob("*.py"),
    ROOT / "tests" / "meta_device_rank.py",
    ROOT / "tests" / "longform.py",
)
WITH_EXAMPLES = sorted(p for p in (*(ROOT / "petatron").rglob("*.py"), *TEST_TOOLS) if ">>> " in p.read_text())


@pytest.mark.parametrize("name", petatron.__all__)
def test_public_name_has_an_example(name: str):
    assert ">>> " in (getattr(petatron, name).__doc__ or ""), f"petatron.{name} has no example"


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="build_model"):
        petatron.no_such_thing  # noqa: B018


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0 and result.failed == 0
