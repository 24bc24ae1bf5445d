"""Settings that `petatron train` derives from the data before a run starts: its length from epochs; of conversations, the length of rows.

The data is opened as the run opens it, so what is expensive (encoding conversations) is cached for the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from petatron.base.device import detect_device
from petatron.base.format_text import count_with_noun
from petatron.config import LoadedConfig, RunConfig
from petatron.config.schema.fields import FieldValue, fields_by_path, replace_fields
from petatron.config.schema.objective_and_dataset_names import CHAT_DATASETS
from petatron.config.schema.run import RawRunConfig
from petatron.data.build_datasets import SplitUnits, chosen_kind_name, open_split_units
from petatron.data.conversations.conversations_kind import ConversationSource
from petatron.data.conversations.preferences_kind import PairSource
from petatron.data.dataset_kinds import DatasetRequest
from petatron.data.tokenizer import Tokenizer
from petatron.pretrained.open_tokenizer import open_tokenizer

_ROW_TOKENS = 2048
"""Rows are at least as long, where the model reads as many: short conversations share one."""
_ROW_MULTIPLE = 64
_MAX_BATCH, _MIN_STEPS = 16, 32
_EVALUATIONS = 5
_PROMPTS = 3
PROMPTS_FILE = "sample-prompts.jsonl"


@dataclass(frozen=True, slots=True)
class DerivedSetting:
    """A setting by its path, its value, and why."""

    path: str
    value: FieldValue
    why: str

    @property
    def flag(self) -> str:
        return fields_by_path()[self.path].flag

    @property
    def word(self) -> str:
        """The flag with its value, as it is typed."""
        return f"{self.flag}={str(self.value).lower()}"

    def __str__(self) -> str:
        return f"{self.flag} {self.value}: {self.why}"


@dataclass(frozen=True, slots=True)
class SettingsFromData:
    """Settings, and lines of `--sample-prompts` of what is held out."""

    settings: list[DerivedSetting]
    prompts: list[str]


def needs_data_settings(config: RawRunConfig) -> bool:
    """Whether the length of a run is given in epochs, so that it follows from the data."""
    train = config.train
    return train.train_epochs is not None and train.train_iters is None and train.train_samples is None


def settings_from_data(loaded: LoadedConfig) -> SettingsFromData:
    """Returns what follows from the data and is not given."""
    loaded, tokenizer = open_tokenizer(loaded)
    run = loaded.config
    is_chat = chosen_kind_name(run) in CHAT_DATASETS
    train_units, valid_units = open_split_units(run, tokenizer)
    derived: list[DerivedSetting] = []

    def derive(path: str, value: FieldValue, why: str) -> None:
        nonlocal run
        if loaded.origins[path].kind in ("flag", "file"):
            return
        derived.append(DerivedSetting(path, value, why))
        run = replace_fields(run, {path: value})

    if is_chat:
        length, why = _row_length(run, [*train_units, *valid_units])
        derive("model.seq_length", length, why)
        if detect_device(run.train.device).kind == "cuda" and not run.precision.fp16:
            derive("precision.bf16", True, "the device is a GPU")
    rows = _rows_per_epoch(run, tokenizer, train_units)
    if is_chat:
        batch, why = _batch_size(run, rows)
        derive("train.global_batch_size", batch, why)
    batch = run.train.global_batch_size or 1
    epochs = run.train.train_epochs or 1.0
    iterations = max(1, math.ceil(epochs * rows / batch))
    why = (
        f"{epochs:g} {'epoch' if epochs == 1 else 'epochs'} of {count_with_noun(rows, 'sample')} in batches of {batch}"
    )
    derive("train.train_iters", iterations, why)
    if is_chat and valid_units:
        derive("train.eval_interval", max(1, iterations // _EVALUATIONS), f"about {_EVALUATIONS} evaluations")
        held_out = _rows_per_epoch(run, tokenizer, valid_units)
        if loaded.origins["train.eval_iters"].kind not in ("flag", "file"):
            derive("train.full_validation", True, f"{count_with_noun(held_out, 'sample')} are held out")
    elif is_chat:
        derive("train.eval_iters", 0, "no conversations are held out")
    prompts: list[str] = []
    if is_chat and run.log.sample_prompts is None:
        for part in valid_units:
            if isinstance(part.source, ConversationSource):
                prompts += part.source.prompts(part.units, _PROMPTS - len(prompts))
    if prompts:
        derive("log.sample_interval", max(1, iterations // _EVALUATIONS), "beside the evaluations")
    return SettingsFromData(derived, prompts)


def _row_length(run: RunConfig, units: Sequence[SplitUnits]) -> tuple[int, str]:
    """Returns the tokens of a row: what the longest conversation needs, at least some, and no more than the model reads."""
    longest = max(
        (part.source.longest for part in units if isinstance(part.source, ConversationSource | PairSource)),
        default=_ROW_TOKENS,
    )
    needed = -(-max(longest, _ROW_TOKENS) // _ROW_MULTIPLE) * _ROW_MULTIPLE
    reads = run.model.max_position_embeddings
    if needed <= reads:
        return needed, f"the longest conversation has {longest:,} tokens"
    return reads, f"the model reads as many; the longest conversation has {longest:,} tokens"


def _batch_size(run: RunConfig, rows: int) -> tuple[int, str]:
    """Returns a batch that leaves some steps of an epoch, as a multiple of what all ranks take at once."""
    at_once = run.train.micro_batch_size * run.parallel.data_parallel_size
    wanted = 1 << max(0, int(math.log2(max(1, rows // _MIN_STEPS))))
    batch = at_once * max(1, min(_MAX_BATCH, wanted) // at_once)
    return batch, f"an epoch has {count_with_noun(rows, 'sample')}, and the ranks take {at_once} at once"


def _rows_per_epoch(run: RunConfig, tokenizer: Tokenizer | None, units: Sequence[SplitUnits]) -> int:
    request = DatasetRequest(
        split="train", num_samples=1, seq_length=run.model.seq_length, seed=run.train.seed, tokenizer=tokenizer,
        vocab_size=run.model.vocab_size,
    )  # fmt: skip
    cached = [replace(request, cache_dir=part.cache_dir) for part in units]
    return sum(part.source.samples_per_epoch(part.units, of_part) for part, of_part in zip(units, cached))


def free_save_folder(model: str) -> Path:
    """Returns a folder for the run of a model that does not exist yet: runs/NAME-sft, then runs/NAME-sft-2."""
    name = Path(model.rstrip("/")).name or "model"
    folder, number = Path("runs") / f"{name}-sft", 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-sft-{number}"
    return folder
