"""What to do after a run: commands with the run's own paths.

A verb that is added to the command line gets its line in `next_commands`; those of verbs that this installation does not have are
left out.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path

from petatron.config import RunConfig
from petatron.models.hf import matching_family
from petatron.models.registry import model_spec


def next_commands(
    run: RunConfig,
    *,
    verbs: Collection[str],
    log_dir: Path,
    train_iters: int,
    complete: bool,
    saved: bool,
    launcher: str = "single",
) -> list[tuple[str, str]]:
    """Returns commands, each with its purpose, that work as they are printed.

    `saved` tells whether there is a checkpoint; `launcher` started the ranks, if the command itself did not.
    """
    folder, found = run.checkpoint.save, []
    if saved and folder is not None:
        found += [
            (
                _resume_command(run, folder, log_dir, train_iters if complete else None),
                _resume_purpose(complete) + ("" if launcher == "single" else f", started with {launcher} as before"),
            ),
            *_generation_commands(run, folder),
            (f"checkpoint verify {shlex.quote(folder)}", "check every byte of the checkpoint"),
        ]
    if saved and folder is not None and has_hf_family(run):
        exported = str(Path(folder).with_name(f"{Path(folder).name}-huggingface"))
        words = f"checkpoint convert {shlex.quote(folder)} {shlex.quote(exported)} --to huggingface"
        found.append((words, "export the model for transformers and others"))
    found += [
        (f"plot {shlex.quote(str(log_dir))}", "draw its curves"),
        (f"report {shlex.quote(str(log_dir))}", "one HTML file to send to a colleague"),
    ]
    return [(f"petatron {words}", purpose) for words, purpose in found if words.split()[0] in verbs]


def has_hf_family(run: RunConfig) -> bool:
    """Whether some family of `transformers` has models with such layers, and a name map here."""
    return matching_family(model_spec(run)) is not None


def _generation_commands(run: RunConfig, folder: str) -> list[tuple[str, str]]:
    """Only a model that knows text, and whose layers can generate, can be asked for some."""
    kind = run.tokenizer.tokenizer_type
    if run.model.model_type != "decoder" or kind is None or kind == "NullTokenizer":
        return []
    return [
        (f"generate {shlex.quote(folder)} --prompt 'Once upon a time'", "continue a text with the model"),
        (f"chat {shlex.quote(folder)}", "talk to it"),
        (f"serve {shlex.quote(folder)}", "answer clients of OpenAI's API, and a browser"),
    ]


def _resume_command(run: RunConfig, folder: str, log_dir: Path, train_iters: int | None) -> str:
    """Restarts from the saved settings; a run that is complete is made twice as long."""
    words = ["train", str(log_dir / "config.yaml"), "--load", folder]
    if train_iters is not None and run.train.train_samples is not None:
        words += ["--train-samples", str(2 * run.train.train_samples), "--override-opt-param-scheduler"]
    elif train_iters is not None:
        words += ["--train-iters", str(2 * train_iters), "--override-opt-param-scheduler"]
    return shlex.join(words)


def _resume_purpose(complete: bool) -> str:
    return "train twice as long, from this checkpoint" if complete else "go on from this checkpoint"
