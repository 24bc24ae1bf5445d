"""One layer: a chain of residual branches, usually a mixer over the sequence and a channel mixer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from torch import Tensor, nn

from petatron.layers.adapters.adapter_spec import AdapterSpec
from petatron.layers.dropout import Dropout
from petatron.layers.forward_context import ForwardContext
from petatron.layers.norm import Norm, NormSpec
from petatron.layers.ops.recompute_output import RecomputableOutput, as_recomputable
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch_spec import BranchModule, BranchSpec
from petatron.layers.spec.param_spec import ParamSpec, with_prefix

NormPlacement = Literal["pre", "post", "both", "output", "stream"]
"""pre: x + f(norm(x)). post: norm(x + f(x)), as in the first transformers. both: x + norm(f(norm(x))). output: x + norm(f(x)). stream: x +
f(x) with norm(x) for x, the norm being on the residual stream itself."""
ResidualBranches = Literal["sequential", "parallel", "parallel_shared_norm"]
"""sequential: a branch takes the sum with the one before. parallel: x + f(norm(x)) + g(norm'(x)), with two norms or one and the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer of a model: what it mixes over the sequence, with another sequence, and over channels; any may be missing.

    second_mixer: a second mixer over the sequence, which takes what `mixer` takes if branches are parallel.
    unnormed: the names of branches that take the stream as it is, in a layer whose other norms are before branches.
    seq_length: tokens of the sequence that the layer runs on, where that is not the model's only one; None: of `--seq-length`.
    stream_multipliers: the factors on a normed stream that branches are added to, by their names; 1 for the others.
    adapter: the adapters beside weights of the layer; None: it has none.
    """

    mixer: BranchSpec | None
    channel_mixer: BranchSpec | None
    second_mixer: BranchSpec | None = None
    cross_mixer: BranchSpec | None = None
    norm: NormSpec
    dropout: float = 0.0
    norm_placement: NormPlacement = "pre"
    residual_branches: ResidualBranches = "sequential"
    residual_multiplier: float = 1.0
    unnormed: tuple[str, ...] = ()
    seq_length: int | None = None
    stream_multipliers: tuple[tuple[str, float], ...] = ()
    adapter: AdapterSpec | None = None

    def __hash__(self) -> int:
        """Hashes the kinds of branches alone: estimates count thousands of layers, and equality compares every field."""
        return hash((type(self.mixer), type(self.channel_mixer), type(self.cross_mixer), self.norm_placement))

    @property
    def input_norms(self) -> tuple[str, ...]:
        """The names of the branches that have a norm before (or, placed `post`, after the sum with) them."""
        names = tuple(branch.name for branch in self.branches if branch.name not in self.unnormed)
        if self.norm_placement == "output":
            return ()
        return names[:1] if self.residual_branches == "parallel_shared_norm" else names

    @property
    def output_norms(self) -> tuple[str, ...]:
        """The names of the branches that have a norm on what they add."""
        return tuple(b.name for b in self.branches) if self.norm_placement in ("both", "output") else ()

    @property
    def saves_branch_inputs(self) -> bool:
        """Whether the input of a branch is no norm's output of this layer, which could be recomputed, so that it is saved."""
        return self.norm_placement in ("post", "output") or bool(self.unnormed)

    @property
    def branches(self) -> tuple[BranchSpec, ...]:
        """The residual branches in their order."""
        branches = (self.mixer, self.second_mixer, self.cross_mixer, self.channel_mixer)
        return tuple(branch for branch in branches if branch is not None)

    def shape_of(self, shape: ActivationShape) -> ActivationShape:
        """Returns the share of a micro-batch that the layer has, of a model with sequences of several lengths."""
        return shape.with_length(self.seq_length)

    @property
    def runs(self) -> int:
        """How often a forward pass runs the layer."""
        return 1

    def build(self, layer_index: int) -> TransformerLayer:
        """Builds the layer with its adapters."""
        layer = self.build_base(layer_index)
        if self.adapter is not None:
            self.adapter.install(layer, self.base_params())
        return layer

    def build_base(self, layer_index: int) -> TransformerLayer:
        """Builds the layer without adapters."""
        return TransformerLayer(self, layer_index=layer_index)

    def norm_region(self, branch: BranchSpec) -> str:
        """Returns the name that the norms of a branch have in `--offload-modules`."""
        return "mlp_norm" if branch is self.channel_mixer else "attn_norm"

    def region_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> Mapping[str, int]:
        """Returns the bytes that each part of the layer saves that may be offloaded by itself, in the order in which they run."""
        regions: dict[str, int] = {}
        for branch in self.branches:
            norms = (branch.name in self.input_norms) + (branch.name in self.output_norms)
            of_norms = (self.norm_region(branch), norms * self.norm.saved_bytes(shape, shape.tokens))
            for name, saved in (of_norms, *branch.region_bytes(shape, recomputed).items()):
                regions[name] = regions.get(name, 0) + saved
        return regions

    def params(self) -> Mapping[str, ParamSpec]:
        """Returns every parameter by its name in the layer."""
        return self.base_params() if self.adapter is None else _adapted_params(self)

    def base_params(self) -> Mapping[str, ParamSpec]:
        """Returns every parameter without those of adapters."""
        return _layer_params(self)

    def adapter_saved_bytes(self, branch: BranchSpec, shape: ActivationShape) -> int:
        """Returns the bytes that the adapters of a branch save of one micro-batch."""
        if self.adapter is None:
            return 0
        return self.adapter.saved_bytes(with_prefix(branch.name, branch.params()), shape)

    def extra_saved_bytes(self, shape: ActivationShape) -> int:
        """Returns the bytes that the layer saves of one micro-batch besides its branches with their norms."""
        return 0


@lru_cache(maxsize=256)
def _layer_params(spec: LayerSpec) -> Mapping[str, ParamSpec]:
    params: dict[str, ParamSpec] = {}
    for branch in spec.branches:
        if branch.name in spec.input_norms:
            params |= with_prefix(f"{branch.name}_norm", spec.norm.params())
        params |= with_prefix(branch.name, branch.params())
        if branch.name in spec.output_norms:
            params |= with_prefix(f"{branch.name}_post_norm", spec.norm.params())
    return params


@lru_cache(maxsize=256)
def _adapted_params(spec: LayerSpec) -> Mapping[str, ParamSpec]:
    assert spec.adapter is not None
    return spec.adapter.extend(spec.base_params())


class Residual:
    """The residual stream without its newest branch.

    Not a dataclass, which torch's fully_shard inspects: it would mistake this tensor's gradient, which arrives after that of
    the branch, for the start of a second backward of the layer.
    """

    __slots__ = ("x_SBD",)

    def __init__(self, x_SBD: Tensor) -> None:
        self.x_SBD = x_SBD


class _BranchParts(NamedTuple):
    """The modules of a branch by their names in the layer, formatted once and not in every forward pass.

    dropout: None where nothing is dropped.
    multiplier: the factor on what the branch adds to the residual stream; None: 1.
    norm_in_gemm: the norm before it is computed in the autograd node of the GEMM that takes it.
    stream: the factor on the normed stream that the branch is added to; None: it is added to the stream before the norm.
    """

    branch: str
    norm: str
    post_norm: str
    dropout: str | None
    multiplier: float | None
    norm_in_gemm: bool
    stream: float | None

    @classmethod
    def of(cls, branch: BranchSpec, layer: LayerSpec, module: nn.Module | None) -> _BranchParts:
        name, factor = branch.name, layer.residual_multiplier * branch.output_multiplier
        dropout = None if layer.dropout == 0.0 else f"{name}_dropout"
        stream = dict(layer.stream_multipliers).get(name, 1.0) if layer.norm_placement == "stream" else None
        once = stream is None and isinstance(module, BranchModule) and module.input_feeds_one_gemm
        multiplier = None if factor == 1.0 else factor
        return cls(name, f"{name}_norm", f"{name}_post_norm", dropout, multiplier, once, stream)


class TransformerLayer(nn.Module):
    """The branches of a `LayerSpec`, each with its norm and dropout."""

    def __init__(self, spec: LayerSpec, *, layer_index: int = 0) -> None:
        super().__init__()
        self.spec = spec
        for branch in spec.branches:
            if branch.name in spec.input_norms:
                self.add_module(f"{branch.name}_norm", spec.norm.build())
            self.add_module(branch.name, branch.build(layer_index))
            if branch.name in spec.output_norms:
                self.add_module(f"{branch.name}_post_norm", spec.norm.build())
            self.add_module(f"{branch.name}_dropout", Dropout(spec.dropout))
        self._branches = tuple(_BranchParts.of(b, spec, self._modules[b.name]) for b in spec.branches)
        branches = self.branches()
        self.takes_rows = len(branches) == len(spec.branches) and all(branch.takes_rows for branch in branches)

    def branches(self) -> list[BranchModule]:
        """Returns the modules of the branches in their order."""
        modules = [self._modules[names.branch] for names in self._branches]
        return [module for module in modules if isinstance(module, BranchModule)]

    def offload_regions(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules whose saved tensors may be offloaded, with the names of the spec's `region_bytes`."""
        for branch, names in zip(self.spec.branches, self._branches, strict=True):
            norms = (self._modules.get(name) for name in (names.norm, names.post_norm))
            yield from ((self.spec.norm_region(branch), norm) for norm in norms if norm is not None)
            module = self._modules[names.branch]
            if isinstance(module, BranchModule):
                yield from ((name, part) for name, parts in module.offload_regions().items() for part in parts)

    def forward(
        self, x_SBD: Tensor, context: ForwardContext, residual: Residual | None = None
    ) -> tuple[Tensor, Residual | None]:
        """Takes and returns the residual stream as two summands, newest branch and residual: the next norm adds them."""
        modules = self._modules
        if self.spec.norm_placement == "post":
            return self._post_norm_forward(x_SBD if residual is None else residual.x_SBD + x_SBD, context), None
        if self.spec.residual_branches != "sequential":
            return self._parallel_forward(x_SBD, context, residual)
        if self.spec.norm_placement == "output":
            return self._output_norm_forward(x_SBD, context, residual)
        for names in self._branches:
            if names.branch in self.spec.unnormed:
                residual = Residual(x_SBD if residual is None else residual.x_SBD + x_SBD)
                x_SBD = self._run_branch(names, as_recomputable(residual.x_SBD), context)
                continue
            norm: Norm = modules[names.norm]  # pyright: ignore[reportAssignmentType]
            inputs = (x_SBD,) if residual is None else (residual.x_SBD, x_SBD)
            if names.norm_in_gemm:
                normed = norm.deferred_norm(*inputs)
                del x_SBD, residual, inputs  # freed by the norm, before the rest of the branch runs
                x_SBD = self._run_branch(names, normed, context)
                assert normed.others is not None
                residual = Residual(normed.others[0])
            else:
                x_SBD, normed = norm.add_and_norm(*inputs)
                if names.stream is not None:
                    x_SBD = normed.value if names.stream == 1.0 else normed.value * names.stream
                residual, x_SBD = Residual(x_SBD), self._run_branch(names, normed, context)
        return x_SBD, residual

    def _post_norm_forward(self, x_SBD: Tensor, context: ForwardContext) -> Tensor:
        for names in self._branches:
            norm: Norm = self._modules[names.norm]  # pyright: ignore[reportAssignmentType]
            x_SBD = norm.add_and_norm(x_SBD, self._run_branch(names, as_recomputable(x_SBD), context))[1].value
        return x_SBD

    def _output_norm_forward(
        self, x_SBD: Tensor, context: ForwardContext, residual: Residual | None
    ) -> tuple[Tensor, Residual | None]:
        for names in self._branches:
            residual = Residual(x_SBD if residual is None else residual.x_SBD + x_SBD)
            x_SBD = self._run_branch(names, as_recomputable(residual.x_SBD), context)
        return x_SBD, residual

    def _parallel_forward(
        self, x_SBD: Tensor, context: ForwardContext, residual: Residual | None
    ) -> tuple[Tensor, Residual | None]:
        """Runs all branches on the same stream; a shared norm's output is recomputed once, for all of them."""
        first: Norm = self._modules[self._branches[0].norm]  # pyright: ignore[reportAssignmentType]
        total, normed = first.add_and_norm(*((x_SBD,) if residual is None else (residual.x_SBD, x_SBD)))
        out: Tensor | None = None
        for number, names in enumerate(self._branches):
            norm = self._modules.get(names.norm)
            if number > 0 and isinstance(norm, Norm):
                total, normed = norm.add_and_norm(total)
            y_SBD = self._run_branch(names, normed, context)
            out = y_SBD if out is None else out + y_SBD
        assert out is not None
        return out, Residual(total)

    def _run_branch(self, names: _BranchParts, x: RecomputableOutput, context: ForwardContext) -> Tensor:
        modules = self._modules
        y_SBD = modules[names.branch](x, context)  # pyright: ignore[reportOptionalCall]
        post_norm = modules.get(names.post_norm)
        y_SBD = y_SBD if post_norm is None else post_norm(y_SBD)
        y_SBD = y_SBD if names.multiplier is None else y_SBD * names.multiplier
        return y_SBD if names.dropout is None else modules[names.dropout](y_SBD)  # pyright: ignore[reportOptionalCall]
