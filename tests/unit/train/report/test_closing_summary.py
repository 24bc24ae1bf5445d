"""The closing summary: what is added up, what is said, and which commands are advised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from petatron.mesh.launch.environment import SINGLE_PROCESS, Launcher, rank_variables, read_environment
from petatron.train.report.closing_summary import RunTotals, summary_lines, summary_record
from petatron.train.report.suggested_commands import suggested_commands
from petatron.validate import load_config
from tests.unit.train.report.records import SUMMARY, log_record

RUN = "--mock-data --lr 1e-3 --save runs/a".split()


def test_the_summary_to_the_letter() -> None:
    assert summary_lines(SUMMARY) == (
        "summary\n"
        "  run         ended early: received SIGINT, at iteration 150 of 200\n"
        "  duration    1:02:05 (training 1:00:00, evaluation 0:01:01, saving 4.2 s)\n"
        "  steps       50 steps, 51,200 tokens in this start; 153,600 tokens since iteration 0\n"
        "  loss        5.5000 -> 4.2500\n"
        "  validation  best loss 4.5000 at iteration 100\n"
        "  speed       14,222 tokens/s, MFU 40.5%\n"
        "  checkpoint  runs/a/step-00000150\n"
        "  metrics     runs/a/metrics.jsonl, config.yaml\n"
        "next\n"
        "  # go on\n"
        "  petatron train runs/a/config.yaml"
    )


def test_a_total_and_the_set_that_stands_for_the_run_are_named() -> None:
    totals = RunTotals(first_iteration=0, first_tokens=0, loss_name="total loss", validation_set="same")
    totals.add_log_point(log_record(iteration=10, consumed_tokens=100, tokens_per_second=1.0, lm_loss=5.0))
    totals.validations.append((10, 4.5))
    totals.test_loss = 4.25
    run = load_config([*RUN, "--train-iters", "10"], preset="tiny-llama").config
    text = summary_lines(
        summary_record(totals, run, outcome="complete", train_iters=10, duration_s=1.0, log_dir=Path("runs/a"))
    )
    assert "\n  total loss  5.0000 -> 5.0000\n" in text
    assert "  validation  best total loss on same 4.5000 at iteration 10, test total loss 4.2500\n" in text


def test_what_a_run_does_not_have_is_left_out() -> None:
    nothing = dict.fromkeys(("first_loss", "best_validation_loss", "tokens_per_second", "mfu", "checkpoint"))
    text = summary_lines({**SUMMARY, **nothing, "outcome": "complete", "next_commands": []})
    assert "complete, at iteration 150" in text and "none was saved in this start" in text
    for absent in ("loss ", "validation", "speed", "MFU", "next", "None"):
        assert absent not in text


def test_speed_is_that_after_the_first_log_point() -> None:
    totals = RunTotals(first_iteration=10, first_tokens=1000)
    totals.add_log_point(log_record(iteration=11, consumed_tokens=1100, tokens_per_second=1.0, lm_loss=None, mfu=0.1))
    assert totals.speed.tokens_per_second == 1.0
    totals.add_log_point(log_record(iteration=20, consumed_tokens=2100, tokens_per_second=100.0, lm_loss=5.0, mfu=0.2))
    totals.add_log_point(log_record(iteration=30, consumed_tokens=3100, tokens_per_second=50.0, lm_loss=4.0, mfu=0.5))
    assert totals.all_points.seconds == pytest.approx(100 + 10 + 20)
    assert totals.speed.tokens_per_second == pytest.approx(2000 / 30) and totals.speed.mfu == pytest.approx(0.4)
    totals.validations += [(15, 4.5), (30, 4.75)]
    run = load_config([*RUN, "--train-iters", "40"], preset="tiny-llama").config
    record = summary_record(
        totals,
        run,
        outcome="x",
        train_iters=40,
        duration_s=1.0,
        log_dir=Path("runs/a"),
        earlier_validations=[(5, 4.25)],
    )
    assert (record["steps"], record["tokens"], record["consumed_tokens"]) == (20, 2100, 3100)
    assert (record["first_loss"], record["last_loss"]) == (5.0, 4.0)
    assert (record["best_validation_loss"], record["best_validation_iteration"]) == (4.25, 5)
    assert record["checkpoint"] is None


def test_mfu_is_unknown_if_one_log_point_has_none() -> None:
    totals = RunTotals(first_iteration=0, first_tokens=0)
    for tokens, mfu in ((10, 0.1), (20, None), (30, 0.1)):
        totals.add_log_point(log_record(consumed_tokens=tokens, tokens_per_second=1.0, mfu=mfu))
    assert totals.speed.mfu is None


def test_commands_name_the_runs_own_paths_and_no_subcommand_that_does_not_exist() -> None:
    run = load_config([*RUN, "--train-iters", "40", "--save", "my runs/a"], preset="tiny-llama").config
    known = {"subcommands": {"train", "checkpoint"}, "log_dir": Path("my runs/a"), "train_iters": 40}
    found = [command for command, _ in suggested_commands(run, **known, complete=False, saved=True)]
    assert found == [
        "petatron train 'my runs/a/config.yaml' --load 'my runs/a'",
        "petatron checkpoint verify 'my runs/a'",
        "petatron checkpoint convert 'my runs/a' 'my runs/a-huggingface' --to huggingface",
    ]
    latent = "--multi-latent-attention --num-query-groups 8 --no-group-query-attention --tokenizer-type ByteTokenizer".split()
    unwritable = load_config([*RUN, "--train-iters", "40", *latent], preset="tiny-llama").config
    subcommands = known["subcommands"] | {"generate", "chat"}
    left = [
        command
        for command, _ in suggested_commands(
            unwritable, **{**known, "subcommands": subcommands}, complete=False, saved=True
        )
    ]
    assert [command.split()[1] for command in left] == ["train", "generate", "chat", "checkpoint"], "no export"
    assert "verify" in left[3]
    head = "--objective classification --num-labels 2 --tokenizer-type ByteTokenizer".split()
    classifier = load_config([*RUN, "--train-iters", "40", "--save", "my runs/a", *head], preset="tiny-llama").config
    known_with_eval = {**known, "subcommands": {"generate", "chat", "eval"}}
    left = [command for command, _ in suggested_commands(classifier, **known_with_eval, complete=False, saved=True)]
    assert left == ["petatron eval 'my runs/a' --task labels --data FILE"]
    longer, purpose = suggested_commands(run, **known, complete=True, saved=True)[0]
    assert longer.endswith("--load 'my runs/a' --train-iters 80 --override-opt-param-scheduler")
    assert purpose == "train twice as long, from this checkpoint"
    assert suggested_commands(run, **known, complete=True, saved=False) == []
    with_plot = suggested_commands(run, **{**known, "subcommands": {"plot"}}, complete=True, saved=True)
    assert [command for command, _ in with_plot] == ["petatron plot 'my runs/a'"]


ALONE = "petatron train a/config.yaml --load a"
MEETING = "--master-addr=node0 --master-port=29500"
STARTS = [
    ("single", 1, 1, ALONE, ""),
    ("petatron", 4, 4, f"{ALONE} --nproc-per-node=4", ""),
    (
        "petatron",
        8,
        4,
        f"{ALONE} --nnodes=2 --node-rank=0 --nproc-per-node=4 {MEETING}",
        ", on every machine with its own --node-rank",
    ),
    ("torchrun", 4, 4, f"torchrun --nproc-per-node=4 -m {ALONE}", ", started with torchrun as before"),
    (
        "torchrun",
        8,
        4,
        f"torchrun --nnodes=2 --node-rank=0 --nproc-per-node=4 {MEETING} -m {ALONE}",
        ", started with torchrun as before, on every machine with its own --node-rank",
    ),
    ("slurm", 16, 8, f"srun --nodes=2 --ntasks-per-node=8 {ALONE}", ", in an allocation like this one"),
]


@pytest.mark.parametrize(("launcher", "ranks", "local", "command", "how"), STARTS)
def test_the_command_that_resumes_starts_as_many_ranks_in_the_same_way(
    launcher: Launcher, ranks: int, local: int, command: str, how: str
) -> None:
    environment = replace(
        SINGLE_PROCESS,
        launcher=launcher,
        world_size=ranks,
        local_world_size=local,
        master_addr="node0",
        master_port=29500,
    )
    run = load_config([*RUN, "--train-iters", "4", "--save", "a"], preset="tiny-llama").config
    known = {"subcommands": {"train"}, "log_dir": Path("a"), "train_iters": 4, "complete": False, "saved": True}
    assert suggested_commands(run, **known, environment=environment) == [(command, f"go on from this checkpoint{how}")]


def test_ranks_of_our_own_launcher_are_not_those_of_torchrun() -> None:
    ours = replace(SINGLE_PROCESS, world_size=2, local_world_size=2, master_port=29500, launcher="petatron")
    variables = rank_variables(ours, base={})
    assert read_environment(variables).launcher == "petatron"
    assert read_environment(rank_variables(replace(ours, launcher="torchrun"), base=variables)).launcher == "torchrun"


def test_a_model_that_knows_text_can_be_asked_for_some() -> None:
    text = ["--save", "my runs/a", "--tokenizer-type", "ByteTokenizer"]
    known = {
        "subcommands": {"generate", "chat", "serve"},
        "log_dir": Path("a"),
        "train_iters": 4,
        "complete": True,
        "saved": True,
    }
    run = load_config([*RUN, "--train-iters", "4", *text], preset="tiny-llama").config
    assert [command for command, _ in suggested_commands(run, **known)] == [
        "petatron generate 'my runs/a' --prompt 'Once upon a time'",
        "petatron chat 'my runs/a'",
        "petatron serve 'my runs/a'",
    ]
    without = load_config([*RUN, "--train-iters", "4", *text[:2]], preset="tiny-llama").config
    assert suggested_commands(without, **known) == [], "ids alone are no text"


def test_a_run_measured_in_samples_is_doubled_in_samples() -> None:
    run = load_config([*RUN, "--train-samples", "64"], preset="tiny-llama").config
    command, _ = suggested_commands(
        run, subcommands=["train"], log_dir=Path("runs/a"), train_iters=64, complete=True, saved=True
    )[0]
    assert "--train-samples 128" in command and "--train-iters" not in command


@pytest.mark.parametrize("preset", ["minimax-text-01", "qwen3-next-80b-a3b"])
def test_a_toy_of_a_family_of_hugging_face_can_be_exported_as_well(preset: str) -> None:
    """How many tokens a chunk of the computation has is no property of the model."""
    run = load_config([*RUN, "--train-iters", "4", "--save", "a", "--toy"], preset=preset).config
    known = {"subcommands": {"checkpoint"}, "log_dir": Path("a"), "train_iters": 4, "complete": True, "saved": True}
    assert [command.split()[2] for command, _ in suggested_commands(run, **known)] == ["verify", "convert"]
