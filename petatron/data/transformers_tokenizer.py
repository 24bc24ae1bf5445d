"""Whether transformers opens the tokenizer of a model folder as it is here."""

from __future__ import annotations

from petatron.data.multimodal.multimodal_tokenizer import MultimodalTokenizer
from petatron.data.sentencepiece_tokenizer import MODEL_FILE, SentencePieceTokenizer
from petatron.data.tokenizer import Tokenizer
from petatron.data.wordpiece_tokenizer import WordPieceTokenizer


def missing_for_transformers(tokenizer: Tokenizer) -> str | None:
    """Returns what a model folder with this tokenizer lacks; None if transformers opens it, or if it has no text at all."""
    tokenizer = tokenizer.base if isinstance(tokenizer, MultimodalTokenizer) else tokenizer
    if isinstance(tokenizer, WordPieceTokenizer) and tokenizer.splits_in_python:
        return f"transformers divides texts into words in its own way, and gives rare characters other ids than {tokenizer.name} here"
    if not isinstance(tokenizer, SentencePieceTokenizer) or tokenizer.has_exact_json:
        return None
    return (
        f"the tokenizer is kept as {MODEL_FILE}, which Petatron opens: no tokenizer.json gives its ids for every text, so that "
        "transformers finds a model without a tokenizer"
    )
