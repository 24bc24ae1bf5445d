"""A tokenizer of bytes with a BOS token."""

from __future__ import annotations

import json
from pathlib import Path

from petatron.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer

BOS = 257


def bos_tokenizer(folder: Path, *, puts_it: bool = True) -> HuggingFaceTokenizer:
    """Its tokenizer puts BOS before every text, or only names it."""
    content = json.loads(ByteTokenizer().files()["tokenizer.json"])
    content["added_tokens"].append({**content["added_tokens"][0], "id": BOS, "content": "<s>"})
    if puts_it:
        special = {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}}
        single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": pair,
            "special_tokens": special,
        }
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "bos_token": "<s>",
        "chat_template": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return HuggingFaceTokenizer(folder)
