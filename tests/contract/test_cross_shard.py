"""Commits over several shards, through a grid: all or nothing, in every phase, whoever dies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from tests.support.grids import QUICK_RETRIES, drafts, local_grid, namespace, run

from mindgrid.cluster import port
from mindgrid.cluster.client import Grid
from mindgrid.cluster.local import LocalCluster
from mindgrid.cluster.placement import shard_of
from mindgrid.cluster.port import CommitCall, Done, ShardKey, Write
from mindgrid.cluster.spec import NamespaceKey
from mindgrid.shards.config import Driver
from mindgrid.shards.errors import DeadlineExceeded, PreconditionFailed, Unavailable
from mindgrid.shards.transactions import (
    Decide,
    Decided,
    Prepare,
    Prepared,
    Reply,
    Request,
    Resolve,
)
from mindgrid.shards.types import (
    NO_VECTOR,
    Draft,
    ExpireAction,
    Query,
    Result,
    Selection,
    Upsert,
    Want,
)

DRIVERS = [Driver.MEMORY, Driver.LANCE]
SHARDS = 3
KEY = NamespaceKey("semantic", "n")


def in_shard(shard: int, number: int = 0) -> str:
    """Return the `number`-th id that lies in the shard."""
    ids = (f"id{n}" for n in range(1_000))
    return [id for id in ids if shard_of(id, SHARDS) == shard][number]


A, B, C = in_shard(0), in_shard(1), in_shard(2)


def text(id: str, content: str, **more: object) -> Draft:
    return replace(Draft(id, content, NO_VECTOR), **more)


def vectored(id: str, content: str = "x") -> Draft:
    return Draft(id, content, np.ones(8, dtype=np.float32))


async def say(cluster: LocalCluster, shard: int, request: Request) -> Reply | Result:
    """Send one message of a commit, as a committer would that dies right after it."""
    table = await cluster.table(-1, "")
    for name, host in cluster.hosts.items():
        epoch = next(seat.epoch for seat in table.seats if seat.host == name)
        call = port.encode(CommitCall(epoch, [Write(ShardKey(KEY, 1, shard), request)]))
        await host.warm(port.encode(port.WarmCall(epoch, [ShardKey(KEY, 1, shard)])))
        (outcome,) = port.decode_steps(await host.transact(call))
        if isinstance(outcome, Done):
            return outcome.value
    raise AssertionError("no host has the shard")


async def valid(grid: Grid, *ids: str) -> list[str]:
    return [record.id for record in await grid.get("n", ids) if record is not None]


def on_both_drivers(
    tmp_path: Path, claim: Callable[[Grid, LocalCluster], Awaitable[None]], hosts: int = 2
) -> None:
    for driver in DRIVERS:

        async def main(driver: Driver = driver) -> None:
            space = namespace("n", SHARDS, driver)
            async with local_grid(tmp_path / driver.value, space, hosts=hosts) as (grid, cluster):
                await claim(grid, cluster)

        run(main)


def test_a_fact_ends_with_the_one_that_supersedes_it_in_another_shard(tmp_path: Path) -> None:
    async def claim(grid: Grid, cluster: LocalCluster) -> None:
        await grid.upsert("n", [text(A, "old")])
        _, written = await grid.upsert("n", [text(B, "new", supersedes=(A, C))])
        assert await valid(grid, A, B, C) == [B]
        invalid = Selection(include_invalidated=True)
        old, new = await grid.get("n", [A, B], selection=invalid)
        assert old is not None
        assert new is not None
        assert old.valid_to == new.valid_from == written.committed_at
        assert await grid.get("n", [C], selection=invalid) == [None]

    on_both_drivers(tmp_path, claim)


def test_a_batch_whose_if_version_fails_in_one_shard_changes_none(tmp_path: Path) -> None:
    async def claim(grid: Grid, cluster: LocalCluster) -> None:
        await grid.upsert("n", [text(C, "there")])
        for batch in ([A, B, C], [C, B, A]):
            with pytest.raises(PreconditionFailed, match="current version is 1"):
                await grid.upsert("n", [text(id, "new", if_version=0) for id in batch])
            assert await valid(grid, A, B, C) == [C]
        _, written = await grid.upsert(
            "n", [text(A, "1", if_version=0), text(C, "2", if_version=1)]
        )
        assert written.versions == (1, 2)

    on_both_drivers(tmp_path, claim)


def test_a_retry_of_a_batch_gets_its_first_result(tmp_path: Path) -> None:
    async def claim(grid: Grid, cluster: LocalCluster) -> None:
        batch = [text(id, "x") for id in (A, B, C, A)]
        first = await grid.upsert("n", batch, "tx")
        assert first[1].versions == (1, 1, 1, 2)
        assert await grid.upsert("n", batch, "tx") == first
        expired = await grid.expire("n", {}, ExpireAction.SOFT_DELETE, 2, "tx2")
        assert expired.affected == 2
        assert await grid.expire("n", {}, ExpireAction.SOFT_DELETE, 2, "tx2") == expired
        assert len(await valid(grid, A, B, C)) == 1

    on_both_drivers(tmp_path, claim)


def test_a_retry_after_a_restart_gets_the_first_result(tmp_path: Path) -> None:
    async def claim() -> None:
        space = namespace("n", SHARDS, Driver.LANCE)
        async with local_grid(tmp_path, space, hosts=2) as (grid, cluster):
            batch = [text(id, "x") for id in (A, B, C)]
            first = await grid.upsert("n", batch, "tx")
            for name in list(cluster.hosts):
                await cluster.restart(name)
            assert await grid.upsert("n", batch, "tx") == first

    run(claim)


def test_expire_takes_the_oldest_of_all_shards(tmp_path: Path) -> None:
    async def claim(grid: Grid, cluster: LocalCluster) -> None:
        for record in drafts(12):
            await grid.upsert("n", [record])
        expired = await grid.expire("n", {"kind": "a"}, ExpireAction.INVALIDATE, 3)
        assert expired.affected == 3
        ids = [record.id for record in drafts(12)]
        gone = [id for id in ids if id not in await valid(grid, *ids)]
        assert gone == ["r00000", "r00003", "r00006"]
        hard = await grid.expire("n", {}, ExpireAction.HARD_DELETE, 100)
        assert hard.affected == 12
        found = await grid.get("n", ids, selection=Selection(include_invalidated=True))
        assert found == [None] * 12
        assert (await grid.expire("n", {}, ExpireAction.HARD_DELETE, 100)).affected == 0

    on_both_drivers(tmp_path, claim)


def test_concurrent_writers_of_one_record_count_it_up_one_by_one(tmp_path: Path) -> None:
    async def claim(grid: Grid, cluster: LocalCluster) -> None:
        alone = [grid.upsert("n", [text(A, f"{n}")]) for n in range(32)]
        together = [grid.upsert("n", [text(A, f"{n}"), text(B, f"{n}")]) for n in range(32)]
        written = await asyncio.gather(*alone, *together)
        assert sorted(result.versions[0] for _, result in written) == list(range(1, 65))
        assert sorted(result.versions[1] for _, result in written[32:]) == list(range(1, 33))
        assert len((await grid.search("n", Query(top_k=10), "x")).hits) == 2

    on_both_drivers(tmp_path, claim)


def test_a_promise_nobody_decides_is_given_up_and_hides_nothing(tmp_path: Path) -> None:
    async def claim(grid: Grid, cluster: LocalCluster) -> None:
        await grid.upsert("n", [text(B, "old")])
        said = await say(cluster, 1, Prepare("dead", 0, Upsert("", (vectored(B),))))
        assert isinstance(said, Prepared)
        # Its reader waits; a writer of the same shard's other ids does not.
        with pytest.raises((Unavailable, DeadlineExceeded)):
            await grid.get("n", [B], deadline_s=0.2)
        await grid.upsert("n", [text(in_shard(1, 1), "free")], deadline_s=5)
        await cluster.clear()
        assert await valid(grid, B) == [B]
        assert (await grid.get("n", [B]))[0] == (await grid.get("n", [B]))[0]
        found = await grid.get("n", [B])
        assert found[0] is not None
        assert found[0].content == "old"

    on_both_drivers(tmp_path, claim)


def test_whoever_meets_the_lock_of_a_dead_commit_ends_it(tmp_path: Path) -> None:
    async def claim(grid: Grid, cluster: LocalCluster) -> None:
        await say(cluster, 1, Prepare("dead", 0, Upsert("", (vectored(B),))))
        _, written = await grid.upsert("n", [text(B, "mine")])
        assert written.versions == (1,)
        await say(cluster, 1, Prepare("dead too", 0, Upsert("", (vectored(B),))))
        _, written = await grid.upsert("n", [text(A, "mine"), text(B, "mine")])
        assert written.versions == (1, 2)
        await say(cluster, 1, Prepare("dead three", 0, Upsert("", (vectored(B),))))
        assert (await grid.delete("n", B)).existed
        await say(cluster, 1, Prepare("dead four", 0, Upsert("", (vectored(B),))))
        assert (await grid.expire("n", {}, ExpireAction.HARD_DELETE, 10)).affected == 2

    on_both_drivers(tmp_path, claim)


def test_what_the_home_decided_is_carried_out_after_everyone_died(tmp_path: Path) -> None:
    async def claim() -> None:
        space = namespace("n", SHARDS, Driver.LANCE)
        bounds = QUICK_RETRIES
        async with local_grid(tmp_path, space, hosts=2, bounds=bounds) as (grid, cluster):
            await grid.upsert("n", [text(A, "old"), text(B, "old")])
            vote = await say(cluster, 1, Prepare("key", 0, Upsert("", (vectored(B, "new"),))))
            assert isinstance(vote, Prepared)
            home = Decide("key", Upsert("tx", (vectored(A, "new"),)), ((1, vote),), (0, 1))
            decided = await say(cluster, 0, home)
            assert isinstance(decided, Decided)
            assert decided.result is not None
            for name in list(cluster.hosts):
                await cluster.restart(name)
            # The shards are closed: the first read opens them, and the next look finds the doubt.
            with pytest.raises((Unavailable, DeadlineExceeded)):
                await grid.get("n", [A, B], deadline_s=0.5)
            await cluster.clear()
            records = await grid.get("n", [A, B])
            assert [record and record.content for record in records] == ["new", "new"]
            batch = [vectored(A, "new"), vectored(B, "new")]
            assert (await grid.upsert("n", batch, "tx"))[1] == decided.result

    run(claim)


def test_a_promise_outlives_seals_and_restarts(tmp_path: Path) -> None:
    async def claim() -> None:
        space = namespace("n", SHARDS, Driver.LANCE)
        async with local_grid(tmp_path, space, hosts=2) as (grid, cluster):
            await grid.upsert("n", [text(B, "old")])
            vote = await say(cluster, 1, Prepare("key", 0, Upsert("", (vectored(B, "new"),))))
            assert isinstance(vote, Prepared)
            later = in_shard(1, 1)
            await grid.upsert("n", [text(later, "later")])
            for _ in range(2):
                for name in list(cluster.hosts):
                    await cluster.restart(name)
                with pytest.raises((Unavailable, DeadlineExceeded)):
                    await grid.get("n", [B], deadline_s=0.3)
            await say(cluster, 1, Resolve("key", vote.at))
            found, other = await grid.get("n", [B, later], Want.VALUES)
            assert found is not None
            assert other is not None
            assert (found.content, found.version, found.valid_from) == ("new", 2, vote.at)
            assert other.valid_from > found.valid_from

    run(claim)


def test_a_caller_who_leaves_does_not_tear_its_commit(tmp_path: Path) -> None:
    async def claim(grid: Grid, cluster: LocalCluster) -> None:
        for _ in range(20):
            write = asyncio.ensure_future(grid.upsert("n", [text(A, "x"), text(B, "x")]))
            await asyncio.sleep(0.001)
            write.cancel()
            await asyncio.gather(write, return_exceptions=True)
        await grid.upsert("n", [text(A, "last"), text(B, "last")])
        one, other = await grid.get("n", [A, B])
        assert one is not None
        assert other is not None
        assert one.version == other.version

    on_both_drivers(tmp_path, claim)
