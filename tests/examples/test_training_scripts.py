"""Scripts of `examples/`: what they start at full size, the memory that their head says, and the toy that each trains."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from petatron.cli.train import load_planned
from petatron.config.schema.fields import flatten_config
from petatron.port.ported_run import port_script
from petatron.port.read_script import read_script
from petatron.validate import resolve_config
from tests.examples.example_scripts import (
    ROOT,
    TRAINING,
    example_environment,
    head_memory_gb,
    launched_ranks,
    started_command,
    training_flags,
)
from tests.examples.memory_plan import planned
from tests.load_deadline import scaled

PRESETS = {
    "gpt3/train_gpt3_175b_distributed.sh": "gpt3-175b",
    "llama/train_llama3_8b_fp8.sh": "llama3-8b",
    "llama/train_llama_70b.sh": "llama2-70b",
    "mixtral/train_mixtral_8x7b_distributed.sh": "mixtral-8x7b",
    "mamba/train.sh": "mamba2-2.7b",
    "mamba/train_hybrid.sh": "nemotron-h-8b",
    "deepseek/train_deepseek_v3.sh": "deepseek-v3",
}
scripts = pytest.mark.parametrize("name", TRAINING)


def test_every_training_script_is_tested():
    folders = ("gpt3", "llama", "mixtral", "mamba", "deepseek", "bert", "t5")
    assert {path for folder in folders for path in (ROOT / "examples" / folder).glob("*.sh")} == set(TRAINING.values())


@scripts
def test_the_full_size_fits_and_needs_what_the_head_says(name: str, tmp_path: Path):
    command = started_command(TRAINING[name], tmp_path)
    assert command[0] == "torchrun"
    plan = planned([*training_flags(command), "--world-size", str(launched_ranks(command))])
    assert head_memory_gb(TRAINING[name]) == plan.gigabytes
    assert float(plan.gigabytes) <= 78.0
    unexpected = [notice for notice in plan.loaded.notices if "has no effect" in notice]
    assert not unexpected


def test_the_page_of_examples_has_the_same_numbers(tmp_path: Path):
    page = (ROOT / "examples" / "README.md").read_text()
    rows = dict(re.findall(r"^\| \[(.+?\.sh)\]\(.*\| ([\d,]+ GPUs \| [\d.]+ GB) \|$", page, re.MULTILINE))
    for name, script in TRAINING.items():
        ranks = launched_ranks(started_command(script, tmp_path))
        assert rows.pop(name) == f"{ranks:,} GPUs | {head_memory_gb(script)} GB"
    assert not rows
    for target in re.findall(r"\]\(([^)]+)\)", page):
        assert (ROOT / "examples" / target).exists()


@pytest.mark.parametrize("name", PRESETS)
def test_the_flags_of_a_script_are_its_preset(name: str, tmp_path: Path):
    command = started_command(TRAINING[name], tmp_path)
    script = load_planned([*training_flags(command), "--world-size", str(launched_ranks(command))]).config
    preset = load_planned([PRESETS[name]]).config
    unused = {"attention_dropout": script.model.attention_dropout} if name == "mamba/train.sh" else {}
    positions = script.model.max_position_embeddings
    assert script.model == replace(preset.model, max_position_embeddings=positions, **unused)
    assert script.moe == replace(preset.moe, moe_token_dispatcher_type=script.moe.moe_token_dispatcher_type)


@scripts
def test_data_and_variables_of_the_environment_reach_the_command(name: str, tmp_path: Path):
    variables = {
        "DATA_PATH": "/data/a b",
        "TOKENIZER_MODEL": "/data/tok",
        "VOCAB_FILE": "v.json",
        "MERGE_FILE": "m.txt",
    }
    command = started_command(TRAINING[name], tmp_path, NNODES="2", NODE_RANK="1", SAVE="/shared/run", **variables)
    assert launched_ranks(command) == 16 and command[command.index("--node_rank") + 1] == "1"
    flags = training_flags(command)
    assert flags[flags.index("--data-path") + 1] == "/data/a b" and "--mock-data" not in flags
    assert flags[flags.index("--save") + 1] == flags[flags.index("--load") + 1] == "/shared/run"


@scripts
def test_port_reads_a_script_as_bash_does(name: str, tmp_path: Path):
    command = started_command(TRAINING[name], tmp_path)
    run = port_script(read_script(TRAINING[name], {}))
    assert not run.blocks, run.groups()
    assert run.world_size == launched_ranks(command)
    ported, _ = resolve_config(run.flags.argv, world_size=run.world_size)
    typed, _ = resolve_config(training_flags(command), world_size=run.world_size)
    assert flatten_config(ported.config) == flatten_config(typed.config)


def test_sbatch_of_the_70b_script_starts_one_task_per_gpu(tmp_path: Path):
    """SLURM runs a copy in its spool folder, and says with scontrol where the file came from."""
    script = TRAINING["llama/train_llama_70b.sh"]
    (tmp_path / "spool" / "job").mkdir(parents=True)
    copy = shutil.copy(script, tmp_path / "spool" / "job" / "slurm_script")
    scontrol = (
        f'#!/bin/bash\n[[ "$*" == "show job 7" ]] && echo "JobId=7 JobName=x" && echo "   Command={script} extra"\n'
    )
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "8"}
    command = started_command(Path(copy), tmp_path, {"scontrol": scontrol}, **job)
    assert command[:2] == ["srun", "--ntasks-per-node=8"] and str(ROOT / "pretrain_gpt.py") in command
    direct = started_command(script, tmp_path)
    assert training_flags(command) == training_flags(direct)


def test_the_sbatch_file_runs_the_70b_script(tmp_path: Path):
    file = ROOT / "examples" / "llama" / "train_llama_70b.sbatch"
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "8", "SLURM_SUBMIT_DIR": str(ROOT)}
    command = started_command(file, tmp_path, **job)
    assert command[0] == "srun" and "#SBATCH --nodes=8" in file.read_text()
    assert training_flags(command) == training_flags(started_command(TRAINING["llama/train_llama_70b.sh"], tmp_path))


@pytest.mark.docs
@pytest.mark.timeout(600)
@scripts
def test_a_toy_of_every_script_trains_and_saves(name: str, tmp_path: Path):
    done = subprocess.run(
        ["bash", str(TRAINING[name])],
        cwd=tmp_path,
        env=example_environment(TOY="1", TMPDIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=scaled(120),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "2 ranks on cpu" in done.stdout + done.stderr and "iteration        3/       3" in done.stdout + done.stderr
    assert len(list(tmp_path.glob("*/run/step-00000003"))) == 1


@pytest.mark.docs
def test_plan_prints_the_memory_of_the_full_size(tmp_path: Path):
    script = TRAINING["llama/train_llama_70b.sh"]
    done = subprocess.run(
        ["bash", str(script)],
        cwd=tmp_path,
        env=example_environment(PLAN="1"),
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert done.returncode == 0, done.stderr
    assert f"fits: {head_memory_gb(script)} GB of 80.0 GB" in done.stdout
