"""Rules about data, tokenizer, checkpoint and log settings. Whether files exist is checked in `preflight.py`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from petatron.base.errors import Problem
from petatron.config.saved_config import path_fields
from petatron.config.schema.data_blend import BlendError, named_sets, parse_blend, parse_split
from petatron.config.schema.fields import fields_by_name, flag_name
from petatron.config.schema.objective_and_dataset_names import (
    EXTERNAL,
    GPT_DATASET,
    IMAGE_TEXT_DATASET,
    ITEM_DATASET,
    MASKED_DATASETS,
    POLICY_GRADIENT,
)
from petatron.config.schema.run import RawRunConfig
from petatron.config.setting_bounds_and_conflicts import or_default
from petatron.config.settings_from_checkpoint import CHECKPOINT_ARGS_FLAG
from petatron.validate.tokenizer_settings import check_tokenizer

_LEAVE_OUT = "Give it, or leave this out."
_BOTH = "Give both, or leave this out."
_LOADS = ("load", "needs --load, the folder to load from", _LEAVE_OUT)
# Setting -> the setting that it needs, the rule and the fix.
_NEEDS: Mapping[str, tuple[str, str, str]] = {
    "sign_key": ("save", "needs --save: only checkpoints are signed", "Give it, or leave the key out."),
    "use_mp_args_from_checkpoint_args": ("use_checkpoint_args", f"needs {CHECKPOINT_ARGS_FLAG}", _BOTH),
    **dict.fromkeys(("ckpt_step", "finetune", "exit_on_missing_checkpoint"), _LOADS),
    "sample_interval": ("sample_prompts", "needs --sample-prompts, the file of prompts", _BOTH),
    "sample_prompts": ("sample_interval", "needs --sample-interval, the iterations between samples", "Give both."),
    "eval_tasks_interval": ("eval_tasks", "needs --eval-tasks, the list of tasks", _BOTH),
    "wandb_exp_name": ("wandb_project", "needs --wandb-project", "Give the project too."),
}


def check_files(config: RawRunConfig, *, require_training: bool) -> Iterator[Problem]:
    yield from _empty_paths(config)
    yield from _sources(config, require_training=require_training)
    yield from _blends(config)
    yield from _evaluated_sets(config)
    yield from _tokenizer(config, require_training=require_training)
    yield from _fill_in_middle(config)
    yield from _masked_text(config)
    yield from _needed_settings(config)
    yield from _timeline(config)
    yield from _profile(config)
    yield from _text_samples(config)
    yield from _eval_tasks(config)


def _needed_settings(config: RawRunConfig) -> Iterator[Problem]:
    for name, (other, rule, fix) in _NEEDS.items():
        info, needed = fields_by_name()[name], fields_by_name()[other]
        value, given = getattr(getattr(config, info.section), name), getattr(getattr(config, needed.section), other)
        if not _is_unset(value) and _is_unset(given):
            yield Problem(info.flag, "" if value is True else str(value), rule, fix)


def _is_unset(value: object) -> bool:
    return value is None or value is False


def _empty_paths(config: RawRunConfig) -> Iterator[Problem]:
    """Refuses empty paths: `--save "$FOLDER"` with an unset variable would mean the working folder."""
    for info in path_fields():
        value = getattr(getattr(config, info.section), info.name)
        derived = info.name == "log_dir" and config.checkpoint.save == ""
        if (value == "" or (info.is_list and "" in value)) and not derived:
            yield Problem(info.flag, "''", "is an empty path", "Name a file or folder, or leave it out.")


def _timeline(config: RawRunConfig) -> Iterator[Problem]:
    step, last = config.log.pipeline_timeline_step, config.train.train_iters
    if config.log.pipeline_timeline is not None and last is not None and step > last >= 1:
        rule = f"is after the last of --train-iters {last}, so nothing would be written"
        value = or_default("pipeline_timeline_step", step)
        yield Problem("--pipeline-timeline-step", value, rule, f"Use {last} or less.")


def _profile(config: RawRunConfig) -> Iterator[Problem]:
    log, last, ranks = config.log, config.train.train_iters, config.parallel.world_size
    if not log.profile:
        return
    start, end = log.profile_step_start, log.profile_step_end
    first = or_default("profile_step_start", start)
    if end <= start:
        rule = f"is not after --profile-step-start {first}, so nothing would be traced"
        yield Problem("--profile-step-end", or_default("profile_step_end", end), rule, f"Use {start + 1} or more.")
    if last is not None and start > last >= 1:
        rule = f"is after the last of --train-iters {last}, so nothing would be traced"
        yield Problem("--profile-step-start", first, rule, f"Use {last} or less.")
    beyond = [str(rank) for rank in log.profile_ranks if rank < 0 or (ranks is not None and rank >= ranks)]
    if beyond:
        rule = "is no rank of this run" if ranks is None else f"is not among the {ranks} ranks of this run"
        yield Problem("--profile-ranks", " ".join(beyond), rule, "Ranks count from 0.")


def _text_samples(config: RawRunConfig) -> Iterator[Problem]:
    log, parallel = config.log, config.parallel
    if log.sample_prompts is None:
        return
    where, path = "--sample-prompts", log.sample_prompts
    for name in ("pipeline_model_parallel_size", "context_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            rule = f"needs whole sequences and all layers on every rank, but {flag_name(name)} is {size}"
            yield Problem(where, path, rule, "Leave it out, and generate from a checkpoint in another layout.")
    if config.tokenizer.tokenizer_type is None and config.model.vocab_size is not None:
        yield Problem(where, path, "needs a tokenizer", "Give --tokenizer-model.")


def _eval_tasks(config: RawRunConfig) -> Iterator[Problem]:
    train = config.train
    if train.eval_tasks is None:
        return
    where, path = "--eval-tasks", train.eval_tasks
    if train.eval_tasks_interval is None and train.eval_interval is None:
        rule = "needs --eval-tasks-interval or --eval-interval, the iterations between two runs of the tasks"
        yield Problem(where, path, rule, "Give one of them.")
    if config.tokenizer.tokenizer_type is None and config.model.vocab_size is not None:
        yield Problem(where, path, "needs a tokenizer", "Give --tokenizer-model.")


def _sources(config: RawRunConfig, *, require_training: bool) -> Iterator[Problem]:
    data = config.data
    per_split = data.train_data_path + data.valid_data_path + data.test_data_path
    given = [flag_name(name) for name in ("mock_data", "data_path", "data_args_path") if getattr(data, name)]
    given += ["--train-data-path"] if per_split else []
    given += ["--rollout-prompts"] if config.rollout.rollout_prompts else []
    if data.dataloader_type == EXTERNAL:
        yield from _external(config)
        return
    if len(given) > 1:
        rule = f"cannot be combined with {' or '.join(given[1:])}"
        yield Problem(given[0], "", rule, "Keep one source of data.")
    elif not given and require_training and config.train.objective == POLICY_GRADIENT:
        yield Problem("--rollout-prompts", "", "is not set", "Give a file of prompts, whose answers are learned from.")
    elif not given and require_training:
        fix = "Give dataset prefixes, --train-data-path, or --mock-data to try the run without data."
        yield Problem("--data-path", "", "is not set", fix)
    if per_split and not data.train_data_path and require_training:
        rule = "is not set, but another split has a path of its own"
        yield Problem("--train-data-path", "", rule, "Give the training prefixes too.")


_FOR_DATASETS = (
    *("mock_data", "data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path"),
    *("dataset_type", "dataset_settings", "fim_data", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
)


def _external(config: RawRunConfig) -> Iterator[Problem]:
    where = "--dataloader-type"
    for name in _FOR_DATASETS:
        if getattr(config.data, name):
            rule = f"brings batches of its own, and {flag_name(name)} is about datasets that Petatron reads"
            yield Problem(where, EXTERNAL, rule, "Leave one of the two out.")
    if config.train.full_validation:
        rule = "does not say how many samples it has, and --full-validation evaluates all"
        yield Problem(where, EXTERNAL, rule, "Give --eval-iters instead.")


def _evaluated_sets(config: RawRunConfig) -> Iterator[Problem]:
    """Yields problems of flags that select validation sets, and of runs that only evaluate."""
    data, train = config.data, config.train
    paths, where = data.valid_data_path, "--multiple-validation-sets"
    if data.multiple_validation_sets and not paths:
        rule = "makes sets of the prefixes of --valid-data-path, which is not set"
        yield Problem(where, "", rule, "Give a prefix for each set there.")
    elif data.multiple_validation_sets and None in _set_names(paths):
        counts = f"{len(paths)} words of --valid-data-path"
        if data.validation_set_names and len(data.validation_set_names) != len(paths):
            rule = f"is not one name for each of the {counts}"
            yield Problem("--validation-set-names", " ".join(data.validation_set_names), rule, "Give as many names.")
        else:
            rule = f"needs a name of its own for each of the {counts}: letters, digits, _ and -, and no weights"
            yield Problem(where, "", rule, "Give --validation-set-names, or --valid-data-path NAME=PREFIX NAME=PREFIX.")
    measured = train.full_validation or train.eval_tasks is not None or config.rollout.eval_prompts
    if train.skip_train and train.eval_iters == 0 and not measured:
        yield Problem("--skip-train", "", "evaluates only, and --eval-iters 0 evaluates nothing", "Leave one out.")


def _set_names(paths: Sequence[str]) -> Collection[str | None]:
    try:
        return named_sets(paths).keys()
    except BlendError:  # a problem of its own
        return ()


def _blends(config: RawRunConfig) -> Iterator[Problem]:
    data = config.data
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        blend = getattr(data, name)
        try:
            for part in named_sets(blend).values() if name == "valid_data_path" else (blend,):
                parse_blend(part)
        except BlendError as error:
            where = flag_name(name)
            yield Problem(where, " ".join(blend), str(error), "Write `prefix prefix` or `weight prefix weight prefix`.")
    try:
        train, _, _ = parse_split(data.split)
    except BlendError as error:
        yield Problem("--split", data.split, str(error), "Write three numbers such as 969,30,1.")
    else:
        if train == 0 and data.data_path:
            yield Problem("--split", data.split, "leaves nothing to train on", "Give training a share above 0.")


def _fill_in_middle(config: RawRunConfig) -> Iterator[Problem]:
    data = config.data
    if not data.fim_data:
        return
    if data.mock_data:
        yield Problem("--fim-data", "", "divides text, and --mock-data has none", "Give --data-path.")
    if data.dataset_type not in (None, GPT_DATASET):
        rule = f"is for text of --dataset-type {GPT_DATASET}, not {data.dataset_type}"
        yield Problem("--fim-data", "", rule, "Leave one of the two out.")
    if config.tokenizer.tokenizer_type in (None, "NullTokenizer") and not data.mock_data:
        yield Problem("--fim-data", "", "needs a tokenizer, to know the text of documents", "Give --tokenizer-model.")
    if data.fim_split_sample is not None and data.fim_fragment_rate is None:
        rule = "needs --fim-fragment-rate, the share of fragments that are divided"
        yield Problem("--fim-split-sample", data.fim_split_sample, rule, "Give both.")
    names = [f"fim_{part}_token" for part in ("prefix", "middle", "suffix")]
    values = [getattr(data, name) for name in names]
    if repeated := [name for name in names if values.count(getattr(data, name)) > 1]:
        rule = f"is {flag_name(repeated[0])} too, and what follows would not be told apart"
        yield Problem(flag_name(repeated[-1]), getattr(data, repeated[-1]), rule, "Name another token.")


def _masked_text(config: RawRunConfig) -> Iterator[Problem]:
    """Yields settings of packed documents for samples that are none."""
    data = config.data
    if data.dataset_type not in (*MASKED_DATASETS, ITEM_DATASET, IMAGE_TEXT_DATASET):
        return
    does = "has histories of items" if data.dataset_type == ITEM_DATASET else "masks tokens"
    for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if getattr(data, name):
            rule = f"is for text whose next token is predicted, and --dataset-type {data.dataset_type} {does}"
            yield Problem(flag_name(name), "", rule, "Leave it out: documents never see one another here.")


def _tokenizer(config: RawRunConfig, *, require_training: bool) -> Iterator[Problem]:
    tokenizer, vocab_size = config.tokenizer, config.model.vocab_size
    kind = tokenizer.tokenizer_type
    yield from check_tokenizer(tokenizer)
    half_given = (tokenizer.vocab_file is None) != (tokenizer.merge_file is None)
    if kind == "NullTokenizer" and vocab_size is None and not half_given:
        yield Problem("--vocab-size", "", "is not set, and NullTokenizer has no other way to know it", "Give it.")
    elif kind is None and vocab_size is None and require_training and not half_given:
        fix = "Give --tokenizer-model, --vocab-file with --merge-file, --tokenizer-type ByteTokenizer, or --vocab-size."
        yield Problem("--tokenizer-type", "", "is not set, and neither is --vocab-size", fix)
    if kind is None and vocab_size is not None:
        for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
            if getattr(config.data, name):
                rule = "needs a tokenizer to know the end-of-document token"
                yield Problem(flag_name(name), "", rule, "Give --tokenizer-model.")
