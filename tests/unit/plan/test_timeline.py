"""Pictures of pipelines, and measured timelines on disk."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import DataError
from petatron.plan.pipeline_simulator import ActionCosts, simulate
from petatron.plan.timeline_drawing import timeline_svg, timeline_text
from petatron.schedule import Action, ScheduleShape, build_schedule
from petatron.schedule.actions import ActionKind, TimedAction
from petatron.schedule.measured_timeline import read_measured, write_measured

SVG = "{http://www.w3.org/2000/svg}"


def _events(name: str, p: int, v: int, m: int):
    return simulate(build_schedule(ScheduleShape(name, ranks=p, virtual=v, micro_batches=m)), ActionCosts()).events


def test_svg_has_a_box_for_every_computation_at_its_time():
    events = _events("zb-v", 3, 2, 4)
    picture = ElementTree.fromstring(timeline_svg(events, title="a < b", unit="ms"))
    boxes = picture.findall(f"{SVG}g")
    assert len(boxes) == sum(len(rank) for rank in events) == 6 * 3 * 4
    titles = [box.findtext(f"{SVG}title") for box in boxes]
    assert "F(stage 0, micro-batch 0): 0 to 1 ms" in titles
    texts = [text.text for text in picture.findall(f"{SVG}text")]
    assert "a < b" in texts and "rank 2" in texts and "time (ms)" in texts and "W weight gradient" in texts
    assert any(text and text.startswith("idle ") and text.endswith("%") for text in texts)
    # The boxes of a rank do not overlap, and stay inside the picture.
    rows: dict[str, list[tuple[float, float]]] = {}
    for box in boxes:
        rectangle = box.find(f"{SVG}rect")
        assert rectangle is not None
        x, width = float(rectangle.get("x", "nan")), float(rectangle.get("width", "nan"))
        rows.setdefault(rectangle.get("y", ""), []).append((x, x + width))
    assert len(rows) == 3
    for spans in rows.values():
        assert all(one[1] <= two[0] + 0.02 for one, two in pairwise(spans))
        assert spans[-1][1] <= float(picture.get("width", "nan"))


def test_svg_tells_stages_and_kinds_apart_and_shows_numbers_that_fit():
    wide = timeline_svg(_events("interleaved", 2, 2, 4), title="", width=2000)
    assert len({part.split('"')[0] for part in wide.split('fill="#')[1:]}) >= 4 + 2
    assert ">3</text></g>" in wide
    assert "</text></g>" not in timeline_svg(_events("gpipe", 2, 1, 200), title="", width=300)


def test_text_written_out():
    assert timeline_text(_events("1f1b", 2, 1, 2), columns=25).splitlines() == [
        "rank 0 F0F1....B0--..B1--",
        "rank 1 ..F0B0--F1B1--....",
    ]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(30, 120))
def test_text_fits_and_shows_the_idle_part(p: int, m: int, columns: int):
    lines = timeline_text(_events("1f1b", p, 1, m), columns=columns).splitlines()
    assert len(lines) == p and len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= columns
    shown = [line.split(" ", 2)[2] for line in lines]
    if m == 1 and p > 1:
        assert all("." in row for row in shown)
    if p == 1:
        assert "." not in shown[0]


def test_lower_case_for_the_second_stage():
    rows = timeline_text(_events("zb-v", 2, 2, 3), columns=200).splitlines()
    assert "F0" in rows[0] and "f0" in rows[0] and "i0" in rows[0] and "w0" in rows[0]


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="nothing to draw"):
        timeline_text([[TimedAction(Action(ActionKind.SEND_FORWARD, 0, 0), 0.0, 1.0)]])


def test_instant_actions_are_drawn():
    one = [[TimedAction(Action(ActionKind.FORWARD, 0, 0), 5.0, 5.0)]]
    assert timeline_text(one).startswith("rank 0")
    assert "<svg" in timeline_svg(one, title="")


def test_measured_timelines_come_back_as_they_went(tmp_path: Path):
    path = tmp_path / "timeline.json"
    ranks = _events("zb-h1", 2, 1, 3)
    write_measured(path, "zb-h1", ranks)
    back = read_measured(path)
    assert back.name == "zb-h1" and back.ranks == ranks
    first = json.loads(path.read_text())["ranks"][0][0]
    assert first == {"kind": "F", "stage": 0, "micro_batch": 0, "start": 0.0, "end": 1.0}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is no measured timeline"),
        ('{"ranks": []}', "'name' is missing"),
        ('{"name": "1f1b", "ranks": [[]]}', "has no actions"),
        ('{"name": "1f1b", "ranks": [[{"kind": "F"}]]}', "'stage' is missing"),
        (
            '{"name": "1f1b", "ranks": [[{"kind": "X", "stage": 0, "micro_batch": 0, "start": 0, "end": 1}]]}',
            "'X' is not a valid ActionKind",
        ),
        (
            '{"name": "1f1b", "ranks": [[{"kind": "F", "stage": 0, "micro_batch": 0, "start": 2, "end": 1}]]}',
            "goes from 2.0 to 1.0",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, words: str):
    path = tmp_path / "timeline.json"
    path.write_text(content)
    with pytest.raises(DataError, match=words):
        read_measured(path)


def test_files_that_cannot_be_read_or_written(tmp_path: Path):
    with pytest.raises(DataError, match="Cannot read"):
        read_measured(tmp_path / "absent.json")
    with pytest.raises(DataError, match="Cannot read"):
        read_measured(tmp_path)
    with pytest.raises(DataError, match="Cannot write"):
        write_measured(tmp_path, "1f1b", [])
