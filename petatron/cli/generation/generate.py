"""`petatron generate`: continues prompts of the command line as they come, or answers a file of prompts."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from petatron.base.errors import DataError, Problem, raise_problems
from petatron.base.terminal_escape import printable, raw_stream
from petatron.cli.generation.arguments import GenerationCommand, generate_on_ranks, generation_parser, read_command
from petatron.cli.generation.fill_mask import check_fill_mask, fill_masks_on_ranks
from petatron.cli.subcommands.command_parser import CommandParser
from petatron.cli.subcommands.handled_signals import sigterm_raises
from petatron.cli.subcommands.stderr_progress import StderrProgress

if TYPE_CHECKING:
    from petatron.data.prompt.prompt_encoder import PromptEncoder
    from petatron.data.tokenizer import Tokenizer
    from petatron.infer.batch.answers_file import BatchProgress
    from petatron.infer.batch.request_options import RequestOptions
    from petatron.infer.beam.beam_search import BeamParams
    from petatron.infer.engine import Engine
    from petatron.infer.engine_outputs import Completion, TokenEvent
    from petatron.infer.prompt_images import PromptImages
    from petatron.infer.sampling_params import SamplingParams
    from petatron.serve.open_engine import ModelSettings, OpenedEngine

_REFUSED_WITH_BEAMS = (
    *("min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "stop", "json_schema", "regex", "logprobs", "image"),
)
"""Options that beam search does not take."""


def parser() -> CommandParser:
    root = generation_parser(
        "generate",
        "(--prompt TEXT [--prompt TEXT ...] | --prompts FILE.jsonl --out ANSWERS.jsonl | --fill-mask TEXT) [flags]",
        "Continues prompts with a model: {checkpoint}. Text is printed as it comes. A file of prompts has one JSON object a line: prompt "
        "(or text, or messages for the chat template), perhaps id, and options of its own by the names below, such as max_tokens. Its "
        "answers are written as they end, with the number of their line, and sorted by it at the end; the same command goes on where "
        "it was stopped. An encoder continues no text; it fills masks.",
    )
    add = root.add_argument
    add("--prompt", action="append", metavar="TEXT", help="a text to continue; - reads it; may be given several times")
    add("--prompts", type=Path, metavar="FILE", help="JSON lines of prompts; may be compressed")
    add("--out", type=Path, metavar="FILE", help="where the answers to --prompts go")
    text = (
        "print what an encoder predicts at the masks of a text, the --top-k likeliest (5); may be given several times"
    )
    add("--fill-mask", action="append", metavar="TEXT", help=text)
    text = "a file that an <image> tag of the --prompt shows, in their order; without tags, before the prompt; several times for several"
    add("--image", action="append", type=Path, metavar="FILE", help=text)
    add("--n", type=int, metavar="N", help="answers to each prompt (1)")
    add("--logprobs", type=int, metavar="N", help="report each token's log-probability, and the N most likely ones")
    add("--echo", action="store_true", help="print the prompt before its answer")
    beams = root.add_argument_group("beam search").add_argument
    beams("--beam-width", type=int, metavar="N", help="search the likeliest answers with N beams instead of sampling")
    beams("--length-penalty", type=float, metavar="F", help="above 0 prefers long answers, below 0 short ones (1)")
    return root


def main(argv: Sequence[str]) -> int:
    command = read_command(parser(), argv)
    if command.options.fill_mask:
        raise_problems(check_fill_mask(command.options))
        return fill_masks_on_ranks(argv, command)
    raise_problems(_problems(command.options))
    return generate_on_ranks("generate", argv, command, _generate, interactive="-" in (command.options.prompt or ()))


def _problems(options: argparse.Namespace) -> Iterator[Problem]:
    if bool(options.prompt) == (options.prompts is not None):
        rule = "or --prompts FILE says what to continue; one of them" + (" alone" if options.prompt else " is needed")
        yield Problem("--prompt TEXT", "", rule, "Add --prompt 'Once upon a time', say.")
    if (options.prompts is None) != (options.out is None) and not options.prompt:
        rule = "has no place for its answers" if options.out is None else "is for the answers to --prompts"
        where = ("--prompts", options.prompts) if options.out is None else ("--out", options.out)
        yield Problem(where[0], str(where[1]), rule, "Give both --prompts and --out.")
    if options.prompt and options.prompts is None and options.out is not None:
        yield Problem("--out", str(options.out), "is for --prompts", "Redirect the output instead: > FILE.")
    if (options.prompt or []).count("-") > 1:
        yield Problem("--prompt", "-", "reads the input twice", "Give it once.")
    if options.image and (len(options.prompt or []) != 1 or options.prompts is not None):
        rule = "is an image of one prompt" + (", and there are several" if options.prompt else "")
        yield Problem("--image", str(options.image[0]), rule, "Give one --prompt with it.")
    if options.beam_width is not None:
        yield from _beam_problems(options)
    elif options.length_penalty is not None:
        yield Problem("--length-penalty", str(options.length_penalty), "is one of a beam search", "Add --beam-width N.")


def _beam_problems(options: argparse.Namespace) -> Iterator[Problem]:
    if options.prompts is not None:
        yield Problem("--beam-width", str(options.beam_width), "is for --prompt", "Give prompts with --prompt.")
    if options.n is not None and options.n > options.beam_width:
        rule = f"is more than the {options.beam_width} answers of --beam-width"
        yield Problem("--n", str(options.n), rule, "Use fewer, or more beams.")
    for name in _REFUSED_WITH_BEAMS:
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            yield Problem(flag, "", "has no effect on a beam search", "Leave it out, or --beam-width.")


def _generate(command: GenerationCommand, settings: ModelSettings) -> Callable[[OpenedEngine], None]:
    from petatron.data.prompt.prompt_encoder import PromptEncoder

    work = _BatchWork if command.options.prompts else _TextWork
    encoder = PromptEncoder(settings.required_tokenizer(), is_read_whole=settings.source_length is not None)
    return work(command, settings, encoder).run


class _TextWork:
    """Prompts of the command line: checked before the model is loaded, then answered together and printed in order."""

    def __init__(self, command: GenerationCommand, settings: ModelSettings, encoder: PromptEncoder) -> None:
        from petatron.infer.check_request import check_request
        from petatron.infer.prompt_images import check_prompt_images
        from petatron.mesh.launch.environment import read_environment

        self._command, self._settings = command, settings
        first = read_environment().rank == 0
        texts = [_read_prompt(text) if first else "" for text in command.options.prompt]
        self._images: PromptImages | None = None
        self._prompts = [(text, self._encode(text, encoder)) for text in texts] if first else []
        self._beam_width: int | None = command.options.beam_width
        for _, ids in self._prompts:
            check_request(ids, command.request.samples(ids, max_length=settings.max_length)[0], settings)
            check_prompt_images(ids, self._images, settings.loaded.config.model)
            if self._beam_width is not None:
                self._beam_params(ids, command.with_model_defaults(settings), self._beam_width)

    def _encode(self, text: str, encoder: PromptEncoder) -> list[int]:
        """Returns the ids of a prompt, and reads its images."""
        if not self._command.options.image:
            return encoder.encode(text)
        from petatron.data.prompt.prompt_encoder import check_unicode
        from petatron.infer.read_prompt_images import read_prompt_images

        prompts = self._settings.image_prompts()
        ids, self._images = read_prompt_images(prompts, check_unicode(text), self._command.options.image)
        bod = self._settings.required_tokenizer().bod
        return [*(encoder.prefix_ids or (() if bod is None else (bod,))), *ids]

    def run(self, opened: OpenedEngine) -> None:
        options = self._command.with_model_defaults(self._settings)
        if self._beam_width is not None:
            self._search(opened.engine, options, self._beam_width)
            return
        wanted = [
            (text, ids, params, number)
            for number, (text, ids) in enumerate(self._prompts, 1)
            for params in options.samples(ids, max_length=self._settings.max_length)
        ]
        printer = _Printer(len(self._prompts), options.n, echo=self._command.options.echo)
        tokenizer = self._settings.required_tokenizer()
        for text, ids, params, number in wanted:
            printer.add(opened.engine.submit(ids, params, images=self._images), text, number, params)
        while opened.engine.has_work:
            for event in opened.engine.step():
                printer.take(event, opened.engine, tokenizer)
        _report_drafts(opened.engine)

    def _beam_params(self, ids: list[int], options: RequestOptions, width: int) -> BeamParams:
        """Returns how a prompt is searched; `ConfigError` for what cannot be."""
        from petatron.infer.beam.beam_search import BeamParams, BeamSearch

        penalty = self._command.options.length_penalty
        params = BeamParams(
            width=width,
            max_new_tokens=options.samples(ids, max_length=self._settings.max_length)[0].max_new_tokens,
            stop_ids=options.params.stop_ids,
        )
        params = params if penalty is None else replace(params, length_penalty=penalty)
        BeamSearch(ids, params, self._settings.vocab_size)
        return params

    def _search(self, engine: Engine, options: RequestOptions, width: int) -> None:
        """Prints the best answers of each prompt with their scores, where there are several."""
        from petatron.infer.beam.beam_search import beam_search

        printer = _Printer(len(self._prompts), options.n, echo=self._command.options.echo)
        tokenizer = self._settings.required_tokenizer()
        for number, (text, ids) in enumerate(self._prompts, 1):
            params = self._beam_params(ids, options, width)
            [answers] = beam_search(engine, [ids], params)
            for place, answer in enumerate(answers[: options.n]):
                last = number == len(self._prompts) and place + 1 == min(options.n, len(answers))
                answer_text = tokenizer.decode(answer.text_ids(params.stop_ids))
                printer.print_answer(text, number, place, answer_text, score=answer.score, last=last)


def _read_prompt(text: str) -> str:
    if text != "-":
        return text
    read = sys.stdin.read()
    if not read:
        raise DataError("--prompt - reads the prompt from the input, which is empty.")
    return read


class _Printer:
    """Prints answers in the order of their prompts: the first that has not ended as it comes, the others when their turn has come."""

    def __init__(self, num_prompts: int, n: int, *, echo: bool) -> None:
        self._titled = num_prompts > 1 or n > 1
        self._num_prompts, self._n, self._echo = num_prompts, n, echo
        self._order: list[int] = []
        self._titles: dict[int, tuple[str, str]] = {}
        self._texts: dict[int, str] = {}
        self._ended: dict[int, Completion] = {}
        self._begun = False
        # A terminal must not obey what a model writes; a file or a program gets it as it is.
        self._out = sys.stdout if sys.stdout.isatty() else raw_stream(sys.stdout)

    def add(self, request: int, prompt: str, number: int, params: SamplingParams) -> None:
        self._order.append(request)
        self._titles[request] = self._title(number, params.sample), prompt if self._echo else ""
        self._texts[request] = ""

    def print_answer(self, prompt: str, number: int, place: int, text: str, *, score: float, last: bool) -> None:
        """Prints an answer that is known, and its score if there are several."""
        title = f"{self._title(number, place, f'score {score:.4f}')}\n" * self._titled
        end = "" if text.endswith("\n") else "\n"
        between = "" if last or not self._titled else "\n"
        print(f"{title}{prompt if self._echo else ''}{text}{end}{between}", end="", flush=True, file=self._out)

    def _title(self, number: int, place: int, *more: str) -> str:
        names = [f"prompt {number}"] * (self._num_prompts > 1) + [f"answer {place + 1}"] * (self._n > 1)
        return f"==> {', '.join((*names, *more))} <=="

    def take(self, event: TokenEvent, engine: Engine, tokenizer: Tokenizer) -> None:
        self._texts[event.request] += event.text
        if event.finish_reason is not None:
            self._ended[event.request] = engine.take(event.request)
        while self._order and self._print_first(tokenizer):
            self._order.pop(0)
            self._begun = False

    def _print_first(self, tokenizer: Tokenizer) -> bool:
        """Prints what is new of the first answer; returns whether it has ended."""
        request = self._order[0]
        if not self._begun:
            title, prompt = self._titles[request]
            print(f"{title}\n" * self._titled + prompt, end="", flush=True, file=self._out)
            self._begun = True
        print(self._texts[request], end="", flush=True, file=self._out)
        self._texts[request] = ""
        if request not in self._ended:
            return False
        answer = self._ended.pop(request)
        print("\n" if not answer.text.endswith("\n") else "", end="")
        for entry in answer.logprobs:
            others = "  ".join(f"{_quoted(token, tokenizer)} {value:.4f}" for token, value in entry.top)
            print(f"  {entry.logprob:9.4f}  {_quoted(entry.token, tokenizer):16}  {others}".rstrip())
        if self._titled and len(self._order) > 1:
            print()
        return True


def _quoted(token: int, tokenizer: Tokenizer) -> str:
    return f"'{printable(tokenizer.decode([token]))}'"


class _BatchWork:
    """A file of prompts: every line is checked, and what is answered is found, before the model is loaded."""

    def __init__(self, command: GenerationCommand, settings: ModelSettings, encoder: PromptEncoder) -> None:
        from petatron.infer.batch.answers_file import AnswersFile
        from petatron.infer.batch.prompts_file import PromptsFile
        from petatron.mesh.launch.environment import read_environment

        options = command.with_model_defaults(settings)
        self._prompts = PromptsFile(command.options.prompts, encoder, options, settings)
        self._total = self._prompts.check()
        with command.options.prompts.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        # Not the layout, nor the engine's sizes: they change no answer.
        decides = {
            "checkpoint": str(settings.folder.resolve()),
            "prompts": digest,
            "precision": command.precision,
            **({} if settings.weights is None else {"weights": settings.weights}),
            **options.as_json(),
        }
        self._answers = AnswersFile(command.options.out, decides) if read_environment().rank == 0 else None

    def run(self, opened: OpenedEngine) -> None:
        from petatron.infer.batch.answers_file import BatchProgress, run_batch

        answers = self._answers
        assert answers is not None, "another rank than the first answers"
        progress = BatchProgress()
        try:
            with sigterm_raises(), self._report_progress(before=len(answers.done)) as report:
                run_batch(opened.engine, self._prompts.read(done=answers.done), answers, progress, on_progress=report)
            answers.sort()
        except (KeyboardInterrupt, SystemExit):
            done = len(answers.done) + progress.prompts
            counted = f"{done} of {self._total} answers"
            _say(f"stopped: {counted} are in {answers.path}. The same command goes on from there.")
            raise
        finally:
            answers.close()
        _say(f"{self._total} answers in {answers.path}")
        _report_drafts(opened.engine)

    def _report_progress(self, *, before: int) -> StderrProgress:
        if before:
            _say(f"{before} of {self._total} prompts are answered already")
        started_s = time.monotonic()

        def describe(progress: BatchProgress) -> str:
            speed = progress.tokens / max(time.monotonic() - started_s, 1e-9)
            return f"{before + progress.prompts}/{self._total} prompts, {speed:,.0f} tokens/s"

        return StderrProgress(describe, terminal_s=0.2, plain_s=30.0)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _report_drafts(engine: Engine) -> None:
    """Says how well drafts were guessed, where some were asked for."""
    stats = engine.stats
    if engine.options.speculative_tokens:
        _say(
            f"speculative decoding: {stats.tokens_per_decode:.2f} tokens per step; {stats.accepted_tokens} of "
            f"{stats.drafted_tokens} drafts accepted ({stats.acceptance_rate:.0%})"
        )
