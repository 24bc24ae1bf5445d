"""The integers of a decode step that is a CUDA graph: what stays from step to step is what a fresh step would have."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.kv_cache_pages import SCRATCH_PAGE, SCRATCH_SLOT
from petatron.infer.step.decode_cuda_graphs import _HostInputs
from petatron.infer.step.packed_step import CacheLocations
from tests.unit.infer.test_sample import model_in

PAGE, PAGES, SIZE = 4, 6, 5


def step_inputs(host: _HostInputs, sequences: list[tuple[list[int], int]]) -> tuple[np.ndarray, np.ndarray]:
    """Fills a step of sequences, each its pages and position; returns the columns and the table of readable pages."""
    count = len(sequences)
    positions = np.array([position for _, position in sequences])
    rows = CacheLocations([pages for pages, _ in sequences], [pages[0] for pages, _ in sequences])
    host.fill(list(range(count)), list(range(count)), positions, rows, PAGE)
    columns, table = host.tensor.numpy()[:6].copy(), host.tensor.numpy()[6:].reshape(SIZE, PAGES).copy()
    for row, (pages, _) in enumerate(sequences):
        table[row, len(pages) :] = -1  # never read, so anything may be there
    table[count:, 1:] = -1
    return columns, table


@pytest.mark.parametrize("seed", range(4))
def test_a_table_that_stays_is_the_table_of_a_fresh_step(seed: int):
    """Sequences grow, end, and come back with other pages, in any row."""
    generator = random.Random(seed)
    kept = _HostInputs(SIZE, PAGES, pinned=False)
    sequences: list[tuple[list[int], int]] = []
    for _ in range(60):
        sequences = [
            (pages, position + 1) for pages, position in sequences if generator.random() > 0.15 and position + 1 < 24
        ]
        while len(sequences) < generator.randint(1, SIZE):
            sequences.insert(
                generator.randint(0, len(sequences)), ([generator.randint(1, 99)], generator.randint(0, 3))
            )
        for pages, position in sequences:
            if position // PAGE >= len(pages):
                pages.append(generator.randint(1, 99))
        columns, table = step_inputs(kept, sequences)
        fresh_columns, fresh_table = step_inputs(_HostInputs(SIZE, PAGES, pinned=False), sequences)
        np.testing.assert_array_equal(columns, fresh_columns)
        np.testing.assert_array_equal(table, fresh_table)


def test_columns_and_padding():
    host = _HostInputs(SIZE, PAGES, pinned=False)
    step_inputs(host, [([7, 9], 5)] * 4)  # rows that the next step does not have
    columns, table = step_inputs(host, [([3], 2), ([7, 9], 5)])
    ids, sources, positions, slots, lengths, state_slots = columns.tolist()
    assert (ids[:2], sources[:2], positions[:2]) == ([0, 1], [0, 1], [2, 5])
    assert slots[:2] == [3 * PAGE + 2, 9 * PAGE + 1]
    assert lengths == [3, 6, 1, 1, 1] and state_slots == [3, 7, *[SCRATCH_SLOT] * 3]
    assert sources[2:] == [-1, -1, -1] and slots[2:] == [SCRATCH_PAGE * PAGE] * 3
    assert table[2:, 0].tolist() == [SCRATCH_PAGE] * 3, "a row without a sequence stores into the scratch page"


def test_graphs_captured_beforehand_are_without_dropout_and_gradients(monkeypatch: pytest.MonkeyPatch):
    model = model_in("--hidden-dropout 0.5")
    engine = Engine(model, options=EngineOptions(page_size=4))
    [stage] = model.stages.values()
    stage.train()
    seen: list[tuple[bool, bool]] = []

    class Graphs:
        sizes = (1,)

        def capture_all(self) -> Iterator[int]:
            seen.append((stage.training, torch.is_grad_enabled()))
            yield 1

    engine.capture_graphs()
    assert seen == [], "a CPU has none"
    monkeypatch.setattr(engine._steps, "graphs", Graphs())  # pyright: ignore[reportPrivateUsage]
    engine.capture_graphs()
    assert seen == [(False, False)]
