"""The kinds of files, each made when it is asked for: some need torch, and making a sample takes a moment."""

from __future__ import annotations

import importlib
import importlib.util

from tests.fuzz.kind import Kind

_OF_EXTRAS = {
    "fetch": ("pyarrow",),
    "parquet": ("pyarrow",),
    "arrow": ("pyarrow",),
    "saved-dataset": ("pyarrow",),
    "images": ("PIL",),
    "submissions": ("fastapi", "llguidance", "httpx"),
}
LACKING = {
    name: lacking
    for name, modules in _OF_EXTRAS.items()
    if (lacking := [module for module in modules if importlib.util.find_spec(module) is None])
}
"""Kinds that cannot run here, and the packages that they would need."""
_MODULES = dict.fromkeys(("parquet", "arrow", "saved-dataset"), "inputs")
KINDS = {
    "checkpoint": "checkpoint",
    "huggingface": "huggingface",
    "huggingface-moe": "huggingface",
    "huggingface-hybrid": "huggingface",
    "huggingface-hybrid-moe": "huggingface",
    "huggingface-kimi-moe": "huggingface",
    "megatron-legacy": "megatron",
    "megatron-old": "megatron",
    "megatron-dist": "megatron",
    "megatron-latent": "megatron_kinds",
    "megatron-hybrid": "megatron_kinds",
    "megatron-run-dist": "megatron_runs",
    "megatron-run-legacy": "megatron_runs",
    "megatron-run-plain": "megatron_runs",
    "dataset": "dataset",
    "jsonl": "jsonl",
    "conversations": "conversations",
    "curation": "curation",
    "compressed": "inputs",
    "csv": "inputs",
    "webdataset": "inputs",
    "sources": "sources",
    "recorded-tokenizer": "recorded_tokenizer",
    "parts": "parts",
    "tokenizer": "tokenizer",
    "settings": "settings",
    "run-folder": "run_folder",
    "rendezvous": "rendezvous",
    **{name: _MODULES.get(name, name) for name in _OF_EXTRAS if name not in LACKING},
}
PLANTED = "planted"
"""A kind that breaks every rule, to test the harness with."""


def make_kind(name: str) -> Kind:
    module = importlib.import_module(f"{__name__}.{KINDS.get(name, name)}")
    return module.make(name)
