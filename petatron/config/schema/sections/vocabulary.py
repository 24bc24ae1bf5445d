"""The settings of the vocabulary, the embedding and the output head."""

from __future__ import annotations

from typing import Annotated, ClassVar

from petatron.config.schema.numeric_bounds import Factor, PositiveFactor, VocabularySize
from petatron.config.schema.setting_metadata import Feature, NotWith, UsedWhen, settings_section

_HAS_TOKENIZER = UsedWhen(
    lambda run: run.tokenizer.tokenizer_type is not None, "there is no tokenizer whose ids they would follow"
)
_TWO_FACTORS = NotWith("scale_embeddings", rule="and --scale-embeddings are two factors on embeddings", shown="{:g}")


@settings_section
class VocabularySettings:
    """Vocabulary, embedding and output head."""

    feature: ClassVar = Feature("vocabulary")
    vocab_size: Annotated[VocabularySize, "at least 1"] | None = None
    """Number of token ids. Derived: from the tokenizer, and `--extra-vocab-size`."""
    extra_vocab_size: Annotated[VocabularySize, "at least 0", "runtime", _HAS_TOKENIZER] = 0
    """Ids of the model after those of its tokenizer, for tokens to be named later; no text has them."""
    make_vocab_size_divisible_by: Annotated[VocabularySize, "at least 1", "runtime"] = 128
    """The vocabulary is padded in memory to a multiple of this x tensor-parallel size; checkpoints never hold the padding."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output head weights of its own; by default it shares the token embedding."""
    scale_embeddings: bool = False
    """Multiply embeddings by the square root of the hidden size (Gemma)."""
    embedding_multiplier: Annotated[PositiveFactor, "variant", _TWO_FACTORS] = 1.0
    """Factor on embeddings, those of positions included (Granite)."""
    final_logit_softcapping: Annotated[PositiveFactor, "variant"] | None = None
    """Logits become cap x tanh(logit / cap) (Gemma 2). Unset means that they stay as they are."""
    logits_scaling: Annotated[PositiveFactor, "variant"] = 1.0
    """Logits are divided by this (Granite)."""
    embedding_init_method_std: Annotated[Factor, "training"] | None = None
    """Standard deviation of the initial embeddings. Derived: `--init-method-std`."""


def padded_rows(rows: int, pad_to: int, tp_size: int) -> int:
    """Returns the rows in memory over all ranks: the next multiple of `pad_to` x ranks."""
    multiple = pad_to * tp_size
    return -(-rows // multiple) * multiple
