"""The way to the shards: the routing table, one gate a host, and what is tried again when.

Everything that asks hosts goes through one `Router`, whichever block it asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TypeVar

from mindgrid.cluster import port
from mindgrid.cluster.gate import Gate, HostAway, Part
from mindgrid.cluster.lanes import Deadline
from mindgrid.cluster.port import Directory, Opening, ShardKey
from mindgrid.cluster.spec import Bounds
from mindgrid.cluster.table import Routes
from mindgrid.shards.clock import Instant
from mindgrid.shards.errors import DeadlineExceeded, InDoubt, Moved, NotFound, Unavailable
from mindgrid.shards.types import Stamp

T = TypeVar("T")


class Router:
    """Belongs to the event loop it is first used in."""

    def __init__(self, directory: Directory) -> None:
        """Take what finds hosts."""
        self.directory = directory
        self._routes: Routes | None = None
        self._refreshing: asyncio.Task[Routes] | None = None
        self._gates: dict[str, Gate] = {}
        self._warming: dict[tuple[str, Part], asyncio.Task[None]] = {}
        self._ask_again_at = 0.0

    @property
    def routes(self) -> Routes:
        """The newest table there is here; a call has begun, so there is one."""
        assert self._routes is not None
        return self._routes

    @property
    def bounds(self) -> Bounds:
        """The bounds that the table sets, or their defaults before there is one."""
        return self._routes.bounds if self._routes is not None else Bounds()

    async def begin(
        self, find: Callable[[Routes], T], deadline_s: float | None
    ) -> tuple[T, Deadline]:
        """Begin a call: return what `find` finds in the table, and the call's deadline.

        Where that is NotFound the table is fetched anew, for it may have been added since.
        """
        deadline = Deadline.after(self.bounds.deadline_s if deadline_s is None else deadline_s)
        if self._routes is None:
            await self.retried(deadline, _nothing)
        try:
            return find(self.routes), deadline
        except NotFound:
            # Wrong names must not become a load.
            if time.monotonic() < self._ask_again_at:
                raise
            self._ask_again_at = time.monotonic() + _ASK_AGAIN_S
            with contextlib.suppress(Unavailable):
                await self.refreshed(-1, "")
            return find(self.routes), deadline

    async def ready(self) -> None:
        """Return once the table is known and every host answers under it; else Unavailable.

        While the coordinator is away the table at hand serves, as it does for every other call.
        """
        try:
            routes = await _within(_TABLE_WAIT_S, "the coordinator", self.refreshed(-1, ""))
        except Unavailable:
            if self._routes is None or not self._routes.epochs:
                raise
            routes = self._routes
        if not routes.epochs:
            raise Unavailable("the cluster", "it has no host yet")
        await all_of(self._is_seated(host, epoch) for host, epoch in routes.epochs.items())

    async def _is_seated(self, host: str, epoch: int) -> None:
        health = await _within(_HEALTH_WAIT_S, host, self.gate(host).health())
        if health.epoch != epoch:
            raise Unavailable(host, "it is not appointed yet")

    async def status(self) -> list[port.HostStatus]:
        """Return what each host holds, in the order of the hosts."""
        routes = await self.refreshed(-1, "")
        return await all_of(self.gate(host).status() for host in routes.epochs)

    async def close(self) -> None:
        """Give up all that waits; the hosts go on."""
        for gate in self._gates.values():
            await gate.close()

    async def answered(
        self,
        host: str,
        part: Part,
        submit: Callable[[Part], Awaitable[T | Opening]],
        deadline: Deadline,
    ) -> T:
        """Submit to a host until it answers; wait while shards open, or are in doubt.

        In doubt, the read is asked again at exactly the instant that the doubt names.
        """
        while True:
            try:
                answer = await submit(part)
            except InDoubt as doubt:
                part = part._replace(stamp=Stamp(Instant(doubt.instant), exactly=True))
            else:
                if not isinstance(answer, Opening):
                    return answer
            await self._warm(self._gates[host], part, deadline)

    async def retried(self, deadline: Deadline, work: Callable[[Routes], Awaitable[T]]) -> T:
        """Do the work, anew with a fresh table when it has moved, again while it may succeed.

        While a host is away the deadline is the only bound: the coordinator brings it back. A
        shard that is Unavailable on a host that answers gets `attempts` in all.
        """
        tries = failures = 0
        last: Moved | Unavailable | None = None
        while True:
            bounds = self.bounds
            try:
                routes = self._routes or await self.refreshed(-1, "")
                return await work(routes)
            except DeadlineExceeded:
                if last is None:
                    raise
                # That the time is over says less than what it was spent on.
                raise _for_callers(last) from None
            except (Moved, Unavailable) as error:
                last = error
            tries += 1
            no_host = self._routes is not None and not self._routes.epochs
            away = no_host or isinstance(last, Moved | HostAway)
            failures += not away
            wait_s = min(bounds.retry_first_s * 2 ** min(tries - 1, 16), bounds.retry_most_s)
            wait_s *= random.uniform(0.5, 1.0)
            if failures >= bounds.attempts or wait_s >= deadline.left():
                raise _for_callers(last)
            if away and await self.has_newer(last.what if isinstance(last, HostAway) else ""):
                continue
            await asyncio.sleep(wait_s)

    async def has_newer(self, suspect: str) -> bool:
        """Fetch the table; return whether it is a newer one than the caller's."""
        before = self._routes.version if self._routes is not None else -1
        try:
            return (await self.refreshed(before, suspect)).version > before
        except Unavailable:
            # The coordinator is away too: the next attempt comes here again if it must.
            return False

    async def refreshed(self, older_than: int, suspect: str) -> Routes:
        """Return the newest table; one question at a time, however many callers have it."""
        if self._routes is not None and self._routes.version > older_than >= 0:
            return self._routes
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh(older_than, suspect))
            self._refreshing.add_done_callback(self._refresh_done)
        return await asyncio.shield(self._refreshing)

    async def _refresh(self, older_than: int, suspect: str) -> Routes:
        table = await self.directory.table(older_than, suspect)
        if self._routes is None or table.version > self._routes.version:
            self._routes = Routes(table)
            for host, epoch in self._routes.epochs.items():
                self.gate(host).epoch = epoch
        return self._routes

    def _refresh_done(self, task: asyncio.Task[Routes]) -> None:
        self._refreshing = None
        if not task.cancelled():
            # Who waits gets it from the task; a task whose callers all left is done for nobody.
            task.exception()

    def gate(self, host: str) -> Gate:
        gate = self._gates.get(host)
        if gate is None:
            assert self._routes is not None
            gate = self._gates[host] = Gate(host, self.directory.port(host), self._routes.bounds)
        return gate

    async def _warm(self, gate: Gate, part: Part, deadline: Deadline) -> None:
        """Wait until the shards are open or have failed: one call, however many callers wait.

        For a read at exactly an instant, also until nothing of it is in doubt. Who joins another's
        wait may have waited for too little, and then comes here again.
        """
        key = (gate.host, part._replace(stamp=None))
        task = self._warming.get(key)
        if task is None:
            shards = [ShardKey(part.namespace, part.generation, shard) for shard in part.shards]
            settled = part.stamp.at if part.stamp is not None and part.stamp.exactly else None
            task = self._warming[key] = asyncio.create_task(gate.warm(shards, settled))
            task.add_done_callback(lambda done: self._warm_done(key, done))
        # Out of time, the lane says so when the caller asks again.
        await asyncio.wait([task], timeout=deadline.left())
        if task.done():
            task.result()

    def _warm_done(self, key: tuple[str, Part], task: asyncio.Task[None]) -> None:
        del self._warming[key]
        if not task.cancelled():
            task.exception()


async def _nothing(routes: Routes) -> None:
    """Do no work: what is wanted is the table."""


_ASK_AGAIN_S = 1.0
# Together less than whoever probes a server waits.
_TABLE_WAIT_S = 0.5
_HEALTH_WAIT_S = 1.0


async def in_time(deadline: Deadline, what: str, answer: Awaitable[T]) -> T:
    """Return the answer, or raise DeadlineExceeded naming `what`."""
    try:
        async with asyncio.timeout(deadline.left()) as wait:
            return await answer
    except TimeoutError:
        if not wait.expired():
            raise
        raise DeadlineExceeded(what, deadline.seconds) from None


async def _within(seconds: float, what: str, answer: Awaitable[T]) -> T:
    """Return the answer, or raise Unavailable naming `what` once the time is over."""
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        raise Unavailable(what, f"it does not answer within {seconds:g} s") from None


def _for_callers(error: Moved | Unavailable) -> Unavailable:
    """Return the error in words for someone who knows no epochs."""
    if isinstance(error, Moved):
        return Unavailable(f"shard {error.shard}", "it moves to another host and is not there yet")
    return Unavailable(error.what, error.reason) if isinstance(error, HostAway) else error


async def all_of(works: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Return all results in order; on the first error the rest is cancelled and it is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    if len(tasks) == 1:
        return [await tasks[0]]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
