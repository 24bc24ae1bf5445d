"""The kinds of files, each made when it is asked for: some need torch, and making a sample takes a moment."""

from __future__ import annotations

import importlib
import importlib.util

from tests.fuzz.kind import Kind


def _has(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) for module in modules)


KINDS = {
    "checkpoint": "checkpoint",
    "huggingface": "huggingface",
    "huggingface-moe": "huggingface",
    "huggingface-hybrid": "huggingface",
    "huggingface-hybrid-moe": "huggingface",
    "huggingface-kimi-moe": "huggingface",
    "megatron-legacy": "megatron",
    "megatron-dist": "megatron",
    "megatron-latent": "megatron_kinds",
    "megatron-hybrid": "megatron_kinds",
    "dataset": "dataset",
    "jsonl": "jsonl",
    "tokenizer": "tokenizer",
    "settings": "settings",
    "run-folder": "run_folder",
    "rendezvous": "rendezvous",
    # Those of extras, where they are installed.
    **({"fetch": "fetch"} if importlib.util.find_spec("pyarrow") else {}),
    **({"submissions": "submissions"} if _has("fastapi", "llguidance", "httpx") else {}),
}
PLANTED = "planted"
"""A kind that breaks every rule, to test the harness with."""


def make_kind(name: str) -> Kind:
    module = importlib.import_module(f"{__name__}.{KINDS.get(name, name)}")
    return module.make(name)
