"""Adapters by name beside one model: every request may have another one, and all are in the same steps.

The rows of a step are grouped by adapter. Each linear runs its GEMM once for all rows, and adds to the rows of a group what its A and B
give, at the place where an adapter in training is: inside of the GEMM, so that tensor parallelism is what it is there. LoRA and rsLoRA of
linears that see each token by itself, in the order of the step; experts, scales and magnitudes are merged into weights instead.

Steps with adapters are no CUDA graphs and are not recorded. Prefixes are cached by adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError, ConfigError, DataError, Problem
from petatron.infer.engine_options import EngineOptions
from petatron.kernels.linear_gemms import PLAIN_GEMM, Gemm, Tensors, WeightGrad
from petatron.layers.adapters.adapter import LORA_A, LORA_B, Adapter
from petatron.layers.adapters.adapter_gemms import AdapterPart
from petatron.layers.linear import Linear
from petatron.models.adapter_targets import adapted_linears
from petatron.models.registry import spec_from_config
from petatron.parallel.parallel_model import ParallelModel
from petatron.pretrained.adapter_folder import family_of_base, read_adapter, read_adapter_config
from petatron.sharding.shard_spec import ModelParallelCoordinate, compute_placement


@dataclass(frozen=True, slots=True, eq=False)
class _LinearAdapter:
    """A and B of one adapter beside one linear of this rank."""

    a: Tensor
    b: Tensor
    parts: tuple[AdapterPart, ...]
    scale: float

    def add_to(self, y_RO: Tensor, x_RD: Tensor, rows: Tensor) -> None:
        h = PLAIN_GEMM.forward(x_RD[rows], self.a)[0] * self.scale
        for part in self.parts:
            added = PLAIN_GEMM.forward(h[:, part.a_rows], self.b[part.b_rows])[0]
            y_RO[:, part.outputs].index_add_(0, rows, added)


class _Routes:
    """The rows of the running step that have an adapter, by its name."""

    def __init__(self) -> None:
        self.rows: dict[str, Tensor] = {}


class _RoutedAdapters:
    """What fills the slot of a linear: the adapters that it has, and the rows that have them now."""

    def __init__(self, routes: _Routes) -> None:
        self.by_name: dict[str, _LinearAdapter] = {}
        self._routes = routes

    def params(self, module: Any) -> tuple[()]:
        """Returns no parameters: nothing here is trained."""
        return ()

    def merged_weight(self, module: Linear) -> Tensor:
        raise AssertionError("a linear whose weight is absorbed has no adapter of one request")

    def adapt_op(self, module: Any, linear_op: Any) -> Callable[..., Tensor]:
        routed = [(self.by_name[name], rows) for name, rows in self._routes.rows.items() if name in self.by_name]
        if not routed:
            return linear_op
        gemm_op = replace(linear_op.gemm_op, gemm=_RoutedGemm(linear_op.gemm_op.gemm, routed))
        return replace(linear_op, gemm_op=gemm_op)


@dataclass(frozen=True, slots=True)
class _RoutedGemm:
    base: Gemm
    routed: list[tuple[_LinearAdapter, Tensor]]

    def forward(self, x_RD: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensors]:
        y_RO, _ = self.base.forward(x_RD, weight, bias)
        for adapter, rows in self.routed:
            adapter.add_to(y_RO, x_RD, rows)
        return y_RO, ()

    def backward(self, grad_RO: Tensor, weight: Tensor, saved: Tensors) -> tuple[Tensor, WeightGrad]:
        raise AssertionError("an engine computes no gradients")


class ServedAdapters:
    """Adapters in the slots of a model's linears, until `release`."""

    def __init__(self, model: ParallelModel, folders: Sequence[tuple[str, str]]) -> None:
        """Reads the folders of PEFT, by the name that requests give; every rank calls it."""
        _check_model(model)
        self._model, self._routes = model, _Routes()
        self._slots: dict[Linear, _RoutedAdapters] = {}
        self.names = tuple(name for name, _ in folders)
        for name, folder in folders:
            self._add(name, Path(folder))

    def _add(self, name: str, folder: Path) -> None:
        spec, mesh = self._model.spec, self._model.mesh
        adapter = read_adapter(folder, spec, model_type=family_of_base(read_adapter_config(folder)))
        if adapter.settings["adapter"] not in ("lora", "rslora"):
            raise CheckpointError(
                f"{folder} is an adapter of the kind {adapter.settings['adapter']}, which is not served by request. Merge it: petatron "
                f"checkpoint convert {folder} NEW_FOLDER --to huggingface."
            )
        adapted = spec_from_config(replace(spec.config, **adapter.settings), spec.moe)
        coordinate = ModelParallelCoordinate.from_mesh(mesh, sequence_parallel=False)
        modules = {n: module for stage in self._model.stages.values() for n, module in stage.named_modules()}
        for linear, weight, target, kind in adapted_linears(adapted):
            module = modules.get(linear)
            if module is None:  # of another pipeline stage
                continue
            owner = modules[linear.rpartition(".")[0]]
            if not isinstance(module, Linear) or linear.rpartition(".")[2] in getattr(owner, "absorbed_linears", ()):
                raise CheckpointError(
                    f"{folder} has an adapter beside {linear}, where none is served by request. Merge it: petatron checkpoint convert "
                    f"{folder} NEW_FOLDER --to huggingface."
                )
            local: dict[str, Tensor] = {}
            for leaf, param in kind.params_of(weight, target).items():
                placement = compute_placement(f"{linear}.{leaf}", param.shape, param.shard, coordinate)
                local[leaf] = module.weight.new_zeros(placement.shape)
                for shard in placement.tensor_shards:
                    values = adapter.tensors[shard.name][shard.logical_slices()]
                    local[leaf][shard.local_slices()] = values.to(module.weight)
            sections = [section.name for section in weight.shard.sections]
            indices = tuple(sections.index(section) for section in target.sections) or (0,)
            parts = Adapter((LORA_A, LORA_B), indices, rank=kind.rank).parts(module.sections)
            if module not in self._slots:
                self._slots[module] = _RoutedAdapters(self._routes)
                module.adapter = self._slots[module]  # pyright: ignore[reportAttributeAccessIssue]
            self._slots[module].by_name[name] = _LinearAdapter(local[LORA_A], local[LORA_B], parts, kind.scale)

    @staticmethod
    def checked_options(options: EngineOptions) -> EngineOptions:
        """Returns the options of an engine with adapters: without graphs and recordings of steps, whose rows would keep theirs."""
        if options.speculative_tokens:
            rule = "is not combined with --lora: drafts are of the model without adapters"
            raise ConfigError(
                [Problem("--speculative-tokens", str(options.speculative_tokens), rule, "Leave one out.")]
            )
        return replace(options, cuda_graphs=False, recorded_steps=False)

    def route(self, rows_of_requests: Iterable[tuple[str, int]]) -> None:
        """Sets the rows of the next step: the adapter, or "", and the number of rows of each request, in their order."""
        rows, at = dict[str, list[int]](), 0
        for name, count in rows_of_requests:
            if name:
                rows.setdefault(name, []).extend(range(at, at + count))
            at += count
        device = self._model.mesh.device
        self._routes.rows = {name: torch.tensor(of_name, device=device) for name, of_name in rows.items()}

    def release(self) -> None:
        """Takes the adapters from the model."""
        for module in self._slots:
            module.adapter = None
        self._slots.clear()


def check_adapter(name: str, names: Sequence[str]) -> None:
    """Raises `DataError` for a request with an adapter that the engine does not have."""
    if name and name not in names:
        known = f"It has {', '.join(names)}." if names else "It has none: start it with --lora NAME=FOLDER."
        raise DataError(f"The engine has no adapter {name!r}. {known}")


def _check_model(model: ParallelModel) -> None:
    problems = []
    if model.spec.config.adapter is not None:
        fix = "Serve the model without them, and these by name too; or merge them."
        problems.append(Problem("--lora", "", "is beside a model that has adapters of its own", fix))
    if model.sequence_parallel and model.mesh.tp.size > 1:
        problems.append(
            Problem("--lora", "", "needs all tokens of a step on every rank", "Leave --sequence-parallel out.")
        )
    if model.spec.source_length is not None:
        problems.append(Problem("--lora", "", "is for models that continue their prompt", "Merge the adapter."))
    if problems:
        raise ConfigError(problems)
