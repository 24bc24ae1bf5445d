"""`petatron verify --matrix`: a few layouts, planted faults, ranks that fail, and mistakes in the question."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from petatron.cli.main import main
from petatron.cli.subcommands import verify_matrix
from petatron.verify.proof_matrix import parse_entry
from petatron.verify.run_proof_matrix import STARTED_FILE, MatrixCase, make_case, read_result


@pytest.mark.usefixtures("forked_ranks")
def test_layouts_of_different_sizes_agree(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    report = tmp_path / "out.json"
    assert main(["verify", "--matrix", "--only", "dense:?p?-sp", "--steps", "1", "--json", str(report)]) == 0
    out = capfd.readouterr().out
    assert "2 layouts, 1 steps in float64" in out
    assert "2 of 2 layouts train the same model as one process" in out
    found = json.loads(report.read_text())
    assert [outcome["name"] for outcome in found] == ["dense:tp2-sp", "dense:tp4-sp"]
    assert all(outcome["gradient"] < 1e-9 and outcome["departure"] is None for outcome in found)


@pytest.mark.usefixtures("forked_ranks")
def test_random_models_and_the_command_that_repeats_a_fault(capfd: pytest.CaptureFixture[str]):
    fault = "--only dense:dp2 --seed 5 --random-model --steps 2 --inject layers.1.mlp.down.weight@2"
    assert main(["verify", "--matrix", *fault.split()]) == 1
    out = capfd.readouterr().out
    assert "DIFFERENT" in out and "0 of 1 layouts train the same" in out
    (departure,) = [line for line in out.splitlines() if "step 2: gradient layers.1.mlp.down.weight differs" in line]
    (command,) = [line.strip() for line in out.splitlines() if line.startswith("  petatron verify")]
    assert departure.startswith("dense:dp2")
    assert command in out[out.index(departure) :] and command.endswith("--inject layers.1.mlp.down.weight@2")


def _case(name: str) -> MatrixCase:
    found = parse_entry(name)
    return make_case(found, model_flags=found.model_flags, steps=1, dtype="float32")


@pytest.mark.usefixtures("forked_ranks")
def test_a_failing_rank_costs_one_case(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Rank 1 finds its folder taken; rank 0 waits for it in vain; the next start goes on with the next case."""
    monkeypatch.setattr(verify_matrix.tempfile, "TemporaryDirectory", lambda **options: _Kept(tmp_path))
    (tmp_path / "case-00000" / "rank-00001").mkdir(parents=True)
    options = verify_matrix._parser().parse_args(["--dtype", "float32", "--steps", "1"])
    assert verify_matrix._run([_case("dense:dp2"), _case("dense:tp2")], options) == 1
    first, second = read_result(tmp_path, 0), read_result(tmp_path, 1)
    assert first is not None and (first.error or "").startswith("rank 1: ") and "FileExistsError" in (first.error or "")
    assert second is not None and second.agrees
    captured = capfd.readouterr()
    assert (
        "1 of 2 layouts" in captured.out and "FAILED" in captured.out and "petatron verify --num-layers" in captured.out
    )


class _Kept:
    """A temporary folder that the test made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> str:
        return str(self.folder)

    def __exit__(self, *_: object) -> None: ...


def test_ranks_that_end_without_a_word_are_a_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Killed by the kernel, say: no rank left an error."""
    monkeypatch.setattr("petatron.mesh.launch.local_launcher.run_ranks", _killed)
    options = verify_matrix._parser().parse_args([])
    assert verify_matrix._run([_case("dense:dp2"), _case("dense:tp2")], options) == 1
    assert capfd.readouterr().out.count("ranks ended with code 137") == 2
    monkeypatch.setattr("petatron.mesh.launch.local_launcher.run_ranks", lambda command, nproc: 130)
    assert verify_matrix._run([_case("dense:dp2")], options) == 130, "Ctrl-C ends the whole"
    monkeypatch.setattr("petatron.mesh.launch.local_launcher.run_ranks", lambda command, nproc: 1)
    assert verify_matrix._run([_case("dense:dp2")], options) == 2, "ranks that never met say nothing of a layout"


def _killed(command: list[str], nproc: int) -> int:
    (Path(command[-1]) / STARTED_FILE).touch()
    return 137


def test_list_runs_nothing(capfd: pytest.CaptureFixture[str]):
    assert main(["verify", "--matrix", "--list", "--nproc", "2", "--only", "dense*zero1"]) == 0
    assert capfd.readouterr().out.split() == [
        "dense:dp2-zero1",
        *"--dp 2 --use-distributed-optimizer --overlap-param-gather".split(),
    ]


def test_mistakes(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert main(["verify", "--matrix", "--only", "tp9"]) == 2
    assert "--only tp9 fits no layout of the matrix" in capfd.readouterr().err
    assert main(["verify", "--matrix", "--only", "dense:tp2-sp.pp2.cp2", "--nproc", "4"]) == 2
    assert "--nproc 4 is too few for dense:tp2-sp.pp2.cp2" in capfd.readouterr().err
    for wrong in (["--sample", "0"], ["--steps", "-1"], ["--tp", "2"]):
        with pytest.raises(SystemExit) as stopped:
            main(["verify", "--matrix", *wrong])
        assert stopped.value.code == 2
    for words, says in (
        ("--matrix --list --json out.json", "--json is for running layouts, and --list runs none"),
        ("--matrix --list --inject norm.weight", "--inject is for running layouts, and --list runs none"),
        ("--matrix --list --random-model", "--random-model is for running layouts, and --list runs none"),
        ("--matrix --only dp2 --seed 5", "--seed 5 is for drawing layouts or models, and nothing is drawn"),
        (f"--matrix --only dp2 --json {tmp_path}", f"--json {tmp_path} is a folder"),
        (f"--matrix --only dp2 --json {tmp_path}/no/x", "is in a folder that does not exist"),
        (
            "tiny-llama --sample 3",
            "--sample chooses from the matrix of layouts, but --matrix is not given. Add --matrix.",
        ),
        ("tiny-llama --only=dp2 --list", "2 problems in this configuration:"),
        ("--random-model", "--random-model chooses from the matrix"),
        ("tiny-llama --tp 2 --nproc 2", "--nproc chooses from the matrix"),
    ):
        assert main(["verify", *words.split()]) == 2, words
        captured = capfd.readouterr()
        assert says in captured.err and captured.out == "", words
    assert main(["verify", "--matrix", "--only", "dense:dp2", "--inject", "nothing"]) == 2
    assert "names no tensor" in capfd.readouterr().err
