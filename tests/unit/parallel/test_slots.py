"""Modules declare what tensor and context parallelism give them, so a module that the package does not know gets it too."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import pytest
import torch
from torch import nn

import petatron.parallel
from petatron.layers.parallel_slots import ContextSlot, TensorSlot
from petatron.layers.spec.param_spec import ParamSpec
from petatron.layers.vocabulary.vocabulary_shard import VocabShard
from petatron.mesh.comm_record import CommRecord
from petatron.mesh.mesh import Axis
from petatron.models.stage_inputs_outputs import SequenceOrder
from petatron.parallel.context import ContextParallelAttention, apply_context_parallel
from petatron.parallel.context.contiguous_part_exchange import AxisParts
from petatron.parallel.tensor_parallel import (
    ColumnParallelOp,
    RowParallelOp,
    apply_tensor_parallel,
    set_weight_grad_target,
    shard_params,
    shard_vocabulary,
)
from petatron.sharding.shard_spec import ModelParallelCoordinate, Section, Shard

AXIS = Axis("tp", 2, 1, (0, 1), None, CommRecord())
SECTIONS = (Section("a", 4, 2), Section("b", 8, 2))


class Unknown(nn.Module):
    """Has a slot of every kind."""

    tensor_slots = {kind: kind for kind in get_args(TensorSlot) if kind != "column linear"}

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(12, 6, device="meta"))
        for slot in self.tensor_slots:
            setattr(self, slot, None)
        setattr(self, "vocabulary shard", VocabShard(12, 0, 12))


def filled(
    *, sequence_parallel: bool, shard: Shard, role: Literal["vocabulary", "other"] = "other"
) -> tuple[Unknown, torch.Generator]:
    model, generator = nn.Module(), torch.Generator()
    model.unknown = Unknown()
    params = {"unknown.weight": ParamSpec(shape=(12, 6), shard=shard, role=role)}
    shard_params(model, params, ModelParallelCoordinate(tp_size=2, tp_rank=1))
    apply_tensor_parallel(model, params, AXIS, sequence_parallel=sequence_parallel, shared_generator=generator)
    if role == "vocabulary":
        shard_vocabulary(model, params, AXIS)
    return model.unknown, generator


def slot(module: nn.Module, kind: TensorSlot) -> object:
    return getattr(module, kind)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_an_unknown_module_gets_what_it_declares(sequence_parallel: bool):
    module, generator = filled(sequence_parallel=sequence_parallel, shard=Shard(tp=0, sections=SECTIONS))
    assert isinstance(slot(module, "linear"), ColumnParallelOp) and slot(module, "sections") == (2, 4)
    assert slot(module, "tensor rank") == (1, 2)
    assert callable(slot(module, "whole sequence")) and callable(slot(module, "summed output"))
    assert (slot(module, "sequence shard") is not None) is sequence_parallel
    assert slot(module, "shared generator") is (None if sequence_parallel else generator)


def test_the_vocabulary_is_shared():
    module, _ = filled(sequence_parallel=False, shard=Shard(tp=0, pad_to=2), role="vocabulary")
    shard = slot(module, "vocabulary shard")
    assert isinstance(shard, VocabShard) and (shard.first_id, shard.num_ids) == (6, 6)


def test_a_linear_follows_the_shard_of_its_weight():
    module, _ = filled(sequence_parallel=False, shard=Shard(tp=1))
    assert isinstance(slot(module, "linear"), RowParallelOp) and slot(module, "sections") is None


def test_gradients_of_weights_go_to_the_target():
    module, _ = filled(sequence_parallel=False, shard=Shard(tp=0, sections=SECTIONS))
    target = object()
    set_weight_grad_target(module, target)  # pyright: ignore[reportArgumentType]
    linear_op = slot(module, "linear")
    assert isinstance(linear_op, ColumnParallelOp) and linear_op.gemm_op.weight_grad_target is target
    assert slot(module, "weight-gradient target") is target


class Recurrence(nn.Module):
    context_slots: dict[str, ContextSlot] = {"parts": "sequence parts", "attend": "attention"}
    parts = attend = None


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_context_parallelism_fills_what_is_declared(order: SequenceOrder):
    model = nn.Sequential(Recurrence())
    cp, one = Axis("cp", 2, 0, (0, 1), None, CommRecord()), Axis("cp", 1, 0, (0,), None, CommRecord())
    mesh: Any = SimpleNamespace(cp=cp, blocks=lambda name, count: one, strides=lambda name, count: cp)
    if order == "zigzag":
        with pytest.raises(AssertionError, match="Recurrence needs contiguous parts"):
            apply_context_parallel(model, mesh, comm_type="p2p", order=order)
        return
    apply_context_parallel(model, mesh, comm_type="p2p", order=order)
    assert isinstance(model[0].parts, AxisParts) and isinstance(model[0].attend, ContextParallelAttention)


def test_no_layer_is_asked_for_its_class():
    """Of layers only slots, ops, layouts and what all adapters have are imported where tensor and context parallelism are applied."""
    folder = Path(petatron.parallel.__file__ or "").parent
    shared = ("parallel_slots", "ops.", "spec.", "token_rows", "vocabulary.vocabulary_shard", "adapters.adapter")
    for path in (folder / "tensor_parallel.py", *(folder / "context").glob("*.py")):
        modules = [
            node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
        ]
        layers = [module.removeprefix("petatron.layers.") for module in modules if module.startswith("petatron.layers")]
        assert all(module.startswith(shared) for module in layers), f"{path.name} imports {layers}"
