"""`NewHead`: how a model with a new head, or with new adapters, starts from one without.

A run that starts from a model (`--from`, `--pretrained-checkpoint`, `--load` with `--finetune`) loads what both have. The parameters of its
head, or of its adapters, that the other lacks (`ParamSpec.fresh_if_missing`) keep the initial values of the run's seed, and those of the
other's heads are not read; the log names both. Any other difference is an error, and so is a head that is missing where a run continues.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from petatron.base.format_text import abbreviate_names
from petatron.checkpoint.files.manifest import Manifest
from petatron.checkpoint.huggingface.folder_as_checkpoint import HuggingFaceFolder, folder_manifest
from petatron.checkpoint.tensor_chunk import Chunk
from petatron.layers.adapters.adapter import ADAPTER_PARAMS, MAGNITUDE
from petatron.models.model_spec import ModelSpec
from petatron.models.registry import without_adapters, without_task_head


@dataclass(frozen=True, slots=True)
class NewHead:
    """fresh: tensors that are drawn where the source lacks them. former: those that other ones of the source may stand for, by name.
    unused: tensors of the source's heads.
    """

    spec: ModelSpec
    plain: ModelSpec
    fresh: frozenset[str]
    former: Mapping[str, str]
    unused: frozenset[str]

    @classmethod
    def of(cls, spec: ModelSpec) -> NewHead | None:
        """Returns that of a model; None if it has no head that another may lack.

        >>> from petatron.models.registry import model_spec
        >>> from petatron.validate import load_config
        >>> flags = ["--vocab-size", "256", "--pooling", "last", "--num-labels", "2"]
        >>> run = load_config(flags, preset="tiny-llama", require_training=False).config
        >>> sorted(NewHead.of(model_spec(run)).fresh), sorted(NewHead.of(model_spec(run)).unused)
        (['task_head.out.weight'], ['head.weight'])
        """
        config = spec.config
        if config.pooling is None and config.adapter is None:
            return None
        params, plain = {shard.name: param for shard, param in spec.logical_tensors()}, without_adapters(spec)
        plain = plain if config.pooling is None else without_task_head(plain)
        former = {name: param.former_name for name, param in params.items() if param.former_name is not None}
        unused = plain.logical_shapes().keys() - params.keys() - set(former.values())
        fresh = frozenset(name for name, param in params.items() if param.fresh_if_missing)
        return cls(spec, plain, fresh, former, frozenset(unused))

    def folder_manifest(self, path: Path) -> Manifest:
        """Locates the tensors of a Hugging Face folder, which may have this head, another one or none."""
        folder = HuggingFaceFolder(path)
        settings, may_lack = folder.settings()[0], partial(self.fresh.__contains__)
        if settings.get("adapter") is not None:
            return folder_manifest(folder, self.spec)
        if settings.get("pooling") is not None:
            return folder_manifest(folder, without_adapters(self.spec), may_lack=may_lack)
        needed = self.spec.logical_shapes().keys()
        return folder_manifest(folder, self.plain, may_lack=lambda name: name not in needed)

    def with_former_tensors(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Returns the chunks, and before them those that are filled from other tensors of the source if it has them."""
        former = [
            replace(chunk, key=f"{chunk.key.partition('/')[0]}/{self.former[chunk.name]}")
            for chunk in chunks
            if chunk.name in self.former
        ]
        return [*former, *chunks]

    def may_lack(self, key: str) -> bool:
        name = key.partition("/")[2]
        return name in self.fresh or name in self.former.values()

    def may_ignore(self, key: str) -> bool:
        return key.partition("/")[2] in self.unused

    @staticmethod
    def lacks_magnitudes(missing_keys: Collection[str]) -> bool:
        """Whether DoRA's magnitudes are among the keys that a source lacks: they follow from the weights."""
        return any(key.endswith(f".{MAGNITUDE}") for key in missing_keys)

    def notes(self, missing_keys: Collection[str]) -> list[str]:
        """Returns what to say of a load from a source without these keys."""
        missing = {key.partition("/")[2] for key in missing_keys}
        adapters = {name for name in missing if name.rpartition(".")[2] in ADAPTER_PARAMS}
        drawn = sorted(name for name in self.fresh & missing - adapters if self.former.get(name, name) in missing)
        continued = sorted(name for name in self.former.keys() & missing if self.former[name] not in missing)
        notes = []
        if adapters:
            notes.append(f"the adapters are new: {abbreviate_names(sorted(adapters))} have initial values")
        if drawn:
            notes.append(f"the head is new: {abbreviate_names(drawn)} drawn with the run's seed")
        if continued:
            sources = abbreviate_names(sorted(self.former[name] for name in continued))
            notes.append(f"{abbreviate_names(continued)} begin with the values of {sources}")
        if drawn and self.unused:
            notes.append(f"not read, since this model has no such heads: {abbreviate_names(sorted(self.unused))}")
        return notes
