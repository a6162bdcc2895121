"""An episodic log in this process: `PYTHONPATH=src:. python tests/bench/log.py`.

Builds a log of BENCH_EVENTS events (a million) in sessions of 100, each event in another session
than the one before; opens it in a process of its own, and reads. The last lines read the same
events from a Lance table instead (docs/decisions/0018).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from mindgrid.shards.clock import SystemClock
from mindgrid.shards.episodic.log import EventLog
from mindgrid.shards.episodic.types import Append, EventDraft, EventRange, LogConfig
from mindgrid.shards.groups import Workers

EVENTS = int(os.environ.get("BENCH_EVENTS", "1000000"))
SESSION = 100
BATCH = 1_000
PAYLOAD = b'{"role": "user", "content": "When does the next flight to Lisbon leave?"}' * 3


def main() -> None:
    """Build the log, and measure it in a second process."""
    if len(sys.argv) > 1:
        _measure(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory(prefix="mindgrid-bench-") as folder:
        log = _open(Path(folder) / "log")
        started = time.perf_counter()
        for first in range(0, EVENTS, BATCH):
            log.submit(Append(tuple(_draft(n) for n in range(first, first + BATCH)))).result()
        seconds = time.perf_counter() - started
        print(f"append in batches of {BATCH}: {EVENTS / seconds:,.0f} events/s durable")
        started = time.perf_counter()
        for n in range(500):
            log.submit(Append((_draft(EVENTS + n),))).result()
        print(f"one by one: {500 / (time.perf_counter() - started):,.0f} events/s durable")
        log.maintain()
        log.close()
        command = [sys.executable, __file__, str(Path(folder) / "log")]
        subprocess.run(command, check=True)


def _measure(folder: Path) -> None:
    before = psutil.Process().memory_full_info().uss
    started = time.perf_counter()
    log = _open(folder)
    seconds = time.perf_counter() - started
    count = log.status().events
    used = psutil.Process().memory_full_info().uss - before
    print(f"open {count:,} events: {seconds:.2f} s, {used / count:.0f} bytes of memory an event")
    sessions = np.random.default_rng(1).choice(EVENTS // SESSION, 20, replace=False).tolist()
    each = iter(sessions * 2)
    session = _timed(40, lambda: log.read(EventRange(session_id=f"s{next(each)}"), 1_000).events)
    print(f"one session of {SESSION} events: {session}")
    starts = iter(np.random.default_rng(2).choice(EVENTS - 10_000, 20, replace=False).tolist())
    replay = _timed(20, lambda: log.read(EventRange(int(next(starts))), 10_000).events)
    print(f"10,000 events in order: {replay}")
    _lance(log)
    log.close()


def _lance(log: EventLog) -> None:
    import lance

    run = max(log._store.runs, key=lambda run: run.info.rows)
    rng = np.random.default_rng(3)
    with tempfile.TemporaryDirectory(prefix="mindgrid-bench-") as folder:
        lance.write_dataset(run.table(1), folder)
        table = lance.dataset(folder)
        columns = ["payload", "metadata", "supersedes", "source"]

        def places(count: int) -> list[int]:
            return [int(n) for n in np.sort(rng.choice(run.info.rows, count, replace=False))]

        first = run.info.first

        def mapped(count: int) -> object:
            return list(run.read([first + at for at in places(count)]))

        def taken(count: int) -> object:
            return table.take(places(count), columns=columns).to_pylist()

        for count in (10, 100, 1_000):
            ours, theirs = (_timed(20, partial(read, count)) for read in (mapped, taken))
            print(f"{count} events of a run of {run.info.rows:,}: mapped {ours}; Lance {theirs}")


def _timed(times: int, work: Callable[[], object]) -> str:
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        taken.append((time.perf_counter() - started) * 1e3)
    return f"median {np.median(taken):.2f} ms, worst {max(taken):.2f}"


def _draft(n: int) -> EventDraft:
    session = f"s{n % (EVENTS // SESSION)}"
    role = ("user", "assistant", "tool")[n % 3]
    return EventDraft("message", PAYLOAD, {"turn": str(n % 7)}, role, session, f"key-{n}")


def _open(folder: Path) -> EventLog:
    workers = Workers(ThreadPoolExecutor(1), ThreadPoolExecutor(1))
    return EventLog.open(folder, LogConfig(), int(time.time()), SystemClock(), workers)


if __name__ == "__main__":
    main()
