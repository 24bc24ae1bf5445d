"""The folder of an interrupted job: its description, the reports of its parts, and their files.

No digest covers the files of a part: other tokens are other data. The inputs are named by relative paths, because the job has their
names and times.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from petatron.base.errors import DataError
from petatron.config.schema.data import TokenizerConfig
from petatron.data.preprocess import PreprocessOptions, preprocess
from tests.fuzz.kind import Files, Kind
from tests.fuzz.kinds.files import files_of

_PARTS = "out.parts"
_INPUTS: Files = {
    "a.jsonl": "".join(json.dumps({"text": f"line {n}", "id": n}) + "\n" for n in range(40)).encode(),
    "b.jsonl": b'{"text": "more"}\n{"text": "and more", "id": "last"}\nthis line is no JSON\n',
}
_TIME_NS = 1_600_000_000 * 10**9


def make(name: str) -> Kind:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        _write_inputs()
        with contextlib.suppress(DataError):
            _preprocess(on_error="fail")
        files = {path: content for path, content in files_of(Path(folder)).items() if path.startswith(f"{_PARTS}/")}
    assert f"{_PARTS}/00000.json" in files, "a part is finished"
    return Kind(
        name,
        files,
        doors={"continue": _continue, "replace": _replace, "other settings": _other_settings},
        shares={"continue": 4},
        formats={".json": "json", ".idx": "index", ".sources": "sources"},
        streams=("",),
    )


def _write_inputs() -> None:
    for name, content in _INPUTS.items():
        Path(name).write_bytes(content)
        os.utime(name, ns=(_TIME_NS, _TIME_NS))


def _preprocess(**options: Any) -> None:
    chosen = PreprocessOptions(
        inputs=tuple(_INPUTS),
        output_prefix="out",
        tokenizer=TokenizerConfig(tokenizer_type="ByteTokenizer"),
        part_bytes=300,
        **options,
    )
    print("\n".join(preprocess(chosen).problems))


def _done(folder: Path, scratch: Path, **options: Any) -> Any:
    """Goes on with the job in a copy of its folder, and returns what is there then."""
    if (folder / _PARTS).is_symlink() or (folder / _PARTS).is_dir():
        _copy(folder / _PARTS, scratch / _PARTS)
    with contextlib.chdir(scratch):
        _write_inputs()
        _preprocess(**{"on_error": "skip", **options})
    return {path: content for path, content in files_of(scratch).items() if path not in _INPUTS}


def _copy(source: Path, target: Path) -> None:
    """Copies a tree with its links and FIFOs."""
    if source.is_symlink():
        target.symlink_to(os.readlink(source))
    elif source.is_dir():
        target.mkdir()
        for path in sorted(source.iterdir()):
            _copy(path, target / path.name)
    elif source.is_fifo():
        os.mkfifo(target)
    else:
        shutil.copyfile(source, target)


def _continue(folder: Path, scratch: Path) -> Any:
    return _done(folder, scratch)


def _replace(folder: Path, scratch: Path) -> Any:
    return _done(folder, scratch, overwrite=True, append_eod=True)


def _other_settings(folder: Path, scratch: Path) -> Any:
    try:
        return _done(folder, scratch, append_eod=True)
    except DataError as error:
        if "parts of another job" in str(error):
            return "refused"
        raise
