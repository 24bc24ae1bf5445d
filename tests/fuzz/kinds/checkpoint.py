"""A folder of checkpoints of ours: manifest, table, safetensors, documents of the model, `latest`.

Digests cover everything in a step, so a changed step must be refused or give what was saved. They do not cover `latest`, which only
names a step. Someone who means harm makes the digests fit: then other content is what the files say.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import petatron
from petatron.checkpoint.files import manifest, step_folder
from petatron.checkpoint.files.digested_file_io import digest_file
from petatron.pretrained.read_checkpoint_args import read_checkpoint_args
from tests.fuzz.kind import Case, Files, Kind, Refused
from tests.fuzz.kinds import models
from tests.fuzz.kinds.commands import petatron_says
from tests.fuzz.kinds.files import files_of

STEP = "step-00000003"
TABLE, MANIFEST = f"{STEP}/{step_folder.table_path(0)}", f"{STEP}/{step_folder.MANIFEST_FILE}"


def make(name: str) -> Kind:
    run, model = models.tiny("--bf16")
    optimizer = petatron.build_optimizer(run, model)
    facts = {
        "progress": {"step": 3, "consumed_samples": 24},
        "config": {"model": {"num_layers": 1}},
        "data": {"seed": 7},
    }
    with tempfile.TemporaryDirectory() as folder:
        petatron.save_checkpoint(folder, step=3, model=model, optimizer=optimizer, metadata=facts)
        files = files_of(Path(folder))
    into = models.tiny("--bf16")[1]
    with_state = petatron.build_optimizer(run, into)

    def load(folder: Path, scratch: Path) -> Any:
        found = petatron.load_checkpoint(str(folder), model=into, optimizer=with_state)
        if found is None:  # as documented: no step of the folder has a manifest that is a file
            raise Refused("there is no checkpoint")
        weights = {name: models.digest(parameter) for name, parameter in into.module.named_parameters()}
        return json.dumps(found, sort_keys=True), weights

    def save(folder: Path, scratch: Path) -> Any:
        petatron.save_checkpoint(str(folder), step=4, model=model, optimizer=optimizer, metadata=facts)
        petatron_says("checkpoint", "prune", str(folder), "--keep", "1")
        return sorted(step_folder.list_steps(folder))

    return Kind(
        name,
        files,
        doors={
            "verify": _verify, "inspect": _inspect, "args": _args, "load": load, "read": models.read, "huggingface": models.to_huggingface,
            "petatron": models.to_petatron, "pretrained": models.pretrained, "save": save, "diff": _diff,
        },
        shares={"verify": 3, "load": 3, "inspect": 2, "huggingface": 0.5, "petatron": 0.5, "pretrained": 0.5, "save": 0.3},
        formats={".json": "json", ".safetensors": "safetensors", "latest": "text"},
        inner=files,
        seal=_seal,
        covered=_covered,
    )  # fmt: skip


def _covered(case: Case) -> bool:
    """Whatever is in the step, for the doors that read it; a save only has to keep to the folder."""
    return not case.sealed and case.door != "save" and any(path.startswith(f"{STEP}/") for path in case.changes)


def _seal(files: Files) -> Files:
    """Makes sizes and digests fit as far as the table and the manifest can still be understood."""
    files = dict(files)
    try:
        body = json.loads(files[TABLE])
        for path, facts in body["files"].items():
            body["files"][path] = _file_facts(files[f"{STEP}/{path}"], facts)
        files[TABLE] = json.dumps(body).encode() if body != json.loads(files[TABLE]) else files[TABLE]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    try:
        head = json.loads(files[MANIFEST])
        head.pop("digest", None)
        for path in head["tables"]:
            content = files[f"{STEP}/{path}"]
            head["tables"][path] = [len(content), manifest.table_digest(content)]
        files[MANIFEST] = json.dumps({**head, "digest": manifest._digest(head)}).encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    return files


def _file_facts(content: bytes, facts: Any) -> Any:
    """The entry of a file in a table, with the size and digests that the file has, in the form that the entry has."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        stored = digest_file(Path(file.name))
    if isinstance(facts, dict):
        return {**facts, "bytes": stored.size_bytes, "blocks": list(stored.block_digests)}
    return [stored.size_bytes, list(stored.block_digests)]


def _verify(folder: Path, scratch: Path) -> Any:
    """Good means: byte for byte what was saved, and nothing else there. The manifest's digest covers what it says, not its spaces."""
    petatron_says("checkpoint", "verify", str(folder), "--all")
    files = files_of(folder / STEP)
    return {**files, "manifest.json": json.loads(files["manifest.json"])}


def _inspect(folder: Path, scratch: Path) -> Any:
    petatron_says("checkpoint", "inspect", str(folder), "--tensors")
    return json.loads(petatron_says("checkpoint", "inspect", str(folder), "--json"))["tensors"]


def _diff(folder: Path, scratch: Path) -> Any:
    return petatron_says("checkpoint", "diff", str(folder), str(folder / STEP))


def _args(folder: Path, scratch: Path) -> Any:
    config = petatron.load(
        "tiny-llama", ["--mock-data", "--load", str(folder), "--lr", "1", "--train-iters", "1"]
    ).config.checkpoint
    return json.dumps(read_checkpoint_args(config).sections, sort_keys=True, default=str)
