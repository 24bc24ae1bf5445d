"""The settings of training data and of the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from petatron.base.remote_address import is_remote
from petatron.config.schema.numeric_bounds import (
    ByteCount,
    Fraction,
    SmallCount,
)
from petatron.config.schema.objective_and_dataset_names import (
    BEST_FIT_DATASET,
    CHAT_DATASETS,
    MASKED_DATASETS,
)
from petatron.config.schema.sections.chat_template import ChatTemplateSettings
from petatron.config.schema.sections.fill_in_middle import FillInMiddleSettings
from petatron.config.schema.sections.masked_text import MaskedTextSettings
from petatron.config.schema.sections.tokenizer_options import TokenizerOptions, TokenizerType
from petatron.config.schema.setting_metadata import Feature, UsedWhen, used_with
from petatron.config.schema.setting_types import (
    FilePath,
    NotSavedFlag,
)

_BLENDS = UsedWhen(
    lambda run: bool(run.data.data_path or run.data.data_args_path or run.data.train_data_path),
    "there are no datasets to blend",
)
_READS_DATASETS = UsedWhen(
    lambda run: run.data.dataloader_type != "external", "--dataloader-type external brings batches of its own"
)
_HAS_TOKENIZED = used_with(
    *(
        "checkpoint.load",
        "checkpoint.pretrained_checkpoint",
        "data.data_path",
        "data.data_args_path",
        "data.train_data_path",
    ),
    reason="there is neither a model to start from nor data that was tokenized",
)
_REMOTE_DATA = UsedWhen(
    lambda run: (
        run.data.data_args_path is not None
        or any(
            map(
                is_remote,
                (
                    *run.data.data_path,
                    *run.data.train_data_path,
                    *run.data.valid_data_path,
                    *run.data.test_data_path,
                ),
            )
        )
    ),
    "no dataset is behind an address (s3://...)",
)
_STORES_CHUNKS = used_with("data.object_storage_cache_path")
_ONE_PATH = UsedWhen(
    lambda run: not run.data.mock_data and not run.data.train_data_path, "there is no --data-path to split"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(FillInMiddleSettings, MaskedTextSettings, ChatTemplateSettings):
    """What to train on."""

    feature: ClassVar = Feature("data", role="training")
    dataset_type: str | None = None
    """How files become samples: `gpt` (Megatron's .bin and .idx files), `best-fit` (the same files, and no document that fits is cut),
    `bert` (masked text), `t5` (text with corrupted spans), `conversations` (chats, prompts and completions: `--sft`), `preferences` and
    `unpaired-preferences` (answers that are compared), or a name under which an imported module registered a kind of dataset. Unset:
    the kind that `--objective` reads, else gpt."""
    dataset_settings: tuple[str, ...] = ()
    """Settings of `--dataset-type`: NAME=VALUE, several."""
    data_path: tuple[FilePath, ...] = ()
    """Dataset prefixes, or weight/prefix pairs; one set of files for all splits, cut by `--split`."""
    train_data_path: tuple[FilePath, ...] = ()
    """Prefixes (or weight/prefix pairs) for training only."""
    valid_data_path: tuple[FilePath, ...] = ()
    """Prefixes (or weight/prefix pairs) for validation only. Several sets have names, `web=PREFIX code=PREFIX`, and are evaluated one by
    one; the first stands for the run."""
    multiple_validation_sets: bool = False
    """Each prefix of `--valid-data-path` is a validation set of its own, with a name of `--validation-set-names`; without weights."""
    validation_set_names: Annotated[tuple[str, ...], used_with("data.multiple_validation_sets")] = ()
    """The names of `--multiple-validation-sets`, in their order. Unset: the last parts of the prefixes."""
    test_data_path: tuple[FilePath, ...] = ()
    """Prefixes (or weight/prefix pairs) for testing only."""
    data_args_path: FilePath | None = None
    """File that holds the value of `--data-path`, for long blends."""
    mid_level_dataset_surplus: Annotated[Fraction, _BLENDS] = 0.005
    """Share of samples that each dataset of a weighted blend is built with beyond what the blend takes of it. It decides how many epochs
    are shuffled together, and thereby the order of samples."""
    split: Annotated[str, _ONE_PATH] = "969,30,1"
    """Shares of documents for training, validation and test, with `--data-path`."""
    data_cache_path: FilePath | None = None
    """Folder for sample indices. Derived: `cache` beside the first dataset."""
    object_storage_cache_path: Annotated[FilePath, _REMOTE_DATA] | None = None
    """Folder of this machine for datasets behind addresses (s3://bucket/corpus, gs://, msc://, https://): copies of their indices, and
    chunks of their tokens. All ranks of the machine share it."""
    object_storage_chunk_bytes: Annotated[ByteCount, "at least 1", _STORES_CHUNKS] = 1 << 20
    """Bytes of a token file that are downloaded at a time from object storage."""
    object_storage_cache_bytes: Annotated[ByteCount, "at least 1", _STORES_CHUNKS] = 1 << 36
    """Bytes of tokens that the folder keeps at most; those that were not used for the longest time are removed."""
    mock_data: bool = False
    """Made-up data: counting sequences, no files needed."""
    dataloader_type: Literal["single", "cyclic", "external"] = "single"
    """single: one global order fixed at the start; cyclic: reshuffled every epoch of samples; external: micro-batches of your own code,
    which `--import` registers."""
    num_workers: Annotated[SmallCount, "at least 0", _READS_DATASETS] = 2
    """Batches prefetched ahead of training, in background threads; 0 reads in the foreground."""
    reset_position_ids: bool = False
    """Restart positions after each end-of-document token."""
    reset_attention_mask: bool = False
    """Forbid attention across document boundaries."""
    eod_mask_loss: bool = False
    """Leave out of the loss the positions whose input is the end-of-document token."""

    @property
    def separates_documents(self) -> bool:
        """Whether attention stays within documents."""
        return self.reset_attention_mask or self.dataset_type in (
            BEST_FIT_DATASET,
            *CHAT_DATASETS,
            *MASKED_DATASETS,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig(TokenizerOptions):
    """How text becomes token ids."""

    tokenizer_type: TokenizerType | None = None
    """Kind of tokenizer, by default that of the files given. The three names of SentencePiece's mean the same."""
    tokenizer_model: FilePath | None = None
    """tokenizer.json, or a folder that holds one; of a TikTokenizer its .json or .tiktoken vocabulary, of SentencePiece the .model."""
    vocab_file: FilePath | None = None
    """GPT-2 vocab.json; of WordPiece the vocab.txt."""
    merge_file: FilePath | None = None
    """GPT-2 merges.txt."""
    force_tokenizer: Annotated[NotSavedFlag, _HAS_TOKENIZED] = False
    """Start from a model with another tokenizer than its folder has, or train on data that was made with another: its ids then mean other
    tokens than the model has learned, or than the data had."""
