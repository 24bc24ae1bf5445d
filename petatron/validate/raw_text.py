"""Files of text given where token files belong, or in a form that another command reads: the command that does."""

from __future__ import annotations

import shlex
from pathlib import Path

from petatron.base.errors import Problem

_PARQUET = ".parquet"
_LINES = (".jsonl", ".json", ".ndjson", ".txt", ".gz", ".zst")


def parquet_problem(flag: str, path: str) -> Problem | None:
    """Returns the problem of a parquet file, with the command that reads it; None for other files.

    >>> print(parquet_problem("--input", "/corpora/wiki/en/a.parquet"))
    --input /corpora/wiki/en/a.parquet is a parquet file, which `petatron data fetch` reads. Convert it to JSON lines for \
`petatron data preprocess`: petatron data fetch wiki/en --hub /corpora --files a.parquet --text-key text --output /corpora/wiki/en/jsonl
    """
    if not path.lower().endswith(_PARQUET):
        return None
    file = Path(path).absolute()
    names, rule = file.parts[1:], "is a parquet file, which `petatron data fetch` reads"
    if len(names) < 3:
        fix = "Put it into a folder FOLDER/OWNER/NAME, and give `petatron data fetch OWNER/NAME --hub FOLDER --files '*.parquet'`."
        return Problem(flag, path, rule, fix)
    arguments = [
        "fetch",
        "/".join(names[-3:-1]),
        "--hub",
        str(file.parents[2]),
        "--files",
        file.name,
        "--text-key",
        "text",
    ]
    command = shlex.join(["petatron", "data", *arguments, "--output", str(file.parent / "jsonl")])
    return Problem(flag, path, rule, f"Convert it to JSON lines for `petatron data preprocess`: {command}")


def raw_text_problem(flag: str, path: str) -> Problem | None:
    """Returns the problem of a file of text in place of token files; None where the path is no such file."""
    if (parquet := parquet_problem(flag, path)) is not None:
        return parquet
    if not path.lower().endswith(_LINES) or not Path(path).is_file():
        return None
    prefix = str(Path(path).with_name(Path(path).name.partition(".")[0]))
    command = shlex.join(["petatron", "data", "preprocess", "--input", path, "--output-prefix", prefix])
    rule = "is a file of text, not the prefix of token files"
    return Problem(flag, path, rule, f"Make them: {command}, with the tokenizer's flags and --append-eod.")
