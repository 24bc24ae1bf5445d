"""Which layers stand on which pipeline stage: every way to cut, what it gives, and what it refuses."""

# ruff: noqa: E501  (a table of whole messages reads better unwrapped)

from __future__ import annotations

import shlex
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import ConfigError
from petatron.config import ModelConfig, ParallelConfig, RawModelConfig, RawParallelConfig, RawRunConfig, RunConfig
from petatron.config.derived_defaults import derive_defaults
from petatron.config.pipeline_stages import (
    PipelineLayoutError,
    PipelineStage,
    max_layers_per_stage,
    parse_pipeline_layout,
    pipeline_stages,
    stage_problems,
)
from petatron.validate import load_config, resolve_config
from petatron.validate.layout import check_pipeline

BASE = shlex.split("--preset tiny-llama --mock-data --lr 1e-3 --train-iters 100")


def loaded_stages(flags: str) -> tuple[PipelineStage, ...]:
    return pipeline_stages(load_config([*BASE, *shlex.split(flags)]).config)


# Flags, and the number of layers on each stage in model order.
CUTS = [
    ("--num-layers 4", [4]),
    ("--num-layers 4 --pp 2", [2, 2]),
    ("--num-layers 4 --pp 2 --mtp-num-layers 2", [2, 4]),
    ("--num-layers 4 --pp 2 --mtp-num-layers 2 --pipeline-model-parallel-layout Etttt|mmL", [4, 2]),
    ("--num-layers 4 --pp 2 --mtp-num-layers 1 --pipeline-model-parallel-layout Ettt|tL", [3, 2]),
    ("--num-layers 8 --pp 2 --num-layers-per-virtual-pipeline-stage 2", [2, 2, 2, 2]),
    ("--num-layers 12 --pp 2 --num-virtual-stages-per-pipeline-rank 3", [2] * 6),
    ("--num-layers 8 --pp 4 --pipeline-schedule zb-v", [1] * 8),
    ("--num-layers 8 --pp 3 --decoder-first-pipeline-num-layers 2", [2, 3, 3]),
    ("--num-layers 8 --pp 3 --decoder-last-pipeline-num-layers 2", [3, 3, 2]),
    ("--num-layers 9 --pp 4 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 1", [2, 3, 3, 1]),
    ("--num-layers 5 --pp 2 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 3", [2, 3]),
    ("--num-layers 16 --pp 3 --decoder-last-pipeline-num-layers 4 --num-virtual-stages-per-pipeline-rank 2", [3, 3, 2, 3, 3, 2]),
    ("--num-layers 7 --pp 2 --account-for-embedding-in-pipeline-split", [3, 4]),
    ("--num-layers 7 --pp 2 --account-for-loss-in-pipeline-split", [4, 3]),
    ("--num-layers 6 --pp 4 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", [1, 2, 2, 1]),
    ("--num-layers 2 --pp 4 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", [0, 1, 1, 0]),
    ("--num-layers 6 --pp 2 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --num-layers-per-virtual-pipeline-stage 2", [1, 2, 2, 1]),
    ("--num-layers 5 --account-for-embedding-in-pipeline-split", [5]),
    ("--num-layers 8 --pp 4 --pipeline-model-parallel-layout 'Et|(ttt|)*2,tL'", [1, 3, 3, 1]),
    ("--num-layers 6 --pp 2 --pipeline-model-parallel-layout 'E|t*3|ttt|L'", [0, 3, 3, 0]),
    ("--num-layers 4 --pp 2 --pipeline-schedule zb-v --pipeline-model-parallel-layout 'Et|tt||tL'", [1, 2, 0, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "counts"), CUTS, ids=[row[0] for row in CUTS])
def test_cut(flags: str, counts: list[int]):
    cut = loaded_stages(flags)
    assert [len(stage.layer_indices) for stage in cut] == counts
    assert [layer for stage in cut for layer in stage.layer_indices] == list(range(sum(counts)))
    assert [stage.has_embedding for stage in cut] == [index == 0 for index in range(len(cut))]
    assert [stage.has_loss for stage in cut] == [index == len(cut) - 1 for index in range(len(cut))]
    assert max_layers_per_stage(load_config([*BASE, *shlex.split(flags)]).config) == max(counts)


LAYOUT = "--pp 2 --pipeline-model-parallel-layout"
# Flags beside the valid base of four layers, and the one message that must come out.
REFUSED = [
    ("--pp 3", "--pipeline-model-parallel-size 3 does not divide --num-layers 4. Use 1, 2 or 4, or cut unevenly, for instance with --decoder-last-pipeline-num-layers."),
    ("--pp 4 --account-for-loss-in-pipeline-split", "--pipeline-model-parallel-size 4 does not divide --num-layers 4 + loss = 5. Use 1 or 5, or cut unevenly, for instance with --decoder-last-pipeline-num-layers."),
    ("--pp 2 --num-layers-per-virtual-pipeline-stage 3", "--num-layers-per-virtual-pipeline-stage 3 does not divide the 2 layers of a pipeline rank. Use 1 or 2."),
    ("--pp 2 --num-virtual-stages-per-pipeline-rank 3", "--num-virtual-stages-per-pipeline-rank 3 does not divide the 2 layers of a pipeline rank. Use 1 or 2."),
    ("--pp 2 --num-layers 8 --num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 2", "--num-layers-per-virtual-pipeline-stage 1 makes 4 virtual stages per rank, but --num-virtual-stages-per-pipeline-rank is 2. Leave one of them out."),
    ("--num-layers-per-virtual-pipeline-stage 2", "--num-layers-per-virtual-pipeline-stage 2 needs --pipeline-model-parallel-size above 1. Leave it out."),
    ("--num-layers-per-virtual-pipeline-stage 4", "--num-layers-per-virtual-pipeline-stage 4 needs --pipeline-model-parallel-size above 1. Leave it out."),
    ("--num-virtual-stages-per-pipeline-rank 2", "--num-virtual-stages-per-pipeline-rank 2 needs --pipeline-model-parallel-size above 1. Leave it out."),
    ("--pipeline-schedule interleaved", "--pipeline-schedule interleaved needs --pipeline-model-parallel-size above 1. Leave it out."),
    ("--pipeline-schedule zb-v", "--pipeline-schedule zb-v needs --pipeline-model-parallel-size above 1. Leave it out."),
    ("--pipeline-model-parallel-layout Ett|ttL", "--pipeline-model-parallel-layout Ett|ttL needs --pipeline-model-parallel-size above 1. Leave it out."),
    ("--pp 2 --pipeline-schedule zb-v --num-virtual-stages-per-pipeline-rank 1", "--pipeline-schedule zb-v has exactly 2 stages per rank, but 1 was asked for. Leave out --num-virtual-stages-per-pipeline-rank, or use another schedule."),
    ("--pp 2 --num-layers 8 --pipeline-schedule zb-v --num-layers-per-virtual-pipeline-stage 1", "--pipeline-schedule zb-v has exactly 2 stages per rank, but 4 were asked for. Leave out --num-layers-per-virtual-pipeline-stage, or use another schedule."),
    ("--pp 2 --pipeline-schedule interleaved", "--pipeline-schedule interleaved needs more than one virtual stage per rank. Give --num-virtual-stages-per-pipeline-rank 2, say, or use 1f1b."),
    ("--pp 2 --pipeline-schedule zb-h1 --num-virtual-stages-per-pipeline-rank 2", "--pipeline-schedule zb-h1 has one stage per rank, but there are 2 virtual stages. Use interleaved, or leave it out."),
    ("--pp 2 --pipeline-schedule zb-v --num-layers 6", "--pipeline-schedule zb-v needs two stages per rank, which a pipeline rank's 3 layers cannot fill alike. Use --pipeline-model-parallel-size 3, --num-layers 8, --pipeline-model-parallel-layout, or another schedule."),
    ("--pp 2 --pipeline-schedule zb-v --num-layers 2", "--pipeline-schedule zb-v needs two stages per rank, which a pipeline rank's 1 layer cannot fill alike. Use --num-layers 4, --pipeline-model-parallel-layout, or another schedule."),
    ("--pp 3 --pipeline-schedule zb-v", "--pipeline-model-parallel-size 3 does not divide --num-layers 4. Use 2, or cut unevenly, for instance with --pipeline-model-parallel-layout."),
    ("--pp 3 --pipeline-schedule zb-v --num-layers 5", "--pipeline-model-parallel-size 3 does not divide --num-layers 5. Use another number of layers, or cut unevenly, for instance with --pipeline-model-parallel-layout."),
    ("--pp 2 --num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 1", "--microbatch-group-size-per-virtual-pipeline-stage 1 is below --pipeline-model-parallel-size 2, so a rank would wait for its own output. Use 2 or more."),
    ("--pp 2 --num-virtual-stages-per-pipeline-rank 0", "--num-virtual-stages-per-pipeline-rank 0 is below 1. Use 1 or more."),
    ("--pp 2 --num-layers-per-virtual-pipeline-stage -1", "--num-layers-per-virtual-pipeline-stage -1 is below 1. Use 1 or more."),
    ("--pp 2 --decoder-first-pipeline-num-layers 0", "--decoder-first-pipeline-num-layers 0 is below 1. Use 1 or more."),
    ("--decoder-last-pipeline-num-layers 2", "--decoder-last-pipeline-num-layers 2 needs --pipeline-model-parallel-size above 1. Leave it out."),
    ("--num-layers 10 --pp 3 --decoder-first-pipeline-num-layers 3", "--decoder-first-pipeline-num-layers 3 leaves 7 of --num-layers 10, which 2 other pipeline ranks cannot share evenly. Use 2, 4, 6 or 8."),
    ("--num-layers 10 --pp 3 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 7", "--decoder-last-pipeline-num-layers 7 beside --decoder-first-pipeline-num-layers 3 leaves 0 of --num-layers 10, which 1 other pipeline rank cannot share evenly. Use 1, 2, 3, 4, 5 or 6."),
    ("--pp 2 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2", "--decoder-last-pipeline-num-layers 2 beside --decoder-first-pipeline-num-layers 3 is more than --num-layers 4. Use 1."),
    ("--pp 4 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2", "--decoder-last-pipeline-num-layers 2 beside --decoder-first-pipeline-num-layers 2 leaves 0 of --num-layers 4, which 2 other pipeline ranks cannot share evenly. Change --num-layers or the pipeline size."),
    ("--num-layers 8 --pp 2 --num-virtual-stages-per-pipeline-rank 2 --decoder-first-pipeline-num-layers 3", "--decoder-first-pipeline-num-layers 3 is not a multiple of the 2 virtual stages of a rank. Nearest: 2 or 4."),
    ("--num-layers 9 --pp 2 --num-virtual-stages-per-pipeline-rank 2 --decoder-first-pipeline-num-layers 4", "--decoder-first-pipeline-num-layers 4 leaves 5 of --num-layers 9, which 1 other pipeline rank x 2 virtual stages cannot share evenly. Change --num-layers or the pipeline size."),
    ("--pp 2 --pipeline-schedule zb-v --decoder-last-pipeline-num-layers 2", "--decoder-last-pipeline-num-layers sizes the first or last rank, but in zb-v the first rank holds both ends of the model. Use --pipeline-model-parallel-layout."),
    ("--pp 2 --account-for-loss-in-pipeline-split --decoder-first-pipeline-num-layers 1", "--account-for-loss-in-pipeline-split cannot be combined with --decoder-first-pipeline-num-layers. Keep one way to cut the layers."),
    ("--pp 2 --num-layers-per-virtual-pipeline-stage 1 --decoder-first-pipeline-num-layers 2", "--num-layers-per-virtual-pipeline-stage cannot be combined with --decoder-first-pipeline-num-layers. Keep one way to cut the layers."),
    (f"{LAYOUT} Ett|ttL --decoder-first-pipeline-num-layers 1", "--decoder-first-pipeline-num-layers cannot be combined with --pipeline-model-parallel-layout. Keep one way to cut the layers."),
    (f"{LAYOUT} Ett|tL", "--pipeline-model-parallel-layout Ett|tL has 3 layers (t), but --num-layers is 4. Write one t per layer."),
    (f"{LAYOUT} Et|tt|tL", "--pipeline-model-parallel-layout Et|tt|tL has 3 stages, which is not a multiple of --pipeline-model-parallel-size 2. Use 2 or 4 stages; | ends a stage."),
    (f"{LAYOUT} E|tt|tt|L --num-virtual-stages-per-pipeline-rank 3", "--pipeline-model-parallel-layout E|tt|tt|L has 4 stages, but pp 2 x virtual 3 is 6. Write 6 stages, or leave out the number of virtual stages."),
    (f"{LAYOUT} tt|ttL", "--pipeline-model-parallel-layout tt|ttL does not start with the one E of the embedding. Write E once, at the start."),
    (f"{LAYOUT} |Ett|ttL|", "--pipeline-model-parallel-layout |Ett|ttL| does not start with the one E of the embedding. Write E once, at the start. / --pipeline-model-parallel-layout |Ett|ttL| does not end with the one L of the loss. Write L once, at the end."),
    (f"{LAYOUT} Ett|ttLL", "--pipeline-model-parallel-layout Ett|ttLL does not end with the one L of the loss. Write L once, at the end."),
    (f"{LAYOUT} Ett|txL", "--pipeline-model-parallel-layout Ett|txL has 'x', which is none of E, t, m, L, |, brackets and * N. Write it like `Et|(tt|)*2tL`."),
    (f"{LAYOUT} Ett|ttmL", "--pipeline-model-parallel-layout Ett|ttmL has 1 depths of multi-token prediction (m), but --mtp-num-layers is 0. Write one m per depth, or none: they are where the loss is."),
    (f"{LAYOUT} Ettm|ttL --mtp-num-layers 1", "--pipeline-model-parallel-layout Ettm|ttL has m elsewhere than right before the L, and multi-token prediction is where the loss is. Write every m right before the L."),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "message"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refused(flags: str, message: str):
    assert " / ".join(str(problem) for problem in resolve_config([*BASE, *flags.split()])[1]) == message


def test_a_config_that_cannot_be_cut_has_no_stages():
    config = RunConfig(model=ModelConfig(num_layers=4), parallel=ParallelConfig(pipeline_model_parallel_size=3))
    assert max_layers_per_stage(config) is None
    with pytest.raises(ConfigError, match="does not divide --num-layers 4"):
        pipeline_stages(config)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Et|(tt|)*2,L", ("Et", "tt", "tt", "L")),
        ("E t*3 | (tt|)*2, t | L", ("Ettt", "tt", "tt", "t", "L")),
        ("E(t(t|)*2)*2L", ("Ett", "t", "tt", "t", "L")),
        ("(E)(ttL)", ("EttL",)),
        ("", ("",)),
    ],
)
def test_layout_string(text: str, expected: tuple[str, ...]):
    assert parse_pipeline_layout(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("E(tt", "opens a bracket"),
        ("Ett)", "closes a bracket"),
        ("Et*", "has a [*] without a number from 1"),
        ("Et*0L", "has a [*] without a number from 1"),
        ("Et*99999999999L", "has a [*] without a number from 1"),
        ("E(t*1000)*1000L", "has more than 100000 symbols"),
        ("*3", "has '[*]', which is none of"),
    ],
)
def test_layout_string_that_cannot_be_read(text: str, reason: str):
    with pytest.raises(PipelineLayoutError, match=reason):
        parse_pipeline_layout(text)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_any_list_of_counts_can_be_spelled_out(counts: list[int]):
    text = "E" + "|".join(f"t*{count}" if count else "" for count in counts) + "L"
    assert [stage.count("t") for stage in parse_pipeline_layout(text)] == counts


def _checked(layers: int, **parallel: object) -> RunConfig:
    """A derived config that the rules of the pipeline accept."""
    raw = RawRunConfig(model=RawModelConfig(num_layers=layers), parallel=RawParallelConfig(**parallel))  # type: ignore[arg-type]
    config, _ = derive_defaults(raw)
    assert [str(problem) for problem in check_pipeline(config)] == []
    return RunConfig(model=ModelConfig(num_layers=layers), parallel=ParallelConfig(**asdict(config.parallel)))


@settings(max_examples=60, deadline=None)
@given(
    pp=st.integers(2, 6),
    virtual=st.integers(1, 4),
    share=st.integers(1, 4),
    ends=st.tuples(st.none() | st.integers(1, 4), st.none() | st.integers(1, 4)),
)
def test_given_ends_are_kept_and_the_rest_is_even(
    pp: int, virtual: int, share: int, ends: tuple[int | None, int | None]
):
    first, last = (share if size is None else size for size in ends)
    counts = [first, *[share] * (pp - 2), last] * virtual
    config = _checked(
        sum(counts),
        pipeline_model_parallel_size=pp,
        num_virtual_stages_per_pipeline_rank=virtual,
        decoder_first_pipeline_num_layers=None if ends[0] is None else first * virtual,
        decoder_last_pipeline_num_layers=None if ends[1] is None else last * virtual,
    )
    assert [len(stage.layer_indices) for stage in pipeline_stages(config)] == counts
    assert [layer for stage in pipeline_stages(config) for layer in stage.layer_indices] == list(range(sum(counts)))


@settings(max_examples=60, deadline=None)
@given(
    pp=st.integers(2, 6),
    virtual=st.integers(1, 4),
    share=st.integers(1, 4),
    account=st.tuples(st.booleans(), st.booleans()),
    by_layers=st.booleans(),
)
def test_an_even_cut_counts_what_it_is_told_to(
    pp: int, virtual: int, share: int, account: tuple[bool, bool], by_layers: bool
):
    counts = [share] * (pp * virtual)
    counts[0] -= account[0]
    counts[-1] -= account[1]
    layers = sum(counts)
    if layers == 0:
        return
    config = _checked(
        layers,
        pipeline_model_parallel_size=pp,
        num_layers_per_virtual_pipeline_stage=share if by_layers else None,
        num_virtual_stages_per_pipeline_rank=None if by_layers else virtual,
        account_for_embedding_in_pipeline_split=account[0],
        account_for_loss_in_pipeline_split=account[1],
    )
    assert config.parallel.num_virtual_stages_per_pipeline_rank == virtual
    assert [len(stage.layer_indices) for stage in pipeline_stages(config)] == counts


@settings(max_examples=80, deadline=None)
@given(layers=st.integers(1, 30), pp=st.integers(1, 6), virtual=st.integers(1, 4))
def test_an_even_cut_is_refused_exactly_when_it_does_not_divide(layers: int, pp: int, virtual: int):
    parallel = ParallelConfig(pipeline_model_parallel_size=pp, num_virtual_stages_per_pipeline_rank=virtual)
    config = RunConfig(model=ModelConfig(num_layers=layers), parallel=parallel)
    assert (list(stage_problems(config)) == []) == (layers % (pp * virtual) == 0)
