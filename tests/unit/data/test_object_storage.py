"""Token files behind addresses: samples, the folder that is shared, and what is told of servers and damaged copies."""

from __future__ import annotations

import http.server
import json
import logging
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest

from petatron.base.errors import DataError
from petatron.cli.main import main
from petatron.config.schema.run import RunConfig
from petatron.data.batch_loader import SampleDataset
from petatron.data.build_datasets import build_datasets
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.object_storage import chunked_tokens
from petatron.data.object_storage.chunked_tokens import ChunkedTokens, remove_old_chunks
from petatron.data.object_storage.storage_cache import ObjectStorageCache, RemoteObject
from petatron.validate import load_config
from petatron.validate.preflight import preflight

from .conftest import MakeDataset
from .test_build import run_config


class _Files(http.server.BaseHTTPRequestHandler):
    """Serves a folder in ranges, and fails as it is told."""

    folder: Path
    requests: list[tuple[str, str]]
    failing: int  # requests for ranges that are refused from now on
    sends_ranges: bool
    breaks_index: bool

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        kind, path = type(self), self.folder / self.path.removeprefix("/")
        if not path.is_file():
            self.send_error(404)
            return
        content, wanted = path.read_bytes(), self.headers.get("Range", "")
        first, last = 0, len(content) - 1
        if with_body:
            kind.requests.append((self.path, wanted))
        if with_body and path.suffix == ".bin" and kind.failing:
            kind.failing -= 1
            self.send_error(503, "Slow down")
            return
        if wanted and kind.sends_ranges:
            low, high = wanted.removeprefix("bytes=").split("-")
            first, last = int(low), min(int(high), last)
        self.send_response(206 if wanted and kind.sends_ranges else 200)
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        if with_body:
            body = content[first : last + 1]
            self.wfile.write(body[: len(body) // 2] if kind.breaks_index and path.suffix == ".idx" else body)

    def log_message(self, *_: object, **__: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[type[_Files]]:
    class Files(_Files):
        folder, requests, failing, sends_ranges, breaks_index = tmp_path / "bucket", [], 0, True, False

    Files.folder.mkdir()
    yield Files


@pytest.fixture
def web(served: type[_Files], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(chunked_tokens, "_WAIT_S", 0.0)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), served)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def corpus(make_dataset: MakeDataset, served: type[_Files]) -> str:
    """A local dataset that the server has too."""
    random = np.random.default_rng(1)
    documents = [random.integers(0, 900, random.integers(1, 60)).tolist() for _ in range(80)]
    prefix = make_dataset(documents, "corpus")
    for end in (".idx", ".bin"):
        shutil.copy(f"{prefix}{end}", served.folder / f"corpus{end}")
    return prefix


def cache(tmp_path: Path, **sizes: int) -> ObjectStorageCache:
    return ObjectStorageCache(str(tmp_path / "kept"), **{"chunk_bytes": 256, **sizes})


def config_of(tmp_path: Path, *paths: str) -> RunConfig:
    kept = str(tmp_path / "kept")
    return run_config(
        tmp_path, data_path=paths, split="1", object_storage_cache_path=kept, object_storage_chunk_bytes=256
    )


def index_copy(tmp_path: Path) -> Path:
    [path] = (tmp_path / "kept" / "index").iterdir()
    return path


def ids(dataset: SampleDataset, index: int) -> np.ndarray:
    sample = dataset[index]
    assert isinstance(sample, np.ndarray)
    return sample


@pytest.mark.parametrize("protocol", ["http", "memory"])
def test_samples_of_an_address_are_those_of_the_file(tmp_path: Path, corpus: str, web: str, protocol: str) -> None:
    address = f"{web}/corpus"
    if protocol == "memory":
        address = f"memory://bucket-{tmp_path.name}/corpus"
        for end in (".idx", ".bin"):
            fsspec.filesystem("memory").pipe_file(f"{address}{end}", Path(f"{corpus}{end}").read_bytes())
    local = build_datasets(config_of(tmp_path, corpus), None, (200, 0, 0)).train
    remote = build_datasets(config_of(tmp_path, f"{address}.bin"), None, (200, 0, 0)).train
    assert local is not None and remote is not None and len(local) == len(remote)
    assert all(np.array_equal(ids(local, index), ids(remote, index)) for index in range(len(local)))
    assert local.fingerprint == remote.fingerprint, "a copy on a disk continues a run"
    blend = build_datasets(config_of(tmp_path, "0.5", address, "0.5", corpus), None, (40, 0, 0)).train
    assert blend is not None and len(blend[39]) == 9


def test_a_chunk_is_downloaded_once_by_all_processes(
    tmp_path: Path, corpus: str, web: str, served: type[_Files]
) -> None:
    """Processes are stood in for by readers of their own, which share nothing but the folder."""
    readers = [IndexedDataset(f"{web}/corpus", object_storage=cache(tmp_path)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda reader: [reader.get(i).tolist() for i in range(80)], readers))
    assert texts == [[IndexedDataset(corpus).get(i).tolist() for i in range(80)]] * 4
    ranges = [wanted for path, wanted in served.requests if path.endswith(".bin")]
    assert len(ranges) == len(set(ranges)) and len(ranges) <= -(-readers[0].bin_bytes // 256)
    assert sum(path.endswith(".idx") for path, _ in served.requests) == 1
    assert all(int(wanted.partition("=")[2].split("-")[0]) % 256 == 0 for wanted in ranges)


def test_chunks_that_follow_one_another_are_one_request(
    tmp_path: Path, corpus: str, web: str, served: type[_Files]
) -> None:
    dataset = IndexedDataset(f"{web}/corpus", object_storage=cache(tmp_path, chunk_bytes=16))
    longest = int(np.argmax(dataset.lengths))
    served.requests.clear()
    assert np.array_equal(dataset.get(longest), IndexedDataset(corpus).get(longest))
    assert len(served.requests) == 1
    served.requests.clear()
    assert dataset.get(longest, 3, 5).tolist() == IndexedDataset(corpus).get(longest, 3, 5).tolist()
    assert not served.requests and dataset.get(longest, 3, 0).tolist() == []


def test_damaged_copies_are_downloaded_again(
    tmp_path: Path, corpus: str, web: str, caplog: pytest.LogCaptureFixture
) -> None:
    def texts() -> list[list[int]]:
        dataset = IndexedDataset(f"{web}/corpus", object_storage=cache(tmp_path))
        return [dataset.get(i).tolist() for i in range(80)]

    right = texts()
    path = index_copy(tmp_path)
    path.write_bytes(path.read_bytes()[:-7])
    chunks = sorted((tmp_path / "kept" / "chunks").glob("*/*"))
    chunks[0].write_bytes(chunks[0].read_bytes()[:-1])
    flipped = bytearray(chunks[1].read_bytes())
    flipped[5] ^= 1
    chunks[1].write_bytes(flipped)
    with caplog.at_level(logging.WARNING, logger="petatron"):
        assert texts() == right
    assert "corpus.idx has" in caplog.text and "is downloaded again" in caplog.text
    assert path.stat().st_size == Path(f"{corpus}.idx").stat().st_size


def test_an_object_that_was_replaced_has_other_copies(
    tmp_path: Path, corpus: str, web: str, served: type[_Files], make_dataset: MakeDataset
) -> None:
    before = IndexedDataset(f"{web}/corpus", object_storage=cache(tmp_path))
    assert before.get(0).tolist() == IndexedDataset(corpus).get(0).tolist()
    lengths = IndexedDataset(corpus).lengths.tolist()
    other = make_dataset([[7] * length for length in lengths], "other")
    time.sleep(0.01)
    shutil.copy(f"{other}.bin", served.folder / "corpus.bin")
    after = IndexedDataset(f"{web}/corpus", object_storage=cache(tmp_path))
    assert after.get(0).tolist() == [7] * lengths[0]


def test_the_folder_stays_below_its_bound(tmp_path: Path, corpus: str, web: str) -> None:
    kept = cache(tmp_path, chunk_bytes=64, max_bytes=1000)
    dataset = IndexedDataset(f"{web}/corpus", object_storage=kept)
    for index in range(80):
        dataset.get(index)
    remove_old_chunks(kept)
    sizes = [path.stat().st_size for path in (tmp_path / "kept" / "chunks").glob("*/*")]
    assert 0 < sum(sizes) <= 1000
    assert [dataset.get(i).tolist() for i in range(80)] == [IndexedDataset(corpus).get(i).tolist() for i in range(80)]


def test_a_server_that_fails_is_asked_again_and_then_named(
    tmp_path: Path, corpus: str, web: str, served: type[_Files]
) -> None:
    dataset = IndexedDataset(f"{web}/corpus", object_storage=cache(tmp_path))
    served.failing = 2
    assert dataset.get(3).tolist() == IndexedDataset(corpus).get(3).tolist()
    served.failing = 1000
    with pytest.raises(
        DataError, match=r"http://\S*/corpus\.bin cannot be read: 503.*Tried 3 times, for bytes [\d,]+ to"
    ):
        for index in range(80):
            dataset.get(index)


def test_what_a_server_lacks_is_told(tmp_path: Path, corpus: str, web: str, served: type[_Files]) -> None:
    with pytest.raises(DataError, match=r"/none\.idx does not exist"):
        IndexedDataset(f"{web}/none", object_storage=cache(tmp_path))
    served.breaks_index = True
    with pytest.raises(
        DataError, match=r"/corpus\.idx cannot be read to its end|has [\d,]+ bytes, and its server sent"
    ):
        IndexedDataset(f"{web}/corpus", object_storage=cache(tmp_path))
    assert not list((tmp_path / "kept" / "index").iterdir())
    served.breaks_index, served.sends_ranges = False, False
    dataset = IndexedDataset(f"{web}/corpus", object_storage=cache(tmp_path))
    with pytest.raises(
        DataError, match=r"corpus\.bin: bytes .* were asked for, and its server sent .* It may have no ranges"
    ):
        dataset.get(0)
    (served.folder / "corpus.bin").write_bytes(b"12")
    with pytest.raises(DataError, match=r"corpus\.bin is truncated: it has 2 bytes"):
        IndexedDataset(f"{web}/corpus", object_storage=cache(tmp_path))
    with pytest.raises(DataError, match=r"is in object storage\. Give --object-storage-cache-path"):
        IndexedDataset(f"{web}/corpus")


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, corpus: str, web: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be written: .*Give --object-storage-cache-path a writable folder"):
        IndexedDataset(f"{web}/corpus", object_storage=ObjectStorageCache(str(tmp_path / "file")))
    kept = cache(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "chunks").write_text("")
    tokens = ChunkedTokens(RemoteObject.find(f"{web}/corpus.bin"), kept)
    with caplog.at_level(logging.WARNING, logger="petatron"):
        assert tokens.read(10, 700) == Path(f"{corpus}.bin").read_bytes()[10:710]
        tokens.read(0, 9)
    assert caplog.text.count("tokens are downloaded again whenever they are read") == 1


FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --vocab-size 1000 --lr 1e-3 "
    "--train-iters 4 --global-batch-size 2 --eval-iters 0 --log-interval 1 --device cpu"
).split()


def test_a_run_reads_its_data_from_a_server(tmp_path: Path, corpus: str, web: str) -> None:
    losses = []
    for name, data in {
        "local": ["--data-path", corpus],
        "remote": ["--data-path", f"{web}/corpus", "--s3-cache-path", str(tmp_path / "kept")],
    }.items():
        folder = tmp_path / name
        assert main(["train", *FLAGS, *data, "--split", "1", "--log-dir", str(folder), "--live", "off"]) == 0
        records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        losses.append([record["lm_loss"] for record in records if "lm_loss" in record and "iteration" in record])
    assert losses[0] == losses[1] and len(losses[0]) >= 4
    assert f"{web}/corpus" in (tmp_path / "remote" / "config.yaml").read_text(), "an address is no relative path"
    assert list((tmp_path / "kept" / "samples").glob("*.npy"))


def test_an_address_needs_a_folder(tmp_path: Path, corpus: str) -> None:
    [problem] = preflight(load_config([*FLAGS, "--data-path", "s3://b/c"]).config)
    assert str(problem).startswith("--data-path s3://b/c is an address, and there is no --object-storage-cache-path")
    loaded = load_config([*FLAGS, "--data-path", corpus, "--object-storage-cache-path", str(tmp_path)])
    assert any("no dataset is behind an address" in notice for notice in loaded.notices)
    remote = load_config([*FLAGS, "--data-path", "s3://b/c", "--object-storage-cache-path", str(tmp_path)]).config
    assert preflight(remote) == [] and remote.data.data_cache_path == str(tmp_path / "samples")
