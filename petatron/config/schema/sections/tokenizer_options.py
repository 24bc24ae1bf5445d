"""The settings of tokenizers of tiktoken's vocabularies, SentencePiece's models and WordPiece's, and the type that files imply."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from petatron.config.schema.numeric_bounds import SmallCount
from petatron.config.schema.setting_metadata import Feature, UsedWhen, settings_section

TokenizerType = Literal[
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "TikTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "ByteTokenizer",
    "NullTokenizer",
    "MultimodalTokenizer",
]
SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
"""Megatron's three names for a tokenizer of a SentencePiece model."""
WORDPIECE_TYPES = ("BertWordPieceLowerCase", "BertWordPieceCase")
"""Megatron's names for the tokenizers of BERT's vocab.txt."""
DEFAULT_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
"""The first special tokens of a TikTokenizer; Megatron's, which a list of one's own must contain."""
DEFAULT_NUM_SPECIAL_TOKENS = 1000
DEFAULT_TIKTOKEN_SIZE = 1 << 17
"""The most ids of a TikTokenizer where no size is given; the rest of a longer vocabulary is cut."""
MULTIMODAL = "MultimodalTokenizer"
"""Megatron's name for another tokenizer with an image token and conversations."""
_MULTIMODAL = UsedWhen(lambda run: run.tokenizer.tokenizer_type == MULTIMODAL, "only the MultimodalTokenizer reads it")
_TIKTOKEN = UsedWhen(
    lambda run: run.tokenizer.tokenizer_type == "TikTokenizer", "no other tokenizer than tiktoken's reads it"
)
_NAMED = UsedWhen(
    lambda run: run.tokenizer.tokenizer_type in ("TikTokenizer", *SENTENCEPIECE_TYPES, *WORDPIECE_TYPES),
    "only tokenizers of tiktoken, SentencePiece and WordPiece read it",
)
_PIECES = UsedWhen(
    lambda run: run.tokenizer.tokenizer_type in SENTENCEPIECE_TYPES, "no other tokenizer than SentencePiece's reads it"
)
_SENTINELS = UsedWhen(
    lambda run: run.tokenizer.tokenizer_type in ("SentencePieceTokenizer", *WORDPIECE_TYPES),
    "only SentencePieceTokenizer and WordPiece's tokenizers read it",
)
_WORDPIECE = UsedWhen(
    lambda run: run.tokenizer.tokenizer_type in WORDPIECE_TYPES,
    "only WordPiece's tokenizers exist in two implementations",
)


@settings_section
class TikTokenSettings:
    """The TikTokenizer."""

    feature: ClassVar = Feature("tokenizer", (_TIKTOKEN,), role="runtime")
    tiktoken_pattern: Literal["v1", "v2"] | None = None
    """How a TikTokenizer divides text into words: v2 also before a capital letter after small ones. Unset means v2."""
    tiktoken_num_special_tokens: Annotated[SmallCount, "at least 1"] | None = None
    """Ids that a TikTokenizer reserves in front of its vocabulary. Unset means 1000."""


@settings_section
class SpecialTokenSettings:
    """Special tokens that are named by settings."""

    feature: ClassVar = Feature("tokenizer", (_NAMED,), role="runtime")
    tokenizer_special_tokens: tuple[str, ...] = ()
    """The first special tokens of a TikTokenizer, by default `<unk> <s> </s> <mask> <pad> <cls> <sep>`, which others must contain; of
    SentencePiece, those that `--tokenizer-sentencepiece-legacy` finds; of WordPiece, those beside BERT's own."""


@settings_section
class SentencePieceSettings:
    """Tokenizers of SentencePiece."""

    feature: ClassVar = Feature("tokenizer", (_PIECES,), role="runtime")
    tokenizer_sentencepiece_legacy: bool = False
    """Find `--tokenizer-special-tokens` in a text before the rest is divided into pieces."""
    tokenizer_sentencepiece_ignore_extra_whitespaces: bool = True
    """Spaces that the SentencePiece model joins are joined; turned off, they have ids all the same."""


@settings_section
class SentinelSettings:
    """Special tokens that take the place of spans of text (T5)."""

    feature: ClassVar = Feature("tokenizer", (_SENTINELS,), role="runtime")
    vocab_extra_ids: Annotated[SmallCount, "at least 0"] | None = None
    """Sentinels `<extra_id_0>` ... after the vocabulary of WordPiece, or after SentencePieceTokenizer's pieces, behind `<CLS>`, `<SEP>`,
    `<EOD>` and `<MASK>`."""


@settings_section
class WordPieceSettings:
    """Tokenizers of WordPiece."""

    feature: ClassVar = Feature("tokenizer", (_WORDPIECE,), role="runtime")
    tokenizer_hf_no_use_fast: bool = False
    """WordPiece: divide texts into words as BERT's tokenizer in Python does; the tokenizers library differs in rare characters."""


@settings_section
class MultimodalTokenizerSettings:
    """The MultimodalTokenizer."""

    feature: ClassVar = Feature("tokenizer", (_MULTIMODAL,), role="runtime")
    tokenizer_prompt_format: Literal["mistral", "llama3", "chatml", "nvlm-yi-34b", "qwen2p0", "qwen2p5"] | None = None
    """How a conversation becomes text, by the language model that it was made for. Unset: texts alone."""
    image_tag_type: Literal["none", "nvlm", "internvl"] = "none"
    """Tags around an image token: `<Image>` of nvlm, `<img>` of internvl."""
    special_tokens: tuple[str, ...] = ("<image>",)
    """Tokens that a MultimodalTokenizer adds to the vocabulary of the other tokenizer, if it does not have them: `<image>`, and others."""
    force_system_message: bool = False
    """Replace the system message of a conversation by that of the prompt format."""


@settings_section
class TokenizerOptions(
    TikTokenSettings,
    SpecialTokenSettings,
    SentencePieceSettings,
    SentinelSettings,
    WordPieceSettings,
    MultimodalTokenizerSettings,
):
    """What a tokenizer needs to know besides its files."""


def special_token_problem(named: Sequence[str], count: int | None) -> tuple[str, str] | None:
    """Returns the rule that special tokens of a TikTokenizer break and how to keep it; None if they break none.

    Both may be unset. Letters beyond ASCII are refused since readers of tokenizer.json take some of them for bytes.

    >>> special_token_problem((*DEFAULT_SPECIAL_TOKENS, "<fim>"), 7)
    ('are 8, and --tiktoken-num-special-tokens 7 are reserved', 'Reserve 8 or more, or name fewer.')
    """
    named = named or DEFAULT_SPECIAL_TOKENS
    count = DEFAULT_NUM_SPECIAL_TOKENS if count is None else count
    if len(named) > count:
        rule = f"are {len(named)}, and --tiktoken-num-special-tokens {count} are reserved"
        return rule, f"Reserve {len(named)} or more, or name fewer."
    if missing := [name for name in DEFAULT_SPECIAL_TOKENS if name not in named]:
        return f"have no {' '.join(missing)}", f"Name all of {' '.join(DEFAULT_SPECIAL_TOKENS)}, and then others."
    fillers = {f"<SPECIAL_{number}>" for number in range(len(named), count)}
    if len(set(named) - fillers) < len(named):
        return "name a token twice", f"Name each once; those from <SPECIAL_{len(named)}> on have their names already."
    if unclear := [name for name in named if not name or not name.isascii()]:
        return f"name {unclear[0]!r}, which is empty or not ASCII", "Use another name."
    return None


def infer_tokenizer_type(
    *, tokenizer_model: object, vocab_file: object, merge_file: object, tiktoken_pattern: object
) -> tuple[TokenizerType, str] | None:
    """Returns the type of tokenizer that its files imply, and why; None without files.

    >>> names = dict.fromkeys(("vocab_file", "merge_file", "tiktoken_pattern"))
    >>> infer_tokenizer_type(tokenizer_model="a/llama.model", **names)
    ('SentencePieceTokenizer', '--tokenizer-model is a .model')
    """
    if tokenizer_model is not None:
        ending = Path(str(tokenizer_model)).suffix
        if ending == ".model":
            return "SentencePieceTokenizer", "--tokenizer-model is a .model"
        if tiktoken_pattern is not None or ending == ".tiktoken":
            why = "--tokenizer-model is a .tiktoken" if tiktoken_pattern is None else "--tiktoken-pattern is set"
            return "TikTokenizer", why
        return "HuggingFaceTokenizer", "--tokenizer-model is set"
    if vocab_file is not None and merge_file is not None:
        return "GPT2BPETokenizer", "--vocab-file and --merge-file are set"
    return None
