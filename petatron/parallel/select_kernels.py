"""Fills the kernel slots of layers for this device."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from petatron.kernels.registry import KernelChoice, KernelContext, choose_kernel


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
