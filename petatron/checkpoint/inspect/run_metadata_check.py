"""Checks what a manifest says about its training run against the step itself and against other steps of the run.

Digests tell that files are what was saved. The metadata of a run (progress, model, settings) is in the manifest, which whoever may write to
the folder can write anew with a fitting digest: sound weights then come with a position, or with a model, that is not theirs.
Metadata that other programs save (`petatron.save_checkpoint(..., metadata=...)`) means what these say, and is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from petatron.base.untrusted_files import is_count
from petatron.config.schema.model_identity import identity_differences

RUN_KEYS = frozenset({"progress", "model", "config"})
"""What the metadata of a training run has."""
_COUNTS = ("iteration", "consumed_samples", "consumed_tokens", "updates", "update_samples")


def is_run_metadata(metadata: Mapping[str, Any]) -> bool:
    """Whether a training run has saved it, and not another program."""
    return metadata.keys() >= RUN_KEYS


def run_metadata_problems(metadata: Mapping[str, Any], *, step: int) -> Iterator[str]:
    """Yields what the metadata of a run says that cannot be so, as "says ..."."""
    if not is_run_metadata(metadata):
        return
    yield from _progress_problems(metadata["progress"], step)
    model, config = metadata["model"], metadata["config"]
    settings = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict) or not isinstance(settings, dict):
        yield "says nothing of the model"
        return
    moe = config.get("moe")
    ours = {**settings, **(moe if isinstance(moe, dict) else {})}
    for name in identity_differences(model, ours):
        yield f"says that {name} is {model[name]}, and among the settings of the run that it is {ours[name]}"


def _progress_problems(progress: Any, step: int) -> Iterator[str]:
    counts: dict[str, Any] = {name: progress.get(name) for name in _COUNTS} if isinstance(progress, dict) else {}
    wrong = [name for name, value in counts.items() if not is_count(value)]
    if not counts or wrong:
        yield f"says no number of {', '.join(wrong or _COUNTS)}"
        return
    if counts["iteration"] != step:
        yield f"says that step {step} was saved at iteration {counts['iteration']:,}"
    for part, total in (("updates", "iteration"), ("update_samples", "consumed_samples")):
        if counts[part] > counts[total]:
            yield f"says {part} {counts[part]:,} of {total} {counts[total]:,}"


def other_run_problems(metadata: Mapping[str, Any], earlier: Mapping[str, Any]) -> Iterator[str]:
    """Yields why a step is not of the run that an earlier step is of."""
    if not is_run_metadata(earlier):
        return
    if not is_run_metadata(metadata):
        yield f"says nothing of the run's {', '.join(sorted(RUN_KEYS - metadata.keys()))}"
        return
    model, before = metadata["model"], earlier["model"]
    if not isinstance(model, dict) or not isinstance(before, dict):
        return
    for name in identity_differences(model, before):
        yield f"says that {name} is {model[name]}, and the step that is served that it is {before[name]}"
    missing = sorted(before.keys() - model.keys())
    if missing:
        yield f"does not say {', '.join(missing)} of the model"
    counts: list[Any] = [
        recorded["progress"].get("consumed_samples")
        for recorded in (metadata, earlier)
        if isinstance(recorded["progress"], dict)
    ]
    if len(counts) == 2 and all(is_count(count) for count in counts) and counts[0] < counts[1]:
        yield f"says {counts[0]:,} consumed samples, and an earlier step {counts[1]:,}"
