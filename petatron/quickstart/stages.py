"""The resumable stages of the quickstart before training: a folder, a corpus, a tokenizer, token files and a settings file.

Every stage has a key, a digest of everything that determines its result, and the keys of finished stages are in `stages.json`.
A stage whose key is there and whose files exist is skipped; a key contains the key of the stage before it, so a change anywhere
redoes all that follows. Training works in the same way, but its key is written before it starts: an interrupted run resumes from
its checkpoint, and a run with other settings starts over.

Nothing here imports torch, so that the first stages are done while a library of that size would still be loading.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.base.safe_files import remove_tree, write_atomic
from petatron.config.schema.data import TokenizerConfig
from petatron.data.bpe.train_bpe import train_bpe
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.preprocess import PreprocessOptions, preprocess
from petatron.data.tokenizer import HuggingFaceTokenizer
from petatron.quickstart.corpus import Corpus, read_corpus, standard_library, write_jsonl
from petatron.quickstart.options import QuickstartOptions

STAGES_FILE = "stages.json"
SPLITS = ("train", "held_out")


class Workspace:
    """The quickstart's folder: its paths, and which stages are finished."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.tokenizer = self.root / "tokenizer.json"
        self.settings = self.root / "quickstart.yaml"
        self.training = self.root / "training"
        self.summary = self.root / "summary.json"

    def corpus(self, split: str) -> Path:
        return self.root / "corpus" / f"{split}.jsonl"

    def data(self, split: str) -> Path:
        """Returns the prefix of a split's token files."""
        return self.root / "data" / f"{split}_text_document"

    def open(self, *, fresh: bool = False) -> None:
        """Creates the folder, or empties one of ours. A folder with anything else in it is refused."""
        stamp = self.root / STAGES_FILE
        try:
            if self.root.exists() and not stamp.is_file() and any(self.root.iterdir()):
                rule = "is a folder with other files in it"
                raise ConfigError([Problem("--out", str(self.root), rule, "Give a new or an empty folder.")])
            if fresh:
                folders = (self.root / "corpus", self.root / "data", self.training)
                for path in (*folders, self.tokenizer, self.settings, self.summary):
                    remove_tree(path)
            self.root.mkdir(parents=True, exist_ok=True)
            if fresh or not stamp.is_file():
                self._write_stage_keys({})
        except OSError as error:
            rule = f"cannot be used: {error.strerror}"
            raise ConfigError([Problem("--out", str(self.root), rule, "Give a writable folder.")]) from error

    def stage_keys(self) -> dict[str, str]:
        """Maps stages to the keys of what was last finished; an unreadable file counts as nothing finished."""
        try:
            keys = json.loads((self.root / STAGES_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return keys if isinstance(keys, dict) else {}

    def set_stage_key(self, stage: str, key: str | None) -> None:
        """Records that a stage is finished, or with None that it no longer is."""
        keys = {name: value for name, value in self.stage_keys().items() if name != stage}
        self._write_stage_keys(keys if key is None else {**keys, stage: key})

    def _write_stage_keys(self, keys: Mapping[str, str]) -> None:
        write_atomic(self.root / STAGES_FILE, json.dumps(keys, indent=1) + "\n")

    def run_stage(self, name: str, key: str, outputs: Sequence[Path], work: Callable[[], object]) -> bool:
        """Runs a stage unless it is finished with this key; returns whether it was."""
        if self.stage_keys().get(name) == key and all(path.is_file() for path in outputs):
            return True
        self.set_stage_key(name, None)
        work()
        self.set_stage_key(name, key)
        return False


def stage_key(*parts: Any) -> str:
    """Returns a digest of plain values."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def prepare_corpus(workspace: Workspace, options: QuickstartOptions) -> tuple[Corpus, bool]:
    """Reads the standard library and writes its two splits as JSON lines; also returns whether that had been done."""
    corpus = read_corpus(standard_library(), max_bytes=options.corpus_bytes, min_files=options.min_files)
    parts = dict(zip(SPLITS, (corpus.train, corpus.held_out)))

    def work() -> None:
        for split, files in parts.items():
            write_jsonl(files, workspace.corpus(split))

    return corpus, workspace.run_stage("corpus", corpus.digest, [workspace.corpus(split) for split in SPLITS], work)


def prepare_tokenizer(workspace: Workspace, corpus: Corpus, vocab_size: int) -> tuple[HuggingFaceTokenizer, bool]:
    """Trains a byte-level BPE on the training files only."""

    def work() -> None:
        train_bpe((file.text for file in corpus.train), vocab_size, workspace.tokenizer)

    reused = workspace.run_stage("tokenizer", stage_key(corpus.digest, vocab_size), [workspace.tokenizer], work)
    return HuggingFaceTokenizer(workspace.tokenizer), reused


def prepare_data(workspace: Workspace) -> tuple[dict[str, IndexedDataset], bool]:
    """Builds the token files of both splits, each document ended by the end-of-document token."""
    outputs = [Path(f"{workspace.data(split)}.{suffix}") for split in SPLITS for suffix in ("bin", "idx")]

    def work() -> None:
        remove_tree(workspace.root / "data")  # sample indices of other token files would only waste disk
        tokenizer = TokenizerConfig(tokenizer_model=str(workspace.tokenizer))
        for split in SPLITS:
            inputs, prefix = (str(workspace.corpus(split)),), str(workspace.data(split)).removesuffix("_text_document")
            # One worker: the tokenizer library then uses a thread per core by itself.
            preprocess(PreprocessOptions(inputs=inputs, output_prefix=prefix, tokenizer=tokenizer, append_eod=True))

    reused = workspace.run_stage("data", stage_key(workspace.stage_keys()["tokenizer"]), outputs, work)
    return {split: IndexedDataset(workspace.data(split)) for split in SPLITS}, reused


def chosen_steps(workspace: Workspace) -> int | None:
    """Returns how many steps were chosen for the present data by an earlier start, whose training goes on."""
    data, _, steps = workspace.stage_keys().get("steps", "").partition(" ")
    return int(steps) if data == workspace.stage_keys().get("data") and steps.isdecimal() else None


def record_chosen_steps(workspace: Workspace, steps: int) -> None:
    workspace.set_stage_key("steps", f"{workspace.stage_keys()['data']} {steps}")


def prepare_settings(workspace: Workspace, options: QuickstartOptions, *, steps: int) -> None:
    """Writes the settings of the run; results of a run with other settings or data are removed."""
    settings = training_settings(workspace, options, steps=steps)
    key = stage_key(workspace.stage_keys()["data"], settings)
    if workspace.stage_keys().get("training") != key:
        workspace.set_stage_key("training", None)
        remove_tree(workspace.training)
        text = yaml.safe_dump(settings, sort_keys=False)
        write_atomic(workspace.settings, f"# Made by petatron quickstart; for petatron train --config\n{text}")
        workspace.set_stage_key("training", key)


def training_settings(workspace: Workspace, options: QuickstartOptions, *, steps: int) -> dict[str, dict[str, Any]]:
    """Returns all settings of `petatron train` but the layout and the time limit, by section of the schema."""
    return {
        "model": dict(options.model),
        "optim": {"lr": 4e-3, "weight_decay": 0.1, "adam_beta2": 0.99},
        "schedule": {"lr_decay_style": "cosine", "min_lr": 2e-4, "lr_warmup_iters": max(1, steps // 20)},
        "train": {
            "train_iters": steps,
            "micro_batch_size": options.batch_size,
            "global_batch_size": options.batch_size,
            "eval_interval": max(1, steps // 4),
            "eval_iters": 10,
            "device": "cpu",
        },
        "data": {
            "train_data_path": [str(workspace.data("train"))],
            "valid_data_path": [str(workspace.data("held_out"))],
        },
        "tokenizer": {"tokenizer_model": str(workspace.tokenizer)},
        "checkpoint": {"save": str(workspace.training), "load": str(workspace.training)},
        "log": {"log_interval": max(1, min(20, steps // 4))},
    }


def training_flags(workspace: Workspace, options: QuickstartOptions, *, minutes: float) -> list[str]:
    """Returns the arguments of `petatron train`."""
    limit = ["--exit-duration-in-mins", f"{minutes:g}"]
    return ["--config", str(workspace.settings), "--tp", str(options.tensor_parallel), *limit]


def stop_message(metrics: Path) -> str:
    """Returns the last early stop in a run's metrics, "stopping at iteration 5: ..."; empty when there was none."""
    try:
        records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(f"{metrics} cannot be read: {error}. Run the quickstart again with --fresh.") from error
    messages = [str(record["message"]) for record in records if record.get("kind") == "event"]
    return next((text for text in reversed(messages) if text.startswith("stopping at ")), "")
