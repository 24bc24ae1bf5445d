"""`petatron eval` and `tasks/main.py`: the numbers of a plain transformers loop, several checkpoints and ranks, errors."""

from __future__ import annotations

import json
import math
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

import petatron
from petatron.cli.main import main
from petatron.data.tokenizer import ByteTokenizer
from petatron.mesh.mesh import ParallelMesh

ROOT = Path(__file__).parent.parent.parent
RUN = "--mock-data --lr 1e-3 --eval-iters 0 --num-workers 0 --train-iters 1 --device cpu --init-method-std 0.3"
SHAPE = "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --num-query-groups 2 --vocab-size 257 --seq-length 16"
LLAMA = f"{SHAPE} --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --max-position-embeddings 64"
TEXT = " The cat @-@ dog sat , and it was good . \n = = Plot = = \n It ends here ."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with a tokenizer, one without, and the files of tasks."""
    folder = tmp_path_factory.mktemp("eval")
    for name, seed in (("a", 1), ("b", 2)):
        run = petatron.load(None, [*LLAMA.split(), *RUN.split(), "--seed", str(seed)], world_size=1)
        model = petatron.build_model(run, ParallelMesh.single())
        model.save_pretrained(folder / name, tokenizer=ByteTokenizer())
    shutil.copytree(folder / "a", folder / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "bare" / name).unlink()
    (folder / "wikitext103_valid.txt").write_text(TEXT)
    (folder / "lambada.json").write_text('{"text": "a cat is a cat"}\n{"text": "one two three"}\n')
    (folder / "piqa.jsonl").write_text('{"goal": "Go", "sol1": "by foot", "sol2": "no", "label": 1}\n')
    (folder / "tasks.yaml").write_text(
        "- {task: wikitext103, data: wikitext103_valid.txt, stride: 4}\n- {task: piqa, data: piqa.jsonl}\n"
        "- {task: text, data: wikitext103_valid.txt, name: raw}\n"
    )
    return folder


def evaluate(folder: Path, *words: str) -> dict[str, dict]:
    """The results of checkpoints by name, then by task."""
    assert main(["eval", *words, "--out", str(folder / "out.json")]) == 0
    content = json.loads((folder / "out.json").read_text())
    return {Path(one["checkpoint"]).name: one["results"] for one in content["checkpoints"]}


def test_perplexity_equals_a_plain_transformers_loop(folder: Path):
    transformers = pytest.importorskip("transformers")
    found = evaluate(folder, str(folder / "a"), "--tasks", str(folder / "tasks.yaml"), "--seq-length", "8")["a"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "a").eval()

    def losses(ids: list[int], counted: int) -> float:
        with torch.no_grad():
            logits = model(torch.tensor([ids[:-1]])).logits[0].double()
        each = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        return each[-counted:].sum().item()

    # Windows of eight inputs, of which all but the first count four.
    ids = [*b" The cat-dog sat, and it was good.\n== Plot ==\nIt ends here ."]
    total = losses(ids[:9], 8)
    for start in range(4, len(ids), 4):
        window = ids[start : start + 9]
        total += losses(window, len(window) - 5) if len(window) > 5 else 0
    metrics = found["wikitext103"]["metrics"]
    assert metrics["perplexity"]["value"] == pytest.approx(math.exp(total / (len(ids) - 1)), rel=1e-5)
    words = len(TEXT.strip().split(" "))
    assert metrics["adjusted_perplexity"]["value"] == pytest.approx(math.exp(min(20, total / (words - 1))), rel=1e-5)

    raw = [256, *TEXT.encode()]
    total, begin = 0.0, 0
    while begin + 1 < len(raw):  # windows side by side; the last has eight inputs too
        end = min(begin + 9, len(raw))
        total += losses(raw[max(0, end - 9) : end], end - begin - 1)
        begin = end - 1
    assert found["raw"]["metrics"]["loss"]["value"] == pytest.approx(total / (len(raw) - 1), rel=1e-5)
    assert found["raw"]["metrics"]["bits_per_byte"]["value"] == pytest.approx(
        total / math.log(2) / len(TEXT.encode()), rel=1e-5
    )
    goal = [*b"Question: Go\nAnswer:"]
    foot, no = (-losses([*goal, *choice], len(choice)) for choice in (b" by foot", b" no"))
    assert found["piqa"]["metrics"]["accuracy"]["value"] == float(no > foot)
    assert found["piqa"]["metrics"]["accuracy_norm"]["value"] == float(no / 2 > foot / 7)


def test_checkpoints_are_compared_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]):
    models = [str(folder / name) for name in "ab"]
    found = evaluate(folder, *models, "--task", "LAMBADA", "--data", str(folder / "lambada.json"), "--limit", "1")
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["task", "metric", *models] and [row.split()[1] for row in rows] == [
        "accuracy",
        "perplexity",
    ]
    first, second = (found[name]["lambada"] for name in "ab")
    assert first["counts"]["examples"] == 1 and first["metrics"]["perplexity"] != second["metrics"]["perplexity"]


@pytest.mark.usefixtures("forked_ranks")
def test_tasks_main_runs_as_typed_and_ranks_give_the_numbers_of_one(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    command = """tasks/main.py \\
      --task WIKITEXT103 \\
      --valid-data wikitext103_valid.txt \\
      --vocab-file gpt2-vocab.json \\
      --load a --overlapping-eval 4 --seq-length 8 --micro-batch-size 8 --log-interval 10 --num-layers 2 --no-load-optim \\
      --pipeline-model-parallel-size 2 --device cpu
    """
    words = evaluate(folder, str(folder / "a"), "--tasks", str(folder / "tasks.yaml"), "--seq-length", "8")["a"]
    values = {name: each["value"] for name, each in words["wikitext103"]["metrics"].items()}
    capfd.readouterr()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", shlex.split(command.replace("\\\n", " ")))
    for stream in ("stdout", "stderr"):  # the entry point wraps both for good
        monkeypatch.setattr(sys, stream, getattr(sys, stream))
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(ROOT / "tasks" / "main.py"), run_name="__main__")
    said = capfd.readouterr()
    assert done.value.code == 0, said.err
    line = next(line for line in said.out.splitlines() if "validation results" in line)
    assert line == (
        f" validation results on WIKITEXT103 | avg loss: {values['loss']:.4E} | ppl: {values['perplexity']:.4E} | "
        f"adjusted ppl: {values['adjusted_perplexity']:.4E} | token ratio: {values['token_ratio']} | "
    )
    assert "--vocab-file gpt2-vocab.json has no effect without --merge-file" in said.err


def test_tasks_main_of_lambada(folder: Path, capsys: pytest.CaptureFixture[str]):
    words = [
        "--task",
        "LAMBADA",
        "--valid-data",
        str(folder / "lambada.json"),
        "--strict-lambada",
        "--load",
        str(folder / "a"),
    ]
    assert main(["eval", "--megatron-tasks", *words, "--tokenizer-type", "HuggingFaceTokenizer", "--bf16"]) == 2
    assert main(["eval", "--megatron-tasks", *words]) == 0
    said = capsys.readouterr().out
    assert "| number correct: 0.0000E+00 | total examples: 2.0000E+00 | avg accuracy: 0.0000E+00 |" in said


@pytest.mark.parametrize(
    ("words", "code", "messages"),
    [
        ("", 2, ["CHECKPOINT is not given", "--task and --data are one way"]),
        ("{a} --task lambada", 2, ["Give --task and --data, or --tasks alone"]),
        ("{a} --task lambada --data {f}/lambada.json --tasks {f}/tasks.yaml", 2, ["or --tasks alone"]),
        ("{a} --task lambda --data {f}/lambada.json", 2, ["--task lambda is not a task. Use one of"]),
        ("{a} --task piqa --data {f}/none", 2, ["none is not a file"]),
        ("{a} --tasks {f}/tasks.yaml --limit 3", 2, ["--limit is for --task. Write it in"]),
        ("{a} --tasks {f}/tasks.yaml --no-bos --num-fewshot 1", 2, ["--bos --num-fewshot is for --task. Write it in"]),
        ("{a} --task piqa --data {f}/piqa.jsonl --bos", 1, ["names no BOS token"]),
        ("{a} --task piqa --data {f}/piqa.jsonl --num-fewshot 1", 1, ["has 0 examples to show before example 1"]),
        (
            "{a} --task piqa --data {f}/piqa.jsonl --out {f}/no/x --batch-tokens 0",
            2,
            ["is in a folder that does not exist", "--batch-tokens 0 is below 1"],
        ),
        ("{a} --task lambada --data {f}/piqa.jsonl", 1, ['piqa.jsonl:1: the key "text" is missing; it has goal, sol1']),
        ("{f}/bare --task piqa --data {f}/piqa.jsonl", 2, ["bare has no tokenizer, so that it cannot read text"]),
        ("{f}/none --task piqa --data {f}/piqa.jsonl", 1, ["none is not a folder"]),
        (
            "{a} --task piqa --data {f}/piqa.jsonl --num-layers 3",
            2,
            ["--num-layers 3 contradicts", "whose model has 2"],
        ),
        ("{a} --task piqa --data {f}/piqa.jsonl --tp 3", 2, ["--tensor-model-parallel-size 3 does not divide"]),
        ("--megatron-tasks --valid-data x y", 2, ["--task is not given", "--load is not given", "are several files"]),
    ],
)
def test_what_cannot_be_measured_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], words: str, code: int, messages: list[str]
):
    assert main(["eval", *words.format(a=folder / "a", f=folder).split()]) == code
    said = capsys.readouterr().err
    assert all(message in said for message in messages), said


def test_a_step_is_named_as_megatron_does(folder: Path, capsys: pytest.CaptureFixture[str]):
    words = f"--task LAMBADA --valid-data {folder}/lambada.json --load {folder}/run --ckpt-step 7".split()
    assert main(["eval", "--megatron-tasks", *words]) == 1
    assert "run/step-00000007 is not a folder" in capsys.readouterr().err
