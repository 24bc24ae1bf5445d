"""`petatron data fetch`, against a stand-in hub: a folder, and a local server for what the hub library does."""

from __future__ import annotations

import errno
import glob
import gzip
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from petatron.base.errors import DataError
from petatron.cli.main import main
from petatron.data.fetch import download_dataset as run_fetch_module
from petatron.data.fetch.dataset_hub import HubDataset, HuggingFaceHub
from petatron.data.fetch.download_dataset import FetchProgress, run_fetch
from petatron.data.fetch.known_datasets import KNOWN_DATASETS
from petatron.data.fetch.plan_download import FetchOptions, plan_fetch
from petatron.data.indexed_dataset import IndexedDataset
from tests.unit.data.stand_in_hub import COMMIT, StandInHub, serve, write_parquet

pytest.importorskip("pyarrow")

WIKITEXT = "Salesforce/wikitext/wikitext-2-raw-v1"
STORIES = [f"story {number}" for number in range(7)]


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Two files of stories, the second with rows that are not text; and a WikiText with an article in both of its files."""
    folder = tmp_path / "hub"
    write_parquet(folder / "ann/stories/data/train-0.parquet", STORIES[:4])
    write_parquet(folder / "ann/stories/data/train-1.parquet", [*STORIES[4:], None, " "])
    (folder / "ann/stories/README.md").write_text("---\nlicense: odc-by\n---\nStories\n")
    first = ["", " = One = \n", "", "first \n", " = = Part = = \n", "x = 1 \n", "", " = Two = \n", "", "second \n"]
    second = ["goes on \n", "", " = Three = \n", "third \n"]
    write_parquet(folder / WIKITEXT / "train-0.parquet", first)
    write_parquet(folder / WIKITEXT / "train-1.parquet", second)
    write_parquet(folder / WIKITEXT / "validation-0.parquet", ["", " = Held out = \n", "", "text \n"])
    write_parquet(folder / WIKITEXT / "test-0.parquet", ["", " = Test = \n", "", "text \n"])
    return folder


def stories(hub: Path | str, output: Path, **options: Any) -> FetchOptions:
    globs = options.pop("files", ("data/train-*.parquet",))
    return FetchOptions(dataset="ann/stories", hub=str(hub), output=str(output), files=globs, **options)


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def fetch(options: FetchOptions) -> list[FetchProgress]:
    seen: list[FetchProgress] = []
    run_fetch(plan_fetch(options), seen.append)
    return seen


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "SOURCE.json").read_text())


def test_fetched_shards_preprocess_as_printed(hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "a corpus"
    assert main(["data", "fetch", "wikitext2", "--hub", str(hub), "--output", str(output)]) == 0
    printed = capsys.readouterr()
    assert "train: 3 documents" in printed.out and "train 2/2: done, 4 rows, 1 document" in printed.err
    commands = [line.strip() for line in printed.out.partition("next:\n")[2].splitlines()]
    assert (
        commands[-1].startswith("petatron train ") and f"--valid-data-path '{output}'/validation_text" in commands[-1]
    )
    for command in commands[:-1]:
        words = [found for word in shlex.split(command)[1:] for found in (sorted(glob.glob(word)) or [word])]
        assert main([*words, "--workers", "1"]) == 0
    assert IndexedDataset(str(output / "train_text_document")).num_documents == 3
    assert main(["config", "show", *shlex.split(commands[-1])[2:], "--changed"]) == 0


def test_wikitext_lines_become_articles_also_across_files(hub: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    fetch(FetchOptions(dataset="wikitext2", hub=str(hub), output=str(output), splits=("train",)))
    one = " = One = \n\nfirst \n = = Part = = \nx = 1 "
    two = " = Two = \n\nsecond \ngoes on "
    assert texts(output / "train-00000.jsonl") == [one, two]
    assert texts(output / "train-00001.jsonl") == [" = Three = \nthird "]
    assert not (output / "validation-00000.jsonl").exists()


def test_source_record_and_skipped_rows(hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    flags = ["--files", "data/*.parquet", "--hub", str(hub), "--output", str(output)]
    assert main(["data", "fetch", "ann/stories", *flags]) == 0
    printed = capsys.readouterr().out
    assert printed.index("license    odc-by") < printed.index("train: 7 documents")
    assert "2 rows skipped: 1 not text, 1 empty" in printed
    assert texts(output / "train-00000.jsonl") + texts(output / "train-00001.jsonl") == STORIES
    found = record(output)
    assert (found["repository"], found["license"], found["revision"]) == ("ann/stories", "odc-by", None)
    counts = [(shard["source"], shard["documents"], shard["not_text"]) for shard in found["shards"]["train"]]
    assert counts == [("data/train-0.parquet", 4, 0), ("data/train-1.parquet", 3, 1)]


def test_a_complete_shard_is_not_made_again(hub: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    damaged = hub / "ann/stories/data/train-1.parquet"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:100])
    with pytest.raises(DataError, match=r"train-1.parquet cannot be understood"):
        fetch(stories(hub, output))
    assert sorted(path.name for path in output.iterdir()) == ["SOURCE.json", "train-00000.jsonl"]
    (output / ".train-00001.jsonl.abc.tmp").write_text("of a fetch that was killed")
    damaged.write_bytes(whole)
    seen = fetch(stories(hub, output))
    assert [now.reused for now in seen if now.done] == [True, False]
    assert texts(output / "train-00001.jsonl") == STORIES[4:]
    assert sorted(path.name for path in output.iterdir()) == ["SOURCE.json", "train-00000.jsonl", "train-00001.jsonl"]


@pytest.mark.parametrize(
    "limits, documents",
    [
        ({"max_documents": 3}, [3]),
        ({"max_documents": 4}, [4]),
        ({"max_documents": 5}, [4, 1]),
        ({"max_bytes": 50}, [2]),
    ],
)
def test_limits_stop_early_and_can_be_raised(hub: Path, tmp_path: Path, limits: Any, documents: list[int]) -> None:
    output = tmp_path / "out"
    fetch(stories(hub, output, **limits))
    assert [shard["documents"] for shard in record(output)["shards"]["train"]] == documents
    assert all(now.reused for now in fetch(stories(hub, output, **limits)) if now.done)
    with pytest.raises(DataError, match="already, more than --max-documents 1"):
        fetch(stories(hub, output, max_documents=1))
    fetch(stories(hub, output))
    assert texts(output / "train-00000.jsonl") + texts(output / "train-00001.jsonl") == STORIES


def test_json_lines_and_text_files(hub: Path, tmp_path: Path) -> None:
    folder = hub / "ann/stories/more"
    folder.mkdir()
    lines = [json.dumps({"story": text}) for text in STORIES[:2]] + ["not JSON", '{"story": "\\ud800"}', ""]
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (folder / "book.txt").write_text("one\n\ntwo\r\n")
    fetch(stories(hub, tmp_path / "json", files=("more/*.jsonl.gz",), text_key="story"))
    assert texts(tmp_path / "json/train-00000.jsonl") == STORIES[:2]
    assert record(tmp_path / "json")["shards"]["train"][0]["not_text"] == 2
    fetch(stories(hub, tmp_path / "book", files=("*.txt",)))
    assert texts(tmp_path / "book/train-00000.jsonl") == ["one\n\ntwo\r"]
    fetch(stories(hub, tmp_path / "lines", files=("*.txt",), join="none"))
    assert texts(tmp_path / "lines/train-00000.jsonl") == ["one", "two\r"]
    with pytest.raises(DataError, match=r"more than 4 characters.*--join none"):
        fetch(stories(hub, tmp_path / "short", files=("*.txt",), max_line_bytes=4))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"files": ()}, "No file of ann/stories is named. It has data/train-0.parquet"),
        ({"files": ("x/*",)}, "matches --files x/.*It has data/train-0.parquet"),
        ({"text_key": "body"}, "column 'body' does not exist .*text columns: text"),
        ({"text_key": "id"}, "column 'id' is not text"),
        ({"max_documents": 0, "max_bytes": -1}, "--max-documents 0 must be .*; --max-bytes -1 must be"),
        ({"splits": ("validation",)}, "--splits validation: ann/stories has train"),
        ({"revision": "main"}, "has no revisions"),
        ({"dataset": "tinystorys"}, "did you mean tinystories"),
        ({"dataset": "wikitext2"}, "--files is for OWNER/NAME: fetch Salesforce/wikitext"),
        ({"dataset": "ann/poems"}, "ann/poems does not exist.*hf download ann/poems"),
        ({"dataset": "ann/../ann"}, "is not the name of a dataset"),
        ({"max_line_bytes": 3}, "no document for train: 9 rows skipped: 1 not text, 1 empty, 7 too long"),
    ],
)
def test_what_cannot_be_fetched(hub: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    asked = {
        "dataset": "ann/stories",
        "files": ("data/*",),
        "hub": str(hub),
        "output": str(tmp_path / "out"),
        **options,
    }
    with pytest.raises(DataError, match=message):
        fetch(FetchOptions(**asked))


def test_wrong_key_of_json_lines_names_the_keys(hub: Path, tmp_path: Path) -> None:
    (hub / "ann/stories/many.jsonl").write_text('{"body": "x", "\\u001b[2J": 1}\n' * 2000)
    with pytest.raises(
        DataError, match=r"first 1,000 lines .* under 'text'. Its first object has body, \\u001b"
    ) as info:
        fetch(stories(hub, tmp_path / "out", files=("many.jsonl",)))
    assert "\x1b" not in str(info.value)


def test_output_of_something_else_is_refused(hub: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "train-00000.jsonl").write_text("mine")
    with pytest.raises(DataError, match="which no fetch wrote"):
        fetch(stories(hub, output))
    assert (output / "train-00000.jsonl").read_text() == "mine"
    fetch(stories(hub, tmp_path / "other"))
    for changed, why in (
        ({"join": "file"}, "its join is 'none'"),
        ({"files": ("*-1.parquet",)}, "its train is made from"),
    ):
        with pytest.raises(DataError, match=f"SOURCE.json is of another fetch: {why}"):
            fetch(stories(hub, tmp_path / "other", **changed))
    (hub / "ann/stories/data/train-0.parquet").unlink()
    with pytest.raises(DataError, match="does not have there now"):
        fetch(stories(hub, tmp_path / "other"))


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"format": 2}', '{"format": 1, "shards": {"train": [{"file": "../x"}]}}']
)
def test_damaged_record_is_one_error(hub: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "SOURCE.json").write_text(content)
    with pytest.raises(DataError, match=r"SOURCE.json cannot be understood"):
        fetch(stories(hub, tmp_path))


@pytest.mark.parametrize(
    "target, why",
    [("/etc/passwd", "is a link to /etc/passwd, outside"), ("none", "leads nowhere"), ("x.txt", "cannot be read")],
)
@pytest.mark.parametrize("name", ["data/x.txt", "README.md"])
def test_links_out_of_the_dataset_are_not_followed(hub: Path, tmp_path: Path, name: str, target: str, why: str) -> None:
    path = hub / "ann/stories" / name
    path.unlink(missing_ok=True)
    path.symlink_to(path.name if target == "x.txt" else target)
    with pytest.raises(DataError, match=why):
        fetch(stories(hub, tmp_path / "out", files=("data/*",)))


def test_full_disk(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_fetch_module, "open_atomic", full)
    with pytest.raises(DataError, match=r"The disk of .*out is full. Free space"):
        fetch(stories(hub, tmp_path / "out"))


def test_unwritable_output(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be written: not a folder. Give another --output"):
        fetch(stories(hub, tmp_path / "file"))


@pytest.mark.parametrize("library", ["pyarrow.parquet", "huggingface_hub"])
def test_missing_extra(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DataError, match=r"pip install 'petatron\[fetch\]'"):
        if library == "huggingface_hub":
            HuggingFaceHub()
        fetch(stories(hub, tmp_path / "out"))


def test_list_and_missing_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "fetch", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed and known.license in printed for name, known in KNOWN_DATASETS.items())
    assert main(["data", "fetch"]) == 2
    assert "2 problems" in (printed := capsys.readouterr().err) and "--output is missing" in printed


@pytest.fixture
def server(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """The real hub library against a local server, with a cache of its own."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serve(hub) as running:
        yield running


def test_a_dataset_behind_a_flag_with_several_values_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "fetch", "--splits", "train", "wikitext2", "--output", "x"]) == 2
    assert "Name the dataset first: `petatron data fetch wikitext2 --splits train`." in capsys.readouterr().err


def test_hub_downloads_are_cached_and_pinned(server: StandInHub, tmp_path: Path) -> None:
    fetch(stories(server.url, tmp_path / "out", max_documents=2))
    assert server.downloads == ["data/train-0.parquet"]
    found = record(tmp_path / "out")
    assert (found["revision"], found["license"]) == (COMMIT, "cc-by-sa-3.0, gfdl")
    assert found["page"] == f"{server.url}/datasets/ann/stories"
    fetch(stories(server.url, tmp_path / "out"))
    assert server.downloads == ["data/train-0.parquet", "data/train-1.parquet"]
    assert texts(tmp_path / "out/train-00001.jsonl") == STORIES[4:]


@pytest.mark.parametrize(
    "refuse, message",
    [
        ((403, "GatedRepo"), "is gated.*Accept its terms on http.*hf auth login"),
        ((404, "RepoNotFound"), "is not on the hub, or is private"),
        ((404, "RevisionNotFound"), "has no such revision"),
        ((400, ""), "refuses ann/stories with HTTP 400"),
    ],
)
def test_hub_refuses(server: StandInHub, tmp_path: Path, refuse: tuple[int, str], message: str) -> None:
    server.refuse = refuse
    with pytest.raises(DataError, match=message):
        fetch(stories(server.url, tmp_path / "out"))


def test_file_names_with_control_characters_are_not_drawn(server: StandInHub) -> None:
    dataset = HubDataset("ann/stories", COMMIT, None, server.url, ())
    with pytest.raises(DataError, match=r"control characters in its name: a\\u001b\[2J.parquet"):
        HuggingFaceHub(server.url).local_path(dataset, "a\x1b[2J.parquet")


def test_offline(server: StandInHub, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be reached.*--hub FOLDER"):
        fetch(stories("http://127.0.0.1:1", tmp_path / "out"))


def test_full_disk_while_downloading(server: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    with pytest.raises(DataError, match=r"The disk is full while .*HF_HOME"):
        fetch(stories(server.url, tmp_path / "out"))
