"""A cluster over Ray: what is killed is back by itself, and callers only notice a delay."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest
import ray
from tests.support.grids import drafts, namespace, queries

import mindgrid
from mindgrid.cluster.client import Grid
from mindgrid.cluster.coordinator import (
    COORDINATOR,
    CoordinatorStatus,
    RayDirectory,
    configure,
)
from mindgrid.cluster.handle import Handle
from mindgrid.cluster.placement import host_of
from mindgrid.cluster.spec import Bounds, GridSpec, LogSpec, NamespaceKey, shard_folder
from mindgrid.shards.config import Driver
from mindgrid.shards.episodic.types import Event, EventAction, EventDraft, EventRange
from mindgrid.shards.errors import (
    ConfigError,
    Corruption,
    CursorMismatch,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from mindgrid.shards.types import Answer, Draft, Query, Selection

pytestmark = pytest.mark.ray


@dataclass
class Server:
    """A configured cluster of two hosts in a Ray namespace of its own."""

    spec: GridSpec
    ray_namespace: str
    handle: Handle

    def status(self) -> CoordinatorStatus:
        return asyncio.run(RayDirectory(self.ray_namespace).status())

    def pid_of(self, host: str) -> int:
        return next(h.processes[0].pid for h in self.status().hosts if h.name == host)

    def kill_hosts(self) -> None:
        for host in self.status().hosts:
            os.kill(host.processes[-1].pid, signal.SIGKILL)

    def is_well(self) -> bool:
        try:
            return all(not host.trouble for host in self.status().hosts)
        except Unavailable:
            return False

    def home(self, key: NamespaceKey, shard: int) -> str:
        return host_of(key, shard, [host.name for host in self.status().hosts])


def test_a_process_is_in_one_cluster_and_is_told_so(ray_cluster: str) -> None:
    with mindgrid.connect(ray_cluster, ray_namespace=f"t-{uuid.uuid4().hex[:8]}"):
        pass
    for address in ("127.0.0.1:1", "10.1.2.3:6379"):
        with pytest.raises(Unavailable, match=f"{address}.*can be in one only"):
            mindgrid.connect(address)


LANCE = ("tasks", "kill", "stop", "both", "steady", "again", "damaged", "kept", "crowd")


@pytest.fixture(scope="module")
def server(ray_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests: what they kill comes back, and each has a namespace of its own."""
    ray_namespace = f"t-{uuid.uuid4().hex[:8]}"
    spec = GridSpec(
        tmp_path_factory.mktemp("storage"),
        (
            *(namespace(name, 3) for name in ("basic", "texts", "mirror")),
            *(namespace(name, 3, Driver.LANCE) for name in LANCE),
        ),
        hosts=2,
        bounds=Bounds(silence_max_s=5.0, deadline_s=90.0),
        logs=tuple(
            LogSpec(NamespaceKey("episodic", name)) for name in ("told", "followed", "closed")
        ),
    )
    configure(spec, ray_namespace)
    handle = mindgrid.connect(ray_namespace=ray_namespace)
    server = Server(spec, ray_namespace, handle)
    eventually(server.is_well)
    yield server
    handle.close()
    for name in (COORDINATOR, "host-0", "host-1"):
        ray.kill(ray.get_actor(name, namespace=ray_namespace), no_restart=True)


def eventually(claim: Callable[[], bool], within_s: float = 90.0) -> None:
    deadline = time.monotonic() + within_s
    while not claim():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.1)


def test_records_are_written_found_and_deleted_over_handles(server: Server) -> None:
    records = drafts(60)
    ids, result = server.handle.upsert("basic", records)
    assert ids == tuple(record.id for record in records)
    assert set(result.versions) == {1}
    answer = server.handle.search("basic", Query(records[7].vector))
    assert answer.hits[0].id == "r00007"
    assert len(answer.hits) == 10
    assert server.handle.delete("basic", "r00007").existed
    assert server.handle.get("basic", ["r00007", "r00008"])[0] is None
    assert server.handle.count("basic") == 59
    assert server.handle.count("basic", Selection(include_invalidated=True)) == 60


def test_events_are_appended_read_followed_and_expired_over_handles(server: Server) -> None:
    logs = server.handle.logs
    with logs.tail("told") as tail:
        written = [logs.append("told", said(n, 10)).events for n in range(3)]
        events = [event for part in written for event in part]
        assert [event.cursor for event in events] == list(range(1, 31))
        assert [next(tail) for _ in range(7)] == events[:7]
        assert tail.last_cursor == 7
        assert [next(tail) for _ in range(23)] == events[7:]
    assert list(logs.range("told")) == events
    assert list(logs.range("told", EventRange(after_cursor=5, reverse=True), 3)) == events[:26:-1]
    assert logs.expire("told", EventAction.HARD_DELETE, 100, before_cursor=11).affected == 10
    with logs.tail("told", historical=True) as tail:
        assert next(tail) == events[10]
        assert tail.next(0.0) == events[11:]
        assert tail.next(0.1) == []
    with pytest.raises(CursorMismatch):
        logs.append("told", said(0, 1), expected_cursor=29)


def test_a_tail_that_is_closed_ends_whoever_iterates_over_it(server: Server) -> None:
    tail = server.handle.logs.tail("closed")
    seen: list[Event] = []
    iterating = threading.Thread(target=lambda: seen.extend(tail))
    iterating.start()
    written = server.handle.logs.append("closed", said(0, 2)).events
    eventually(lambda: seen == list(written))
    tail.close()
    iterating.join(20)
    assert not iterating.is_alive()
    with pytest.raises(Unavailable, match="this tail is closed"):
        tail.next(1.0)


def test_a_tail_outlives_the_host_and_misses_nothing(server: Server) -> None:
    logs = server.handle.logs
    home = server.home(NamespaceKey("episodic", "followed"), 0)
    with logs.tail("followed") as tail:
        for round in range(3):
            if round:
                os.kill(server.pid_of(home), signal.SIGKILL)
            told = logs.append("followed", said(round, 20)).events
            assert [next(tail) for _ in told] == list(told)
            eventually(server.is_well)
    assert [event.cursor for event in logs.range("followed")] == list(range(1, 61))


def said(round: int, count: int) -> list[EventDraft]:
    return [EventDraft("message", f"{round}/{n}".encode()) for n in range(count)]


def test_texts_are_embedded_as_the_configuration_says(server: Server) -> None:
    texts = ["split a string by a pattern", "open a file", "sort a list"]
    missing = np.empty(0, dtype=np.float32)
    server.handle.upsert("texts", [Draft(text[:4], text, missing) for text in texts])
    answer = server.handle.search("texts", Query(missing, top_k=1), "open a file")
    assert [(hit.id, hit.score) for hit in answer.hits] == [("open", 1.0)]


def test_errors_are_those_of_every_other_way_in(server: Server) -> None:
    with pytest.raises(NotFound, match="semantic/nothing"):
        server.handle.get("nothing", ["a"])
    with pytest.raises(InvalidRequest, match="top_k"):
        server.handle.search("basic", msgspec.structs.replace(queries(1)[0], top_k=10_001))


def test_tasks_connect_by_themselves(server: Server) -> None:
    server.handle.upsert("tasks", drafts(20))

    def task(ray_namespace: str) -> list[str]:
        with mindgrid.connect(ray_namespace=ray_namespace) as handle:
            return [hit.id for hit in handle.search("tasks", queries(1)[0]).hits]

    ids = ray.get(ray.remote(num_cpus=0)(task).remote(server.ray_namespace))
    assert ids == [hit.id for hit in server.handle.search("tasks", queries(1)[0]).hits]


def test_the_coordinator_answers_searches_as_every_caller_does(server: Server) -> None:
    server.handle.upsert("mirror", drafts(60))
    actor = ray.get_actor(COORDINATOR, namespace=server.ray_namespace)
    for query in queries(5):
        ours_: Answer = ray.get(actor.search.remote("mirror", query))
        theirs = server.handle.search("mirror", query)
        assert [(h.id, h.score) for h in ours_.hits] == [(h.id, h.score) for h in theirs.hits]


def test_a_killed_host_is_back_by_itself_and_nothing_acknowledged_is_lost(server: Server) -> None:
    written: list[str] = []
    pid = server.pid_of(server.home(NamespaceKey("semantic", "kill"), 0))
    for number, record in enumerate(drafts(60)):
        if number == 30:
            os.kill(pid, signal.SIGKILL)
        written += server.handle.upsert("kill", [record])[0]
    found = server.handle.get("kill", written)
    assert [record and record.version for record in found] == [1] * 60
    answer = server.handle.search("kill", Query(drafts(60)[3].vector))
    assert answer.hits[0].id == "r00003"


def test_every_host_killed_at_once_is_back(server: Server) -> None:
    server.handle.upsert("both", drafts(50))
    server.kill_hosts()
    started = time.monotonic()
    found = server.handle.get("both", [record.id for record in drafts(50)])
    assert None not in found
    print(f"back after {time.monotonic() - started:.1f} s")


def test_writers_under_a_kill_lose_nothing_and_write_nothing_twice(server: Server) -> None:
    async def write(grid: Grid, record: Draft) -> list[int]:
        return [(await grid.upsert("crowd", [record]))[1].versions[0] for _ in range(12)]

    async def claim() -> None:
        grid = Grid(RayDirectory(server.ray_namespace))
        writers = [asyncio.create_task(write(grid, record)) for record in drafts(8)]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(server.kill_hosts)
        for versions in await asyncio.gather(*writers):
            assert versions == list(range(1, 13))
        found = await grid.get("crowd", [record.id for record in drafts(8)])
        assert [record and record.version for record in found] == [12] * 8
        await grid.close()

    asyncio.run(claim())


def test_a_killed_coordinator_is_back_by_itself_and_disturbs_nobody(server: Server) -> None:
    server.handle.upsert("steady", drafts(10))
    eventually(server.is_well)
    before = server.status()
    os.kill(before.process.pid, signal.SIGKILL)
    server.handle.upsert("steady", drafts(20))
    assert len(server.handle.search("steady", queries(1)[0]).hits) == 10

    def is_back() -> bool:
        try:
            return server.status().process != before.process
        except Unavailable:
            return False

    eventually(is_back)
    eventually(server.is_well)
    after = server.status()
    assert [h.processes for h in after.hosts] == [h.processes for h in before.hosts]
    assert [h.epoch for h in after.hosts] == [h.epoch for h in before.hosts]
    assert after.version > before.version


def test_coordinator_and_host_killed_together_are_back(server: Server) -> None:
    server.handle.upsert("again", drafts(10))
    coordinator = server.status().process
    server.kill_hosts()
    os.kill(coordinator.pid, signal.SIGKILL)
    found = server.handle.get("again", [record.id for record in drafts(10)])
    assert None not in found


def test_a_stopped_host_is_ended_and_replaced(server: Server) -> None:
    server.handle.upsert("stop", drafts(10))
    host = server.home(NamespaceKey("semantic", "stop"), 0)
    pid = server.pid_of(host)
    os.kill(pid, signal.SIGSTOP)
    found = server.handle.get("stop", [record.id for record in drafts(10)])
    assert None not in found
    assert server.pid_of(host) != pid


def test_a_damaged_shard_is_named_and_the_others_answer(server: Server) -> None:
    server.handle.upsert("damaged", drafts(50))
    server.handle.upsert("kept", drafts(10))
    server.kill_hosts()
    folder = shard_folder(server.spec.storage, NamespaceKey("semantic", "damaged"), 1, 1)
    journal = folder / "journal.sqlite"
    journal.write_bytes(b"not a database at all" * 1_000)
    with pytest.raises(Corruption, match=str(journal)):
        server.handle.search("damaged", queries(1)[0])
    assert None not in server.handle.get("kept", [record.id for record in drafts(10)])


def test_a_configuration_that_does_not_fit_is_refused_and_nothing_changes(server: Server) -> None:
    server.handle.upsert("kept", drafts(5))
    changed = replace(server.spec, namespaces=(namespace("kept", 4, Driver.LANCE),))
    with pytest.raises(ConfigError, match="mindgrid reshard semantic/kept"):
        configure(changed, server.ray_namespace)
    assert server.handle.get("kept", ["r00004"])[0] is not None


def test_an_added_namespace_is_served_without_a_restart(server: Server) -> None:
    more = replace(server.spec, namespaces=(*server.spec.namespaces, namespace("late", 2)))
    configure(more, server.ray_namespace)

    assert server.handle.upsert("late", drafts(3))[1].versions == (1, 1, 1)


def test_a_missing_coordinator_is_started_by_whoever_knows_the_storage(server: Server) -> None:
    server.handle.upsert("kept", drafts(10))
    actor = ray.get_actor(COORDINATOR, namespace=server.ray_namespace)
    ray.kill(actor, no_restart=True)
    storage = server.spec.storage
    with mindgrid.connect(ray_namespace=server.ray_namespace, storage=storage) as handle:
        assert None not in handle.get("kept", [record.id for record in drafts(10)])
