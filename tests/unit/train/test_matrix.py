"""The proof matrix: what it holds, how cases are made of it, and what is believed when ranks fail."""

from __future__ import annotations

import dataclasses
import json
import math
import socket
from collections import Counter
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from petatron.base.errors import ConfigError
from petatron.config import RunConfig
from petatron.mesh.launch.environment import SINGLE_PROCESS
from petatron.validate import load_config
from petatron.verify.proof_matrix import MATRIX, MODEL_FLAGS, MatrixEntry, parse_entry, select_entries
from petatron.verify.random_model_shapes import random_model_flags
from petatron.verify.run_proof_matrix import (
    CaseResult,
    MatrixCase,
    make_case,
    read_cases,
    read_result,
    record_failure,
    run_cases,
    write_cases,
)
from petatron.verify.verify_layouts import plan_verification
from tests.longform import diagonal

AXES = ("tp+sp", "pp", "vpp", "cp", "ep", "dp+zero1", "fsdp")


@cache
def _config(found: MatrixEntry) -> RunConfig:
    words = f"{found.model_flags} --hidden-dropout 0 --attention-dropout 0 --train-iters 1 {found.flags}"
    return load_config(words.split(), world_size=found.world_size).config


def _sizes(config: RunConfig) -> Counter[str]:
    """Each of `AXES` that a layout uses, with its size; tp alone and dp alone by names of their own."""
    parallel = config.parallel
    strategy = parallel.data_parallel_sharding_strategy
    pipeline = "vpp" if (parallel.num_virtual_stages_per_pipeline_rank or 1) > 1 else "pp"
    data = {"optim": "dp+zero1", "optim_grads_params": "fsdp", "optim_grads": "zero2"}.get(str(strategy), "dp")
    sizes = {
        "tp+sp" if parallel.sequence_parallel else "tp": parallel.tensor_model_parallel_size,
        pipeline: parallel.pipeline_model_parallel_size,
        "cp": parallel.context_parallel_size,
        "ep": parallel.expert_model_parallel_size,
        data: parallel.data_parallel_size,
    }
    if config.moe.num_experts is not None:
        sizes["etp"] = parallel.expert_tensor_parallel_size
    return Counter({name: size for name, size in sizes.items() if size > 1})


@cache
def _all_sizes() -> dict[str, Counter[str]]:
    return {found.name: _sizes(_config(found)) for found in MATRIX}


def test_entries_are_layouts_of_their_size():
    assert len(_all_sizes()) == len(MATRIX), "names are unique"
    for found in MATRIX:
        assert found.world_size == _config(found).parallel.world_size <= 8, found.name
    assert {found.model for found in MATRIX} == set(MODEL_FLAGS)


@pytest.mark.parametrize("size", [2, 4])
def test_every_axis_alone(size: int):
    """Experts need ranks of another axis to live on, so theirs are layouts of plain data parallel beside them."""
    alone = {name for sizes in _all_sizes().values() for name, n in sizes.items() if len(sizes) == 1 and n == size}
    assert alone >= {"tp", "tp+sp", "pp", "vpp", "cp", "dp", "dp+zero1", "zero2", "fsdp"}
    for axis in ("ep", "etp"):
        assert Counter({"dp": size, axis: size}) in _all_sizes().values()
    forms = {(_config(found).parallel.pipeline_schedule, _sizes(_config(found))["pp"]) for found in MATRIX}
    assert {("1f1b", size), ("gpipe", size), ("zb-h1", size)} <= forms
    kinds = {
        _config(found).parallel.cp_comm_type for found in MATRIX if _all_sizes()[found.name] == Counter({"cp": size})
    }
    assert kinds >= {"p2p", "all_gather", "a2a"}


def test_every_pair_of_axes():
    for pair in combinations(AXES, 2):
        if set(pair) in ({"pp", "vpp"}, {"dp+zero1", "fsdp"}):  # one within the other; two answers to one question
            continue
        spare = {"ep": ("dp", "etp")}  # what experts are folded over, and how tp splits them
        free = {name for axis in pair for name in spare.get(axis, ())}
        assert any(set(pair) <= set(sizes) <= set(pair) | free for sizes in _all_sizes().values()), (
            f"no entry for {pair}"
        )


def test_products_of_three_and_four_on_eight_ranks():
    large = [_all_sizes()[found.name] for found in MATRIX if found.world_size == 8]
    assert sum(len(set(sizes) - {"etp"}) == 3 for sizes in large) >= 8
    assert sum(len(set(sizes) - {"etp"}) >= 4 for sizes in large) >= 2
    for wanted in (
        {"tp+sp": 2, "pp": 2, "dp+zero1": 2},
        {"tp+sp": 2, "cp": 2, "dp": 2},
        {"pp": 2, "ep": 2, "dp": 4},
        {"tp+sp": 2, "pp": 2, "cp": 2},
        {"tp+sp": 2, "dp": 4, "ep": 4, "etp": 2},
        {"tp+sp": 2, "vpp": 2, "dp": 2, "ep": 2, "etp": 2},
    ):
        assert Counter(wanted) in large, f"{wanted} is missing"


def test_every_way_to_share_and_exchange_is_used():
    configs = [_config(found) for found in MATRIX]
    assert {c.parallel.cp_comm_type for c in configs} == {"p2p", "all_gather", "a2a", "a2a+p2p"}
    assert {c.parallel.pipeline_schedule for c in configs} == {"1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"}
    dispatchers = {c.moe.moe_token_dispatcher_type for c in configs if c.parallel.expert_model_parallel_size > 1}
    assert dispatchers == {"alltoall", "allgather"}
    overlapped = [c for c in configs if c.parallel.tp_comm_overlap]
    assert {c.parallel.tensor_model_parallel_size for c in overlapped} == {2, 4}
    assert {c.memory.recompute_granularity for c in overlapped} == {None, "full", "selective"}
    hybrid = {c.parallel.data_parallel_sharding_strategy for c in configs if _copies(c) == 2}
    assert hybrid == {"optim", "optim_grads", "optim_grads_params"}


def _copies(config: RunConfig) -> int:
    return config.parallel.num_distributed_optimizer_instances


def test_select():
    assert select_entries() == MATRIX
    assert {found.model for found in select_entries(pattern="moe:*")} == {"moe"}
    assert [found.name for found in select_entries(pattern="tp4-sp")] == [
        *(
            "dense:tp4-sp",
            "gpt:tp4-sp",
            "dense:tp4-sp-overlap",
            "gpt:tp4-sp-overlap",
            "lora:tp4-sp",
            "mamba:tp4-sp",
            "delta:tp4-sp",
            "lightning:tp4-sp",
            "bert:tp4-sp",
            "recommender:tp4-sp",
            "hstu:tp4-sp",
            "t5:tp4-sp",
            "vlm:tp4-sp",
            "classifier:tp4-sp",
        ),
        *("dense:tp4-sp-overlap.recompute-selective", "moe:tp4-sp-overlap.ep2.etp1.recompute-experts"),
    ]
    some = select_entries(sample=5, seed=3)
    assert some == select_entries(sample=5, seed=3) != select_entries(sample=5, seed=4) and len(some) == 5
    assert list(some) == sorted(some, key=MATRIX.index)
    assert select_entries(pattern="dense:tp2-sp", sample=9) == (parse_entry("dense:tp2-sp"),), (
        "a whole name means itself"
    )
    assert {found.world_size for found in select_entries(max_ranks=4, sample=60)} == {2, 4}
    with pytest.raises(ConfigError, match="--only tp9 fits no layout"):
        select_entries(pattern="tp9")
    with pytest.raises(ConfigError, match=r"--nproc 3 is too few for dense:tp4\. Use 4 or more"):
        select_entries(pattern="dense:tp4", max_ranks=3)


def test_one_model_has_one_reference_which_verify_uses_too():
    cases = [
        make_case(found, model_flags=found.model_flags, steps=2, dtype="float64")
        for found in select_entries(pattern="dense:*2*", sample=6, seed=1)
    ]
    assert len({case.reference_name for case in cases}) == 1
    for case in cases:
        by_itself = plan_verification(f"{case.model_flags} {case.layout_flags}".split(), steps=2, dtype="float64")
        ours, theirs = load_config(case.reference_argv).config, by_itself.reference.config
        for section in ("model", "moe", "optim", "schedule", "train", "data", "precision"):
            assert getattr(ours, section) == getattr(theirs, section)
        assert theirs.parallel.world_size == ours.parallel.world_size == 1
        assert list(case.argv) == by_itself.candidate_argv


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="does not divide"):
        make_case(
            parse_entry("dense:tp4"),
            model_flags=f"{MODEL_FLAGS['dense']} --num-query-groups 3",
            steps=1,
            dtype="float64",
        )
    with pytest.raises(ConfigError, match="names no tensor"):
        found = parse_entry("dense:tp2")
        make_case(found, model_flags=found.model_flags, steps=1, dtype="float64", inject="layers.0.nothing")


@diagonal(2)
@pytest.mark.parametrize(
    "name",
    ["dense:tp4-sp", "deep:pp4-vpp2", "moe:tp2-sp.pp2.cp2.ep4.etp1", "dense:cp4-a2a", "muon:tp2-sp.dp2-zero1.ep2"],
)
def test_random_models_fit_and_differ(name: str):
    found = parse_entry(name)
    models = [random_model_flags(found, seed=seed) for seed in range(3)]
    assert models[0] == random_model_flags(found, seed=0)
    assert len(set(models)) == len(models)
    for flags in models:
        config = load_config(make_case(found, model_flags=flags, steps=1, dtype="float64").argv).config
        assert config.parallel.world_size == found.world_size
        assert (config.moe.num_experts is not None) == found.has_experts == (found.model in ("moe", "muon"))
        assert config.optim.optimizer == ("muon" if found.model == "muon" else "adam")


ALONE = parse_entry("dense:recompute-full")


def _run(folder: Path) -> list[tuple[str, CaseResult]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told: list[tuple[str, CaseResult]] = []
    run_cases(
        folder,
        dataclasses.replace(SINGLE_PROCESS, master_port=port),
        lambda case, outcome: told.append((case.name, outcome)),
    )
    return told


def _case(**changes) -> MatrixCase:
    small = f"{ALONE.model_flags} --num-layers 1 --vocab-size 19 --global-batch-size 2"
    return dataclasses.replace(make_case(ALONE, model_flags=small, steps=2, dtype="float64"), **changes)


def test_run_compares_and_cleans_up(tmp_path: Path):
    write_cases([_case(), _case(name="dense:tp2", inject="layers.0.mlp.up.weight@2")], tmp_path)
    (same, first), (spoiled, second) = _run(tmp_path)
    assert (same, spoiled) == ("dense:recompute-full", "dense:tp2")
    assert first.agrees and first.gradient is not None and first.gradient <= 1e-9
    assert second.departure is not None and "step 2: gradient layers.0.mlp.up.weight" in second.departure
    assert second.gradient is not None and second.gradient > 1e-3
    assert [read_result(tmp_path, number) for number in (0, 1)] == [first, second]
    assert not list(tmp_path.glob("case-*")) and len(list(tmp_path.glob("reference-*"))) == 1
    assert _run(tmp_path) == [], "what has an outcome is not run again"


def test_a_failing_case_leaves_its_error_and_is_not_tried_again(tmp_path: Path):
    broken = _case(argv=(*_case().argv, "--num-attention-heads", "0"))
    write_cases([broken, _case()], tmp_path)
    with pytest.raises(ConfigError):
        _run(tmp_path)
    outcome = read_result(tmp_path, 0)
    assert outcome is not None and not outcome.agrees and "rank 0: 1 problem" in (outcome.error or "")
    assert read_result(tmp_path, 1) is None
    assert [outcome.agrees for _, outcome in _run(tmp_path)] == [True]


def test_the_first_cause_is_believed(tmp_path: Path):
    for rank, (echo, time) in enumerate([(True, 1.0), (False, 3.0), (False, 2.0)]):
        facts = {"name": "x", "rank": rank, "text": f"text {rank}", "echo": echo, "time": time, "seconds": 1.5}
        (tmp_path / f"error-00004-{rank:05d}.json").write_text(json.dumps(facts))
    outcome = read_result(tmp_path, 4)
    assert outcome == CaseResult("x", error="rank 2: text 2", seconds=1.5)
    assert record_failure(tmp_path, 5, "y", "killed") == read_result(tmp_path, 5) == CaseResult("y", error="killed")


def test_cases_and_infinite_differences_survive_the_file(tmp_path: Path):
    case = _case(inject="head.weight@1")
    write_cases([case], tmp_path)
    assert read_cases(tmp_path) == [case] and case.command.endswith("--inject head.weight@1")
    (tmp_path / "outcome-00000.json").write_text(json.dumps(dataclasses.asdict(CaseResult("x", loss=math.inf))))
    assert read_result(tmp_path, 0) == CaseResult("x", loss=math.inf)
