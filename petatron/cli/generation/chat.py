"""`petatron chat`: a dialogue in the terminal, through the tokenizer's chat template."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.cli.generation.arguments import (
    OTHER_FLAGS,
    GenerationCommand,
    generate_on_ranks,
    generation_parser,
    read_command,
)
from petatron.cli.subcommands.command_parser import CommandParser
from petatron.cli.subcommands.handled_signals import handled_signal

if TYPE_CHECKING:
    from petatron.data.prompt.chat_template import ChatTemplate
    from petatron.data.prompt.prompt_encoder import PromptEncoder
    from petatron.infer.engine import Engine
    from petatron.infer.sampling_params import SamplingParams
    from petatron.serve.open_engine import ModelSettings, OpenedEngine

_HELP = """  /reset         forget the dialogue
  /system TEXT   start anew with this system message; without a text, with none
  /quit          leave, as Ctrl-D does
Ctrl-C stops an answer."""
_IDLE_STEP_S = 20.0
_ANSWER_SHARE = 4
"""A quarter of the model's positions is kept free for the answer; older messages are dropped to keep it free."""


def parser() -> CommandParser:
    root = generation_parser(
        "chat",
        "[--system TEXT] [flags]",
        "A dialogue with a model in the terminal: {checkpoint}. Messages go through the tokenizer's chat template; a model without "
        "one gets a plain dialogue.",
        epilog=f"In the dialogue:\n{_HELP}\n\n{OTHER_FLAGS}",
        keep_lines=True,
    )
    add = root.add_argument
    add("--system", metavar="TEXT", help="the system message, which comes first")
    add("--chat-template", type=Path, metavar="FILE", help="a template (jinja) in place of the tokenizer's")
    return root


def main(argv: Sequence[str]) -> int:
    return generate_on_ranks("chat", argv, read_command(parser(), argv), _chat, interactive=True)


def _chat(command: GenerationCommand, settings: ModelSettings) -> Callable[[OpenedEngine], None]:
    from petatron.data.prompt.prompt_encoder import PromptEncoder

    encoder = PromptEncoder(settings.required_tokenizer(), template=_given_template(command.options.chat_template))
    return lambda opened: Dialogue(command, opened, encoder).run()


def _given_template(path: Path | None) -> ChatTemplate | None:
    from petatron.data.prompt.chat_template import ChatTemplate

    if path is None:
        return None
    try:
        return ChatTemplate(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("--chat-template", str(path), f"cannot be read: {error}", "Check it.")]) from error


class Dialogue:
    """Reads messages, answers them, and keeps both."""

    def __init__(self, command: GenerationCommand, opened: OpenedEngine, encoder: PromptEncoder) -> None:
        self._opened, self._engine, self._encoder = opened, opened.engine, encoder
        options = command.with_model_defaults(opened.settings)
        stops = (*options.params.stop_strings, *encoder.stop_strings)
        self._options = replace(options, params=replace(options.params, stop_strings=stops))
        self._system: str | None = command.options.system
        self._messages: list[dict[str, str]] = []

    def run(self) -> None:
        """Ends with /quit, or with the input."""
        print(f"{self._opened.settings.folder}: /reset, /system TEXT, /quit; Ctrl-C stops an answer")
        if not self._encoder.has_template:
            print("The tokenizer has no chat template: this is a plain dialogue of User and Assistant.")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing and history of input()
        while (line := self._read_line()) is not None:
            if line.startswith("/"):
                if not self._serve_commands(line):
                    return
            elif line.strip():
                self._answer(line)

    def _read_line(self) -> str | None:
        """Returns the next line; Ctrl-C drops what was typed."""
        while True:
            try:
                with _idle_steps(self._engine):
                    return input("> ")
            except KeyboardInterrupt:
                print("\n/quit or Ctrl-D leaves")
            except EOFError:
                print()
                return None

    def _serve_commands(self, line: str) -> bool:
        """Returns whether the dialogue goes on."""
        word, _, rest = line.partition(" ")
        if word == "/quit":
            return False
        if word == "/reset":
            self._messages.clear()
            print("(forgotten)")
        elif word == "/system":
            self._system = rest.strip() or None
            self._messages.clear()
            print("(started anew)" if self._system else "(started anew, without a system message)")
        else:
            print(_HELP if word == "/help" else f"{word} is not a command.\n{_HELP}")
        return True

    def _answer(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        try:
            prompt_ids = self._fitting_prompt()
            [params, *_] = self._options.samples(prompt_ids, max_length=self._engine.max_length)
            text = self._stream(prompt_ids, params)
        except DataError as error:
            self._messages.pop()
            print(f"({error})")
            return
        self._messages.append({"role": "assistant", "content": text.strip()})

    def _fitting_prompt(self) -> list[int]:
        """Returns the prompt of the dialogue; older messages are dropped where there is no room left for an answer."""
        longest = self._engine.max_length - max(1, self._engine.max_length // _ANSWER_SHARE)
        dropped = 0
        while True:
            system = [{"role": "system", "content": self._system}] if self._system else []
            prompt_ids = self._encoder.encode_messages([*system, *self._messages])
            if len(prompt_ids) <= longest or len(self._messages) < 3:
                break
            del self._messages[:2]
            dropped += 2
        if dropped:
            print(f"(the first {dropped} messages no longer fit into the model's context and are dropped)")
        return prompt_ids

    def _stream(self, prompt_ids: list[int], params: SamplingParams) -> str:
        """Prints the answer as it comes; Ctrl-C ends it between two steps."""
        request = self._engine.submit(prompt_ids, params)
        interrupts: list[int] = []
        # Collected instead of raised: an engine must not be left in the middle of a step.
        with handled_signal(signal.SIGINT, lambda number, _: interrupts.append(number)):
            cancelled = False
            while self._engine.has_work:
                for event in self._engine.step():
                    print(event.text, end="", flush=True)
                if interrupts and not cancelled:
                    self._engine.cancel(request)
                    cancelled = True
        answer = self._engine.take(request)
        print({"cancelled": " (stopped)", "length": " (...)"}.get(answer.finish_reason or "", ""))
        return answer.text


@contextlib.contextmanager
def _idle_steps(engine: Engine) -> Iterator[None]:
    """Makes a step without work now and then while a user thinks, so that other ranks do not give up waiting."""
    if engine.num_ranks == 1:
        yield
        return
    over = threading.Event()

    def run() -> None:
        while not over.wait(_IDLE_STEP_S):
            engine.step()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
