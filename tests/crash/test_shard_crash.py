"""A shard that is killed anywhere loses nothing it acknowledged and keeps no half of a batch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from tests.support.crash_writer import RECORDS, WIDTH, batch, open_shard

from mindgrid.shards import faults
from mindgrid.shards.clock import SystemClock
from mindgrid.shards.driver import Found
from mindgrid.shards.shard import LanceShard
from mindgrid.shards.types import Selection, Stamp, Upserted, Want

OPERATIONS = 60
"""Enough for a writer to reach each step once; n times as many for the n-th time."""
ROOT = Path(__file__).resolve().parents[2]


def run_writer(folder: Path, fault: str, operations: int) -> tuple[int, dict[int, int]]:
    """Run the writer until it ends or dies; return its exit code and the acknowledged versions."""
    environment = {**os.environ, "MINDGRID_FAULT": fault}
    command = [sys.executable, "-m", "tests.support.crash_writer"]
    command += [str(folder), "1", "0", str(operations)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    *lines, _ = done.stdout.split("\n")  # what follows the last newline was cut
    numbers = [line.split() for line in lines if line[:1].isdigit()]
    acknowledged = {int(k): int(version) for k, version, *_ in numbers}
    assert done.returncode in (0, -9), done.stderr
    return done.returncode, acknowledged


def check_nothing_lost(shard: LanceShard, acknowledged: dict[int, int], attempted: int) -> None:
    """Check each record against the acknowledged writes; `attempted` may be there or not."""
    writes: dict[int, list[int]] = defaultdict(list)
    for k in acknowledged:
        writes[k % RECORDS].append(k)
    for record in range(RECORDS):
        ids = [f"r{record}-{j}" for j in range(WIDTH)]
        found = shard.get(ids, Selection(), Want.VALUES, Stamp(SystemClock().now()))
        assert isinstance(found, Found)
        states = {(r.version, r.content) if r else (0, "") for r in found.records}
        assert len(states) == 1, f"half a batch: {found.records}"
        version, content = states.pop()
        done = writes[record]
        expected = {(len(done), f"op {done[-1]}" if done else "")}
        if attempted % RECORDS == record:
            expected.add((len(done) + 1, f"op {attempted}"))
        assert (version, content) in expected


def check_nothing_came_back(shard: LanceShard, crashed_at: int) -> None:
    """Check that no hard-deleted record is there, but for the one that was to be deleted next."""
    everything = shard.get(
        [f"doomed{k}" for k in range(0, crashed_at + 1, 10)],
        Selection(include_invalidated=True),
        Want.VALUES,
        Stamp(SystemClock().now()),
    )
    assert isinstance(everything, Found)
    shown = {r.id for r in everything.records if r is not None}
    assert shown <= {f"doomed{crashed_at - 1}"}, "a deleted record is back"


ONCE = ("journal.create.", "journal.epoch.")
"""Steps of an open: a writer reaches them once."""

CASES = [
    pytest.param(name, n, marks=[] if n == 1 else [pytest.mark.soak])
    for name in sorted(faults.NAMES)
    for n in (1, 2, 3)
    if n == 1 or not name.startswith(ONCE)
]


@pytest.mark.parametrize(("name", "occurrence"), CASES)
def test_a_kill_at_any_step_loses_nothing(tmp_path: Path, name: str, occurrence: int) -> None:
    folder = tmp_path / "shard"
    code, acknowledged = run_writer(folder, f"{name}:{occurrence}", OPERATIONS * occurrence)
    assert code == -9, f"{name} was not reached {occurrence} times"
    attempted = max(acknowledged, default=-1) + 1
    shard = open_shard(folder, 2)
    check_nothing_lost(shard, acknowledged, attempted)
    check_nothing_came_back(shard, attempted)
    # The one in doubt first: its transaction id makes it happen once.
    for k in range(attempted, attempted + RECORDS):
        again = shard.submit(batch(k)).result()
        assert isinstance(again, Upserted)
        acknowledged[k] = again.versions[0]
    shard.compact()
    shard.close()
    shard = open_shard(folder, 3)
    check_nothing_lost(shard, acknowledged, attempted + RECORDS)
    check_nothing_came_back(shard, attempted)
    shard.close()
