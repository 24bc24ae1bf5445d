"""Megatron-shaped checkpoints for tests, made by loops over heads and ranks that share nothing with the code under test."""

from __future__ import annotations

import io
import pickle
import zlib
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

VOCAB, WIDTH, HEAD, POSITIONS = 50, 16, 4, 12


@dataclass(frozen=True)
class Case:
    """A tiny model and how Megatron kept it."""

    layers: int = 2
    heads: int = 4
    groups: int = 4
    ffn: int = 24
    swiglu: bool = True
    bias: bool = False
    learned: bool = False
    tied: bool = False
    experts: int = 0
    shared: int = 0
    norm: str = "RMSNorm"
    qk_norm: bool = False
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    names: str = "te"  # te, local or old
    expert_names: str = "sequential"  # sequential, grouped or products
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def padded(self) -> int:
        return -(-VOCAB // (8 * self.tp)) * 8 * self.tp

    def args(self, **more: Any) -> Namespace:
        return Namespace(
            num_layers=self.layers, hidden_size=WIDTH, ffn_hidden_size=self.ffn, num_attention_heads=self.heads,
            group_query_attention=self.groups != self.heads, num_query_groups=self.groups if self.groups != self.heads else 1,
            kv_channels=HEAD, seq_length=POSITIONS, max_position_embeddings=POSITIONS, normalization=self.norm,
            position_embedding_type="learned_absolute" if self.learned else "rope", add_position_embedding=True,
            add_bias_linear=self.bias, add_qkv_bias=False, swiglu=self.swiglu, qk_layernorm=self.qk_norm,
            untie_embeddings_and_output_weights=not self.tied, make_vocab_size_divisible_by=8, padded_vocab_size=self.padded,
            vocab_size=VOCAB, tensor_model_parallel_size=self.tp, pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.vpp if self.vpp > 1 else None, expert_model_parallel_size=self.ep,
            num_experts=self.experts or None, moe_ffn_hidden_size=self.ffn if self.experts else None, moe_router_topk=2,
            moe_shared_expert_intermediate_size=self.shared or None, params_dtype=torch.float32, data_path=["a", "b"],
            **self.extra, **more,
        )  # fmt: skip


def truth(case: Case) -> dict[str, Tensor]:
    """Logical tensors with values of their own."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (VOCAB, WIDTH)}
    if case.learned:
        shapes["position.weight"] = (POSITIONS, WIDTH)
    norms = ["norm"] + [f"layers.{n}.{which}_norm" for n in range(case.layers) for which in ("attention", "mlp")]
    for norm in norms:
        shapes[f"{norm}.weight"] = (WIDTH,)
        if case.norm == "LayerNorm":
            shapes[f"{norm}.bias"] = (WIDTH,)
    for n in range(case.layers):
        attention = {"q": case.heads * HEAD, "k": case.groups * HEAD, "v": case.groups * HEAD}
        for name, rows in attention.items():
            _linear(shapes, case, f"layers.{n}.attention.{name}", (rows, WIDTH))
        _linear(shapes, case, f"layers.{n}.attention.out", (WIDTH, case.heads * HEAD))
        if case.qk_norm:
            shapes |= {f"layers.{n}.attention.{name}_norm.weight": (HEAD,) for name in "qk"}
        mlp = f"layers.{n}.mlp"
        if case.experts:
            shapes[f"{mlp}.router.weight"] = (case.experts, WIDTH)
            _mlp(shapes, case, f"{mlp}.experts", case.ffn, (case.experts,))
            if case.shared:
                _mlp(shapes, case, f"{mlp}.shared", case.shared, ())
        else:
            _mlp(shapes, case, mlp, case.ffn, ())
    if not case.tied:
        shapes["head.weight"] = (VOCAB, WIDTH)
    made = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        made[name] = torch.randn(shape, generator=generator)
    return made


def _linear(shapes: dict[str, tuple[int, ...]], case: Case, name: str, shape: tuple[int, ...]) -> None:
    shapes[f"{name}.weight"] = shape
    if case.bias:
        shapes[f"{name}.bias"] = shape[:-1]


def _mlp(shapes: dict[str, tuple[int, ...]], case: Case, name: str, ffn: int, lead: tuple[int, ...]) -> None:
    for part in ("gate", "up") if case.swiglu else ("up",):
        _linear(shapes, case, f"{name}.{part}", (*lead, ffn, WIDTH))
    _linear(shapes, case, f"{name}.down", (*lead, WIDTH, ffn))


def interleaved(case: Case, q: Tensor, k: Tensor, v: Tensor, groups: range) -> Tensor:
    """For each key/value head: its query heads, its key, its value."""
    rows, each = [], case.heads // case.groups
    for group in groups:
        rows += [q[head * HEAD : (head + 1) * HEAD] for head in range(group * each, (group + 1) * each)]
        rows += [k[group * HEAD : (group + 1) * HEAD], v[group * HEAD : (group + 1) * HEAD]]
    return torch.cat(rows)


def rank_layer(case: Case, t: dict[str, Tensor], layer: int, tp: int, ep: int) -> dict[str, Tensor]:
    """A layer's weights on one rank, under the core library's names for the local implementation."""
    own, at, out = case.groups // case.tp, f"layers.{layer}.", {}
    for leaf in ("weight", "bias"):
        if f"{at}attention.q.{leaf}" in t:
            parts = [t[f"{at}attention.{name}.{leaf}"] for name in "qkv"]
            out[f"self_attention.linear_qkv.{leaf}"] = interleaved(case, *parts, groups=range(tp * own, (tp + 1) * own))
        for ours, theirs in (("attention_norm", "input_layernorm"), ("mlp_norm", "pre_mlp_layernorm")):
            if f"{at}{ours}.{leaf}" in t:
                out[f"{theirs}.{leaf}"] = t[f"{at}{ours}.{leaf}"]
    step = case.heads * HEAD // case.tp
    out["self_attention.linear_proj.weight"] = t[f"{at}attention.out.weight"][:, tp * step : (tp + 1) * step].clone()
    if case.bias:
        out["self_attention.linear_proj.bias"] = t[f"{at}attention.out.bias"]
    if case.qk_norm:
        out |= {f"self_attention.{n}_layernorm.weight": t[f"{at}attention.{n}_norm.weight"] for n in "qk"}
    if not case.experts:
        out |= {f"mlp.{k}": v for k, v in rank_mlp(case, t, f"{at}mlp", case.ffn, tp, None).items()}
        return out
    out["mlp.router.weight"] = t[f"{at}mlp.router.weight"]
    if case.shared:
        out |= {
            f"mlp.shared_experts.{k}": v for k, v in rank_mlp(case, t, f"{at}mlp.shared", case.shared, tp, None).items()
        }
    here = case.experts // case.ep
    each = [rank_mlp(case, t, f"{at}mlp.experts", case.ffn, tp, ep * here + n) for n in range(here)]
    if case.expert_names == "products":
        first = torch.stack([m["linear_fc1.weight"].t() for m in each]).contiguous()
        second = torch.stack([m["linear_fc2.weight"].t() for m in each]).contiguous()
        out["mlp.experts.weight1"] = first.view(WIDTH, -1)
        out["mlp.experts.weight2"] = second.view(-1, WIDTH)
        return out
    for n, matrices in enumerate(each):
        for k, v in matrices.items():
            sequential = f"mlp.experts.local_experts.{n}.{k}"
            out[sequential if case.expert_names == "sequential" else f"mlp.experts.{k}{n}"] = v
    return out


def rank_mlp(case: Case, t: dict[str, Tensor], at: str, ffn: int, tp: int, expert: int | None) -> dict[str, Tensor]:
    own, out = range(tp * ffn // case.tp, (tp + 1) * ffn // case.tp), {}
    pick = (lambda tensor: tensor) if expert is None else (lambda tensor: tensor[expert])
    sides = ("gate", "up") if case.swiglu else ("up",)
    for leaf in ("weight", "bias") if case.bias else ("weight",):
        out[f"linear_fc1.{leaf}"] = torch.stack([pick(t[f"{at}.{side}.{leaf}"])[row] for side in sides for row in own])
    out["linear_fc2.weight"] = torch.stack([pick(t[f"{at}.down.weight"])[:, column] for column in own], dim=1)
    if case.bias:
        out["linear_fc2.bias"] = pick(t[f"{at}.down.bias"]).clone()
    return out


TE = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
OLD = {
    "self_attention.linear_qkv": "self_attention.query_key_value", "self_attention.linear_proj": "self_attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm", "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}  # fmt: skip


def renamed(case: Case, name: str) -> str:
    table = {"te": TE, "local": {}, "old": OLD}[case.names]
    for mine, theirs in table.items():
        if name.startswith(mine) and not (case.experts and mine.startswith("pre_mlp")):
            return theirs + name[len(mine) :]
    return name


def vocabulary(case: Case, table: Tensor, tp: int) -> Tensor:
    rows = torch.full((case.padded, WIDTH), 7.0)
    rows[:VOCAB] = table
    own = case.padded // case.tp
    return rows[tp * own : (tp + 1) * own].clone()


def rank_chunk(case: Case, t: dict[str, Tensor], tp: int, stage: int, ep: int) -> dict[str, Any]:
    """The state dict of one (virtual) stage on one rank."""
    stages = case.pp * case.vpp
    each, state = case.layers // stages, {}
    if stage == 0:
        state["embedding.word_embeddings.weight"] = vocabulary(case, t["embedding.weight"], tp)
        if case.learned:
            state["embedding.position_embeddings.weight"] = t["position.weight"]
    for local in range(each):
        layer = rank_layer(case, t, stage * each + local, tp, ep)
        state |= {f"decoder.layers.{local}.{renamed(case, k)}": v for k, v in layer.items()}
        state[f"decoder.layers.{local}.self_attention.linear_qkv._extra_state"] = io.BytesIO(b"scales")
    if stage == stages - 1:
        leaves = ("weight", "bias") if case.norm == "LayerNorm" else ("weight",)
        state |= {f"decoder.final_layernorm.{leaf}": t[f"norm.{leaf}"] for leaf in leaves}
        if not case.tied:
            state["output_layer.weight"] = vocabulary(case, t["head.weight"], tp)
        elif stage > 0:
            state["output_layer.weight"] = vocabulary(case, t["embedding.weight"], tp)
    return nested(state) if case.names == "old" else state


def nested(state: dict[str, Any]) -> dict[str, Any]:
    """As before the core library: dictionaries by module, and flat names inside the transformer."""
    encoder, tree = {}, {"language_model": {}}
    for name, value in state.items():
        if name.startswith("embedding."):
            tree["language_model"].setdefault("embedding", {})[name.split(".")[1]] = {"weight": value}
        elif name == "output_layer.weight":
            tree["language_model"]["output_layer"] = {"weight": value}
        else:
            encoder[name.removeprefix("decoder.")] = value
    tree["language_model"]["encoder"] = encoder
    return tree


def write_legacy(
    folder: Path, case: Case, *, iteration: int = 30, edit: Callable[[dict[str, Any]], None] | None = None
) -> Path:
    """All rank folders and the tracker; `edit` may change the content of each file."""
    step = folder / f"iter_{iteration:07d}"
    values = truth(case)
    for tp in range(case.tp):
        for pp in range(case.pp):
            for ep in range(case.ep):
                name = f"mp_rank_{tp:02d}"
                name += f"_{pp:03d}" if case.pp > 1 else ""
                name += f"_{ep:03d}" if case.ep > 1 else ""
                chunks = [rank_chunk(case, values, tp, virtual * case.pp + pp, ep) for virtual in range(case.vpp)]
                content = {
                    "args": case.args(),
                    "checkpoint_version": 3.0,
                    "iteration": iteration,
                    "optimizer": {"a": torch.ones(2)},
                }
                content |= (
                    {"model": chunks[0]} if case.vpp == 1 else {f"model{n}": chunk for n, chunk in enumerate(chunks)}
                )
                if edit is not None:
                    edit(content)
                (step / name).mkdir(parents=True)
                torch.save(content, step / name / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return step


class DistFile:
    """A torch_dist folder put together by hand: blobs one after another in a file per rank, and the table."""

    def __init__(self, step: Path) -> None:
        step.mkdir(parents=True)
        self.step, self.table, self.places = step, {}, {}

    def add(
        self, name: str, shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], Any]], *, rank: int = 0
    ) -> None:
        described, dtype = [], torch.float32
        for start, value in chunks:
            blob, file = io.BytesIO(), f"__{rank}_0.distcp"
            torch.save(value, blob)
            sizes = value.shape if isinstance(value, Tensor) else shape
            described.append(ChunkStorageMetadata(torch.Size(start), torch.Size(sizes)))
            with (self.step / file).open("ab") as stream:
                place = _StorageInfo(file, stream.tell(), len(blob.getvalue()))
                stream.write(blob.getvalue())
            self.places[MetadataIndex(name, torch.Size(start), len(described))] = place
        self.table[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), described)

    def chunk(self, index: MetadataIndex) -> Tensor:
        place = self.places[index]
        data = (self.step / place.relative_path).read_bytes()
        return torch.load(io.BytesIO(data[place.offset : place.offset + place.length]), weights_only=True)

    def finish(self, args: Namespace, *, iteration: int = 30) -> Path:
        self.table["decoder.layers.mlp._extra_state/shard_0_2"] = BytesStorageMetadata()
        metadata = Metadata(self.table, storage_data=self.places, planner_data=[{"a": ("b",)}])
        (self.step / ".metadata").write_bytes(pickle.dumps(metadata))
        (self.step / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        torch.save({"args": args, "iteration": iteration, "checkpoint_version": 3.0}, self.step / "common.pt")
        return self.step


def write_dist(folder: Path, case: Case, *, halves: bool = False, per_layer: bool = False) -> DistFile:
    """Layers stacked (or not) and chunks cut as `case.tp` ranks would; `halves` keeps gate and up apart, as newer files do."""
    made, t = DistFile(folder / "iter_0000030"), truth(case)
    for name, logical in (
        ("embedding.word_embeddings.weight", "embedding.weight"),
        ("output_layer.weight", "head.weight"),
    ):
        if logical in t:
            own = case.padded // case.tp
            made.add(
                name, (case.padded, WIDTH), [((r * own, 0), vocabulary(case, t[logical], r)) for r in range(case.tp)]
            )
    if case.learned:
        made.add("embedding.position_embeddings.weight", (POSITIONS, WIDTH), [((0, 0), t["position.weight"])])
    for leaf in ("weight", "bias") if case.norm == "LayerNorm" else ("weight",):
        made.add(f"decoder.final_layernorm.{leaf}", (WIDTH,), [((0,), t[f"norm.{leaf}"])])
    made.add("optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight", (3,), [((0,), torch.ones(3))], rank=1)
    flat = Case(**{**{f: getattr(case, f) for f in case.__dataclass_fields__}, "ep": 1, "expert_names": "sequential"})
    stacked: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {}
    for layer in range(case.layers):
        ranks = [rank_layer(flat, t, layer, tp, 0) for tp in range(case.tp)]
        for name in ranks[0]:
            for tp, rank in enumerate(ranks if cut_dim(name) is not None else ranks[:1]):
                for suffix, start, value in dist_pieces(flat, name, rank[name], tp, halves):
                    lead = () if per_layer else (layer,)
                    key = f"decoder.layers.{layer}.{suffix}" if per_layer else f"decoder.layers.{suffix}"
                    stacked.setdefault(key, []).append(((*lead, *start), value[None] if not per_layer else value))
    for rank, (name, chunks) in enumerate(stacked.items()):
        shape = tuple(max(s[d] + v.shape[d] for s, v in chunks) for d in range(chunks[0][1].dim()))
        made.add(name, shape, [(s, v.clone()) for s, v in chunks], rank=rank % 2)
    return made


def cut_dim(name: str) -> int | None:
    if "linear_qkv" in name or "linear_fc1" in name:
        return 0
    return 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else None


def dist_pieces(
    case: Case, name: str, value: Tensor, tp: int, halves: bool
) -> list[tuple[str, tuple[int, ...], Tensor]]:
    """(name, place, chunk) of a rank's weight in the global tensor; gate and up are each whole over the ranks."""
    lead: tuple[int, ...] = ()
    suffix = renamed(case, name)
    if ".local_experts." in name:
        before, after = name.split(".local_experts.")
        number, _, rest = after.partition(".")
        suffix, lead = f"{before}.experts.{rest}", (int(number),)
    dim = cut_dim(name)
    zero = [0] * value.dim()
    pieces = []
    if case.swiglu and "linear_fc1." in name:
        half = value.shape[0] // 2
        for side, part in enumerate((value[:half], value[half:])):
            at = tp * half + (0 if halves else side * half * case.tp)
            pieces.append((f"{suffix}_{'wv'[side]}" if halves else suffix, [at, *zero[1:]], part))
    else:
        start = [tp * value.shape[d] if d == dim else 0 for d in range(value.dim())]
        pieces.append((suffix, start, value))
    return [(s, (*lead, *start), part[(None,) * len(lead)]) for s, start, part in pieces]
