"""Translates Megatron's training arguments and the state of its schedule to sections of our configuration, and back.

Names are the same. Megatron counts its schedule in samples, whatever the arguments count in; ours counts in iterations if the length of
the run is given in iterations. So a run whose global batch size changed on the way continues its curve in samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import ConfigError, Problem
from petatron.base.untrusted_files import is_count
from petatron.checkpoint.megatron.arguments import parse_values

Sections = dict[str, dict[str, Any]]
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "optim": ("optimizer", "lr", "decoupled_lr", "weight_decay", "start_weight_decay", "end_weight_decay",
              "weight_decay_incr_style", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps"),
    "schedule": ("lr_decay_style", "min_lr", "decoupled_min_lr", "lr_warmup_init", "lr_warmup_fraction", "lr_wsd_decay_style",
                 *(f"{name}_{unit}" for name in ("lr_warmup", "lr_decay", "lr_wsd_decay") for unit in ("iters", "samples"))),
    "train": ("global_batch_size", "micro_batch_size", "rampup_batch_size", "train_iters", "train_samples", "seed"),
    "precision": ("bf16", "fp16", "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
}  # fmt: skip
_LOSS_SCALE = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_LENGTHS = {"lr_warmup_steps": "lr_warmup", "lr_decay_steps": "lr_decay"}
_FIX = "Convert the weights alone with --no-optim."


def training_sections(arguments: Mapping[str, Any], scheduler: Mapping[str, Any], *, iteration: int) -> Sections:
    """Returns the sections `optim`, `schedule`, `train` and `precision` of a run; `ConfigError` with all that is missing or strange.

    The state of the schedule is what counts, where the arguments say otherwise. iteration: how many the run has made so far.
    """
    values = {name: arguments.get(name) for names in _FIELDS.values() for name in names}
    in_samples = values["train_samples"] is not None
    given_batch = values["global_batch_size"]
    batch = int(given_batch) if given_batch is not None and is_count(given_batch, 1) else 0
    if not in_samples and batch and scheduler and not _counts_iterations(scheduler, batch, iteration):
        in_samples = True
        values["train_samples"] = _samples_at_the_end(arguments, batch, iteration)
    _drop_unused(values, in_samples)
    _apply_scheduler(values, scheduler, 1 if in_samples else batch or 1, in_samples)
    problems: list[Problem] = []
    given = {name: value for name, value in values.items() if value is not None and value is not False}
    parsed = parse_values(given, problems, _FIX)
    sections: Sections = {
        section: {name: parsed[name] for name in names if name in parsed} for section, names in _FIELDS.items()
    }
    for section, name in (("optim", "lr"), ("train", "global_batch_size"), ("train", f"train_{_unit(in_samples)}")):
        if name not in sections[section]:
            rule = "is not in the checkpoint's arguments, and its optimizer cannot go on without it"
            problems.append(Problem(f"--{name.replace('_', '-')}", "", rule, _FIX))
    if problems:
        raise ConfigError(problems)
    return sections


def _unit(in_samples: bool) -> str:
    return "samples" if in_samples else "iters"


def _counts_iterations(scheduler: Mapping[str, Any], batch: int, iteration: int) -> bool:
    """Whether iterations of this batch size say the same as the schedule's samples: those done so far, and all lengths."""
    lengths = [scheduler[name] for name in (*_LENGTHS, "wd_incr_steps", "num_steps") if scheduler.get(name) is not None]
    # A warm-up by --lr-warmup-fraction need not be a whole number of iterations.
    divisible = all(isinstance(length, float) or (is_count(length) and length % batch == 0) for length in lengths)
    return divisible and int(scheduler.get("num_steps") or 0) // batch <= iteration


def _samples_at_the_end(arguments: Mapping[str, Any], batch: int, iteration: int) -> int:
    iterations = arguments.get("train_iters") or 0
    return (arguments.get("consumed_train_samples") or 0) + max(iterations - iteration, 1) * batch


def _drop_unused(values: dict[str, Any], in_samples: bool) -> None:
    """Removes what Megatron stores beside settings that leave it without an effect."""
    unused = [f"{name}_{_unit(not in_samples)}" for name in ("lr_warmup", "lr_decay", "lr_wsd_decay", "train")]
    if values["weight_decay_incr_style"] in (None, "constant"):
        unused += ["start_weight_decay", "end_weight_decay"]
    if values["lr_decay_style"] != "WSD":
        unused += ["lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"]
    if values["decoupled_lr"] is None:
        unused += ["decoupled_min_lr"]
    if not values["fp16"]:
        unused += _LOSS_SCALE
    values.update(dict.fromkeys(unused))


def _apply_scheduler(values: dict[str, Any], scheduler: Mapping[str, Any], samples: int, in_samples: bool) -> None:
    """Replaces the arguments by the state of the schedule; samples: in a unit of its lengths in ours."""
    if not scheduler:
        return
    renamed = {
        "max_lr": "lr",
        "min_lr": "min_lr",
        "lr_decay_style": "lr_decay_style",
        "wd_incr_style": "weight_decay_incr_style",
    }
    values.update({ours: scheduler[name] for name, ours in renamed.items() if scheduler.get(name) is not None})
    fraction, decay, warmup = (
        values["lr_warmup_fraction"],
        scheduler.get("lr_decay_steps"),
        scheduler.get("lr_warmup_steps"),
    )
    for name, ours in _LENGTHS.items():
        if scheduler.get(name) is not None:
            values[f"{ours}_{_unit(in_samples)}"] = int(scheduler[name]) // samples
    if fraction is not None and decay is not None and warmup == fraction * decay:
        values[f"lr_warmup_{_unit(in_samples)}"] = None
    else:
        values["lr_warmup_fraction"] = None
    if values["weight_decay_incr_style"] == "constant":
        values["weight_decay"] = scheduler.get("end_wd", values["weight_decay"])
    else:
        values["start_weight_decay"] = scheduler.get("start_wd", values["start_weight_decay"])
        values["end_weight_decay"] = scheduler.get("end_wd", values["end_weight_decay"])


def megatron_arguments(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a run's settings as Megatron's arguments."""
    values = {name: sections.get(section, {}).get(name) for section, names in _FIELDS.items() for name in names}
    values["rampup_batch_size"] = list(values["rampup_batch_size"] or ()) or None
    if values["weight_decay_incr_style"] in (None, "constant"):
        values["start_weight_decay"] = values["end_weight_decay"] = values["weight_decay"]
    return {**values, "bf16": bool(values["bf16"]), "fp16": bool(values["fp16"])}


def megatron_scheduler(arguments: Mapping[str, Any], *, update_samples: int) -> dict[str, Any]:
    """Returns the state of Megatron's schedule after updates on `update_samples` samples."""
    in_samples = arguments["train_samples"] is not None
    samples, unit = 1 if in_samples else arguments["global_batch_size"], _unit(in_samples)
    total = arguments[f"train_{unit}"] * samples
    decay = (arguments[f"lr_decay_{unit}"] or arguments[f"train_{unit}"]) * samples
    warmup: float = (arguments[f"lr_warmup_{unit}"] or 0) * samples
    if arguments["lr_warmup_fraction"] is not None:
        warmup = arguments["lr_warmup_fraction"] * decay
    return {
        "max_lr": float(arguments["lr"]),
        "lr_warmup_steps": warmup,
        "num_steps": update_samples,
        "lr_decay_style": arguments["lr_decay_style"],
        "lr_decay_steps": decay,
        "min_lr": arguments["min_lr"],
        "start_wd": arguments["start_weight_decay"],
        "end_wd": arguments["end_weight_decay"],
        "wd_incr_style": arguments["weight_decay_incr_style"],
        "wd_incr_steps": total,
    }
