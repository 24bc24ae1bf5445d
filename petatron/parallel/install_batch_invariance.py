"""Makes every function of rows in a stage batch-invariant: GEMMs, attention, routers and the output head (`kernels/batch_invariant`).

Kernels of norms, activations and losses are slots, which the registry fills.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from petatron.base.errors import Problem, raise_problems
from petatron.kernels.batch_invariant.attention import RowAttention
from petatron.kernels.batch_invariant.gemm import GroupedRowGemm, RowGemm, RowGemmKernels, multiply_rows
from petatron.kernels.batch_invariant.row_functions import fixed_order_sum, sigmoid, softmax
from petatron.kernels.registry import KernelChoice, KernelContext, choose_kernel
from petatron.layers.attention import Attention
from petatron.layers.core_attention import CoreAttention
from petatron.layers.mla import MultiLatentAttention
from petatron.layers.moe.experts import GroupedLinear
from petatron.layers.moe.router import Router, RouterFunctions
from petatron.layers.vocabulary.output_head import OutputHead
from petatron.models.model_spec import ModelSpec
from petatron.models.stage_interface import StageModule
from petatron.parallel.tensor_parallel import slots_of


def check_batch_invariance(spec: ModelSpec) -> None:
    """Raises `ConfigError` for a model with functions that have no batch-invariant implementation."""
    branches = {branch for layer in set(spec.generation_layers) for branch in layer.branches}
    names = sorted({name for branch in branches if (name := branch.batch_dependence()) is not None})
    fix = "Leave it out: then the difference is measured."
    raise_problems(
        [Problem("--exact-rollouts", "", f"has no batch-invariant functions for {name}", fix) for name in names]
    )


def apply_batch_invariance(stage: StageModule, kernel_context: KernelContext) -> list[KernelChoice]:
    """Fills the slots of a stage, after tensor parallelism and before context parallelism; returns the choices."""
    choices = [choose_kernel(operation, kernel_context) for operation in ("GEMM of rows", "attention of rows")]
    kernels: RowGemmKernels = choices[0].functions
    gemm, attention = RowGemm(kernels), RowAttention(choices[1].functions)
    for module in stage.modules():
        for slot in slots_of(module, "linear", "column linear"):
            linear_op = getattr(module, slot)
            setattr(module, slot, replace(linear_op, gemm_op=replace(linear_op.gemm_op, gemm=gemm)))
        if isinstance(module, OutputHead):
            module.gemm, module.make_loss_gemm = gemm, lambda loss_weights_T: gemm
            module.logits_gemm = kernels.matmul_rows
        elif isinstance(module, GroupedLinear):
            module.grouped_gemm = partial(GroupedRowGemm, kernels=kernels)
        elif isinstance(module, Router):
            module.functions = RouterFunctions(
                partial(multiply_rows, kernels=kernels), sigmoid, softmax, fixed_order_sum
            )
        elif isinstance(module, CoreAttention):
            module.attend = attention
        elif isinstance(module, Attention | MultiLatentAttention):
            module.attend_to_pages = attention.over_pages
    return choices
