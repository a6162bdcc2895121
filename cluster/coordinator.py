"""The coordinator: one actor that owns the catalog, keeps the hosts running and hands out routes.

It remembers nothing but what the storage folder holds, so it may be killed at any moment: Ray
starts it again, it takes the catalog's lock, and a look at each host tells it where it was. While
it is away searches and writes go on; only what has moved waits for it.

Every `_LOOK_EVERY_S`, and whenever a caller suspects a host, it looks at all hosts:

    no actor        ─► create it
    silent too long ─► end its process; Ray starts it anew
    other process, other epoch, or an older layout than the catalog's
                    ─► raise the epoch durably, let it end its predecessors, appoint it
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import ray

from mindgrid.cluster import port
from mindgrid.cluster.catalog import Catalog, HostEntry
from mindgrid.cluster.client import Grid
from mindgrid.cluster.committer import Committer
from mindgrid.cluster.gate import HostAway
from mindgrid.cluster.joining import check_joined
from mindgrid.cluster.openers import Opener, open_shard
from mindgrid.cluster.port import Doubt
from mindgrid.cluster.process import Process, end, this_process, watch_parent
from mindgrid.cluster.remote import (
    RAY_NAMESPACE,
    Actor,
    ActorPlace,
    RemotePort,
    detached,
    find_actor,
    ours,
    start_host,
)
from mindgrid.cluster.spec import Bounds, GridSpec
from mindgrid.cluster.table import Routes, Table
from mindgrid.shards.clock import SystemClock
from mindgrid.shards.errors import ConfigError, MindgridError, Unavailable
from mindgrid.shards.types import Answer, Query

log = logging.getLogger(__name__)

COORDINATOR = "coordinator"
DISK_PREFIX = "mindgrid_disk"
"""Custom resources whose names begin so stand for one disk each; hosts are bound to them."""


class HostView(msgspec.Struct, frozen=True):
    """What the coordinator knows of a host; `trouble` is empty while it serves."""

    name: str
    epoch: int
    processes: tuple[Process, ...]
    trouble: str


class CoordinatorStatus(msgspec.Struct, frozen=True):
    """The coordinator's process and its view of the cluster."""

    process: Process
    version: int
    hosts: tuple[HostView, ...]


@dataclass(slots=True)
class _Watch:
    """What was seen of one host since the coordinator started."""

    port: RemotePort
    heard_at: float
    skew_us: int = 0
    trouble: str = "it is being started"
    doubts: tuple[Doubt, ...] = ()


class Coordinator:
    """The actor behind the name `coordinator`."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, storage: str, ray_namespace: str = RAY_NAMESPACE, opener: Opener = open_shard
    ) -> None:
        """Begin to look after the hosts.

        Nothing here may raise, or Ray never starts this actor again. A coroutine, so that Ray runs
        it on the actor's loop and the looking begins before anybody calls.
        """
        watch_parent(_exit)
        self._storage = Path(storage)
        self._ray_namespace = ray_namespace
        self._opener = opener
        self._clock = SystemClock()
        self._catalog: Catalog | None = None
        self._trouble: MindgridError = Unavailable(COORDINATOR, "it is starting")
        self._watches: dict[str, _Watch] = {}
        self._looks = Looks()
        self._nudge = asyncio.Event()
        self._looked = asyncio.Event()
        self._table = (-1, b"")
        self._grid: Grid | None = None
        self._changing = asyncio.Lock()
        self._routes = Routes(Table(-1, Bounds(), (), ()))
        self._committer = Committer(
            self._newest_routes, lambda host: RemotePort(host, ray_namespace)
        )
        self._clearing: asyncio.Task[None] | None = None
        self._looking = asyncio.create_task(self._look_after())

    async def configure(self, spec: GridSpec) -> None:
        """Take the configuration and make it durable; raises ConfigError if it does not fit."""
        check_storage(self._storage, spec.storage)
        catalog = await self._loaded(_START_WAIT_S)
        async with self._changing:
            await asyncio.to_thread(catalog.configure, spec)
        # Here and not by the next look, so that no table has namespaces and no hosts.
        await self._add_hosts(catalog)
        self._nudge.set()

    async def table(self, older_than: int, suspect: str) -> bytes:
        """Return the routing table, encoded; see `Directory.table`."""
        catalog = await self._loaded(_START_WAIT_S)
        if suspect or catalog.table_version <= older_than:
            await self._look_again()
        if self._table[0] != catalog.table_version:
            table = catalog.table()
            self._table = (table.version, port.encode(table))
        return self._table[1]

    async def commit(self, call: bytes) -> bytes:
        """Carry out a commit that concerns several shards; see `Directory.commit`."""
        await self._loaded(_START_WAIT_S)
        return port.encode(await self._committer.commit(port.decode_ordered(call)))

    async def search(self, namespace: str, query: Query) -> Answer:
        """Answer one embedded query by the same fan-out as every other caller's."""
        if self._grid is None:
            self._grid = Grid(_Own(self, self._ray_namespace))
        return await self._grid.search(namespace, query)

    async def status(self) -> bytes:
        """Return a CoordinatorStatus, encoded."""
        catalog = await self._loaded(_START_WAIT_S)
        hosts = tuple(
            HostView(entry.name, entry.epoch, entry.processes, self._watch(entry).trouble)
            for entry in catalog.hosts
        )
        return port.encode(CoordinatorStatus(this_process(), catalog.table_version, hosts))

    # The loop

    async def _look_after(self) -> None:
        while True:
            self._nudge.clear()
            try:
                if self._catalog is None:
                    self._catalog = await asyncio.to_thread(Catalog, self._storage, self._clock)
                await self._look_at_all(self._catalog)
            except MindgridError as error:
                # Locked by a former coordinator that is about to exit, a full disk, damage.
                self._trouble = error
                log.warning("%s", error)
            except Exception:
                # A bug must not leave the cluster without anyone who brings hosts back.
                log.exception("looking after the hosts failed")
            self._looked.set()
            self._looked = asyncio.Event()
            try:
                await asyncio.wait_for(self._nudge.wait(), _LOOK_EVERY_S)
            except TimeoutError:
                continue

    async def _look_at_all(self, catalog: Catalog) -> None:
        await self._add_hosts(catalog)
        entries = {entry.name: entry for entry in catalog.hosts}
        await self._looks.round(
            entries, lambda name: self._look_at(catalog, entries[name]), _ROUND_WAIT_S
        )
        doubts = [doubt for watch in self._watches.values() for doubt in watch.doubts]
        if doubts and (self._clearing is None or self._clearing.done()):
            # Not waited for: a shard that is away must not keep the hosts from being looked after.
            self._clearing = asyncio.create_task(self._committer.clear(doubts))

    async def _add_hosts(self, catalog: Catalog) -> None:
        if catalog.is_empty:
            return
        resources = await asyncio.to_thread(ray.cluster_resources)
        disks = sorted(name for name in resources if name.startswith(DISK_PREFIX))
        wanted = catalog.hosts_wanted or max(1, int(resources.get("CPU", 1)) // 2)
        if catalog.hosts and not catalog.hosts_wanted:
            # A node that is away for a moment must not change the layout, nor one that joins.
            return
        entries = tuple(
            HostEntry(f"host-{number}", disks[number % len(disks)] if disks else "")
            for number in range(wanted)
        )
        async with self._changing:
            await asyncio.to_thread(catalog.add_hosts, entries)

    async def _look_at(self, catalog: Catalog, entry: HostEntry) -> None:
        watch = self._watch(entry)
        try:
            health = await self._health(entry, watch)
            fresh = (
                health.process in entry.processes
                and len(entry.processes) == 1
                and health.epoch == entry.epoch >= catalog.layout_version
            )
            if not fresh:
                await self._appoint(catalog, entry, watch, health.process)
            watch.trouble = ""
        except MindgridError as error:
            watch.trouble = str(error)
            silent_s = time.monotonic() - watch.heard_at
            if silent_s > catalog.bounds.silence_max_s:
                watch.heard_at = time.monotonic()
                await self._end_silent(entry, silent_s)

    async def _health(self, entry: HostEntry, watch: _Watch) -> port.HostHealth:
        """Return the host's health and note how far its clock is off for certain."""
        place = ActorPlace(self._ray_namespace, entry.resource)
        if watch.trouble:
            await asyncio.to_thread(start_host, entry.name, place, self._opener)
        before = self._clock.now()
        answer = await _within(entry.name, _HEALTH_WAIT_S, watch.port.health(watch.skew_us))
        after = self._clock.now()
        watch.heard_at = time.monotonic()
        health = port.decode_health(answer)
        ahead, doubt = health.now - (before + after) // 2, (after - before) // 2
        watch.skew_us = max(0, abs(ahead) - doubt) * (1 if ahead > 0 else -1)
        watch.doubts = health.doubts
        return health

    async def _appoint(
        self, catalog: Catalog, entry: HostEntry, watch: _Watch, process: Process
    ) -> None:
        """Make this process the host, in three durable steps, so that no former one is forgotten.

        Noted beside its predecessors under a new epoch, told, and then noted alone. Died in
        between, this starts over with all of them.
        """
        former = tuple(other for other in entry.processes if other != process)
        async with self._changing:
            epoch = await asyncio.to_thread(catalog.appoint, entry.name, (*former, process))
            table = catalog.table()
        appointment = port.Appointment(entry.name, epoch, table, str(self._storage), former)
        log.info("appointing %s, process %d, epoch %d", entry.name, process.pid, epoch)
        answer = await _within(
            entry.name, _APPOINT_WAIT_S, watch.port.appoint(port.encode(appointment))
        )
        if port.decode_health(answer).process != process:
            raise Unavailable(entry.name, "it restarted while it was appointed")
        async with self._changing:
            await asyncio.to_thread(catalog.confirm, entry.name, epoch, process)

    async def _end_silent(self, entry: HostEntry, silent_s: float) -> None:
        """End a host that hangs or is stopped; Ray starts it anew."""
        log.error("%s is silent for %.0f s; its process is ended", entry.name, silent_s)
        for process in entry.processes:
            await asyncio.to_thread(end, process)

    def _watch(self, entry: HostEntry) -> _Watch:
        watch = self._watches.get(entry.name)
        if watch is None:
            way = RemotePort(entry.name, self._ray_namespace)
            watch = self._watches[entry.name] = _Watch(way, time.monotonic())
        return watch

    def _newest_routes(self) -> Routes:
        if self._catalog is None:
            raise self._trouble
        if self._routes.version != self._catalog.table_version:
            self._routes = Routes(self._catalog.table())
        return self._routes

    async def _loaded(self, wait_s: float) -> Catalog:
        deadline = time.monotonic() + wait_s
        while self._catalog is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise self._trouble
            await self._look_again(left_s)
        return self._catalog

    async def _look_again(self, wait_s: float = 2.0) -> None:
        """Have a look at all hosts begun now, and wait for its end, but not for long."""
        looked = self._looked
        self._nudge.set()
        try:
            await asyncio.wait_for(looked.wait(), wait_s)
        except TimeoutError:
            return


class Looks:
    """A look at each host, in a task of its own: a slow one delays no other host's next look."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[None]] = {}

    async def round(
        self,
        names: Iterable[str],
        look: Callable[[str], Coroutine[None, None, None]],
        wait_s: float,
    ) -> None:
        """Begin a look at every host that no look is under way at; wait, but not for the slow."""
        for name in names:
            if name not in self._running:
                task = self._running[name] = asyncio.create_task(look(name))
                task.add_done_callback(partial(self._done, name))
        if self._running:
            await asyncio.wait(self._running.values(), timeout=wait_s)

    def _done(self, name: str, task: asyncio.Task[None]) -> None:
        del self._running[name]
        if not task.cancelled() and (bug := task.exception()):
            # It must not leave the host, nor the others, without anyone who brings them back.
            log.error("looking after %s failed", name, exc_info=bug)


def check_storage(own: Path, wanted: Path) -> None:
    """Refuse a configuration with another storage folder than the one that is served."""
    if own.resolve() != wanted.resolve():
        raise ConfigError(
            "storage.path",
            f"is {wanted}, but this Ray cluster's mindgrid serves {own}; write that folder, or "
            "use another Ray cluster",
        )


class _Own:
    """The `Directory` of the coordinator's own grid."""

    def __init__(self, coordinator: Coordinator, ray_namespace: str) -> None:
        self._coordinator = coordinator
        self._ray_namespace = ray_namespace

    async def table(self, older_than: int, suspect: str) -> Table:
        return port.decode_table(await self._coordinator.table(older_than, suspect))

    def port(self, host: str) -> port.Port:
        return RemotePort(host, self._ray_namespace)

    async def commit(self, call: bytes) -> bytes:
        return await self._coordinator.commit(call)


class RayDirectory:
    """The `Directory` of a Ray cluster: asks the coordinator, and starts a missing one.

    It can do that only if it knows the storage folder.
    """

    def __init__(self, ray_namespace: str = RAY_NAMESPACE, storage: Path | None = None) -> None:
        self._ray_namespace = ray_namespace
        self._storage = storage
        self._coordinator: Actor = None

    async def table(self, older_than: int, suspect: str) -> Table:
        """See `Directory.table`; raises ClusterReplaced too."""
        actor = self._coordinator or await asyncio.to_thread(self._find)
        self._coordinator = actor
        try:
            answer = ours(COORDINATOR, actor.table.remote(older_than, suspect))
            return port.decode_table(await _within(COORDINATOR, _TABLE_WAIT_S, answer))
        except Unavailable:
            self._coordinator = None
            await asyncio.to_thread(check_joined)
            raise

    def port(self, host: str) -> port.Port:
        """See `Directory.port`."""
        return RemotePort(host, self._ray_namespace)

    async def commit(self, call: bytes) -> bytes:
        """See `Directory.commit`; raises HostAway while there is no coordinator."""
        try:
            actor = self._coordinator or await asyncio.to_thread(self._find)
            self._coordinator = actor
            return bytes(await ours(COORDINATOR, actor.commit.remote(call)))
        except Unavailable as error:
            if error.what != COORDINATOR:
                raise
            self._coordinator = None
            raise HostAway(error.what, error.reason) from error

    async def status(self) -> CoordinatorStatus:
        """Return the coordinator's view of the cluster."""
        actor = await asyncio.to_thread(self._find)
        answer = await _within(COORDINATOR, _TABLE_WAIT_S, ours(COORDINATOR, actor.status.remote()))
        return msgspec.msgpack.decode(answer, type=CoordinatorStatus)

    def _find(self) -> Actor:
        if self._storage is None:
            return find_actor(COORDINATOR, self._ray_namespace)
        return ensure_coordinator(self._storage, self._ray_namespace)


def ensure_coordinator(
    storage: Path, ray_namespace: str = RAY_NAMESPACE, opener: Opener = open_shard
) -> Actor:
    """Return the coordinator's actor, created if there is none. Blocks; Ray must be connected."""
    kind = detached(ray.remote(Coordinator), COORDINATOR, ActorPlace(ray_namespace))
    return kind.remote(str(storage.absolute()), ray_namespace, opener)


def configure(spec: GridSpec, ray_namespace: str = RAY_NAMESPACE) -> Actor:
    """Start the coordinator if need be and give it the configuration. Blocks.

    Raises ConfigError if that does not fit the stored data, and what keeps the catalog from being
    opened: StorageLocked, Corruption, Unavailable.
    """
    actor = ensure_coordinator(spec.storage, ray_namespace)
    # The actor's process may have another working folder.
    spec = replace(spec, storage=spec.storage.absolute())
    asyncio.run(ours(COORDINATOR, actor.configure.remote(spec)))
    return actor


async def _within(what: str, seconds: float, work: Any) -> bytes:
    try:
        async with asyncio.timeout(seconds):
            return bytes(await work)
    except TimeoutError:
        raise Unavailable(what, f"it does not answer within {seconds:g} s") from None


def _exit() -> None:
    """End this process at once, so that the next coordinator finds the catalog unlocked."""
    log.error("the raylet is gone; this coordinator exits")
    os._exit(1)


_LOOK_EVERY_S = 0.5
_ROUND_WAIT_S = 1.0
_HEALTH_WAIT_S = 2.0
_APPOINT_WAIT_S = 30.0
_START_WAIT_S = 10.0
_TABLE_WAIT_S = 15.0
