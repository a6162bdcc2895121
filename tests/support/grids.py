"""Clusters in this process, and what their tests put into them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mindgrid.cluster.client import Grid
from mindgrid.cluster.local import LocalCluster
from mindgrid.cluster.openers import Opener, open_shard
from mindgrid.cluster.spec import Bounds, GridSpec, NamespaceKey, NamespaceSpec
from mindgrid.shards.config import Driver, ShardConfig
from mindgrid.shards.types import Draft, Query, Space, Vector

DIMENSIONS = 8
SPACE = Space("fake", "fake", "1", DIMENSIONS)
CONFIG = ShardConfig(SPACE)
QUICK_RETRIES = Bounds(deadline_s=10.0, retry_first_s=0.01, retry_most_s=0.05)


class LengthEmbedder:
    """Embeds a text by the codes of its first letters; counts what it is asked."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    async def embed(self, namespace: NamespaceKey, texts: Sequence[str]) -> NDArray[np.float32]:
        self.texts += texts
        return np.array([vector_of(text) for text in texts], dtype=np.float32)


def vector_of(text: str) -> Vector:
    """Return the vector that `LengthEmbedder` gives the text."""
    codes = [ord(letter) for letter in text[:DIMENSIONS]]
    return np.array(codes + [1] * (DIMENSIONS - len(codes)), dtype=np.float32)


def namespace(name: str, shards: int = 1, driver: Driver = Driver.MEMORY) -> NamespaceSpec:
    """Return a namespace of block `semantic`."""
    return NamespaceSpec(NamespaceKey("semantic", name), CONFIG, driver, shards)


def drafts(count: int, seed: int = 0) -> list[Draft]:
    """Return drafts with random vectors, kinds a, b and c, and ids that sort by number."""
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((count, DIMENSIONS)).astype(np.float32)
    return [
        Draft(f"r{number:05}", f"content {number}", vector, metadata={"kind": "abc"[number % 3]})
        for number, vector in enumerate(vectors)
    ]


def queries(count: int, seed: int = 1) -> list[Query]:
    """Return queries with random vectors."""
    rng = np.random.default_rng(seed)
    return [Query(v) for v in rng.standard_normal((count, DIMENSIONS)).astype(np.float32)]


@asynccontextmanager
async def local_grid(
    storage: Path,
    *namespaces: NamespaceSpec,
    hosts: int = 1,
    bounds: Bounds = QUICK_RETRIES,
    opener: Opener = open_shard,
) -> AsyncIterator[tuple[Grid, LocalCluster]]:
    """Yield a grid over a cluster in this process."""
    spec = GridSpec(storage, namespaces, hosts, bounds)
    async with LocalCluster(spec, opener) as cluster:
        grid = Grid(cluster, LengthEmbedder())
        yield grid, cluster
        await grid.close()


def run(claim: Callable[[], Awaitable[None]]) -> None:
    """Run an async test, for a minute at most."""

    async def main() -> None:
        await asyncio.wait_for(claim(), 60)

    asyncio.run(main())
