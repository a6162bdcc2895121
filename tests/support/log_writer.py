"""A process that appends to an episodic log and says what was acknowledged, until it is killed.

Operation k appends the events `e<k>-0..2` in one batch; each fifth also tombstones, and each tenth
removes, the oldest few. Run: python -m tests.support.log_writer FOLDER EPOCH FIRST LAST. Prints
`open`, then `k cursor` for each acknowledged batch, its first one's, and `removed until cursor`.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mindgrid.shards.clock import Clock, SystemClock
from mindgrid.shards.episodic.log import EventLog
from mindgrid.shards.episodic.types import (
    Append,
    Appended,
    EventAction,
    EventDraft,
    ExpireEvents,
    LogConfig,
)
from mindgrid.shards.groups import Workers
from tests.support.crash_writer import HastyClock

WIDTH = 3
REMOVED = 4
CONFIG = LogConfig(seal_events=16, seal_after_s=0.0, merge_fanout=2, recent_events=8)


def open_log(folder: Path, epoch: int, clock: Clock | None = None) -> EventLog:
    workers = Workers(ThreadPoolExecutor(1), ThreadPoolExecutor(1))
    return EventLog.open(folder, CONFIG, epoch, clock or SystemClock(), workers)


def batch(k: int) -> Append:
    drafts = (
        EventDraft("message", f"e{k}-{j}".encode(), session_id=f"s{k % 7}", dedup_key=f"e{k}-{j}")
        for j in range(WIDTH)
    )
    return Append(tuple(drafts), None, f"tx{k}")


def expire_of(k: int, first: int) -> ExpireEvents | None:
    """Return what operation k expires of a log whose oldest cursor is `first`."""
    if k % 10 == 9:
        return ExpireEvents(EventAction.HARD_DELETE, 100, first + REMOVED)
    if k % 10 == 4:
        return ExpireEvents(EventAction.SOFT_DELETE, 2, first + 3 * REMOVED)
    return None


def main() -> None:
    folder, epoch, start, stop = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    clock = HastyClock()
    log = open_log(folder, epoch, clock)
    print("open", flush=True)
    first = 1
    for k in range(start, stop):
        clock.hasten()
        result = log.submit(batch(k)).result()
        assert isinstance(result, Appended)
        print(k, result.events[0].cursor, flush=True)
        command = expire_of(k, first)
        if command is not None:
            log.submit(command).result()
            if command.action is EventAction.HARD_DELETE:
                first = command.before_cursor
                print("removed until", first - 1, flush=True)
        if k % 40 == 39:
            log.compact()
    log.close()


if __name__ == "__main__":
    main()
