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
PICTURES = {
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
