"""A grid over local hosts: one answer whatever the shards, and errors that say what to do."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from tests.support.clocks import TurnedClock
from tests.support.grids import (
    CONFIG,
    QUICK_RETRIES,
    drafts,
    local_grid,
    namespace,
    queries,
    run,
)

from mindgrid.cluster.client import Grid
from mindgrid.cluster.local import LocalCluster
from mindgrid.cluster.openers import Opened, open_shard
from mindgrid.cluster.placement import shard_of
from mindgrid.cluster.spec import GridSpec, NamespaceSpec
from mindgrid.shards.clock import Instant, SystemClock
from mindgrid.shards.config import Driver
from mindgrid.shards.driver import SemanticShard
from mindgrid.shards.errors import (
    Corruption,
    DeadlineExceeded,
    Exhausted,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from mindgrid.shards.memory import MemoryShard
from mindgrid.shards.types import Draft, Query, Selection, Stamp, Upsert, Want

NO_VECTOR = np.empty(0, dtype=np.float32)


def text_draft(id: str, content: str, **more: object) -> Draft:
    return replace(Draft(id, content, NO_VECTOR), **more)


def in_shard(shard: int, shards: int) -> str:
    return next(f"id{n}" for n in range(1000) if shard_of(f"id{n}", shards) == shard)


@pytest.mark.parametrize(("shards", "hosts"), [(1, 1), (2, 1), (5, 1), (5, 3), (16, 4)])
def test_the_answers_are_those_of_one_shard(tmp_path: Path, shards: int, hosts: int) -> None:
    records = drafts(80)
    asked = [
        changed
        for query in queries(6)
        for changed in (
            query,
            replace(query, selection=Selection(equals={"kind": "a"})),
            replace(query, top_k=1_000, want=Want.ID),
        )
    ]
    oracle = MemoryShard(CONFIG, SystemClock())
    oracle.submit(Upsert("", tuple(records))).result()
    expected = oracle.search(asked, Stamp(SystemClock().now()))

    async def claim() -> None:
        async with local_grid(tmp_path, namespace("n", shards), hosts=hosts) as (grid, _):
            await grid.upsert("n", records)
            answers = await asyncio.gather(*(grid.search("n", query) for query in asked))
            for answer, wanted in zip(answers, expected, strict=True):
                assert not isinstance(wanted, Exception)
                assert [(h.id, h.score) for h in answer.hits] == [
                    (h.id, h.score) for h in wanted.hits
                ]
                assert (answer.exact, answer.scanned) == (wanted.exact, wanted.scanned)
                assert [h.record and h.record.content for h in answer.hits] == [
                    h.record and h.record.content for h in wanted.hits
                ]

    run(claim)


@pytest.mark.parametrize(("shards", "hosts"), [(1, 1), (5, 1), (5, 3)])
def test_records_come_back_by_id_in_the_order_asked(
    tmp_path: Path, shards: int, hosts: int
) -> None:
    async def claim() -> None:
        async with local_grid(tmp_path, namespace("n", shards), hosts=hosts) as (grid, _):
            records = drafts(40)
            await grid.upsert("n", records)
            ids = [record.id for record in reversed(records)]
            ids.insert(7, "missing")
            found = await grid.get("n", ids, Want.VALUES | Want.VECTOR)
            assert [record and record.id for record in found] == [
                None if id == "missing" else id for id in ids
            ]
            assert found[0] is not None
            assert found[0].vector.tobytes() == records[-1].vector.tobytes()
            assert await grid.get("n", []) == []

    run(claim)


def test_a_repeated_transaction_writes_nothing_twice(tmp_path: Path) -> None:
    async def claim() -> None:
        async with local_grid(tmp_path, namespace("n", 3)) as (grid, _):
            first = await grid.upsert("n", drafts(10), "tx")
            assert await grid.upsert("n", drafts(10), "tx") == first
            found = await grid.get("n", ["r00000"])
            assert found[0] is not None
            assert found[0].version == 1

    run(claim)


def test_bad_values_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    async def claim() -> None:
        async with local_grid(tmp_path, namespace("n", 2)) as (grid, _):
            short = np.ones(3, dtype=np.float32)
            with pytest.raises(InvalidRequest, match=r"query_vector: has 3 values"):
                await grid.search("n", Query(short))
            with pytest.raises(InvalidRequest, match=r"records\[1\].vector: has 3 values"):
                await grid.upsert("n", [text_draft("a", "x"), Draft("b", "", short)])
            with pytest.raises(InvalidRequest, match="id: must not be empty"):
                await grid.delete("n", "")
            with pytest.raises(NotFound, match="namespace 'semantic/other' does not exist; "):
                await grid.search("other", Query(short))
            assert await grid.get("n", ["a"]) == [None]
            assert (await grid.upsert("n", []))[0] == ()

    run(claim)


def test_a_query_that_fails_does_not_touch_the_others_of_its_batch(tmp_path: Path) -> None:
    async def claim() -> None:
        async with local_grid(tmp_path, namespace("n", 3)) as (grid, _):
            await grid.upsert("n", drafts(10))
            good = queries(1)[0]
            future = Selection(known_at=Instant(SystemClock().now() + 10**9))
            bad = replace(good, selection=future)
            answers = await asyncio.gather(
                *(grid.search("n", query) for query in (good, bad, good)), return_exceptions=True
            )
            assert [type(answer).__name__ for answer in answers] == [
                "Answer",
                "InvalidRequest",
                "Answer",
            ]

    run(claim)


def test_a_moved_host_is_followed(tmp_path: Path) -> None:
    async def claim() -> None:
        async with local_grid(tmp_path, namespace("n", 4), hosts=2) as (grid, cluster):
            await grid.upsert("n", drafts(40))
            await cluster.restart("host-0")
            await cluster.restart("host-1")
            # Memory shards come back empty; that they answer under the new epochs is the claim.
            assert (await grid.search("n", queries(1)[0])).hits == ()
            await grid.upsert("n", drafts(40))
            assert len((await grid.search("n", queries(1)[0])).hits) == 10

    run(claim)


def test_a_host_that_is_away_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    async def claim() -> None:
        async with local_grid(tmp_path, namespace("n")) as (grid, cluster):
            await grid.upsert("n", drafts(1))
            away = cluster.hosts.pop("host-0")
            with pytest.raises(Unavailable, match="host-0 is unavailable: it is not running"):
                await grid.search("n", queries(1)[0], deadline_s=0.2)
            waiting = asyncio.create_task(grid.search("n", queries(1)[0]))
            await asyncio.sleep(0.1)
            cluster.hosts["host-0"] = away
            assert len((await waiting).hits) == 1

    run(claim)


class Flaky:
    """An opener whose shards named in `broken` do not open."""

    def __init__(self) -> None:
        self.broken: dict[str, Exception] = {}
        self.opened: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, opened: Opened[NamespaceSpec]) -> SemanticShard:
        name = f"{opened.spec.key.name}/{opened.folder.name}"
        self.gate.wait()
        self.opened.append(name)
        if name in self.broken:
            raise self.broken[name]
        return open_shard(opened)


@pytest.mark.parametrize(
    ("error", "said", "kind"),
    [
        (Corruption("/data/journal.sqlite", "bad"), "journal.sqlite is damaged", Corruption),
        (
            OSError(28, "No space left on device", "/data/x"),
            "n/1 .*: /data/x: No space",
            Unavailable,
        ),
        (ZeroDivisionError("a bug"), r"shard semantic/n/1 .*ZeroDivisionError: a bug", Unavailable),
    ],
)
def test_a_shard_that_does_not_open_is_named_and_the_rest_answers(
    tmp_path: Path, error: Exception, said: str, kind: type[Exception]
) -> None:
    async def claim() -> None:
        flaky = Flaky()
        flaky.broken["n/s1"] = error
        spaces = (namespace("n", 2), namespace("other", 2))
        async with local_grid(tmp_path, *spaces, opener=flaky) as (grid, _):
            good, bad = in_shard(0, 2), in_shard(1, 2)
            await grid.upsert("n", [text_draft(good, "x")])
            await grid.upsert("other", drafts(5))
            for broken in (
                grid.search("n", queries(1)[0]),
                grid.upsert("n", [text_draft(bad, "x")]),
                grid.get("n", [good, bad]),
            ):
                with pytest.raises(kind, match=said):
                    await broken
            assert (await grid.get("n", [good]))[0] is not None
            assert len((await grid.search("other", queries(1)[0])).hits) == 5
            assert flaky.opened.count("n/s1") <= 2, "it is tried again with back-off only"
            status = (await grid.status())[0]
            assert [r.failure != "" for r in status.shards if str(r.shard) == "semantic/n/1"] == [
                True
            ]
            flaky.broken.clear()
            await asyncio.sleep(1.2)
            await grid.upsert("n", [text_draft(bad, "x")])

    run(claim)


def test_a_slow_open_delays_no_other_namespace(tmp_path: Path) -> None:
    async def claim() -> None:
        flaky = Flaky()
        spaces = (namespace("quick"), namespace("slow"))
        async with local_grid(tmp_path, *spaces, opener=flaky) as (grid, _):
            await grid.upsert("quick", drafts(5))
            flaky.gate.clear()
            slow = [asyncio.create_task(grid.search("slow", query)) for query in queries(40)]
            await asyncio.sleep(0.05)
            for query in queries(5):
                await asyncio.wait_for(grid.search("quick", query), 1)
            assert not any(task.done() for task in slow)
            flaky.gate.set()
            assert all(answer.hits == () for answer in await asyncio.gather(*slow))
            assert flaky.opened.count("slow/s0") == 1

    run(claim)


class Broken(MemoryShard):
    """A shard that gives up for good when it is told to, as one does whose journal fails."""

    failure: Unavailable | None = None

    def search(self, queries: Sequence[Query], stamp: Stamp):  # type: ignore[no-untyped-def]
        return [self.failure for _ in queries] if self.failure else super().search(queries, stamp)

    def get(self, ids, selection, want, stamp):  # type: ignore[no-untyped-def]
        return self.failure or super().get(ids, selection, want, stamp)


def test_a_shard_that_gives_up_is_opened_anew(tmp_path: Path) -> None:
    async def claim() -> None:
        made: list[Broken] = []

        def opener(opened: Opened[NamespaceSpec]) -> SemanticShard:
            made.append(Broken(opened.spec.config, opened.clock))
            return made[-1]

        async with local_grid(tmp_path, namespace("n"), opener=opener) as (grid, _):
            await grid.search("n", queries(1)[0])
            made[0].failure = Unavailable("s0", "its journal failed")
            assert (await grid.search("n", queries(1)[0])).hits == ()
            assert len(made) == 2

    run(claim)


def test_deadlines_and_full_queues_reach_the_caller(tmp_path: Path) -> None:
    async def claim() -> None:
        flaky = Flaky()
        bounds = dataclasses.replace(QUICK_RETRIES, waiting_max=4, batch_queries=1, quick_calls=1)
        async with local_grid(tmp_path, namespace("n"), opener=flaky, bounds=bounds) as (grid, _):
            flaky.gate.clear()
            with pytest.raises(DeadlineExceeded):
                await grid.search("n", queries(1)[0], deadline_s=0.1)
            flaky.gate.set()
            answers = await asyncio.gather(
                *(grid.search("n", query) for query in queries(50)), return_exceptions=True
            )
            kinds = {type(answer) for answer in answers if isinstance(answer, Exception)}
            assert kinds == {Exhausted}

    run(claim)


# Between hosts a clock may be off by `skew_max` in all; beyond that reads are refused, not short.
@pytest.mark.parametrize(("hosts", "step"), [(1, 3_600_000_000), (3, 20_000)])
@pytest.mark.parametrize("driver", Driver)
def test_a_clock_that_steps_back_hides_no_write(
    tmp_path: Path, driver: Driver, hosts: int, step: int
) -> None:
    async def claim() -> None:
        clock = TurnedClock()
        spec = GridSpec(tmp_path, (namespace("n", 5, driver),), hosts, QUICK_RETRIES)
        async with LocalCluster(spec, clock=clock) as cluster:
            grid = Grid(cluster, clock=clock)
            for number, record in enumerate(drafts(12), 1):
                await grid.upsert("n", [record])
                assert len((await grid.search("n", Query(record.vector, 100))).hits) == number
                assert (await grid.get("n", [record.id]))[0] is not None
                clock.turn(-step)
            await grid.close()

    run(claim)


def test_a_reader_over_hosts_sees_its_own_writes_at_once(tmp_path: Path) -> None:
    async def claim() -> None:
        async with local_grid(tmp_path, namespace("n", 8), hosts=4) as (grid, _):
            for number, record in enumerate(drafts(60)):
                await grid.upsert("n", [record])
                answer = await grid.search("n", Query(record.vector, top_k=1_000, want=Want.ID))
                assert len(answer.hits) == number + 1
                assert answer.hits[0].id == record.id

    run(claim)
