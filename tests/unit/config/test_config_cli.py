"""`petatron` and `petatron config`: what they print and the codes they exit with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.base.version import __version__
from petatron.cli import main as cli
from petatron.config import dump_yaml, preset_names
from petatron.config.flags.help_text import flag_help
from petatron.config.flags.megatron_table import megatron_flags
from petatron.config.flags.reference_page import reference_page
from petatron.config.saved_config import saved_yaml
from petatron.config.schema.fields import all_fields, fields_by_name
from petatron.validate import load_config

ROOT = Path(__file__).parents[3]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for subcommand in ("quickstart", "train", "data", "verify", "bench", "config", "doctor"):
        assert f"  {subcommand} " in out
    assert run(capsys)[0] == 2


def test_version(capsys: pytest.CaptureFixture[str]):
    assert run(capsys, "--version") == (0, f"petatron {__version__}\n", "")


@pytest.mark.parametrize(
    ("subcommand", "hint"), [("trian", "Did you mean train?"), ("zzz", "Subcommands: quickstart,")]
)
def test_unknown_subcommand(capsys: pytest.CaptureFixture[str], subcommand: str, hint: str):
    code, _, err = run(capsys, subcommand)
    assert code == 2
    assert f"'{subcommand}' is not a subcommand. {hint}" in err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            ConfigError([Problem("--x", "1", "is odd", "Use 2.")]),
            2,
            "1 problem in this configuration:\n  --x 1 is odd. Use 2.\n",
        ),
        (DataError("the index is torn"), 1, "petatron: the index is torn\n"),
        (KeyboardInterrupt(), 130, "petatron: interrupted\n"),
    ],
)
def test_errors_become_exit_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, text: str
):
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli.importlib, "import_module", lambda name: SimpleNamespace(main=fail))
    assert run(capsys, "train") == (code, "", text)


def test_other_errors_are_bugs_and_keep_their_traceback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: SimpleNamespace(main=lambda argv: 1 // 0))
    with pytest.raises(ZeroDivisionError):
        cli.main(["train"])


def test_help_imports_nothing_heavy():
    program = (
        "import sys; from petatron.cli.main import main; code = main(['--help']) + main(['config', '--help']);"
        "heavy = [m for m in ('torch', 'numpy', 'yaml') if m in sys.modules]; sys.exit(3 if heavy else code)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


def test_a_closed_pipe_is_quiet():
    reader, writer = os.pipe()
    os.close(reader)
    program = "from petatron.cli.main import entry; entry()"
    command = [sys.executable, "-c", program, "config", "reference"]
    answer = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (answer.returncode, answer.stderr) == (1, "")


def test_show_prints_values_with_origins(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "config", "show", "tiny-llama", "--tp", "2", "--use-flash-attn")
    assert code == 0
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in out.splitlines() if line.startswith("  ")}
    assert rows["num_layers"] == ["4", "preset tiny-llama"]
    assert rows["tensor_model_parallel_size"] == ["2", "--tp"]
    assert rows["world_size"] == ["2", "derived: tp x pp x cp x dp"]
    assert rows["rotary_base"] == ["10000", "default"]
    assert rows["vocab_size"] == ["unset", "default"]
    assert set(rows) == set(fields_by_name())
    assert err.startswith("note: accepted, and nothing changes: --use-flash-attn (")


def test_show_changed_leaves_out_defaults(capsys: pytest.CaptureFixture[str]):
    _, out, _ = run(capsys, "config", "show", "tiny-llama", "--changed")
    assert "num_layers" in out and "rotary_base" not in out and " default" not in out


def test_show_still_shows_when_there_are_problems(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "config", "show", "tiny-llama", "--tp", "3", "--bogus")
    assert code == 2
    assert "tensor_model_parallel_size" in out
    assert err.startswith("2 problems, after the table\n") and "\n2 problems in this configuration:\n" in err


def test_show_counts_problems_first_and_lists_them_after_the_long_table():
    """Through one pipe, as on a terminal: the table would push the problems out of sight."""
    command = [sys.executable, "-m", "petatron", "config", "show", "tiny-llama", "--tp", "3", "--changed"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert answer.returncode == 2
    assert answer.stdout.startswith("1 problem, after the table\n")
    assert answer.stdout.index("tensor_model_parallel_size") < answer.stdout.index("1 problem in this configuration:")
    assert answer.stdout.endswith("--num-attention-heads 8. Use 1, 2, 4 or 8.\n")


def test_show_of_a_file_and_of_a_run_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text("num_layers: 6\n")
    for name in (str(file), str(tmp_path)):
        code, out, err = run(capsys, "config", "show", name, "--preset", "tiny-llama", "--tp", "2", "--changed")
        rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in out.splitlines() if line.startswith("  ")}
        assert (code, err) == (0, "")
        assert rows["num_layers"] == ["6", f"{file}:1"]
        assert rows["hidden_size"] == ["128", "preset tiny-llama"]
        assert rows["tensor_model_parallel_size"] == ["2", "--tp"]


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("tiny-lama", "Did you mean the preset tiny-llama?"),
        ("nowhere.yaml", "Check the path; `petatron config presets` lists the presets."),
        ("{folder}", "The folder is there, but holds no config.yaml."),
    ],
)
def test_show_of_what_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, fix: str):
    name = name.format(folder=tmp_path)
    code, out, err = run(capsys, "config", "show", name, "--tp", "2")
    assert (code, out) == (2, "")
    assert f"{name} is neither a preset, nor a YAML file, nor a run folder with a config.yaml. {fix}\n" in err


@pytest.mark.parametrize("option", [(), ("--changed",)])
def test_show_yaml_is_a_config_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, option: tuple[str, ...]):
    code, out, _ = run(capsys, "config", "show", "llama3-8b", "--yaml", "--tp", "2", *option)
    assert (len(out.splitlines()) < 40) == bool(option), "only what is not a default"
    file = tmp_path / "config.yaml"
    file.write_text(out)
    again = load_config(files=[file], require_training=False).config
    assert code == 0
    assert again == load_config(["--tp", "2"], preset="llama3-8b", require_training=False).config


def test_diff_of_preset_file_and_run_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    config = load_config(
        ["--num-layers", "5", "--data-path", "a", "b"], preset="tiny-llama", require_training=False
    ).config
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    code, out, _ = run(capsys, "config", "diff", "tiny-llama", str(tmp_path))
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["model.num_layers", "4", "->", "5"],
        ["data.data_path", "-", "->", "a", "b"],
        ["data.data_cache_path", "unset", "->", "cache"],
    ]
    assert run(capsys, "config", "diff", str(tmp_path), str(tmp_path / "config.yaml"))[1] == "no difference\n"


def test_diff_of_what_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    code, _, err = run(capsys, "config", "diff", "tiny-llama", str(tmp_path))
    assert code == 2
    assert "is neither a preset, nor a YAML file, nor a run folder with a config.yaml" in err
    bad = tmp_path / "bad.yaml"
    bad.write_text("bogus: 1\n")
    code, _, err = run(capsys, "config", "diff", "tiny-llama", str(bad))
    assert code == 2
    assert f"{bad}:1 bogus is not a known" in err
    assert run(capsys, "config", "diff", "tiny-llama")[0] == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("presets foo", "foo is a word too many"),
        ("diff tiny-llama", "compares two configurations, and gets 1 word"),
        ("reference --to x", "Give --out FILE, or nothing"),
        ("reference --out none/flags.md", "--out none/flags.md is in a folder that does not exist"),
    ],
)
def test_wrong_words_are_named(capsys: pytest.CaptureFixture[str], words: str, told: str):
    code, _, err = run(capsys, "config", *words.split())
    assert code == 2 and told in err


def test_presets_and_usage(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "config", "presets")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(preset_names())
    assert run(capsys, "config", "--help")[0] == 0
    assert run(capsys, "config")[0] == 2
    assert run(capsys, "config", "bogus")[0] == 2
    assert run(capsys, "config", "reference", "--bogus")[0] == 2


def test_reference_page_is_up_to_date(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    page = tmp_path / "flags.md"
    assert run(capsys, "config", "reference", "--out", str(page))[0] == 0
    assert page.read_text() == reference_page()
    committed = (ROOT / "docs" / "flags.md").read_text()
    assert committed == reference_page(), "run `petatron config reference --out docs/flags.md`"


def test_page_of_megatrons_flags_is_up_to_date(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    page = tmp_path / "megatron.md"
    assert run(capsys, "config", "reference", "--megatron", "--out", str(page))[0] == 0
    committed = (ROOT / "docs" / "megatron.md").read_text()
    assert committed == page.read_text(), "run `petatron config reference --megatron --out docs/megatron.md`"
    assert all(f"`{flag}`" in committed for flag in megatron_flags())


def test_help_and_reference_document_every_field():
    text, page = flag_help(), reference_page()
    for info in all_fields():
        assert info.doc.endswith("."), info.path
        assert f"  {info.flag}" in text
        assert f"`{info.flag}`" in page
    assert max(len(line) for line in text.splitlines()) <= 110


def test_parameters_are_listed_as_patterns_match_them(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "config", "params", "tiny-llama", "--freeze", "layers.[0-2].*", "head.*")
    rows = [line.split("  ") for line in out.splitlines()]
    shapes = {name: " ".join(rest).split() for name, *rest in rows}
    assert code == 0 and shapes["layers.3.attention.k.weight"] == ["64", "x", "128"]
    assert shapes["layers.0.mlp.down.weight"][-1] == shapes["head.weight"][-1] == "frozen"
    assert "are frozen" in err and "128 stands for it" in err
    code, _, err = run(capsys, "config", "params", "tiny-llama", "--freeze", "nothing")
    assert code == 2 and "`petatron config params` lists them" in err


def test_parameters_of_a_run_have_the_size_of_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = "--mock-data --train-iters 4 --lr 1e-3 --tokenizer-type ByteTokenizer".split()
    (tmp_path / "config.yaml").write_text(saved_yaml(load_config(flags, preset="tiny-llama")))
    code, out, err = run(capsys, "config", "params", str(tmp_path))
    [row] = [line for line in out.splitlines() if line.startswith("embedding.weight")]
    assert code == 0 and row.split()[1:] == ["257", "x", "128"] and "stands for it" not in err


def test_parameters_of_a_run_without_its_tokenizer_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = "--mock-data --train-iters 4 --lr 1e-3 --tokenizer-type HuggingFaceTokenizer --tokenizer-model gone".split()
    code, out, err = run(capsys, "config", "params", "tiny-llama", *flags)
    assert code == 0 and "embedding.weight" in out and "128 stands for it" in err
