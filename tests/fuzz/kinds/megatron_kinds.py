"""What Megatron-LM saves of latent attention with multi-token prediction (rank folders), and of a hybrid (the distributed form)."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.fuzz.kind import Kind
from tests.fuzz.kinds.files import files_of
from tests.fuzz.kinds.megatron import kind_of
from tests.unit.checkpoint.megatron import test_megatron_kinds as kinds


def make(name: str) -> Kind:
    with tempfile.TemporaryDirectory() as folder:
        step = Path(folder) / "iter_0000030"
        if name.endswith("latent"):
            args = kinds.latent_arguments(2)
            kinds.write_ranks(step, args, [kinds.latent_rank(rank, 2, fused=True, cut_downs=True) for rank in range(2)])
        else:
            args = kinds.hybrid_arguments(1)
            kinds.dist_hybrid(step)
        (Path(folder) / "latest_checkpointed_iteration.txt").write_text("30")
        files = files_of(Path(folder))
    return kind_of(name, files, args, writes="petatron")
