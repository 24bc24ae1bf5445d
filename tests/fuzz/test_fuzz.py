"""The part of the fuzzing in the default suite, all that has failed before, and the harness against a kind that breaks its rules."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.forked_python import run_forked
from tests.fuzz.__main__ import SUITE_CASES, main
from tests.fuzz.kind import Case, Change, Kind
from tests.fuzz.kinds import KINDS, PLANTED
from tests.fuzz.kinds.planted import make
from tests.fuzz.manager import fuzz
from tests.fuzz.mutate import make_case
from tests.fuzz.mutate.octets import NotOfThisFormat
from tests.load_deadline import scaled

ROOT = Path(__file__).parents[2]
EXPECTED = {
    "raise": "KeyError at",
    "hang": "no end at",
    "grow": "MemoryError at",
    "write": "forbidden: open for writing",
    "remove": "forbidden: os",
    "start": "forbidden: subprocess",
    "connect": "forbidden: socket",
    "code": "forbidden: exec",
    "forged": "forbidden: exec",
    "unknown": "forbidden: exec",
    "plain": "forbidden: exec",
    "helper": "forbidden: exec",
    "accept": "opened with other content than a digest covers",
    "escape": "printed control characters",
    "copy": "leaked: the secret is in",
}


def test_mutated_files_are_opened_or_refused_and_nothing_else():
    """Also the corpus. It is a process of its own, because an audit hook stays, and because a failure may be a crash."""
    words = [sys.executable, "-m", "tests.fuzz", "--suite"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run_forked(words, cwd=ROOT, env=environment, timeout=scaled(200))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    cases = sum(line.startswith("begins ") for line in done.stdout.splitlines())
    assert cases >= SUITE_CASES * len(KINDS), done.stdout[-4000:]


def test_whoever_breaks_a_rule_is_found():
    results = fuzz([PLANTED], jobs=1, seconds=scaled(60), cases=130, hung_s=1.0)
    assert results.tallies[PLANTED].cases >= 130
    assert results.tallies[PLANTED].refused, "the door that refuses is no failure"
    found: dict[str, set[str]] = {}
    for failure in results.failures:
        found.setdefault(failure.door, set()).add(failure.cause)
    for door, cause in EXPECTED.items():
        assert any(one.startswith(cause) for one in found[door]), f"{door}: {found[door]}"
    assert found.keys() == EXPECTED.keys() | {"?"}
    assert {one.split(":")[0] for one in found["?"]} == {"the process ended with SIGABRT", "no end"}
    for failure in results.failures:  # those of a process that is gone are named by their number
        case = make_case(make(PLANTED), int(failure.case.split(":")[1]))
        assert case.door == failure.door or (failure.door == "?" and case.door in ("abort", "stuck"))


def test_a_case_follows_from_its_number():
    kind = make(PLANTED)
    cases = [make_case(kind, number) for number in range(200)]
    assert cases == [make_case(kind, number) for number in range(200)]
    assert len({case.to_json() for case in cases}) > 190
    assert [Case.from_json(case.to_json()) for case in cases] == cases


@pytest.mark.parametrize("place", ["file", "link", "fifo", "folder", "sparse"])
def test_a_change_is_what_it_says(tmp_path: Path, place):
    change = Change(
        place, b"content" if place in ("file", "sparse") else b"", "target" if place == "link" else "", 1 << 40
    )
    path = tmp_path / "deep" / "x"
    Change.from_json(change.to_json()).make(path)
    kinds = {
        "file": path.is_file,
        "link": path.is_symlink,
        "fifo": path.is_fifo,
        "folder": path.is_dir,
        "sparse": path.is_file,
    }
    assert kinds[place]()
    assert place != "sparse" or path.stat().st_size == 1 << 40


def test_sealed_cases_are_made_from_the_inner_files():
    kind = Kind(
        "k",
        {"a": b"[1]"},
        {"open": lambda folder, scratch: None},
        inner={"a": b"[1]"},
        seal=lambda inner: {"a": inner["a"] + b"!"},
    )
    sealed = [case for number in range(60) if (case := make_case(kind, number)).sealed]
    assert sealed and all(change.content.endswith(b"!") for case in sealed for change in case.changes.values())
    with pytest.raises(NotOfThisFormat):
        from tests.fuzz.mutate.tables import mutate_npy

        mutate_npy(b"no array", None)  # type: ignore[arg-type]


def test_a_number_of_cases_is_the_same_cases_in_any_number_of_processes(capsys: pytest.CaptureFixture[str]):
    counts = []
    for jobs in (1, 3):
        assert main(["--kind", "rendezvous", "--cases", "40", "--first", "7", "--jobs", str(jobs), "--no-keep"]) == 0
        counts.append(capsys.readouterr().out.splitlines()[-1].split()[1:4])
    assert counts[0] == counts[1] and counts[0][0] == "40"
