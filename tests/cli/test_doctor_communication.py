"""`petatron doctor --gloo`: the check that --nccl makes on GPUs, on CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from petatron.base.errors import ConfigError
from petatron.cli.doctor import main
from petatron.cli.subcommands.doctor_nccl import render
from petatron.mesh.diagnose.bandwidth import BandwidthResult
from petatron.mesh.mesh import ParallelMesh
from petatron.verify import communication_self_test
from petatron.verify.communication_self_test import CommunicationReport
from tests.dist import RankPool


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_get_a_verdict_and_a_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert main(["--gloo", "--ranks", "2", "--json", str(tmp_path / "found.json")]) == 0
    assert "VERDICT: communication over gloo works" in capfd.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert {one["op"] for one in found["measured"]} >= {"all_reduce", "all_gather", "all_to_all", "send", "shift"}
    assert len(found["losses"]) == 2 and all(one["correct"] for one in found["measured"])


def _check_small(message_bytes: tuple[int, ...]) -> CommunicationReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communication_self_test, "_SHARED_DEVICE_MESSAGE_BYTES", message_bytes)
        return communication_self_test.check_communication(
            lambda layout: ParallelMesh(layout, dist.get_rank()), ranks=2, shared_device=False, log=lambda text: None
        )


def test_two_ranks_find_that_small_messages_arrive(ranks: RankPool):
    """The short form: what every rank of the command does."""
    report, other = ranks.run(_check_small, 2, (1 << 8, 1 << 12))
    assert {one.op for one in report.measured} >= {"all_reduce", "all_gather", "all_to_all", "send", "shift"}
    assert {one.bytes for one in report.measured} == {1 << 8, 1 << 12} and len(report.losses) == 2
    assert not report.problems and not other.problems
    assert "VERDICT: communication over gloo works" in render(report, shared=False, backend="gloo")


def test_wrong_values_and_losses_are_a_verdict_too():
    measured = [BandwidthResult("tp", 2, "all_reduce", 1 << 20, 0.001, 1.0, False)]
    findings = CommunicationReport("--tp 2", 0.1, measured, [(1.0, 1.0), (1.1, 1.0)])
    text = render(findings, shared=False, backend="nccl")
    assert "all_reduce over tp (2 ranks, 1,048,576 bytes) gave wrong values" in text
    assert "step 2 of --tp 2 has loss" in text and "VERDICT: communication over nccl does not work" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nccl_needs_a_gpu_and_two_ranks():
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        main(["--nccl"])
    with pytest.raises(ConfigError, match="nobody to communicate with"):
        main(["--gloo", "--ranks", "1"])


def test_options_that_say_nothing_alone():
    for words in (["--ranks", "2"], ["--gloo", "--json"]):
        with pytest.raises(SystemExit):
            main(words)
