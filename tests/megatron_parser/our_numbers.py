"""What Petatron derives from flags of Megatron's, under the names that `run_parser.py` gives to Megatron's numbers."""

from __future__ import annotations

import math
from typing import Any

from petatron.config.pipeline_stages import pipeline_stages
from petatron.config.schema.fields import fields_by_name
from petatron.config.schema.run import RunConfig
from petatron.config.schema.sections.vocabulary import padded_rows
from petatron.layers.attention import AttentionSpec
from petatron.layers.mla import MlaSpec
from petatron.layers.moe.moe_layer import MoESpec
from petatron.layers.rope import attention_scaling, inverse_frequencies
from petatron.layers.transformer_layer import LayerSpec
from petatron.mesh.rank_layout import Layout
from petatron.models.model_spec import ModelSpec
from petatron.models.registry import model_spec
from petatron.optim.lr_schedule import RunSchedules
from petatron.sharding.initial_values import NormalValues
from petatron.train.build_run import RunLength, evaluation_batch_size, evaluation_samples
from petatron.train.global_batch_size import BatchSizeSchedule

_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_ACTIVATIONS = {"swiglu": "gated silu", "quick_geglu": "gated quick_gelu"}


class OurNumbers(dict[str, Any]):
    """The numbers of a run by name; those that are settings are read when they are asked for."""

    def __init__(self, run: RunConfig) -> None:
        self.run, spec = run, model_spec(run)
        parallel, optim = run.parallel, run.optim
        schedules = RunSchedules.from_config(run)
        super().__init__(
            _over_time(run, schedules),
            activation=_ACTIVATIONS.get(run.model.activation, run.model.activation),
            zero_centered_norm=run.model.apply_layernorm_1p,
            add_qkv_bias=run.model.add_qkv_bias or run.model.add_bias_linear,
            padded_vocab_size=padded_rows(
                spec.vocab_size, run.model.make_vocab_size_divisible_by, parallel.tensor_model_parallel_size
            ),
            params_dtype="bfloat16" if run.precision.bf16 else "float16" if run.precision.fp16 else "float32",
            main_params_dtype="float32",
            main_grads_dtype=_SHORT[optim.main_grads_dtype],
            exp_avg_dtype=_SHORT[optim.exp_avg_dtype],
            exp_avg_sq_dtype=_SHORT[optim.exp_avg_sq_dtype],
            grads_in_fp32=not parallel.grad_reduce_in_bf16 and optim.main_grads_dtype == "fp32",
            decoupled_weight_decay=optim.optimizer != "sgd",
            bucket_size=parallel.ddp_bucket_size,
            eval_global_batch_size=evaluation_batch_size(run),
            eval_micro_batch_size=run.train.eval_micro_batch_size or run.train.micro_batch_size,
            layers=_layers(run, spec),
            stages=_stages(run),
            groups=_groups(run),
            output_init_std=_output_std(spec),
            apply_residual_connection_post_layernorm=run.model.norm_placement == "stream",
            sequence_parallel=parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1,
            learned_positions=run.model.position_embedding_type == "learned_absolute"
            or run.model.learned_position_table,
            frequencies=_frequencies(spec),
        )
        mixer = spec.layers[0].mixer
        if isinstance(mixer, MlaSpec):
            self["latent_softmax_scale"] = mixer.query_scale / math.sqrt(mixer.qk_dim)

    def __missing__(self, name: str) -> Any:
        section, _, field = fields_by_name()[name].path.partition(".")
        value = getattr(getattr(self.run, section), field)
        return list(value) if isinstance(value, tuple) else value


def _over_time(run: RunConfig, schedules: RunSchedules) -> dict[str, Any]:
    """Goes through the run as the training loop does."""
    length, sizes = RunLength.from_config(run), BatchSizeSchedule.from_config(run)
    unit = run.train.micro_batch_size * run.parallel.data_parallel_size
    batches: list[list[int]] = []
    over_time: list[list[float]] = []
    consumed = 0
    for iteration in range(length.iterations + 1):
        values = [schedules.lr.at(iteration, consumed), schedules.weight_decay.at(iteration, consumed)]
        if schedules.decoupled_lr is not None:
            values.append(schedules.decoupled_lr.at(iteration, consumed))
        over_time.append([iteration, *values])
        size = sizes.at(consumed)
        if iteration < length.iterations and (not batches or batches[-1][1] != size):
            batches.append([iteration, size, size // unit])
        consumed += size
    samples = [length.samples, *evaluation_samples(run)]
    return {"iterations": length.iterations, "batches": batches, "over_time": over_time, "samples": samples}


def _layers(run: RunConfig, spec: ModelSpec) -> str:
    if run.model.hybrid_layer_pattern is not None:
        return run.model.hybrid_layer_pattern
    rotates = run.model.position_embedding_type in ("rope", "yarn")
    return " ".join(_layer_word(layer, rotates) for layer in spec.layers[: run.model.num_layers])


def _layer_word(layer: LayerSpec, rotates: bool) -> str:
    mixer, experts = layer.mixer, "E" if isinstance(layer.channel_mixer, MoESpec) else ""
    if not isinstance(mixer, AttentionSpec | MlaSpec):
        return f"L{experts}"
    window = "w" if mixer.visibility.window is not None else ""
    unrotated = "n" if rotates and mixer.rope is None else ""
    normed = "2" if isinstance(mixer, AttentionSpec) and mixer.qk_l2_norm is not None else ""
    return f"A{window}{unrotated}{normed}{experts}"


def _stages(run: RunConfig) -> list[int]:
    """Returns layers per stage; stages that do not follow each other would be none of Megatron's."""
    stages = pipeline_stages(run)
    depths = run.model.mtp_num_layers or 0
    layers = [len(stage.layer_indices) for stage in stages]
    layers[-1] -= depths
    assert [index for stage in stages for index in stage.layer_indices] == list(range(sum(layers) + depths))
    return layers


def _groups(run: RunConfig) -> dict[str, list[int]]:
    layout = Layout.from_config(run.parallel)
    names = ("tp", "cp", "dp", "pp", *(("etp", "ep", "edp") if run.moe.num_experts else ()))
    return {name: list(layout.group_of(name, layout.world_size * 2 // 3)) for name in names}


def _output_std(spec: ModelSpec) -> float:
    """Returns the initial standard deviation of the GEMMs that write to the residual stream."""
    ends = (".out.weight", ".out_proj.weight", ".down.weight")
    found = {
        param.init.std
        for name, param in spec.params().items()
        if name.endswith(ends) and isinstance(param.init, NormalValues)
    }
    assert len(found) == 1, found
    return found.pop()


def _frequencies(spec: ModelSpec) -> list[float] | None:
    """Returns the factor on cos and sin of the first rope, how many frequencies it has, and three of them."""
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec | MlaSpec)]
    rope = next((mixer.rope for mixer in mixers if mixer.rope is not None), None)
    if rope is None:
        return None
    half = inverse_frequencies(rope).tolist()
    return [attention_scaling(rope), len(half), half[0], half[len(half) // 2], half[-1]]
