"""The report page: complete, self-contained, and deaf to what the files of others say."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from petatron.history.draw.svg import figure_svg
from petatron.history.draw.theme import THEMES
from petatron.history.metric_curves import build_panels
from petatron.history.report.html_page import report_html
from petatron.history.run_folder import open_run
from tests.unit.history.run_files import event, finished_run, train, valid, write_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b[2J"
VOID = {"meta", "br", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that elements are closed, and collects them with their text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        where = self.open[-1] if self.open else ""
        self.text[where] = self.text.get(where, "") + data

    def names(self) -> set[str]:
        return {tag for tag, _ in self.elements}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    samples = [{"prompt": "Once", "text": " upon\na time"}, {"prompt": EVIL, "text": EVIL}]
    summary = {
        "kind": "summary",
        "iteration": 100,
        "outcome": "complete",
        "duration_s": 3725.0,
        "checkpoint": EVIL,
        "next_commands": [{"command": f"petatron eval {EVIL}", "purpose": "evaluate it"}],
    }
    records = [
        event("x", 0, environment={"torch": "9.9.9", EVIL: EVIL}, origins={"optim.lr": EVIL}),
        *finished_run()[1:],
        train(100, named_losses={EVIL: 2.0}),
        valid(100, 2.25, split="test"),
        valid(100, 2.75, split=EVIL),
        {"kind": "eval", "iteration": 90, "task": EVIL, "metrics": {EVIL: {"value": 0.75}, "loss": {"value": "nan"}}},
        {"kind": "sample", "iteration": 50, "samples": [{"prompt": "early", "text": " bird"}]},
        {"kind": "sample", "iteration": 100, "samples": samples},
        event(EVIL, 100),
        {"kind": EVIL, "iteration": 1},
        summary,
    ]
    run = tmp_path_factory.mktemp("runs") / "<script>alert('run')<"
    write_run(run, records, "--wandb-project", "<script>x" + EVIL[:-4], raw=b"damaged\n")
    step = run / "step-00000100"
    step.mkdir()
    (step / "manifest.json").write_bytes(b"x" * 2_000_000)
    return report_html(open_run(run))


def test_everything_known_of_the_run_is_on_the_page(text: str):
    shown = Page(text).text
    assert "100 of 100" in shown["b"] and "2.25" in shown["b"]
    headings = "Curves,Evaluation,Tasks,Text samples,Settings,Data,Layout,Environment,Checkpoints,Summary of the last start,Events"
    assert shown["h2"] == headings.replace(",", "")
    assert " upon\na time" in shown["pre"] and "Once" in shown["i"] and " bird" in shown["pre"]
    assert "0.75" in shown["td"] and "9.9.9" in shown["td"] and "2MB" in shown["td"] and "1:02 h" in shown["td"]
    assert "1 line could not be read" in shown["p"]


def test_text_of_others_is_never_markup(text: str):
    page = Page(text)
    assert page.names() <= {
        *"html head meta title style body main div h1 h2 span p b br section figure svg text clippath rect g path line circle".split(),
        *"script details summary table thead tbody tr th td pre i footer".split(),
    }
    scripts = [attributes.get("type") for tag, attributes in page.elements if tag == "script"]
    assert scripts.count(None) == 1 and set(scripts) == {None, "application/json"}
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert "\x1b" not in text
    for found in re.findall(r'<script type="application/json">(.*?)</script>', text):
        assert json.loads(found)["curves"]


def test_the_page_requests_nothing(text: str):
    page = Page(text)
    assert not {"src", "href", "action", "xlink:href", "data", "srcset"} & {
        name for _, found in page.elements for name in found
    }
    assert "url(" not in re.sub(r"url\(#clip\d+\)", "", text) and "@import" not in text and "fetch(" not in text
    policy = next(
        found["content"] for _, found in page.elements if found.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None and policy.startswith("default-src 'none'")


def test_the_page_has_a_dark_a_narrow_and_a_printed_form(text: str):
    style = Page(text).text["style"]
    for rule in ("prefers-color-scheme:dark", "max-width:640px", "@media print"):
        assert rule in style


@pytest.mark.parametrize("records", [[], [train(1, float("nan"))], [event("x", 0)]])
def test_a_run_with_next_to_nothing_has_a_page(tmp_path: Path, records: list[dict]):
    run = write_run(tmp_path / "run", records)
    (run / "config.yaml").unlink()
    assert "config.yaml cannot be read" in Page(report_html(open_run(run))).text["p"]


def test_a_picture_is_well_formed_whatever_runs_are_called(tmp_path: Path):
    runs = [open_run(write_run(tmp_path / name, finished_run()), label=f"{name}{EVIL}") for name in ("a", "b")]
    panels = build_panels(runs, smooth=0.5)
    for theme in THEMES.values():
        root = ElementTree.fromstring(figure_svg(panels, [run.label for run in runs], theme=theme, title=EVIL))
        assert {element.tag.split("}")[1] for element in root.iter()} == {
            *"svg style rect text line g clipPath path title".split()
        }
        texts = [element.text for element in root.iter() if element.tag.endswith("text")]
        assert "Training loss" in texts and any(text and text.startswith("b</script>") for text in texts)
