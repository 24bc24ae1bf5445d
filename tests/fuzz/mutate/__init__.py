"""From a number to a mutated sample.

Three ways in: content that is changed and sealed again (digests, archives and lengths fit, as from someone who means harm), bytes
that are changed as they are (a broken disk, a cut copy), and entries of the folder (missing, exchanged, links, pipes).
"""

from __future__ import annotations

import random

from tests.fuzz.kind import Case, Change, Files, Kind
from tests.fuzz.mutate import archives, columns, octets, pickles, tables, texts, trees

FORMATS = {
    "bytes": octets.mutate,
    "json": trees.mutate_json,
    "jsonl": trees.mutate_lines,
    "yaml": texts.mutate_yaml,
    "text": texts.mutate,
    "safetensors": trees.mutate_safetensors,
    "index": tables.mutate_index,
    "npy": tables.mutate_npy,
    "pickle": pickles.mutate,
    "torch": archives.mutate_torch,
    "gzip": archives.mutate_gzip,
    "tar": archives.mutate_tar,
    "csv": texts.mutate_csv,
    "parquet": columns.mutate_parquet,
    "arrow": columns.mutate_arrow,
    "sources": tables.mutate_sources,
}
OUTSIDE = "../outside"
"""A folder beside the working folder, with a secret and with files that must stay as they are."""
_TARGETS = (
    f"{OUTSIDE}/secret.txt", f"{OUTSIDE}/folder", f"{OUTSIDE}/missing", "/dev/zero", "/dev/full", "/dev/tty", "/proc/self/mem", ".", "..",
    "/",
)  # fmt: skip
_STRANGERS = (
    "stranger",
    "a\x1b[31mred",
    "a\nb",
    "..hidden",
    "step-00000009",
    "model.bin",
    "x" * 200,
    "mp_rank_09",
    "%s%n",
    "\udce9",
)


def make_case(kind: Kind, number: int) -> Case:
    """The case of a number, always the same."""
    rng = random.Random(f"{kind.name}:{number}")
    doors = list(kind.doors)
    door = rng.choices(doors, [kind.shares.get(name, 1.0) for name in doors])[0]
    way = rng.random()
    if kind.inner and way < 0.5:
        return _sealed(kind, number, door, rng)
    story: list[str] = []
    files = kind.read_by(door, kind.files)
    changes = _entries(kind, files, rng, story) if way > 0.9 else _contents(kind, files, rng, story)
    return Case(kind.name, number, door, changes, False, tuple(story))


def _sealed(kind: Kind, number: int, door: str, rng: random.Random) -> Case:
    story = ["sealed"]
    inner = dict(kind.inner)
    for path, change in _contents(kind, kind.read_by(door, kind.inner), rng, story).items():
        inner[path] = change.content
    files = kind.seal(inner)
    changes = {path: Change("file", content) for path, content in files.items() if kind.files.get(path) != content}
    return Case(kind.name, number, door, changes, True, tuple(story))


def _contents(kind: Kind, files: Files, rng: random.Random, story: list[str]) -> dict[str, Change]:
    """One file, sometimes two, changed once or a few times."""
    changes: dict[str, Change] = {}
    for path in rng.sample(sorted(files), k=min(len(files), rng.choices((1, 2), (9, 1))[0])):
        content = files[path]
        for _ in range(rng.choices((1, 2, 4), (7, 2, 1))[0]):
            content = _once(kind.format_of(path), content, files, rng, story, path)
        changes[path] = Change("file", content)
    return changes


def _once(form: str, content: bytes, files: Files, rng: random.Random, story: list[str], path: str) -> bytes:
    """A mutation that knows the format, or one of plain bytes; also where the content no longer is of that format."""
    if rng.random() < 0.7:
        try:
            content, done = FORMATS[form](content, rng)
            story.append(f"{path}: {done}")
            return content
        except octets.NotOfThisFormat:
            pass
    other = files[rng.choice(sorted(files))]
    content, done = octets.splice(content, other, rng) if rng.random() < 0.1 else octets.mutate(content, rng)
    story.append(f"{path}: {done}")
    return content


def _entries(kind: Kind, files: Files, rng: random.Random, story: list[str]) -> dict[str, Change]:
    """Something else in the place of a file or a folder, or something more beside it."""
    paths = sorted(files)
    folders = sorted({path.rpartition("/")[0] for path in paths if "/" in path})
    path = rng.choice(paths)
    where = path.rpartition("/")[0]
    what = rng.choice(
        ("gone", "fifo", "folder", "empty", "sparse", "link", "link", "link", "swap", "more", "folder link")
    )
    story.append(f"{path}: {what}")
    up = "../" * path.count("/")
    if what in ("gone", "fifo", "folder"):
        return {path: Change(what)}
    if what == "empty":
        return {path: Change("file")}
    if what == "sparse":
        size = 1 << 20 if path.endswith(kind.streams) else rng.choice((1 << 20, 1 << 32, 1 << 40))
        return {path: Change("sparse", kind.files[path], size=size)}
    if what == "swap":
        other = rng.choice(paths)
        return {path: Change("file", kind.files[other]), other: Change("file", kind.files[path])}
    if what == "more":
        name = rng.choice((*_STRANGERS, *(other.rpartition("/")[2] for other in paths)))
        place = f"{where}/{name}" if where else name
        content = rng.choice((b"", kind.files[rng.choice(paths)]))
        return {place if place not in kind.files else f"{place}.bak": _thing(rng, up, content)}
    if what == "folder link" and folders:
        folder = rng.choice(folders)
        inside = [other for other in paths if other.startswith(f"{folder}/")]
        up = "../" * folder.count("/")
        return {**dict.fromkeys(inside, Change("gone")), folder: Change("link", target=f"{up}{OUTSIDE}/folder")}
    target = rng.choice((*_TARGETS, path.rpartition("/")[2], rng.choice(paths)))
    return {path: Change("link", target=f"{up}{target}" if target.startswith("..") else target)}


def _thing(rng: random.Random, up: str, content: bytes) -> Change:
    """A stranger: a file, a link, a pipe or a folder."""
    place = rng.choice(("file", "file", "link", "fifo", "folder"))
    return Change(place, content if place == "file" else b"", f"{up}{OUTSIDE}/secret.txt" if place == "link" else "")
