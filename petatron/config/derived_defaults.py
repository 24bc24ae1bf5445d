"""Fills what was left unset, with the reason: the only place where one setting decides another.

Every step looks at the values so far and either sets one path, saying why, or leaves it alone. A step never fails: when
its inputs make no sense (heads that do not divide the width) it sets nothing, and `config/checks/check_all.py` says what is wrong.
Some fields stay unset on purpose because only the machine knows: the communication backend, the log folder of a run
that is not saved, the vocabulary of a tokenizer that has not been opened yet.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from petatron.config.schema.data_blend import BlendError, parse_blend
from petatron.config.schema.fields import Value, assemble, flag_of, flatten
from petatron.config.schema.model import GATED_ACTIVATIONS
from petatron.config.schema.pipeline_layout_string import LayoutError, parse_layout
from petatron.config.schema.run import RunConfig
from petatron.config.value_origins import Origin

MOCK_VOCAB_SIZE = 1024


def derive(
    config: RunConfig, *, given: Collection[str] = (), world_size: int | None = None
) -> tuple[RunConfig, dict[str, Origin]]:
    """A config without gaps where they can be filled, and the origin of each value filled in.

    `given` are the paths someone chose; `world_size` is the launcher's, which wins over everything else.
    """
    state = _State(flatten(config), given)
    _derive_world(state, world_size)
    _derive_model(state)
    _derive_pipeline(state)
    _derive_sequence(state)
    _derive_sharding(state)
    _derive_run(state)
    _derive_files(state)
    return assemble(state.values), state.origins


class _State:
    """Values by path while they are being filled; names are unique, so rules may use the bare name."""

    def __init__(self, values: dict[str, Value], given: Collection[str]) -> None:
        self.values, self.given = values, given
        self.origins: dict[str, Origin] = {}
        self._paths = {path.split(".")[1]: path for path in values}

    def __getitem__(self, name: str) -> Any:
        return self.values[self._paths[name]]

    def is_given(self, name: str) -> bool:
        return self._paths[name] in self.given

    def set(self, name: str, value: Value, why: str) -> None:
        self.values[self._paths[name]] = value
        self.origins[self._paths[name]] = Origin("derived", why)

    def fill(self, name: str, value: Value, why: str) -> None:
        """Set only what is unset; `None` means the inputs do not allow a value."""
        if self[name] is None and value is not None:
            self.set(name, value, why)


def _quotient(number: int | None, divisor: int | None) -> int | None:
    """number / divisor when that is a positive whole number."""
    if not number or not divisor or number < 0 or divisor < 0 or number % divisor:
        return None
    return number // divisor


def _derive_world(state: _State, launched: int | None) -> None:
    model_ranks = state["tensor_model_parallel_size"] * state["pipeline_model_parallel_size"]
    model_ranks *= state["context_parallel_size"]
    started = (state["nproc_per_node"] or 0) * state["nnodes"]
    if launched is not None:
        state.set("world_size", launched, "ranks started by the launcher")
    elif started > 0:
        state.fill("world_size", started, "nproc per node x nodes")
    elif model_ranks > 0:
        state.fill("world_size", model_ranks * (state["data_parallel_size"] or 1), "tp x pp x cp x dp")
    state.fill("data_parallel_size", _quotient(state["world_size"], model_ranks), "world size / (tp x pp x cp)")
    if launched is None:
        state.fill("nproc_per_node", _quotient(state["world_size"], state["nnodes"]), "world size / nodes")
    state.fill(
        "expert_tensor_parallel_size", _quotient(state["tensor_model_parallel_size"], 1), "the tensor-parallel size"
    )
    if state["data_parallel_size"]:
        bucket = max(40_000_000, 1_000_000 * state["data_parallel_size"])
        state.fill("ddp_bucket_size", bucket, "max(40 million, 1 million x dp)")


def _derive_model(state: _State) -> None:
    hidden, heads = state["hidden_size"], state["num_attention_heads"]
    if hidden > 0 and state["activation"] in GATED_ACTIVATIONS:
        width = max(64, hidden * 8 // 3 // 64 * 64)
        state.fill("ffn_hidden_size", width, "8/3 x hidden size, down to a multiple of 64, for a gated activation")
    elif hidden > 0:
        state.fill("ffn_hidden_size", 4 * hidden, "4 x hidden size")
    groups = state["num_query_groups"]
    if groups is not None and groups != heads and not state.is_given("group_query_attention"):
        if not state["group_query_attention"]:
            state.set("group_query_attention", True, "--num-query-groups is set")
    elif groups is None and state["group_query_attention"]:
        state.fill("num_query_groups", 1, "multi-query, as --group-query-attention alone means")
    elif heads > 0:
        state.fill("num_query_groups", heads, "the number of heads")
    state.fill("kv_channels", _quotient(hidden, heads), "hidden size / heads")
    if state["seq_length"] > 0:
        state.fill("max_position_embeddings", state["seq_length"], "the sequence length")
    state.fill("embedding_init_method_std", state["init_method_std"], "--init-method-std")
    if state["num_experts"] is not None:
        state.fill("moe_ffn_hidden_size", state["ffn_hidden_size"], "the MLP width")


def _derive_pipeline(state: _State) -> None:
    pp, chunk, layout = (
        state["pipeline_model_parallel_size"],
        state["num_layers_per_virtual_pipeline_stage"],
        state["pipeline_model_parallel_layout"],
    )
    name, virtual = "num_virtual_stages_per_pipeline_rank", None
    if layout is not None:
        try:
            virtual = _quotient(len(parse_layout(layout)), pp)
        except LayoutError:
            virtual = None
        state.fill(name, virtual, "stages of the layout / pp")
    elif chunk is not None:
        counted = state["account_for_embedding_in_pipeline_split"] + state["account_for_loss_in_pipeline_split"]
        virtual = _quotient(_quotient(state["num_layers"] + counted, pp), chunk)
        state.fill(name, virtual, "layers per rank / layers per virtual stage")
    elif state["pipeline_schedule"] == "zb-v":
        state.fill(name, 2, "zb-v passes every rank twice")
    else:
        state.fill(name, 1, "no virtual stages were asked for")
    virtual = state[name]
    if virtual is not None and virtual > 1:
        state.fill("pipeline_schedule", "interleaved", "there are virtual stages")
        if pp > 0:
            state.fill("microbatch_group_size_per_virtual_pipeline_stage", pp, "the pipeline size")
    elif virtual is not None:
        state.fill("pipeline_schedule", "1f1b", "there are no virtual stages")


def _derive_sequence(state: _State) -> None:
    tp, cp = state["tensor_model_parallel_size"], state["context_parallel_size"]
    undecided = not state["sequence_parallel"] and not state.is_given("sequence_parallel")
    if undecided and state["num_experts"] is not None and tp > 1:
        state.set("sequence_parallel", True, "with experts every token must be routed by one rank only")
    if state["tp_comm_overlap"] and cp > 0:
        tokens = state["seq_length"] // cp * state["micro_batch_size"]
        state.fill("tp_comm_overlap_chunks", min(max(tokens // 2048, 2), 4), "one per 2,048 tokens, from 2 to 4")
    groups = state["num_query_groups"]
    hierarchical = state["cp_comm_type"] == "a2a+p2p" and not state["hierarchical_context_parallel_sizes"]
    if hierarchical and cp > 1 and tp > 0 and groups is not None and groups > 0:
        heads = max(1, groups // tp)
        exchange = math.gcd(cp, heads)
        why = "the most ranks that divide cp and a rank's key/value heads"
        state.set("hierarchical_context_parallel_sizes", (exchange, cp // exchange), why)


def _derive_sharding(state: _State) -> None:
    strategy = "data_parallel_sharding_strategy"
    if state[strategy] == "optim" and not state.is_given("use_distributed_optimizer"):
        if not state["use_distributed_optimizer"]:
            state.set("use_distributed_optimizer", True, f"{flag_of(strategy)} is optim")
    elif state["use_distributed_optimizer"]:
        state.fill(strategy, "optim", "--use-distributed-optimizer is set")
    else:
        state.fill(strategy, "no_shard", "--use-distributed-optimizer is not set")


def _derive_run(state: _State) -> None:
    replicas, micro = state["data_parallel_size"], state["micro_batch_size"]
    if replicas and micro > 0:
        state.fill("global_batch_size", micro * replicas, "micro batch x data parallel")
    state.fill("lr_decay_iters", state["train_iters"], "--train-iters")
    state.fill("lr_decay_samples", state["train_samples"], "--train-samples")


def _derive_files(state: _State) -> None:
    if state["tokenizer_model"] is not None:
        state.fill("tokenizer_type", "HuggingFaceTokenizer", "--tokenizer-model is set")
    elif state["vocab_file"] is not None and state["merge_file"] is not None:
        state.fill("tokenizer_type", "GPT2BPETokenizer", "--vocab-file and --merge-file are set")
    elif state["mock_data"]:
        state.fill("tokenizer_type", "NullTokenizer", "mock data has no text")
    if state["mock_data"] and state["tokenizer_type"] == "NullTokenizer":
        state.fill("vocab_size", MOCK_VOCAB_SIZE, "mock data without a tokenizer")
    first = state["data_path"] or state["train_data_path"]
    if first:
        try:
            prefix = parse_blend(first)[0].prefix
        except BlendError:
            prefix = None
        if prefix is not None:
            state.fill("data_cache_path", str(Path(prefix).parent / "cache"), "beside the first dataset")
    state.fill("log_dir", state["save"], "the --save folder")
