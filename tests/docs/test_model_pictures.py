"""The pictures of models in docs/pictures are those that `petatron plan model` draws now; `python -m tests.docs.test_model_pictures` draws
them again."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from petatron.models.registry import model_spec
from petatron.plan.model_drawing import model_svg
from petatron.plan.model_parts import model_parts
from petatron.validate import load_config

FOLDER = Path(__file__).parents[2] / "docs/pictures"
_RECOMMENDER = (
    "--model-type recommender --num-layers 2 --hidden-size 64 --num-attention-heads 2 --ffn-hidden-size 128 --seq-length 50 "
    "--vocab-size 1000000"
)
_VISION = (
    "--model-type vlm --preset llama2-7b --vocab-size 32064 --image-token-id 32000 --seq-length 2048 --vision-num-layers 23 "
    "--vision-hidden-size 1024 --vision-num-attention-heads 16 --vision-image-size 336 --vision-class-token --vision-input-norm "
    "--no-vision-final-norm --no-vision-patch-bias --vision-activation quick_gelu"
)
PICTURES = {
    "vlm.svg": ("LLaVA 1.5 7B: CLIP, a projector, Llama 2", _VISION),
    "classifier.svg": (
        "BERT base with a head for three classes",
        "--preset bert-base --objective classification --num-labels 3",
    ),
    "t5.svg": ("t5-base", "--preset t5-base"),
    "modernbert.svg": ("modernbert-base", "--preset modernbert-base"),
    "sasrec.svg": ("SASRec: attention over a history, scores by the table of items", _RECOMMENDER),
    "hstu.svg": (
        "HSTU with two tables and sampled items",
        f"{_RECOMMENDER} --recommender-layers hstu --untie-embeddings-and-output-weights --item-loss sampled_softmax "
        "--position-embedding-type none",
    ),
}


def drawn(name: str) -> str:
    title, flags = PICTURES[name]
    run = load_config(flags.split(), require_training=False).config
    return model_svg(model_parts(model_spec(run)), title=title)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_that_of_its_model(name: str):
    picture = drawn(name)
    ElementTree.fromstring(picture)
    assert (FOLDER / name).read_text() == picture, "run `python -m tests.docs.test_model_pictures`"


if __name__ == "__main__":
    for name in PICTURES:
        (FOLDER / name).write_text(drawn(name))
