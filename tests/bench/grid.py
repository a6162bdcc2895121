"""What a query costs between its caller and the shard: `PYTHONPATH=src python tests/bench/grid.py`.

The shard answers at once with ten made-up hits, so that all the time is checks, lanes, bytes both
ways and merging, in this process; Ray adds its own per call.
"""

from __future__ import annotations

import asyncio
import platform
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from mindgrid.cluster.client import Grid
from mindgrid.cluster.local import LocalCluster
from mindgrid.cluster.openers import Opened
from mindgrid.cluster.spec import GridSpec, NamespaceKey, NamespaceSpec
from mindgrid.shards.clock import Instant
from mindgrid.shards.config import Driver, ShardConfig
from mindgrid.shards.memory import MemoryShard
from mindgrid.shards.types import Answer, Hit, Query, Record, Space, Stamp

DIMENSIONS = 384
QUERIES = 6_000
ROUNDS = 3


def made_up_hits() -> tuple[Hit, ...]:
    """Return ten hits of an ordinary size."""
    empty = np.empty(0, dtype=np.float32)
    metadata = {"module": "os", "kind": "function", "length": "120"}
    at = Instant(1)
    return tuple(
        Hit(
            id,
            1 - n / 100,
            Record(id, "content " * 25, empty, b"", metadata, at, at, None, None, (), "", 1),
        )
        for n, id in enumerate(f"record-{n:06}" for n in range(10))
    )


HITS = made_up_hits()


class Ready(MemoryShard):
    """A shard that does no work; counts its calls."""

    calls = 0
    queries = 0

    def search(self, queries, stamp: Stamp):  # type: ignore[no-untyped-def]
        """Answer every query with the same hits."""
        Ready.calls += 1
        Ready.queries += len(queries)
        return [Answer(HITS, stamp.at, exact=True, scanned=10) for _ in queries]


def ready(opened: Opened[NamespaceSpec]) -> Ready:
    """Open a shard."""
    return Ready(opened.spec.config, opened.clock)


async def measure(clients: int, shards: int, hosts: int) -> None:
    """Print the best of some rounds."""
    config = ShardConfig(Space("fake", "fake", "1", DIMENSIONS))
    spec = NamespaceSpec(NamespaceKey("semantic", "n"), config, Driver.MEMORY, shards)
    query = Query(np.random.default_rng(0).standard_normal(DIMENSIONS).astype(np.float32))
    with tempfile.TemporaryDirectory() as storage:
        async with LocalCluster(GridSpec(Path(storage), (spec,), hosts), ready) as cluster:
            grid = Grid(cluster)

            async def client(count: int) -> None:
                for _ in range(count):
                    await grid.search("n", query)

            await client(10)
            Ready.calls = Ready.queries = 0
            cpu_us, wall_us = [], []
            for _ in range(ROUNDS):
                cpu, wall = time.process_time(), time.perf_counter()
                await asyncio.gather(*(client(QUERIES // clients) for _ in range(clients)))
                done = QUERIES // clients * clients
                cpu_us.append((time.process_time() - cpu) / done * 1e6)
                wall_us.append((time.perf_counter() - wall) / done * 1e6)
            await grid.close()
    print(
        f"{clients:2} clients, {shards} shards, {hosts} hosts: {min(cpu_us):4.0f} µs CPU and "
        f"{min(wall_us):4.0f} µs a query, {Ready.queries / Ready.calls:.1f} queries a call"
    )


if __name__ == "__main__":
    print(platform.platform(), sys.version.split()[0])
    sys.setswitchinterval(0.0005)
    for case in ((1, 1, 1), (8, 1, 1), (32, 1, 1), (32, 5, 1), (32, 4, 2)):
        asyncio.run(measure(*case))
