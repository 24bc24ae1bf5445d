"""Fills the kernel slots of layers for this device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from petatron.base.log import get_logger
from petatron.kernels.registry import KernelChoice, KernelContext, choose_kernel
from petatron.models.model_spec import ModelSpec
from petatron.models.stage_interface import StageModule
from petatron.parallel.install_batch_invariance import apply_batch_invariance, check_batch_invariance

_log = get_logger(__name__)


def select_stage_kernels(stages: Sequence[StageModule], spec: ModelSpec, kernel_context: KernelContext) -> None:
    """Fills the kernel slots of a rank's stages, with batch-invariant functions where the context asks for them."""
    if kernel_context.batch_invariant:
        check_batch_invariance(spec)
    choices = [choice for stage in stages for choice in select_kernels(stage, kernel_context)]
    if kernel_context.batch_invariant:
        choices += [choice for stage in stages for choice in apply_batch_invariance(stage, kernel_context)]
    for choice in {str(choice) for choice in choices}:
        _log.debug("%s", choice)


def select_kernels(model: nn.Module, kernel_context: KernelContext) -> list[KernelChoice]:
    """Fills the `kernel_slots` of every module with the fastest kernels available; returns the choices."""
    chosen: dict[str, KernelChoice] = {}
    for module in model.modules():
        slots: Mapping[str, str] = module.kernel_slots() if hasattr(module, "kernel_slots") else {}
        for attribute, operation in slots.items():
            if operation not in chosen:
                chosen[operation] = choose_kernel(operation, kernel_context)
            setattr(module, attribute, chosen[operation].functions)
    return list(chosen.values())
