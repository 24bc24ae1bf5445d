"""Says how many captions of held-out pictures a model writes exactly, beside the most frequent caption.

    python examples/vlm/captions.py runs/shapes-model shapes

A caption counts if the most probable token is the right one at each of its places: then it is what greedy decoding writes.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from petatron.data.dataset_kinds import DatasetRequest
from petatron.data.image_text.image_text_kind import patch_grid
from petatron.data.image_text.image_text_settings import ImageTextSettings
from petatron.data.image_text.image_text_source import open_image_text
from petatron.data.image_text.sample_builder import SampleSettings
from petatron.models.decoder import GREEDY_TARGETS
from petatron.models.image_text_batch import make_image_text_batch
from petatron.serve.open_engine import load_model, model_settings

AT_ONCE = 50


def captions_of(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def exact_captions(folder: str, path: Path) -> float:
    """Returns the share of captions that the model writes."""
    settings = model_settings(folder)
    model = load_model(settings, dtype="float32")
    config = settings.loaded.config.model
    options = SampleSettings(
        settings=ImageTextSettings(images="crop"), grid=patch_grid(config), mean=config.vision_pixel_mean
    )
    source = open_image_text(str(path), options, cache_folder=None)
    request = DatasetRequest(
        split="test",
        num_samples=source.num_units,
        seq_length=config.seq_length,
        seed=1,
        tokenizer=settings.required_tokenizer(),
        vocab_size=config.vocab_size,
    )
    dataset = source.dataset(range(source.num_units), request)
    right = 0
    for begin in range(0, len(dataset), AT_ONCE):
        samples: list[Any] = [dataset[index] for index in range(begin, min(begin + AT_ONCE, len(dataset)))]
        batch = make_image_text_batch(samples, config)
        [outputs] = model.forward([batch], collect=[GREEDY_TARGETS])
        is_right = outputs[GREEDY_TARGETS].bool() | (batch.loss_mask == 0)
        right += int(is_right.all(dim=1).sum())
    return right / len(dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(",")[0])
    parser.add_argument("model", help="the folder of the run")
    parser.add_argument("shapes", type=Path, help="what shapes.py has written")
    options = parser.parse_args()
    trained, held_out = captions_of(options.shapes / "train.jsonl"), captions_of(options.shapes / "held-out.jsonl")
    frequent, _ = Counter(trained).most_common(1)[0]
    with torch.no_grad():
        share = exact_captions(options.model, options.shapes / "held-out.jsonl")
    print(f"held-out captions written exactly: {share:.1%} of {len(held_out)}")
    print(f"the most frequent caption:         {held_out.count(frequent) / len(held_out):.1%}")


if __name__ == "__main__":
    main()
