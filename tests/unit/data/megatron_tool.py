"""What Megatron's tools/preprocess_data.py writes, from its rules: the tokens and lengths of every document, and the bytes of the files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from petatron.data.tokenizer import Tokenizer
from tests.unit.data.test_indexed import reference_files

CHUNK_CHARS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronTool:
    """Its flags: a tokenizer, `--append-eod`, and the splitter of `--split-sentences` (a function of a text)."""

    tokenizer: Tokenizer
    append_eod: bool = False
    split: Callable[[str], Sequence[str]] | None = None

    def documents(self, lines: Iterable[str], key: str = "text") -> list[list[list[int]]]:
        """Returns the ids of every sentence of every document: a text is cut into chunks, chunks into sentences; those without ids go."""
        documents = []
        for line in lines:
            text = json.loads(line)[key]
            sentences = [text] if isinstance(text, str) else text
            if self.split is not None and isinstance(text, str):
                chunks = [text[start : start + CHUNK_CHARS] for start in range(0, len(text), CHUNK_CHARS)]
                sentences = [sentence for chunk in chunks for sentence in self.split(chunk)]
            encoded = [ids for sentence in sentences if (ids := self.tokenizer.encode(sentence))]
            if encoded and self.append_eod and self.tokenizer.eod is not None:
                encoded[-1].append(self.tokenizer.eod)
            documents.append(encoded)
        return documents

    def files(self, lines: Iterable[str], key: str = "text") -> tuple[bytes, bytes]:
        """Returns the bytes of `.idx` and `.bin`; a vocabulary below 65,500 ids has 16 bits."""
        code, char = (8, "H") if self.tokenizer.vocab_size < 65_500 else (4, "i")
        return reference_files(self.documents(lines, key), code, char)
