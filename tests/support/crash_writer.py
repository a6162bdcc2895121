"""A process that writes to a shard and says what was acknowledged, until it is killed.

Operation k writes the records `r<k % 20>-0..2` in one batch; with each tenth it also hard-deletes
a record of its own, so that erasures are in flight too. Run: python -m tests.support.crash_writer
FOLDER EPOCH FIRST LAST. Prints `open`, then `k versions…` for each acknowledged operation.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from mindgrid.shards.clock import Clock, Instant, SystemClock
from mindgrid.shards.config import History, ShardConfig
from mindgrid.shards.groups import Workers
from mindgrid.shards.shard import LanceShard
from mindgrid.shards.types import Delete, Draft, Space, Upsert, Upserted

RECORDS = 20
WIDTH = 3
CONFIG = ShardConfig(
    space=Space("fake", "fake", "", 4),
    history=History(age_s=None),
    seal_rows=24,
    seal_after_s=0.0,
    exact_rows_max=16,
    index_rows_min=48,
    merge_fanout=3,
    skew_max_s=0.0,
)


class HastyClock:
    """Passes over two minutes whenever it is told, so that what is trimmed by age is met too."""

    def __init__(self) -> None:
        self._ahead = 0

    def now(self) -> Instant:
        return Instant(SystemClock().now() + self._ahead)

    def hasten(self) -> None:
        self._ahead += 120_000_000


def open_shard(folder: Path, epoch: int, clock: Clock | None = None) -> LanceShard:
    workers = Workers(ThreadPoolExecutor(1), ThreadPoolExecutor(1))
    return LanceShard.open(folder, CONFIG, epoch, clock or SystemClock(), workers)


def batch(k: int) -> Upsert:
    rng = np.random.default_rng(k)
    drafts = tuple(
        Draft(f"r{k % RECORDS}-{j}", f"op {k}", rng.normal(size=4).astype(np.float32))
        for j in range(WIDTH)
    )
    return Upsert(f"tx{k}", drafts)


def main() -> None:
    folder, epoch, first, last = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    clock = HastyClock()
    shard = open_shard(folder, epoch, clock)
    print("open", flush=True)
    for k in range(first, last):
        clock.hasten()
        result = shard.submit(batch(k)).result()
        assert isinstance(result, Upserted)
        print(k, *result.versions, flush=True)
        if k % 10 == 0:
            doomed = Draft(f"doomed{k}", "secret", np.ones(4, np.float32))
            shard.submit(Upsert("", (doomed,))).result()
            shard.submit(Delete("", doomed.id, hard=True)).result()
        if k % 40 == 39:
            shard.compact()
    shard.close()


if __name__ == "__main__":
    main()
