"""Derives unset values, with the reason: the only place where one setting determines another.

Every step reads the values so far and either sets one path, with the reason, or leaves it unset. A step never fails: when
its inputs make no sense (heads that do not divide the width) it sets nothing, and `validate/load_checked_config.py` reports it.
Some fields stay unset on purpose because only the machine knows: the communication backend, the log folder of a run
that is not saved, the vocabulary of a tokenizer that has not been opened yet.

`derive_defaults` returns a raw config, since some values may not be derivable; `resolve_derived` makes a `RunConfig` of one
without problems.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from petatron.base.errors import Problem, raise_problems
from petatron.base.remote_address import is_remote
from petatron.config.pipeline_stages import PipelineLayoutError, parse_pipeline_layout
from petatron.config.schema.batch_size_steps import BatchSizeStepsError, parse_batch_size_steps
from petatron.config.schema.data_blend import BlendError, default_cache_folder, named_validation_sets, parse_blend
from petatron.config.schema.fields import FieldValue, fields_by_name, flag_name, flatten_config, unflatten_config
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.moe_layer_freq import MAX_PATTERN_LAYERS
from petatron.config.schema.objective_and_dataset_names import (
    BERT_DATASET,
    CONTRASTIVE,
    IMAGE_TEXT_DATASET,
    ITEM_DATASET,
    NEXT_ITEM,
    REGRESSION,
    T5_DATASET,
    TASK_OBJECTIVES,
)
from petatron.config.schema.parallel import MIN_BUCKET_SIZE, ParallelConfig
from petatron.config.schema.run import RawRunConfig, RunConfig
from petatron.config.schema.sections.encoder_decoder import ENCODER_DECODER_MODEL
from petatron.config.schema.sections.hybrid import (
    ATTENTION,
    MAMBA,
    allocate_layers,
    branch_symbols,
    has_attention,
    with_depth_layers,
)
from petatron.config.schema.sections.masked_language import MASKED_LANGUAGE_MODEL
from petatron.config.schema.sections.mlp import GATED_ACTIVATIONS
from petatron.config.schema.sections.mup import mup_multipliers, relative_width
from petatron.config.schema.sections.recommender import RECOMMENDER_MODEL
from petatron.config.schema.sections.tokenizer_options import infer_tokenizer_type
from petatron.config.schema.sections.vision_language import VISION_LANGUAGE_MODEL, num_vision_layers
from petatron.config.schema.training import TrainConfig
from petatron.config.value_origins import ValueOrigin

MOCK_VOCAB_SIZE = 1024


def derive_defaults(
    config: RawRunConfig, *, chosen_paths: Collection[str] = (), world_size: int | None = None
) -> tuple[RawRunConfig, dict[str, ValueOrigin]]:
    """Returns the config with derivable values filled in, and the origin of each.

    `chosen_paths` are the explicitly set paths; `world_size` is the launcher's, which takes precedence.
    """
    state = _DerivedValues(flatten_config(config), chosen_paths)
    _derive_world(state, world_size)
    _derive_encoder_decoder(state)
    _derive_vision(state)
    _derive_hybrid(state)
    _derive_model(state)
    _derive_task_head(state)
    _derive_mup(state)
    _derive_pipeline(state)
    _derive_sequence(state)
    _derive_data_parallel(state)
    _derive_files(state)
    return unflatten_config(state.values), state.origins


def resolve_derived(config: RawRunConfig) -> RunConfig:
    """Returns the resolved config; `ConfigError` names every value that could not be derived.

    `validate/` reports why it could not, in terms of what the user wrote, so it is asked first.
    """
    problems = [
        Problem(flag_name(name), "", "is not set, and does not follow from the other settings", "Give it.")
        for section, resolved_class in (("model", ModelConfig), ("parallel", ParallelConfig), ("train", TrainConfig))
        for name in resolved_class.__annotations__
        if getattr(getattr(config, section), name) is None
    ]
    raise_problems(problems)
    sections = _field_values(config) | {
        "model": ModelConfig(**_field_values(config.model)),
        "parallel": ParallelConfig(**_field_values(config.parallel)),
        "train": TrainConfig(**_field_values(config.train)),
    }
    return RunConfig(**sections)


def _field_values(config: Any) -> dict[str, Any]:
    return {item.name: getattr(config, item.name) for item in fields(config)}


class _DerivedValues:
    """Values by path while they are being filled; names are unique, so rules may use the bare name."""

    def __init__(self, values: dict[str, FieldValue], chosen_paths: Collection[str]) -> None:
        self.values, self.chosen_paths = values, chosen_paths
        self.origins: dict[str, ValueOrigin] = {}
        self._paths = {path.split(".")[1]: path for path in values}

    def __getitem__(self, name: str) -> Any:
        return self.values[self._paths[name]]

    def is_chosen(self, name: str) -> bool:
        return self._paths[name] in self.chosen_paths

    def set(self, name: str, value: FieldValue, why: str) -> None:
        self.values[self._paths[name]] = value
        self.origins[self._paths[name]] = ValueOrigin("derived", why)

    def choose(self, name: str, value: FieldValue, why: str) -> None:
        """Sets what nobody chose; a value that is the default already stays without a reason."""
        if not self.is_chosen(name) and self[name] != value:
            self.set(name, value, why)

    def fill(self, name: str, value: FieldValue, why: str) -> None:
        """Sets only what is unset; `None` means the inputs do not allow a value."""
        if self[name] is None and value is not None:
            self.set(name, value, why)


def _exact_quotient(number: int | None, divisor: int | None) -> int | None:
    """Returns number / divisor when that is a positive integer."""
    if not number or not divisor or number < 0 or divisor < 0 or number % divisor:
        return None
    return number // divisor


def _derive_world(values: _DerivedValues, launched_world_size: int | None) -> None:
    model_ranks = values["tensor_model_parallel_size"] * values["pipeline_model_parallel_size"]
    model_ranks *= values["context_parallel_size"]
    started, drawing = (values["nproc_per_node"] or 0) * values["nnodes"], max(0, values["rollout_ranks"])
    but = " without those that draw" if drawing else ""
    if launched_world_size is not None:
        values.set("world_size", launched_world_size - drawing, f"ranks started by the launcher{but}")
    elif started > 0:
        values.fill("world_size", started - drawing, f"nproc per node x nodes{but}")
    elif model_ranks > 0:
        values.fill("world_size", model_ranks * (values["data_parallel_size"] or 1), "tp x pp x cp x dp")
    values.fill("data_parallel_size", _exact_quotient(values["world_size"], model_ranks), "world size / (tp x pp x cp)")
    if launched_world_size is None:
        ranks = None if values["world_size"] is None else values["world_size"] + drawing
        values.fill("nproc_per_node", _exact_quotient(ranks, values["nnodes"]), "world size / nodes")
    tp = _exact_quotient(values["tensor_model_parallel_size"], 1)
    values.fill("expert_tensor_parallel_size", tp, "the tensor-parallel size")
    etp, bounds = values["expert_tensor_parallel_size"], fields_by_name()["expert_tensor_parallel_size"].bounds
    is_sound = etp is not None and bounds is not None and bounds.violation(etp) is None
    if values["num_experts"] is None and tp is not None and is_sound and etp != tp:
        values.set("expert_tensor_parallel_size", tp, "there are no experts")
    if values["data_parallel_size"]:
        bucket = max(
            MIN_BUCKET_SIZE, 1_000_000 * values["data_parallel_size"] * max(1, values["context_parallel_size"])
        )
        values.fill("ddp_bucket_size", bucket, "max(40 million, 1 million x dp x cp)")


def _derive_hybrid(values: _DerivedValues) -> None:
    attention, mlp = values["hybrid_attention_ratio"], values["hybrid_mlp_ratio"]
    pattern, layers = values["hybrid_layer_pattern"], values["num_layers"]
    wanted = values["is_hybrid_model"] or attention > 0 or mlp > 0
    sound = 0 < layers <= MAX_PATTERN_LAYERS and min(attention, mlp) >= 0 and attention + mlp <= 1
    if pattern is None and wanted and sound:
        pattern = allocate_layers(layers, attention, mlp)
        values.set("hybrid_layer_pattern", pattern, "the ratios of attention and MLPs")
    if pattern is None:
        return
    if not layers:
        values.set("num_layers", len(pattern), "the length of --hybrid-layer-pattern")
    if not values["is_hybrid_model"] and not values.is_chosen("is_hybrid_model"):
        values.set("is_hybrid_model", True, "layers are given one by one")
    heads = _exact_quotient(2 * max(values["hidden_size"], 0), values["mamba_head_dim"])
    values.fill("mamba_num_heads", heads, "2 x hidden size / head width")
    if ATTENTION not in _all_branch_symbols(values) and not values["num_attention_heads"]:
        for name in ("num_query_groups", "kv_channels"):
            values.fill(name, 1, "no layer is attention")


def _all_branch_symbols(values: _DerivedValues) -> str:
    depth, depths = values["mtp_hybrid_override_pattern"], values["mtp_num_layers"]
    return branch_symbols(with_depth_layers(values["hybrid_layer_pattern"], depth, depths))


def _derive_encoder_decoder(values: _DerivedValues) -> None:
    encoder = values["encoder_num_layers"]
    if values["model_type"] != ENCODER_DECODER_MODEL:
        return
    values.fill("decoder_num_layers", encoder, "--encoder-num-layers")
    decoder = values["decoder_num_layers"]
    if not values["num_layers"] and min(encoder or 0, decoder or 0) > 0:
        values.set("num_layers", encoder + decoder, "the layers of encoder and decoder")
    values.fill("decoder_seq_length", values["seq_length"] or None, "--seq-length")
    if values["objective"] is None:
        values.fill("dataset_type", T5_DATASET, f"--model-type {ENCODER_DECODER_MODEL}")


def _derive_vision(values: _DerivedValues) -> None:
    if values["model_type"] != VISION_LANGUAGE_MODEL:
        return
    width, patch = values["vision_hidden_size"], values["vision_patch_size"]
    values.fill("vision_ffn_hidden_size", None if width is None else 4 * width, "4 x the vision encoder's hidden size")
    values.fill("projector_hidden_size", values["hidden_size"] or None, "--hidden-size")
    if patch > 0 and values["vision_position_embedding_type"] == "learned":
        count = (values["vision_image_size"] // patch) ** 2 + values["vision_class_token"]
        values.fill("max_patches", count, "one image of --vision-image-size")
    elif patch > 0:
        values.fill("max_patches", (1024 // patch) ** 2, "one image of 1,024 x 1,024 pixels")
    if values["objective"] is None:
        values.fill("dataset_type", IMAGE_TEXT_DATASET, f"--model-type {VISION_LANGUAGE_MODEL}")


def _derive_model(values: _DerivedValues) -> None:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if hidden > 0 and values["activation"] in GATED_ACTIVATIONS and values["activation"] != "quick_geglu":
        width = max(64, hidden * 8 // 3 // 64 * 64)
        values.fill("ffn_hidden_size", width, "8/3 x hidden size, down to a multiple of 64, for a gated activation")
    elif hidden > 0:
        values.fill("ffn_hidden_size", 4 * hidden, "4 x hidden size")
    groups = values["num_query_groups"]
    if groups is not None and groups != heads and not values.is_chosen("group_query_attention"):
        if not values["group_query_attention"]:
            values.set("group_query_attention", True, "--num-query-groups is set")
    elif groups is None and values["group_query_attention"]:
        values.fill("num_query_groups", 1, "multi-query, as --group-query-attention alone means")
    elif heads > 0:
        values.fill("num_query_groups", heads, "the number of heads")
    if values["multi_latent_attention"]:
        width = values["qk_head_dim"] + values["qk_pos_emb_head_dim"]
        values.fill("kv_channels", width, "the two parts of a query/key head of latent attention")
    values.fill("kv_channels", _exact_quotient(hidden, heads), "hidden size / heads")
    if values["seq_length"] > 0:
        longest = max(values["seq_length"], values["decoder_seq_length"] or 0)
        rows = longest + values["position_offset"]
        values.fill("max_position_embeddings", rows, "the sequence length")
    # A model without such layers has none of their sizes.
    if MAMBA not in _all_branch_symbols(values):
        values.fill("mamba_num_heads", 0, "no layer is Mamba-2")
    values.fill("mamba_norm_groups", values["mamba_num_groups"], "--mamba-num-groups")
    values.fill("embedding_init_method_std", values["init_method_std"], "--init-method-std")
    has_segments = values["model_type"] == MASKED_LANGUAGE_MODEL and values["bert_binary_head"]
    if values["model_type"] == MASKED_LANGUAGE_MODEL and values["objective"] is None:
        values.fill("dataset_type", BERT_DATASET, f"--model-type {MASKED_LANGUAGE_MODEL}")
    values.fill("num_token_types", 2 if has_segments else 0, "--bert-binary-head" if has_segments else "no segments")
    recommends = values["model_type"] == RECOMMENDER_MODEL
    if recommends and values["recommender_layers"] == "hstu":
        values.fill("hstu_value_dim", values["kv_channels"], "--kv-channels")
    else:
        values.fill("hstu_value_dim", 0, "no layer is HSTU")
    if recommends and values["objective"] is None:
        values.fill("objective", NEXT_ITEM, f"--model-type {RECOMMENDER_MODEL}")
        values.fill("dataset_type", ITEM_DATASET, f"--model-type {RECOMMENDER_MODEL}")
    if values["num_experts"] is not None:
        values.fill("moe_ffn_hidden_size", values["ffn_hidden_size"], "the MLP width")


def _derive_task_head(values: _DerivedValues) -> None:
    objective, is_encoder = values["objective"], values["model_type"] == MASKED_LANGUAGE_MODEL
    if objective in TASK_OBJECTIVES:
        pooling = "last" if not is_encoder else "mean" if objective == CONTRASTIVE else "first"
        kind = "an encoder" if is_encoder else "a decoder"
        values.fill("pooling", pooling, f"--objective {objective} of {kind}")
    if values["label_names"]:
        values.fill("num_labels", len(values["label_names"]), "--label-names")
    if objective == REGRESSION:
        values.fill("num_labels", 1, f"--objective {objective}")
    values.fill("num_labels", 0, "no labels")
    if values["pooling"] is not None and is_encoder and values["num_labels"]:
        values.choose("pooler", True, "the head of an encoder")
        values.choose("label_bias", True, "the head of an encoder")


def _derive_mup(values: _DerivedValues) -> None:
    """Sets the multipliers of muP, unless the model already has them: from flags, or from the folder it comes from."""
    hidden = values["hidden_size"]
    if not values["use_mup"] or hidden <= 0:
        return
    values.fill("mup_base_hidden_size", hidden, "the hidden size: this is the base model")
    model = unflatten_config(values.values).model
    if min(model.mup_base_hidden_size or 0, model.mup_output_mult) <= 0:
        return
    values.fill("mup_width_mult", relative_width(model, hidden), "hidden size / --mup-base-hidden-size")
    has_scores = has_attention(model) and not model.multi_latent_attention
    multipliers = mup_multipliers(model, hidden, model.kv_channels if has_scores else None)
    if multipliers.embedding_multiplier != 1.0 and not values["scale_embeddings"]:
        values.choose("embedding_multiplier", multipliers.embedding_multiplier, "--mup-embedding-mult")
    width = "the relative width of muP" if model.mup_output_mult == 1.0 else "1 / --mup-output-mult"
    values.choose("logits_scaling", multipliers.logits_scaling, width)
    why = "sqrt(--mup-base-head-dim, or 1) / head width to the power of --mup-attn-scale-power"
    if multipliers.softmax_scale is not None:
        values.choose("softmax_scale", multipliers.softmax_scale, why)


def _derive_pipeline(values: _DerivedValues) -> None:
    pp, layout = values["pipeline_model_parallel_size"], values["pipeline_model_parallel_layout"]
    chunk = values["num_layers_per_virtual_pipeline_stage"]
    name, virtual = "num_virtual_stages_per_pipeline_rank", None
    if layout is not None:
        try:
            virtual = _exact_quotient(len(parse_pipeline_layout(layout)), pp)
        except PipelineLayoutError:
            virtual = None
        values.fill(name, virtual, "stages of the layout / pp")
    elif chunk is not None:
        counted = values["account_for_embedding_in_pipeline_split"] + values["account_for_loss_in_pipeline_split"]
        layers = values["num_layers"] + num_vision_layers(unflatten_config(values.values).model) + counted
        virtual = _exact_quotient(_exact_quotient(layers, pp), chunk)
        values.fill(name, virtual, "layers per rank / layers per virtual stage")
    elif values["pipeline_schedule"] == "zb-v":
        values.fill(name, 2, "zb-v passes every rank twice")
    else:
        values.fill(name, 1, "no virtual stages were asked for")
    virtual = values[name]
    if virtual is not None and virtual > 1:
        values.fill("pipeline_schedule", "interleaved", "there are virtual stages")
        if pp > 0:
            values.fill("microbatch_group_size_per_virtual_pipeline_stage", pp, "the pipeline size")
    elif virtual is not None:
        values.fill("pipeline_schedule", "1f1b", "there are no virtual stages")


def _derive_sequence(values: _DerivedValues) -> None:
    tp, cp = values["tensor_model_parallel_size"], values["context_parallel_size"]
    undecided = not values["sequence_parallel"] and not values.is_chosen("sequence_parallel")
    if undecided and values["num_experts"] is not None:
        values.set("sequence_parallel", tp > 1, "with experts and tp every token must be routed by one rank only")
    if values["tp_comm_overlap"] and cp > 0:
        tokens = values["seq_length"] // cp * values["micro_batch_size"]
        values.fill("tp_comm_overlap_chunks", min(max(tokens // 2048, 2), 4), "one per 2,048 tokens, from 2 to 4")
    groups = values["num_query_groups"]
    hierarchical = values["cp_comm_type"] == "a2a+p2p" and not values["hierarchical_context_parallel_sizes"]
    if hierarchical and cp > 1 and tp > 0 and groups is not None and groups > 0:
        heads = max(1, groups // tp)
        exchange = math.gcd(cp, heads)
        why = "the most ranks that divide cp and a rank's key/value heads"
        values.set("hierarchical_context_parallel_sizes", (exchange, cp // exchange), why)


def _derive_data_parallel(values: _DerivedValues) -> None:
    strategy = "data_parallel_sharding_strategy"
    if values[strategy] == "optim" and not values.is_chosen("use_distributed_optimizer"):
        if not values["use_distributed_optimizer"]:
            values.set("use_distributed_optimizer", True, f"{flag_name(strategy)} is optim")
    elif values["use_distributed_optimizer"]:
        values.fill(strategy, "optim", "--use-distributed-optimizer is set")
    else:
        values.fill(strategy, "no_shard", "--use-distributed-optimizer is not set")
    if values["step_batch_size_schedule"] is not None:
        try:
            steps = parse_batch_size_steps(values["step_batch_size_schedule"], values["seq_length"])
            values.fill("global_batch_size", steps[-1][1], "the last of --step-batch-size-schedule")
        except BatchSizeStepsError:
            pass
    replicas, micro = values["data_parallel_size"], values["micro_batch_size"]
    if replicas and micro > 0:
        values.fill("global_batch_size", micro * replicas, "micro batch x data parallel")
        batch, unit = values["global_batch_size"], micro * replicas
        one_size = not values["rampup_batch_size"] and values["step_batch_size_schedule"] is None
        if values["decrease_batch_size_if_needed"] and one_size and batch > unit and batch % unit:
            why = f"{batch} down to a multiple of micro batch x data parallel, --decrease-batch-size-if-needed"
            values.set("global_batch_size", batch // unit * unit, why)
    values.fill("lr_decay_iters", values["train_iters"], "--train-iters")
    values.fill("lr_decay_samples", values["train_samples"], "--train-samples")


def _derive_files(values: _DerivedValues) -> None:
    names = ("tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern")
    implied = infer_tokenizer_type(**{name: values[name] for name in names})
    if implied is not None:
        values.fill("tokenizer_type", *implied)
    elif values["mock_data"]:
        values.fill("tokenizer_type", "NullTokenizer", "mock data has no text")
    if values["mock_data"] and values["tokenizer_type"] == "NullTokenizer":
        values.fill("vocab_size", MOCK_VOCAB_SIZE, "mock data without a tokenizer")
    if values["multiple_validation_sets"]:
        named = named_validation_sets(values["valid_data_path"], values["validation_set_names"])
        if named is not None:
            values.set("valid_data_path", named, "--multiple-validation-sets")
    first = values["data_path"] or values["train_data_path"]
    if first:
        try:
            prefix = parse_blend(first)[0].prefix
        except BlendError:
            prefix = None
        if prefix is not None:
            folder = default_cache_folder(prefix, values["object_storage_cache_path"])
            place = "in --object-storage-cache-path" if is_remote(prefix) else "beside the first dataset"
            values.fill("data_cache_path", folder, place)
    values.fill("log_dir", values["save"], "the --save folder")
    if values["sft_tokenizer_prompt_format"] not in (None, "default"):
        why = "--sft-tokenizer-prompt-format"
        values.fill("chat_template", values["sft_tokenizer_prompt_format"], why)
