"""Measures how many of Megatron-LM's own configurations and scripts start here.

    python -m tests.megatron_core.accept_configs FOLDER [--json FILE]

FOLDER is a checkout of Megatron-LM, or any folder with its functional-test files (`model_config.yaml`, with MODEL_ARGS) and shell
scripts. Nothing is run: each file is read as `petatron port` reads it, at the number of ranks that the recipes of the checkout
(tests/test_utils/recipes) start it with, or else at eight as most of them do. Variables of the environment have made-up values, and
files that are missing are not counted.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from petatron.base.errors import PetatronError
from petatron.config.flags.parse_command_line import known_flags
from petatron.port.environment_variable_names import is_of_environment
from petatron.port.inference_flags import RENAMED
from petatron.port.port_flags import PortedFlag, spelled
from petatron.port.ported_inference import PortedInference, answers_prompts, port_inference
from petatron.port.ported_run import PortedRun, port_script
from petatron.port.read_script import ScriptFile, read_script
from petatron.port.shell_values import is_settable

RANKS = 8
LIKELY_RANKS = (8, 4, 16, 32, 64, 128, 256, 512, 1024, 2048)
ENVIRONMENT: Mapping[str, str] = {
    "TOKENIZER_TYPE": "HuggingFaceTokenizer",
    "TOKENIZER_MODEL_PATH": "/data/tokenizer",
    "NUM_NODES": "1",
    "NNODES": "1",
    "GPUS_PER_NODE": "8",
    "GPUS": "8",
    "NODE_RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "6000",
    **dict.fromkeys(("SEED", "REPEAT", "RUN_NUMBER", "TP", "PP", "CP", "EP", "MBS"), "1"),
    "GBS": "8",
    "NLS": "4",
    "HS": "64",
    "NAH": "4",
}
"""Values of the variables that are no path."""
ARGUMENTS: Mapping[str, str] = {"CHECKPOINT": "/checkpoint", "HF_TOKEN": "token", "HF_HOME": "/hf"}
"""Variables that scripts begin with as empty, and take from their arguments."""
OUTSIDE: Mapping[str, tuple[str, ...]] = {
    "T5": ("/t5", "train_t5", "pretrain_t5"),
    "BERT": ("/bert", "_bert", "biobert"),
    "retrieval and vision": ("/retro", "/ict", "realm", "vision"),
    "multimodal": ("multimodal", "/mimo", "llava", "/nvlm", "radio", "audio"),
    "reinforcement learning": ("grpo", "/rl/", "_rl_"),
}
"""What another kind of model or of training is, by a part of the path; it is listed, and counted apart."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a file. `names` are flags that are refused whatever their value, `others` the rest that blocks."""

    file: str
    kind: str
    world_size: int | None
    names: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    unreadable: str = ""

    @property
    def is_named(self) -> bool:
        return not self.names and not self.unreadable

    @property
    def passes(self) -> bool:
        return self.is_named and not self.others


def measure(folder: Path, assumed: Sequence[str] = ()) -> list[Outcome]:
    """Returns the outcomes of all files of a folder. What matches a pattern of `assumed` does not count as blocking."""
    sizes = world_sizes(folder)
    files = [file for file in sorted(folder.rglob("*.yaml")) if _is_test(file)]
    files += [file for file in sorted(folder.rglob("*.sh")) if _is_example(file, folder)]
    return [_without(_outcome(file, folder, sizes), assumed) for file in files]


def _without(outcome: Outcome, assumed: Sequence[str]) -> Outcome:
    def remaining(texts: Sequence[str]) -> tuple[str, ...]:
        return tuple(text for text in texts if not any(fnmatch.fnmatchcase(text, pattern) for pattern in assumed))

    return replace(outcome, names=remaining(outcome.names), others=remaining(outcome.others))


def world_sizes(folder: Path) -> dict[str, int]:
    """Returns the ranks of each test case that a recipe names."""
    sizes: dict[str, int] = {}
    for file in sorted(folder.rglob("recipes/**/*.yaml")):
        recipe: Any = yaml.safe_load(file.read_text())
        if isinstance(recipe, dict) and isinstance(recipe.get("spec"), dict):
            for product in recipe.get("products") or ():
                for names, place in _places(product, recipe["spec"]):
                    for name in names:
                        sizes.setdefault(name, int(place.get("nodes", 1)) * int(place.get("gpus", RANKS)))
    return sizes


def _places(product: Mapping[str, Any], spec: Mapping[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    names = product.get("test_case", [])
    for inner in product.get("products") or ({},):
        place = {**spec, **product, **inner}
        first = {key: value[0] if isinstance(value, list) else value for key, value in place.items() if value}
        yield (names if isinstance(names, list) else [names]), first


def _is_test(file: Path) -> bool:
    return file.name == "model_config.yaml" or (
        file.stat().st_size < 1 << 17 and "\nMODEL_ARGS:" in f"\n{file.read_text()}"
    )


def _is_example(file: Path, folder: Path) -> bool:
    """Whether a script has flags of a model; those of Megatron's own test runner and of its containers have none."""
    place = file.relative_to(folder).parts
    return "tests" not in place and any(
        flag in file.read_text(errors="replace")
        for flag in (
            "--num-layers",
            "--hidden-size",
            "--micro-batch-size",
            "--tensor-model-parallel-size",
            "MODEL_ARGS",
        )
    )


def _outcome(file: Path, folder: Path, sizes: Mapping[str, int]) -> Outcome:
    name = str(file.relative_to(folder))
    kind, size = _kind(name), sizes.get(file.parent.name)
    try:
        script = _read(file)
        if answers_prompts(script):
            return _inference_outcome(name, port_inference(script, world_size=size or RANKS))
        run = port_script(script, world_size=size)
        if size is None and (run.world_size is None or _is_wrong_size(run)):
            tried = (port_script(script, world_size=ranks) for ranks in LIKELY_RANKS)
            run = next((run for run in tried if not _is_wrong_size(run)), run)
    except PetatronError as error:
        return Outcome(name, kind, size, unreadable=str(error).removeprefix(f"{file}: "))
    blocking = run.flags.of_kind("blocking")
    names = tuple(spelled(answer.flag.text) for answer in blocking if not _is_known(answer))
    others = [f"{answer.text}: {answer.why}" for answer in blocking if _is_known(answer)]
    others += [f"no value: {variable.name}" for variable in run.missing]
    others += [str(problem) for problem in run.problems]
    others += [f"{run.launch.script} {run.script_problem}"] if run.script_problem else []
    return Outcome(name, kind, run.world_size, names, tuple(others))


def _inference_outcome(name: str, run: PortedInference) -> Outcome:
    known = {*known_flags(), *RENAMED}
    refused = [problem for problem in run.problems if spelled(problem.where) not in known]
    names = tuple(dict.fromkeys(spelled(problem.where) for problem in refused))
    others = [str(problem) for problem in run.problems if problem not in refused]
    others += [f"no value: {variable.name}" for variable in run.missing]
    kind = _kind(name)
    return Outcome(name, "inference" if kind == "training" else kind, run.world_size, names, tuple(others))


def _is_wrong_size(run: PortedRun) -> bool:
    return any(
        "world size" in str(problem) or "--world-size" in str(problem) or "x data-parallel" in str(problem)
        for problem in run.problems
    )


def _read(file: Path) -> ScriptFile:
    """Reads a file; every variable without a value gets a number, or the name of a file."""
    text = file.read_text(errors="replace")
    given = {name: value for name, value in ARGUMENTS.items() if re.search(rf'^{name}=""$', text, re.M)}
    script = read_script(file, given)
    while new := _unknown_names(script) - given.keys():
        given |= {name: ENVIRONMENT.get(name, f"/{name.lower()}") for name in new}
        script = read_script(file, given)
    more = {name for word in script.launch.flags if word.is_bare for name in word.missing if is_settable(name)}
    return read_script(file, given | dict.fromkeys(more, "")) if more else script


def _unknown_names(script: ScriptFile) -> set[str]:
    """Returns the variables that a launcher's counts or a flag's value need; a word for further flags may be empty."""
    words = script.launch.flags
    needed = [
        word for before, word in zip((None, *words), words) if not word.is_bare or (before and before.text[:2] == "--")
    ]
    names = {name for word in needed for name in word.missing} | set(script.launch.unknown_counts)
    return {name for name in names if name in ENVIRONMENT or not is_of_environment(name)}


def _kind(name: str) -> str:
    outside = next((kind for kind, parts in OUTSIDE.items() if any(part in f"/{name}" for part in parts)), None)
    if outside is not None:
        return f"outside: {outside}"
    if name.endswith(".sh"):
        return "example"
    return "inference" if "inference" in name else "training"


def _is_known(answer: PortedFlag) -> bool:
    return spelled(answer.flag.text) in known_flags()


def _blocker(answer: PortedFlag) -> str:
    return spelled(answer.flag.text)


def report(outcomes: list[Outcome]) -> str:
    """Returns the counts, what blocks with how often, and every file that does not pass."""
    lines = [f"{'':34}{'files':>7}{'by name':>9}{'whole check':>13}"]
    for kind in sorted({outcome.kind for outcome in outcomes}):
        mine = [outcome for outcome in outcomes if outcome.kind == kind]
        named, passed = sum(item.is_named for item in mine), sum(item.passes for item in mine)
        lines.append(f"{kind:34}{len(mine):>7}{named:>9}{passed:>13}")
    for title, texts in (
        ("flags refused by name", [name for item in outcomes for name in set(item.names)]),
        ("values and rules", [_shortened(text) for item in outcomes for text in set(item.others)]),
        ("not readable", [item.unreadable for item in outcomes if item.unreadable]),
    ):
        lines += ["", f"{title}:"]
        lines += [f"{count:>5}  {text}" for text, count in Counter(texts).most_common()]
    lines += ["", "files that do not pass:"]
    for item in outcomes:
        if not item.passes:
            texts = [*item.names, *map(_shortened, item.others), *([item.unreadable] if item.unreadable else [])]
            lines += [f"  {item.file} ({item.kind}, {item.world_size} ranks)", *(f"      {text}" for text in texts)]
    return "\n".join(lines)


def _shortened(text: str) -> str:
    return text if len(text) < 200 else f"{text[:200]} ..."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    text = "count nothing as blocking that matches this pattern, for instance '--fim-*'"
    parser.add_argument("--assume", action="append", default=[], metavar="PATTERN", help=text)
    options = parser.parse_args()
    outcomes = measure(options.folder, options.assume)
    if not outcomes:
        print(f"{options.folder} has no functional-test file and no script with flags of a model", file=sys.stderr)
        return 1
    print(report(outcomes))
    if options.json is not None:
        items = [asdict(item) | {"by_name": item.is_named, "passes": item.passes} for item in outcomes]
        options.json.write_text(json.dumps(items, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
