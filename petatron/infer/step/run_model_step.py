"""Runs one step of generation on this rank: packs the tokens, runs this rank's stages, and returns logits on the last.

A step is the same sequence of calls on every rank, whichever sequences are in it: a replica without work computes a padding token, since
its ranks may have experts that others need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from petatron.infer.engine_options import EngineOptions
from petatron.infer.kv_cache_pages import SCRATCH_PAGE, CacheSize
from petatron.infer.sequence import Sequence as RunningSequence
from petatron.infer.step.cuda_graph_capture import GraphCapture, GraphSizes
from petatron.infer.step.decode_cuda_graphs import DecodeGraphs, IntRow
from petatron.infer.step.kv_cache_and_states import allocate_cache
from petatron.infer.step.packed_step import CacheLocations, PackedStep, StepInputs, StepOutputs
from petatron.infer.step.prompt_cuda_graphs import PromptGraphs
from petatron.infer.step.recorded_cpu_decode import RecordedDepths, RecordedSteps
from petatron.infer.step.step_images import StepImages
from petatron.kernels.attention.document_layout import Documents
from petatron.kernels.attention.paged_attention import PagedBatch, fresh_documents
from petatron.kernels.registry import KernelContext, choose_kernel
from petatron.layers.spec.generation_state import GenerationStep, RowVectors
from petatron.layers.spec.generation_step_groups import sequence_groups
from petatron.mesh import collectives
from petatron.models.decoder import HIDDEN, Decoder
from petatron.models.encoder_decoder_model import EncoderDecoder
from petatron.models.image_text_batch import IMAGE_INDEX, make_image_text_batch
from petatron.models.vision_language_model import VisionLanguageModel
from petatron.parallel.parallel_model import ParallelModel

_MAX_SOURCES = 16
"""Prompts that an encoder reads at once."""


class ModelSteps:
    """This rank's stages with the pages and recurrent states of their layers."""

    def __init__(self, model: ParallelModel, options: EngineOptions, cache: CacheSize, *, max_length: int) -> None:
        self._model = model
        page_size = options.page_size
        self._stages = [model.stages[number] for number in sorted(model.stages)]
        self.device = model.mesh.device
        self._cache = allocate_cache(model, options, cache)
        self._pages, self._states = self._cache.pages, self._cache.states
        taken = model.io.boundaries[1] if len(model.io.boundaries) > 1 else ()
        boundary = next((tensor for tensor in taken if tensor.name == HIDDEN), None)
        self._width = None if boundary is None else boundary.width
        self._shards = model.mesh.tp.size if model.sequence_parallel else 1
        self._without_gradients = torch.inference_mode if can_use_inference_mode(model) else torch.no_grad
        self._recorded = self._recorded_depths = None
        if options.recorded_steps and can_record(model):
            self._recorded = RecordedSteps(self._run_last, page_size=page_size if self._pages else 0)
            if options.speculative_tokens:
                most_rows = options.max_sequences * (1 + options.speculative_tokens)
                hidden = torch.zeros((most_rows, model.spec.config.hidden_size), dtype=model.dtype)
                self._recorded_depths = RecordedDepths(self._run_depth, hidden, page_size=page_size)
        self.graphs = self._prompt_graphs = None
        if options.cuda_graphs and can_capture(model):
            capture = GraphCapture(self.device, read_memory=model.fp8_gemms.weight_memory)
            sizes = GraphSizes(max_length, self._shards)
            self.graphs = DecodeGraphs(self._run_last, capture, model.dtype, options, sizes)
            if can_capture_prompts(model) and not options.speculative_tokens and not options.exact:
                self._prompt_graphs = PromptGraphs(self._run_last, capture, options, sizes)

    def run(self, packed: PackedStep, images: StepImages | None = None) -> tuple[Tensor, Tensor] | None:
        """Returns logits [R, V] of the wanted rows and the final hidden states [T, D]; None before the last stage."""
        self._without_dropout()
        if images is not None:
            with self._without_gradients():
                tokens, positions, batch, rows = self._to_device(packed)
                coordinates = images.coordinates_3T
                positions = positions if coordinates is None else coordinates.unsqueeze(0)
                [stage] = self._stages
                return stage.generation_step(
                    tokens, positions, None, self._generation_step(batch, images.vectors), rows
                )
        if self.runs_as_graph(packed):
            ids, positions, _ = packed.rows_3T[:, : packed.num_decodes]
            return self.run_graph(ids, positions, packed.sequences)
        with self._without_gradients():
            started = None if self._prompt_graphs is None else self._prompt_graphs.run(packed)
            return started or self._run_recorded(packed) or self._run_eager(packed)

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
                outputs = self._recorded_depths.run(depth, rows, lengths, sequences, hidden_TD)
                if outputs is not None:
                    return outputs[0][packed.logit_rows], outputs[1]
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
        self._recorded = self._recorded_depths = None
        for graphs in (self.graphs, self._prompt_graphs):
            if graphs is not None:
                graphs.release()
        self._cache.release()

    def release_cache(self) -> None:
        """Gives the memory of pages and states back until `take_cache`, if it is releasable; captured steps stay."""
        if self._cache.memory is not None:
            self._cache.memory.release()

    def take_cache(self) -> None:
        if self._cache.memory is not None:
            self._cache.memory.take()

    def encode_sources(self, sequences: Sequence[RunningSequence]) -> None:
        """Encodes the prompts of sequences that begin, into their slots."""
        self._without_dropout()
        [stage] = self._stages
        assert isinstance(stage, EncoderDecoder), "another model continues its prompts"
        for first in range(0, len(sequences), _MAX_SOURCES):
            some = sequences[first : first + _MAX_SOURCES]
            lengths = np.array([len(sequence.source) for sequence in some])
            longest = -(-int(lengths.max()) // self._shards) * self._shards
            tokens = np.zeros((len(some), longest), np.int64)
            for row, sequence in zip(tokens, some):
                row[: len(sequence.source)] = sequence.source
            slots = torch.tensor([sequence.slot for sequence in some], device=self.device)
            documents = Documents.of_lengths(lengths, longest).to(self.device)
            arrays = (torch.from_numpy(x).to(self.device) for x in (tokens, lengths))
            with self._without_gradients():
                stage.encode_sources(*arrays, slots, self._states, documents)

    def encode_images(self, sequences: Sequence[RunningSequence]) -> None:
        """Computes the vectors of the images of prompts whose computation begins or goes on; others forget theirs."""
        config = self._model.spec.config
        for sequence in sequences:
            images = sequence.images
            if images is None or sequence.computed >= sequence.num_prompt:
                sequence.image_vectors = None
                continue
            if sequence.image_vectors is not None:
                continue
            self._without_dropout()
            [stage] = self._stages
            assert isinstance(stage, VisionLanguageModel), "another model reads no images"
            tokens = np.array([*sequence.completion.prompt_ids, 0])
            sample = {"tokens": tokens, "loss_mask": tokens, "patches": images.patches, "grids": images.grids}
            batch = make_image_text_batch([sample], config)
            sequence.image_index = batch[IMAGE_INDEX][0].numpy()
            with self._without_gradients():
                sequence.image_vectors = stage.image_vectors(batch.to(self.device))

    def runs_as_graph(self, packed: PackedStep) -> bool:
        """Whether a step is a CUDA graph: decode rows alone, and the logits of each wanted."""
        return self.graphs is not None and not packed.chunks and packed.logit_rows == list(range(packed.num_decodes))

    @torch.no_grad()
    def capture_graphs(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Captures the steps of all sizes, where they are graphs; calls `progress` with how many of how many are captured."""
        if self.graphs is None:
            return
        self._without_dropout()
        prompts = self._prompt_graphs
        total = len(self.graphs.sizes) + (0 if prompts is None else len(prompts.shapes))
        captured = chain(self.graphs.capture_all(), () if prompts is None else prompts.capture_all())
        for number, _ in enumerate(captured, start=1):
            if progress is not None:
                progress(number, total)

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

    def _generation_step(self, batch: PagedBatch, vectors: RowVectors | None = None) -> GenerationStep:
        groups = sequence_groups(batch) if self._states else ()
        return GenerationStep(batch, self._pages, self._states, groups, vectors)

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
        return rows[0], rows[1], batch, torch.tensor(packed.logit_rows, dtype=torch.int64, device=self.device)


def can_capture(model: ParallelModel) -> bool:
    """Whether a decode step is one CUDA graph: on one stage, and with nothing that the host has to know, like the rows of an expert.

    Weights that are gathered for each layer are in other memory every time, and their hooks run on the host.
    """
    branches = (branch for layer in set(model.spec.generation_layers) for branch in layer.branches)
    capturable = all(branch.decode_is_capturable for branch in branches)
    grouped = model.spec.moe is None or (model.dtype == torch.bfloat16 and not shares_experts(model))
    stays = model.mesh.device.type == "cuda" and model.mesh.pp.size == 1 and not model.fully_sharded
    return stays and grouped and capturable


def can_capture_prompts(model: ParallelModel) -> bool:
    """Whether a step with prompts is a CUDA graph, where a decode step is one: attention must read the bounds of chunks on the device."""
    branches = (branch for layer in set(model.spec.generation_layers) for branch in layer.branches)
    kernels = choose_kernel("paged attention", KernelContext.of(model.mesh.device, model.dtype, allow_compile=False))
    return kernels.name == "triton" and all(branch.prompt_is_capturable for branch in branches)


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
    uses_fp8 = bool(model.fp8_gemms.linears or model.fp8_gemms.experts)
    return model.mesh.device.type == "cpu" and not model.fully_sharded and not uses_fp8
