"""A communication failure is told in our words: this rank's place, and of several ranks who waited and who did not come."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from petatron.base.errors import PeerFailure
from petatron.mesh import collectives
from petatron.mesh.comm_record import CommRecord
from petatron.mesh.diagnose import watchdog as watchdog_module
from petatron.mesh.diagnose.failure_report import (
    CommunicationError,
    combine_reports,
    describe_rank,
    report_request_path,
)
from petatron.mesh.diagnose.watchdog import Watchdog
from petatron.mesh.launch.rank_exit import is_echo
from petatron.mesh.mesh import Axis
from tests.load_deadline import Deadline, wait_until

GLOO = "[/x/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4"


def axis_of(rank: int = 1, timeout_s: float = 600.0) -> Axis:
    record = CommRecord(rank=rank)
    record.register_axis("dp_cp", (1, 3, 5), timeout_s=timeout_s)
    return Axis("dp_cp", 3, 0, (1, 3, 5), None, record)


def break_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def broken(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(dist, "broadcast", broken)


def test_a_broken_call_says_where_this_rank_was_and_keeps_the_backends_words(monkeypatch: pytest.MonkeyPatch):
    axis, x = axis_of(), torch.ones(4)
    axis.record.add(replace(axis, name="tp"), "all_gather", elements=8, dtype=torch.bfloat16)
    break_with(monkeypatch, RuntimeError(GLOO))
    with pytest.raises(CommunicationError) as caught:
        collectives.broadcast(x, axis)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(
        "Rank 1 waited 0.0 s in broadcast over dp_cp (ranks 1, 3, 5), called at mesh/test_failure.py:"
    )
    assert lines[0].endswith("operation 2. It broke with:") and lines[1].strip() == GLOO
    assert "all_gather over tp, 16 bytes" in lines[3]
    assert is_echo(caught.value), "another rank is to blame"
    assert not any(event.host_in_call for event in axis.record.events())


def test_waiting_for_what_was_started_breaks_the_same_way():
    class Work:
        def wait(self) -> None:
            raise RuntimeError(GLOO)

    axis = axis_of()
    with collectives.RecordedCall(axis, "all_reduce", elements=4, dtype=torch.float32) as call:
        handle = collectives.Handle(Work(), call)  # type: ignore[arg-type]
    with pytest.raises(CommunicationError, match="in all_reduce over dp_cp"):
        handle.wait()


def test_a_mistake_of_the_program_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch):
    break_with(monkeypatch, ValueError("wrong shape"))
    with pytest.raises(ValueError, match="wrong shape"):
        collectives.broadcast(torch.ones(4), axis_of())


def place(rank: int, *, state: str = "failed", started: int = 7, op: str = "all_reduce", **more: object) -> dict:
    ranks = [0, 1, 2, 3]
    counts = {"dp": [ranks, started]}
    where = {
        "op": op,
        "axis": "dp",
        "ranks": ranks,
        "caller": "parallel/data/gradient_reduction.py:88 send",
        "number": 1204,
        "for_s": 600.4,
    }
    return {"rank": rank, "state": state, "at": None, "before": [], "counts": counts, **where, **more}


def test_ranks_at_one_place_are_one_line_and_the_late_one_is_named():
    late = place(2, state="idle", started=6, number=1203, op="all_gather", at="train/train_step.py:9 load")
    assert combine_reports([place(0), place(1), late, place(3)]) == [
        "Rank 2 did not arrive at all_reduce over dp (ranks 0-3): 6 collectives started there, 7 by ranks 0-1, 3.",
        "Ranks 0-1, 3 were waiting in all_reduce over dp (ranks 0-3) at parallel/data/gradient_reduction.py:88 send, operation 1,204, "
        "for up to 600 s.",
        "Rank 2 was in no communication since all_gather over dp (ranks 0-3) at parallel/data/gradient_reduction.py:88 send, "
        "operation 1,203, and is at train/train_step.py:9 load.",
    ]


def test_a_rank_that_is_known_to_have_failed_is_not_told_again_and_equal_counts_blame_nobody():
    lines = combine_reports([place(0), place(1)], failed_rank=0)
    assert len(lines) == 1 and lines[0].startswith("Rank 1 was waiting in all_reduce")


def test_only_ranks_of_the_same_group_are_compared():
    other = place(4, started=2)
    other["counts"] = {"dp": [[4, 5], 2]}
    assert not any("did not arrive" in line for line in combine_reports([place(0), place(1), other]))


def test_many_places_are_cut():
    lines = combine_reports([place(rank, caller=f"a.py:{rank} f") for rank in range(12)])
    assert len(lines) == 9 and lines[-1] == "Other ranks were at 4 more places."


def test_a_rank_before_its_first_operation_has_a_sentence():
    with Watchdog(CommRecord(rank=3), timeout_s=1.0, error_path="unused") as watchdog:
        assert describe_rank(watchdog.report()).startswith(
            "Rank 3 has started no communication yet; its main thread is at "
        )


def test_transfers_do_not_count_as_collectives():
    axis = axis_of()
    for op in ("send", "receive", "barrier"):
        axis.record.add(axis, op, elements=0, dtype=torch.uint8)
    assert axis.record.collective_counts() == {"dp_cp": 1}


def until(path: Path, *, exists: bool = True) -> None:
    deadline = Deadline(10)
    while path.exists() != exists:  # here and not in a helper: reports say where the main thread is
        assert not deadline.is_over, f"{path.name} is {'not ' * exists}there"
        time.sleep(0.01)


def wait_for(condition) -> None:
    wait_until(condition, "the watchdog")


def details(path: Path) -> dict:
    return json.loads(path.read_text())["message"]["extraInfo"]


def test_a_hang_is_reported_before_the_limit_and_withdrawn_when_it_ends(tmp_path: Path):
    path, axis = tmp_path / "error.json", axis_of(timeout_s=0.5)
    with Watchdog(axis.record, timeout_s=0.5, error_path=str(path)):
        started = time.monotonic()
        with collectives.RecordedCall(axis, "all_reduce", elements=4, dtype=torch.float32):
            until(path)
        assert time.monotonic() - started > 0.3, "a wait that is still in order is no hang"
        found = details(path)
        assert found["echo"] is True and found["communication"]["state"] == "waiting"
        assert "in all_reduce over dp_cp (ranks 1, 3, 5)" in found["py_callstack"]
        axis.record.add(axis, "barrier", elements=0, dtype=torch.uint8)  # the rank goes on
        until(path, exists=False)


def test_a_rank_that_starts_nothing_any_more_says_where_its_main_thread_is(tmp_path: Path):
    path, axis = tmp_path / "error.json", axis_of(timeout_s=0.5)
    axis.record.add(axis, "barrier", elements=0, dtype=torch.uint8)
    with Watchdog(axis.record, timeout_s=0.5, error_path=str(path)):
        until(path)
        report = details(path)["communication"]
        assert report["state"] == "idle" and report["op"] == "barrier" and "test_failure.py" in report["at"]
    assert not path.exists(), "a rank that ends in order leaves no report"


def test_a_patient_axis_is_given_its_time(tmp_path: Path):
    path, axis = tmp_path / "error.json", axis_of(timeout_s=3600.0)
    with (
        Watchdog(axis.record, timeout_s=0.2, error_path=str(path)),
        collectives.RecordedCall(axis, "gather_objects"),
    ):
        time.sleep(0.5)
        assert not path.exists()


def test_a_launcher_gets_a_report_when_it_asks(tmp_path: Path):
    path, axis = tmp_path / "rank-1.json", axis_of()
    axis.record.add(axis, "barrier", elements=0, dtype=torch.uint8)
    with Watchdog(axis.record, timeout_s=2.0, error_path=str(path)):
        report_request_path(path).touch()
        until(path)
        assert details(path)["communication"]["rank"] == 1


def test_nobody_watches_a_rank_without_peers(tmp_path: Path):
    with Watchdog(CommRecord(), timeout_s=1.0, error_path=str(tmp_path / "error.json")) as watchdog:
        assert watchdog._thread is None


def test_a_device_that_does_not_finish_ends_the_process_with_a_report_before_it(tmp_path: Path):
    path, axis, codes = tmp_path / "error.json", axis_of(timeout_s=0.5), []
    axis.record.add(axis, "all_reduce", elements=0, dtype=torch.uint8)
    with Watchdog(
        axis.record, timeout_s=0.5, error_path=str(path), device_busy=lambda: True, exit_process=codes.append
    ):
        until(path)
        assert not codes, "there is a report before the end"
        assert details(path)["communication"]["state"] == "device"
        assert "waited 0." in details(path)["py_callstack"] and "for its device" in details(path)["py_callstack"]
        wait_for(lambda: codes)
    assert codes[0] == 1


def test_a_rank_that_compiles_for_long_is_left_alone(tmp_path: Path):
    path, axis, codes = tmp_path / "error.json", axis_of(timeout_s=0.2), []
    axis.record.add(axis, "all_reduce", elements=0, dtype=torch.uint8)
    with Watchdog(
        axis.record, timeout_s=0.2, error_path=str(path), device_busy=lambda: False, exit_process=codes.append
    ):
        time.sleep(0.6)
        assert not path.exists() and not codes


def test_without_a_launcher_the_report_is_logged(caplog: pytest.LogCaptureFixture):
    axis, codes = axis_of(timeout_s=0.3), []
    axis.record.add(axis, "all_reduce", elements=0, dtype=torch.uint8)
    with Watchdog(axis.record, timeout_s=0.3, device_busy=lambda: True, exit_process=codes.append):
        wait_for(lambda: codes)
    assert "Rank 1 waited 0." in caplog.text


class Elsewhere:
    """A store in which another rank has left word, or which is gone."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def raise_if_peer_failed(self) -> None:
        raise self.error


def test_a_failure_on_another_machine_ends_this_rank(tmp_path: Path):
    path, axis, codes = tmp_path / "error.json", axis_of(), []
    failed = PeerFailure("Rank 9 of 16 failed:\nno space left")
    with Watchdog(
        axis.record,
        timeout_s=1.0,
        error_path=str(path),
        connect_peers=lambda: Elsewhere(failed),
        exit_process=codes.append,
    ):
        wait_for(lambda: codes)
    with Watchdog(axis.record, timeout_s=1.0, connect_peers=lambda: Elsewhere(failed), exit_process=codes.append):
        wait_for(lambda: len(codes) > 1)
    assert set(codes) == {1}


def test_a_store_that_is_gone_ends_only_who_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(watchdog_module, "_SHORT_S", 0.2)
    path, axis, codes = tmp_path / "error.json", axis_of(), []
    gone = Elsewhere(RuntimeError("Connection was likely closed"))
    with Watchdog(
        axis.record, timeout_s=1.0, error_path=str(path), connect_peers=lambda: gone, exit_process=codes.append
    ):
        time.sleep(0.4)
        assert not codes, "it writes its last files, perhaps"
        with collectives.RecordedCall(axis, "all_reduce", elements=4, dtype=torch.float32):
            wait_for(lambda: codes)
            assert "The store of rank 0 is gone" in details(path)["py_callstack"]


def test_who_is_behind_is_named_though_the_others_wait_for_their_devices():
    late = place(2, state="idle", started=5, at="train/train_step.py:9 load")
    waiting = [place(0, state="device"), place(1, state="device", started=6), place(3, state="device")]
    lines = combine_reports([*waiting, late])
    assert lines[0] == (
        "Rank 2 did not arrive at a collective over dp (ranks 0-3): 5 collectives started there, 7 by ranks 0, 3."
    )
    assert lines[1].startswith(
        "Ranks 0-1, 3 were waiting for the device, for up to 600 s, with nothing started since all_reduce"
    )
