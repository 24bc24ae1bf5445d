"""`model:FOLDER`: the score that a reward model gives to a prompt with its answer.

The model has a task head with one label, as `--objective reward` trains it. It is frozen, in the layout and precision of the trained model,
with the same tokenizer: what it reads are the ids that were drawn, each text in a row of its own, as in its training. Every data-parallel
rank scores its share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from petatron.base.errors import CheckpointError
from petatron.config.schema.run import RunConfig
from petatron.config.schema.sections.task_head import PoolingName
from petatron.data.labelled.labelled_text_dataset import pooling_weights
from petatron.mesh import collectives
from petatron.models.batch import Batch
from petatron.models.decoder import LABEL_LOGITS, POOLING_WEIGHTS
from petatron.parallel.parallel_model import ParallelModel
from petatron.train.state.open_frozen_models import open_frozen_model


class RewardModel:
    """Every rank calls its methods. micro_batch_multiple: of which the number of micro-batches is to be a multiple."""

    def __init__(self, run: RunConfig, trained: ParallelModel, folder: str, *, micro_batch_multiple: int = 1) -> None:
        self._mesh, self._length = trained.mesh, run.model.seq_length
        self._micro, self._multiple = run.train.micro_batch_size, micro_batch_multiple
        self._model = open_frozen_model(run, trained, "reward model", folder)
        config = self._model.spec.config if isinstance(self._model, ParallelModel) else None
        if config is None or config.pooling is None or config.num_labels != 1:
            raise CheckpointError(
                f"--rewards model:{folder} has no task head with one label. Choose a model of --objective reward, or a sequence "
                "classifier with num_labels 1."
            )
        self._pooling: PoolingName = config.pooling

    def scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Returns the score of each text; of one that is longer than --seq-length, that of its end."""
        mesh = self._mesh
        per_rank = self._micro * self._multiple
        count = -(-len(texts) // (per_rank * mesh.dp.size)) * per_rank
        places = list(range(mesh.dp.rank, count * mesh.dp.size, mesh.dp.size))
        rows = [list(texts[place])[-self._length :] if place < len(texts) else [0] for place in places]
        batches = [self._batch(rows[at : at + self._micro]).to(mesh.device) for at in range(0, count, self._micro)]
        together = torch.zeros(count * mesh.dp.size, dtype=torch.float64, device=mesh.device)
        for number, outputs in enumerate(self._model.forward(batches, collect=(LABEL_LOGITS,))):
            if outputs and mesh.tp.rank == 0 and mesh.cp.rank == 0:  # the others have the same
                of_batch = places[number * self._micro : (number + 1) * self._micro]
                together[of_batch] = outputs[LABEL_LOGITS].squeeze(1).double()
        return collectives.all_reduce(together, mesh.world)[: len(texts)].tolist()

    def _batch(self, rows: Sequence[Sequence[int]]) -> Batch:
        tokens = np.zeros((len(rows), self._length), np.int64)
        for row, ids in zip(tokens, rows):
            row[: len(ids)] = ids
        lengths = np.array([len(ids) for ids in rows])
        arrays = {"tokens": tokens, POOLING_WEIGHTS: pooling_weights(lengths, self._length, self._pooling)}
        return Batch(arrays={name: torch.from_numpy(array) for name, array in arrays.items()})
