"""The settings of training and of its launch: objective, length, batch sizes, device, compilation, random seed; how ranks meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from petatron.config.schema.evaluation import EvaluationSettings
from petatron.config.schema.monitoring import StepCheckSettings
from petatron.config.schema.numeric_bounds import (
    BatchSize,
    DecayRate,
    EpochCount,
    IterationCount,
    PortNumber,
    RankCount,
    RunMinutes,
    SampleCount,
    Seconds,
    Seed,
)
from petatron.config.schema.sections.hybrid import MAMBA, all_symbols, branch_symbols
from petatron.config.schema.sections.linear_attention import has_linear_attention
from petatron.config.schema.sections.mlp import GATED_ACTIVATIONS
from petatron.config.schema.sections.vision_language import READS_IMAGES
from petatron.config.schema.setting_metadata import Feature, RunSettings, UsedWhen, used_with
from petatron.config.schema.setting_types import (
    ModuleName,
    WeightsCopy,
)

_AVERAGES = used_with("train.ema_decay")
_ON_DEVICE = UsedWhen(lambda run: run.train.device != "cpu", "the CPU computes")


def _compiles_functions(run: RunSettings) -> bool:
    """Whether a model has functions without kernels of their own."""
    model = run.model
    if model.normalization != "RMSNorm" or model.activation not in GATED_ACTIVATIONS:
        return True
    recurrent = MAMBA in branch_symbols(all_symbols(model)) or has_linear_attention(model)
    return recurrent or model.activation_func_clamp_value is not None or model.glu_linear_offset != 0.0


_COMPILES = UsedWhen(_compiles_functions, "nothing of this model is compiled: on GPUs it has kernels of its own")


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTrainConfig(EvaluationSettings, StepCheckSettings):
    """How long, how much at a time, when to look and when to stop."""

    feature: ClassVar = Feature("training", role="training")
    compile: Annotated[bool, "runtime", _COMPILES] = True
    """Fuse what has no kernel of its own with torch.compile, on GPUs."""
    cuda_graphs: Annotated[Literal["auto", "on", "off"], "switch", "runtime", _ON_DEVICE] = "auto"
    """Record the forward and backward passes of a step once and replay them: faster where kernels are short, on GPUs. With auto, after
    a few steps, if the device was idle for more than a tenth of them, the layout allows it and memory suffices. With on, what
    cannot be recorded is an error, unless `--device` is cpu: a CPU records nothing, and a note says so."""
    exact_rollouts: Annotated[bool, "runtime"] = False
    """Compute with functions whose bits do not depend on the batch: the log-probability of a token that the engine draws is, bit for bit,
    what training computes for it."""
    objective: str | None = None
    """What to minimize: `next-token` (also if unset: the losses of the model), or a name under which an imported module registered an
    objective."""
    objective_settings: tuple[str, ...] = ()
    """Settings of `--objective`: NAME=VALUE, several."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, by patterns of their names (embedding.*, layers.[0-9].*): no gradient, no optimizer state."""
    train_only: tuple[str, ...] = ()
    """The only parameters that are trained, by patterns of their names (layers.15.*, *norm*); all others are frozen."""
    freeze_language_model: Annotated[bool, READS_IMAGES] = False
    """Models that read images: the decoder with its embeddings and its head is not trained."""
    freeze_vision_encoder: Annotated[bool, READS_IMAGES] = False
    """Models that read images: the vision encoder is not trained."""
    micro_batch_size: Annotated[BatchSize, "at least 1", "runtime"] = 1
    """Samples per forward pass on one rank."""
    global_batch_size: Annotated[BatchSize, "at least 1"] | None = None
    """Samples per optimizer step over all ranks. Derived: micro batch x data parallel."""
    decrease_batch_size_if_needed: bool = False
    """Lower a `--global-batch-size` that micro batch x data parallel does not divide to the next that it does, instead of an error."""
    rampup_batch_size: tuple[SampleCount, ...] = ()
    """START INCREMENT SAMPLES: grow the global batch from START in steps of INCREMENT over SAMPLES samples."""
    step_batch_size_schedule: str | None = None
    """Global batch sizes, each from a number of tokens on: `0:16 2.4B:320`, with K, M, B and T for 10^3 to 10^12. The last one is
    `--global-batch-size`."""
    train_iters: Annotated[IterationCount, "at least 1"] | None = None
    """Iterations of the whole run, restarts included."""
    train_samples: Annotated[SampleCount, "at least 1"] | None = None
    """Samples of the whole run, restarts included."""
    train_epochs: Annotated[EpochCount, "above 0"] | None = None
    """Passes over the training data: `petatron train` derives `--train-iters` from them where neither it nor `--train-samples` is given."""
    ema_decay: Annotated[DecayRate, WeightsCopy] | None = None
    """Keep an exponential moving average of the weights with this decay (0.999, ...): saved with them, and evaluated beside them."""
    ema_start: Annotated[IterationCount, _AVERAGES] = 0
    """Updates before the average of `--ema-decay` begins, with a copy of the weights."""
    ema_interval: Annotated[IterationCount, "at least 1", _AVERAGES] = 1
    """Updates between two that the average of `--ema-decay` takes."""
    exit_interval: Annotated[IterationCount, "at least 1"] | None = None
    """Save and exit when the iteration is a multiple of this."""
    exit_duration_in_mins: Annotated[RunMinutes, "above 0"] | None = None
    """Save and exit after this many minutes."""
    exit_signal_grace_s: Annotated[Seconds, "at least 0"] = 25.0
    """Seconds after SIGTERM within which the step must end; then the run exits (code 143) without saving. 0 means no limit."""
    check_for_nan_in_loss_and_grad: bool = True
    """Stop when the loss or a gradient is not finite (weights are never updated with such gradients)."""
    seed: Annotated[Seed, "at least 0", "runtime"] = 1234
    """Seed of initial weights, dropout and data order."""
    deterministic_mode: Annotated[bool, "runtime"] = False
    """Use only deterministic kernels."""
    device: Annotated[Literal["auto", "cpu", "cuda"], "runtime"] = "auto"
    """Where to compute; auto takes CUDA when there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(RawTrainConfig):
    """The resolved settings; by default one sample per step."""

    global_batch_size: BatchSize = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """How ranks are started."""

    nproc_per_node: Annotated[RankCount, "at least 1"] | None = None
    """Ranks to start on this machine. Derived: world size when it is known from the layout, else 1."""
    nnodes: Annotated[RankCount, "at least 1"] = 1
    """Number of machines."""
    node_rank: RankCount = 0
    """Index of this machine."""
    master_addr: str = "127.0.0.1"
    """Address of the first machine."""
    master_port: PortNumber | None = None
    """Port of the first machine; unset means a free one (single machine only)."""
    imports: tuple[ModuleName, ...] = ()
    """Modules of your own to import first, one or several: files or dotted names that register models, objectives, datasets."""
    ranks_per_device: Annotated[RankCount, "at least 1"] = 1
    """Ranks that share each GPU on purpose, to try a layout on fewer GPUs than it needs; speed means nothing then."""
