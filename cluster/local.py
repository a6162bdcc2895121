"""A whole cluster in this process, for tests and for programs that want no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mindgrid.cluster import port
from mindgrid.cluster.catalog import Catalog, HostEntry
from mindgrid.cluster.committer import Committer
from mindgrid.cluster.host import THREADS, Host
from mindgrid.cluster.openers import Opener, open_shard
from mindgrid.cluster.port import Port
from mindgrid.cluster.spec import GridSpec
from mindgrid.cluster.table import Routes, Table
from mindgrid.shards.clock import Clock, SystemClock
from mindgrid.shards.errors import Unavailable


class LocalCluster:
    """A `Directory` whose hosts live in this process, over the same catalog as a real one's.

    Use `async with`, or `start` and `close`.
    """

    def __init__(
        self, spec: GridSpec, opener: Opener = open_shard, clock: Clock | None = None
    ) -> None:
        """Take the storage folder's catalog; raises as `Catalog` and `Catalog.configure` do."""
        self._clock = clock or SystemClock()
        self._opener = opener
        self._catalog = Catalog(spec.storage, self._clock)
        try:
            self._catalog.configure(spec)
            names = tuple(f"host-{number}" for number in range(spec.hosts or 1))
            self._catalog.add_hosts(tuple(HostEntry(name) for name in names))
        except BaseException:
            self._catalog.close()
            raise
        self.hosts: dict[str, LocalHost] = {}
        self._committer = Committer(lambda: Routes(self._catalog.table()), self.port)

    async def start(self) -> None:
        """Start and appoint every host."""
        for entry in self._catalog.hosts:
            await self.restart(entry.name)

    async def restart(self, name: str) -> None:
        """Start a host anew with no shard open, as the coordinator does when one has died."""
        former = self.hosts.pop(name, None)
        if former is not None:
            await asyncio.to_thread(former.close)
        host = LocalHost(Host(self._opener, self._clock))
        process = port.decode_health(await host.health()).process
        epoch = self._catalog.appoint(name, (process,))
        table = self._catalog.table()
        storage = str(self._catalog.storage)
        await host.appoint(port.encode(port.Appointment(name, epoch, table, storage, ())))
        self.hosts[name] = host

    async def table(self, older_than: int, suspect: str) -> Table:
        """See `Directory.table`."""
        return self._catalog.table()

    def port(self, host: str) -> Port:
        """See `Directory.port`."""
        return _Way(self, host)

    async def commit(self, call: bytes) -> bytes:
        """See `Directory.commit`."""
        return port.encode(await self._committer.commit(port.decode_ordered(call)))

    async def clear(self) -> None:
        """End what was left in doubt, as the coordinator does when it looks at its hosts."""
        for host in list(self.hosts.values()):
            await self._committer.clear(port.decode_health(await host.health()).doubts)

    async def close(self) -> None:
        """Close all shards, and let go of the catalog."""
        await self._committer.close()
        for host in self.hosts.values():
            await asyncio.to_thread(host.close)
        self._catalog.close()

    async def __aenter__(self) -> LocalCluster:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class LocalHost:
    """A host with the threads that its calls run in, as an actor has them: it is its own port."""

    def __init__(self, host: Host) -> None:
        """Start the threads when they are needed."""
        self._host = host
        self._threads = {kind: ThreadPoolExecutor(n, kind) for kind, n in THREADS.items()}

    async def search(self, call: bytes, heavy: bool = False) -> bytes:
        """See `Port.search`."""
        return await self._run("heavy" if heavy else "search", self._host.search, call)

    async def get(self, call: bytes) -> bytes:
        """See `Port.get`."""
        return await self._run("get", self._host.get, call)

    async def scan(self, call: bytes) -> bytes:
        """See `Port.scan`."""
        return await self._run("scan", self._host.scan, call)

    async def events(self, call: bytes) -> bytes:
        """See `Port.events`."""
        return await self._run("events", self._host.events, call)

    async def follow(self, call: bytes) -> bytes:
        """See `Port.follow`."""
        return await self._run("follow", self._host.follow, call)

    async def commit(self, call: bytes) -> bytes:
        """See `Port.commit`."""
        return await self._run("commit", self._host.commit, call)

    async def transact(self, call: bytes) -> bytes:
        """See `Port.transact`."""
        return await self._run("transact", self._host.transact, call)

    async def warm(self, call: bytes) -> bytes:
        """See `Port.warm`."""
        return await self._run("warm", self._host.warm, call)

    async def appoint(self, appointment: bytes) -> bytes:
        """See `Port.appoint`."""
        return await self._run("control", self._host.appoint, appointment)

    async def health(self, skew_us: int | None = None) -> bytes:
        """See `Port.health`."""
        return await self._run("control", self._host.health, skew_us)

    async def status(self) -> bytes:
        """See `Port.status`."""
        return await self._run("control", self._host.status)

    def close(self) -> None:
        """Close all shards, once the calls under way are done."""
        self._host.end_follows()
        for pool in self._threads.values():
            pool.shutdown()
        self._host.close()

    async def _run(self, kind: str, work: Callable[..., bytes], *arguments: object) -> bytes:
        loop = asyncio.get_running_loop()
        try:
            done = loop.run_in_executor(self._threads[kind], work, *arguments)
        except RuntimeError as error:
            # What an executor says that was shut down.
            raise Unavailable("host", "it is closed") from error
        return await done


class _Way:
    """The port of whichever host has the name at the moment of a call."""

    def __init__(self, cluster: LocalCluster, name: str) -> None:
        self._cluster = cluster
        self._name = name

    async def search(self, call: bytes, heavy: bool = False) -> bytes:
        return await self._host().search(call, heavy)

    async def get(self, call: bytes) -> bytes:
        return await self._host().get(call)

    async def scan(self, call: bytes) -> bytes:
        return await self._host().scan(call)

    async def events(self, call: bytes) -> bytes:
        return await self._host().events(call)

    async def follow(self, call: bytes) -> bytes:
        return await self._host().follow(call)

    async def commit(self, call: bytes) -> bytes:
        return await self._host().commit(call)

    async def transact(self, call: bytes) -> bytes:
        return await self._host().transact(call)

    async def warm(self, call: bytes) -> bytes:
        return await self._host().warm(call)

    async def appoint(self, appointment: bytes) -> bytes:
        return await self._host().appoint(appointment)

    async def health(self, skew_us: int | None = None) -> bytes:
        return await self._host().health(skew_us)

    async def status(self) -> bytes:
        return await self._host().status()

    def _host(self) -> LocalHost:
        host = self._cluster.hosts.get(self._name)
        if host is None:
            raise Unavailable(self._name, "it is not running")
        return host
