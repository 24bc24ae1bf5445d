"""Runs one step of generation on this rank: packs the tokens, runs this rank's stages, and returns logits on the last.

A step is the same sequence of calls on every rank, whichever sequences are in it: a replica without work computes a padding token, since
its ranks may have experts that others need.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from petatron.infer.engine_options import EngineOptions
from petatron.infer.pages import SCRATCH_PAGE, SCRATCH_SLOT, CacheSize
from petatron.infer.scheduler import ScheduledSequence
from petatron.infer.step.decode_graphs import CacheLocations, DecodeGraphs, IntRow, StepInputs, StepOutputs
from petatron.infer.step.layer_states import allocate_pages, allocate_states
from petatron.infer.step.recorded_depths import RecordedDepths
from petatron.infer.step.recorded_steps import RecordedSteps
from petatron.kernels.attention.paged import PagedBatch, PromptChunk, fresh_documents
from petatron.layers.spec.generation_state import GenerationStep
from petatron.layers.spec.sequence_group import sequence_groups
from petatron.mesh import collectives
from petatron.models.decoder import HIDDEN, Decoder
from petatron.parallel.parallel_model import ParallelModel


class ScheduledTokens(NamedTuple):
    """Tokens of a sequence at positions from `start` on. decodes: each is a row by itself, which attends through pages; else a chunk.

    state_slot: that of its recurrent states.
    """

    tokens: Many[int]
    start: int
    pages: list[int]
    decodes: bool
    state_slot: int = SCRATCH_SLOT


@dataclass(frozen=True, slots=True, eq=False)
class PackedStep:
    """The host's side of a step: ids, positions and page rows of all rows, and the rows whose logits are wanted.

    The page row of a token is where its keys and values are stored: page x page size + offset.
    sequences, lengths: of every row that decodes, and then of every chunk. shares_pages: several rows are of one sequence.
    """

    rows_3T: np.ndarray
    sequences: CacheLocations
    lengths: list[int]
    num_decodes: int
    chunks: tuple[PromptChunk, ...]
    logit_rows: list[int]
    shares_pages: bool = False

    @property
    def first_page(self) -> int | None:
        """The first page of the only sequence that decodes, if its pages follow each other."""
        if self.num_decodes != 1:
            return None
        pages = self.sequences.page_lists[0]
        return pages[0] if pages == list(range(pages[0], pages[0] + len(pages))) else None


def pack_step(
    scheduled: Many[ScheduledSequence],
    logit_rows: Many[Many[int]],
    *,
    page_size: int,
    multiple: int = 1,
    least: int = 1,
) -> PackedStep:
    """Packs the scheduled tokens, decodes first, padded to at least so many rows, and to a multiple.

    `logit_rows` count from each sequence's first row.
    """
    rows = [
        ScheduledTokens(
            [*work.sequence.tokens[work.start : work.start + work.count - len(work.drafts)], *work.drafts],
            work.start,
            work.sequence.pages,
            work.decodes,
            work.sequence.slot,
        )
        for work in scheduled
    ]
    return pack_rows(rows, logit_rows, page_size=page_size, multiple=multiple, least=least)


def pack_rows(
    sequences: Many[ScheduledTokens],
    logit_rows: Many[Many[int]],
    *,
    page_size: int,
    multiple: int = 1,
    least: int = 1,
) -> PackedStep:
    """Packs rows of sequences as `pack_step` does."""
    decodes: tuple[list[int], list[int], list[int]] = ([], [], [])
    parts: list[np.ndarray] = []
    chunks: list[PromptChunk] = []
    page_tables: list[list[int]] = []
    state_slots: list[int] = []
    lengths: list[int] = []
    wanted: list[int] = []
    begin = 0
    for (tokens, start, pages, decoded, state_slot), rows in zip(sequences, logit_rows):
        end = begin + len(tokens)
        state_slots += [state_slot] * (len(tokens) if decoded else 1)
        wanted += [begin + row for row in rows]
        if decoded:
            assert not chunks, "decodes come first"
            for at, token in enumerate(tokens, start):
                page_row = pages[at // page_size] * page_size + at % page_size
                for column, value in zip(decodes, (token, at, page_row)):
                    column.append(value)
                page_tables.append(pages)
                lengths.append(at + 1)
        else:
            positions = np.arange(start, start + len(tokens))
            page_rows = np.array(pages)[positions // page_size] * page_size + positions % page_size
            parts.append(np.stack([np.array(tokens), positions, page_rows]))
            chunks.append(PromptChunk(begin, end, len(page_tables), start))
            page_tables.append(pages)
            lengths.append(start + len(tokens))
        begin = end
    count = max(begin, least)
    padding = count + -count % multiple - begin
    if padding:
        parts.append(np.array([[0] * padding, [0] * padding, [SCRATCH_PAGE * page_size] * padding]))
    return PackedStep(
        np.concatenate([np.array(decodes, dtype=np.int64), *parts], axis=1),
        CacheLocations(page_tables, state_slots),
        lengths,
        len(decodes[0]),
        tuple(chunks),
        wanted,
        shares_pages=any(each.decodes and len(each.tokens) > 1 for each in sequences),
    )


class ModelSteps:
    """This rank's stages with the pages and recurrent states of their layers."""

    def __init__(self, model: ParallelModel, options: EngineOptions, cache: CacheSize, *, max_length: int) -> None:
        self._model = model
        page_size = options.page_size
        self._stages = [model.stages[number] for number in sorted(model.stages)]
        self.device = model.mesh.device
        self._pages = allocate_pages(model, cache.num_pages, page_size, depths=options.speculative_tokens)
        self._states = allocate_states(model, cache.num_slots)
        taken = model.io.boundaries[1] if len(model.io.boundaries) > 1 else ()
        boundary = next((tensor for tensor in taken if tensor.name == HIDDEN), None)
        self._width = None if boundary is None else boundary.width
        self._shards = model.mesh.tp.size if model.sequence_parallel else 1
        self._without_gradients = torch.inference_mode if can_use_inference_mode(model) else torch.no_grad
        self._recorded = self._recorded_depths = None
        if options.recorded_steps and can_record(model):
            self._recorded = RecordedSteps(self._run_last, page_size=page_size if self._pages else 0)
        if options.recorded_steps and can_record(model) and options.speculative_tokens:
            self._recorded_depths = RecordedDepths(
                self._run_depth,
                most_rows=options.max_sequences * (1 + options.speculative_tokens),
                width=model.spec.config.hidden_size,
                dtype=model.dtype,
                page_size=page_size,
            )
        self.graphs = None
        if options.cuda_graphs and can_capture(model):
            self.graphs = DecodeGraphs(
                self._run_last,
                self.device,
                model.dtype,
                most=options.max_sequences * (1 + options.speculative_tokens),
                shares_pages=options.speculative_tokens > 0,
                multiple=self._shards,
                page_size=page_size,
                max_length=max_length,
            )

    @property
    def is_last(self) -> bool:
        """Whether this rank's stage has the logits."""
        return self._model.mesh.pp.rank == self._model.mesh.pp.size - 1

    def run(self, packed: PackedStep) -> tuple[Tensor, Tensor] | None:
        """Returns logits [R, V] of the wanted rows and the final hidden states [T, D]; None before the last stage."""
        self._without_dropout()
        if self.runs_as_graph(packed):
            ids, positions, _ = packed.rows_3T[:, : packed.num_decodes]
            return self.run_graph(ids, positions, packed.sequences)
        with self._without_gradients():
            return self._run_recorded(packed) or self._run_eager(packed)

    def _without_dropout(self) -> None:
        for stage in self._stages:
            if stage.training:
                stage.eval()

    def _run_recorded(self, packed: PackedStep) -> StepOutputs | None:
        """Repeats a recorded decode step; None if there is none for this one."""
        if self._recorded is None or packed.chunks or packed.logit_rows != list(range(packed.num_decodes)):
            return None
        return self._recorded.run(packed.rows_3T, packed.lengths, packed.sequences)

    def _run_eager(self, packed: PackedStep) -> tuple[Tensor, Tensor] | None:
        pp = self._model.mesh.pp
        tokens, positions, batch, rows = self._to_device(packed)
        x = self._receive(packed.rows_3T.shape[1]) if pp.rank > 0 else None
        [stage] = self._stages
        out = stage.generation_step(tokens, positions, x, self._generation_step(batch), rows)
        if isinstance(out, tuple):
            return out
        sent, _ = collectives.start_send_recv(pp, sends=[(out, pp.rank + 1)], receives=[])
        sent[0].wait()
        return None

    def run_depth(self, depth: int, packed: PackedStep, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Runs a depth of multi-token prediction on rows with hidden states of the depth before; returns what `run` does.

        The token of a row is that of `depth` positions ahead. The hidden states are whole on every rank, padding included.
        """
        with self._without_gradients():
            if self._recorded_depths is not None and packed.num_decodes == packed.rows_3T.shape[1]:
                rows, lengths, sequences = packed.rows_3T, packed.lengths, packed.sequences
                found = self._recorded_depths.run(depth, rows, lengths, sequences, hidden_TD)
                if found is not None:
                    return found[0][packed.logit_rows], found[1]
            return self._run_depth(depth, self._to_device(packed), hidden_TD)

    def _run_depth(self, depth: int, inputs: StepInputs, hidden_TD: Tensor) -> StepOutputs:
        tokens, positions, batch, rows = inputs
        [stage] = self._stages
        assert isinstance(stage, Decoder), "another model has no depths"
        part_TD = hidden_TD.chunk(self._shards)[self._model.mesh.tp.rank if self._shards > 1 else 0]
        return stage.draft_step(tokens, positions, part_TD, GenerationStep(batch, self._pages), rows, depth=depth)

    def forget_recordings(self) -> None:
        """Forgets recorded steps, which read copies of weights."""
        for recorded in (self._recorded, self._recorded_depths):
            if recorded is not None:
                recorded.forget()

    def release(self) -> None:
        """Frees pages, states and graphs; no step can be run after it."""
        self._pages.clear()
        self._states.clear()
        self._recorded = self._recorded_depths = None
        if self.graphs is not None:
            self.graphs.release()

    def runs_as_graph(self, packed: PackedStep) -> bool:
        """Whether a step is a CUDA graph: decode rows alone, and the logits of each wanted."""
        count = packed.num_decodes
        return self.graphs is not None and not packed.chunks and packed.logit_rows == list(range(count))

    @torch.no_grad()
    def capture_graphs(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Captures the decode steps of all batch sizes, where they are graphs; see `DecodeGraphs.capture_all`."""
        if self.graphs is not None:
            self._without_dropout()
            self.graphs.capture_all(progress)

    @torch.no_grad()
    def run_graph(
        self, ids: IntRow, positions: np.ndarray, sequences: CacheLocations, sources: IntRow | None = None
    ) -> StepOutputs:
        """Starts such a step; see `DecodeGraphs.run`."""
        assert self.graphs is not None
        return self.graphs.run(ids, positions, sequences, sources)

    def _run_last(self, inputs: StepInputs) -> StepOutputs:
        """A step of the only stage."""
        tokens, positions, batch, rows = inputs
        [stage] = self._stages
        out = stage.generation_step(tokens, positions, None, self._generation_step(batch), rows)
        assert isinstance(out, tuple), "the only stage is the last"
        return out

    def _generation_step(self, batch: PagedBatch) -> GenerationStep:
        groups = sequence_groups(batch) if self._states else ()
        return GenerationStep(batch, self._pages, self._states, groups)

    def _receive(self, rows: int) -> Tensor:
        pp = self._model.mesh.pp
        assert self._width is not None, f"the stage input has {HIDDEN}"
        x = torch.empty((rows // self._shards, self._width), dtype=self._model.dtype, device=self.device)
        _, received = collectives.start_send_recv(pp, sends=[], receives=[(x, pp.rank - 1)])
        received[0].wait()
        return x

    def _to_device(self, packed: PackedStep) -> StepInputs:
        page_lists, state_slots = packed.sequences
        columns = max((len(pages) for pages in page_lists), default=1)
        table = np.full((len(page_lists), columns), SCRATCH_PAGE, dtype=np.int32)
        for row, pages in zip(table, page_lists):
            row[: len(pages)] = pages
        rows = torch.from_numpy(packed.rows_3T).to(self.device)
        batch = PagedBatch(
            rows[2],
            torch.from_numpy(table).to(self.device),
            torch.tensor(packed.lengths, dtype=torch.int32, device=self.device),
            max(packed.lengths[: packed.num_decodes], default=0),
            packed.num_decodes,
            packed.chunks,
            fresh_documents(packed.chunks, self.device),
            packed.first_page,
            packed.shares_pages,
            torch.tensor(state_slots, dtype=torch.int64, device=self.device) if self._states else None,
        )
        wanted = torch.tensor(packed.logit_rows, dtype=torch.int64, device=self.device)
        return rows[0], rows[1], batch, wanted


def can_capture(model: ParallelModel) -> bool:
    """Whether a decode step is one CUDA graph: on one stage, and with nothing that the host has to know, like the rows of an expert."""
    branches = (branch for layer in set(model.spec.layers) for branch in layer.branches)
    capturable = all(branch.decode_is_capturable for branch in branches)
    grouped = model.spec.moe is None or (model.dtype == torch.bfloat16 and not shares_experts(model))
    return model.mesh.device.type == "cuda" and model.mesh.pp.size == 1 and grouped and capturable


def shares_experts(model: ParallelModel) -> bool:
    """Whether ranks exchange tokens of different sequences, for the experts that each of them has."""
    return model.spec.moe is not None and model.mesh["ep_etp"].size > 1


def can_record(model: ParallelModel) -> bool:
    """Whether a decode step is recorded: on a CPU, by one process, and without experts, whose shapes depend on the routing."""
    alone = model.mesh.world.size == 1
    return model.mesh.device.type == "cpu" and alone and model.spec.moe is None and can_use_inference_mode(model)


def can_use_inference_mode(model: ParallelModel) -> bool:
    """Whether nothing that a step computes is kept for training, which could not use it: neither gathered nor FP8 weights.

    Only on CPUs, where it saves a third of the time of calls that compute nothing, like views.
    """
    fully_sharded = model.fully_sharded
    return (
        model.mesh.device.type == "cpu"
        and not fully_sharded
        and not (model.fp8_gemms.linears or model.fp8_gemms.experts)
    )
