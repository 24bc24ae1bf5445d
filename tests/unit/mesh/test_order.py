"""The check of the global order of communication: what it finds, and what is no finding."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from petatron.mesh import collectives, json_collectives
from petatron.mesh.comm_record import CommEvent, Communicator
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from tests.dist import RankPool
from tests.nccl_rules.order_check import order_problems

Step = tuple[str, str, tuple[int, ...]]
"""operation, axis, ranks"""


def _events(*steps: Step, elements: int = 8) -> list[CommEvent]:
    """A rank's record of collectives, each asked for by a line of its own."""
    return [
        CommEvent(
            number,
            axis,
            op,
            elements,
            4 * elements,
            torch.float32,
            f"x.py:{number} step",
            0.0,
            Communicator(axis, ranks),
        )
        for number, (op, axis, ranks) in enumerate(steps, start=1)
    ]


def _messages(rank: int, *batches: tuple[tuple[str, int], ...], axis: str = "pp") -> list[CommEvent]:
    """A rank's record of sends and receives in batches; its ranks are 0, 1, 2."""
    events: list[CommEvent] = []
    for batch, operations in enumerate(batches):
        for op, peer in operations:
            where, number = Communicator("", (0, 1, 2)), len(events) + 1
            caller = f"rank{rank}.py:{number} step"
            events.append(CommEvent(number, axis, op, 8, 32, torch.float32, caller, 0.0, where, peer, batch))
    return events


TP, DP = ("all_reduce", "tp", (0, 1)), ("reduce_scatter", "dp_cp", (0, 1))


def test_the_same_order_is_no_finding():
    assert order_problems([_events(TP, DP, TP), _events(TP, DP, TP)]) == []


def test_opposite_orders_on_two_communicators():
    (found,) = order_problems([_events(TP, TP, DP), _events(TP, DP, TP)])
    assert found == (
        'ranks 0 and 1: "all_reduce of 8 float32 over tp at x.py:2" before '
        '"reduce_scatter of 8 float32 over dp_cp at x.py:2" on rank 0, after it on rank 1'
    )


def test_a_skipped_operation_and_another_size():
    (found,) = order_problems([_events(TP, TP), _events(TP)])
    assert found == (
        'ranks 0 and 1: operation 2 of a communicator is on rank 0 "all_reduce of 8 float32 over tp at x.py:2" '
        "and on rank 1 missing"
    )
    (found,) = order_problems([_events(TP), _events(TP, elements=9)])
    assert 'on rank 0 "all_reduce of 8 float32' in found and 'on rank 1 "all_reduce of 9 float32' in found
    assert order_problems([_events(TP), [replace(_events(TP)[0], dtype=torch.bfloat16)]])
    assert order_problems([_events(TP), _events(("all_gather", "tp", (0, 1)))])


def test_an_exchange_may_differ_in_size():
    exchange = ("all_to_all", "ep_etp", (0, 1))
    assert order_problems([_events(exchange), _events(exchange, elements=3)]) == []


def test_stages_that_reduce_at_different_places_are_no_finding():
    """Two stages (ranks 0, 1 and 2, 3): one reduces before the transfer, the other after; they share no second communicator."""
    reduce, other = ("all_reduce", "dp_cp", (0, 1)), ("all_reduce", "dp_cp", (2, 3))
    pipelines = [("broadcast", "pp", (0, 2)), ("broadcast", "pp", (1, 3))]
    first = [_events(reduce, pipeline) for pipeline in pipelines]
    second = [_events(pipeline, other) for pipeline in pipelines]
    assert order_problems([*first, *second]) == []
    # Replicas of one stage are another matter: the transfer of each pipeline leads on to the other's reduction.
    crossed = [_events(reduce, pipelines[0]), _events(pipelines[1], reduce), second[0], _events(other, pipelines[1])]
    (found,) = order_problems(crossed)
    assert found.startswith("ranks 0, 1, 3, 2 wait in a circle, each for the next")


def test_a_circle_of_three_ranks_of_which_no_two_share_two_communicators():
    x, y, z = ("all_reduce", "x", (0, 1)), ("all_reduce", "y", (1, 2)), ("all_reduce", "z", (0, 2))
    assert order_problems([_events(x, z), _events(x, y), _events(y, z)]) == []
    (found,) = order_problems([_events(x, z), _events(y, x), _events(z, y)])
    assert found == (
        'ranks 0, 1, 2 wait in a circle, each for the next: rank 0 is at "all_reduce of 8 float32 over x at x.py:1"; '
        'rank 1 is at "all_reduce of 8 float32 over y at x.py:1"; rank 2 is at "all_reduce of 8 float32 over z at x.py:1"'
    )


def test_sends_and_receives():
    ring = [_messages(rank, (("send", (rank + 1) % 3), ("receive", (rank - 1) % 3))) for rank in range(3)]
    assert order_problems(ring) == []
    unbatched = [_messages(rank, (("send", (rank + 1) % 3),), (("receive", (rank - 1) % 3),)) for rank in range(3)]
    assert "wait in a circle" in order_problems(unbatched)[0]
    (found,) = order_problems([_messages(0, (("send", 1),), (("send", 1),)), _messages(1, (("receive", 0),)), []])
    assert found == (
        'ranks 0 and 1: message 2 of a communicator is on rank 0 "send of 8 float32 over pp at rank0.py:2" '
        "and on rank 1 missing"
    )
    crossed = [_messages(0, (("send", 1),), (("receive", 1),)), _messages(1, (("send", 0),), (("receive", 0),)), []]
    assert '"send of 8 float32 over pp at rank0.py:1" before "send of' in order_problems(crossed)[0]


def _opposite_orders() -> list[CommEvent]:
    """gloo gets through this: each group has threads of its own."""
    mesh = ParallelMesh(Layout(tp=2), dist.get_rank())
    axes = [mesh.world, mesh.control]
    handles = [collectives.start_all_reduce(torch.ones(4), axis) for axis in axes[:: 1 - 2 * mesh.rank]]
    for handle in handles:
        handle.wait()
    return mesh.record.events()


def test_a_planted_inversion_that_gloo_survives(ranks: RankPool):
    (found,) = order_problems(ranks.run(_opposite_orders, 2))
    assert "test_order.py" in found and '" on rank 0, after it on rank 1' in found
    assert found.index("over world") < found.index("over control")


def _beside_a_thread() -> list[CommEvent]:
    """A thread talks before training does on one rank, and after it on the other."""
    mesh = ParallelMesh(Layout(tp=2), dist.get_rank())
    own = mesh.background_control_axis()
    thread = threading.Thread(target=lambda: json_collectives.all_gather_json(mesh.rank, own))
    if mesh.rank == 0:
        thread.start()
        while mesh.record.count == 0:
            time.sleep(0.001)
    collectives.all_reduce(torch.ones(4), mesh.tp)
    if mesh.rank == 1:
        thread.start()
    thread.join()
    return mesh.record.events()


def test_a_thread_is_in_no_order_with_training(ranks: RankPool):
    records = ranks.run(_beside_a_thread, 2)
    assert [[event.axis for event in events] for events in records] == [
        ["background_control", "tp"],
        ["tp", "background_control"],
    ]
    assert order_problems(records) == []
    (found,) = order_problems([records[0], records[1][:1]])  # but all of its members must take part
    assert "gather_objects" in found and "on rank 1 missing" in found


def _communicators() -> dict[str, Communicator]:
    mesh = ParallelMesh(Layout(dp_shard=2), dist.get_rank())
    collectives.barrier(mesh.control)  # nobody leaves before all have connected
    return {name: mesh[name].communicator for name in ("dp", "world", "dp_cp", "shard")}


def test_axes_share_a_communicator_as_they_do_over_nccl(ranks: RankPool):
    found = ranks.run(_communicators, 2)
    assert found[0] == found[1]
    assert found[0]["dp"] == found[0]["world"]
    assert len({found[0][name] for name in ("world", "dp_cp", "shard")}) == 3
