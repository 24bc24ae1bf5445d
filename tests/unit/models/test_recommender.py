"""What a recommender says of items: scores, the ranks of targets, HR@k and NDCG@k, in every layout."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import petatron
from petatron.config import RunConfig
from petatron.config.schema.memory import MemoryConfig
from petatron.data.recommendation.history_file import ItemHistories, write_histories
from petatron.estimate.state_bytes import state_bytes
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.batch import Batch
from petatron.models.next_item import hits_and_gains
from petatron.models.recommender import mark_last_items
from petatron.train.build_run import build_loaders, build_model
from petatron.validate import load_config
from tests.dist import RankPool
from tests.unit.models.kept import kept_bytes
from tests.unit.models.test_activations import build, recompute

FLAGS = (
    "--model-type recommender --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 23 --train-iters 3 "
    "--lr 1e-2 --global-batch-size 8 --micro-batch-size 4 --num-workers 0 --device cpu --fp64 --init-method-std 0.5 --eval-iters 1 "
    "--objective-settings k=4 --no-untie-embeddings-and-output-weights"
)
KINDS = ("", "--recommender-layers hstu", "--item-loss sampled_softmax --num-item-negatives 5")


def run_of(flags: str, path: Path, *, world_size: int = 1) -> RunConfig:
    argv = f"{FLAGS} {flags} --valid-data-path {path} --train-data-path {path}"
    return load_config(argv.split(), world_size=world_size).config


def evaluate(run: RunConfig) -> tuple[list[str], Tensor]:
    """Returns the names of losses and metrics, and their means over the first validation batch."""
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank() if dist.is_initialized() else 0)
    model = build_model(run, mesh)
    loader = build_loaders(run, mesh).valid[None]
    sums, counts = model.evaluate_objective(loader.next_step(8, 0))
    return [spec.name for spec in (*model.objective.losses, *model.objective.metric_specs)], sums / counts


@pytest.fixture
def path(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(3, 14, (9,), generator=generator).tolist()
    items = [torch.randint(0, 23, (length,), generator=generator).numpy() for length in lengths]
    times = [torch.arange(length).mul(1000).numpy() for length in lengths]
    write_histories(tmp_path / "users", ItemHistories.of_users(items, times, num_items=23))
    return tmp_path / "users"


@pytest.mark.parametrize("flags", KINDS)
def test_metrics_are_those_of_all_scores(path: Path, flags: str):
    run = run_of(flags, path)
    mesh = ParallelMesh.single()
    model, loader = build_model(run, mesh), build_loaders(run, mesh).valid[None]
    hits, gains = [], []
    for batch in loader.next_step(8, 0):
        seen = Batch(arrays={name: batch[name] for name in ("tokens", "timestamps")})
        [outputs] = model.forward([seen], collect=["item_scores", "hidden_states"])
        scores, last = outputs["item_scores"], batch.loss_mask.argmax(dim=1)
        table = model.module.embedding.weight
        assert torch.allclose(scores, outputs["hidden_states"][range(4), last] @ table.t())
        for row, target in enumerate(batch.labels[range(4), last].tolist()):
            rank = sorted(range(23), key=lambda item: (-scores[row, item], item)).index(target)
            hits.append(rank < 4)
            gains.append((rank < 4) / math.log2(rank + 2))
    names, means = evaluate(run)
    assert names[1:] == ["HR@4", "NDCG@4"]
    assert means[1:].tolist() == pytest.approx([sum(hits) / 8, sum(gains) / 8])
    assert 0 < sum(hits) < 8


@pytest.mark.parametrize("layout", ["--dp 2", "--tp 2 --sequence-parallel", "--cp 2"])
def test_metrics_do_not_depend_on_the_layout(ranks: RankPool, path: Path, layout: str):
    flags = "--item-loss sampled_softmax --num-item-negatives 5"
    _, alone = evaluate(run_of(flags, path))
    for _, means in ranks.run(evaluate, 2, run_of(f"{flags} {layout}", path, world_size=2)):
        assert torch.allclose(means, alone, rtol=1e-9)


def test_equal_scores_are_in_the_order_of_ids():
    from petatron.layers.vocabulary.item_head import ItemHead

    head, weight = ItemHead(4, 1, tied=True), torch.tensor([[1.0], [2.0], [1.0], [1.0]])
    ranks = head.target_ranks(torch.ones(4, 1), weight, torch.arange(4))
    assert ranks.tolist() == [1, 0, 2, 3]
    assert hits_and_gains(ranks, 2)[0].tolist() == [1, 1, 0, 0]


def test_a_step_touches_the_rows_of_its_items_and_no_others(path: Path):
    run = run_of("--item-loss sampled_softmax --num-item-negatives 2 --global-batch-size 4", path)
    mesh = ParallelMesh.single()
    model, loader = build_model(run, mesh), build_loaders(run, mesh).train
    optimizer, before = petatron.build_optimizer(run, model), model.module.embedding.weight.detach().clone()
    [batch] = loader.next_step(4, 0)
    model.train_step([batch])
    optimizer.step()
    used = {*batch.tokens.flatten().tolist(), *batch["negatives"].flatten().tolist()}
    used |= set(batch.labels[batch.loss_mask > 0].tolist())
    changed = (model.module.embedding.weight != before).any(dim=1).nonzero().flatten().tolist()
    assert set(changed) == used - {-1} and len(changed) < 23


class Sink:
    """Takes the gradient of the table, as its group does."""

    defers = False

    def submit(self, weight, write, *, now=False, start_comm=None) -> None:
        write(torch.empty_like(weight), False)


@pytest.mark.parametrize("recomputed", [(), ("core_attn",), ("attention", "core_attn")])
@pytest.mark.parametrize("flags", ["", "--recommender-layers hstu", "--recommender-layers hstu --hstu-time-buckets 0"])
def test_bytes_saved_for_backward_are_those_that_are_forecast(flags: str, recomputed: tuple[str, ...]):
    argv = f"{FLAGS} {flags} --mock-data --hidden-dropout 0 --attention-dropout 0 --no-fp64 --global-batch-size 4 --seq-length 24"
    run, memory = load_config(argv.split()).config, MemoryConfig()
    if recomputed:
        memory = MemoryConfig(recompute_granularity="selective", recompute_modules=recomputed)
    model, streams = build(run)
    model.head.weight_grad_target = Sink()
    plan = recompute(run, model, memory, streams)
    [batch] = build_loaders(run, ParallelMesh.single()).train.next_step(4, 0)
    batch = mark_last_items(batch)
    weights = {"full softmax loss": batch.loss_mask.t()}
    saved, _ = kept_bytes(
        lambda: model(batch, loss_weights=weights).losses["full softmax loss"].sum(),
        without=[*model.parameters(), *batch.arrays.values()],
    )
    assert plan.saved_bytes == pytest.approx(saved, rel=0.02)


def test_memory_of_the_table_is_divided_by_the_ranks():
    def bytes_of(layout: str, world_size: int) -> tuple[int, ...]:
        argv = f"{FLAGS} --mock-data --vocab-size 100000 --no-fp64 --micro-batch-size 2 {layout}"
        state = state_bytes(load_config(argv.split(), world_size=world_size).config)
        return state.weights, state.gradients, state.moments

    alone, of_four = bytes_of("", 1), bytes_of("--dp 4", 4)
    table = 4 * 100_000 * 16
    assert alone[0] - of_four[0] == alone[1] - of_four[1] == table * 3 // 4
    assert alone[2] - of_four[2] == 2 * table * 3 // 4
    sampled = bytes_of("--item-loss sampled_softmax", 1)
    assert alone[1] - sampled[1] == table and sampled[0] == alone[0]
