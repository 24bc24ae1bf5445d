"""A small tokenizer with the special tokens of several families, and templates that are difficult as published ones are."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from petatron.data.tokenizer import HuggingFaceTokenizer

PUBLISHED = Path(trl.__file__).parent / "chat_templates"
TEXT = ["hello world how are you the weather is fine today assistant user system tool answer", "aé 漢字 ok"]
SPECIAL = (
    "<|im_start|> <|im_end|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|user|> <|assistant|> <|system|> <|end|> "
    "<|endoftext|> <start_of_turn> <end_of_turn> <bos> <eos> <|observation|> [gMASK] <sop> <｜User｜> <｜Assistant｜> "
    "<｜end▁of▁sentence｜> <｜tool▁calls▁begin｜> [INST] [/INST] </s>"
).split()
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
FAMILIES = {
    "qwen3": ("<|endoftext|>", "<|im_end|>"),
    "qwen2_5": ("<|endoftext|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "gemma": ("<bos>", "<eos>"),
    "gemma3": ("<bos>", "<eos>"),
    "phi3": ("<|endoftext|>", "<|endoftext|>"),
    "phi3_5": ("<|endoftext|>", "<|endoftext|>"),
    "glm4moe": ("<|endoftext|>", "<|endoftext|>"),
    "deepseekv3": ("<bos>", "<｜end▁of▁sentence｜>"),
}


@cache
def vocabulary() -> str:
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    fast.train_from_iterator(TEXT, trainer)
    fast.add_special_tokens(SPECIAL)
    fast.add_tokens(MARKERS)
    return fast.to_str()


def save_tokenizer(
    folder: Path, template: str | None, *, bos: str = "<|endoftext|>", eos: str = "<|im_end|>"
) -> PreTrainedTokenizerFast:
    """Saves the tokenizer with a chat template, and returns it as transformers has it."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(vocabulary()), bos_token=bos, eos_token=eos, pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def published(folder: Path, family: str) -> tuple[PreTrainedTokenizerFast, HuggingFaceTokenizer]:
    bos, eos = FAMILIES[family]
    theirs = save_tokenizer(folder, (PUBLISHED / f"{family}.jinja").read_text(), bos=bos, eos=eos)
    return theirs, HuggingFaceTokenizer(folder)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


CHATS = {
    "two turns": [user("hello"), answer("how are you"), user("fine, you?"), answer("the weather is fine today")],
    "reasoning": [
        {"role": "system", "content": "be good"},
        user("hello"),
        answer("<think>\nhm\n</think>\n\nhow are you"),
        user("fine"),
        answer("<think>\nok\n</think>\n\ntoday"),
    ],
    "reasoning parts": [
        user("hello"),
        answer("how are you", reasoning_content="hm"),
        user("fine"),
        answer("today", reasoning_content="ok"),
    ],
    "tools": [
        user("weather?"),
        answer("", tool_calls=[call("get", city="Bern")]),
        {"role": "tool", "content": "fine"},
        answer("it is fine"),
        user("thanks"),
        answer("you are welcome"),
    ],
    "white space": [user(" hello \n"), answer("\n how are you \n"), user("fine"), answer(" <b>today</b> ")],
    "the same twice": [user("hello"), answer("hello"), user("hello"), answer("hello")],
}
