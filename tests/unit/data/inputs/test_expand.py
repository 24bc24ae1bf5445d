"""What a user names as input: files, patterns, folders, and addresses."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from petatron.base.errors import DataError
from petatron.data.inputs import remote_files
from petatron.data.inputs.expand_inputs import expand_inputs
from tests.unit.data.inputs.corpora import COMPRESSIONS, ROWS, TEXTS, documents, jsonl, parquet, run

OUTPUT = "out_text_document"


def names(folder: Path, *inputs: str, input_format: str = "auto") -> list[str]:
    files = expand_inputs([str(folder / name) for name in inputs], input_format)  # type: ignore[arg-type]
    return [Path(file.path).relative_to(folder).as_posix() for file in files]


@pytest.fixture
def corpora(tmp_path: Path) -> Path:
    for name in ("a/2.jsonl", "a/10.jsonl.gz", "a/deep/1.jsonl", "a/_SUCCESS", "a/.hidden/x.jsonl", "a/README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(COMPRESSIONS["gz"](jsonl()) if name.endswith("gz") else jsonl())
    return tmp_path


def test_a_folder_has_its_files_in_the_order_of_their_names(corpora: Path) -> None:
    assert names(corpora, "a") == ["a/10.jsonl.gz", "a/2.jsonl", "a/deep/1.jsonl"]
    run(corpora, corpora / "a")
    assert documents(corpora / OUTPUT) == list(TEXTS) * 3


def test_patterns(corpora: Path) -> None:
    assert names(corpora, "a/*.jsonl*") == ["a/10.jsonl.gz", "a/2.jsonl"]
    assert names(corpora, "a/**/*.jsonl") == ["a/2.jsonl", "a/deep/1.jsonl"]
    (corpora / "[x].jsonl").write_bytes(jsonl())
    assert names(corpora, "[x].jsonl", "a/2.jsonl") == ["[x].jsonl", "a/2.jsonl"]


def test_a_folder_of_one_format_among_several(corpora: Path) -> None:
    (corpora / "a" / "b.parquet").write_bytes(parquet())
    with pytest.raises(
        DataError, match=r"files of several formats \(3 jsonl, 1 parquet\); choose one with --input-format"
    ):
        names(corpora, "a")
    assert names(corpora, "a", input_format="parquet") == ["a/b.parquet"]
    assert len(names(corpora, "a", input_format="jsonl")) == 3


def test_text_folders(corpora: Path) -> None:
    (corpora / "t").mkdir()
    for name in ("1.txt", "2.txt.gz"):
        content = f"{name}\n\nsecond".encode()
        (corpora / "t" / name).write_bytes(COMPRESSIONS["gz"](content) if name.endswith("gz") else content)
    with pytest.raises(DataError, match=r"has 2 text files; say what a document is: --input-format text"):
        names(corpora, "t")
    run(corpora, corpora / "t", input_format="text-file")
    assert documents(corpora / OUTPUT) == ["1.txt\n\nsecond", "2.txt.gz\n\nsecond"]
    run(corpora, corpora / "t", input_format="text")
    assert documents(corpora / OUTPUT) == ["1.txt", "second", "2.txt.gz", "second"]


def test_a_dataset_of_the_datasets_library(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    for input_format in ("auto", "huggingface"):
        run(tmp_path, tmp_path / "saved", input_format=input_format)
        assert documents(tmp_path / OUTPUT) == list(TEXTS)
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match=r"has the splits train, test; name one, for instance .*splits/train"):
        names(tmp_path, "splits")
    assert names(tmp_path, "splits/test") == ["splits/test/data-00000-of-00001.arrow"]
    (tmp_path / "shards" / "data").mkdir(parents=True)
    (tmp_path / "shards" / "dataset_infos.json").write_text("{}")
    (tmp_path / "shards" / "data" / "train-00000-of-00001.parquet").write_bytes(parquet())
    run(tmp_path, tmp_path / "shards", input_format="huggingface")
    assert documents(tmp_path / OUTPUT) == list(TEXTS)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_data_files": [{"filename": "../secret.arrow"}]}, r"\.\./secret\.arrow, which state.json names, is no name"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, r"gone\.arrow, which state.json names, is missing"),
        ({"_data_files": [{"filename": "link.arrow"}]}, r"link\.arrow is a link to .*, outside of the folder"),
        ({"_data_files": []}, "state.json names none"),
        ({"_data_files": [{"filename": 3}]}, r"state\.json cannot be understood"),
        ([], r"state\.json cannot be understood"),
    ],
)
def test_a_saved_dataset_that_is_none(tmp_path: Path, state: object, message: str) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "secret.arrow").write_bytes(b"")
    (tmp_path / "d" / "link.arrow").symlink_to(tmp_path / "secret.arrow")
    (tmp_path / "d" / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=message):
        names(tmp_path, "d")


def test_inputs_that_give_no_files(corpora: Path) -> None:
    (corpora / "empty").mkdir()
    (corpora / "other").mkdir()
    (corpora / "other" / "a.png").write_bytes(b"")
    (corpora / "linked").mkdir()
    (corpora / "linked" / "a.jsonl").symlink_to(corpora / "a" / "2.jsonl")
    with pytest.raises(DataError) as caught:
        names(corpora, "empty", "other", "none", "none/*.jsonl", "linked")
    said = str(caught.value)
    assert "empty is a folder without files;" in said
    assert f"other is a folder without files: it has {corpora}/other/a.png;" in said
    assert "none does not exist;" in said and "none/*.jsonl matches no file;" in said
    assert "linked/a.jsonl is a link to" in said and said.endswith("name that file itself.")
    with pytest.raises(DataError, match=r"without files of --input-format csv"):
        names(corpora, "a", input_format="csv")
    with pytest.raises(DataError, match=r"is not a folder, which --input-format huggingface reads"):
        names(corpora, "a/2.jsonl", input_format="huggingface")


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(jsonl())
    (file,) = expand_inputs([str(path)], "auto")
    file.check_unchanged()
    path.write_bytes(jsonl(ROWS * 2))
    with pytest.raises(DataError, match=r"x\.jsonl has changed while it was read \(it had \d+ bytes and has [\d,]+\)"):
        file.check_unchanged()


# Addresses


@pytest.fixture
def memory() -> Iterator[str]:
    import fsspec

    system = fsspec.filesystem("memory")
    for number, rows in enumerate((ROWS[:2], ROWS[2:])):
        system.pipe(f"/bucket/corpus/part-{number}.jsonl", jsonl(rows))
    system.pipe("/bucket/all.parquet", parquet())
    system.pipe("/bucket/corpus/_SUCCESS", b"")
    yield "memory://bucket"
    system.rm("/bucket", recursive=True)


@pytest.mark.parametrize("name", ["corpus", "corpus/*.jsonl", "corpus/part-[01].jsonl", "all.parquet"])
def test_addresses(tmp_path: Path, memory: str, name: str) -> None:
    report = run(tmp_path, f"{memory}/{name}")
    assert documents(tmp_path / OUTPUT) == list(TEXTS) and report.bytes_read > 0


def test_addresses_that_give_nothing(memory: str) -> None:
    with pytest.raises(DataError, match=r"memory://bucket/none does not exist"):
        expand_inputs([f"{memory}/none"], "auto")
    with pytest.raises(DataError, match="is a folder without files"):
        expand_inputs([f"{memory}/*.csv"], "auto")
    with pytest.raises(DataError, match=r"nowhere://x cannot be read: Protocol not known"):
        expand_inputs(["nowhere://x"], "auto")


def test_a_protocol_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="s3:// needs s3fs: pip install s3fs"):
        expand_inputs(["s3://bucket/a.jsonl"], "auto")

    def blocked(module: str) -> object:
        raise ImportError(module)

    monkeypatch.setattr(remote_files.importlib, "import_module", blocked)
    with pytest.raises(DataError, match=r"pip install 'petatron\[remote\]'"):
        expand_inputs(["s3://bucket/a.jsonl"], "auto")


class _Handler(http.server.BaseHTTPRequestHandler):
    """Files by name, in ranges under /ranged."""

    files = {"a.jsonl": jsonl(), "a.jsonl.gz": COMPRESSIONS["gz"](jsonl()), "a.parquet": parquet()}

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        folder, _, name = self.path.removeprefix("/").partition("/")
        content = self.files.get(name)
        if content is None:
            self.send_error(404)
            return
        first, last = 0, len(content) - 1
        ranged = folder == "ranged" and "Range" in self.headers
        if ranged:
            low, high = self.headers["Range"].removeprefix("bytes=").split("-")
            first, last = int(low), min(int(high or last), last)
        self.send_response(206 if ranged else 200)
        if folder == "ranged":
            self.send_header("Accept-Ranges", "bytes")
        if ranged:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        if with_body:
            self.wfile.write(content[first : last + 1])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("name", ["ranged/a.jsonl", "ranged/a.parquet", "whole/a.jsonl", "whole/a.jsonl.gz"])
def test_the_web(tmp_path: Path, web: str, name: str) -> None:
    run(tmp_path, f"{web}/{name}")
    assert documents(tmp_path / OUTPUT) == list(TEXTS)


def test_the_web_without_the_file(web: str) -> None:
    with pytest.raises(DataError, match=r"ranged/none\.jsonl does not exist"):
        expand_inputs([f"{web}/ranged/none.jsonl"], "auto")


def test_a_folder_of_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to the root of a machine, for instance."""
    monkeypatch.setattr("petatron.data.inputs.expand_inputs._MAX_FOLDER_FILES", 1)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match="has more than 1 files; name them by patterns"):
        expand_inputs([str(tmp_path)], "auto")
