"""Configurations: a file for --config, settings of communicators, a list of datasets for --data-args-path, one of tasks with their
files for --eval-tasks. No digest covers them."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from petatron.base.errors import ConfigError
from petatron.config.nccl_communicators import communicator_options
from petatron.config.saved_config import with_absolute_paths
from petatron.config.yaml_file import dump_yaml
from petatron.data.build_datasets import build_datasets
from petatron.data.indexed_writer import IndexedWriter
from petatron.data.tokenizer import ByteTokenizer
from petatron.evaluate.eval_task import ContextLimits
from petatron.evaluate.task_list import build_tasks, read_task_list
from petatron.validate import load_config
from petatron.validate.preflight import preflight
from tests.fuzz.kind import Files, Kind
from tests.fuzz.kinds.commands import petatron_says
from tests.fuzz.kinds.files import files_of

_CONFIG = b"""\
model:
  num_layers: 2
  hidden_size: 64
  num_attention_heads: 4
  seq_length: 32
  max_position_embeddings: 32
  vocab_size: 100
  norm_epsilon: 1e-5
  normalization: RMSNorm
  add_bias_linear: false
optim:
  lr: 1.0e-3
  clip_grad: 1.0
train:
  train_iters: 10
  micro_batch_size: 2
  global_batch_size: 4
data:
  mock_data: true
  split: '969,30,1'
tokenizer_type: NullTokenizer
"""
_NCCL = b"""\
tp: {is_high_priority_stream: true, max_ctas: 8}
dp:
  cga_cluster_size: 2
  min_ctas: 4
  max_ctas: 16
  net_name: IB
"""
_TASKS = b"""\
- {task: text, data: tasks.txt, stride: 4}
- task: lambada
  data: lambada.jsonl
  strict: true
- {task: arc_easy, data: arc.jsonl, name: questions, limit: 2, every: 2}
"""
_LAMBADA = b'{"text": "a cat is a cat"}\n{"text": "one \\u0074wo three"}\n'
_ARC = b'{"question": {"stem": "Why?", "choices": [{"text": "so", "label": "A"}, {"text": "no", "label": "B"}]}, "answerKey": "B"}\n'
_FLAGS = "--lr 1e-3 --train-iters 2 --vocab-size 100 --tokenizer-type NullTokenizer"


def make(name: str) -> Kind:
    files = {"config.yaml": _CONFIG, "nccl.yaml": _NCCL, "list.txt": b"0.3 one\n0.7 two\n", **_data()}
    tasks = {"tasks.yaml": _TASKS, "tasks.txt": b"(some) text", "lambada.jsonl": _LAMBADA, "arc.jsonl": _ARC}
    return Kind(
        name,
        files | tasks,
        doors={"load": _load, "show": _show, "nccl": _nccl, "list": _list, "tasks": _tasks},
        shares={"load": 2, "show": 2, "nccl": 2, "tasks": 2},
        reads={
            "load": ("config.yaml",),
            "show": ("config.yaml",),
            "nccl": ("nccl.yaml",),
            "list": ("list.txt",),
            "tasks": tuple(tasks),
        },
        formats={".yaml": "yaml", ".txt": "text", ".jsonl": "jsonl"},
    )


def _load(folder: Path, scratch: Path) -> Any:
    loaded = load_config(files=[folder / "config.yaml"])
    text = dump_yaml(with_absolute_paths(loaded.config))
    (scratch / "again.yaml").write_text(text)
    assert load_config(files=[scratch / "again.yaml"]).config == with_absolute_paths(loaded.config), (
        "a config is not what its own text says"
    )
    return text


def _show(folder: Path, scratch: Path) -> Any:
    return petatron_says("config", "show", str(folder / "config.yaml"), "--changed")


def _nccl(folder: Path, scratch: Path) -> Any:
    config = load_config(
        [*_FLAGS.split(), "--mock-data", "--nccl-communicator-config-path", str(folder / "nccl.yaml")],
        preset="tiny-llama",
    ).config
    problems = preflight(config)
    if problems:
        raise ConfigError(problems)
    return {axis: communicator_options(config.parallel).for_axis(axis) for axis in ("tp", "dp_cp", "pp")}


def _list(folder: Path, scratch: Path) -> Any:
    with contextlib.chdir(folder):
        config = load_config(
            [*_FLAGS.split(), "--data-args-path", "list.txt", "--split", "100,0,0", "--data-cache-path", str(scratch)],
            preset="tiny-llama",
        ).config
        build_datasets(config, None, (4, 0, 0))
        return with_absolute_paths(config).data.data_path


def _tasks(folder: Path, scratch: Path) -> Any:
    settings = read_task_list(folder / "tasks.yaml")
    tasks = build_tasks(settings, ByteTokenizer(), ContextLimits(max_tokens=32, window=8))
    return [(each.label, task.sequences, task.notes) for each, task in zip(settings, tasks, strict=True)]


def _data() -> Files:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("one", "two"):
            with IndexedWriter(Path(folder) / name, "uint16") as writer:
                writer.add_document(list(range(50)))
        return files_of(Path(folder))
