"""A log that is killed anywhere loses no event it acknowledged and gives no cursor twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.log_writer import REMOVED, WIDTH, batch, open_log
from tests.support.logs import events

from mindgrid.shards import faults
from mindgrid.shards.episodic.log import EventLog
from mindgrid.shards.episodic.types import Appended, EventAction, EventRange, ExpireEvents
from mindgrid.shards.errors import Moved, StorageLocked

OPERATIONS = 60
ROOT = Path(__file__).resolve().parents[2]


def run_writer(folder: Path, fault: str, operations: int) -> tuple[int, dict[int, int], int]:
    """Run the writer until it ends or dies.

    Return its exit code, the first cursor of each acknowledged batch, and the last one removed.
    """
    environment = {**os.environ, "MINDGRID_FAULT": fault}
    command = [sys.executable, "-m", "tests.support.log_writer"]
    command += [str(folder), "1", "0", str(operations)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode in (0, -9), done.stderr
    acknowledged: dict[int, int] = {}
    removed = 0
    *lines, _ = done.stdout.split("\n")  # what follows the last newline was cut
    for line in lines:
        if line.startswith("removed until"):
            removed = int(line.split()[2])
        elif line[:1].isdigit():
            k, cursor = map(int, line.split())
            acknowledged[k] = cursor
    return done.returncode, acknowledged, removed


def check_nothing_lost(
    log: EventLog, acknowledged: dict[int, int], removed: int, attempted: int
) -> None:
    """Check every event; what was under way when the process died may be there or not."""
    found = events(log, EventRange(include_deleted=True))
    cursors = [event.cursor for event in found]
    assert cursors == list(range(cursors[0], cursors[0] + len(found))) if found else True
    first = cursors[0] if found else log.status().last_cursor + 1
    # The next removal may have come to its end.
    assert removed + 1 <= first <= removed + 1 + REMOVED
    there = {event.cursor: event.payload.decode() for event in found}
    expected = {cursor + j: f"e{k}-{j}" for k, cursor in acknowledged.items() for j in range(WIDTH)}
    for cursor, payload in expected.items():
        if cursor >= first:
            assert there.pop(cursor) == payload
    # Of the batch under way all or nothing.
    assert sorted(there.values()) in ([], [f"e{attempted}-{j}" for j in range(WIDTH)])


CASES = [
    pytest.param(name, n, marks=[] if n == 1 else [pytest.mark.soak])
    for name in sorted(faults.NAMES - {"index.written"})
    for n in (1, 2, 3)
    if n == 1 or not name.startswith(("journal.create.", "journal.epoch."))
]


@pytest.mark.parametrize(("name", "occurrence"), CASES)
def test_a_kill_at_any_step_loses_nothing(tmp_path: Path, name: str, occurrence: int) -> None:
    folder = tmp_path / "log"
    code, acknowledged, removed = run_writer(
        folder, f"{name}:{occurrence}", OPERATIONS * occurrence
    )
    assert code == -9, f"{name} was not reached {occurrence} times"
    attempted = max(acknowledged, default=-1) + 1
    log = open_log(folder, 2)
    check_nothing_lost(log, acknowledged, removed, attempted)
    last = log.status().last_cursor
    # The one in doubt first: its transaction id makes it happen once.
    for k in range(attempted, attempted + 8):
        again = log.submit(batch(k)).result()
        assert isinstance(again, Appended)
        acknowledged[k] = again.events[0].cursor
        assert [event.cursor - acknowledged[k] for event in again.events] == [0, 1, 2]
    assert acknowledged[attempted] in (last - WIDTH + 1, last + 1)
    log.compact()
    log.close()
    log = open_log(folder, 3)
    check_nothing_lost(log, acknowledged, removed, -1)
    assert log.status().last_cursor == acknowledged[attempted] + 8 * WIDTH - 1
    log.close()


def test_one_owner_at_a_time_and_a_stale_one_writes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    log = open_log(folder, 5)
    with pytest.raises(StorageLocked):
        open_log(folder, 6)
    # Its guard is lost: another takes the folder, as if on another machine.
    log._lock.path.unlink()
    log._lock.is_held = lambda: True  # type: ignore[method-assign]
    newer = open_log(folder, 6)
    newer.submit(batch(0)).result()
    with pytest.raises(Moved):
        log.submit(batch(1)).result()
    newer.submit(batch(2)).result()
    assert [event.cursor for event in events(newer)] == [1, 2, 3, 4, 5, 6]
    newer.close()
    with pytest.raises(Moved):
        open_log(folder, 5)


def test_removed_events_leave_every_file(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    log = open_log(folder, 1)
    for k in range(12):
        log.submit(batch(k)).result()
    log.maintain()

    def files_with(text: bytes) -> list[str]:
        return [
            path.name for path in folder.rglob("*") if path.is_file() and text in path.read_bytes()
        ]

    assert files_with(b"e1-0"), "else the scan finds nothing anyway"
    log.submit(ExpireEvents(EventAction.HARD_DELETE, 100, 10)).result()
    log.compact()
    assert not files_with(b"e1-0")
    assert not files_with(b"e2-2")
    assert files_with(b"e3-0")
    log.close()
