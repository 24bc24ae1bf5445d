"""Texts with labels: how often a classifier is right, how near numbers are, and which texts an embedding finds.

What is measured follows from the model's head. Of two outputs or more, lines whose labels are lists of numbers are numbers to predict, and
others are classes. A model without labels embeds the queries and texts of a file, and looks for the text that belongs to a query among all
texts of the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from petatron.base.errors import DataError
from petatron.base.format_text import count_with_noun
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.objective_and_dataset_names import CLASSIFICATION, CONTRASTIVE, REGRESSION
from petatron.config.schema.sections.masked_language import MASKED_LANGUAGE_MODEL
from petatron.config.schema.sections.task_head import PoolingName
from petatron.data.labelled.encode_texts import TextEncoder, TokenRow
from petatron.data.labelled.labelled_file import LabelledTexts, LabelRule, read_labelled_file
from petatron.data.labelled.labelled_text_dataset import pooling_weights
from petatron.data.tokenizer import Tokenizer
from petatron.evaluate.confidence_interval import Estimate, accuracy_estimate, ratio_estimate
from petatron.evaluate.eval_task import ContextLimits, EvalTask
from petatron.evaluate.score_sequences import OnProgress
from petatron.kernels.attention.document_layout import Documents
from petatron.models.batch import Batch
from petatron.models.decoder import LABEL_LOGITS, POOLED_STATES, POOLING_WEIGHTS
from petatron.models.masked_language_model import TOKEN_TYPES
from petatron.parallel.forward_sequences import (
    LocalOutputs,
    MicroBatchPlan,
    check_vocabulary,
    forward_sequences,
    plan_micro_batches,
    sequence_multiple,
)
from petatron.parallel.parallel_model import ParallelModel

Results = tuple[dict[str, Estimate], dict[str, int]]


@dataclass(slots=True, kw_only=True)
class LabelledTextsTask(EvalTask):
    """The lines of a file, which are read when the model is known: it says what they must have."""

    path: Path
    tokenizer: Tokenizer
    limits: ContextLimits
    limit: int | None = None

    def measure(self, model: ParallelModel, *, batch_tokens: int, on_progress: OnProgress | None) -> Results:
        config = model.spec.config
        _pooling(config)
        records, objective = self._read(config)
        encoder = TextEncoder(self.tokenizer, is_encoder=config.model_type == MASKED_LANGUAGE_MODEL)
        rows = encoder.encode(
            [text for record in records for text in record.texts], min(config.seq_length, self.limits.window)
        )
        if num_cut := sum(row.is_cut for row in rows):
            self.notes.append(f"{count_with_noun(num_cut, 'text')} longer than the model reads, and cut")
        output = POOLED_STATES if objective == CONTRASTIVE else LABEL_LOGITS
        answers = label_outputs(model, rows, output=output, batch_tokens=batch_tokens)
        if on_progress is not None:
            total = sum(len(row.ids) for row in rows)
            on_progress(total, total)
        if objective == CONTRASTIVE:
            return retrieval_metrics(answers, [len(record.texts) for record in records])
        labels = np.array([record.label for record in records])
        if objective == REGRESSION:
            return regression_metrics(answers, labels)
        names = config.label_names or tuple(map(str, range(config.num_labels)))
        return classification_metrics(answers, labels, names)

    def _read(self, config: ModelConfig) -> tuple[list[LabelledTexts], str]:
        """Returns the lines, and the objective whose labels they have."""

        def read(objective: str) -> list[LabelledTexts]:
            rule = LabelRule(objective=objective, num_labels=config.num_labels, label_names=config.label_names)
            return read_labelled_file(self.path, rule)[: self.limit]

        if config.num_labels == 0:
            return read(CONTRASTIVE), CONTRASTIVE
        if config.num_labels == 1:
            return read(REGRESSION), REGRESSION
        try:
            return read(CLASSIFICATION), CLASSIFICATION
        except DataError as error:
            try:
                return read(REGRESSION), REGRESSION
            except DataError:
                raise error from None


def _pooling(config: ModelConfig) -> PoolingName:
    """Returns which hidden states the model's head reads; `DataError` if it has none."""
    if config.pooling is None:
        raise DataError(
            "This task is for models with a head on whole texts, and the model predicts tokens. Train one with --objective "
            f"{CLASSIFICATION}, {REGRESSION} or {CONTRASTIVE}."
        )
    return config.pooling


def label_outputs(
    model: ParallelModel, rows: Sequence[TokenRow], *, output: str, batch_tokens: int
) -> NDArray[np.float64]:
    """Returns an output [texts, width] of a model with a task head; every rank calls it with the same texts, and all get the same."""
    config = model.spec.config
    pooling = _pooling(config)
    width = config.num_labels if output == LABEL_LOGITS else config.hidden_size
    check_vocabulary(model, [row.ids for row in rows])
    plans = plan_micro_batches(
        [len(row.ids) for row in rows],
        dp_size=model.mesh.dp.size,
        batch_tokens=batch_tokens,
        multiple=sequence_multiple(model),
        max_length=model.spec.max_positions,
    )

    def make_batch(plan: MicroBatchPlan, indices: Sequence[int]) -> Batch:
        tokens, types = (np.zeros((plan.rows, plan.length), np.int64) for _ in range(2))
        lengths = np.ones(plan.rows, np.int64)
        for place, index in enumerate(indices):
            row = rows[index]
            tokens[place, : len(row.ids)], lengths[place] = row.ids, len(row.ids)
            types[place, row.second : len(row.ids)] = 1
        arrays = {"tokens": tokens, POOLING_WEIGHTS: pooling_weights(lengths, plan.length, pooling)}
        if config.num_token_types:
            arrays[TOKEN_TYPES] = types
        padded = bool((lengths < plan.length).any())
        documents = Documents.of_lengths(lengths, plan.length) if padded else None
        return Batch(arrays={name: torch.from_numpy(x) for name, x in arrays.items()}, documents=documents).to(
            model.mesh.device
        )

    def add(result: Tensor, local: LocalOutputs) -> None:
        if model.mesh.cp.rank == 0:  # ranks with other parts of the sequences have the same
            result += local.outputs[output].to(result.dtype)

    answers = np.zeros((len(rows), width))
    parts = forward_sequences(model, plans, make_batch=make_batch, collect=(output,), width=lambda plan: width, add=add)
    for pairs in parts:
        for index, values in pairs:
            answers[index] = values.numpy()
    return answers


def classification_metrics(logits: NDArray[np.float64], labels: NDArray[np.int64], names: Sequence[str]) -> Results:
    """Returns the share of right answers beside that of the most frequent label, macro-averaged F1, and the loss.

    >>> metrics, counts = classification_metrics(np.array([[2.0, 0], [0, 1], [3, 0]]), np.array([0, 1, 1]), ["no", "yes"])
    >>> round(metrics["accuracy"].value, 3), round(metrics["macro_f1"].value, 3), counts["right yes"]
    (0.667, 0.667, 1)
    """
    answers, number = logits.argmax(axis=1), len(labels)
    shifted = logits - logits.max(axis=1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(number), labels]
    counts = {"texts": number, "right": int((answers == labels).sum())}
    scores: list[float] = []
    for index, name in enumerate(names):
        there, said = labels == index, answers == index
        right = int((there & said).sum())
        if there.any() or said.any():
            scores.append(2 * right / int(there.sum() + said.sum()))
        counts |= {f"of {name}": int(there.sum()), f"right {name}": right}
    usual = Counter(labels.tolist()).most_common(1)[0][0]
    estimates = {
        "accuracy": accuracy_estimate((answers == labels).tolist()),
        "most_frequent": accuracy_estimate((labels == usual).tolist()),
        "macro_f1": Estimate(float(np.mean(scores))),
        "loss": ratio_estimate(losses.tolist(), [1.0] * number),
    }
    return estimates, counts


def regression_metrics(answers: NDArray[np.float64], labels: NDArray[np.float64]) -> Results:
    """Returns the squared error, the absolute one, and correlations: the mean over the numbers of a text.

    >>> metrics, _ = regression_metrics(np.array([[1.0], [2], [4]]), np.array([[1.0], [2], [3]]))
    >>> round(metrics["squared_error"].value, 3), round(metrics["spearman"].value, 3)
    (0.333, 1.0)
    """
    differences, number = answers - labels, len(labels)
    columns = range(labels.shape[1])
    pearson = [_correlation(answers[:, column], labels[:, column]) for column in columns]
    spearman = [_correlation(_ranks(answers[:, column]), _ranks(labels[:, column])) for column in columns]
    estimates = {
        "squared_error": ratio_estimate(np.square(differences).mean(axis=1).tolist(), [1.0] * number),
        "absolute_error": ratio_estimate(np.abs(differences).mean(axis=1).tolist(), [1.0] * number),
        "pearson": Estimate(float(np.mean(pearson))),
        "spearman": Estimate(float(np.mean(spearman))),
    }
    return estimates, {"texts": number}


def _correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    a, b = a - a.mean(), b - b.mean()
    norm = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / norm if norm else float("nan")


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the rank of each value; equal ones share the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[places].astype(np.float64)


def retrieval_metrics(states: NDArray[np.float64], texts_per_line: Sequence[int]) -> Results:
    """Returns how often the text that belongs to a query is the nearest of all texts, among the nearest ten, and its reciprocal rank.

    >>> metrics, _ = retrieval_metrics(np.array([[1.0, 0], [2, 0.1], [0, 1], [-1, 0.01]]), [2, 2])
    >>> metrics["recall@1"].value, metrics["mean_reciprocal_rank"].value
    (0.5, 0.75)
    """
    first = np.cumsum([0, *texts_per_line[:-1]])
    unit = states / np.maximum(np.linalg.norm(states, axis=1, keepdims=True), 1e-12)
    is_query = np.zeros(len(states), dtype=bool)
    is_query[first] = True
    texts = unit[~is_query]
    place = np.cumsum(~is_query) - 1  # of each text among all
    ranks = np.empty(len(first))
    for number, row in enumerate(first):
        cosines = texts @ unit[row]
        ranks[number] = (cosines > cosines[place[row + 1]]).sum()
    estimates = {
        "recall@1": accuracy_estimate((ranks < 1).tolist()),
        "recall@10": accuracy_estimate((ranks < 10).tolist()),
        "mean_reciprocal_rank": ratio_estimate((1 / (ranks + 1)).tolist(), [1.0] * len(ranks)),
    }
    return estimates, {"queries": len(first), "texts": len(texts)}
