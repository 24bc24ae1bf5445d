"""`petatron port`: what it prints and writes, its exit status, and the toy that it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from petatron.cli.main import main

SCRIPTS = Path(__file__).parents[1] / "unit" / "port" / "scripts"
SMALL = """
NODES=${NODES:-1}
torchrun --nproc_per_node 8 --nnodes $NODES pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \\
    --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 64 --train-iters 100 --lr 1e-4 \\
    --bf16 --swiglu --use-mcore-models --mock-data --vocab-size 1000
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text(SMALL)
    return tmp_path


def port(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["port", *arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def test_a_script_is_ported_checked_planned_and_started(capsys: pytest.CaptureFixture[str], folder: Path):
    code, out, _ = port(capsys, "train.sh", "--device-memory-gb", "80")
    assert code == 0
    assert "train.sh, line 3: torchrun pretrain_gpt.py, 1 node x 8 ranks" in out
    assert "14 flags: 12 kept, 1 translated, 1 dropped as implied" in out
    assert "Memory at 8 ranks" in out and "fits:" in out and "8 micro-batches of 1 x 1,024 tokens" in out
    assert out.rstrip().endswith("petatron train --config train.petatron.yaml --nproc-per-node 8")
    assert "  num_layers: 24  # --num-layers 24 (line 3)" in (folder / "train.petatron.yaml").read_text()
    assert main(["config", "show", "train.petatron.yaml", "--changed"]) == 0
    code, out, _ = port(capsys, "train.sh", "--device-memory-gb", "1", "--set", "NODES=4")
    assert code == 1 and "does not fit" in out and "--nnodes 4 --node-rank $NODE_RANK" in out


def test_what_blocks_is_in_the_exit_status(capsys: pytest.CaptureFixture[str], folder: Path):
    (folder / "train.sh").write_text(SMALL.replace("--bf16", "--bf16 --num-frames 2 --seed $SEED"))
    code, out, _ = port(capsys, "train.sh")
    assert code == 1 and "something blocks" in out and "start it with" not in out
    assert "Or --without num-frames" in out and "--set SEED=VALUE" in out and "Memory at 8 ranks" in out
    code, out, _ = port(capsys, "train.sh", "--set", "SEED=7", "--without", "num-frames")
    assert code == 0 and "start it with" in out


def test_names_of_the_environment_are_in_the_command(capsys: pytest.CaptureFixture[str], folder: Path):
    (folder / "train.sh").write_text(SMALL.replace("--bf16", '--bf16 --save "$HOME/a b" --load $PWD/c'))
    code, out, _ = port(capsys, "train.sh")
    assert code == 0 and "To type after `petatron train` (2)" in out
    assert (
        'petatron train --config train.petatron.yaml --save "${HOME}/a b" --load "${PWD}/c" --nproc-per-node 8' in out
    )


def test_a_layout_that_does_not_fit_the_ranks_blocks(capsys: pytest.CaptureFixture[str], folder: Path):
    (folder / "train.sh").write_text(SMALL.replace("--bf16", "--bf16 --tensor-model-parallel-size 16"))
    code, out, _ = port(capsys, "train.sh")
    assert code == 1 and "--world-size 8 is not a multiple of tp 16" in out and "cannot be planned" in out
    code, out, _ = port(capsys, "train.sh", "--world-size", "16")
    assert code == 0 and "Memory at 16 ranks" in out and "--nproc-per-node 8 --nnodes 2" in out


def test_a_file_that_was_edited_is_not_replaced(capsys: pytest.CaptureFixture[str], folder: Path):
    assert port(capsys, "train.sh")[0] == 0
    written = folder / "train.petatron.yaml"
    assert port(capsys, "train.sh", "--set", "NODES=2")[0] == 0
    written.write_text(f"{written.read_text()}\n# mine\n")
    code, _, err = port(capsys, "train.sh")
    assert code == 2 and "exists, and was not written by `petatron port` or was edited since" in err
    assert "# mine" in written.read_text()
    assert port(capsys, "train.sh", "--force")[0] == 0 and "# mine" not in written.read_text()


def test_all_wrong_options_are_told_at_once(capsys: pytest.CaptureFixture[str]):
    options = ["--set", "X", "--world-size", "0", "--device-memory-gb", "-1", "--run", "--out", "none/x.yaml"]
    code, _, err = port(capsys, "train.sh", *options)
    assert code == 2 and err.startswith("5 problems")


def test_an_unreadable_script_is_an_error_without_a_file(capsys: pytest.CaptureFixture[str], folder: Path):
    (folder / "open.sh").write_text("torchrun pretrain_gpt.py 'open")
    code, _, err = port(capsys, "open.sh")
    assert code == 1 and "open.sh: line 1: this quote (') has no end" in err
    assert not (folder / "open.petatron.yaml").exists()


def test_a_toy_is_trained_here_and_now(capsys: pytest.CaptureFixture[str]):
    """Variables of paths have no value, which a toy does not need; but the script itself could not start."""
    code, out, err = port(capsys, "--run", str(SCRIPTS / "gpt3_175b.sh"), "--toy", "--train-iters", "1")
    assert code == 1 and "toy on 1 rank, 1 iterations of mock data" in out
    assert "the toy is trained without" not in out and "iteration        1/       1" in out + err


def test_what_is_told_of_a_toy_names_the_script(capsys: pytest.CaptureFixture[str], folder: Path):
    (folder / "train.sh").write_text(SMALL.replace("--bf16", "\\\n --bf16 --recompute-modules moe \\\n --use-mup"))
    code, out, err = port(capsys, "--run", "train.sh", "--toy", "--train-iters", "1")
    assert code == 0 and "petatron-port" not in out + err and "toy.yaml" not in out + err
    assert "(train.sh:6) has no effect" in out + err
    assert "muP:       base width" in out + err


def test_a_toy_takes_its_backend_from_this_machine_and_its_sizes_from_the_script(
    capsys: pytest.CaptureFixture[str], folder: Path
):
    script = folder / "train.sh"
    script.write_text(SMALL.replace("--bf16", "--distributed-backend nccl").replace("node 8", "node 2"))
    code, out, err = port(capsys, "--run", "train.sh", "--toy", "--train-iters", "1")
    assert code == 0 and "toy on 2 ranks" in out and "NCCL" not in out + err
    script.write_text(SMALL.replace("--num-layers 24", "--num-layers $LAYERS"))
    code, out, err = port(capsys, "--run", "train.sh", "--toy")
    assert code == 2 and "--toy needs --num-layers and --hidden-size" in err and "Give --set LAYERS=VALUE." in err


def test_a_toy_of_a_fragment_has_a_learning_rate(capsys: pytest.CaptureFixture[str], folder: Path):
    (folder / "train.sh").write_text(SMALL.replace("--train-iters 100 --lr 1e-4", "").replace("--bf16", ""))
    (folder / "train.petatron.yaml").write_text("# of an earlier port, and edited\n")
    code, out, err = port(capsys, "--run", "train.sh", "--toy", "--train-iters", "1")
    assert "train.petatron.yaml is there already and stays as it is" in out
    assert (folder / "train.petatron.yaml").read_text() == "# of an earlier port, and edited\n"
    assert code == 1 and "--lr is not set" in out and "the script sets no --lr: the toy has 0.0001" in out
    assert "iteration        1/       1" in out + err


SETTINGS = "TP=4 PP=4 CP=1 NUM_LAYERS=80 HIDDEN_SIZE=8192 NUM_HEADS=64 SEQ_LENGTH=4096".split()
"""Variables that variables_in_comments.sh has in comments."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in SCRIPTS.iterdir()))
def test_every_script_trains_as_a_toy(capfd: pytest.CaptureFixture[str], name: str):
    given = [text for value in SETTINGS for text in ("--set", value)] if name == "variables_in_comments.sh" else []
    code = main(["port", "--run", str(SCRIPTS / name), "--toy", "--train-iters", "2", *given])
    captured = capfd.readouterr()
    needs_values = name in ("gpt3_175b.sh", "functional_test.yaml", "mixtral_fragment.sh")
    assert code == needs_values, captured.out + captured.err
    assert "iteration        2/       2" in captured.out + captured.err
