"""SentencePiece's BPE in the tokenizers library, where that gives the same ids for every text.

SentencePiece joins the two neighbors whose union is the piece of the highest score, the leftmost of several, and writes what is no piece
then as bytes, or as the unknown piece, one for a run of it. The tokenizers library ranks pairs instead of pieces; that all pairs of a
piece may be listed, in the order of scores, is shown in `data/bpe/token_ranks.py`.

What has no exact counterpart is left to the sentencepiece library: unigram models (their sums of scores are rounded to float32 there and
to float64 here, so that long texts are divided otherwise), maps of characters (the tokenizers library applies them to graphemes),
symbols of the user, and spaces that are removed or follow their words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer

from petatron.data.pieces.model_file import WORD_BOUNDARY, PieceModel


def inexact_reason(model: PieceModel) -> str | None:
    """Returns why the tokenizers library would not give a model's ids, as what the model has; None if it does."""
    kinds = {piece.kind for piece in model.pieces}
    normal = {piece.text for piece in model.pieces if piece.kind == "normal"}
    joined = [piece.score for piece in model.pieces if piece.kind == "normal" and len(piece.text) > 1]
    byte_names = {piece.text for piece in model.pieces if piece.kind == "byte"}
    reasons = {
        f"the {model.algorithm} algorithm": model.algorithm != "bpe",
        "a map of characters": model.maps_characters,
        "spaces that are removed, not marked, or at the end of words": model.removes_extra_spaces
        or not model.marks_spaces
        or model.marks_ends_of_words,
        "symbols of the user or unused pieces": bool(kinds & {"user", "unused"}),
        "pieces of the same score": len(set(joined)) != len(joined),
        "pieces with characters that are none": any(not normal.issuperset(text) for text in normal),
        "special pieces of one character": any(
            len(piece.text) == 1 for piece in model.pieces if piece.kind != "normal"
        ),
        "not all 256 bytes": model.byte_fallback and byte_names != {_byte_name(byte) for byte in range(256)},
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _byte_name(byte: int) -> str:
    return f"<0x{byte:02X}>"


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

    Without `fast` nothing encodes as the model does, and what is returned says what each id stands for, and no more. `extra_tokens` have
    ids that the model does not have.
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
    """Yields the pairs that make each piece, in the order of the pieces' scores."""
    normal = [piece for piece in model.pieces if piece.kind == "normal"]
    known = {piece.text for piece in normal}
    for piece in sorted(normal, key=lambda piece: -piece.score):
        for cut in range(1, len(piece.text)):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in known and right in known:
                yield left, right
