"""SentencePiece's BPE in the tokenizers library, where that gives the same ids for every text.

SentencePiece merges the two neighbors whose concatenation is the piece with the highest score, the leftmost if several are equal.
Characters that remain without a piece become byte pieces, or one unknown id per run of unknown characters. The tokenizers library ranks
pairs instead of pieces; `data/bpe/tiktoken_vocabulary.py` shows why listing all pairs of each piece, in the order of scores, is exact.

Models without an exact counterpart are left to the sentencepiece library: unigram models (the sentencepiece library sums scores in float32
and the tokenizers library in float64, so that long texts may be divided differently), normalization maps (precompiled charsmap; the
tokenizers library applies them to graphemes), user-defined symbols, remove_extra_whitespaces and treat_whitespace_as_suffix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer

from petatron.data.sentencepiece_model.model_file import WORD_BOUNDARY, PieceModel


def inexact_reason(model: PieceModel) -> str | None:
    """Returns the feature of the model that the tokenizers library cannot reproduce; None if it gives the same ids."""
    kinds = {piece.kind for piece in model.pieces}
    normal = {piece.text for piece in model.pieces if piece.kind == "normal"}
    joined = [piece.score for piece in model.pieces if piece.kind == "normal" and len(piece.text) > 1]
    byte_names = {piece.text for piece in model.pieces if piece.kind == "byte"}
    reasons = {
        f"the {model.algorithm} algorithm": model.algorithm != "bpe",
        "a map of characters": model.has_normalization_map,
        "spaces that are removed, not marked, or at the end of words": model.removes_extra_spaces
        or not model.escape_whitespaces
        or model.treat_whitespace_as_suffix,
        "symbols of the user or unused pieces": bool(kinds & {"user", "unused"}),
        "pieces of the same score": len(set(joined)) != len(joined),
        "pieces with characters that are none": any(not normal.issuperset(text) for text in normal),
        "special pieces of one character": any(
            len(piece.text) == 1 for piece in model.pieces if piece.kind != "normal"
        ),
        "not all 256 bytes": model.byte_fallback and byte_names != {f"<0x{byte:02X}>" for byte in range(256)},
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def build_exact_bpe(model: PieceModel) -> FastTokenizer:
    """Returns the same tokenizer in the tokenizers library, for a model without `inexact_reason`."""
    vocabulary = {piece.text: number for number, piece in enumerate(model.pieces)}
    unknown = next(piece.text for piece in model.pieces if piece.kind == "unknown")
    bpe = models.BPE(
        vocab=vocabulary,
        merges=list(_merges(model)),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )
    fast = FastTokenizer(bpe)
    prefix = [normalizers.Prepend(WORD_BOUNDARY)] if model.adds_dummy_prefix else []
    fast.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", WORD_BOUNDARY)])
    fast.decoder = _decoder(model)
    return fast


def vocabulary_as_json(model: PieceModel, fast: FastTokenizer | None, extra_tokens: Mapping[str, int]) -> bytes:
    """Returns a tokenizer.json with a model's ids, whose special tokens are marked as such.

    Without `fast` the JSON maps ids to tokens only; it cannot encode. `extra_tokens` have ids after those of the model's pieces.
    """
    if fast is None:
        ids = {piece.text: number for number, piece in enumerate(model.pieces)} | dict(extra_tokens)
        marked = FastTokenizer(models.BPE(vocab=ids, merges=[], byte_fallback=model.byte_fallback))
        marked.decoder = _decoder(model)
    else:
        marked = FastTokenizer.from_str(fast.to_str())
    special = [piece.text for piece in model.pieces if piece.kind in ("control", "unknown")]
    names = dict.fromkeys([*special, *extra_tokens])
    marked.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return marked.to_str().encode()


def _decoder(model: PieceModel) -> decoders.Decoder:
    strip = [decoders.Strip(" ", 1, 0)] if model.adds_dummy_prefix else []
    return decoders.Sequence([decoders.Replace(WORD_BOUNDARY, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])


def _merges(model: PieceModel) -> Iterator[tuple[str, str]]:
    """Yields the pairs whose concatenation is a piece, in the order of the pieces' scores."""
    normal = [piece for piece in model.pieces if piece.kind == "normal"]
    known = {piece.text for piece in normal}
    for piece in sorted(normal, key=lambda piece: -piece.score):
        for cut in range(1, len(piece.text)):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in known and right in known:
                yield left, right
