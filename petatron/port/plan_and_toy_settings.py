"""Adapts the settings of a ported script to another size of run: a memory plan, or a toy trained here and now.

Neither reads data, tokenizers or checkpoints, so what names them is left out, and mock data take their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from petatron.base.errors import Problem
from petatron.base.terminal_escape import printable
from petatron.config.schema.fields import all_fields, fields_by_path
from petatron.config.schema.setting_metadata import ToySize
from petatron.config.value_origins import Setting, ValueOrigin
from petatron.config.yaml_file import MADE_OF
from petatron.port.port_flags import PortedFlag
from petatron.port.ported_run import PortedRun
from petatron.port.ported_yaml import settings_yaml

_PLANNED_SECTIONS = ("model", "moe", "parallel", "precision", "memory", "optim", "train")
_TOY_SECTIONS = ("model", "moe", "precision", "memory", "optim")
_TOY_SCHEDULE = ("lr_decay_style", "min_lr", "decoupled_min_lr", "seed", "deterministic_mode", "ema_decay")
_OF_REPLICAS = ("fp8_param_gather",)
"""Settings of other sections that one process cannot have."""
_OF_MACHINE = ("world_size", "distributed_backend")
"""Settings of the layout that are those of this machine."""
_NOT_PLANNED = ("train_iters", "train_samples", "eval_interval", "eval_iters", "world_size", "exit_interval")
_TOY_LR = 1e-4
_GPT2_TOKENIZER, _GPT2_VOCABULARY, _ASSUMED_VOCABULARY = "GPT2BPETokenizer", 50257, 128256


def planned_yaml(run: PortedRun) -> str:
    """Returns the settings that decide about memory."""
    kept = _of_sections(run, _PLANNED_SECTIONS)
    return _titled(run, [(setting, answer) for setting, answer in kept if _name(setting) not in _NOT_PLANNED])


def assumed_vocabulary(run: PortedRun) -> int | None:
    """Returns the vocabulary to plan with where the tokenizer's files would say it; None if the script says it."""
    values = {setting.path: setting.value for setting, _ in run.settings}
    if values.get("model.vocab_size") is not None:
        return None
    named = {*values, *(path for answer in run.flags.of_kind("missing", "typed") for path in answer.fields)}
    is_gpt2 = values.get("tokenizer.tokenizer_type") == _GPT2_TOKENIZER or "tokenizer.merge_file" in named
    return _GPT2_VOCABULARY if is_gpt2 else _ASSUMED_VOCABULARY


def toy_yaml(run: PortedRun, *, keeps_layout: bool) -> str:
    """Returns the settings of the model, its numerics and its optimizer, and those of the layout if that can run here."""
    kept = _of_sections(run, (*_TOY_SECTIONS, "parallel") if keeps_layout else _TOY_SECTIONS)
    kept += [(setting, answer) for setting, answer in run.settings if _name(setting) in _TOY_SCHEDULE]
    kept = [(setting, answer) for setting, answer in kept if keeps_layout or _name(setting) not in _OF_REPLICAS]
    kept += [(setting, None) for setting in _default_mamba_sizes([setting for setting, _ in kept])]
    return _titled(run, [(setting, answer) for setting, answer in kept if _name(setting) not in _OF_MACHINE])


def _titled(run: PortedRun, settings: Sequence[tuple[Setting, PortedFlag | None]]) -> str:
    """Returns the file, whose messages name the script."""
    return f"{MADE_OF}{printable(str(run.script.source))}\n{settings_yaml(settings)}"


def _default_mamba_sizes(settings: Sequence[Setting]) -> list[Setting]:
    """Returns the sizes of Mamba layers that a hybrid leaves at their defaults: `--toy` shrinks only what a file sets."""
    paths = {setting.path for setting in settings}
    if not any("hybrid" in path for path in paths):
        return []
    sizes = [info for info in all_fields() if info.name.startswith("mamba_") and info.notes_of(ToySize)]
    return [
        Setting(info.path, info.default, ValueOrigin("default"))
        for info in sizes
        if info.path not in paths and info.default is not None
    ]


def toy_flags(run: PortedRun, *, iterations: int, keeps_layout: bool) -> list[str]:
    """Returns the flags of the toy's run: mock data, some iterations, batches of a few samples, a learning rate if none is set."""
    values = {setting.path.partition(".")[2]: setting.value for setting, _ in run.settings}
    sizes = [values.get(f"{name}_size") for name in ("tensor_model_parallel", "context_parallel")]
    stages = values.get("pipeline_model_parallel_size")
    stages = stages if isinstance(stages, int) and keeps_layout else 1
    world = (run.world_size or 1) if keeps_layout else 1
    for size in sizes:
        world //= size if isinstance(size, int) and keeps_layout else 1
    batch = max(1, world // stages) * stages * 2
    flags = f"--toy --mock-data --train-iters {iterations} --micro-batch-size 1 --global-batch-size {batch} --log-interval 1 --eval-iters 0"
    flags += "" if "lr" in values else f" --lr {_TOY_LR}"
    return [*flags.split(), "--nproc-per-node", str((run.world_size or 1) if keeps_layout else 1)]


def toy_problems(run: PortedRun) -> Iterator[Problem]:
    """Yields why there is no model to shrink: its sizes have no value."""
    made = {_name(setting) for setting, _ in run.settings}
    if {"hidden_size"} <= made and made & {"num_layers", "hybrid_layer_pattern"}:
        return
    unknown = [answer for answer in run.flags.of_kind("missing") if any(path[:6] == "model." for path in answer.fields)]
    names = dict.fromkeys(name for answer in unknown for name in answer.missing)
    fix = " ".join(f"--set {name}=VALUE" for name in names) or "--set for what the script does not say"
    yield Problem("--toy", "", "needs --num-layers and --hidden-size, which the script does not say", f"Give {fix}.")


def toy_omissions(run: PortedRun) -> list[str]:
    """Returns the flags that the toy is trained without although they say something about the model or its numerics."""
    unmade = run.flags.of_kind("blocking", "missing")
    return [
        ported.flag.text.partition("=")[0]
        for ported in unmade
        if not ported.fields or any(path.partition(".")[0] in _TOY_SECTIONS for path in ported.fields)
    ]


def _of_sections(run: PortedRun, names: tuple[str, ...]) -> list[tuple[Setting, PortedFlag | None]]:
    return [
        (setting, answer)
        for setting, answer in run.settings
        if setting.path.partition(".")[0] in names and "path" not in fields_by_path()[setting.path].marks
    ]


def _name(setting: Setting) -> str:
    return setting.path.partition(".")[2]
