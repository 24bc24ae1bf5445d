"""A small byte-level tokenizer with the special tokens of every family, as a folder that transformers and we open."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from petatron.data.tokenizer import HuggingFaceTokenizer

SPECIAL = (
    *(
        "<s>",
        "</s>",
        "<unk>",
        "<pad>",
        "<image>",
        "<|image_pad|>",
        "<|video_pad|>",
        "<|vision_start|>",
        "<|vision_end|>",
    ),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<end_of_utterance>", "<fake_token_around_image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
_TEXTS = [
    "a red circle left of a blue square",
    "USER: what is this? ASSISTANT: it is a dog",
    "User: Assistant: system user",
]


def write_tokenizer(folder: Path, *, metaspace: bool = False) -> Path:
    """Writes it, and returns its folder; `metaspace`: a space before the first word, as Llama's tokenizer puts it."""
    fast = FastTokenizer(models.BPE(unk_token="<unk>" if metaspace else None))
    if metaspace:
        fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        fast.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    else:
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
    alphabet = [] if metaspace else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator(_TEXTS * 3, trainer)
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def token_id(tokenizer: HuggingFaceTokenizer, token: str) -> int:
    (number,) = tokenizer.encode(token)
    return number
