"""`petatron train MODEL --sft FILE`: what follows from the data, what is saved, and what is wrong with records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import petatron
from petatron.base.errors import ConfigError
from petatron.cli.main import main
from petatron.cli.train import with_preset
from petatron.config import RunConfig
from petatron.data.build_datasets import chosen_kind
from petatron.data.conversations.conversations_kind import ConversationsKind
from petatron.data.prompt.prompt_encoder import PromptEncoder
from petatron.data.tokenizer import HuggingFaceTokenizer
from petatron.serve.open_engine import model_settings
from petatron.validate import load_config
from tests.cli.text_model import train_text_model
from tests.unit.data.conversations.chat_tokenizers import answer, save_tokenizer, user

QUIET = "--live off --num-workers 0 --device cpu --lr 2e-2 --log-interval 100".split()
LETTERS = "abcdefgh"


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_text_model(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "chats.jsonl", *({"messages": [user(letter), answer("yes")]} for letter in LETTERS * 10))


def test_one_command_answers_as_the_conversations_do(base: Path, chats: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", str(base), "--sft", "chats.jsonl", "--train-epochs", "3", *QUIET]) == 0
    streams = capsys.readouterr()
    said = streams.out + streams.err
    for text in (
        "--seq-length 96: the model reads as many",
        "3 epochs of",
        "--full-validation True",
        "defaults of --sft: --weight",
    ):
        assert text in said
    assert (
        "--save runs/base-sft: a folder that is free" in said
        and "conversations are written by the built-in one, plain" in said
    )
    assert said.rstrip().count("=>  yes") >= 3, "samples of held-out prompts"
    folder = Path("runs/base-sft")
    model = HuggingFaceTokenizer(next(folder.glob("step-*")) / "model")
    assert PromptEncoder(model).has_template
    prompts = [json.loads(line) for line in (folder / "sample-prompts.jsonl").read_text().splitlines()]
    assert len(prompts) == 3 and all([m["role"] for m in prompt["messages"]] == ["user"] for prompt in prompts)
    capsys.readouterr()
    assert main(["train", str(folder / "config.yaml"), "--load", str(folder)]) == 0
    assert "nothing left to train" in capsys.readouterr().out
    assert main(["train", str(base), "--sft", "chats.jsonl", "--train-iters", "1", "--save", "other", *QUIET]) == 0
    assert "derived from the data" not in capsys.readouterr().out, "its length is given"


def test_a_template_of_a_file_is_saved_with_the_model(base: Path, chats: Path):
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    write(Path("chat.jinja"), template)
    flags = [
        "--chat-template",
        "chat.jinja",
        "--save",
        "runs/a",
        "--train-iters",
        "1",
        "--eval-iters",
        "0",
        "--seq-length",
        "64",
    ]
    assert main(["train", str(base), "--sft", "chats.jsonl", *flags, *QUIET]) == 0
    model = Path("runs/a/step-00000001/model")
    assert (model / "chat_template.jinja").read_text() == template
    assert (
        HuggingFaceTokenizer(model).decode(PromptEncoder(HuggingFaceTokenizer(model)).encode_messages([user("x")]))
        == "[user]x;[assistant]"
    )


def test_a_template_that_cannot_be_read_is_named(base: Path, chats: Path, capsys: pytest.CaptureFixture[str]):
    flags = ["--train-iters", "1", "--save", "runs/a", *QUIET]
    assert main(["train", str(base), "--sft", "chats.jsonl", "--chat-template", "gone.jinja", *flags]) == 2
    assert "--chat-template gone.jinja does not exist" in capsys.readouterr().err
    write(Path("bad.jinja"), "{% for %}")
    assert main(["train", str(base), "--sft", "chats.jsonl", "--chat-template", "bad.jinja", *flags]) == 1
    assert "--chat-template bad.jinja: The chat template cannot be read" in capsys.readouterr().err


def config_of(*flags: str) -> RunConfig:
    shape = (
        "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 64 --train-iters 2 --device cpu".split()
    )
    return load_config([*shape, *flags]).config


def kind_of(config: RunConfig) -> ConversationsKind:
    kind = chosen_kind(config)
    assert isinstance(kind, ConversationsKind)
    return kind


def test_prompt_formats_of_megatron(tmp_path: Path):
    save_tokenizer(tmp_path, None)
    files = [
        "--sft",
        "--data-path",
        "chats.jsonl",
        "--tokenizer-type",
        "SFTTokenizer",
        "--tokenizer-model",
        str(tmp_path),
    ]
    config = config_of(*files)
    assert config.tokenizer.tokenizer_type == "HuggingFaceTokenizer" and config.data.data_path == ("chats.jsonl",)
    assert config.data.chat_template == "nemotron-h-aligned" and kind_of(config).train_on == "answers"
    config = config_of(*files, "--sft-tokenizer-prompt-format", "nemotron-nano-v2")
    assert config.data.chat_template == "nemotron-nano-v2"
    for name, template in (("identity", "identity"), ("default", None)):
        config = config_of(*files, "--sft-tokenizer-prompt-format", name)
        assert config.data.chat_template == template and kind_of(config).train_on == "all", "as Megatron masks nothing"


def test_a_run_in_python_derives_the_same(base: Path, chats: Path):
    run = petatron.load(flags=["--from", str(base), "--sft", "chats.jsonl", "--train-epochs", "2", "--device", "cpu"])
    assert run.config.model.seq_length == 96 and run.config.train.full_validation
    assert any(f"--train-iters {run.config.train.train_iters}: 2 epochs of" in notice for notice in run.notices)
    losses = [metrics["lm_loss"] for metrics in run.train(steps=1)]
    assert losses or run.config.log.log_interval > 1
    with pytest.raises(ConfigError, match="--micro-batch-size"):
        petatron.load(flags=["--from", str(base), "--sft", "chats.jsonl", "--micro-batch-size", "0"])


def test_files_of_the_flag_are_the_training_data():
    config = config_of("--vocab-size", "64", "--sft", "0.3", "a.jsonl", "0.7", "b.jsonl", "--lr-warmup-iters", "1")
    assert config.data.data_path == ("0.3", "a.jsonl", "0.7", "b.jsonl") and config.data.split == "95,5,0"
    assert config.optim.lr == 1e-5 and config.schedule.lr_warmup_fraction is None
    config = config_of("--vocab-size", "64", "--sft=a.jsonl", "--valid-data-path", "b.jsonl", "--lr", "1")
    assert config.data.train_data_path == ("a.jsonl",) and not config.data.data_path and config.optim.lr == 1


@pytest.mark.parametrize(("adapter", "lr"), [("lora", 2e-4), ("rslora", 1e-4), ("dora", 2e-4), ("ia3", 3e-3)])
def test_adapters_have_a_learning_rate_of_their_own(adapter: str, lr: float):
    flags = ["--vocab-size", "64", "--sft", "a.jsonl", "--adapter", adapter]
    loaded = load_config(flags, preset="tiny-llama", require_training=False)
    assert loaded.config.optim.lr == lr
    assert any(f"--lr {lr} with --adapter {adapter}" in notice for notice in loaded.notices)
    assert config_of(*flags, "--lr", "1e-3").optim.lr == 1e-3


def test_a_first_word_may_be_a_model(tmp_path: Path):
    assert with_preset([str(tmp_path), "--sft"]) == ["--from", str(tmp_path), "--sft"]
    assert with_preset(["Org/Model-1.5B", "--sft"]) == ["--from", "Org/Model-1.5B", "--sft"]
    assert with_preset(["tiny-llama"]) == ["--preset", "tiny-llama"] and with_preset(["a.yaml"]) == [
        "--config",
        "a.yaml",
    ]


def test_records_of_another_form_end_the_run_or_are_counted(
    base: Path, chats: Path, capsys: pytest.CaptureFixture[str]
):
    wrong = write(
        Path("wrong.jsonl"), *chats.read_text().splitlines(keepends=True), {"messages": [user("a")]}, {"text": 3}
    )
    flags = ["train", str(base), "--sft", str(wrong), "--seq-length", "64", "--save", "runs/b", *QUIET]
    assert main(flags) == 1
    said = capsys.readouterr().err
    assert (
        "wrong.jsonl, line 81: has nothing that is learned" in said
        and "wrong.jsonl, line 82: has neither 'messages'" in said
    )
    assert "on_error=skip" in said
    assert main([*flags, "--dataset-settings", "on_error=skip", "--train-iters", "1"]) == 0
    streams = capsys.readouterr()
    assert "2 records of 82 left out (1 nothing to learn, 1 wrong form; the first:" in streams.out + streams.err


def test_a_run_of_other_tokenizer_files_is_used_with_its_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its settings name the files that it was made of, which have no template; the model's own folder has one."""
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / "tokenizer", None, eos="<|endoftext|>")
    write(tmp_path / "chats.jsonl", *({"messages": [user(letter), answer("yes")]} for letter in LETTERS))
    shape = (
        "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 64 --position-embedding-type rope".split()
    )
    files = [
        "--tokenizer-model",
        "tokenizer",
        "--sft",
        "chats.jsonl",
        "--save",
        "runs/a",
        "--train-iters",
        "1",
        "--eval-iters",
        "0",
    ]
    assert main(["train", *shape, *files, *QUIET]) == 0
    settings = model_settings(tmp_path / "runs/a")
    encoder = PromptEncoder(settings.required_tokenizer())
    assert encoder.has_template
    end = settings.required_tokenizer().encode("<|im_end|>")[0]
    assert end in settings.stop_ids, "a base model's end of text is another token"
    write(tmp_path / "other.jinja", "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    assert (
        main(
            [
                "train",
                "runs/a",
                "--sft",
                "chats.jsonl",
                "--chat-template",
                "other.jinja",
                "--save",
                "runs/b",
                *files[6:],
                *QUIET,
            ]
        )
        == 0
    )
    assert main(["train", "runs/b", "--sft", "chats.jsonl", "--save", "runs/c", *files[6:], *QUIET]) == 0
    assert (
        (next(Path("runs/c").glob("step-*")) / "model/chat_template.jinja")
        .read_text()
        .startswith("{% for m in messages %}{{ m.content }}")
    )
