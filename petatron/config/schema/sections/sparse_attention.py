"""The settings of sparse attention: the indexer, its top-k selection, and its loss."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from petatron.config.schema.numeric_bounds import Factor, PositiveFactor, SequenceLength, Size
from petatron.config.schema.setting_metadata import Feature, ToySize, UsedWhen, settings_section

SPARSE_ATTENTION = "dsa"


def has_sparse_attention(model: Any) -> bool:
    """Whether attention is to the top-k tokens that an indexer selects."""
    return model.experimental_attention_variant == SPARSE_ATTENTION


_HAS_LOSS = UsedWhen(lambda run: run.model.dsa_indexer_loss_coeff != 0, "--dsa-indexer-loss-coeff is 0")


@settings_section
class SparseAttentionSettings:
    """DeepSeek sparse attention (DeepSeek-V3.2, GLM-5)."""

    feature: ClassVar = Feature(
        "sparse attention",
        (UsedWhen(lambda run: has_sparse_attention(run.model), "it is for --experimental-attention-variant dsa"),),
        variants=True,
    )
    dsa_indexer_n_heads: Annotated[Size, ToySize(8)] = 64
    """Sparse attention: heads of the indexer."""
    dsa_indexer_head_dim: Annotated[Size, ToySize(16)] = 128
    """Sparse attention: width of a head of the indexer."""
    dsa_indexer_topk: Annotated[SequenceLength, "at least 1", ToySize(32)] = 2048
    """Sparse attention: how many tokens a query attends to, selected by the indexer; shorter sequences have dense attention."""
    dsa_indexer_rope_interleaved: bool = False
    """Sparse attention: rotary pairs of the indexer's heads are neighbors (GLM-5), instead of half the rotary width apart."""
    dsa_indexer_scoring_relu: bool = True
    """Sparse attention: a relu on what each head of the indexer scores."""
    dsa_indexer_k_norm_epsilon: PositiveFactor | None = None
    """Sparse attention: added to the variance inside the norm of the indexer's keys. Unset means `--norm-epsilon`."""
    dsa_indexer_rotate_activation: Annotated[bool, "runtime"] = True
    """Sparse attention: a Hadamard matrix rotates queries and keys of the indexer: the same scores, and smaller outliers."""
    dsa_indexer_loss_coeff: Annotated[Factor, "at least 0", "training"] = 0.0
    """Sparse attention: coefficient of the indexer's loss, KL(attention distribution || indexer softmax); 0: the indexer is not trained."""
    dsa_indexer_use_sparse_loss: Annotated[bool, "training", _HAS_LOSS] = False
    """Sparse attention: the indexer's loss is over the selected tokens, instead of all visible tokens of a query."""


SPARSE_ATTENTION_FIELDS = tuple(vars(SparseAttentionSettings)["__annotations__"].keys() - {"feature"})
