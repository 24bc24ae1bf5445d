"""A run as one HTML page: curves, results, settings with origins, environment, checkpoints, evaluation and text samples.

The page requests nothing, which its content security policy states, and every text that comes from a file is escaped: a run of
somebody else cannot put a script into a report.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from petatron.base.terminal_escape import printable_lines
from petatron.base.version import __version__
from petatron.config.schema.objective_and_dataset_names import LM_LOSS
from petatron.history.draw.axis_ticks import compact, x_text
from petatron.history.draw.svg import html_text, panel_svg
from petatron.history.draw.theme import THEMES
from petatron.history.metric_curves import METRICS, Panel, build_panels
from petatron.history.metrics_file import Evaluation, TaskMetrics
from petatron.history.report.html_style import report_script, report_style
from petatron.history.run_folder import RecordedRun
from petatron.history.run_settings import SettingWithOrigin
from petatron.history.run_summary import summarize_run, summary_texts

_METRICS = ("loss", "valid", "lr", "grad-norm", "throughput", "memory", "mfu")
_SMOOTHED_FROM = 200
_SMOOTH = 0.8
_TILES = (
    "steps",
    "last loss",
    "best validation",
    "test loss",
    "tokens",
    "training time",
    "tokens/s",
    "MFU",
    "peak memory",
)
_MAX_ROWS = 500
_MAX_SAMPLE_CHARS = 4000
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
_LAYOUT_FIELDS = "parallel."
_DATA_FIELDS = "data."


def report_html(run: RecordedRun) -> str:
    """Returns the whole page."""
    name, placed = escape(run.label), (_DATA_FIELDS, _LAYOUT_FIELDS)
    notes = "".join(f"<p>{html_text(note)}</p>" for note in run.notes)
    notes = f'<div class="notes">{notes}</div>' if notes else ""
    others = [setting for path, setting in run.settings.values.items() if not path.startswith(placed)]
    recorded = list(run.metrics.start_metadata("environment").items())[:_MAX_ROWS]
    environment = [(html_text(str(name), 60), html_text(str(value), 300)) for name, value in recorded]
    sections = [
        _section("Curves", _plots(run)),
        _section("Evaluation", _evaluations(run.metrics.evaluations)),
        _section("Tasks", _tasks(run.metrics.tasks)),
        _section("Text samples", _samples(run.metrics.samples)),
        _section("Settings", _settings(others)),
        _section("Data", _settings_of(run, _DATA_FIELDS)),
        _section("Layout", f'<p class="dim">{html_text(run.layout)}</p>' + _settings_of(run, _LAYOUT_FIELDS)),
        _section("Environment", _table((), environment, classes=("k", "v"))),
        _section("Checkpoints", _checkpoints(run)),
        _section("Summary of the last start", _summary(run.metrics.summary)),
        _section("Events", _events(run)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="referrer" content="no-referrer">'
        f"<title>{name} · Petatron run</title><style>{report_style()}</style></head><body><main>"
        f'<div class="head"><h1>{name}</h1><span class="state {run.state}">{run.state}</span></div>'
        f'<p class="lead">{_lead(run)}</p>{_tiles(run)}{notes}{"".join(sections)}'
        f"<footer>Written by Petatron {html_text(__version__)} on {time.strftime('%Y-%m-%d %H:%M')}.</footer></main>"
        f"<script>{report_script()}</script></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def _lead(run: RecordedRun) -> str:
    first = run.metrics.events[0].message if run.metrics.events else ""
    reason = run.state_reason[:1].upper() + run.state_reason[1:]
    changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed_s))
    described = f"{html_text(first, 400)}<br>" if first else ""
    return f"{described}{html_text(reason)}. Last change {changed}."


def _tiles(run: RecordedRun) -> str:
    texts = summary_texts(summarize_run(run))
    shown = [(name, texts[name]) for name in _TILES if texts[name] != "-"]
    tiles = []
    for name, text in shown:
        value, _, note = text.partition(" (")
        small = f"<span>{html_text(note.removesuffix(')'))}</span>" if note else ""
        tiles.append(f'<div class="tile"><span>{name}</span><b>{html_text(value)}</b>{small}</div>')
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _plots(run: RecordedRun) -> str:
    smooth = _SMOOTH if run.metrics.columns["iteration"].size >= _SMOOTHED_FROM else 0.0
    panels = build_panels([run], metrics=[name for name in _METRICS if name in METRICS], smooth=smooth)
    plots = "".join(_plot(panel, f"clip{index}") for index, panel in enumerate(panels))
    note = (
        f'<p class="dim">The loss and other noisy curves are smoothed by {smooth:g}; the pale line is as recorded.</p>'
    )
    return f'<div class="plots">{plots}</div>{note if smooth else ""}' if plots else ""


def _plot(panel: Panel, clip_id: str) -> str:
    low, high = panel.limits[:2]
    curves = [
        {"label": c.label.partition(": ")[2] or panel.title.lower(),
         "x": [round(x, 3) for x in c.x.tolist()], "y": [float(f"{y:.6g}") for y in c.y.tolist()], "marks": c.is_marks}
        for c in panel.curves
    ]  # fmt: skip
    data = {"axis": panel.x_axis, "unit": panel.unit, "low": low, "high": high, "curves": curves}
    svg = panel_svg(panel, clip_id, len(THEMES["light"].runs))
    return (
        f'<figure class="plot">{svg}<div class="tip"></div>'
        f'<script type="application/json">{_script_json(data)}</script></figure>'
    )


def _script_json(value: Any) -> str:
    """JSON inside a script element: no text of it can end the element or open a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _evaluations(evaluations: Sequence[Evaluation]) -> str:
    rows = [
        (
            html_text(evaluation.label, 60),
            f"{evaluation.iteration:,}",
            f"{evaluation.loss:.4f}",
            _perplexity(evaluation),
            _named({**evaluation.named_losses, **evaluation.objective_metrics}),
        )
        for evaluation in reversed(evaluations[-_MAX_ROWS:])
    ]
    head = ("split", "step", "loss", "perplexity", "losses and metrics")
    if not any(row[4] for row in rows):
        rows, head = [row[:4] for row in rows], head[:4]
    return _folded(_table(head, rows, numbers=(1, 2, 3)), "all evaluations", len(rows))


def _tasks(tasks: Sequence[TaskMetrics]) -> str:
    rows = [
        (html_text(result.task, 60), f"{result.iteration:,}", _named(result.values))
        for result in reversed(tasks[-_MAX_ROWS:])
    ]
    return _folded(_table(("task", "step", "metrics"), rows, numbers=(1,)), "all results", len(rows))


def _perplexity(evaluation: Evaluation) -> str:
    """Returns the perplexity of a loss that contains the next token's; of another it would mean nothing."""
    if evaluation.named_losses and LM_LOSS not in evaluation.named_losses:
        return ""
    return compact(math.exp(evaluation.loss)) if evaluation.loss < 20 else "above e^20"


def _named(losses: Mapping[str, float]) -> str:
    return ", ".join(f"{html_text(name, 60)} {compact(value)}" for name, value in losses.items())


def _samples(records: Sequence[Mapping[str, Any]]) -> str:
    """Shows those of the last record, and earlier ones folded."""
    shown = [text for record in reversed(records) if (text := _sample_texts(record))]
    if not shown:
        return ""
    earlier = f"<details><summary>earlier samples</summary>{''.join(shown[1:])}</details>" if shown[1:] else ""
    return shown[0] + earlier


def _sample_texts(record: Mapping[str, Any]) -> str:
    several = record.get("samples")
    samples = several if isinstance(several, list) else [record]
    parts = []
    for sample in samples[:_MAX_ROWS]:
        if isinstance(sample, Mapping) and isinstance(sample.get("text"), str):
            prompt = sample.get("prompt")
            start = f"<i>{_lines(prompt)}</i>" if isinstance(prompt, str) else ""
            parts.append(f"<pre>{start}{_lines(sample['text'])}</pre>")
    step = record.get("iteration")
    return f'<p class="dim">step {step:,}</p>{"".join(parts)}' if parts and isinstance(step, int) else "".join(parts)


def _settings_of(run: RecordedRun, prefix: str) -> str:
    return _settings([setting for path, setting in run.settings.values.items() if path.startswith(prefix)])


def _settings(settings: Sequence[SettingWithOrigin]) -> str:
    """Shows what is not a default, and everything folded."""

    def table(settings: Iterable[SettingWithOrigin]) -> str:
        rows = [
            (html_text(setting.path), html_text(setting.text, 400), html_text(setting.origin, 300))
            for setting in settings
        ]
        return _table(("setting", "value", "origin"), rows, classes=("k", "v", ""))

    changed = [setting for setting in settings if not setting.is_default or setting.origin != "default"]
    defaults = [setting for setting in settings if setting not in changed]
    title = f"{len(defaults)} at their defaults"
    folded = f"<details><summary>{title}</summary>{table(defaults)}</details>" if defaults else ""
    return (table(changed) if changed else "") + folded


def _checkpoints(run: RecordedRun) -> str:
    rows = [
        (f"{step.step:,}", f"{compact(step.num_bytes)}B", time.strftime("%Y-%m-%d %H:%M", time.localtime(step.time_s)))
        for step in reversed(run.checkpoints[-_MAX_ROWS:])
    ]
    elsewhere = run.settings.get("checkpoint.save")
    if not rows and elsewhere is not None:
        return f'<p class="dim">None here; --save was {html_text(str(elsewhere), 400)}.</p>'
    return _table(("step", "size", "written"), rows, numbers=(0, 1))


def _summary(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return ""
    rows = []
    for name, value in list(record.items())[:_MAX_ROWS]:
        if name in ("schema", "kind", "time", "next_commands") or value is None or isinstance(value, list | dict):
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        shown = x_text(value, "time") if is_number and name.endswith("_s") and abs(value) < 1e9 else None
        shown = shown or (compact(value) if isinstance(value, float) else f"{value:,}" if is_number else str(value))
        rows.append((html_text(name.removesuffix("_s").replace("_", " "), 60), html_text(shown, 400)))
    return _table((), rows, classes=("", "v")) + _commands(record.get("next_commands"))


def _commands(commands: Any) -> str:
    lines = [
        f"<i># {html_text(str(command.get('purpose', '')), 200)}</i>\n{html_text(command['command'], 1000)}"
        for command in (commands if isinstance(commands, list) else [])[:20]
        if isinstance(command, Mapping) and isinstance(command.get("command"), str)
    ]
    return f"<pre>{chr(10).join(lines)}</pre>" if lines else ""


def _events(run: RecordedRun) -> str:
    rows = [
        (time.strftime("%m-%d %H:%M:%S", time.localtime(event.time)) if abs(event.time) < 1e11 else "-",
         f"{event.iteration:,}", html_text(event.message, 1000))
        for event in run.metrics.events[-_MAX_ROWS:]
    ]  # fmt: skip
    return _folded(_table(("time", "step", "event"), rows, numbers=(1,)), "all events", len(rows), most=0)


def _folded(table: str, title: str, count: int, *, most: int = 12) -> str:
    return f"<details><summary>{title} ({count:,})</summary>{table}</details>" if count > most else table


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = (), classes: Sequence[str] = ()
) -> str:
    """Builds a table of cells that are HTML already."""
    if not rows:
        return ""
    named = [*classes, *[""] * len(rows[0])]
    kinds = ["n" if index in numbers else named[index] for index in range(len(rows[0]))]

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f'<{tag} class="{kind}">{cell}</{tag}>' for kind, cell in zip(kinds, row))

    top, body = cells("th", head), "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    kind = ' class="fit"' if numbers else ' class="stack"' if len(classes) > 2 else ""
    header = f"<thead><tr>{top}</tr></thead>" if head else ""
    return f'<div class="scroll"><table{kind}>{header}<tbody>{body}</tbody></table></div>'


def _lines(text: str) -> str:
    shown = text if len(text) <= _MAX_SAMPLE_CHARS else f"{text[:_MAX_SAMPLE_CHARS]}..."
    return escape(printable_lines(shown))
