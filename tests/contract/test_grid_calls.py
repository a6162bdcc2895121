"""What a grid keeps to, whatever is slow or away: ids, deadlines, and whether it is ready."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.grids import drafts, local_grid, namespace, queries, run, vector_of

from mindgrid.cluster.client import Grid
from mindgrid.cluster.embedders.cache import EmbeddingCache
from mindgrid.cluster.embedders.protocol import Vectors
from mindgrid.cluster.host import Host
from mindgrid.cluster.local import LocalCluster, LocalHost
from mindgrid.cluster.port import Port
from mindgrid.cluster.spec import NamespaceKey, shard_folder
from mindgrid.cluster.table import Table
from mindgrid.shards.config import Driver
from mindgrid.shards.errors import Corruption, DeadlineExceeded, InvalidRequest, Unavailable
from mindgrid.shards.types import Draft, Query, Space

NO_VECTOR = np.empty(0, dtype=np.float32)


def test_a_repeated_transaction_writes_the_same_records_though_it_names_none(
    tmp_path: Path,
) -> None:
    async def claim() -> None:
        async with local_grid(tmp_path, namespace("n", 5), hosts=2) as (grid, cluster):
            nameless = [Draft("", draft.content, draft.vector) for draft in drafts(10)]
            first = await grid.upsert("n", nameless, "tx")
            assert await grid.upsert("n", nameless, "tx") == first
            other = Grid(cluster)
            assert await other.upsert("n", nameless, "tx") == first
            await other.close()
            ids = (await grid.upsert("n", nameless, "another"))[0]
            unnamed = [(await grid.upsert("n", nameless))[0] for _ in range(2)]
            assert len({*first[0], *ids, *unnamed[0], *unnamed[1]}) == 40
            assert {len(id) for id in first[0]} == {36}
            found = await grid.get("n", first[0])
            assert [record and record.version for record in found] == [1] * 10
            with pytest.raises(InvalidRequest, match="transaction_id: has a lone surrogate"):
                await grid.upsert("n", nameless, "\ud800")

    run(claim)


class SlowModel:
    """Answers once its gate is open; computes each text once, as every embedder of ours does."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.calls = 0
        self._cache = EmbeddingCache(Space("fake", "fake", "1", 8), 10, self._compute)

    async def embed(self, namespace: NamespaceKey, texts: Sequence[str]) -> NDArray[np.float32]:
        return await self._cache.embed(texts)

    async def _compute(self, texts: list[str]) -> Vectors:
        self.calls += 1
        await self.gate.wait()
        return np.array([vector_of(text) for text in texts], dtype=np.float32)


def test_a_model_that_hangs_takes_no_longer_than_the_call_may(tmp_path: Path) -> None:
    async def claim() -> None:
        async with local_grid(tmp_path, namespace("n")) as (_, cluster):
            model = SlowModel()
            grid = Grid(cluster, model)
            patient = asyncio.create_task(grid.search("n", Query(NO_VECTOR), "zebra"))
            await asyncio.sleep(0)
            words = r"the embedder of semantic/n did not answer within 0\.1 s"
            with pytest.raises(DeadlineExceeded, match=words):
                await grid.search("n", Query(NO_VECTOR), "zebra", deadline_s=0.1)
            with pytest.raises(DeadlineExceeded, match=words):
                await grid.upsert("n", [Draft("a", "zebra", NO_VECTOR)], deadline_s=0.1)
            model.gate.set()
            assert (await patient).hits == ()
            assert model.calls == 1, "what others wait for is computed on"
            await grid.close()

    run(claim)


class Away:
    """A cluster whose coordinator can be away, and whose hosts can hang."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.hosts = cluster.hosts
        self.away: Exception | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self._cluster = cluster

    async def table(self, older_than: int, suspect: str) -> Table:
        await self.answers.wait()
        if self.away:
            raise self.away
        return await self._cluster.table(older_than, suspect)

    async def commit(self, call: bytes) -> bytes:
        if self.away:
            raise self.away
        return await self._cluster.commit(call)

    def port(self, host: str) -> Port:
        return self._cluster.port(host)


class Hanging(LocalHost):
    """A host that has stopped."""

    async def health(self, skew_us: int | None = None) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError


def test_a_server_is_ready_while_its_coordinator_restarts(tmp_path: Path) -> None:
    async def claim() -> None:
        async with local_grid(tmp_path, namespace("n"), hosts=3) as (_, cluster):
            directory = Away(cluster)
            grid = Grid(directory)
            directory.away = Unavailable("coordinator", "it is starting")
            with pytest.raises(Unavailable, match="it is starting"):
                await grid.ready()
            directory.away = None
            await grid.ready()
            directory.away = Unavailable("coordinator", "it is starting")
            await grid.ready()
            directory.answers.clear()
            await grid.ready()
            directory.away = None
            directory.answers.set()
            await cluster.restart("host-1")
            await grid.ready()
            await grid.close()

    run(claim)


def test_a_server_whose_hosts_hang_says_so_soon(tmp_path: Path) -> None:
    async def claim() -> None:
        async with local_grid(tmp_path, namespace("n"), hosts=3) as (grid, cluster):
            await grid.ready()
            former = dict(cluster.hosts)
            hanging = Hanging(Host())
            cluster.hosts.update(dict.fromkeys(cluster.hosts, hanging))
            started = time.monotonic()
            with pytest.raises(Unavailable, match="host-0 is unavailable: it does not answer"):
                await grid.ready()
            assert time.monotonic() - started < 2, "all are asked at once"
            hanging.close()
            cluster.hosts.update(former)

    run(claim)


def test_a_shard_whose_folder_is_lost_is_named_and_not_served_as_empty(tmp_path: Path) -> None:
    async def claim() -> None:
        spaces = namespace("n", 2, Driver.LANCE), namespace("m", 1, Driver.LANCE)
        async with local_grid(tmp_path, *spaces) as (grid, _):
            for name in ("n", "m"):
                await grid.upsert(name, drafts(20))
        lost = shard_folder(tmp_path, NamespaceKey("semantic", "n"), 1, 1)
        shutil.rmtree(lost)
        async with local_grid(tmp_path, *spaces) as (grid, _):
            with pytest.raises(Corruption, match=f"{lost}.*missing"):
                await grid.search("n", queries(1)[0])
            assert len((await grid.search("m", queries(1)[0])).hits) == 10
            assert not lost.exists()

    run(claim)
