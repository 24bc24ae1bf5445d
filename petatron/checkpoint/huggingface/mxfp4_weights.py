"""Finds the weights that a Hugging Face folder stores in MXFP4: `<name>_blocks` and `<name>_scales` in the place of `<name>`.

`checkpoint/load/dequantize.py` has the format. A family's names and shapes are those of its plain weights, where experts are
[expert, in, out]; bytes are [expert, out, in / 32, 16], so every region of an entry is looked for in the other orientation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from petatron.checkpoint.files.manifest import BlockScale, StoredBox
from petatron.checkpoint.files.safetensors_file import TensorInfo
from petatron.checkpoint.load.dequantize import BLOCK, PACKED_DTYPE
from petatron.models.hf import EntryRegion, FolderEntry

_BLOCKS, _SCALES = "_blocks", "_scales"
TensorInfos = Mapping[str, tuple[str, TensorInfo]]
"""Every tensor of a folder: its file, and its place in that file."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor in MXFP4: the names of its bytes and its scales, and where they are."""

    name: str
    file: str
    info: TensorInfo
    scales_file: str
    scales_info: TensorInfo

    def problems(self, entry: FolderEntry) -> list[str]:
        """Returns what keeps bytes and scales from being this entry."""
        if len(entry.shape) != 3 or entry.shape[1] % BLOCK:
            return [f"{self.name}{_BLOCKS} is in MXFP4, and {entry.name} is no experts' matrix of blocks of {BLOCK}"]
        experts, columns, rows = entry.shape
        scales = (experts, rows, columns // BLOCK)
        wanted = ((_BLOCKS, self.info, (*scales, BLOCK // 2)), (_SCALES, self.scales_info, scales))
        return [
            f"{self.name}{suffix} is {info.dtype} {list(info.shape)} there, and should be {PACKED_DTYPE} {list(shape)}"
            for suffix, info, shape in wanted
            if info.shape != shape or info.dtype != PACKED_DTYPE
        ]

    def stored_box(self, region: EntryRegion) -> StoredBox:
        """Returns where a region of the plain entry is."""
        interleaved, start = region.interleaved, list(region.start_in_entry)
        offset = start.pop(interleaved[0] + 1) if interleaved else 0
        start[1], start[2] = start[2], start[1]
        if interleaved:
            interleaved = ({1: 2, 2: 1}.get(interleaved[0], interleaved[0]), interleaved[1])
            start.insert(interleaved[0] + 1, offset)
        scale = BlockScale(self.scales_file, f"{self.name}{_SCALES}", (1, 1, BLOCK), mxfp4=True)
        swapped = replace(
            region, start_in_entry=tuple(start), transposed=not region.transposed, interleaved=interleaved
        )
        return StoredBox.of_region(self.file, f"{self.name}{_BLOCKS}", swapped, scale)


def split_packed_tensors(infos: TensorInfos) -> tuple[dict[str, tuple[str, TensorInfo]], dict[str, PackedTensor]]:
    """Returns the plain tensors of a folder, and those in MXFP4 by the name that they would have."""
    packed: dict[str, PackedTensor] = {}
    for name, (file, info) in infos.items():
        base = name.removesuffix(_BLOCKS)
        if base != name and base + _SCALES in infos:
            packed[base] = PackedTensor(base, file, info, *infos[base + _SCALES])
    taken = {base + suffix for base in packed for suffix in (_BLOCKS, _SCALES)}
    return {name: place for name, place in infos.items() if name not in taken}, packed


def num_stored_elements(infos: TensorInfos) -> int:
    """Returns the most elements that tensors of these sizes can be: a byte of MXFP4 is two, any other one at most."""
    return sum((2 if name.endswith(_BLOCKS) else 1) * (info.end - info.begin) for name, (_, info) in infos.items())
