"""Settings that are in order but do nothing beside the others: said aloud, so that no flag is ignored in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from petatron.config.fields import by_name, flatten
from petatron.config.origins import Origin
from petatron.config.schema import RunConfig

_LOSS_SCALE = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_ROTARY = ("rotary_base", "rotary_percent")
_LLAMA3 = ("rope_low_freq_factor", "rope_high_freq_factor")
_YARN = ("yarn_beta_fast", "yarn_beta_slow", "yarn_mscale", "yarn_mscale_all_dim")
_STRETCH = ("rope_scaling_factor", "original_max_position_embeddings")
_ADAM = ("adam_beta1", "adam_beta2", "adam_eps")
_MTP = ("mtp_num_layers", "mtp_loss_scaling_factor")
_LOAD = ("no_load_optim", "no_load_rng")  # what cannot do without --load is a problem, see check_files.py
_SAVE = ("no_save_optim", "no_save_rng")


def idle_notices(config: RunConfig, origins: Mapping[str, Origin]) -> Iterator[str]:
    """One line for each value a person set in a flag or file that has no effect in this config."""
    values = flatten(config)
    for name, reason in _idle(config):
        info = by_name()[name]
        asked = origins[info.path].kind in ("flag", "file")
        if asked and values[info.path] != info.default:
            yield f"{info.flag} has no effect: {reason}"


def _idle(config: RunConfig) -> Iterator[tuple[str, str]]:
    positions = config.model.position_embedding_type
    if not config.precision.fp16:
        yield from ((name, "it is for --fp16") for name in _LOSS_SCALE)
    if config.precision.fp8_format is None:
        yield "fp8_recipe", "it is for --fp8-format"
    if positions not in ("rope", "yarn"):
        yield from ((name, f"positions are {positions}") for name in _ROTARY)
    if not config.model.use_rope_scaling:
        yield from ((name, "it is for --use-rope-scaling") for name in _LLAMA3)
    if positions != "yarn":
        yield from ((name, "it is for --position-embedding-type yarn") for name in _YARN)
        if not config.model.use_rope_scaling:
            yield from ((name, "the rotary embedding is not scaled") for name in _STRETCH)
    if config.optim.optimizer != "adam":
        yield from ((name, f"the optimizer is {config.optim.optimizer}") for name in _ADAM)
    if config.optim.optimizer != "sgd":
        yield "sgd_momentum", f"the optimizer is {config.optim.optimizer}"
    if config.parallel.tensor_model_parallel_size == 1:
        yield "sequence_parallel", "the tensor-parallel size is 1"
    if config.moe.num_experts is None:
        moe = (name for name, info in by_name().items() if info.section == "moe" and name != "num_experts")
        yield from ((name, "the model has no experts") for name in moe)
    if not config.latent.multi_latent_attention:
        latent = (name for name, info in by_name().items() if info.section == "latent" and name not in _MTP)
        yield from ((name, "it is for --multi-latent-attention") for name in latent if name != "multi_latent_attention")
    if config.latent.mtp_num_layers is None:
        yield "mtp_loss_scaling_factor", "it is for --mtp-num-layers"
    if config.checkpoint.load is None:
        yield from ((name, "there is no --load") for name in _LOAD)
    if config.checkpoint.save is None:
        yield from ((name, "there is no --save") for name in _SAVE)
    if not config.memory.optimizer_cpu_offload:
        yield "optimizer_offload_fraction", "it is for --optimizer-cpu-offload"
    if config.memory.recompute_granularity != "selective":
        yield "recompute_modules", "it is for --recompute-granularity selective"
    if config.data.mock_data or config.data.train_data_path:
        yield "split", "there is no --data-path to split"
