"""A host: under which epochs it works, what it lets go of, and what it refuses."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import psutil  # type: ignore[import-untyped,unused-ignore]
import pytest
from tests.support.grids import CONFIG, drafts, namespace, queries, run

from mindgrid.cluster import port
from mindgrid.cluster.host import Host, Opened
from mindgrid.cluster.port import Done, Failed, Opening, ShardKey
from mindgrid.cluster.process import Process, end, this_process
from mindgrid.cluster.spec import Bounds, NamespaceKey
from mindgrid.cluster.table import Holding, Seat, Table, route_of
from mindgrid.shards.driver import SemanticShard
from mindgrid.shards.errors import Moved, NotFound, Unavailable
from mindgrid.shards.memory import MemoryShard
from mindgrid.shards.types import Upsert

NOTES = NamespaceKey("semantic", "notes")
HOLDING = Holding(namespace("notes", 8), 1)


class Shards:
    """An opener that remembers which shards are open."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.epochs: list[int] = []

    def __call__(self, opened: Opened) -> SemanticShard:
        self.open.add(opened.folder.name)
        self.epochs.append(opened.epoch)
        return _Noted(self, opened)


class _Noted(MemoryShard):
    def __init__(self, shards: Shards, opened: Opened) -> None:
        super().__init__(CONFIG, opened.clock)
        self._shards, self._name = shards, opened.folder.name

    def close(self) -> None:
        self._shards.open.discard(self._name)
        super().close()


@pytest.fixture
def shards() -> Shards:
    return Shards()


@pytest.fixture
def host(shards: Shards) -> Iterator[Host]:
    host = Host(shards)
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
    return port.encode(port.SearchCall(epoch, False, [item]))


async def warm(host: Host, epoch: int, *numbers: int) -> None:
    keys = [ShardKey(NOTES, 1, number) for number in numbers]
    await host.warm(port.encode(port.WarmCall(epoch, keys)))


def test_only_calls_of_its_own_epoch_are_answered(host: Host) -> None:
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


def test_an_older_appointment_is_refused(host: Host) -> None:
    async def claim() -> None:
        await host.appoint(appointment(4))
        with pytest.raises(Moved):
            await host.appoint(appointment(3))
        health = port.decode_health(await host.appoint(appointment(4)))
        assert (health.epoch, health.process) == (4, this_process())

    run(claim)


def test_a_closed_shard_answers_opening_at_once_and_is_open_after_warm(host: Host) -> None:
    async def claim() -> None:
        await host.appoint(appointment(1))
        assert port.decode_answers(await host.search(search(1))) == [Opening(), Opening()]
        await warm(host, 1, 0)
        answers = port.decode_answers(await host.search(search(1)))
        assert all(isinstance(answer, Done) for answer in answers)

    run(claim)


def test_a_shard_of_another_host_or_generation_has_moved(host: Host) -> None:
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
    host: Host, shards: Shards
) -> None:
    async def claim() -> None:
        await host.appoint(appointment(1))
        await warm(host, 1, *range(8))
        assert len(shards.open) == 8
        await host.appoint(appointment(2, "host-0", "host-1"))
        homes = route_of(HOLDING, ("host-0", "host-1")).hosts
        assert shards.open == {f"s{n}" for n, home in enumerate(homes) if home == "host-0"}

    run(claim)


def test_a_new_appointment_leaves_open_what_stays(host: Host, shards: Shards) -> None:
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


def test_a_host_whose_clock_is_off_refuses_writes_and_answers_reads(host: Host) -> None:
    async def claim() -> None:
        await host.appoint(appointment(1))
        await warm(host, 1, 0)
        write = port.WriteUpsert(ShardKey(NOTES, 1, 0), Upsert("t", tuple(drafts(1))))
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


def test_a_predecessor_is_ended_before_the_appointment_is_answered(host: Host) -> None:
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


def test_status_lists_the_shards_that_were_asked_for(host: Host) -> None:
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

    def opener(opened: Opened) -> SemanticShard:
        both.wait(5)
        return MemoryShard(CONFIG, opened.clock)

    async def claim() -> None:
        host = Host(opener)
        await host.appoint(appointment(1))
        await asyncio.wait_for(warm(host, 1, 0, 1), 5)
        await asyncio.to_thread(host.close)

    run(claim)


def test_errors_travel_as_their_fields() -> None:
    outcomes: list[port.AnswerOutcome] = [port.failed(NotFound("namespace", "a/b")), Opening()]
    failed, opening = port.decode_answers(port.encode(outcomes))
    assert isinstance(failed, Failed)
    assert str(failed.rebuild()) == "namespace 'a/b' does not exist"
    assert isinstance(opening, Opening)
