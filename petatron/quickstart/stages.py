"""The stages of the quickstart before training: a folder, a corpus, a tokenizer, token files and a settings file.

Every stage has a key, a digest of all that decides its result, and the keys of finished stages lie in `stages.json`. A
stage whose key is there and whose files exist is not done again; a key contains the key of the stage before it, so a
change anywhere redoes all that follows. Training is kept in the same way, but its key is written before it starts: an
interrupted run goes on from its checkpoint, and a run with other settings starts over.

Nothing here needs torch, so that the first stages are done while a library of that size would still be loading.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.base.safe_files import publish, remove
from petatron.config.schema.training import TokenizerConfig
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.preprocess import PreprocessOptions, preprocess
from petatron.data.tokenizer import HuggingFaceTokenizer, train_bpe
from petatron.quickstart.corpus import Corpus, read_corpus, standard_library, write_jsonl
from petatron.quickstart.options import QuickstartOptions

STAGES_FILE = "stages.json"
SPLITS = ("train", "held_out")


class Workspace:
    """The quickstart's folder: where each thing lies, and which stages are finished."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.tokenizer = self.root / "tokenizer.json"
        self.settings = self.root / "quickstart.yaml"
        self.training = self.root / "training"
        self.summary = self.root / "summary.json"

    def corpus(self, split: str) -> Path:
        return self.root / "corpus" / f"{split}.jsonl"

    def data(self, split: str) -> Path:
        """Prefix of a split's token files."""
        return self.root / "data" / f"{split}_text_document"

    def open(self, *, fresh: bool = False) -> None:
        """Make the folder, or empty one of ours. A folder with anything else in it is left alone."""
        stamp = self.root / STAGES_FILE
        try:
            if self.root.exists() and not stamp.is_file() and any(self.root.iterdir()):
                rule = "is a folder with other files in it"
                raise ConfigError([Problem("--out", str(self.root), rule, "Give a new or an empty folder.")])
            if fresh:
                for path in self._made():
                    remove(path)
            self.root.mkdir(parents=True, exist_ok=True)
            if fresh or not stamp.is_file():
                self._write_keys({})
        except OSError as error:
            rule = f"cannot be used: {error.strerror}"
            raise ConfigError([Problem("--out", str(self.root), rule, "Give a writable folder.")]) from error

    def _made(self) -> Iterable[Path]:
        folders = (self.root / "corpus", self.root / "data", self.training)
        return (*folders, self.tokenizer, self.settings, self.summary)

    def keys(self) -> dict[str, str]:
        """Stage -> key of what was last finished; a file that cannot be read counts as nothing finished."""
        try:
            found = json.loads((self.root / STAGES_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def mark(self, stage: str, key: str | None) -> None:
        """Remember that a stage is finished, or with None that it no longer is."""
        keys = {name: value for name, value in self.keys().items() if name != stage}
        self._write_keys(keys if key is None else {**keys, stage: key})

    def _write_keys(self, keys: Mapping[str, str]) -> None:
        publish(self.root / STAGES_FILE, json.dumps(keys, indent=1) + "\n")

    def stage(self, name: str, key: str, outputs: Sequence[Path], work: Callable[[], object]) -> bool:
        """Do a stage unless it is finished with this key; answers whether it was."""
        if self.keys().get(name) == key and all(path.is_file() for path in outputs):
            return True
        self.mark(name, None)
        work()
        self.mark(name, key)
        return False


def key_of(*parts: Any) -> str:
    """A digest of plain values."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def prepare_corpus(space: Workspace, options: QuickstartOptions) -> tuple[Corpus, bool]:
    """Read the standard library and keep its two parts as JSON lines; also whether that had been done."""
    corpus = read_corpus(standard_library(), max_bytes=options.corpus_bytes, min_files=options.min_files)
    parts = dict(zip(SPLITS, (corpus.train, corpus.held_out)))

    def work() -> None:
        for split, files in parts.items():
            write_jsonl(files, space.corpus(split))

    return corpus, space.stage("corpus", corpus.digest, [space.corpus(split) for split in SPLITS], work)


def prepare_tokenizer(space: Workspace, corpus: Corpus, vocab_size: int) -> tuple[HuggingFaceTokenizer, bool]:
    """A byte-level BPE of the training files; the held-out ones have no say in it."""

    def work() -> None:
        train_bpe((file.text for file in corpus.train), vocab_size, space.tokenizer)

    reused = space.stage("tokenizer", key_of(corpus.digest, vocab_size), [space.tokenizer], work)
    return HuggingFaceTokenizer(space.tokenizer), reused


def prepare_data(space: Workspace) -> tuple[dict[str, IndexedDataset], bool]:
    """Token files of both parts, each document ended by the end-of-document token."""
    outputs = [Path(f"{space.data(split)}.{suffix}") for split in SPLITS for suffix in ("bin", "idx")]

    def work() -> None:
        remove(space.root / "data")  # sample indices of other token files would only take room
        for split in SPLITS:
            prefix = str(space.data(split)).removesuffix("_text_document")
            tokenizer = TokenizerConfig(tokenizer_model=str(space.tokenizer))
            # One worker: the tokenizer library then uses a thread per core by itself.
            preprocess(
                PreprocessOptions(
                    inputs=(str(space.corpus(split)),), output_prefix=prefix, tokenizer=tokenizer, append_eod=True
                )
            )

    reused = space.stage("data", key_of(space.keys()["tokenizer"]), outputs, work)
    return {split: IndexedDataset(space.data(split)) for split in SPLITS}, reused


def prepare_settings(space: Workspace, options: QuickstartOptions) -> None:
    """Write the settings of the run; results of a run with other settings or data are removed."""
    settings = training_settings(space, options)
    key = key_of(space.keys()["data"], settings)
    if space.keys().get("training") != key:
        space.mark("training", None)
        remove(space.training)
        text = yaml.safe_dump(settings, sort_keys=False)
        publish(space.settings, f"# Made by petatron quickstart; for petatron train --config\n{text}")
        space.mark("training", key)


def training_settings(space: Workspace, options: QuickstartOptions) -> dict[str, dict[str, Any]]:
    """What `petatron train` needs to know but the layout and the time limit, by section of the schema."""
    return {
        "model": dict(options.model),
        "optim": {"lr": 4e-3, "weight_decay": 0.1, "adam_beta2": 0.99},
        "schedule": {"lr_decay_style": "cosine", "min_lr": 2e-4, "lr_warmup_iters": max(1, options.steps // 20)},
        "train": {
            "train_iters": options.steps,
            "micro_batch_size": options.batch_size,
            "global_batch_size": options.batch_size,
            "eval_interval": max(1, options.steps // 4),
            "eval_iters": 10,
            "device": "cpu",
        },
        "data": {"train_data_path": [str(space.data("train"))], "valid_data_path": [str(space.data("held_out"))]},
        "tokenizer": {"tokenizer_model": str(space.tokenizer)},
        "checkpoint": {"save": str(space.training), "load": str(space.training)},
        "log": {"log_interval": max(1, min(20, options.steps // 4))},
    }


def training_flags(space: Workspace, options: QuickstartOptions) -> list[str]:
    """The words after `petatron train`."""
    limit = ["--exit-duration-in-mins", f"{options.minutes:g}"]
    return ["--config", str(space.settings), "--tp", str(options.tensor_parallel), *limit]


def why_stopped(metrics: Path) -> str:
    """What a run's metrics say of its last early end, "stopping at iteration 5: ..."; empty when there was none."""
    try:
        records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(f"{metrics} cannot be read: {error}. Run the quickstart again with --fresh.") from error
    messages = [str(record["message"]) for record in records if record.get("kind") == "event"]
    return next((text for text in reversed(messages) if text.startswith("stopping at ")), "")
