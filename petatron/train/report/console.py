"""Console output of a run: Megatron's log lines, or a live view with the loss curve on a terminal.

The live view is shown only when both stdout and stderr are terminals. With `petatron train | tee log` or a scheduler's
log file, output is plain lines.

The curve is drawn with braille characters, a cell being 2 x 4 dots, so that 80 columns show 160 points of the
history. Each dot column shows the mean of the log points that fall into it (or a straight line between neighbours
where there are fewer), and is joined to the one before, which keeps steep parts connected.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TextIO

import numpy as np

from petatron.base.errors import ConfigError, Problem
from petatron.base.terminal_escape import escaped_stream, printable, raw_stream
from petatron.history.draw.braille import BrailleCanvas
from petatron.train.report.metrics import (
    LogRecord,
    MetricRecord,
    MetricSink,
    format_duration,
    format_percent,
    format_record,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

Point = tuple[float, float]

_MAX_POINTS = 4096
_LABEL_WIDTH = 8


class ConsoleSink:
    """Prints each record as the line (or lines) a script can parse."""

    def __init__(self, stream: TextIO | None = None, *, throughput: bool = True) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._throughput = throughput

    def write(self, record: MetricRecord) -> None:
        self._stream.write(format_record(record, throughput=self._throughput) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


def build_console_sink(
    live: Literal["auto", "on", "off"],
    *,
    out: TextIO | None = None,
    err: TextIO | None = None,
    throughput: bool = True,
) -> MetricSink:
    """Returns the live view when requested, or when both streams are terminals and rich is installed; else plain lines on stdout."""
    lines: TextIO = sys.stdout if out is None else out
    terminal: TextIO = sys.stderr if err is None else err
    watched = lines.isatty() and terminal.isatty()
    if live == "off" or (live == "auto" and not watched):
        return ConsoleSink(lines, throughput=throughput)
    try:
        from rich.console import Console
    except ImportError as error:
        if live == "auto":
            return ConsoleSink(lines, throughput=throughput)
        problem = Problem("--live", "on", "needs rich, which is not installed", "pip install 'petatron[log]'.")
        raise ConfigError([problem]) from error
    console = Console(file=raw_stream(terminal), force_terminal=True if live == "on" else None)
    if live == "auto" and console.is_dumb_terminal:
        return ConsoleSink(lines, throughput=throughput)
    return LiveSink(console)


class LiveSink:
    """A panel that redraws itself: progress, numbers of the last log point, loss curve, last messages."""

    def __init__(self, console: Console, *, auto_refresh: bool = True) -> None:
        from rich.live import Live

        self._console = console
        self._last: LogRecord | None = None
        self._train: list[Point] = []
        self._valid: list[Point] = []
        self._messages: deque[str] = deque(maxlen=4)
        self._live = Live(
            console=console,
            get_renderable=self.render,
            auto_refresh=auto_refresh,
            refresh_per_second=2,
            transient=False,
        )
        self._streams = sys.stdout, sys.stderr
        self._live.start()
        sys.stdout, sys.stderr = (
            escaped_stream(sys.stdout),
            escaped_stream(sys.stderr),
        )  # rich has replaced sys.stdout and sys.stderr
        self._moved_handlers = _move_log_handlers(console.file)

    def write(self, record: MetricRecord) -> None:
        if record["kind"] == "train":
            self._last = LogRecord.from_record(record)
            if self._last.lm_loss is not None and math.isfinite(self._last.lm_loss):
                self._train = downsample([*self._train, (self._last.iteration, self._last.lm_loss)], _MAX_POINTS)
        elif record["kind"] == "valid":
            self._valid = [*self._valid, (record["iteration"], record["lm_loss"])]
            self._messages.append(f"iteration {record['iteration']}: {record['split']} loss {record['lm_loss']:.4f}")
        else:
            self._messages.append(printable(str(record["message"])))
        self._live.refresh()

    def close(self) -> None:
        self._live.stop()
        sys.stdout, sys.stderr = self._streams
        for handler, stream in self._moved_handlers:
            handler.setStream(stream)
        self._moved_handlers = []

    def render(self) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        last = self._last
        if last is None:
            return Panel(Text("\n".join(["waiting for the first iteration", *self._messages])), title="petatron")
        parts: list[RenderableType] = [_progress_bar(last), _metric_table(last, self._valid), Text()]
        height = max(4, min(12, self._console.height - 10 - len(self._messages)))
        parts.append(LossPlot(self._train, self._valid, height=height))
        parts += [Text(message, style="dim", overflow="ellipsis", no_wrap=True) for message in list(self._messages)]
        return Panel(Group(*parts), title=f"petatron · iteration {last.iteration:,} of {last.train_iters:,}")


def _move_log_handlers(terminal: Any) -> list[tuple[logging.StreamHandler[Any], Any]]:
    """Redirects log messages above the panel.

    While a live view runs, rich replaces sys.stderr; handlers created before still have the real stream.
    """
    moved: list[tuple[logging.StreamHandler[Any], Any]] = []
    for handler in logging.getLogger("petatron").handlers:
        if isinstance(handler, logging.StreamHandler) and raw_stream(handler.stream) in (terminal, sys.__stderr__):
            moved.append((handler, handler.stream))
            handler.setStream(sys.stderr)
    return moved


def _progress_bar(last: LogRecord) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    fraction = last.iteration / max(1, last.train_iters)
    eta_s = None if last.eta_s is None else max(0.0, last.eta_s - (time.time() - last.time))
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    bar = ProgressBar(total=max(1, last.train_iters), completed=last.iteration)
    row.add_row(bar, Text(f"{100 * fraction:.0f}%  ETA {format_duration(eta_s)}", style="bold"))
    return row


def _metric_table(last: LogRecord, valid: Sequence[Point]) -> RenderableType:
    """Label above value, in as many equal columns as there are numbers."""
    from rich.table import Table
    from rich.text import Text

    cells = [
        ("loss", "n/a" if last.lm_loss is None else f"{last.lm_loss:.4f}"),
        *((name, "n/a" if mean is None else f"{mean:.4f}") for name, mean in (last.named_losses or {}).items()),
        ("valid", f"{valid[-1][1]:.4f}" if valid else "n/a"),
        ("lr", f"{last.lr:.2e}"),
        ("grad norm", "n/a" if last.grad_norm is None else f"{last.grad_norm:.3f}"),
        ("tokens/s", format_compact(last.tokens_per_second)),
        ("ms/step", f"{last.elapsed_ms_per_iteration:.0f}"),
        ("MFU", format_percent(last.mfu)),
        ("memory", f"{last.memory_bytes / 1e9:.2f} GB"),
    ]
    table = Table.grid(padding=(0, 1), expand=True)
    for _ in cells:
        table.add_column(ratio=1, no_wrap=True)
    table.add_row(*(Text(label, style="dim") for label, _ in cells))
    table.add_row(*(Text(value, style="bold cyan" if label == "loss" else "bold") for label, value in cells))
    return table


def format_compact(number: float) -> str:
    """Three digits and a unit: 950, 12.4k, 1.30M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            scaled = number / limit
            return f"{scaled:.{max(0, 2 - int(math.log10(scaled)))}f}{unit}"
    return f"{number:.0f}"


class LossPlot:
    """The loss over iterations, as wide as the terminal allows; validation points are marked on it."""

    def __init__(self, train: Sequence[Point], valid: Sequence[Point], *, height: int) -> None:
        self._train = list(train)
        self._valid = list(valid)
        self._height = height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        width = max(8, options.max_width - _LABEL_WIDTH - 2)
        if not self._train:
            return
        means = column_means(self._train, count=2 * width)
        low, high = y_range(means, [loss for _, loss in self._valid])
        rows = braille_curve(means, width=width, height=self._height, low=low, high=high)
        marks = _marker_cells(self._valid, self._train, width=width, height=self._height, low=low, high=high)
        for index, row in enumerate(rows):
            value = high - (high - low) * index / max(1, self._height - 1)
            label = f"{value:.3f}" if index in (0, self._height // 2, self._height - 1) else ""
            line = Text(f"{label:>{_LABEL_WIDTH}} {'┤' if label else '│'}", style="dim", no_wrap=True)
            for column, cell in enumerate(row):
                marked = (column, index) in marks
                line.append("◆" if marked else cell, style="bold yellow" if marked else "cyan")
            yield line
        first, last = f"{self._train[0][0]:.0f}", f"{self._train[-1][0]:.0f}"
        yield Text(f"{'':>{_LABEL_WIDTH}} └{'─' * width}", style="dim", no_wrap=True)
        gap = max(1, width - len(first) - len(last))
        yield Text(f"{'':>{_LABEL_WIDTH}}  {first}{'':{gap}}{last}", style="dim", no_wrap=True)


def column_means(points: Sequence[Point], *, count: int) -> np.ndarray:
    """Mean y of the points (sorted by x) in each of `count` columns; a straight line over columns without any."""
    x, y = np.asarray(points, dtype=np.float64).T
    column = _column_indices(x, first=x[0], last=x[-1], count=count)
    sums, counts = np.bincount(column, weights=y), np.bincount(column)
    filled = np.flatnonzero(counts)
    return np.interp(np.arange(filled[-1] + 1), filled, sums[filled] / counts[filled])


def y_range(means: np.ndarray, others: Sequence[float] = ()) -> Point:
    """Returns the lowest and highest value to show; of a long curve the first fall is cut off, or the remainder would look flat."""
    values = [*means[means.size // 50 :].tolist(), *(value for value in others if math.isfinite(value))]
    low, high = min(values), max(values)
    margin = 0.5 * max(1e-3, 0.01 * abs(high)) if high - low < 1e-9 else 0.0
    return low - margin, high + margin


def braille_curve(means: np.ndarray, *, width: int, height: int, low: float, high: float) -> list[str]:
    """Draw a joined line, one value per dot column, in `height` rows of `width` braille characters."""
    dots = 4 * height
    level = np.clip(np.rint((high - means) / (high - low) * (dots - 1)), 0, dots - 1).astype(int).tolist()
    canvas = BrailleCanvas(width, height)
    canvas.column_line(level)
    return canvas.rows()


def _column_indices(x: np.ndarray, *, first: float, last: float, count: int) -> np.ndarray:
    span = max(last - first, 1e-12)
    return np.clip(np.rint((x - first) / span * (count - 1)), 0, count - 1).astype(np.int64)


def _marker_cells(
    points: Sequence[Point], train: Sequence[Point], *, width: int, height: int, low: float, high: float
) -> set[tuple[int, int]]:
    """Character cells (column, row) of single points on the same axes."""
    shown = [(x, y) for x, y in points if math.isfinite(y) and train[0][0] <= x <= train[-1][0]]
    if not shown:
        return set()
    x, y = np.asarray(shown, dtype=np.float64).T
    columns = _column_indices(x, first=train[0][0], last=train[-1][0], count=2 * width) // 2
    rows = np.clip(np.rint((high - y) / (high - low) * (4 * height - 1)), 0, 4 * height - 1).astype(int) // 4
    return set(zip(columns.tolist(), rows.tolist(), strict=True))


def downsample(points: list[Point], limit: int) -> list[Point]:
    """At most `limit` points: when there are more, each pair becomes its mean."""
    if len(points) <= limit:
        return points
    pairs = zip(points[0::2], points[1::2], strict=False)
    halved = [((a + c) / 2, (b + d) / 2) for (a, b), (c, d) in pairs]
    return halved + points[len(halved) * 2 :]
