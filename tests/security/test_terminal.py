"""Control characters of others are shown on a terminal, never obeyed: a planted escape in every source, through the command line."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from petatron.base.log import configure_logging, get_logger
from petatron.base.terminal_escape import escaped_output, escaped_stream, printable, printable_lines, raw_stream
from petatron.cli import main as cli
from petatron.cli.data import _progress_display
from petatron.cli.main import main
from petatron.cli.subcommands.stderr_progress import StderrProgress
from petatron.data.indexed_writer import IndexedWriter
from petatron.mesh.launch.local_launcher import run_ranks
from petatron.train.report.console import LiveWriter, build_console_writer
from petatron.train.report.log_records import event_record
from petatron.train.report.metric_writers import WandbWriter
from tests.unit.checkpoint.megatron.megatron_files import Case, write_legacy

ROOT = Path(__file__).parent.parent.parent
# Sets the title and rings, clears the screen, turns red by a C1 control, writes from right to left, deletes, goes back.
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\u2028\x7f\x85\x08\r"
SHOWN = r"\u001b]0;owned\u0007\u001b[2J\u009b31m\u202e\u2066\u2028\u007f\u0085\u0008\u000d"
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def seen(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command prints: nothing a terminal would obey."""
    with contextlib.suppress(SystemExit):  # argparse
        main(words)
    told = capsys.readouterr()
    text = told.out + told.err
    assert not FORBIDDEN.search(text), repr(text)
    return text


def lines_of(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


def test_every_character_is_escaped_once() -> None:
    assert printable(EVIL) == printable(printable(EVIL)) == printable_lines(EVIL) == SHOWN
    assert printable("a\tb\nc") == r"a\u0009b\u000ac" and printable_lines("a\tb\nc") == "a\tb\nc"
    honest = "naïve 日本語 שלום 👩‍🔬 Ελληνικά नि"
    assert printable(honest) == honest
    assert printable(os.fsdecode(b"\xff.bin")) == r"\udcff.bin"
    assert json.loads(printable_lines(json.dumps({EVIL: EVIL}, ensure_ascii=False))) == {EVIL: EVIL}


# Data


def test_text_of_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedWriter(tmp_path / "x", "uint16") as writer:
        writer.add_document(list(f"one\n{EVIL}two".encode()))
    text = seen(capsys, "data", "inspect", str(tmp_path / "x"), "--tokenizer-type", "ByteTokenizer")
    assert f"one\n{SHOWN}two" in text


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_keys_of_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str], on_error: str) -> None:
    (tmp_path / "x.jsonl").write_text(
        '{"text": "a"}\n' + json.dumps({f"{EVIL[:6]}\n100% done": "b", "k" * 5000: ""}) + "\n"
    )
    words = ["--input", str(tmp_path / "x.jsonl"), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    text = seen(capsys, "data", "preprocess", *words, "--tokenizer-type", "ByteTokenizer", "--on-error", on_error)
    assert r"x.jsonl:2: no key 'text' (keys here: \u001b]0;ow\u000a100% done, kkk" in text
    assert "100% done" not in lines_of(text) and "k" * 100 not in text


def test_names_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ("data", "inspect", f"{tmp_path}/{EVIL}"),
        ("data", "inspect", os.fsdecode(b"\xff\x9b31m")),
        (
            "data",
            "preprocess",
            "--input",
            f"{tmp_path}/{EVIL}",
            "--output-prefix",
            "x",
            "--tokenizer-type",
            "ByteTokenizer",
        ),
        ("data", EVIL),
        (EVIL,),
        ("checkpoint", "inspect", f"{tmp_path}/{EVIL}"),
        ("checkpoint", "convert", f"{tmp_path}/{EVIL}", f"{tmp_path}/out", "--to", "petatron"),
        ("config", "show", "--config", f"{tmp_path}/{EVIL}"),
        ("config", EVIL),
        ("train", "--preset", EVIL),
        ("train", f"--{EVIL}"),
        ("plan", EVIL),
    ):
        assert "owned" in (text := seen(capsys, *words)) or "udcff" in text
    (tmp_path / f"{EVIL}.idx").write_text("")
    assert f"Datasets in {tmp_path}: {SHOWN}." in seen(capsys, "data", "inspect", f"{tmp_path}/x")


def test_a_token_of_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, EVIL: 4_000_000_000}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    words = ["--input", str(tmp_path / "x.jsonl"), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    assert "owned" in seen(capsys, "data", "preprocess", *words, "--tokenizer-model", str(tmp_path))


# Configurations


def test_keys_and_values_of_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    for content in (
        {f"{EVIL}\nVERDICT: good": 1},
        {"model": {EVIL: 1}},
        {"model": {"num_layers": f"{EVIL}\nVERDICT: good"}},
        {"data": {"data_path": [EVIL, f"b{EVIL}\nVERDICT: good"]}},
        {"log": {"wandb_project": f"x\nVERDICT: good {EVIL}"}},
    ):
        path.write_text(yaml.safe_dump(content))
        for words in (("show",), ("show", "--preset", "tiny-llama"), ("show", "--preset", "tiny-llama", "--yaml")):
            text = seen(capsys, "config", *words, "--config", str(path))
            assert "owned" in text and "VERDICT: good" not in lines_of(text)
    path.write_text(yaml.safe_dump({"log": {"wandb_project": f"x{EVIL}"}, "data": {"data_path": ["a\u202eb", "c"]}}))
    main(["config", "show", "--preset", "tiny-llama", "--yaml", "--config", str(path)])
    loaded = yaml.safe_load(capsys.readouterr().out)
    assert loaded["log"]["wandb_project"] == f"x{EVIL}" and loaded["data"]["data_path"] == ["a\u202eb", "c"]


# Checkpoints

LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 16,
    "max_position_embeddings": 8,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


def convert(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    return seen(capsys, "checkpoint", "convert", str(folder), f"{folder}-out", "--to", "petatron")


@pytest.mark.parametrize(
    "change", [{"model_type": EVIL, "architectures": [EVIL]}, {"hidden_act": EVIL}, {EVIL: 1, "hidden_size": EVIL}]
)
def test_metadata_of_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG | change))
    save_file({"model.norm.weight": torch.ones(8)}, folder / "model.safetensors")
    assert "owned" in convert(capsys, folder)


def test_names_of_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    save_file({f"model.{EVIL}": torch.ones(8)}, folder / "model.safetensors")
    seen(capsys, "checkpoint", "convert", str(folder), f"{folder}-out", "--to", "petatron")
    shutil.copytree(ROOT / "tests/golden/checkpoint-v2", tmp_path / "run")
    (manifest,) = (tmp_path / "run").glob("*/manifest.json")
    forge(manifest, manifest.read_text().replace("embedding.weight", json.dumps(f"{EVIL}\nVERDICT: sound")[1:-1]))
    for words in (("inspect", "--tensors"), ("inspect", "--json"), ("diff", str(ROOT / "tests/golden/checkpoint-v2"))):
        text = seen(capsys, "checkpoint", words[0], str(tmp_path / "run"), *words[1:])
        assert "owned" in text and "VERDICT: sound" not in lines_of(text)


def forge(manifest: Path, text: str) -> None:
    """As somebody would who knows the format: with the digest of what it says now."""
    content = json.loads(text)
    del content["digest"]
    digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=32).hexdigest()
    manifest.write_text(json.dumps({**content, "digest": digest}))


def test_words_of_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / "tests/golden/checkpoint-v3", tmp_path / "run")
    (manifest,) = (tmp_path / "run").glob("*/manifest.json")
    content = json.loads(manifest.read_text())
    content["layout"] = EVIL
    content["facts"]["facts"]["config"] = {"model": {"num_layers": f"{EVIL}\nVERDICT: sound"}}
    forge(manifest, json.dumps(content))
    text = seen(capsys, "checkpoint", "inspect", str(tmp_path / "run"))
    assert text.count("owned") == 2 and "VERDICT: sound" not in lines_of(text)


@pytest.mark.parametrize("name", ["normalization", "position_embedding_type"])
def test_arguments_of_megatron(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    def edit(content: dict[str, Any]) -> None:
        setattr(content["args"], name, f"{EVIL}\nVERDICT: sound")
        setattr(content["args"], EVIL, EVIL)

    write_legacy(tmp_path / "run", Case(), edit=edit)
    text = convert(capsys, tmp_path / "run")
    assert "owned" in text and "VERDICT: sound" not in lines_of(text)


# The doors


def test_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        configure_logging(rank=rank)
        get_logger("test").error("found %s", EVIL)
        try:
            raise ValueError(EVIL)
        except ValueError:
            get_logger("test").exception("and")
        text = capsys.readouterr().err
        assert not FORBIDDEN.search(text) and f"found {SHOWN}" in text and f"ValueError: {SHOWN}" in text


def test_a_traceback_and_a_warning() -> None:
    program = f"""
import sys, warnings
from petatron.cli import main
def fail(argv):
    warnings.warn({EVIL!r})
    print({EVIL!r}, file=sys.stdout)
    raise RuntimeError({EVIL!r})
main._dispatch = fail
main.entry()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert not FORBIDDEN.search(done.stdout + done.stderr)
    assert f"RuntimeError: {SHOWN}" in done.stderr and f"UserWarning: {SHOWN}" in done.stderr and SHOWN in done.stdout


def test_the_streams_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.stdout, sys.stderr

    def fail(argv: list[str]) -> int:
        assert raw_stream(sys.stdout) is before[0] and sys.stdout is not before[0]
        raise RuntimeError

    monkeypatch.setattr(cli, "_dispatch", fail)
    with pytest.raises(RuntimeError):
        main(["x"])
    assert (sys.stdout, sys.stderr) == before
    with escaped_output():
        assert escaped_stream(sys.stdout) is sys.stdout


def test_a_report_of_a_failed_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = f"""
import json, os, sys
details = {{"py_callstack": {EVIL!r}, "timestamp": "1", "time": 1.0, "echo": False}}
open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write(json.dumps({{"message": {{"message": "", "extraInfo": details}}}}))
sys.exit(3)
"""
    assert run_ranks([sys.executable, "-c", program], nproc=1) == 3
    text = capsys.readouterr().err
    assert SHOWN in text and not FORBIDDEN.search(text)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_our_own_drawing_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with escaped_output():
        progress = StderrProgress("reading: {}%".format)
        progress._last_s = time.monotonic() - 60
        progress(50)
        assert terminal.getvalue() == "\r\x1b[Kreading: 50%"
        with _progress_display(10):
            print("beside it", EVIL[:5], file=sys.stderr)
    drawn = terminal.getvalue()
    assert "\x1b[" in drawn, "rich moves the cursor and colors its bar"


def test_the_live_view_is_drawn_and_foreign_words_in_it_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    with escaped_output():
        before = sys.stdout, sys.stderr
        configure_logging()
        writer = build_console_writer("auto")
        assert isinstance(writer, LiveWriter)
        writer.write(event_record(f"saved {EVIL}", iteration=1))
        get_logger("test").warning("logged %s", EVIL)
        print(f"printed {EVIL}")
        writer.close()
        assert (sys.stdout, sys.stderr) == before
        get_logger("test").warning("later")
    drawn = terminal.getvalue()
    assert "\x1b[" in drawn and "later" in drawn
    for word in ("saved", "logged", "printed"):
        assert f"{word} \\u001b]0;owned\\u0007" in drawn
    assert "\x1b]0" not in drawn and not re.search("[\x07\x7f-\x9f\u202e\u2066\u2028]", drawn)


def test_a_library_that_draws_by_itself_is_let_through(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    def draw(**_: Any) -> Any:
        print("\x1b[34mwandb\x1b[0m", end="", file=sys.stderr)
        return SimpleNamespace(finish=draw)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=draw))
    with escaped_output():
        WandbWriter("p", name=None, directory=tmp_path).close()
        print("\x1b", end="", file=sys.stderr)
    assert terminal.getvalue() == "\x1b[34mwandb\x1b[0m" * 2 + r"\u001b"


def test_a_real_terminal_sees_no_escape(tmp_path: Path) -> None:
    """Through a pseudo-terminal, as a person would."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({EVIL: 1}))
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "petatron", "config", "show", "--config", str(tmp_path / "run.yaml")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=slave)
    os.close(slave)
    told = b""
    try:
        while part := os.read(master, 4096):
            told += part
    except OSError:  # the other end is closed
        pass
    os.close(master)
    assert process.wait() == 2 and b"owned" in told and not FORBIDDEN.search(told.decode().replace("\r\n", "\n"))


def test_only_who_draws_goes_around_the_door() -> None:
    """Nothing else writes to the streams behind it, nor to the file descriptors of a terminal."""
    drawing = {
        "cli/checkpoint.py",
        "cli/data.py",
        "serve/isolation/limited_worker.py",  # its standard output is a pipe to the server
        "mesh/launch/local_launcher.py",
        "posttrain/rewards/code_rewards.py",  # a program in the sandbox does, whose output is a pipe
        "train/report/console.py",
        "train/report/metric_writers.py",
        "base/terminal_escape.py",
    }
    behind = re.compile(r"\b(unescaped|drawn_output|__stdout__|__stderr__)\b|std(out|err)\.buffer|os\.write\([12],")
    for path in sorted((ROOT / "petatron").rglob("*.py")):
        relative = path.relative_to(ROOT / "petatron").as_posix()
        assert relative in drawing or not behind.search(path.read_text()), f"{relative} goes around the door"
