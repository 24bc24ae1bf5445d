"""The MultimodalTokenizer: images in texts, and conversations whose ids and masks are those of transformers and of Megatron's rule."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from petatron.base.errors import DataError, PetatronError
from petatron.cli.main import main
from petatron.config.schema.data import TokenizerConfig
from petatron.data.bpe.train_bpe import train_bpe
from petatron.data.multimodal.multimodal_tokenizer import MultimodalOptions, MultimodalTokenizer
from petatron.data.multimodal.prompt_formats import PROMPT_FORMATS
from petatron.data.prompt.chat_template import tokenizer_chat_template
from petatron.data.tokenizer import (
    ByteTokenizer,
    NullTokenizer,
    Tokenizer,
    build_tokenizer,
    folder_tokenizer,
    vocabulary_json,
)
from petatron.validate import load_config
from tests.unit.data.vocabularies import (
    LINES,
    piece_model,
    random_texts,
    trained_tokens,
    write_bert_vocabulary,
    write_vocabulary,
)

MARKS = (
    *("<s>", "</s>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|end_of_text|>"),
)
# Of the published tokenizers (without the date and the tools of later ones), and Megatron's for Mistral.
_IM = "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
_GENERATE = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_CHATML = f"{{% for message in messages %}}{_IM}{{% endfor %}}{_GENERATE}"
_DEFAULT = (
    "{%% for message in messages %%}{%% if loop.first and messages[0]['role'] != 'system' %%}"
    "{{ '<|im_start|>system\n%s<|im_end|>\n' }}{%% endif %%}"
)
_QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
TEMPLATES = {
    "mistral": "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + '[/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ' }}{% endif %}",
    "llama3": "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
    "message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "chatml": _CHATML,
    "nvlm-yi-34b": "{{ bos_token }}" + _CHATML,
    "qwen2p0": _DEFAULT % "You are a helpful assistant." + f"{_IM}{{% endfor %}}{_GENERATE}",
    "qwen2p5": _DEFAULT % _QWEN + f"{_IM}{{% endfor %}}{_GENERATE}",
}
CONVERSATIONS = [
    [
        {"role": "user", "content": "What is in <image> and <image>?"},
        {"role": "assistant", "content": "The item, 東京 🙂"},
    ],
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": " \nread(path)\n"},
        {"role": "assistant", "content": "\n\nopen it\n"},
        {"role": "user", "content": "and  then?"},
        {"role": "assistant", "content": ""},
    ],
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer with the marks of all formats."""
    train_bpe(LINES * 3, 420, tmp_path / "tokenizer.json")
    fast = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    fast.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    fast.save(str(tmp_path / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **roles}))
    return tmp_path


def opened(path: Path, **settings: Any) -> MultimodalTokenizer:
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type="MultimodalTokenizer", tokenizer_model=str(path), **settings)
    )
    assert isinstance(tokenizer, MultimodalTokenizer)
    return tokenizer


def real(folder: Path) -> Any:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder))
    theirs.add_tokens(["<image>"], special_tokens=True)
    return theirs


def ids_of(theirs: Any, messages: list[dict[str, str]], template: str, **arguments: Any) -> list[int]:
    text = theirs.apply_chat_template(messages, tokenize=False, chat_template=template, **arguments)
    return theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", PROMPT_FORMATS)
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_conversation_has_the_ids_of_the_model_s_template(folder: Path, name: str, messages: list[dict[str, str]]):
    ours, theirs = opened(folder, tokenizer_prompt_format=name), real(folder)
    for generates in (False, True):
        encoded = ours.encode_conversation(messages, add_generation_prompt=generates)
        assert encoded.ids == ids_of(theirs, messages, TEMPLATES[name], add_generation_prompt=generates)
        assert len(encoded.is_target) == len(encoded.ids)
        stored = tokenizer_chat_template(ours)
        assert stored is not None
        text = stored.render(messages, add_generation_prompt=generates)
        assert text == theirs.apply_chat_template(
            messages, tokenize=False, chat_template=TEMPLATES[name], add_generation_prompt=generates
        )
    assert encoded.num_images == sum(message["content"].count("<image>") for message in messages)
    assert encoded.ids.count(ours.image_id) == encoded.num_images


PREFIXES = {"mistral": 0, "llama3": 4, "chatml": 3, "nvlm-yi-34b": 3, "qwen2p0": 3, "qwen2p5": 3}


@pytest.mark.parametrize("name", PROMPT_FORMATS)
def test_the_mask_is_megatron_s(folder: Path, name: str):
    """It encodes every message alone; of the assistant's all count but a prefix of so many tokens."""
    ours, theirs = opened(folder, tokenizer_prompt_format=name), real(folder)
    messages = CONVERSATIONS[0]
    template, begins = TEMPLATES[name], TEMPLATES[name].startswith("{{ bos") or name == "llama3"
    if PROMPT_FORMATS[name].default_system is not None:
        messages = [{"role": "system", "content": "Be short."}, *messages]
        template = _CHATML  # as Megatron does, since the published one begins every message with its own
    expected: list[bool] = []

    def length_of(prefix: str) -> int:
        return len(ours.base.encode(f"{prefix}The")) - len(ours.base.encode("The"))

    prefix, headers = (
        length_of("<|im_start|>assistant\n"),
        length_of("<|start_header_id|>assistant<|end_header_id|>\n\n"),
    )
    for number, message in enumerate(messages):
        length = len(ids_of(theirs, [message], template)) - (begins and number > 0)
        is_target = message["role"] == "assistant"
        before = {0: 1 if name == "mistral" else 0, 4: headers, 3: prefix}[PREFIXES[name]] if is_target else 0
        expected += [False] * before + [is_target] * (length - before)
    assert ours.encode_conversation(messages).is_target == expected
    learned = ours.encode_conversation(messages)
    text = ours.decode([id for id, is_target in zip(learned.ids, learned.is_target, strict=True) if is_target])
    assert (
        text.removesuffix("\n").removesuffix("<|im_end|>").removesuffix("<|eot_id|>").removesuffix("</s>").strip()
        == "The item, 東京 🙂"
    )


def test_texts_have_images_and_tags(folder: Path):
    plain = opened(folder)
    base, size = plain.base, plain.base.vocab_size
    assert (plain.image_id, plain.vocab_size, plain.eod, plain.bod) == (size, size + 1, base.eod, base.bod)
    assert plain.encode("<image>The<image>") == [size, *base.encode("The"), size]
    text = "a <image>東"
    for tags, around in (("none", ("", "")), ("nvlm", ("<Image>", "</Image>")), ("internvl", ("<img>", "</img>"))):
        ours = opened(folder, image_tag_type=tags)
        assert ours.decode(ours.encode(text)) == f"a {around[0]}<image>{around[1]}東"
        assert ours.decode_bytes(ours.encode(text)) == f"a {around[0]}<image>{around[1]}東".encode()
        encoded = ours.encode_with_offsets(text)
        assert encoded.ids == ours.encode(text) == ours.encode_batch(["x", text])[1]
        assert [text[start:stop] for start, stop in encoded.spans if stop > start][:3] == ["a", " ", "<image>"]
    tagged = opened(folder, image_tag_type="internvl", special_tokens=("<image>", "<img>", "</img>"))
    assert tagged.encode("<image>") == [size + 1, size, size + 2]
    for given in random_texts(100):
        assert plain.encode(given) == base.encode(given)
        assert plain.encode_with_offsets(given) == base.encode_with_offsets(given)
        assert plain.decode_bytes(plain.encode(given)) == given.encode()


def bases(folder: Path) -> dict[str, Tokenizer]:
    (folder / "x.model").write_bytes(piece_model("llama"))
    (folder / "u.model").write_bytes(piece_model("unigram"))
    ranks, words = write_vocabulary(folder / "v.json", trained_tokens(420)), write_bert_vocabulary(folder / "v.txt")
    configs = {
        "pieces": TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(folder / "x.model")),
        "unigram": TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(folder / "u.model")),
        "ranks": TokenizerConfig(
            tokenizer_type="TikTokenizer", tokenizer_model=str(ranks), tiktoken_num_special_tokens=9
        ),
        "words": TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(words)),
    }
    return {name: build_tokenizer(config) for name, config in configs.items()} | {"bytes": ByteTokenizer()}


@pytest.mark.parametrize("name", ["pieces", "unigram", "ranks", "words", "bytes"])
def test_any_tokenizer_may_be_inside_and_is_saved_with_the_options(tmp_path: Path, name: str):
    base = bases(tmp_path)[name]
    named = "mistral" if "bos" in base.special_ids else None
    options = MultimodalOptions(
        prompt_format=named, image_tag_type="internvl", special_tokens=("<image>", "<|im_end|>")
    )
    ours = MultimodalTokenizer(base, options, vocabulary=vocabulary_json(base))
    saved = tmp_path / "saved"
    saved.mkdir()
    for file, content in ours.files().items():
        (saved / file).write_bytes(content)
    config = folder_tokenizer(saved)
    assert config is not None and config.tokenizer_type == "MultimodalTokenizer"
    again = build_tokenizer(config)
    assert isinstance(again, MultimodalTokenizer) and again.options == options
    assert (again.vocab_size, again.image_id, again.eod) == (ours.vocab_size, base.vocab_size, base.eod)
    for text in ("The item", "a <image>b", "<image>", ""):
        assert again.encode(text) == ours.encode(text)
        assert ours.encode_with_offsets(text).ids == ours.encode(text)
    assert ours.fingerprint.vocabulary == base.fingerprint.vocabulary and ours.fingerprint != base.fingerprint
    if named is not None:
        messages = CONVERSATIONS[0]
        assert again.encode_conversation(messages) == ours.encode_conversation(messages)
        assert ours.encode_conversation(messages).ids[0] == base.special_ids["bos"]


def test_roles_of_padding(folder: Path):
    names = {
        "mistral": "<unk>",
        "llama3": "<|end_of_text|>",
        "chatml": "<pad>",
        "nvlm-yi-34b": "<pad>",
        "qwen2p0": "<|endoftext|>",
    }
    for name, token in names.items():
        ours = opened(folder, tokenizer_prompt_format=name)
        assert ours.pad_id == ours.base.encode(token)[0]
    assert opened(folder).pad_id == opened(folder).special_ids["pad"]


def test_the_system_message_may_be_the_format_s(folder: Path):
    messages = CONVERSATIONS[1]
    forced = opened(folder, tokenizer_prompt_format="qwen2p0", force_system_message=True)
    text = forced.decode(forced.encode_conversation(messages).ids)
    assert (
        text.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user")
        and "Be short" not in text
    )


def test_errors(folder: Path, tmp_path: Path):
    ours = opened(folder, tokenizer_prompt_format="chatml")
    for messages, text in (
        ([], "has no messages"),
        ([{"role": "tool", "content": "x"}], "Message 0 of a conversation has the role 'tool'"),
        ([{"role": "user", "content": 3}], "Message 0 of a conversation has a content that is a int"),
        (
            [CONVERSATIONS[0][0], {"role": "system", "content": "x"}],
            "Message 1 of a conversation is a system message after others",
        ),
        (
            [{"role": "assistant", "content": "a <image>"}],
            "A message of the assistant has <image>: images are not predicted",
        ),
    ):
        with pytest.raises(DataError, match=text):
            ours.encode_conversation(messages)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"A conversation needs a prompt format\. Give --tokenizer-prompt-format"):
        opened(folder).encode_conversation(CONVERSATIONS[0])
    for tokens in ((), ("<x>",), ("<image>", "")):
        with pytest.raises(DataError, match="has no <image>, or an empty token"):
            MultimodalTokenizer(ByteTokenizer(), MultimodalOptions(special_tokens=tokens), vocabulary=b"")
    with pytest.raises(DataError, match=r"needs the tokens of NullTokenizer\(9\), which has none"):
        MultimodalTokenizer(NullTokenizer(9), MultimodalOptions(), vocabulary=vocabulary_json(NullTokenizer(9)))
    plain = ByteTokenizer()
    for name, text in (
        (
            "chatml",
            r"needs the tokens <\|im_start\|> <\|im_end\|>, which ByteTokenizer does not have\. Add them with --special-tokens",
        ),
        (
            "mistral",
            r"needs a token of the role bos, and ByteTokenizer names none\. Name it in the tokenizer_config\.json",
        ),
    ):
        with pytest.raises(DataError, match=text):
            MultimodalTokenizer(plain, MultimodalOptions(prompt_format=name), vocabulary=vocabulary_json(plain))
    added = MultimodalOptions(prompt_format="chatml", special_tokens=("<image>", "<|im_start|>", "<|im_end|>"))
    encoded = MultimodalTokenizer(plain, added, vocabulary=vocabulary_json(plain)).encode_conversation(CONVERSATIONS[0])
    assert encoded.ids[0] == 258
    files = ours.files()
    for stored in (
        {},
        {**json.loads(files["tokenizer_config.json"])["petatron"]["multimodal"], "prompt_format": "other"},
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"petatron": {"multimodal": stored}}))
        with pytest.raises(DataError, match=r"tokenizer_config\.json"):
            folder_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "adds images to another tokenizer, and none is given. Give its --tokenizer-model"),
        (["--tokenizer-model", "x", "--special-tokens", "<x>"], "--special-tokens <x> has no <image>. Name it too"),
        (
            ["--tokenizer-model", "x", "--force-system-message", "--tokenizer-prompt-format", "chatml"],
            "--force-system-message needs a system message, which only the formats qwen2p0 and qwen2p5 have",
        ),
    ],
)
def test_settings_that_do_not_fit(flags: list[str], text: str):
    argv = ["--mock-data", "--lr", "1e-3", "--train-iters", "2", "--tokenizer-type", "MultimodalTokenizer", *flags]
    with pytest.raises(PetatronError) as caught:
        load_config(argv, preset="tiny-llama")
    assert text in str(caught.value)


def test_data_of_the_other_tokenizer_may_be_used(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"{line} <image>"}) + "\n" for line in LINES * 8))
    prefix, model = str(tmp_path / "corpus"), ["--tokenizer-model", str(folder)]
    flags = [
        "--tokenizer-type",
        "MultimodalTokenizer",
        "--tokenizer-prompt-format",
        "chatml",
        "--image-tag-type",
        "internvl",
    ]
    written = ["data", "preprocess", "--input", str(tmp_path / "text.jsonl"), "--output-prefix", prefix, "--append-eod"]
    assert main([*written, *model, *flags]) == 0
    settings = (
        "--seq-length 16 --train-iters 2 --global-batch-size 2 --lr 1e-3 --eval-iters 0 --micro-batch-size 2".split()
    )
    run = ["train", "tiny-llama", *settings, "--data-path", f"{prefix}_text_document", *model]
    with caplog.at_level(logging.WARNING):
        assert main([*run, *flags, "--save", str(tmp_path / "run")]) == 0
    assert main(run) == 1, "the plain tokenizer has no id for images"
