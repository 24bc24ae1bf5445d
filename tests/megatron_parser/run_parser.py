"""Runs the parser of a Megatron checkout, and what Megatron builds on it, and tells which numbers came out.

Megatron's own code is imported as it is: flags are parsed and validated, the model's, the optimizer's and the reducer's configs are built
of them, its scheduler and its counter of micro-batches are stepped through the whole run, and its layers are put on stages. All of that
is Python and needs no GPU. What asks for CUDA or for Transformer Engine gets the answer of a machine that has both.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import math
import os
import sys
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import typing_extensions
from packaging.version import Version

TE_VERSION = "2.12.0"
_CONFIG = """num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels num_query_groups add_bias_linear add_qkv_bias
    normalization apply_residual_connection_post_layernorm qk_layernorm qk_l2_norm hidden_dropout attention_dropout softmax_type
    attention_output_gate rotary_interleaved init_method_std embedding_init_method_std mtp_num_layers mtp_loss_scaling_factor
    moe_ffn_hidden_size moe_router_topk moe_aux_loss_coeff moe_z_loss_coeff moe_shared_expert_intermediate_size moe_shared_expert_gate
    moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy moe_router_score_function moe_router_pre_softmax
    moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_topk_scaling_factor moe_router_num_groups
    moe_router_group_topk moe_router_dtype moe_input_jitter_eps moe_latent_size moe_router_load_balancing_type
    linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
    mamba_state_dim mamba_head_dim mamba_num_groups sequence_parallel cp_comm_type recompute_granularity recompute_method
    recompute_num_layers recompute_modules fp8_recipe fp8_amax_history_len fp8_amax_compute_algo first_last_layers_bf16
    num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 bf16 fp16 glu_linear_offset activation_func_clamp_value""".split()
_LATENT = "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim".split()
_ARGS = """seq_length max_position_embeddings position_embedding_type use_rope_scaling rope_scaling_factor
    rotary_seq_len_interpolation_factor untie_embeddings_and_output_weights data_parallel_size expert_tensor_parallel_size
    global_batch_size micro_batch_size eval_global_batch_size eval_micro_batch_size seed dataloader_type split
    use_checkpoint_args check_for_nan_in_loss_and_grad lr_decay_style num_experts eval_iters eval_interval""".split()
_OPTIMIZER = """lr min_lr weight_decay clip_grad adam_beta1 adam_beta2 adam_eps sgd_momentum muon_momentum muon_split_qkv muon_nesterov
    muon_scale_mode muon_num_ns_steps muon_tp_mode muon_extra_scale_factor muon_coefficient_type muon_scalar_optimizer lion_beta1
    lion_beta2 loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis use_distributed_optimizer overlap_param_gather
    apply_wd_to_qk_layernorm decoupled_weight_decay""".split()
_FORMATS = ("params_dtype", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_YARN = """rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
    correction_range_round_to_int""".split()


class RefusedError(Exception):
    """Megatron refuses the flags; the message is Megatron's."""


class UnknownFlagError(RefusedError):
    """The flags are not read at all: one of them, or a value, is none of this version's."""


def open_megatron(checkout: Path) -> str:
    """Makes a checkout (or an unpacked wheel) importable; returns its version."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    sys.path.insert(0, str(checkout))
    if not hasattr(typing, "override"):  # it is for a newer Python
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0)  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    with _silence():
        utils: Any = importlib.import_module("megatron.core.utils")
        utils._te_version = Version(TE_VERSION)
        for name in ("arguments", "training", "global_vars"):
            importlib.import_module(f"megatron.training.{name}")
        factory = importlib.import_module("megatron.training.argument_utils").ArgumentGroupFactory
        factory._get_field_docstrings = lambda self, cls: {}  # help texts, read from source files again for every case
        rope: Any = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
        rope.fused_apply_rotary_pos_emb = rope.fused_apply_rotary_pos_emb or object()
        fused = {"FusedAdam": type("FusedAdam", (), {"__init__": _fused_adam})}
        names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
        sys.modules |= {name: SimpleNamespace(**fused) for name in names}  # type: ignore[misc]
    return str(importlib.import_module("megatron.core.package_info").__version__)


def _fused_adam(
    self: Any,
    *,
    master_weight_dtype: Any,
    exp_avg_dtype: Any,
    exp_avg_sq_dtype: Any,
    use_decoupled_grad: Any,
    store_param_remainders: Any,
) -> None:
    """Has the parameters for which Megatron looks in Transformer Engine's optimizer."""


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def derived_numbers(flags: list[str], world_size: int) -> dict[str, Any]:
    """Returns what Megatron derives from flags, by name; `RefusedError` if it takes them not."""
    arguments = importlib.import_module("megatron.training.arguments")
    global_vars = importlib.import_module("megatron.training.global_vars")
    connections = {} if "--use-torch-fsdp2" in flags else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment = {"WORLD_SIZE": str(world_size), "RANK": "0", **connections}
    # The entry script of GPT models gives a tokenizer as a default, which all our cases name.
    with (
        _silence(),
        mock.patch.object(sys, "argv", ["pretrain_gpt.py", *flags]),
        mock.patch.dict(os.environ, environment),
    ):
        try:
            args = arguments.validate_args(arguments.parse_args())
            args.enable_experimental = False
            config = arguments.core_transformer_config_from_args(args)
            global_vars.set_global_variables(args)
            return _numbers(args, config)
        except SystemExit as error:
            raise UnknownFlagError("the parser ends the program") from error
        except (
            AssertionError,
            ValueError,
            RuntimeError,
            TypeError,
            NotImplementedError,
            AttributeError,
            KeyError,
        ) as error:
            raise RefusedError(f"{type(error).__name__}: {str(error)[:300]}") from error
        except ZeroDivisionError as error:
            raise RefusedError("ZeroDivisionError") from error
        finally:
            global_vars.unset_global_variables()


def _numbers(args: Any, config: Any) -> dict[str, Any]:
    training = importlib.import_module("megatron.training.training")
    built = training.get_megatron_optimizer_config(args)
    optimizer, overrides = built if isinstance(built, tuple) else (built, {})
    numbers = {name: getattr(config, name, None) for name in _CONFIG}
    numbers |= {name: getattr(args, name, None) for name in _ARGS}
    numbers |= {name: getattr(optimizer, name, None) for name in _OPTIMIZER}
    numbers |= {name: str(getattr(optimizer, name)).removeprefix("torch.") for name in _FORMATS}
    numbers["optimizer"] = args.optimizer
    if args.optimizer != "muon" or args.tensor_model_parallel_size == 1:
        del numbers["muon_tp_mode"]
    # Of optimizers that need whole matrices it shards the layers' states, under another name.
    by_layer = getattr(args, "use_layer_wise_distributed_optimizer", False)
    numbers["use_distributed_optimizer"] = args.use_distributed_optimizer or by_layer
    if args.optimizer != "adam":
        del numbers["decoupled_weight_decay"]
    if not args.use_rope_scaling or args.position_embedding_type != "rope" or args.multi_latent_attention:
        del numbers["rope_scaling_factor"]
    if args.position_embedding_type == "yarn":
        del numbers["use_rope_scaling"]
    numbers["norm_epsilon"] = config.layernorm_epsilon
    numbers["zero_centered_norm"] = config.layernorm_zero_centered_gamma
    numbers["activation"] = _activation(config)
    numbers["padded_vocab_size"] = args.padded_vocab_size
    numbers["fp8_format"] = config.fp8
    numbers["fp8_param_gather"] = config.fp8_param
    numbers["output_init_std"] = config.output_layer_init_method.keywords["std"]
    # Gradients of weights in fp32 are in fp32, whatever this says.
    numbers["grads_in_fp32"] = bool(args.accumulate_allreduce_grads_in_fp32) or args.params_dtype == torch.float32
    numbers["overlap_grad_reduce"] = args.overlap_grad_reduce
    numbers["bucket_size"] = _bucket_size(training, args)
    if args.multi_latent_attention:
        numbers |= {name: getattr(config, name) for name in _LATENT}
        # Heads of latent attention have widths of their own.
        # Settings of other attention, which this one does not read.
        unread = "kv_channels num_query_groups position_embedding_type add_qkv_bias use_rope_scaling rotary_seq_len_interpolation_factor"
        for name in unread.split():
            numbers.pop(name, None)
        get_mscale = importlib.import_module("megatron.core.models.common.embeddings")._yarn_get_mscale
        width = config.qk_head_dim + config.qk_pos_emb_head_dim
        scale = get_mscale(config.rotary_scaling_factor, config.mscale_all_dim) ** 2 / math.sqrt(width)
        numbers["latent_softmax_scale"] = float(f"{scale:.7g}")
    if args.hybrid_layer_pattern is None or "*" in args.hybrid_layer_pattern:
        numbers["frequencies"] = _frequencies(args, config)
    if args.experimental_attention_variant and "A" not in _layer_kinds(args, config):
        numbers.pop("frequencies", None)
    numbers["learned_positions"] = args.position_embedding_type == "learned_absolute"
    numbers["layers"] = _layer_kinds(args, config)
    numbers["stages"] = _stages(args, config)
    numbers["groups"] = _groups(args)
    numbers |= _run(training, args, overrides)
    return {name: value for name, value in numbers.items() if value is not None}


def _frequencies(args: Any, config: Any) -> list[float] | None:
    """Returns the factor on cos and sin, how many frequencies rope has, and three of them, as its module computes them."""
    plain = importlib.import_module("megatron.core.models.common.embeddings.rotary_pos_embedding").RotaryEmbedding
    yarn = importlib.import_module(
        "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding"
    ).YarnRotaryEmbedding
    latent = args.multi_latent_attention
    kind = config.rope_type if latent else args.position_embedding_type
    common = {
        "kv_channels": config.qk_pos_emb_head_dim if latent else config.kv_channels,
        "rotary_percent": args.rotary_percent,
        "rotary_base": config.rotary_base if latent else args.rotary_base,
        "seq_len_interpolation_factor": None if latent else args.rotary_seq_len_interpolation_factor,
        "use_cpu_initialization": True,
        "cp_group": SimpleNamespace(size=lambda: 1, rank=lambda: 0),
    }
    if kind == "yarn":
        settings = {
            name: getattr(config, name if latent else f"yarn_{name}")
            for name in _YARN
            if not latent or hasattr(config, name)
        }
        settings["scaling_factor"] = settings.pop("rotary_scaling_factor")
        angles, factor = yarn(**common, **settings).get_emb(2)
        angles = angles[1, 0, 0]
    elif kind == "rope":
        scaling = (
            {} if latent else {"rope_scaling": args.use_rope_scaling, "rope_scaling_factor": args.rope_scaling_factor}
        )
        angles, factor = plain(**common, **scaling).get_emb(2)[1, 0, 0], 1.0
    else:
        return None
    if config.no_rope_freq and all(config.no_rope_freq):
        return None
    half = angles[: len(angles) // 2].tolist()
    return [round(float(factor), 6), len(half), *(float(f"{half[at]:.6g}") for at in (0, len(half) // 2, -1))]


def _bucket_size(training: Any, args: Any) -> int:
    if args.ddp_bucket_size is not None:
        return args.ddp_bucket_size
    ranks = args.data_parallel_size * args.context_parallel_size
    if not hasattr(training, "resolve_ddp_bucket_size"):  # before 0.18 it is a line of a longer function
        return max(40_000_000, 1_000_000 * ranks)
    with mock.patch.object(training, "get_pg_size", lambda group: ranks):
        return training.resolve_ddp_bucket_size(training.get_megatron_ddp_config(args), None, True, 0)


def _activation(config: Any) -> str:
    name = config.activation_func.__name__
    if name == "gelu" and config.bias_activation_fusion:
        name = "gelu_tanh"  # the fused kernel of bias and gelu is the approximation
    return f"gated {name}" if config.gated_linear_unit else name


def _layer_kinds(args: Any, config: Any) -> str:
    """Returns a word for each layer: what mixes the sequence, whether it has a window and rotary positions, and what follows."""
    if args.hybrid_layer_pattern is not None:
        return args.hybrid_layer_pattern.replace("|", "")
    variants = importlib.import_module("megatron.core.models.gpt.experimental_attention_variant_module_specs")
    windows = importlib.import_module("megatron.core.transformer.utils").is_layer_window_attention
    linear = variants.get_linear_attention_pattern(config)
    experts = variants.get_moe_layer_pattern(config) if config.num_moe_experts else [0] * config.num_layers
    unrotated = config.no_rope_freq or [0] * config.num_layers
    return " ".join(
        ("L" if linear[index] else "A")
        + ("w" if not linear[index] and windows(config.window_size, config.window_attn_skip_freq, index + 1) else "")
        + ("n" if unrotated[index] else "")
        + ("2" if config.qk_l2_norm and not linear[index] else "")
        + ("E" if experts[index] else "")
        for index in range(config.num_layers)
    )


def _stages(args: Any, config: Any) -> list[int]:
    """Returns the layers of every stage in model order, as Megatron's ranks build them."""
    state = importlib.import_module("megatron.core.parallel_state")
    block = importlib.import_module("megatron.core.transformer.transformer_block")
    offset = importlib.import_module("megatron.core.transformer.transformer_layer").get_transformer_layer_offset
    pp, virtual = config.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    counts, starts = [], []
    state.set_virtual_pipeline_model_parallel_world_size(virtual)
    for vp_stage in [None] if virtual is None else range(virtual):
        for rank in range(pp):
            state.set_pipeline_model_parallel_rank(rank)
            if args.hybrid_layer_pattern is not None:
                layers, start = _hybrid_stage(args, config, rank, vp_stage)
                counts.append(len(layers))
            else:
                counts.append(block.get_num_layers_to_build(config, vp_stage, rank))
                start = offset(config, vp_stage, rank)
            starts.append(start)
    if starts != [sum(counts[:index]) for index in range(len(counts))]:
        raise RefusedError(f"stages begin at layers {starts} and have {counts}")
    return counts


def _hybrid_stage(args: Any, config: Any, rank: int, vp_stage: int | None) -> tuple[list[str], int]:
    allocation = importlib.import_module("megatron.core.models.hybrid.hybrid_layer_allocation")
    size = config.pipeline_model_parallel_size
    ranks = mock.patch.multiple(
        torch.distributed, get_rank=lambda group=None: rank, get_world_size=lambda group=None: size
    )
    main = args.hybrid_layer_pattern.split("/")[0]
    ends = (config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage)
    with ranks, mock.patch.object(allocation, "log_on_each_pipeline_stage", lambda *_, **__: None):
        return allocation.select_pipeline_segment(main, object(), vp_stage, *ends)


def _groups(args: Any) -> dict[str, list[int]]:
    """Returns the groups of one rank, by Megatron's generator of ranks."""
    make = importlib.import_module("megatron.core.parallel_state").RankGenerator
    order = "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"
    tp, pp, cp, dp = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
        args.data_parallel_size,
    )
    ep, etp, world = args.expert_model_parallel_size, args.expert_tensor_parallel_size, args.world_size
    if world % (etp * ep * pp):
        raise RefusedError("experts do not fit the ranks")
    dense = make(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    sparse = make(tp=etp, ep=ep, dp=world // (etp * ep * pp), pp=pp, cp=1, order=order)
    if dense.get_ranks("pp") != sparse.get_ranks("pp"):
        raise RefusedError("pipeline groups of experts differ")
    named = {axis: (dense, axis) for axis in ("tp", "cp", "dp", "pp")}
    if args.num_experts:
        named |= {"etp": (sparse, "tp"), "ep": (sparse, "ep"), "edp": (sparse, "dp")}
    rank = world * 2 // 3
    return {
        axis: next(list(group) for group in maker.get_ranks(token) if rank in group)
        for axis, (maker, token) in named.items()
    }


def _run(training: Any, args: Any, overrides: dict[Any, Any]) -> dict[str, Any]:
    """Goes through the run as Megatron's training loop does: sizes of batches, learning rates and weight decay over time."""
    counter = importlib.import_module("megatron.core.num_microbatches_calculator")
    rates = next((override for override in overrides.values() if "max_lr" in override), {})
    groups: list[dict[str, Any]] = [{"default_config": True}, dict(rates)]
    scheduler = training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=groups))
    total = args.train_iters
    points = sorted({point for point in (1, total // 4, total // 2, total - 1, total) if 0 <= point <= total})
    batches: list[list[int]] = []
    over_time: list[list[float]] = []
    consumed = 0
    for iteration in range(total + 1):
        if iteration in points:
            values = [groups[0]["lr"], groups[0]["weight_decay"], *([groups[1]["lr"]] if rates else [])]
            over_time.append([iteration, *(float(f"{value:.7g}") for value in values)])
        if iteration == total:
            break
        counter.update_num_microbatches(consumed, consistency_check=True)
        micro_batches = counter.get_num_microbatches()
        size = micro_batches * args.micro_batch_size * args.data_parallel_size
        if not batches or batches[-1][1:] != [size, micro_batches]:
            batches.append([iteration, size, micro_batches])
        consumed += size
        scheduler.step(increment=size)
    samples = training.get_train_valid_test_num_samples()
    return {"iterations": total, "batches": batches, "over_time": over_time, "samples": list(samples)}
