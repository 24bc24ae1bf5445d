"""Rules about sparse attention and its indexer."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.schema.model import RawModelConfig
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.sections.sparse_attention import SPARSE_ATTENTION, has_sparse_attention

_VARIANT = "--experimental-attention-variant"


def check_sparse_attention(config: RawRunConfig) -> Iterator[Problem]:
    if not has_sparse_attention(config.model):
        return
    yield from _indexer(config.model)
    yield from _attention(config.model)
    parallel = config.parallel
    if parallel.context_parallel_size > 1 and parallel.cp_comm_type != "all_gather":
        rule = f"leaves keys where they are, and {_VARIANT} {SPARSE_ATTENTION} chooses among those of all ranks"
        yield Problem("--cp-comm-type", parallel.cp_comm_type, rule, "Use --cp-comm-type all_gather.")


def _attention(model: RawModelConfig) -> Iterator[Problem]:
    if not model.multi_latent_attention:
        rule = "chooses latents, and there is no --multi-latent-attention"
        yield Problem(_VARIANT, SPARSE_ATTENTION, rule, "Add it, or leave the variant out.")
    if model.hybrid_layer_pattern is not None:
        rule = "is for every layer of a decoder, and those of --hybrid-layer-pattern are of several kinds"
        yield Problem(_VARIANT, SPARSE_ATTENTION, rule, "Leave one out.")
    if model.attention_dropout:
        rule = f"drops weights of attention, which {_VARIANT} {SPARSE_ATTENTION} does not"
        yield Problem("--attention-dropout", f"{model.attention_dropout:g}", rule, "Use --attention-dropout 0.")


def _indexer(model: RawModelConfig) -> Iterator[Problem]:
    width, rotary = model.dsa_indexer_head_dim, model.qk_pos_emb_head_dim
    flag = "--dsa-indexer-head-dim"
    if model.position_embedding_type != "none" and 0 < width < rotary:
        rule = f"is narrower than the --qk-pos-emb-head-dim {rotary} that rope rotates of a head"
        yield Problem(flag, str(width), rule, f"Use {rotary} or more.")
    if model.dsa_indexer_rotate_activation and width & (width - 1):
        rule = "is no power of two, the width of a Hadamard matrix"
        fix = f"Use {1 << width.bit_length()}, or --no-dsa-indexer-rotate-activation, which leaves scores as they are."
        yield Problem(flag, str(width), rule, fix)
