"""The settings of adapters: small trainable parameters beside the frozen weights of a model."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from petatron.config.schema.numeric_bounds import DropoutRate, PositiveCount, PositiveFactor
from petatron.config.schema.setting_metadata import Feature, NotWith, UsedWhen, settings_section, used_with

_LOW_RANK = UsedWhen(lambda run: run.model.adapter != "ia3", "--adapter ia3 has scales, and no matrices of a rank")

_NOT_DORA = NotWith(
    "adapter",
    when=lambda kind: kind == "dora",
    rule="and --adapter {value} are not combined: the weight's own output would need a second GEMM, of the dropped input",
    shown="{:g}",
)

_NO_FSDP = NotWith(
    "data_parallel_sharding_strategy",
    when=lambda strategy: strategy in ("optim_grads", "optim_grads_params"),
    rule="and --data-parallel-sharding-strategy {value} are not combined: ranks would gather quantized weights",
    fix="Use --use-distributed-optimizer, which shards the state of what is trained.",
)
_NO_FP8_GEMMS = NotWith(
    "fp8_format", when=bool, rule="and --fp8-format {value} are not combined: FP8 GEMMs cast weights themselves"
)


@settings_section
class AdapterSettings:
    """Adapters (LoRA and relatives) beside frozen weights."""

    feature: ClassVar = Feature("adapter", (used_with("model.adapter"),), may_be_added=True)
    adapter: Annotated[Literal["lora", "rslora", "dora", "ia3"], "selects"] | None = None
    """Train small parameters beside the weights of a model, which are frozen: low-rank matrices (`lora`; `rslora` scales them by
    alpha / sqrt(rank); `dora` has a magnitude of each output too), or scales of activations (`ia3`)."""
    adapter_rank: Annotated[PositiveCount, _LOW_RANK] = 16
    """Rank of an adapter's matrices, r in PEFT."""
    adapter_alpha: Annotated[PositiveFactor, _LOW_RANK] = 32.0
    """Alpha of an adapter's matrices, whose product is scaled by alpha / rank."""
    adapter_targets: tuple[str, ...] = ()
    """The linears that have an adapter, by patterns of our names or of PEFT's (`q_proj`, `layers.[0-9].mlp.*`, `experts`); `all-linear`
    are those of attention and MLPs of all layers. Derived: all-linear; with `--adapter ia3` k_proj, v_proj and down_proj."""
    adapter_dropout: Annotated[DropoutRate, _LOW_RANK, _NOT_DORA, "training"] = 0.0
    """Dropout of what the low-rank matrices of an adapter take."""
    adapter_base_format: Annotated[Literal["nf4", "fp8"], _NO_FP8_GEMMS, _NO_FSDP, "runtime"] | None = None
    """Store the frozen weights of large GEMMs in 4 bits (`nf4`, as QLoRA) or 8 (`fp8`) an element, with a scale for each 64, and dequantize
    them for each GEMM. Unset: in the precision of the run."""
    adapter_also_train: Annotated[tuple[str, ...], "training"] = ()
    """Parameters of the model that are trained beside the adapters, by patterns of their names, as PEFT's modules_to_save are."""
