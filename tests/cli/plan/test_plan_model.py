"""`petatron plan model`: every parameter and FLOP is in one part, of every type of model, and the picture shows all of them."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from petatron.base.errors import ConfigError
from petatron.cli.plan import main
from petatron.models.registry import model_spec
from petatron.plan.model_drawing import model_svg
from petatron.plan.model_parts import model_parts, repeated_units
from petatron.validate import load_config

PRESETS = (
    *("llama3-8b", "gpt3-125m", "mixtral-8x7b", "deepseek-v3", "nemotron-h-8b", "gemma3-1b"),
    *("bert-base", "modernbert-base", "t5-small", "flan-t5-base"),
)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_parts_add_up_to_the_model(preset: str):
    spec = model_spec(load_config([], preset=preset, require_training=False).config)
    parts = model_parts(spec)
    layers = [(group.repeats, part) for group in parts.groups for layer in group.layers for part in layer]
    outside = (*parts.before, *(part for _, part in parts.between), *parts.after)
    every = [*((1, part) for part in outside), *layers]
    assert sum(times * part.parameters for times, part in every) == parts.parameters
    assert sum(times * part.flops for times, part in every) == pytest.approx(parts.flops, rel=0.03)
    covered = [index for group in parts.groups for index in range(group.first, group.last + 1)]
    assert covered == list(range(len(spec.layers)))
    texts = [text for text in ElementTree.fromstring(model_svg(parts, title=preset)).itertext() if text.strip()]
    for part in (*outside, *(part for _, part in layers)):
        assert part.title.replace("_", " ") in texts
    assert preset in texts


def test_layers_of_a_pattern_are_drawn_once():
    spec = model_spec(load_config([], preset="modernbert-base", require_training=False).config)
    assert [(first, len(unit), repeats) for first, unit, repeats in repeated_units(spec.layers)] == [
        (0, 1, 1),
        (1, 3, 7),
    ]
    numbers = [1, 2, 1, 2, 1, 3, 3, 3, 1]
    units = list(repeated_units(numbers))  # type: ignore[arg-type]
    assert units == [(0, (1, 2), 2), (4, (1,), 1), (5, (3,), 3), (8, (1,), 1)]


def test_the_table_and_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["model", "t5-small", "--out", str(tmp_path / "t5.svg")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["part", "parameters", "of", "FLOPs"] and printed[-1].split()[:2] == [
        "all",
        "60,506,624",
    ]
    assert "layers 6 to 11" in printed and any("cross-attention" in line for line in printed)
    assert "6 x" in (tmp_path / "t5.svg").read_text()


def test_a_picture_that_cannot_be_written_is_told_before_the_model_is_read(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--out .* is in a folder that does not exist"):
        main(["model", "llama3-8b", "--out", str(tmp_path / "no" / "file.svg")])
