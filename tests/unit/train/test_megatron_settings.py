"""Settings of Megatron's that change what a run does: its schedule, the numbering of ranks, weight decay, checkpoints that stay."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from petatron.base.errors import CheckpointError, ConfigError
from petatron.mesh.rank_layout import Layout
from petatron.train.build_run import build_loaders
from petatron.train.evaluate_loss import EvaluatedLosses, evaluate
from petatron.train.global_batch_size import BatchSizeSchedule
from petatron.validate import resolve_config
from tests.dist import RankPool
from tests.parity.harness import tiny_run
from tests.unit.train.test_loop import SMALL, finish, start

RESUMED = "--train-iters 8 --lr 9e-3 --lr-decay-style cosine --weight-decay 0.3"


def test_the_schedule_of_the_checkpoint_is_followed(tmp_path: Path):
    _, _, writer = finish("--train-iters 8")
    first, loop, _ = start(tiny_run(f"{SMALL} --train-iters 8 --exit-interval 4 --save {tmp_path}"))
    loop.run()
    run = tiny_run(f"{SMALL} {RESUMED} --load {tmp_path} --use-checkpoint-opt_param-scheduler --save {tmp_path}")
    state, loop, resumed = start(run)
    assert state.load(str(tmp_path)) and state.progress.iteration == 4
    assert state.lr_schedule == first.lr_schedule and state.weight_decay_schedule.end == 0.1
    assert not any("lr " in change for change in state.resume_changes)
    loop.run()
    assert resumed.column("lr") == writer.column("lr")[4:]
    again, _, _ = start(tiny_run(f"{SMALL} --train-iters 8 --load {tmp_path}"))
    assert again.load(str(tmp_path)), "the checkpoint records the schedule that was followed"


def test_another_schedule_is_refused_without_a_flag(tmp_path: Path):
    finish(f"--train-iters 3 --save {tmp_path}")
    state, _, _ = start(tiny_run(f"{SMALL} {RESUMED} --load {tmp_path}"))
    with pytest.raises(CheckpointError, match="--use-checkpoint-opt-param-scheduler to go on with the checkpoint's"):
        state.load(str(tmp_path))


def test_weight_decay_of_qk_norms():
    def trained(flags: str) -> dict[str, torch.Tensor]:
        state, _, _ = finish(f"--qk-layernorm --train-iters 1 --lr-warmup-iters 0 --weight-decay 0.5 {flags}")
        return {name: weight.detach().clone() for name, weight in state.model.module.named_parameters()}

    plain, decayed = trained(""), trained("--apply-wd-to-qk-layernorm")
    changed = {name for name, weight in decayed.items() if not torch.equal(weight, plain[name])}
    assert changed == {"layers.0.attention.q_norm.weight", "layers.0.attention.k_norm.weight"}
    assert all((decayed[name] < plain[name]).all() for name in changed)


def test_stages_come_before_replicas_with_tp_pp_dp_mapping():
    plain = Layout.from_config(tiny_run("--pp 2 --dp 2 --tp 2", world_size=8).parallel)
    mapped = Layout.from_config(tiny_run("--pp 2 --dp 2 --tp 2 --use-tp-pp-dp-mapping", world_size=8).parallel)
    assert plain.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mapped.groups("pp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mapped.groups("dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mapped.groups("world") == [tuple(range(8))]
    assert all(mapped.group_of(axis, 5) in mapped.groups(axis) for axis in ("pp", "dp", "tp", "losses", "edp", "stage"))


def _losses(flags: str) -> list[float]:
    run = tiny_run(flags, world_size=4)
    _, loop, writer = start(run)
    loop.run()
    return writer.column("lm_loss")


def test_the_numbering_of_ranks_changes_no_loss(ranks: RankPool):
    layout = "--num-layers 2 --seq-length 8 --vocab-size 37 --log-interval 1 --train-iters 3 --pp 2 --dp 2"
    plain, mapped = (ranks.run(_losses, 4, f"{layout} {flag}") for flag in ("", "--use-tp-pp-dp-mapping"))
    assert mapped == plain and len(plain[0]) == 3


def test_retained_checkpoints_are_multiples_and_the_newest(tmp_path: Path):
    finish(f"--train-iters 7 --save-interval 1 --save-retain-interval 3 --save {tmp_path}")
    assert sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("step-*")) == [3, 6, 7]


def test_batch_sizes_by_tokens():
    _, _, writer = finish(
        "--train-iters 5 --lr-warmup-iters 0 --step-batch-size-schedule 0:2,64:4,0.16K:8 --global-batch-size none"
    )
    assert writer.column("global_batch_size") == [2, 2, 2, 2, 4], "4 from sample 64 / 8 = 8 on"
    schedule = BatchSizeSchedule(final=8, start=8, steps=((0, 2), (8, 4), (20, 8)))
    assert [schedule.at(consumed) for consumed in (0, 7, 8, 19, 20, 99)] == [2, 2, 4, 4, 8, 8]
    assert schedule.samples_after(4 + 3 + 2) == 8 + 12 + 16 and schedule.iterations_for(36) == 9
    assert schedule.iterations_for(20) == 7 and schedule.iterations_for(27) == 7


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--step-batch-size-schedule 1K:8", "has no size for the beginning, 0:SIZE"),
        ("--step-batch-size-schedule 0:8;", "has 0:8;, which is not TOKENS:SIZE"),
        ("--step-batch-size-schedule 0:8,1K:16", "ends with 16, but --global-batch-size is 8"),
        ("--micro-batch-size 4 --step-batch-size-schedule 0:6,1K:8", "has 6, not a multiple of micro-batch 4"),
        ("--eval-global-batch-size 7 --micro-batch-size 2", "batches of 7 samples that are not multiples of"),
    ],
)
def test_batch_sizes_that_cannot_be(flags: str, told: str):
    with pytest.raises(ConfigError, match=re.escape(told)):
        tiny_run(flags)


def test_evaluation_has_batch_sizes_of_its_own():
    flags = f"{SMALL} --eval-iters 2 --eval-global-batch-size 6 --eval-micro-batch-size 3"
    state, loop, _ = start(tiny_run(flags))
    loaders = build_loaders(state.run, state.mesh)
    [loader] = loaders.valid.values()
    assert loader.options.micro_batch_size == 3 and loaders.train.options.micro_batch_size != 3
    result = evaluate(state, loader)
    by_one, _, _ = start(tiny_run(f"{SMALL} --eval-iters 1 --eval-global-batch-size 12 --micro-batch-size 1"))
    [same] = build_loaders(by_one.run, by_one.mesh).valid.values()
    other = evaluate(by_one, same)
    assert isinstance(result, EvaluatedLosses) and isinstance(other, EvaluatedLosses)
    assert result.loss == pytest.approx(other.loss, rel=1e-6), "the same twelve samples"
    del loop


def test_evaluation_begins_at_an_iteration():
    _, _, writer = finish("--train-iters 6 --eval-interval 2 --eval-iters 1 --start-eval-at-iter 4")
    assert writer.column("iteration", "valid")[0] == 4


def test_lists_of_data_by_split(tmp_path: Path):
    lists = tmp_path / "data.json"
    lists.write_text('{"train": [0.3, "a", 0.7, "b"], "valid": ["c"]}')
    argv = ["--preset", "tiny-llama", "--per-split-data-args-path", str(lists)]
    loaded, problems = resolve_config(argv, require_training=False)
    assert problems == []
    assert loaded.config.data.train_data_path == ("0.3", "a", "0.7", "b")
    assert (loaded.config.data.valid_data_path, loaded.config.data.test_data_path) == (("c",), ())
    lists.write_text("[1]")
    assert "is not lists of prefixes by split" in str(resolve_config(argv)[1][0])


def test_megatrons_defaults_take_the_place_of_ours():
    base = "--preset tiny-llama --bf16 --fp8-format hybrid --optimizer muon".split()
    ours, theirs = (
        resolve_config([*base, *more], require_training=False)[0] for more in ((), ("--megatron-defaults",))
    )
    assert (ours.config.precision.fp8_recipe, ours.config.optim.muon_momentum) == ("tensorwise", 0.95)
    assert (theirs.config.precision.fp8_recipe, theirs.config.optim.muon_momentum) == ("delayed", 0.9)
    told = "defaults of Megatron take the place of ours: --fp8-recipe delayed, --muon-momentum 0.9"
    assert told in theirs.notices and told not in ours.notices
    typed = resolve_config([*base, "--megatron-defaults", "--fp8-recipe", "rowwise"], require_training=False)[0]
    assert typed.config.precision.fp8_recipe == "rowwise"
    adam = resolve_config(["--preset", "tiny-llama", "--megatron-defaults"], require_training=False)[0]
    assert adam.notices == (), "nothing of it is used"
    for script in ("pretrain_gpt.py", "pretrain_mamba.py", "pretrain_bert.py", "pretrain_t5.py", "pretrain_vlm.py"):
        assert '"--megatron-defaults"' in (Path(__file__).parents[3] / script).read_text()


def test_images_are_read_by_an_encoder_of_the_decoders_sizes():
    flags = (
        "--model-type vlm --decoder-num-layers 2 --encoder-num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
        "--max-position-embeddings 128 --position-embedding-type rope --vocab-size 100 --image-token-id 99 --img-h 64 --img-w 64"
    )
    model = resolve_config([*flags.split(), "--megatron-defaults"], require_training=False)[0].config.model
    assert (model.num_layers, model.vision_num_layers, model.encoder_num_layers) == (2, 3, None)
    assert (model.vision_hidden_size, model.vision_num_attention_heads, model.vision_activation) == (64, 4, "gelu_tanh")
    assert (model.vision_patch_size, model.max_patches, model.vision_input_norm, model.vision_patch_bias) == (
        16,
        17,
        True,
        False,
    )
    typed = resolve_config([*flags.split(), "--megatron-defaults", "--vision-hidden-size", "32"])[0].config.model
    assert (typed.vision_hidden_size, typed.hidden_size) == (32, 64)
    problems = resolve_config([*flags.replace("--decoder-num-layers", "--num-layers").split()], require_training=False)[
        1
    ]
    assert "--vision-num-layers is not set" in "\n".join(map(str, problems))


def test_flags_of_multimodal_scripts_name_their_settings():
    typed = "--use-tiling --use-packed-sequence --num-frames --total-seq-length --language-model-type".split()
    _, problems = resolve_config(["--preset", "tiny-llama", *typed])
    text = "\n".join(map(str, problems))
    for advice in ("images=ratio max_tiles=N", "packed=true", "max_frames=N", "--seq-length counts", "Use --from with"):
        assert advice in text
