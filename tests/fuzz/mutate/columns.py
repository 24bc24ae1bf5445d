"""Mutations of tables in parquet and arrow files: other columns, written again by the library, or bytes of their metadata."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

from tests.fuzz.mutate.octets import Mutated, NotOfThisFormat, mutate, put_number

_COMPRESSIONS = ("none", "snappy", "gzip", "zstd", "lz4", "brotli")
_LONG_BYTES = 1 << 20


def mutate_parquet(content: bytes, rng: random.Random) -> Mutated:
    """The metadata at the end, or a table of other columns."""
    if rng.random() < 0.5:
        return _in_footer(content, rng)
    table, done = _changed(content, _read_parquet, rng)
    from pyarrow import parquet

    file = io.BytesIO()
    try:
        parquet.write_table(
            table, file, row_group_size=rng.choice((1, 2, 100)), compression=rng.choice(_COMPRESSIONS),
            use_dictionary=rng.random() < 0.5, data_page_version=rng.choice(("1.0", "2.0")), write_statistics=rng.random() < 0.5,
        )  # fmt: skip
    except Exception as error:  # values that this format does not have
        raise NotOfThisFormat from error
    return file.getvalue(), done


def mutate_arrow(content: bytes, rng: random.Random) -> Mutated:
    """A number of the metadata, which is in words of four bytes, or a table of other columns."""
    if rng.random() < 0.6 and len(content) >= 8:
        at = 4 * rng.randrange(len(content) // 4)
        return put_number(content, at, rng.choice((4, 8)), rng), f"a word at {at}"
    table, done = _changed(content, _read_arrow, rng)
    from pyarrow import ipc

    file = io.BytesIO()
    options = ipc.IpcWriteOptions(compression=rng.choice((None, "lz4", "zstd")))
    with rng.choice((ipc.new_stream, ipc.new_file))(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rng.choice((1, 2, 100)))
    return file.getvalue(), done


def _in_footer(content: bytes, rng: random.Random) -> Mutated:
    size = int.from_bytes(content[-8:-4], "little") if content.endswith(b"PAR1") else 0
    if not 0 < size <= len(content) - 8:
        raise NotOfThisFormat
    start = len(content) - 8 - size
    footer, done = mutate(content[start:-8], rng)
    length = len(footer) if rng.random() < 0.8 else size
    return content[:start] + footer + length.to_bytes(4, "little") + b"PAR1", f"metadata: {done}"


def _read_parquet(content: bytes) -> Any:
    from pyarrow import parquet

    return parquet.read_table(io.BytesIO(content), use_threads=False)


def _read_arrow(content: bytes) -> Any:
    from pyarrow import ipc

    is_file = content.startswith(b"ARROW1")
    return (ipc.open_file if is_file else ipc.open_stream)(io.BytesIO(content)).read_all()


def _changed(content: bytes, read: Callable[[bytes], Any], rng: random.Random) -> tuple[Any, str]:
    """Returns a table in which a column is there twice, gone, renamed or of other values."""
    try:
        table = read(content)
        table.validate(full=True)
    except Exception as error:  # the library raises whatever it meets
        raise NotOfThisFormat from error
    if not table.num_columns or table.num_rows > 10_000:
        raise NotOfThisFormat
    at = rng.randrange(table.num_columns)
    name = table.column_names[at]
    what = rng.choice(("twice", "gone", "renamed", "values", "values", "values", "values", "empty", "many"))
    if what == "twice":
        return table.append_column(name, table.column(at)), f"{name!r} is there twice"
    if what == "gone":
        return table.remove_column(at), f"without {name!r}"
    if what == "empty":
        return table.slice(0, 0), "without rows"
    if what == "many":
        for number in range(300):
            table = table.append_column(f"c{number}", table.column(at))
        return table, "300 columns"
    if what == "renamed":
        names = list(table.column_names)
        names[at] = rng.choice(("text", "", "a.b", "\x1b[31m", "x" * 3000, "a\nb"))
        return table.rename_columns(names), f"{name!r} is {names[at][:20]!r}"
    kind, column = _column(table.num_rows, rng)
    return table.set_column(at, name, column), f"{name!r} is {kind}"


def _column(count: int, rng: random.Random) -> tuple[str, Any]:
    """Returns values of an unusual type."""
    import pyarrow as pa

    makers: dict[str, Callable[[], Any]] = {
        "bytes that are no text": lambda: _as_text([b"\xff\xfe", b"a"] * count, count),
        "bytes": lambda: pa.array([b"\xff\x00"] * count, pa.binary()),
        "lists of texts": lambda: pa.array([["a", None, "b"]] * count),
        "lists of lists": lambda: pa.array([[["a"]]] * count),
        "a dictionary": lambda: pa.array(["a"] * count).dictionary_encode(),
        "long texts": lambda: pa.array(["a" * _LONG_BYTES] * count),
        "texts with zeros": lambda: pa.array(["a\x00b\x1b[2J\r\n"] * count),
        "views": lambda: pa.array(["a view that is longer than twelve bytes"] * count, pa.string_view()),
        "large texts": lambda: pa.array(["a"] * count, pa.large_string()),
        "days of other ages": lambda: pa.array([2**31 - 1] * count, pa.int32()).cast(pa.date32()),
        "times of other ages": lambda: pa.array([2**63 - 1] * count, pa.timestamp("s")),
        "nanoseconds": lambda: pa.array([2**62 + 1] * count, pa.timestamp("ns", "Europe/Nowhere")),
        "durations": lambda: pa.array([2**63 - 1] * count, pa.duration("s")),
        "no numbers": lambda: pa.array([float("nan")] * count),
        "nulls": lambda: pa.nulls(count),
        "texts that are null": lambda: pa.nulls(count, pa.string()),
        "structures": lambda: pa.array([{"text": "a", "": {"x": [1]}}] * count),
        "maps": lambda: pa.array([[("a", 1), ("a", 2)]] * count, pa.map_(pa.string(), pa.int64())),
        "decimals": lambda: pa.array([None] * count, pa.decimal128(38, 10)),
    }
    kind = rng.choice(sorted(makers))
    return kind, makers[kind]()


def _as_text(values: list[bytes], count: int) -> Any:
    import pyarrow as pa

    array = pa.array(values[:count], pa.binary())
    return pa.Array.from_buffers(pa.string(), count, array.buffers())
