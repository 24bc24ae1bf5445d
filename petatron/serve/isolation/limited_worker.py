"""The sandboxed worker process: compiles grammars of requests and renders chat templates, which are programs of others.

It has a limit of memory, which it sets itself; the server ends it when a job takes too long, and starts another. It reads jobs from its
input and writes answers to its output, each a line of JSON: what runs here may be under somebody else's control, so what it writes is
read as data. `python -m petatron.serve.isolation.limited_worker`.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from petatron.base.errors import ConfigError, DataError, PetatronError
from petatron.data.prompt.chat_template import ChatTemplate
from petatron.data.tokenizer import Tokenizer, vocabulary_json
from petatron.infer.grammar import build_vocabulary, compile_grammar
from petatron.infer.sampling_params import Constraint

MAX_RENDERED_CHARS = 1 << 24
_MAX_OPEN_FILES = 64
_STATM = Path("/proc/self/statm")


class SentVocabulary:
    """What a grammar needs of a tokenizer, as JSON."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.name: str = content["name"]
        self.vocab_size: int = content["vocab_size"]
        self.eod: int | None = content["eod"]
        self._file: str | None = content["tokenizer_json"]
        self._texts: list[str] = content["texts"]

    @staticmethod
    def content_of(tokenizer: Tokenizer) -> dict[str, Any]:
        file = vocabulary_json(tokenizer)
        texts = [] if file is not None else [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
        text = None if file is None else file.decode()
        properties = {"name": tokenizer.name, "vocab_size": tokenizer.vocab_size, "eod": tokenizer.eod}
        return {**properties, "tokenizer_json": text, "texts": texts}

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._texts[token] for token in ids)

    def files(self) -> dict[str, bytes]:
        return {} if self._file is None else {"tokenizer.json": self._file.encode()}


class LimitedJobs:
    """The jobs by name; every one returns what JSON can say."""

    def __init__(self, tokenizer: SentVocabulary | None) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: Any = None
        self._template: tuple[Any, ChatTemplate] | None = None

    def compile(self, kind: str, grammar: str) -> None:
        """Compiles a grammar and computes its first mask, as an engine will; `DataError` if it cannot be."""
        if self._tokenizer is None:
            raise DataError("A constraint on the text needs a tokenizer, and the model has none.")
        if self._vocabulary is None:
            self._vocabulary = build_vocabulary(self._tokenizer)
        matcher = compile_grammar(Constraint(kind=kind, grammar=grammar), lambda: self._vocabulary)  # type: ignore[arg-type]
        if not matcher.is_stopped():
            matcher.compute_logit_bias()

    def render(
        self, source: str, tool_use: str | None, special_tokens: dict[str, str], arguments: dict[str, Any]
    ) -> str:
        key = (source, tool_use, special_tokens)
        if self._template is None or self._template[0] != key:
            self._template = key, ChatTemplate(source, tool_use=tool_use, special_tokens=special_tokens)
        text = self._template[1].render(arguments.pop("messages"), **arguments)
        if len(text) > MAX_RENDERED_CHARS:
            raise DataError(f"The model's chat template makes a text of more than {MAX_RENDERED_CHARS:,} characters.")
        return text


def limit_memory(growth_bytes: int) -> None:
    """Lets this process have so much more address space than it has; without core dumps, and with few files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN_FILES, _MAX_OPEN_FILES))
    if _STATM.exists():  # elsewhere, time alone is limited
        used = int(_STATM.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + growth_bytes, used + growth_bytes))


def answer_of(jobs: LimitedJobs, job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the outcome of a job; whatever it raises is told as an error of its sender."""
    try:
        return {"result": getattr(jobs, job["job"])(**job["arguments"])}
    except ConfigError as error:
        return {"error": " ".join(str(problem) for problem in error.problems)}
    except PetatronError as error:
        return {"error": str(error)}
    except (MemoryError, RecursionError) as error:
        return {"error": f"It needs more than this server allows ({type(error).__name__})."}
    except Exception as error:
        return {"error": f"It failed ({type(error).__name__})."}


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the server ends it, or its own end does
        signal.signal(number, signal.SIG_IGN)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    first = json.loads(source.readline())
    jobs = LimitedJobs(None if first["tokenizer"] is None else SentVocabulary(first["tokenizer"]))
    limit_memory(first["memory_bytes"])
    for line in source:
        target.write(json.dumps(answer_of(jobs, json.loads(line))).encode() + b"\n")
        target.flush()


if __name__ == "__main__":
    main()
