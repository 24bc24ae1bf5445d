"""Optimizers defined outside of the package train the same in every layout, and everything asks them what it needs to know."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import petatron
from petatron.base.errors import ConfigError, TrainError
from petatron.cli.main import main
from petatron.config import RunConfig
from petatron.estimate.memory.memory_saving_options import option_groups
from petatron.estimate.state_bytes import local_element_counts, state_bytes
from petatron.mesh.comm_record import CommEvent
from petatron.models.optimizer_groups import optimizer_group
from petatron.sharding.optimizer_group_spec import GroupSpec
from petatron.validate import load_config
from petatron.verify.compare_traces import Tolerances
from petatron.verify.record_trace import StepTrace
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.outside import update_rules
from tests.parity.harness import check_traces, layout_run, reference, tiny_run, train_recorded
from tests.parity.state.resharding import STOP, Life, live, whole

BOUNDS = Tolerances(loss=1e-9, gradient=1e-9, parameter=1e-9)
FLAGS = {
    update_rules.SignMomentum.name: "--optimizer sign-momentum --optimizer-settings momentum=0.8 --num-query-groups 2",
    update_rules.TrustRatio.name: "--optimizer trust-ratio --num-query-groups 2",
}
ZERO1 = "--use-distributed-optimizer"
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params"


def train_rule(run: RunConfig) -> tuple[list[StepTrace], list[CommEvent]]:
    """On one rank, which imports this module and with it the optimizers."""
    return train_recorded(run)


def live_rule(run: RunConfig) -> Life:
    return live(run)


@diagonal(2)
@pytest.mark.parametrize("optimizer", FLAGS)
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [("--tp 4 --sequence-parallel", 4), later(f"--dp 2 {ZERO1}", 2), (f"--dp 2 {ZERO3}", 2), later("--pp 2", 2)],
)
def test_every_layout_trains_the_same_model(ranks: RankPool, optimizer: str, layout: str, world_size: int):
    run = layout_run(layout, FLAGS[optimizer], world_size=world_size, dtype="float64")
    check_traces(ranks, run, reference(FLAGS[optimizer], "float64"), BOUNDS, train_rank=train_rule)


def test_state_is_saved_and_loaded_in_another_layout(ranks: RankPool, tmp_path: Path):
    flags = f"{FLAGS['sign-momentum']} --train-iters 4 --log-interval 1 --eval-iters 0"

    def lives(layout: str, world_size: int, files: str) -> list[Life]:
        return ranks.run(
            live_rule, world_size, tiny_run(f"{flags} {layout} {files}", world_size=world_size, dtype="float64")
        )

    first = lives(f"--dp 2 {ZERO1}", 2, f"--save {tmp_path} --save-interval {STOP}")
    second = lives("--tp 2", 2, f"--load {tmp_path} --ckpt-step {STOP}")
    before, after = whole([life.at_stop for life in first]), whole([life.began for life in second])
    assert "momentum_buffer" in {kind for kind, _ in before}
    assert all(torch.equal(values, before[key]) for key, values in after.items())


def test_estimates_and_notices_ask_the_rule():
    train = ["--mock-data", "--lr", "1e-3", "--train-iters", "1", "--bf16"]
    run = petatron.load("tiny-llama", [*train, "--optimizer", "sign-momentum", "--adam-beta1", "0.8"])
    assert state_bytes(run.config).moments == 4 * local_element_counts(run.config).dense
    loaded = load_config(
        [*train, "--optimizer", "sign-momentum", "--adam-beta1", "0.8", "--muon-nesterov"], preset="tiny-llama"
    )
    for flag in ("--adam-beta1", "--muon-nesterov"):
        assert f"{flag} has no effect: the optimizer is sign-momentum" in loaded.notices
    flags = " ".join(option.flags for group in option_groups(run.config) for option in group.options)
    assert "--optimizer-cpu-offload" in flags and "--exp-avg-dtype" not in flags


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ("--optimizer nobody", "--optimizer nobody is not one of adam"),
        ("--optimizer sign-momentun", "Did you mean sign-momentum?"),
        ("--optimizer sign-momentum --optimizer-settings beta=1", "beta=1 is no setting of --optimizer sign-momentum"),
        ("--optimizer sign-momentum --optimizer-settings momentum=high", "is not a value of momentum, which is float"),
        ("--optimizer-settings momentum=0.5", "are settings of an imported optimizer, and --optimizer adam has flags"),
        ("--optimizer trust-ratio --optimizer-cpu-offload", "cannot be combined with --optimizer trust-ratio, whose"),
        ("--optimizer muon --muon-scalar-optimizer trust-ratio", "cannot leave other parameters to trust-ratio"),
    ],
)
def test_what_is_refused(flags: str, rule: str):
    with pytest.raises(ConfigError) as caught:
        petatron.load("tiny-llama", f"--mock-data --lr 1e-3 --train-iters 1 {flags}".split())
    assert rule in str(caught.value)


def test_muon_leaves_other_parameters_to_it():
    run = tiny_run("--optimizer muon --muon-scalar-optimizer sign-momentum", dtype="float64")
    mesh = petatron.launch(run)
    optimizer = petatron.build_optimizer(run, petatron.build_model(run, mesh))
    assert {kind for kind, _, _, _ in optimizer.moments()} == {"momentum_buffer"}


def test_a_name_is_registered_once():
    petatron.register_optimizer(update_rules.SignMomentum, update_rules.SignMomentumRule)
    with pytest.raises(ConfigError, match="is registered already"):

        class Other(update_rules.SignMomentum):
            pass

        petatron.register_optimizer(Other, update_rules.SignMomentumRule)


def test_mup_needs_a_rule_that_says_how_it_scales():
    flags = "--preset tiny-llama --mock-data --lr 1e-3 --train-iters 2 --use-mup --optimizer sign-momentum".split()
    with pytest.raises(ConfigError) as error:
        load_config(flags)
    assert str(error.value).endswith(
        "--use-mup cannot be used: the declaration does not say how --optimizer sign-momentum changes its learning rate with the width. "
        "Declare `width_scaling` in its UpdateRuleSpec, or use --optimizer adam."
    )


RULE_FILE = """
import petatron
from tests.outside.update_rules import SignMomentum, SignMomentumRule

class FromAFile(SignMomentum):
    name = "from-a-file"

petatron.register_optimizer(FromAFile, SignMomentumRule)
"""


def test_a_run_from_the_command_line_imports_its_optimizer_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "home").mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rule.py").write_text(RULE_FILE)
    flags = "tiny-llama --mock-data --num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-3"
    flags += " --eval-iters 0 --global-batch-size 2 --num-workers 0 --import rule.py --optimizer from-a-file"
    words = ["train", *flags.split(), "--optimizer-settings", "momentum=0.8"]
    assert main([*words, "--train-iters", "2", "--save", "run"]) == 0
    assert main([*words, "--train-iters", "3", "--load", "run", "--override-opt-param-scheduler"]) == 0


def test_a_group_by_hand_says_how_to_name_its_state():
    """One group of matrices and vectors cannot have the state of a rule that treats them differently."""
    run = tiny_run("--optimizer adafactor", dtype="float64")
    mesh = petatron.launch(run)
    model = petatron.build_model(run, mesh, group_rule=lambda name, param: GroupSpec(rule="adafactor"))
    with pytest.raises(TrainError, match="has other state for some of their shapes"):
        petatron.build_optimizer(run, model)
    by_shape = lambda name, param: replace(optimizer_group(run.optim, name, param), lr_scale=0.5)  # noqa: E731
    petatron.build_optimizer(run, petatron.build_model(run, mesh, group_rule=by_shape)).step()
