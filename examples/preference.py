"""Preference training of one's own, for `petatron train --import examples/preference.py --objective preference`.

The objective is that of DPO (Rafailov et al., 2023): with pi and ref the log-likelihoods of a whole answer under the model that is
trained and under a frozen reference, and c, r the chosen and the rejected answer of a pair,

    -log sigmoid(beta * ((pi_c - ref_c) - (pi_r - ref_r)))

The dataset reads JSON lines {"prompt": ..., "chosen": ..., "rejected": ...}, texts or lists of token ids. A pair is one sample of two
rows, so --micro-batch-size counts pairs. Neither says a word about the layout.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron import (
    Batch,
    DataError,
    DatasetKind,
    DatasetRequest,
    LossSpec,
    MetricSpec,
    ModelRole,
    Objective,
    RecordSource,
    register_dataset,
    register_objective,
)


@dataclass(frozen=True)
class Preference(Objective):
    reference: (
        str  # the folder of a run, of one of its steps, or of a Hugging Face model; mostly what training starts from
    )
    beta: float = 0.1

    @property
    def dataset_type(self) -> str:
        return "pairs"

    @property
    def losses(self) -> tuple[LossSpec, ...]:
        return (LossSpec("preference loss", per="sample"),)

    @property
    def metric_specs(self) -> tuple[MetricSpec, ...]:
        return MetricSpec("margin"), MetricSpec("accuracy")

    @property
    def models(self) -> Mapping[str, ModelRole]:
        return {"reference": ModelRole(self.reference, outputs=("token_losses",))}

    def prepare(self, batch: Batch) -> Batch:
        return batch.with_arrays(reference=log_likelihood(batch["reference.token_losses"], batch))

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        return {"preference loss": -F.logsigmoid(self._margin(outputs, batch))}

    def metrics(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        margin = self._margin(outputs, batch)
        return {"margin": margin, "accuracy": (margin > 0).to(margin.dtype)}

    def _margin(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        gain = log_likelihood(outputs["token_losses"], batch) - batch["reference"]
        return self.beta * (gain[0::2] - gain[1::2])  # chosen and rejected answers are in turns


def log_likelihood(token_losses: Tensor, batch: Batch) -> Tensor:
    """The log-likelihood of each row's answer [B]: a sum over the whole sequence, whatever part of it this rank has."""
    return batch.sequence_sum(-token_losses * batch.loss_mask)


class PairFile(RecordSource):
    unit = size_unit = "pairs"

    def __init__(self, path: str, lines: Sequence[str]) -> None:
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        super().__init__(path, num_units=len(lines), fingerprint=digest)
        self._lines = lines

    def record(self, index: int, request: DatasetRequest) -> Mapping[str, np.ndarray]:
        pair = json.loads(self._lines[index])
        prompt = token_ids(pair["prompt"], request)
        rows = [
            answer_row(prompt, token_ids(pair[name], request), request.seq_length) for name in ("chosen", "rejected")
        ]
        return {"ids": np.stack([ids for ids, _ in rows]), "mask": np.stack([mask for _, mask in rows])}


def token_ids(text: str | list[int], request: DatasetRequest) -> list[int]:
    if isinstance(text, list):
        return text
    if request.tokenizer is None:
        raise DataError("Pairs of texts need a tokenizer. Give --tokenizer-model, or lists of token ids.")
    return list(request.tokenizer.encode(text))


def answer_row(prompt: list[int], answer: list[int], seq_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids of a prompt and an answer, padded or cut to seq_length + 1, and a mask that is 1 where a token of the answer is predicted."""
    ids = np.zeros(seq_length + 1, np.int64)
    both = (prompt + answer)[: seq_length + 1]
    ids[: len(both)] = both
    mask = np.zeros(seq_length, np.float32)
    mask[max(0, len(prompt) - 1) : len(both) - 1] = 1.0
    return ids, mask


@dataclass(frozen=True)
class Pairs(DatasetKind):
    reads = "a file of JSON lines with prompt, chosen and rejected"

    def open(self, source: str, request: DatasetRequest) -> PairFile:
        try:
            lines = [line for line in Path(source).read_text().splitlines() if line.strip()]
            missing = [
                i for i, line in enumerate(lines, 1) if not {"prompt", "chosen", "rejected"} <= set(json.loads(line))
            ]
        except (OSError, ValueError) as error:
            raise DataError(f"{source} cannot be read: {error}. Give {self.reads}.") from error
        if missing:
            raise DataError(f"{source}: line {missing[0]} lacks prompt, chosen or rejected. Each line is a pair.")
        return PairFile(source, lines)

    def mock(self, request: DatasetRequest) -> "MockPairs":
        return MockPairs(request)

    def collate(self, samples: Sequence[Mapping[str, np.ndarray]], options: object) -> Batch:
        ids, mask = (np.concatenate([sample[name] for sample in samples]) for name in ("ids", "mask"))
        tokens, labels = (torch.from_numpy(np.ascontiguousarray(part)) for part in (ids[:, :-1], ids[:, 1:]))
        return Batch(tokens, labels, torch.from_numpy(mask), rows_per_sample=2)


class MockPairs:
    """Answers that count on from the prompt, and answers that do not."""

    def __init__(self, request: DatasetRequest) -> None:
        self._request, self.fingerprint = request, f"mock pairs {request.split} {request.seed} {request.seq_length}"

    def __len__(self) -> int:
        return self._request.num_samples

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        request, size = self._request, self._request.vocab_size or 100
        random = np.random.default_rng([request.seed, index])
        first, length = int(random.integers(1, size)), int(random.integers(2, request.seq_length // 2))
        prompt, chosen = ([(first + i) % size for i in part] for part in (range(length), range(length, 2 * length)))
        rows = [
            answer_row(prompt, answer, request.seq_length)
            for answer in (chosen, random.integers(0, size, length).tolist())
        ]
        return {"ids": np.stack([ids for ids, _ in rows]), "mask": np.stack([mask for _, mask in rows])}


register_objective("preference", Preference)
register_dataset("pairs", Pairs)
