"""The preset of DeepSeek-V3 is the published model: its parameters, and what can be planned of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from petatron.cli.main import main
from petatron.config import RunConfig
from petatron.estimate.flops import parameter_count
from petatron.models.hf import folder_shapes, matching_family
from petatron.models.registry import model_spec
from petatron.validate import load_config

PUBLISHED_PARAMETERS = 671_026_419_200
"""Of the tensors in the published folder without its layer 61, expert biases included."""
LAYOUT = "--pp 16 --ep 64 --world-size 2048 --pipeline-model-parallel-layout Et*3|(tttt|)*14ttmL".split()
TRAINING = "--mock-data --lr 1e-3 --train-iters 10 --bf16 --use-distributed-optimizer --global-batch-size 15360".split()


def preset(*flags: str, world_size: int = 1, training: bool = False) -> RunConfig:
    return load_config(flags, preset="deepseek-v3", world_size=world_size, require_training=training).config


def test_parameters_are_those_that_were_published():
    run = preset()
    predicting = model_spec(run)
    main = model_spec(replace(run, model=replace(run.model, mtp_num_layers=None)))
    biases = 58 * 256
    assert parameter_count(main) + biases == PUBLISHED_PARAMETERS, "671B"
    assert round(parameter_count(main, active=True) / 1e9, 2) == 37.55, "37B for each token"
    experts, attention = (
        256 * 3 * 7168 * 2048,
        7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168,
    )
    rest = 3 * 7168 * 2048 + 256 * 7168 + 5 * 7168 + 1536 + 512 + 2 * 7168 * 7168
    assert parameter_count(predicting) - parameter_count(main) == experts + attention + rest


def test_its_folder_has_the_names_that_were_published():
    spec = model_spec(preset())
    family = matching_family(spec)
    assert family is not None and family.name == "deepseek_v3"
    shapes = folder_shapes(spec)
    assert shapes["layers.61.projection.weight"] == (7168, 14336)
    assert shapes["layers.60.mlp.router.expert_bias"] == (256,)


def test_it_passes_the_checks_in_its_layout():
    run = preset(*LAYOUT, *TRAINING, world_size=2048, training=True)
    assert (run.parallel.pipeline_model_parallel_size, run.parallel.expert_model_parallel_size) == (16, 64)


def test_its_memory_is_planned(capsys: pytest.CaptureFixture[str]):
    code = main(["plan", "memory", "deepseek-v3", *LAYOUT, *TRAINING])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line[:2].strip().isdigit()]
    assert code == 0 and [int(row[0]) for row in rows] == list(range(16))
    # bf16 weights: those of rank 1 are four layers, of whose experts it has a 64th.
    layer = (
        7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168 + 3 * 7168 * 2048 * 5 + 256 * 7168
    )
    assert abs(float(rows[1][1]) - 4 * 2 * layer / 1e9) < 0.02
