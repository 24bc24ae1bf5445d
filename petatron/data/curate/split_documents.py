"""Splits documents into training and held-out parts by a hash of each text.

A document's part depends on its normalized text and the seed alone: reordering, adding and removing documents moves no other, and
documents of the same text are in the same part.
"""

from __future__ import annotations

import hashlib
from functools import partial

from petatron.base.errors import ConfigError, Problem
from petatron.data.curate.files.document_blocks import parse_block
from petatron.data.curate.files.pass_progress import OnProgress
from petatron.data.curate.files.per_line_step import JudgedBlock, run_line_step
from petatron.data.curate.files.step_files import StepFiles, check_step_files
from petatron.data.curate.files.step_summary import StepSummary
from petatron.data.curate.normalize_text import same_text_key
from petatron.data.inputs.line_blocks import LineBlock

TRAIN, HELD_OUT = "train", "held-out"


def split_documents(
    files: StepFiles, *, held_out: float, seed: int, on_progress: OnProgress | None = None
) -> StepSummary:
    """Writes both parts, each a folder, and the summary."""
    files = check_step_files(files, step="split", parts=(TRAIN, HELD_OUT))
    if not 0 < held_out < 1:
        rule = "is not above 0 and below 1"
        raise ConfigError([Problem("--held-out", f"{held_out:g}", rule, "It is a share of the documents: 0.01, say.")])
    summary = StepSummary("split", {"held_out": held_out, "seed": seed})
    summary.kept.update({TRAIN: 0, HELD_OUT: 0})
    judge = partial(_judge_block, files.json_key, held_out, seed)
    run_line_step(files, summary, judge, parts=(TRAIN, HELD_OUT), on_progress=on_progress)
    return summary


def place_of(text: str, seed: int) -> float:
    """Returns a number from 0 to below 1 that only the normalized text and the seed decide.

    >>> place_of("A text", 1) == place_of("a  text", 1), place_of("A text", 1) == place_of("A text", 2)
    (True, False)
    """
    key = same_text_key(text).encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(key, digest_size=8, salt=(seed % (1 << 64)).to_bytes(8, "little")).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def _judge_block(json_key: str, held_out: float, seed: int, block: LineBlock) -> JudgedBlock:
    parsed = parse_block(block, json_key)
    result = JudgedBlock.of(parsed)
    for document in parsed.documents:
        result.keep(document.raw, HELD_OUT if place_of(document.text, seed) < held_out else TRAIN)
    return result
