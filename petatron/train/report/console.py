"""Console output of a run: Megatron's log lines, or a live view with the loss curve on a terminal.

The live view is shown only when both stdout and stderr are terminals. With `petatron train | tee log` or a scheduler's
log file, output is plain lines.

The curve is drawn as `petatron plot` draws it, with braille characters of 2 x 4 dots, so that 80 columns show 160 points of the
history. Each dot column shows the mean of the log points that fall into it (or a straight line between neighbors
where there are fewer).
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TextIO

import numpy as np

from petatron.base.errors import ConfigError, Problem
from petatron.base.terminal_escape import escaped_stream, printable, printable_lines, raw_stream
from petatron.history.draw.terminal import panel_lines
from petatron.history.metric_curves import Curve, loss_panel
from petatron.train.report.earlier_loss_curves import RunHistory
from petatron.train.report.format_records import format_record, is_for_consoles
from petatron.train.report.log_records import LogRecord, MetricRecord, MetricWriter, format_duration, format_percent

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text

Point = tuple[float, float]

_MAX_POINTS = 4096
_MIN_PLOT_WIDTH = 18
_MAX_MESSAGE_LINES = 3
_PANEL_FRAME = 4
_NO_HISTORY = RunHistory()


class ConsoleWriter:
    """Prints each record as the line (or lines) a script can parse."""

    def __init__(self, stream: TextIO | None = None, *, throughput: bool = True) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._throughput = throughput

    def write(self, record: MetricRecord) -> None:
        if is_for_consoles(record):
            self._stream.write(format_record(record, throughput=self._throughput) + "\n")
            self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


def build_console_writer(
    live: Literal["auto", "on", "off"],
    *,
    out: TextIO | None = None,
    err: TextIO | None = None,
    throughput: bool = True,
    read_history: Callable[[], RunHistory] = lambda: _NO_HISTORY,
) -> MetricWriter:
    """Returns the live view when requested, or when both streams are terminals and rich is installed; else plain lines on stdout.

    `read_history` returns the curves of earlier starts; only the live view needs them.
    """
    lines: TextIO = sys.stdout if out is None else out
    terminal: TextIO = sys.stderr if err is None else err
    watched, plain = lines.isatty() and terminal.isatty(), ConsoleWriter(lines, throughput=throughput)
    if live == "off" or (live == "auto" and not watched):
        return plain
    try:
        from rich.console import Console
    except ImportError as error:
        if live == "auto":
            return plain
        problem = Problem("--live", "on", "needs rich, which is not installed", "pip install 'petatron[log]'.")
        raise ConfigError([problem]) from error
    console = Console(file=raw_stream(terminal), force_terminal=True if live == "on" else None)
    if live == "auto" and console.is_dumb_terminal:
        return plain
    return LiveWriter(console, history=read_history())


class LiveWriter:
    """A panel that redraws itself: progress, numbers of the last log point, loss curve, last messages.

    What comes before the first log point, and the closing summary, are printed above and below it, in full.
    """

    def __init__(self, console: Console, *, auto_refresh: bool = True, history: RunHistory = _NO_HISTORY) -> None:
        from rich.live import Live

        self._console = console
        self._last: LogRecord | None = None
        self._train: list[Point] = list(history.train)
        while len(self._train) > _MAX_POINTS:
            self._train = downsample(self._train, _MAX_POINTS)
        self._valid: list[Point] = list(history.valid)
        self._main_dataset: str | None = None
        self._messages: deque[str] = deque(maxlen=4)
        self._summary: str | None = None
        refresh = {"auto_refresh": auto_refresh, "refresh_per_second": 2, "transient": False}
        self._live = Live(console=console, get_renderable=self.render, **refresh)
        self._streams = sys.stdout, sys.stderr
        self._live.start()
        # rich has replaced sys.stdout and sys.stderr.
        sys.stdout, sys.stderr = escaped_stream(sys.stdout), escaped_stream(sys.stderr)
        self._moved_handlers = _move_log_handlers(console.file)

    def write(self, record: MetricRecord) -> None:
        if not is_for_consoles(record):
            return
        if record["kind"] == "train":
            self._last = LogRecord.from_record(record)
            if self._last.lm_loss is not None and math.isfinite(self._last.lm_loss):
                self._train = downsample([*self._train, (self._last.iteration, self._last.lm_loss)], _MAX_POINTS)
        elif record["kind"] == "valid":
            split, dataset = record["split"], record.get("dataset")
            self._main_dataset = dataset if self._main_dataset is None else self._main_dataset
            if split == "valid" and dataset == self._main_dataset:
                self._valid = [*self._valid, (record["iteration"], record["lm_loss"])]
            where = split if dataset is None else f"{split} ({printable(dataset)})"
            self._messages.append(f"iteration {record['iteration']}: {where} loss {record['lm_loss']:.4f}")
        elif record["kind"] == "eval":
            self._messages.append(printable(format_record(record).strip()))
        elif record["kind"] == "summary":
            self._summary = format_record(record)
        elif record["kind"] == "sample":
            self._messages.extend(
                f"iteration {record['iteration']}: {printable(sample['prompt'])} => {printable(sample['text'])}"
                for sample in record["samples"]
            )
        elif self._last is None:
            self._print(str(record["message"]))
        else:
            self._messages.append(printable(str(record["message"])))
        self._live.refresh()

    def _print(self, text: str) -> None:
        """Prints on the lines that scroll, whole and as it is."""
        self._console.print(printable_lines(text), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()
        sys.stdout, sys.stderr = self._streams
        for handler, stream in self._moved_handlers:
            handler.setStream(stream)
        self._moved_handlers = []
        if self._summary is not None:
            self._print(self._summary)
            self._summary = None

    def render(self) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        last, width = self._last, self._console.width - _PANEL_FRAME
        if last is None:
            waiting = Text("waiting for the first iteration")
            curve = [LossPlot(self._train, self._valid, height=8)] if self._train else []
            return Panel(Group(waiting, *curve, *self._message_lines(width)), title="petatron")
        messages, table = self._message_lines(width), _metric_table(last, self._valid, width)
        height = max(4, min(12, self._console.height - 9 - table.row_count - len(messages)))
        plot = LossPlot(self._train, self._valid, height=height)
        title = f"petatron · iteration {last.iteration:,} of {last.train_iters:,}"
        return Panel(Group(_progress_bar(last), table, Text(), plot, *messages), title=title)

    def _message_lines(self, width: int) -> list[Text]:
        """Returns the last messages, wrapped; of one that needs more lines than that, the log has the whole text."""
        from rich.text import Text

        lines: list[Text] = []
        for message in self._messages:
            wrapped = list(Text(message, style="dim").wrap(self._console, width, overflow="fold"))
            if len(wrapped) > _MAX_MESSAGE_LINES:
                wrapped = wrapped[:_MAX_MESSAGE_LINES]
                wrapped[-1].truncate(width - 1)
                wrapped[-1].append("…")
            lines += wrapped
        return lines


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
    limit = " (time limit)" if last.eta_is_time_limit else ""
    row.add_row(bar, Text(f"{100 * fraction:.0f}%  ETA {format_duration(eta_s)}{limit}", style="bold"))
    return row


def _metric_table(last: LogRecord, valid: Sequence[Point], width: int) -> Table:
    """Label above value: all in one band if numbers fit, or shortened ones do, else in more bands."""
    from rich.table import Table
    from rich.text import Text

    full, short = _metric_cells(last, valid, short=False), _metric_cells(last, valid, short=True)
    for bands in range(1, len(full) + 1):
        columns = -(-len(full) // bands)
        cells = next((cells for cells in (full, short) if _fits(cells, columns, width)), None)
        if cells is not None:
            break
    else:
        columns, cells = 1, short
    table = Table.grid(padding=(0, 1), expand=True)
    for _ in range(columns):
        table.add_column(no_wrap=True)
    for start in range(0, len(cells), columns):
        band = cells[start : start + columns]
        table.add_row(*(Text(label, style="dim") for label, _ in band))
        table.add_row(*(Text(value, style="bold cyan" if label == "loss" else "bold") for label, value in band))
    return table


def _fits(cells: Sequence[tuple[str, str]], columns: int, width: int) -> bool:
    """Whether this number of columns of cells fits, with a space between them."""
    widths = [max(len(text) for cell in cells[column::columns] for text in cell) for column in range(columns)]
    return sum(widths) + columns - 1 <= width


def _metric_cells(last: LogRecord, valid: Sequence[Point], *, short: bool) -> list[tuple[str, str]]:
    """Returns labels and values; a number that this device does not have is left out."""
    digits = 3 if short else 4

    def loss_text(value: float | None) -> str:
        return "n/a" if value is None else f"{value:.{digits}f}"

    memory = last.memory_bytes / 1e9
    named = (last.named_losses or {}) if len(last.named_losses or {}) > 1 else {}  # a single one is "loss"
    cells = [
        ("loss", loss_text(last.lm_loss)),
        *((name, loss_text(mean)) for name, mean in {**named, **(last.objective_metrics or {})}.items()),
        ("valid", loss_text(valid[-1][1] if valid else None)),
        ("lr", f"{last.lr:.1e}" if short else f"{last.lr:.2e}"),
        ("grad norm", "n/a" if last.grad_norm is None else f"{last.grad_norm:.{2 if short else 3}f}"),
        ("tokens/s", format_compact(last.tokens_per_second)),
        ("ms/step", f"{last.elapsed_ms_per_iteration:.0f}"),
        ("memory", f"{memory:.3g} GB" if short else f"{memory:.2f} GB"),
    ]
    return cells if last.mfu is None else [*cells[:-1], ("MFU", format_percent(last.mfu)), cells[-1]]


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

        if not self._train:
            return
        width = max(_MIN_PLOT_WIDTH, options.max_width)
        means = column_means(self._train, count=2 * width)
        steps = np.linspace(self._train[0][0], self._train[-1][0], means.size)
        marked = [point for point in self._valid if math.isfinite(point[1])]
        x, y = np.array(marked, dtype=np.float64).reshape(-1, 2).T
        panel = loss_panel(Curve("", 0, steps, means), Curve("", 1, x, y, is_marks=True))
        for line in panel_lines([panel], [""], width=width, height=self._height, colored=True):
            yield Text.assemble(*line, no_wrap=True)


def column_means(points: Sequence[Point], *, count: int) -> np.ndarray:
    """Mean y of the points (sorted by x) in each of `count` columns; a straight line over columns without any."""
    x, y = np.asarray(points, dtype=np.float64).T
    column = np.rint((x - x[0]) / max(x[-1] - x[0], 1e-12) * (count - 1)).astype(np.int64)
    sums, counts = np.bincount(column, weights=y), np.bincount(column)
    filled = np.flatnonzero(counts)
    return np.interp(np.arange(filled[-1] + 1), filled, sums[filled] / counts[filled])


def downsample(points: list[Point], limit: int) -> list[Point]:
    """At most `limit` points: when there are more, each pair becomes its mean."""
    if len(points) <= limit:
        return points
    pairs = zip(points[0::2], points[1::2], strict=False)
    halved = [((a + c) / 2, (b + d) / 2) for (a, b), (c, d) in pairs]
    return halved + points[len(halved) * 2 :]
