"""Megatron-LM checkpoints, read into logical tensors and written from them. docs/megatron-checkpoints.md says what fits.

checkpoint = open_megatron(folder)                      # .iteration .model .moe .tensors[name].load()
write_megatron(folder, iteration=..., spec=..., fetch=..., tp=2, pp=1)

Every run imports what reads. What writes is imported by its path (`write_checkpoint.py`): torch's writer costs a second.
"""

from petatron.checkpoint.megatron.open_checkpoint import LazyTensor, MegatronCheckpoint, MegatronTraining, open_megatron
from petatron.checkpoint.megatron.write_training_state import OptimizerForm, TrainingExport

__all__ = [
    "LazyTensor",
    "MegatronCheckpoint",
    "MegatronTraining",
    "OptimizerForm",
    "TrainingExport",
    "open_megatron",
]
