"""A process that runs cases one after the other, as fast as it can, and says what came of them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import stat
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from typing import Any

from tests.fuzz.guard import Forbidden, Guard, Outside, TooLong, leaks
from tests.fuzz.kind import Case, Change, Kind, Refused
from tests.fuzz.kinds import make_kind
from tests.fuzz.mutate import make_case

TURN_S = 1.0
"""How long a worker stays with a kind."""
_ALLOCATION = ("can't allocate memory", "bad_alloc", "Cannot allocate memory", "Unable to allocate")


@dataclass
class Tally:
    """What came of the cases of a kind."""

    cases: int = 0
    refused: int = 0
    opened: int = 0
    failed: int = 0
    worst_s: float = 0.0
    worst_bytes: int = 0
    slowest: int = 0
    """The number of the case that took longest."""

    def add(self, other: Tally) -> None:
        self.cases += other.cases
        self.refused += other.refused
        self.opened += other.opened
        self.failed += other.failed
        if other.worst_s > self.worst_s:
            self.worst_s, self.slowest = other.worst_s, other.slowest
        self.worst_bytes = max(self.worst_bytes, other.worst_bytes)


@dataclass(frozen=True)
class Failure:
    """A case that broke a rule. `cause` is the same for cases that fail alike."""

    case: str
    door: str
    cause: str
    detail: str
    kept: str = ""
    slow: bool = False

    def text(self) -> str:
        return f"{self.case} ({self.door}): {self.cause}"


@dataclass
class Bench:
    """A kind on disk, with a working folder in which one sample at a time is put wrong and right again.

    root/KIND is what doors open; root/scratch and root/tmp are for what they write; root/outside is what they must not touch.
    """

    kind: Kind
    root: Path
    guard: Guard
    outside: Outside
    expected: dict[str, Any] = field(default_factory=dict)
    _facts: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def sample(self) -> Path:
        return self.root / self.kind.name

    @property
    def scratch(self) -> Path:
        return self.root / "scratch"

    def prepare(self) -> None:
        """Writes the sample, and opens it through every door: what it gives is what mutated ones must give."""
        self._restore()
        for name, door in self.kind.doors.items():
            with self._quiet():
                self.expected[name] = door(self.sample, self.scratch)
                again = door(self.sample, self._emptied())
            assert again == self.expected[name], f"{self.kind.name} through {name} is not the same twice"
            self._restore()

    def run(self, case: Case, tally: Tally) -> Failure | None:
        """One case; one that took too long is tried once more, because others may have kept the machine busy."""
        mine = Tally()
        failure = self._run(case, mine)
        if failure is not None and failure.slow:
            mine = Tally()
            failure = self._run(case, mine)
        tally.add(mine)
        return failure

    def _run(self, case: Case, tally: Tally) -> Failure | None:
        """Put it there, open it, judge, put the sample back."""
        for path in case.changes:
            _clear(self.sample / path)
        for path, change in case.changes.items():
            if change.place != "gone":
                _clear(self.sample / path)
                change.make(self.sample / path)
        cause, detail = "", ""
        try:
            with self._quiet() as said, self.guard.watched(self.kind.wall_s):
                value = self.kind.doors[case.door](self.sample, self.scratch)
            if value == self.expected[case.door] or not (covered := self.kind.covered(case)):
                tally.opened += 1
            else:
                cause, detail = "opened with other content than a digest covers", f"covered: {covered}\n{value}"
        except BaseException as error:
            refused, cause, detail = _judged(error)
            tally.refused += refused
            if isinstance(error, KeyboardInterrupt | SystemExit) and not self.guard.broken:
                raise
        tally.cases += 1
        tally.worst_s, tally.slowest, tally.worst_bytes = self.guard.cpu_s, case.number, self.guard.growth_bytes
        broken = [*self.guard.over(), *self.outside.changes(), *leaks(self.scratch), *_escapes(said.getvalue())]
        if broken:
            cause, detail = _general(broken[0]), "\n".join([*broken, detail])
        self._restore()
        if not cause:
            return None
        tally.failed += 1
        slow = cause.startswith(("no end", "took"))
        return Failure(case.name, case.door, cause, f"{'; '.join(case.story)}\n{detail}", case.to_json(), slow)

    def _emptied(self) -> Path:
        if self.scratch.is_dir() and any(self.scratch.iterdir()):
            shutil.rmtree(self.scratch)
        self.scratch.mkdir(parents=True, exist_ok=True)
        return self.scratch

    def _restore(self) -> None:
        """Everything that is not as the sample has it is made so; what was not touched is not written."""
        self._emptied()
        there = _walk(self.sample)
        for path, facts in there.items():
            if facts != self._facts.get(path) and not _is_parent(path, self.kind.files, facts):
                _clear(self.sample / path)
        for path, content in self.kind.files.items():
            if path not in there or there[path] != self._facts.get(path):
                _clear(self.sample / path)
                Change("file", content).make(self.sample / path)
                self._facts[path] = _facts(os.lstat(self.sample / path))
        tmp = self.root / "tmp"
        if not tmp.is_dir() or any(tmp.iterdir()):
            shutil.rmtree(tmp, ignore_errors=True)
            tmp.mkdir(parents=True)
        tempfile.tempdir = str(tmp)

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[io.StringIO]:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            yield said


def _judged(error: BaseException) -> tuple[int, str, str]:
    """Whether it is a refusal; else a cause that failures of one kind share, and the traceback."""
    from petatron.base.errors import PetatronError

    text = "".join(traceback.format_exception(error))[-6000:]
    if isinstance(error, PetatronError | Refused):
        if any(
            isinstance(link, MemoryError) or any(words in str(link) for words in _ALLOCATION) for link in _chain(error)
        ):
            return 0, f"memory ran out before it was refused, at {_where(_chain(error)[-1])}", text
        return 1, "", ""
    if isinstance(error, TooLong):
        return 0, f"no end at {_where(error)}", text
    if isinstance(error, Forbidden):
        return 0, _general(str(error)), text
    return 0, f"{type(error).__name__} at {_where(error)}", text


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return found


def _where(error: BaseException) -> str:
    """The innermost line of the package."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = [frame for frame in frames if "/petatron/" in frame.filename] or list(frames)[-1:]
    last = inner[-1] if inner else None
    return f"{last.filename.rpartition('/petatron/')[2]}:{last.name}" if last else "?"


def _general(broken: str) -> str:
    """Without the numbers and names of one case."""
    return re.sub(r"\b\d[\d.]*|\(.*|/\S*", "", broken).strip()


def _escapes(text: str) -> list[str]:
    """Control characters on the terminal, which only tabs and line ends may be."""
    bad = sorted({char for char in text if (char < " " and char not in "\n\t\r") or "\x7f" <= char < "\xa0"})
    return [f"printed control characters: {' '.join(map(repr, bad))}"] if bad else []


# The folder


def _facts(found: os.stat_result) -> tuple[int, ...]:
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode


def _walk(folder: Path) -> dict[str, tuple[int, ...]]:
    """Every entry below a folder, links not followed; folders before what is in them."""
    found: dict[str, tuple[int, ...]] = {}
    stack = [""]
    while stack:
        at = stack.pop()
        try:
            entries = list(os.scandir(folder / at))
        except FileNotFoundError:
            continue
        for entry in entries:
            path = f"{at}/{entry.name}" if at else entry.name
            found[path] = _facts(entry.stat(follow_symlinks=False))
            if entry.is_dir(follow_symlinks=False):
                stack.append(path)
    return found


def _is_parent(path: str, files: Mapping[str, bytes], facts: tuple[int, ...]) -> bool:
    return stat.S_ISDIR(facts[3]) and any(name.startswith(f"{path}/") for name in files)


def _clear(path: Path) -> None:
    """Removes whatever has a path; a link in the place of one of its folders too."""
    for parent in reversed(path.parents):
        if parent.is_symlink():
            parent.unlink()
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


# The process


def make_bench(name: str, root: Path, guard: Guard, outside: Outside) -> Bench:
    bench = Bench(make_kind(name), root, guard, outside)
    bench.prepare()
    return bench


@contextlib.contextmanager
def benches(names: list[str], place: Path | None = None) -> Iterator[dict[str, Bench]]:
    """Kinds ready to be opened in this process, which can do little else from then on."""
    memory = place or (Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir()))
    root = Path(os.path.realpath(tempfile.mkdtemp(prefix="petatron-fuzz-", dir=memory)))
    try:
        outside = Outside(root / "outside")
        guard = Guard(root, outside.folder)
        (root / "tmp").mkdir()
        os.environ["HOME"] = str(root)  # where the package keeps notes of its own
        os.environ["RUST_BACKTRACE"] = "0"  # a panic is an exception here, and its trace would fill the screen
        tempfile.tempdir = str(root / "tmp")
        made = {name: make_bench(name, root, guard, outside) for name in names}
        guard.install()
        yield made
    finally:
        shutil.rmtree(root, ignore_errors=True)


def serve(
    names: list[str], nexts: Mapping[str, int], stride: int, end: float, now: SynchronizedArray, pipe: Connection
) -> None:
    """Runs the cases `nexts[kind]`, `+ stride` and so on below `end` of all kinds in turn, until the other end of the pipe says stop.

    `now` is (kind, number, time) of the case that is running, for whoever has to end this process.
    """
    numbers = dict(nexts)
    with benches(names) as made:
        pipe.send("ready")
        while not pipe.poll() and min(numbers.values()) < end:
            for place, name in enumerate(names):
                until = time.monotonic() + TURN_S
                while time.monotonic() < until and numbers[name] < end and not pipe.poll():
                    tally = Tally()
                    now[:] = (place, numbers[name], time.monotonic())
                    failure = made[name].run(make_case(made[name].kind, numbers[name]), tally)
                    now[2] = 0.0
                    numbers[name] += stride
                    pipe.send(
                        (name, tally, failure, numbers[name])
                    )  # at once: the next case may be the end of this process
    pipe.send("done")


def repeat(cases: Sequence[str | Path], begins: Callable[[str], None]) -> Iterator[tuple[str, Failure | None]]:
    """Cases by `kind:number` or by their files in the corpus, one after the other in this process."""
    kept = {str(case): Case.from_json(case.read_text()) for case in cases if isinstance(case, Path)}
    wanted = [kept[str(case)].kind if isinstance(case, Path) else case.partition(":")[0] for case in cases]
    with benches(list(dict.fromkeys(wanted))) as made:
        for case, kind in zip(cases, wanted):
            begins(str(case))
            found = kept.get(str(case)) or make_case(made[kind].kind, int(str(case).partition(":")[2]))
            yield str(case), made[kind].run(found, Tally())
