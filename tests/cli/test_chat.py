"""`petatron chat`: a dialogue keeps its history, obeys its commands, and Ctrl-C stops an answer alone."""

from __future__ import annotations

import io
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from petatron.base.errors import DataError
from petatron.cli.main import main
from petatron.data.prompt.chat_template import ChatTemplate, tokenizer_chat_template
from petatron.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from petatron.infer.engine import Engine
from tests.cli.text_model import train_text_model

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_text_model(tmp_path_factory.mktemp("chat") / "run") / "step-00000001" / "model"


@pytest.fixture
def chat_model(base_model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "chat"
    shutil.copytree(base_model, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return folder


class Session:
    """Runs the subcommand with typed lines, and records the text of every prompt and the answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys
        self.prompts: list[str] = []
        submit = Engine.submit
        tokenizer = ByteTokenizer()

        def record(engine: Engine, ids: list[int], params: Any) -> int:
            self.prompts.append("".join(END if id == 256 else tokenizer.decode([id]) for id in ids))
            return submit(engine, ids, params)

        monkeypatch.setattr(Engine, "submit", record)

    def run(self, folder: Path, typed: str, *words: str) -> str:
        self.capsys.readouterr()
        self.monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        assert main(["chat", str(folder), "--regex", "[a-z]{3}", *words]) == 0
        return self.capsys.readouterr().out


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Session:
    return Session(monkeypatch, capsys)


def test_a_dialogue_through_the_template(session: Session, chat_model: Path):
    said = session.run(chat_model, "hi\n\nbye\n/reset\nnew\n/quit\nnever\n", "--system", "be kind")
    assert "plain dialogue" not in said and "(forgotten)" in said
    start = f"<system>be kind{END}\n<user>hi{END}\n"
    first, second, third = session.prompts
    assert first == f"{start}<a>"
    assert second.startswith(f"{start}<assistant>") and second.endswith(f"{END}\n<user>bye{END}\n<a>")
    answer = second.removeprefix(f"{start}<assistant>")[:3]
    assert answer.isalpha() and f"> {answer}\n" in said
    assert third == f"<system>be kind{END}\n<user>new{END}\n<a>"


def test_the_system_message_can_be_changed(session: Session, chat_model: Path):
    session.run(chat_model, "one\n/system be brief\ntwo\n/system\nthree\n")
    ends = [f"<user>{word}{END}\n<a>" for word in ("one", "two", "three")]
    assert session.prompts == [ends[0], f"<system>be brief{END}\n{ends[1]}", ends[2]]


def test_a_base_model_gets_a_plain_dialogue_and_says_so(session: Session, base_model: Path):
    said = session.run(base_model, "hi\nso\n/what\n")
    assert "no chat template: this is a plain dialogue" in said
    assert session.prompts[0] == "User: hi\nAssistant:"
    assert session.prompts[1].startswith("User: hi\nAssistant: ") and session.prompts[1].endswith(
        "\nUser: so\nAssistant:"
    )
    assert "/what is not a command" in said and "/reset" in said


def test_old_messages_are_dropped_when_the_context_is_full(session: Session, base_model: Path):
    said = session.run(base_model, "a" * 30 + "\n" + "b" * 30 + "\n" + "c" * 300 + "\nd\n")
    assert "the first 2 messages no longer fit" in said and "aaa" not in session.prompts[1]
    assert "(The prompt has" in said, "what can never fit is refused, and the dialogue goes on"
    assert session.prompts[-1].endswith("User: d\nAssistant:") and "ccc" not in session.prompts[-1]


def test_interrupts_stop_the_answer_and_not_the_program(
    session: Session, base_model: Path, monkeypatch: pytest.MonkeyPatch
):
    steps: list[int] = []
    step = Engine.step

    def interrupted(engine: Engine) -> Any:
        steps.append(1)
        if len(steps) == 4:
            signal.raise_signal(signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    said = session.run(base_model, "hi\nagain\n", "--regex", "[a-z]{40}")
    first, second = [line.removeprefix("> ") for line in said.splitlines()[2:4]]
    assert first.endswith(" (stopped)") and 3 <= len(first.removesuffix(" (stopped)")) <= 5
    assert len(second) == 40
    assert session.prompts[1].startswith(f"User: hi\nAssistant: {first.removesuffix(' (stopped)')}\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_at_the_prompt_drops_the_line(session: Session, base_model: Path, monkeypatch: pytest.MonkeyPatch):
    answers = iter([KeyboardInterrupt(), EOFError()])

    def typed(_: str) -> str:
        raise next(answers)

    monkeypatch.setattr("builtins.input", typed)
    assert "/quit or Ctrl-D leaves" in session.run(base_model, "")


def test_a_template_of_the_users(
    session: Session, base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "mine.jinja"
    file.write_text("[{{ messages[-1].content }}]")
    assert "plain" not in session.run(base_model, "hi\n", "--chat-template", str(file))
    assert session.prompts == ["[hi]"]
    assert main(["chat", str(base_model), "--chat-template", str(tmp_path / "none")]) == 2
    assert "--chat-template" in capsys.readouterr().err
    file.write_text("{{ raise_exception('only two may talk') }}")
    assert "refuses these messages: only two may talk" in session.run(base_model, "hi\n", "--chat-template", str(file))


def test_templates_are_read_where_tokenizers_have_them(base_model: Path, tmp_path: Path):
    assert tokenizer_chat_template(ByteTokenizer()) is None
    shutil.copytree(base_model, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages | tojson }}")
    template = tokenizer_chat_template(HuggingFaceTokenizer(tmp_path / "m"))
    assert template is not None and template.render([{"role": "user", "content": "<é>"}]) == (
        '[{"role": "user", "content": "<é>"}]'
    )


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% include 'x' %}"])
def test_a_template_cannot_leave_its_sandbox(source: str):
    with pytest.raises(DataError, match="refuses"):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_a_broken_template_is_refused():
    with pytest.raises(DataError, match="cannot be read"):
        ChatTemplate("{% for %}")
