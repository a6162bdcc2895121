"""A host: under which epochs it works, what it lets go of, and what it refuses."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

import psutil  # type: ignore[import-untyped,unused-ignore]
import pytest
from tests.support.grids import CONFIG, drafts, namespace, queries, run

from mindgrid.cluster import port
from mindgrid.cluster.host import Host
from mindgrid.cluster.local import LocalHost
from mindgrid.cluster.openers import Opened, Opener
from mindgrid.cluster.port import Done, Failed, Opening, ShardKey
from mindgrid.cluster.process import Process, end, this_process
from mindgrid.cluster.spec import Bounds, NamespaceKey, NamespaceSpec, shard_name
from mindgrid.cluster.table import Holding, Seat, Table, route_of
from mindgrid.shards.clock import Instant, SystemClock
from mindgrid.shards.driver import Found, SemanticShard
from mindgrid.shards.errors import MindgridError, Moved, NotFound, Unavailable
from mindgrid.shards.memory import MemoryShard
from mindgrid.shards.types import (
    Answer,
    Command,
    Query,
    Result,
    Selection,
    Stamp,
    Upsert,
    Upserted,
    Want,
)

NOTES = NamespaceKey("semantic", "notes")
HOLDING = Holding(namespace("notes", 8), 1)


class Shards:
    """An opener that remembers which shards are open."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.epochs: list[int] = []

    def __call__(self, opened: Opened[NamespaceSpec]) -> SemanticShard:
        self.open.add(opened.folder.name)
        self.epochs.append(opened.epoch)
        return _Noted(self, opened)


class _Noted(MemoryShard):
    def __init__(self, shards: Shards, opened: Opened[NamespaceSpec]) -> None:
        super().__init__(CONFIG, opened.clock)
        self._shards, self._name = shards, opened.folder.name

    def close(self) -> None:
        self._shards.open.discard(self._name)
        super().close()


def host_of(opener: Opener) -> LocalHost:
    return LocalHost(Host(opener))


@pytest.fixture
def shards() -> Shards:
    return Shards()


@pytest.fixture
def host(shards: Shards) -> Iterator[LocalHost]:
    host = host_of(shards)
    yield host
    host.close()


def appointment(
    epoch: int, *hosts: str, holding: Holding = HOLDING, predecessors: tuple[Process, ...] = ()
) -> bytes:
    seats = tuple(Seat(name, epoch) for name in hosts or ("host-0",))
    table = Table(epoch, Bounds(), seats, (holding,))
    return port.encode(port.Appointment("host-0", epoch, table, "/unused", predecessors))


def search(epoch: int, *numbers: int, generation: int = 1, key: NamespaceKey = NOTES) -> bytes:
    item = port.SearchItem(key, generation, numbers or (0,), None, queries(2))
    return port.encode(port.SearchCall(epoch, [item]))


async def warm(host: LocalHost, epoch: int, *numbers: int) -> None:
    keys = [ShardKey(NOTES, 1, number) for number in numbers]
    await host.warm(port.encode(port.WarmCall(epoch, keys)))


def test_only_calls_of_its_own_epoch_are_answered(host: LocalHost) -> None:
    async def claim() -> None:
        for epoch in (0, 4):
            with pytest.raises(Moved):
                await host.search(search(epoch + 1))
        await host.appoint(appointment(4))
        for epoch in (0, 3, 5):
            with pytest.raises(Moved):
                await host.search(search(epoch))
        await host.search(search(4))

    run(claim)


def test_an_older_appointment_is_refused(host: LocalHost) -> None:
    async def claim() -> None:
        await host.appoint(appointment(4))
        with pytest.raises(Moved):
            await host.appoint(appointment(3))
        health = port.decode_health(await host.appoint(appointment(4)))
        assert (health.epoch, health.process) == (4, this_process())

    run(claim)


def test_a_closed_shard_answers_opening_at_once_and_is_open_after_warm(host: LocalHost) -> None:
    async def claim() -> None:
        await host.appoint(appointment(1))
        assert port.decode_answers(await host.search(search(1))) == [Opening(), Opening()]
        await warm(host, 1, 0)
        answers = port.decode_answers(await host.search(search(1)))
        assert all(isinstance(answer, Done) for answer in answers)

    run(claim)


def test_a_search_that_does_not_end_holds_up_no_other() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Stuck(MemoryShard):
        def search(self, queries: Sequence[Query], stamp: Stamp) -> list[Answer | MindgridError]:
            entered.set()
            leave.wait(30)
            return super().search(queries, stamp)

    def opener(opened: Opened[NamespaceSpec]) -> SemanticShard:
        kind = Stuck if opened.folder.name == shard_name(0) else MemoryShard
        return kind(CONFIG, opened.clock)

    host = host_of(opener)

    async def claim() -> None:
        await host.appoint(appointment(1))
        await warm(host, 1, 0, 1)
        stuck = asyncio.create_task(host.search(search(1, 0)))
        await asyncio.to_thread(entered.wait, 10)
        async with asyncio.timeout(10):
            answers = port.decode_answers(await host.search(search(1, 1)))
        assert all(isinstance(answer, Done) for answer in answers)
        assert not stuck.done()
        leave.set()
        await stuck

    run(claim)
    host.close()


def test_a_shard_of_another_host_or_generation_has_moved(host: LocalHost) -> None:
    async def claim() -> None:
        await host.appoint(appointment(1, "host-0", "host-1"))
        homes = route_of(HOLDING, ("host-0", "host-1")).hosts
        theirs, ours = homes.index("host-1"), homes.index("host-0")
        for call in (
            search(1, theirs),
            search(1, ours, theirs),
            search(1, ours, generation=2),
            search(1, 0, key=NamespaceKey("semantic", "later")),
        ):
            outcome = port.decode_answers(await host.search(call))[0]
            assert isinstance(outcome, Failed)
            assert isinstance(outcome.rebuild(), Moved)

    run(claim)


def test_shards_that_go_elsewhere_are_closed_before_the_appointment_is_answered(
    host: LocalHost, shards: Shards
) -> None:
    async def claim() -> None:
        await host.appoint(appointment(1))
        await warm(host, 1, *range(8))
        assert len(shards.open) == 8
        await host.appoint(appointment(2, "host-0", "host-1"))
        homes = route_of(HOLDING, ("host-0", "host-1")).hosts
        assert shards.open == {f"s{n}" for n, home in enumerate(homes) if home == "host-0"}

    run(claim)


def test_a_new_appointment_leaves_open_what_stays(host: LocalHost, shards: Shards) -> None:
    async def claim() -> None:
        await host.appoint(appointment(1))
        await warm(host, 1, *range(8))
        await host.appoint(appointment(2))
        assert len(shards.open) == 8
        assert shards.epochs == [1] * 8
        tuned = replace(HOLDING.spec, config=replace(CONFIG, recall=0.5))
        await host.appoint(appointment(3, holding=Holding(tuned, 1)))
        assert shards.open == set(), "a shard told otherwise is opened anew"

    run(claim)


def test_a_host_whose_clock_is_off_refuses_writes_and_answers_reads(host: LocalHost) -> None:
    async def claim() -> None:
        await host.appoint(appointment(1))
        await warm(host, 1, 0)
        write = port.Write(ShardKey(NOTES, 1, 0), Upsert("t", tuple(drafts(1))))
        call = port.encode(port.CommitCall(1, [write]))
        for skew_us, refused in ((249_000, False), (-251_000, True), (251_000, True), (0, False)):
            await host.health(skew_us)
            outcome = port.decode_written(await host.commit(call))[0]
            assert isinstance(outcome, Failed) == refused
            if isinstance(outcome, Failed):
                assert isinstance(outcome.rebuild(), Unavailable)
                assert "its clock is" in str(outcome.rebuild())
            assert isinstance(port.decode_answers(await host.search(search(1)))[0], Done)

    run(claim)


def get(epoch: int, shard: int, stamp: Stamp | None = None) -> bytes:
    item = port.GetItem(NOTES, 1, ((shard, "r00000"),), Selection(), Want.VALUES, stamp)
    return port.encode(port.GetCall(epoch, [item]))


def test_a_read_from_the_future_is_refused_by_every_way_in(host: LocalHost) -> None:
    async def claim() -> None:
        await host.appoint(appointment(1))
        await warm(host, 1, 0)
        for ahead_s, refused in ((0.2, False), (5.0, True), (-60.0, False)):
            for exactly in (False, True):
                stamp = Stamp(Instant(SystemClock().now() + int(ahead_s * 1e6)), exactly)
                item = port.SearchItem(NOTES, 1, (0,), stamp, queries(1))
                call = port.encode(port.SearchCall(1, [item]))
                for outcome in (
                    port.decode_answers(await host.search(call))[0],
                    port.decode_found(await host.get(get(1, 0, stamp)))[0],
                ):
                    assert isinstance(outcome, Failed) == refused
                    if isinstance(outcome, Failed):
                        assert "host-0 is unavailable" in str(outcome.rebuild())
                        assert "clocks differ" in str(outcome.rebuild())

    run(claim)


class Troubled(MemoryShard):
    """A shard whose reads fail as they are told to."""

    trouble: Exception | None = None

    def search(self, queries: Sequence[Query], stamp: Stamp) -> list[Answer | MindgridError]:
        if isinstance(self.trouble, MindgridError):
            return [self.trouble] * len(queries)
        if self.trouble is not None:
            raise self.trouble
        return super().search(queries, stamp)

    def get(
        self, ids: Sequence[str], selection: Selection, want: Want, stamp: Stamp
    ) -> Found | MindgridError:
        if isinstance(self.trouble, MindgridError):
            return self.trouble
        if self.trouble is not None:
            raise self.trouble
        return super().get(ids, selection, want, stamp)


class Troubles:
    """An opener that remembers its shards by number, in the order in which they were opened."""

    def __init__(self) -> None:
        self.made: dict[str, list[Troubled]] = {}

    def __call__(self, opened: Opened[NamespaceSpec]) -> SemanticShard:
        shard = Troubled(CONFIG, opened.clock)
        self.made.setdefault(opened.folder.name, []).append(shard)
        return shard


@pytest.mark.parametrize("way", ["search", "get"])
def test_a_shard_that_answers_no_read_is_named_and_opened_anew(way: str) -> None:
    async def claim() -> None:
        troubles = Troubles()
        host = host_of(troubles)
        await host.appoint(appointment(1))
        await warm(host, 1, 2, 3)
        troubles.made["s3"][0].trouble = Unavailable("s3", "its journal failed")
        outcome: object
        if way == "search":
            outcome = port.decode_answers(await host.search(search(1, 2, 3)))[0]
        else:
            outcome = port.decode_found(await host.get(get(1, 3)))[0]
        assert isinstance(outcome, Failed)
        assert str(outcome.rebuild()) == (
            "shard semantic/notes/3 is unavailable: its journal failed"
        )
        await warm(host, 1, 2, 3)
        assert [len(troubles.made[name]) for name in ("s2", "s3")] == [1, 2]
        await asyncio.to_thread(host.close)

    run(claim)


@pytest.mark.parametrize("way", ["search", "get"])
def test_a_bug_in_one_shard_fails_only_what_asked_for_it(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def claim() -> None:
        troubles = Troubles()
        host = host_of(troubles)
        await host.appoint(appointment(1))
        await warm(host, 1, 2, 3)
        troubles.made["s3"][0].trouble = ZeroDivisionError("a bug")
        outcomes: Sequence[object]
        if way == "search":
            items = [port.SearchItem(NOTES, 1, (n,), None, queries(1)) for n in (2, 3, 2)]
            call = port.encode(port.SearchCall(1, items))
            outcomes = port.decode_answers(await host.search(call))
        else:
            reads = [
                port.GetItem(NOTES, 1, ((n, "a"),), Selection(), Want.ID, None) for n in (2, 3, 2)
            ]
            outcomes = port.decode_found(await host.get(port.encode(port.GetCall(1, reads))))
        assert [isinstance(outcome, Done) for outcome in outcomes] == [True, False, True]
        assert isinstance(outcomes[1], Failed)
        assert str(outcomes[1].rebuild()) == (
            "shard semantic/notes/3 is unavailable: internal error; see the host's log"
        )
        assert "ZeroDivisionError" in caplog.text
        assert len(troubles.made["s3"]) == 1, "opened anew it would have the same bug"
        await asyncio.to_thread(host.close)

    run(claim)


class Slow(MemoryShard):
    """A shard that finishes no search before it is told to."""

    go = threading.Event()

    def search(self, queries: Sequence[Query], stamp: Stamp) -> list[Answer | MindgridError]:
        self.go.wait(10)
        return super().search(queries, stamp)


def test_heavy_searches_leave_the_threads_of_the_others_free() -> None:
    async def claim() -> None:
        slow, quick = Slow(CONFIG, SystemClock()), MemoryShard(CONFIG, SystemClock())
        host = host_of(lambda opened: slow if opened.folder.name == "s0" else quick)
        await host.appoint(appointment(1))
        await warm(host, 1, 0, 1)
        heavy = [asyncio.create_task(host.search(search(1, 0), heavy=True)) for _ in range(8)]
        await asyncio.sleep(0.05)
        found = port.decode_answers(await asyncio.wait_for(host.search(search(1, 1)), 5))
        assert all(isinstance(outcome, Done) for outcome in found)
        assert not any(task.done() for task in heavy)
        slow.go.set()
        await asyncio.gather(*heavy)
        await asyncio.to_thread(host.close)

    run(claim)


class Late(MemoryShard):
    """A shard that is told when its commits are durable."""

    def __init__(self, opened: Opened[NamespaceSpec]) -> None:
        super().__init__(CONFIG, opened.clock)
        self.pending: list[Future[Result]] = []

    def submit(self, command: Command) -> Future[Result]:
        self.pending.append(Future())
        return self.pending[-1]


async def late() -> tuple[LocalHost, list[Late]]:
    """Return a host with an open shard, and the shards it has opened."""
    made: list[Late] = []

    def opener(opened: Opened[NamespaceSpec]) -> SemanticShard:
        made.append(Late(opened))
        return made[-1]

    host = host_of(opener)
    await host.appoint(appointment(1))
    await warm(host, 1, 0)
    return host, made


def test_a_write_whose_caller_left_is_ended_by_the_shard_and_not_by_the_caller() -> None:
    async def claim() -> None:
        host, made = await late()
        write = port.Write(ShardKey(NOTES, 1, 0), Upsert("t", tuple(drafts(1))))
        call = port.encode(port.CommitCall(1, [write]))
        leaving = asyncio.create_task(host.commit(call))
        while not made[0].pending:
            await asyncio.sleep(0.001)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert leaving.cancelled()
        made[0].pending[0].set_result(Upserted((1,), SystemClock().now()))
        staying = asyncio.create_task(host.commit(call))
        while len(made[0].pending) < 2:
            await asyncio.sleep(0.001)
        made[0].pending[1].set_exception(ZeroDivisionError("a bug"))
        outcome = port.decode_written(await staying)[0]
        assert isinstance(outcome, Failed)
        assert "internal error" in str(outcome.rebuild())
        await asyncio.to_thread(host.close)

    run(claim)


def test_a_shard_that_refused_a_write_and_still_answers_stays_open() -> None:
    async def claim() -> None:
        host, made = await late()
        write = port.Write(ShardKey(NOTES, 1, 0), Upsert("t", tuple(drafts(1))))
        call = asyncio.create_task(host.commit(port.encode(port.CommitCall(1, [write]))))
        while not made[0].pending:
            await asyncio.sleep(0.001)
        made[0].pending[0].set_exception(Unavailable("s0", "the disk is full"))
        assert isinstance(port.decode_written(await call)[0], Failed)
        await warm(host, 1, 0)
        assert len(made) == 1
        await asyncio.to_thread(host.close)

    run(claim)


def test_an_opening_that_nobody_waits_for_any_more_is_not_given_up() -> None:
    gate = threading.Event()

    def opener(opened: Opened[NamespaceSpec]) -> SemanticShard:
        gate.wait(10)
        return MemoryShard(CONFIG, opened.clock)

    async def claim() -> None:
        host = host_of(opener)
        await host.appoint(appointment(1))
        leaving = [asyncio.create_task(warm(host, 1, number)) for number in range(8)]
        await asyncio.sleep(0.05)
        for task in leaving:
            task.cancel()
        await asyncio.wait(leaving)
        gate.set()
        await asyncio.wait_for(warm(host, 1, *range(8)), 5)
        outcomes = port.decode_answers(await host.search(search(1, *range(8))))
        assert all(isinstance(outcome, Done) for outcome in outcomes)
        await asyncio.to_thread(host.close)

    run(claim)


def test_a_predecessor_is_ended_before_the_appointment_is_answered(host: LocalHost) -> None:
    async def claim() -> None:
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
            started_at = psutil.Process(process.pid).create_time()
            former = Process(this_process().machine, process.pid, started_at)
            await host.appoint(appointment(1, predecessors=(former,)))
            assert process.wait(1) == -9

    run(claim)


def test_a_stranger_with_the_number_of_a_former_process_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        started_at = psutil.Process(process.pid).create_time()
        machine = this_process().machine
        assert end(Process(machine, process.pid, started_at - 60))
        assert end(Process("another machine", process.pid, started_at))
        assert process.poll() is None
        process.kill()


def test_status_lists_the_shards_that_were_asked_for(host: LocalHost) -> None:
    async def claim() -> None:
        await host.appoint(appointment(1))
        assert port.decode_status(await host.status()).shards == []
        await warm(host, 1, 3, 5)
        status = port.decode_status(await host.status())
        assert [str(report.shard) for report in status.shards] == [
            "semantic/notes/3",
            "semantic/notes/5",
        ]
        assert all(report.status is not None for report in status.shards)
        assert status.rss_bytes > 0

    run(claim)


def test_two_shards_open_at_the_same_time() -> None:
    both = threading.Barrier(2)

    def opener(opened: Opened[NamespaceSpec]) -> SemanticShard:
        both.wait(5)
        return MemoryShard(CONFIG, opened.clock)

    async def claim() -> None:
        host = host_of(opener)
        await host.appoint(appointment(1))
        await asyncio.wait_for(warm(host, 1, 0, 1), 5)
        await asyncio.to_thread(host.close)

    run(claim)


def test_errors_travel_as_their_fields() -> None:
    outcomes: list[port.AnswerOutcome] = [port.failed(NotFound("namespace", "a/b")), Opening()]
    failed, opening = port.decode_answers(port.encode(outcomes))
    assert isinstance(failed, Failed)
    assert (
        str(failed.rebuild()) == "namespace 'a/b' does not exist; the configuration says which do"
    )
    assert isinstance(opening, Opening)
