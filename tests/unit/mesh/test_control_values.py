"""Values that ranks tell each other are JSON, never pickles, whatever their lengths."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from petatron.mesh import collectives, json_collectives
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from tests.dist import RankPool


def _value(rank: int) -> Any:
    """Of different length and kind on every rank; one of them is None."""
    return [None, {"text": "é" * 100, "list": [1, [2.5, True]]}, "short", list(range(1000))][rank]


def _exchanged() -> tuple[Any, Any, Any]:
    axis = ParallelMesh(Layout(dp_shard=dist.get_world_size()), dist.get_rank()).control
    value = _value(axis.rank)
    refuse = mock.Mock(side_effect=AssertionError("a pickle"))
    with (
        mock.patch("pickle.Pickler", refuse),
        mock.patch.object(dist, "all_gather_object", refuse),
        mock.patch.object(dist, "gather_object", refuse),
        mock.patch.object(dist, "broadcast_object_list", refuse),
    ):
        return (
            json_collectives.all_gather_json(value, axis),
            json_collectives.gather_json_to_first(value, axis),
            json_collectives.broadcast_json({"said by": axis.rank}, axis),
        )


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_ranks_value_arrives(ranks: RankPool, world_size: int):
    everything = [_value(rank) for rank in range(world_size)]
    for rank, (gathered, first, told) in enumerate(ranks.run(_exchanged, world_size)):
        assert gathered == everything
        assert first == (everything if rank == 0 else None)
        assert told == {"said by": 0}


def _unspeakable() -> str:
    axis = ParallelMesh(Layout(dp_shard=dist.get_world_size()), dist.get_rank()).control
    with pytest.raises(TypeError) as error:
        json_collectives.all_gather_json({1, 2}, axis)
    return str(error.value)


def test_what_json_cannot_say_is_refused(ranks: RankPool):
    assert all("not JSON serializable" in text for text in ranks.run(_unspeakable, 2))


def _largest() -> tuple[list[int], list[int]]:
    axis = ParallelMesh(Layout(dp_shard=dist.get_world_size()), dist.get_rank()).control
    mine = torch.tensor([axis.rank, -axis.rank, 7])
    return collectives.recursive_doubling_max(mine, axis).tolist(), mine.tolist()


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_the_largest_of_any_number_of_ranks(ranks: RankPool, world_size: int):
    for rank, (found, mine) in enumerate(ranks.run(_largest, world_size)):
        assert found == [world_size - 1, 0, 7]
        assert mine == [rank, -rank, 7], "what a rank asks with stays its own"
