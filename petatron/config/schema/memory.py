"""The settings that trade time for memory: activation recompute, and offload of activations and optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from petatron.config.schema.numeric_bounds import (
    BucketElements,
    Fraction,
    Gigabytes,
    LayerCount,
)
from petatron.config.schema.parallel import HAS_PIPELINE
from petatron.config.schema.setting_metadata import Feature, UsedWhen, used_with
from petatron.config.schema.setting_types import FilePath

RecomputeModule = Literal[
    "core_attn", "attention", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mamba", "delta"
]
OffloadModule = Literal[
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "mlp",
    "moe",
    "expert_fc1",
    "moe_act",
    "experts",
    "shared_experts",
    "mamba",
    "delta",
]
_SELECTIVE = used_with("memory.recompute_granularity", value="selective")
_RECOMPUTES = used_with("memory.recompute_granularity", reason="it is for --recompute-granularity full")
_BY_MODULE = used_with("memory.fine_grained_activation_offloading")
_OFFLOADS = used_with("memory.optimizer_cpu_offload", "memory.optimizer_nvme_offload")
_ON_DEVICE = UsedWhen(lambda run: run.train.device != "cpu", "the CPU computes, and its memory is the host's")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """Trading time for memory."""

    feature: ClassVar = Feature("memory", role="training")
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: whole layers, or chosen modules."""
    recompute_method: Annotated[Literal["uniform", "block"], _RECOMPUTES] | None = None
    """With full recompute: in units of N layers, or for the first N layers."""
    recompute_num_layers: Annotated[LayerCount, "at least 1", _RECOMPUTES] | None = None
    """The N of `--recompute-method`."""
    recompute_modules: tuple[Annotated[RecomputeModule, _SELECTIVE], ...] = ("core_attn",)
    """With selective recompute: which modules."""
    recompute_memory_budget_gb: Annotated[Gigabytes, "above 0"] | None = None
    """Activation memory per rank in GB; what to recompute is chosen to fit it."""
    cpu_offloading_num_layers: Annotated[LayerCount, "at least 0"] = 0
    """Layers of every pipeline stage, evenly spread, whose activations wait in host memory for the backward pass."""
    fine_grained_activation_offloading: bool = False
    """Let the activations of chosen modules wait in host memory for the backward pass, in every layer."""
    offload_modules: tuple[Annotated[OffloadModule, _BY_MODULE], ...] = ("core_attn",)
    """With `--fine-grained-activation-offloading`: which modules; what they save, their inputs mostly, leaves the device."""
    min_offloaded_tensor_size: Annotated[BucketElements, _BY_MODULE] = 1 << 20
    """Tensors with fewer elements stay on the device."""
    activation_offload_fraction: Annotated[Fraction, _BY_MODULE] = 1.0
    """How much of it leaves: this share of a stage's modules, counted in all of its layers, the first ones."""
    delta_offload_bytes_across_pp_ranks: Annotated[BucketElements, _BY_MODULE, HAS_PIPELINE] = 0
    """How many bytes fewer each pipeline rank offloads than the one before, of all micro-batches it holds."""
    fine_grained_offloading_max_inflight_offloads: Annotated[LayerCount, "at least 0", _BY_MODULE] | None = None
    """Layers whose copies to the host may be under way behind the layer that runs; computing waits for older ones. Derived: 1."""
    optimizer_cpu_offload: Annotated[bool, _ON_DEVICE] = False
    """Keep master weights and moments in host memory; they visit the device for every update, and no number changes.
    Where weights are their own master weights (FSDP, and runs without --bf16 or --fp16), moments alone."""
    optimizer_nvme_offload: FilePath | None = None
    """Folder on a fast disk for the same, made if need be in a folder that exists. What is there ends with the run;
    checkpoints are what lasts."""
    optimizer_offload_fraction: Annotated[Fraction, _OFFLOADS] = 1.0
    """How much of the optimizer state is offloaded; the rest stays on the device."""
    check_memory: bool = True
    """Stop before anything is allocated when a rank is predicted to need more memory than its device, or the host, has."""

    @property
    def offloads_activations(self) -> bool:
        """Whether activations of some layers or modules wait in host memory."""
        return self.cpu_offloading_num_layers > 0 or self.fine_grained_activation_offloading
