"""`PetatronCache`, the KV cache of generation inside transformers, as the engine has it: pages of keys and values, or of latents, and
the states of recurrent layers.

All sequences have the same number of pages, one after the other; it grows when one of them needs more. Padding is not stored.

B sequences, S columns of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from petatron.integrations.transformers.packed_inputs import PackedInputs
from petatron.kernels.attention.paged_attention import PagedBatch, PromptChunk, fresh_documents
from petatron.layers.spec.generation_state import GenerationState, GenerationStep, PagedState, RecurrentState
from petatron.layers.spec.generation_step_groups import sequence_groups

PAGE_SIZE = 16


class PetatronCache(Cache):
    """The pages and states of all layers, and which columns of the batch were tokens."""

    def __init__(
        self, states: Sequence[tuple[int, GenerationState]], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`states`: what layers keep, each with the layer's index. The first step says how many sequences there are."""
        super().__init__(layers=[])
        self._is_token_BS = np.zeros((0, 0), dtype=np.bool_)
        self._pages_each = 0
        self._pages: dict[int, dict[str, Tensor]] = {
            index: {name: torch.zeros((0, PAGE_SIZE, *shape), dtype=dtype, device=device) for name, shape in state.rows}
            for index, state in states
            if isinstance(state, PagedState)
        }
        self._states: dict[int, dict[str, Tensor]] = {
            index: {
                tensor.name: torch.zeros((0, *tensor.shape), dtype=tensor.dtype(dtype), device=device)
                for tensor in state.tensors
            }
            for index, state in states
            if isinstance(state, RecurrentState)
        }

    @property
    def lengths_B(self) -> np.ndarray | None:
        """The tokens of each sequence; None before the first step."""
        return None if self.get_seq_length() == 0 else self._is_token_BS.sum(axis=1)

    @property
    def num_sequences(self) -> int:
        return self._is_token_BS.shape[0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the columns so far, padding included, as transformers counts them."""
        return self._is_token_BS.shape[1]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        """Whether columns can be forgotten: a recurrent state has no token apart."""
        return not self._states

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.num_sequences).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        count = self.num_sequences
        self._is_token_BS = self._is_token_BS[indices.cpu().numpy()]
        for pages in self._pages.values():
            for name, values in pages.items():
                by_sequence = values.unflatten(0, (count, self._pages_each))
                pages[name] = by_sequence[indices.to(values.device)].flatten(0, 1)
        for tensors in self._states.values():
            tensors.update({name: values[indices.to(values.device)] for name, values in tensors.items()})

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last columns: a negative number of them, or all but a positive number."""
        columns = self.get_seq_length()
        kept = tokens_to_remove if tokens_to_remove > 0 else columns + tokens_to_remove
        if self._states and kept < columns:
            raise ValueError(
                "Recurrent layers cannot forget tokens. Generate without an assistant and without prompt lookup."
            )
        self._is_token_BS = self._is_token_BS[:, : max(0, kept)]

    def reset(self) -> None:
        self._is_token_BS = self._is_token_BS[:, :0]

    def add(self, inputs: PackedInputs) -> tuple[GenerationStep, np.ndarray]:
        """Makes room for new columns; returns the step that computes them, and the packed token of each of its rows."""
        counts_B, before_B = inputs.is_token_BS.sum(axis=1), self._add_columns(inputs)
        self._grow(int((before_B + counts_B).max()))
        first_B = np.cumsum(counts_B) - counts_B
        # As the engine orders them: decodes, prompts that begin, prompts that go on.
        decodes_B = (counts_B == 1) & (before_B > 0)
        order = sorted(np.flatnonzero(counts_B), key=lambda row: (not decodes_B[row], before_B[row] > 0))
        num_decodes = int(decodes_B.sum())
        chunks: list[PromptChunk] = []
        begin = num_decodes
        for number, row in enumerate(order[num_decodes:], num_decodes):
            chunks.append(PromptChunk(begin, begin + int(counts_B[row]), number, int(before_B[row])))
            begin += int(counts_B[row])
        sequences, positions = inputs.is_token_BS.nonzero()[0], inputs.positions_BS[inputs.is_token_BS]
        rows = np.concatenate([np.arange(first_B[row], first_B[row] + counts_B[row]) for row in order])
        slots = sequences * self._pages_each * PAGE_SIZE + positions
        device = inputs.tokens_BS.device
        tables = np.array(order)[:, None] * self._pages_each + np.arange(self._pages_each)
        lengths = (before_B + counts_B)[order]
        batch = PagedBatch(
            torch.from_numpy(slots[rows]).to(device),
            torch.from_numpy(tables.astype(np.int32)).to(device),
            torch.from_numpy(lengths.astype(np.int32)).to(device),
            int(lengths[:num_decodes].max(initial=0)),
            num_decodes,
            tuple(chunks),
            fresh_documents(chunks, device),
            state_slots_N=torch.tensor(order, dtype=torch.int64, device=device) if self._states else None,
        )
        return GenerationStep(batch, self._pages, self._states, sequence_groups(batch) if self._states else ()), rows

    def add_padding(self, inputs: PackedInputs) -> None:
        """Notes columns without a token."""
        assert inputs.num_tokens == 0
        self._add_columns(inputs)

    def _add_columns(self, inputs: PackedInputs) -> np.ndarray:
        """Returns the tokens of each sequence before."""
        if self.get_seq_length() == 0:
            self._is_token_BS, self._pages_each = inputs.is_token_BS[:, :0], 0
            for pages in self._pages.values():
                pages.update({name: values[:0] for name, values in pages.items()})
            for tensors in self._states.values():
                count = inputs.is_token_BS.shape[0]
                tensors.update({name: values.new_zeros((count, *values.shape[1:])) for name, values in tensors.items()})
        before_B = self._is_token_BS.sum(axis=1)
        self._is_token_BS = np.concatenate((self._is_token_BS, inputs.is_token_BS), axis=1)
        return before_B

    def _grow(self, longest: int) -> None:
        needed, count = -(-longest // PAGE_SIZE), self.num_sequences
        if needed <= self._pages_each:
            return
        wanted = max(needed, 2 * self._pages_each)
        for pages in self._pages.values():
            for name, values in pages.items():
                grown = values.new_zeros((count, wanted, *values.shape[1:]))
                grown[:, : self._pages_each] = values.unflatten(0, (count, self._pages_each))
                pages[name] = grown.flatten(0, 1)
        self._pages_each = wanted
