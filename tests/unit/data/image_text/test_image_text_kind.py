"""`--dataset-type image-text`: from flags to batches, with what follows from the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import petatron
from petatron.base.errors import ConfigError
from petatron.config.schema.run import RunConfig
from petatron.data.batch_loader import BatchLoader, LoaderOptions
from petatron.data.build_datasets import build_datasets, chosen_kind
from petatron.data.image_text.image_text_kind import ImageTextKind
from petatron.data.tokenizer import ByteTokenizer
from petatron.models.decoder import TOKEN_LOSSES
from petatron.validate import load_config
from tests.unit.data.image_text.image_records import png, write_records

MODEL = (
    "--model-type vlm --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 48 --tokenizer-type ByteTokenizer "
    "--vocab-size 300 --image-token-id 299 --position-embedding-type rope --vision-num-layers 1 --vision-hidden-size 16 "
    "--vision-num-attention-heads 2 --vision-patch-size 4 --vision-image-size 8 --max-patches 40 --lr 1e-3 --train-iters 3 "
    "--micro-batch-size 2 --global-batch-size 4 --eval-iters 0 --split 80,20,0"
)


def config_of(flags: str) -> RunConfig:
    return load_config(f"{MODEL} {flags}".split(), world_size=1).config


@pytest.fixture
def data(tmp_path: Path) -> Path:
    images = {f"{number}.png": png(10 * number, (30, 20)) for number in range(10)}
    return write_records(tmp_path / "data", [{"image": name, "text": name} for name in images], images)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches(data: Path, num_workers: int):
    """The same by workers and without, from any position."""
    config = config_of(f"--data-path {data}")
    datasets = build_datasets(config, ByteTokenizer(), (16, 4, 0))
    assert datasets.train is not None and datasets.valid is not None
    options = LoaderOptions(micro_batch_size=2, seed=1, num_workers=num_workers)
    with BatchLoader(datasets.train, options, collate=chosen_kind(config).collate) as loader:
        steps = [loader.next_step(4, consumed) for consumed in (0, 4, 8)]
        again = loader.next_step(4, 4)
    assert [len(step) for step in steps] == [2, 2, 2]
    for batch, other in zip(steps[1], again, strict=True):
        assert all(x.equal(other.arrays[name]) for name, x in batch.arrays.items())
    batch = steps[0][0]
    assert batch.tokens.shape == (2, 48) and int((batch.arrays["image_index"] >= 0).sum()) == 8
    counted = batch.labels[0][batch.loss_mask[0] > 0].tolist()
    assert bytes(counted[:-1]).endswith(b".png") and counted[-1] == 256
    assert (batch.labels[batch.loss_mask > 0] != 299).all()
    train, valid = (
        {bytes(sample["tokens"][4:5].tolist()) for sample in map(dataset.__getitem__, range(len(dataset)))}
        for dataset in (datasets.train, datasets.valid)
    )
    assert len(train) == 8 and len(valid) == 2 and not train & valid


def test_it_trains(data: Path):
    run = petatron.load(None, f"{MODEL} --data-path {data} --device cpu --log-interval 1".split())
    losses = [metrics["lm_loss"] for metrics in run.train()]
    assert len(losses) == 3 and np.isfinite(losses).all() and losses[-1] < losses[0]


def test_images_follow_from_the_model(data: Path):
    def images(flags: str) -> str:
        kind = chosen_kind(config_of(f"--data-path {data} {flags}"))
        assert isinstance(kind, ImageTextKind)
        return kind.images

    assert images("") == "crop"
    assert images("--vision-position-embedding-type rope") == "dynamic"
    assert images("--dataset-settings images=tiles") == "tiles"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("images=dynamic", "the positions of patches are a table for one"),
        ("on_error=never", "on_error=never is no choice"),
        ("images=wide", "images=wide is no choice"),
        ("max_tiles=many", "is not a value of max_tiles"),
        ("model=1", "is no setting of"),
    ],
)
def test_settings_that_cannot_be(data: Path, settings: str, problem: str):
    with pytest.raises(ConfigError, match=problem):
        chosen_kind(config_of(f"--data-path {data} --dataset-settings {settings}"))


def test_packed_records_do_not_see_one_another(data: Path):
    """The losses of each record are those that it has alone, in a sample of its own."""
    flags = f"{MODEL} --data-path {data} --split 100,0,0 --device cpu --hidden-dropout 0 --attention-dropout 0"
    run = petatron.load(None, flags.split())
    model = petatron.build_model(run, petatron.launch(run))

    def losses(settings: str, count: int) -> dict[bytes, list[float]]:
        config = config_of(f"{flags.removeprefix(MODEL)} {settings}")
        dataset, kind = build_datasets(config, ByteTokenizer(), (count, 0, 0)).train, chosen_kind(config)
        assert dataset is not None
        samples = [dataset[index] for index in range(count)]
        [outputs] = model.forward(
            [kind.collate(samples, LoaderOptions(micro_batch_size=count, seed=1))], collect=[TOKEN_LOSSES]
        )
        of_texts: dict[bytes, list[float]] = {}
        for sample, row in zip(samples, outputs[TOKEN_LOSSES], strict=True):
            ends = np.flatnonzero(sample["tokens"] == 256)
            for begin, end in zip([0, *(ends[:-1] + 1)], ends, strict=True):
                if sample["loss_mask"][end]:
                    text = bytes(sample["tokens"][begin + 4 : end].tolist())
                    of_texts[text] = row[begin + 3 : end].tolist()
        return of_texts

    alone, packed = losses("", 10), losses("--dataset-settings packed=true", 5)
    assert len(alone) == 10 and alone.keys() == packed.keys()
    for text, expected in alone.items():
        assert np.allclose(packed[text], expected, rtol=1e-5), text
