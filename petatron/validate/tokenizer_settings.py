"""Rules about the settings of a tokenizer, for runs and for `petatron data`. Whether files exist is checked in `preflight.py`."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.schema.data import TokenizerConfig
from petatron.config.schema.fields import flag_name
from petatron.config.schema.sections.tokenizer_options import (
    MULTIMODAL,
    SENTENCEPIECE_TYPES,
    WORDPIECE_TYPES,
    special_token_problem,
)

_MODELS = {
    "HuggingFaceTokenizer": "Give a tokenizer.json or a folder that holds one.",
    "TikTokenizer": "Give the .json or .tiktoken file of a vocabulary.",
    **dict.fromkeys(SENTENCEPIECE_TYPES, "Give the .model file of SentencePiece."),
}
_SPECIAL_TOKENS = "--tokenizer-special-tokens"
_HAVE_SYSTEM_MESSAGES = ("qwen2p0", "qwen2p5")


def check_tokenizer(tokenizer: TokenizerConfig) -> Iterator[Problem]:
    """Yields settings that contradict the tokenizer type, or that it lacks."""
    kind = tokenizer.tokenizer_type
    yield from _unread_files(tokenizer)
    if kind in _MODELS and tokenizer.tokenizer_model is None:
        yield Problem("--tokenizer-type", kind, "needs --tokenizer-model", _MODELS[kind])
    half_given = kind not in WORDPIECE_TYPES and (tokenizer.vocab_file is None) != (tokenizer.merge_file is None)
    if half_given or (kind == "GPT2BPETokenizer" and tokenizer.vocab_file is None):
        missing = "--vocab-file" if tokenizer.vocab_file is None else "--merge-file"
        is_text = missing == "--merge-file" and str(tokenizer.vocab_file).endswith(".txt")
        fix = (
            f"For a vocab.txt of WordPiece, use --tokenizer-type {' or '.join(WORDPIECE_TYPES)}."
            if is_text
            else "Give both."
        )
        yield Problem(missing, "", "is not set, and GPT-2 BPE needs --vocab-file and --merge-file", fix)
    if kind == "TikTokenizer":
        wrong = special_token_problem(tokenizer.tokenizer_special_tokens, tokenizer.tiktoken_num_special_tokens)
        if wrong is not None:
            yield Problem(_SPECIAL_TOKENS, " ".join(tokenizer.tokenizer_special_tokens), *wrong)
    elif kind in SENTENCEPIECE_TYPES:
        yield from _pieces(tokenizer)
    elif kind in WORDPIECE_TYPES:
        yield from _word_pieces(tokenizer, kind)
    elif kind == MULTIMODAL:
        yield from _multimodal(tokenizer)
    elif kind in ("HuggingFaceTokenizer", "GPT2BPETokenizer") and tokenizer.tokenizer_special_tokens:
        rule = f"names tokens that a {kind} has in its own files"
        yield Problem(
            _SPECIAL_TOKENS, " ".join(tokenizer.tokenizer_special_tokens), rule, "Add them to tokenizer.json."
        )


def _unread_files(tokenizer: TokenizerConfig) -> Iterator[Problem]:
    """Yields files given for a tokenizer type that reads none: the user must want another tokenizer."""
    if tokenizer.tokenizer_type not in ("ByteTokenizer", "NullTokenizer"):
        return
    pair = None not in (tokenizer.vocab_file, tokenizer.merge_file)  # a single one has its own rule
    for name in ("tokenizer_model", *(("vocab_file", "merge_file") if pair else ())):
        if (path := getattr(tokenizer, name)) is not None:
            rule = f"contradicts --tokenizer-type {tokenizer.tokenizer_type}, which reads no file"
            yield Problem(flag_name(name), path, rule, "Leave one of the two out.")


def _pieces(tokenizer: TokenizerConfig) -> Iterator[Problem]:
    named, extra_ids = tokenizer.tokenizer_special_tokens, tokenizer.vocab_extra_ids
    if named and not tokenizer.tokenizer_sentencepiece_legacy:
        rule = "are found in texts with --tokenizer-sentencepiece-legacy alone"
        yield Problem(_SPECIAL_TOKENS, " ".join(named), rule, "Add it, or leave them out.")
    if named and extra_ids:
        rule = f"has special tokens of its own, which {_SPECIAL_TOKENS} would replace"
        yield Problem("--vocab-extra-ids", str(extra_ids), rule, "Leave one of the two out.")
    if not tokenizer.tokenizer_sentencepiece_ignore_extra_whitespaces and (named or extra_ids):
        rule = f"is for plain text, without {_SPECIAL_TOKENS if named else '--vocab-extra-ids'}"
        fix = "Leave one of the two out."
        yield Problem("--no-tokenizer-sentencepiece-ignore-extra-whitespaces", "", rule, fix)


def _multimodal(tokenizer: TokenizerConfig) -> Iterator[Problem]:
    if tokenizer.tokenizer_model is None and tokenizer.vocab_file is None:
        fix = "Give its --tokenizer-model, or --vocab-file and --merge-file."
        yield Problem("--tokenizer-type", MULTIMODAL, "adds images to another tokenizer, and none is given", fix)
    if "<image>" not in tokenizer.special_tokens:
        yield Problem("--special-tokens", " ".join(tokenizer.special_tokens), "has no <image>", "Name it too.")
    if tokenizer.force_system_message and tokenizer.tokenizer_prompt_format not in _HAVE_SYSTEM_MESSAGES:
        rule = f"needs a system message, which only the formats {' and '.join(_HAVE_SYSTEM_MESSAGES)} have"
        yield Problem("--force-system-message", "", rule, "Leave it out, or choose one with --tokenizer-prompt-format.")


def _word_pieces(tokenizer: TokenizerConfig, kind: str) -> Iterator[Problem]:
    if tokenizer.vocab_file is None:
        yield Problem("--tokenizer-type", kind, "needs --vocab-file", "Give the vocab.txt of a BERT model.")
    for name in ("tokenizer_model", "merge_file"):
        if (path := getattr(tokenizer, name)) is not None:
            rule = f"is no file of a {kind}, which reads a vocab.txt alone"
            yield Problem(flag_name(name), path, rule, "Leave it out, and give --vocab-file.")
