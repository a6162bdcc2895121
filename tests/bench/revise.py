"""Commits over several shards, in one process: `PYTHONPATH=src:. python tests/bench/revise.py`.

Writers that each replace a fact by one in another shard, beside readers of those facts, in five
shards on two hosts on disk; beside them writers of one shard, for comparison in the same run.
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from mindgrid.cluster.client import Grid
from mindgrid.cluster.local import LocalCluster
from mindgrid.cluster.spec import GridSpec, NamespaceKey, NamespaceSpec
from mindgrid.shards.config import Driver, ShardConfig
from mindgrid.shards.types import Draft, Query, Selection, Space, Want

SECONDS = float(os.environ.get("BENCH_SECONDS", "4"))
VECTOR = np.ones(8, np.float32)
CONFIG = ShardConfig(Space("fake", "fake", "", 8))


class Load:
    """What its writers and readers took, in ms."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.writes: list[float] = []
        self.reads: list[float] = []

    async def run(self, writers: int, readers: int, supersede: bool) -> None:
        until = time.perf_counter() + SECONDS
        await asyncio.gather(
            *(self._write(at, until, supersede) for at in range(writers)),
            *(self._read(at, until) for at in range(readers)),
        )

    async def _write(self, at: int, until: float, supersede: bool) -> None:
        number = 0
        while (started := time.perf_counter()) < until:
            number += 1
            before = (f"{at}-{number - 1}",) if supersede else ()
            fact = Draft(
                f"{at}-{number}", "a fact", VECTOR, metadata={"chain": str(at)}, supersedes=before
            )
            await self._grid.upsert("n", [fact])
            self.writes.append(1e3 * (time.perf_counter() - started))

    async def _read(self, at: int, until: float) -> None:
        query = Query(VECTOR, 10, Selection({"chain": str(at)}), Want.ID)
        while (started := time.perf_counter()) < until:
            await self._grid.search("n", query)
            self.reads.append(1e3 * (time.perf_counter() - started))


async def measure(writers: int, readers: int, supersede: bool) -> None:
    """Print the rates of one mix on a cluster of its own."""
    namespace = NamespaceSpec(NamespaceKey("semantic", "n"), CONFIG, Driver.LANCE, 5)
    with tempfile.TemporaryDirectory(prefix="mindgrid-bench-") as folder:
        async with LocalCluster(GridSpec(Path(folder), (namespace,), 2)) as cluster:
            grid = Grid(cluster)
            load = Load(grid)
            await load.run(writers, readers, supersede)
            await grid.close()
    kind = "over two shards" if supersede else "in one shard"
    parts = [f"{writers} writers {kind}, {readers} readers:"]
    for name, took in (("writes", load.writes), ("reads", load.reads)):
        if took:
            parts.append(
                f"{len(took) / SECONDS:,.0f} {name}/s, p50 {statistics.median(took):.1f} ms"
            )
    print("  " + "; ".join(parts))


def main() -> None:
    """Run all mixes."""
    print(
        f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python "
        f"{platform.python_version()}: {SECONDS:g} s each, hosts, shards and clients in one process"
    )
    for writers, readers in ((1, 0), (8, 0), (1, 1), (8, 8)):
        for supersede in (False, True):
            asyncio.run(measure(writers, readers, supersede))


if __name__ == "__main__":
    main()
