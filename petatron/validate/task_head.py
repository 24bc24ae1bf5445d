"""Rules about models with a task head (`--pooling`), and the objectives that train them."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.schema.objective_and_dataset_names import CLASSIFICATION, CONTRASTIVE, NEXT_TOKEN, TASK_OBJECTIVES
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.sections.encoder_decoder import ENCODER_DECODER_MODEL
from petatron.config.schema.sections.recommender import RECOMMENDER_MODEL
from petatron.config.schema.sections.vision_language import VISION_LANGUAGE_MODEL


def check_task_head(config: RawRunConfig, *, require_training: bool) -> Iterator[Problem]:
    yield from _labels(config)
    model = config.model
    if model.pooling is None:
        return
    if model.model_type in (ENCODER_DECODER_MODEL, RECOMMENDER_MODEL, VISION_LANGUAGE_MODEL):
        rule = "has no --pooling yet, which objectives of whole texts read"
        yield Problem("--model-type", model.model_type, rule, "Use a decoder or bert.")
    if model.mtp_num_layers:
        rule = "predicts tokens, and a model with --pooling predicts none"
        yield Problem("--mtp-num-layers", str(model.mtp_num_layers), rule, "Leave one of them out.")
    if require_training and config.train.objective in (None, NEXT_TOKEN):
        rule = "trains a model to predict tokens, and one with --pooling predicts none"
        yield Problem("--objective", NEXT_TOKEN, rule, f"Use one of {', '.join(TASK_OBJECTIVES)}.")
    yield from _compared_texts(config)


def _labels(config: RawRunConfig) -> Iterator[Problem]:
    model, names = config.model, config.model.label_names
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        yield Problem("--label-names", twice, "is there twice", "Leave one of them out.")
    if names and model.num_labels not in (None, len(names)):
        rule = f"is not the number of --label-names, {len(names)}"
        yield Problem("--num-labels", str(model.num_labels), rule, "Leave it out.")
    elif config.train.objective == CLASSIFICATION and (model.num_labels or 0) < 2:
        rule = f"is too few for --objective {CLASSIFICATION}"
        yield Problem("--num-labels", str(model.num_labels or 0), rule, "Give the number of labels, or --label-names.")


def _compared_texts(config: RawRunConfig) -> Iterator[Problem]:
    """Yields a problem where every query is compared with the one text that belongs to it: the loss is 0."""
    train = config.train
    has_negatives = any(
        setting.startswith("negatives=") and setting != "negatives=0" for setting in config.data.dataset_settings
    )
    ranks = config.parallel.data_parallel_size or 1
    if train.objective == CONTRASTIVE and train.micro_batch_size * ranks == 1 and not has_negatives:
        rule = "on one data-parallel rank leaves nothing to compare a text with"
        fix = "Use 2 or more, or lines with negatives and --dataset-settings negatives=1."
        yield Problem("--micro-batch-size", "1", rule, fix)
