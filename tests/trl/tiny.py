"""A tiny model on both sides, its tokenizer, and trainers of TRL that compute a loss of given tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import petatron
from petatron.data.packed_segments import PackedSegment, make_segment_batch, pack_segments
from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.pretrained.saveable_model import Model
from petatron.verify.record_trace import _traced_shards, assemble_tensors  # pyright: ignore[reportPrivateUsage]
from tests.parity.harness import tiny_run

VOCABULARY = 131
NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "layers.0.attention.q.weight": "model.layers.0.self_attn.q_proj.weight",
    "layers.1.mlp.down.weight": "model.layers.1.mlp.down_proj.weight",
    "norm.weight": "model.norm.weight",
}
"""Some tensors, by our name and that of transformers."""


@dataclass(frozen=True, slots=True)
class Pair:
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def random_pairs(count: int, *, seed: int = 0) -> list[Pair]:
    random = np.random.default_rng(seed)

    def ids(low: int, high: int) -> list[int]:
        return random.integers(1, VOCABULARY, random.integers(low, high)).tolist()

    return [Pair(ids(1, 6), ids(2, 10), ids(2, 10)) for _ in range(count)]


def answer(prompt: Sequence[int], ids: Sequence[int], **numbers: float) -> PackedSegment:
    learned = np.array([0.0] * len(prompt) + [1.0] * len(ids), np.float32)
    return PackedSegment(np.array([*prompt, *ids]), learned, of_segment=numbers)


def packed(segments: Sequence[PackedSegment], seq_length: int, *, pairs: bool) -> Batch:
    """The segments in packed rows; numbered as they are given, since the two of a pair follow one another."""
    groups = [segments[at : at + 2] for at in range(0, len(segments), 2)] if pairs else [[x] for x in segments]
    sizes = [sum(segment.num_positions for segment in group) for group in groups]
    rows = [[segment for number in row for segment in groups[number]] for row in pack_segments(sizes, seq_length)]
    return make_segment_batch(rows, seq_length, pairs=pairs)


def save_model(folder: Path, *, seed: int, flags: str = "") -> Path:
    petatron.build_model(tiny_run(f"--seed {seed} {flags}", dtype="float64"), ParallelMesh.single()).save_pretrained(
        folder
    )
    return folder


def open_transformers(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options)


def tokenizer() -> Any:
    """One whose texts are numbers between spaces: TRL's trainers want one, and get token ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="0")


def gradients(model: Model) -> dict[str, Tensor]:
    return {name: x for (_, name), x in assemble_tensors(_traced_shards(model, "gradient")).items()}


def check_gradients(ours: Mapping[str, Tensor], theirs: Any, *, bound: float = 1e-6) -> None:
    named = dict(theirs.named_parameters())
    for name, other in NAMES.items():
        grad = named[other].grad
        torch.testing.assert_close(ours[name], grad, rtol=1e-5, atol=bound * float(grad.abs().max()))
