"""Decoders that read images train the same in every layout: CLIP's, SigLIP's and Qwen2.5-VL's encoders, with frozen parts too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from petatron.base.errors import ConfigError
from petatron.models.frozen_params import frozen_params
from petatron.models.registry import model_spec
from petatron.validate import load_config
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import check_layout, check_part_of_model, tiny_run, train
from tests.parity.state.resharding import check_resume

_PLAIN = (
    "--model-type vlm --vision-num-layers 2 --vision-hidden-size 24 --vision-num-attention-heads 2 --vision-ffn-hidden-size 32 "
    "--vision-patch-size 2 --vision-image-size 4 --image-token-id 130 --seq-length 32 --max-patches 100"
)
_CLIP = "--vision-class-token --no-vision-patch-bias --vision-input-norm --vision-activation quick_gelu --no-vision-final-norm"
_QWEN = (
    "--vision-position-embedding-type rope --vision-merge-size 2 --vision-window-size 8 --vision-full-attention-layers 1 "
    "--vision-temporal-patch-size 2 --vision-activation swiglu --vision-normalization RMSNorm --no-vision-final-norm --projector-norm "
    "--projector-hidden-size 96 --mrope-section 1 1 2"
)
MODELS = {
    "clip": f"{_PLAIN} {_CLIP}",
    "shuffled": f"{_PLAIN} --vision-merge-size 2 --projector-num-layers 1 --no-projector-bias "
    "--no-untie-embeddings-and-output-weights",
    "windows": f"{_PLAIN} {_QWEN}",
    "projector": f"{_PLAIN} {_CLIP} --train-only projector.*",
    "frozen text": f"{_PLAIN} {_QWEN} --vision-num-layers 4 --freeze embedding.* head.* norm.* layers.4.* layers.5.*",
    "experts": f"{_PLAIN} {_QWEN} --num-experts 4 --moe-aux-loss-coeff 0.01 --moe-ffn-hidden-size 16",
}
LAYOUTS = {
    "--dp 2 --use-distributed-optimizer": 2,
    "--tp 2": 2,
    "--tp 2 --sequence-parallel": 2,
    "--cp 2": 2,
    "--cp 2 --cp-comm-type a2a": 2,
    "--cp 2 --cp-comm-type all_gather": 2,
    "--pp 2": 2,
    "--pp 2 --encoder-pipeline-model-parallel-size 1": 2,
    "--pp 2 --num-virtual-stages-per-pipeline-rank 2": 2,
    "--pp 2 --pipeline-schedule zb-v": 2,
    "--dp 2 --data-parallel-sharding-strategy optim_grads_params": 2,
    "--recompute-granularity selective": 1,
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": 1,
    "--pp 4": 4,
    "--tp 2 --sequence-parallel --cp 2": 4,
    "--pp 2 --tp 2 --sequence-parallel": 4,
}
AT_ONCE = {
    "clip": ("--tp 2 --sequence-parallel", "--cp 2", "--pp 2 --num-virtual-stages-per-pipeline-rank 2"),
    "shuffled": ("--tp 2", "--dp 2 --data-parallel-sharding-strategy optim_grads_params"),
    "windows": ("--tp 2 --sequence-parallel", "--pp 2", "--recompute-granularity selective"),
    "projector": ("--pp 2", "--dp 2 --use-distributed-optimizer"),
    "frozen text": ("--pp 2 --encoder-pipeline-model-parallel-size 1", "--cp 2 --cp-comm-type a2a"),
    "experts": ("--pp 2 --tp 2 --sequence-parallel",),
}
"""The layouts of the default suite."""


def _fits(model: str, layout: str) -> bool:
    return "frozen text" not in model or layout not in (
        "--pp 2 --num-virtual-stages-per-pipeline-rank 2",
        "--pp 2 --pipeline-schedule zb-v",
        "--pp 4",
    )


@diagonal(3)
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (model, layout) if layout in AT_ONCE[model] else later(model, layout)
        for model in MODELS
        for layout in LAYOUTS
        if _fits(model, layout)
    ],
)
def test_every_layout_trains_the_same_model_of_images_and_text(ranks: RankPool, model: str, layout: str):
    check_layout(ranks, layout, MODELS[model], world_size=LAYOUTS[layout])


PARTS = {
    "clip": ("--vision-image-size 6", "--vision-activation gelu", "--vision-pixel-mean 0 0 0"),
    "windows": (
        "--vision-window-size 4",
        "--vision-full-attention-layers 0",
        "--vision-rotary-base 100",
        "--mrope-section 2 1 1",
        "--video-time-step 2",
        "--projector-activation relu",
    ),
}


@pytest.mark.parametrize(("model", "part"), [(model, part) for model, parts in PARTS.items() for part in parts])
def test_what_a_model_of_images_has_is_trained(model: str, part: str):
    check_part_of_model(MODELS[model], f"{MODELS[model]} {part}")


REFUSED = {
    "": "--vision-num-layers is not set, and --model-type is vlm",
    f"{_PLAIN} --vision-image-size 5": "5 is not a multiple of --vision-patch-size 2",
    f"{_PLAIN} {_QWEN} --vision-window-size 6": "--vision-window-size 6 is not a multiple of",
    f"{_PLAIN} {_CLIP} --vision-merge-size 2": "is one patch before those of an image",
    f"{_PLAIN} {_QWEN} --vision-full-attention-layers 2": "names a layer beyond the 2",
    f"{_PLAIN} --vision-full-attention-layers 1": "names layers without windows",
    f"{_PLAIN} --vision-pixel-mean 0 0": "is not a number for each of red, green and blue",
    f"{_PLAIN} --projector-num-layers 3": "3 is above 2, the most",
    f"{_PLAIN} --vision-pixel-std 1 0 1": "1 0 1 is not above 0",
    f"{_PLAIN} --vision-class-token --max-patches 4": "4 is below 5, the patches of one image",
    f"{_PLAIN} --image-token-id 131": "131 is not among the 131 ids",
    f"{_PLAIN} --vision-num-attention-heads 5": "24 is not a multiple of --vision-num-attention-heads 5",
    f"{_PLAIN} {_QWEN} --vision-num-attention-heads 4": "heads of 6 channels",
    f"{_PLAIN} --vision-num-attention-heads 3 --tp 2": "does not divide --vision-num-attention-heads 3",
    f"{_PLAIN} --vision-ffn-hidden-size 33 --tp 2": "--vision-ffn-hidden-size 33 is not a multiple of",
    f"{_PLAIN} {_QWEN} --projector-hidden-size 33 --tp 2": "--projector-hidden-size 33 is not a multiple of",
    f"{_PLAIN} --vision-num-attention-heads 12 --num-attention-heads 12 --vision-ffn-hidden-size 24 --hidden-size 48 "
    "--ffn-hidden-size 48 --projector-hidden-size 24 --seq-length 12 --tp 12 --sequence-parallel": "does not divide 16, and --sequence",
    f"{_PLAIN} {_QWEN} --mrope-section 1 1": "is not a number of pairs for each",
    f"{_PLAIN} {_QWEN} --mrope-section 1 1 1": "adds up to 3 pairs, and rotary positions rotate 4",
    "--model-type decoder --mrope-section 1 1 2": "is about the rows and columns of images",
    f"{_PLAIN} --mtp-num-layers 1": "there is no --mtp-num-layers beside them",
    f"{_PLAIN} --pp 4 --pipeline-model-parallel-layout E|tt|L": "has 2 layers .t., but --num-layers . --vision-num-layers is 4",
    "--model-type decoder --dataset-type image-text": "which --model-type decoder does not read",
    f"{_PLAIN} --device cuda --cuda-graphs on": "more or fewer patches",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_a_model_of_images_cannot_be_is_refused_before_it_trains(flags: str):
    argv = "--model-type vlm --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 131 --mock-data "
    argv += f"--lr 1e-3 --position-embedding-type rope --train-iters 1 {flags}"
    world_size = 12 if "--tp 12" in flags else 4
    with pytest.raises(ConfigError, match=REFUSED[flags]):
        load_config(argv.split(), world_size=world_size)


def test_frozen_parts_stay_as_they_are():
    """Only the projector is trained: the bits of all else are those that were drawn, after some steps."""
    run = tiny_run(f"{MODELS['windows']} --freeze-LM --freeze-ViT", dtype="float64")
    frozen, trained = frozen_params(run), model_spec(run).params()
    assert {name.partition(".")[0] for name in trained.keys() - frozen.names} == {"projector"}
    [first, *_, last] = train(run)
    weights = {part.name: part.values for part in last.shards if part.kind == "parameter"}
    begun = {part.name: part.values for part in first.shards if part.kind == "parameter"}
    moved = {name for name, values in weights.items() if not torch.equal(values, begun[name])}
    assert moved and all(name.startswith("projector.") for name in moved)
    assert {part.name.partition(".")[0] for part in last.shards if part.kind == "gradient"} == {"projector"}


MEGATRON = "--img-h 8 --img-w 8 --patch-dim 2 --vision-merge-size 2 --disable-vision-class-token"


def test_megatrons_flags_make_the_same_encoder():
    ours = f"{_PLAIN} --vision-image-size 8 --vision-patch-size 2 --vision-merge-size 2 --no-vision-class-token"
    theirs = _PLAIN.replace("--vision-patch-size 2 --vision-image-size 4", MEGATRON)
    assert tiny_run(theirs).model == tiny_run(ours).model


def test_a_checkpoint_resumes_in_another_layout(ranks: RankPool, tmp_path: Path):
    tensors = ("vision.patch.weight", "projector.up.weight", "layers.0.attention.q.weight", "layers.3.mlp.down.weight")
    check_resume(ranks, tmp_path, MODELS["windows"], "--pp 2", world_size=2, tensors=tensors)
