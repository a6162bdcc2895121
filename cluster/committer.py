"""Carries out commits over several shards: the messages that the rules in `transactions` ask for.

One of these runs in the coordinator (or in a `LocalCluster`), so that all such commits of a cluster
are ordered in one place. It keeps nothing: what it leaves undone when it dies is found as `Doubt`s
of the shards, by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from typing import Any

from mindgrid.cluster import port
from mindgrid.cluster.gate import HostAway
from mindgrid.cluster.lanes import Deadline
from mindgrid.cluster.port import CommitCall, Doubt, Failed, Opening, Port, ShardKey, WarmCall
from mindgrid.cluster.table import Route, Routes
from mindgrid.cluster.transactions import (
    Admission,
    Parts,
    Transaction,
    parts_of_expire,
    parts_of_upsert,
    single_part,
)
from mindgrid.shards.errors import (
    DeadlineExceeded,
    Exhausted,
    Locked,
    MindgridError,
    Moved,
    Unavailable,
)
from mindgrid.shards.transactions import (
    Ask,
    Choose,
    Chosen,
    Decided,
    Forget,
    Reply,
    Request,
    Resolve,
    Resolved,
    ids_of,
)
from mindgrid.shards.types import Command, Deleted, Expire, Expired, Result, Upsert, Upserted

_STEP_S = 10.0
"""How long a step may take until what became of it counts as unknown."""
_LOCKED_FIRST_S, _LOCKED_MOST_S = 0.002, 0.1
_CLEARED_AT_ONCE = 8


class Committer:
    """Orders and carries out commits. Belongs to the event loop it is first used in."""

    def __init__(self, routes: Callable[[], Routes], way: Callable[[str], Port]) -> None:
        """Take the newest routes, whenever they are asked for, and the way to a host."""
        self._routes = routes
        self._way = way
        self._admission = Admission()
        self._waiting = 0
        self._running: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def commit(self, call: port.OrderedCall) -> Result:
        """Carry out the command; see `Directory.commit`.

        A caller who leaves does not stop what has begun.
        """
        deadline = Deadline.after(call.deadline_s)
        work = asyncio.create_task(self._commit(call, deadline))
        self._keep(work)
        return await asyncio.shield(work)

    async def clear(self, doubts: Iterable[Doubt]) -> None:
        """Bring to their end the commits whose committer has died, or a shard of which was away.

        Raises nothing: what does not succeed is found again.
        """
        gate = asyncio.Semaphore(_CLEARED_AT_ONCE)

        async def clear(doubt: Doubt) -> None:
            async with gate:
                # A namespace may be gone from the configuration, or have no host at the moment.
                with contextlib.suppress(MindgridError):
                    await self._clear(doubt)

        stale = [clear(doubt) for doubt in doubts if doubt.key not in self._running]
        await asyncio.gather(*stale)

    async def close(self) -> None:
        """Let what is under way come to its end."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Commits

    async def _commit(self, call: port.OrderedCall, deadline: Deadline) -> Result:
        route, command = self._routes().route(call.namespace), call.command
        if isinstance(command, Expire):
            parts = parts_of_expire(command, await self._choose(route, command))
            ids = {id for part in parts.commands.values() for id in ids_of(part)}
        else:
            parts = None
            ids = ids_of(command)
        async with self._admitted(route, ids, deadline):
            if parts is not None and len(parts.commands) == 1:
                command, parts = parts.commands[parts.home], None
            elif isinstance(command, Upsert) and single_part(command, route.shard_of) is None:
                parts = parts_of_upsert(command, route.shard_of)
            return await self._until_free(route, command, parts, deadline)

    @contextlib.asynccontextmanager
    async def _admitted(
        self, route: Route, ids: Collection[str], deadline: Deadline
    ) -> AsyncIterator[None]:
        limit = self._routes().bounds.writes_max
        if self._waiting >= limit:
            raise Exhausted("the queue of commits over several shards", limit)
        ticket = self._admission.enter({(route.spec.key, id) for id in ids})
        try:
            if ticket.behind:
                turn = asyncio.Event()
                ticket.admitted = turn.set
                self._waiting += 1
                try:
                    async with asyncio.timeout(deadline.left()):
                        await turn.wait()
                except TimeoutError:
                    what = f"a commit over several shards of {route.spec.key}"
                    raise DeadlineExceeded(what, deadline.seconds) from None
                finally:
                    self._waiting -= 1
            yield
        finally:
            self._admission.leave(ticket)

    async def _until_free(
        self, route: Route, command: Command, parts: Parts | None, deadline: Deadline
    ) -> Result:
        """Attempt the commit; what a dead committer left locked is cleared, and it starts over."""
        wait_s = _LOCKED_FIRST_S
        while True:
            try:
                if parts is None:
                    return await self._alone(route, command)
                return await self._together(route, parts)
            except Locked as locked:
                if deadline.left() <= wait_s:
                    raise
                shard = ShardKey(route.spec.key, route.generation, route.shard_of(locked.id))
                if locked.key not in self._running:
                    await self._clear(Doubt(shard, locked.key, locked.home, ()))
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LOCKED_MOST_S)

    async def _alone(self, route: Route, command: Command) -> Result:
        shard = 0 if isinstance(command, Expire) else single_part(command, route.shard_of)
        assert shard is not None
        why: dict[int, MindgridError] = {}
        said = await self._say(route, shard, command, why)
        if said is None:
            raise why[shard]
        if isinstance(said, MindgridError):
            raise said
        assert isinstance(said, Upserted | Deleted | Expired)
        return said

    async def _together(self, route: Route, parts: Parts) -> Result:
        """Run one attempt; the answer is there before the last message is."""
        transaction = Transaction(uuid.uuid4().hex, parts)
        answered: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._running.add(transaction.key)
        self._keep(asyncio.create_task(self._run(route, transaction, answered)))
        return await answered

    async def _run(
        self, route: Route, transaction: Transaction, answered: asyncio.Future[Result]
    ) -> None:
        why: dict[int, MindgridError] = {}
        try:
            sends = transaction.start()
            while sends:
                said = await asyncio.gather(
                    *(self._say(route, shard, request, why) for shard, request in sends)
                )
                heard = zip(sends, said, strict=True)
                sends = [
                    send
                    for (shard, _), one in heard
                    for send in transaction.heard(shard, _no_result(one))
                ]
                if transaction.answer is not None and not answered.done():
                    _tell(answered, transaction.answer, why)
            assert transaction.over
        except Exception as error:  # noqa: BLE001 - a bug is the waiting caller's to hear of
            if not answered.done():
                answered.set_exception(error)
        finally:
            self._running.discard(transaction.key)

    async def _choose(self, route: Route, command: Expire) -> dict[int, Chosen]:
        shards = range(len(route.hosts))
        why: dict[int, MindgridError] = {}
        said = await asyncio.gather(
            *(self._say(route, shard, Choose(command), why) for shard in shards)
        )
        chosen: dict[int, Chosen] = {}
        for shard, one in zip(shards, said, strict=True):
            if isinstance(one, MindgridError) or one is None:
                raise one or why[shard]
            assert isinstance(one, Chosen)
            chosen[shard] = one
        return chosen

    # What others left behind

    async def _clear(self, doubt: Doubt) -> None:
        route = self._routes().route(doubt.shard.namespace)
        decided = await self._say(route, doubt.home, Ask(doubt.key), {})
        if not isinstance(decided, Decided):
            return
        own_decision = doubt.home == doubt.shard.shard
        shards = doubt.participants if own_decision else (doubt.shard.shard,)
        resolve = Resolve(doubt.key, decided.at)
        said = await asyncio.gather(*(self._say(route, shard, resolve, {}) for shard in shards))
        if own_decision and all(isinstance(one, Resolved) for one in said):
            await self._say(route, doubt.home, Forget(doubt.key), {})

    # Messages

    async def _say(
        self, route: Route, shard: int, request: Command | Request, why: dict[int, MindgridError]
    ) -> Result | Reply | MindgridError | None:
        """Return the shard's reply, its error if nothing was done, or None and in `why` the reason.

        None says that it may have been done, or be done yet.
        """
        host = route.hosts[shard]
        key = ShardKey(route.spec.key, route.generation, shard)
        epoch = self._routes().epochs.get(host, 0)
        call = port.encode(CommitCall(epoch, [port.Write(key, request)]))
        try:
            async with asyncio.timeout(_STEP_S):
                while True:
                    (outcome,) = port.decode_steps(await self._way(host).transact(call))
                    if not isinstance(outcome, Opening):
                        break
                    await self._way(host).warm(port.encode(WarmCall(epoch, [key])))
        except Moved as error:
            return error
        except Unavailable as error:
            why[shard] = HostAway(error.what, error.reason)
            return None
        except TimeoutError:
            why[shard] = HostAway(host, f"it does not answer within {_STEP_S:g} s")
            return None
        if not isinstance(outcome, Failed):
            return outcome.value
        refusal = outcome.rebuild()
        if isinstance(refusal, Unavailable | DeadlineExceeded):
            why[shard] = refusal
            return None
        return refusal

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)  # The event loop itself keeps only weak references.
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # Where the caller has left, no one else looks at it.


def _no_result(said: Result | Reply | MindgridError | None) -> Reply | MindgridError | None:
    assert not isinstance(said, Upserted | Deleted | Expired)
    return said


def _tell(
    answered: asyncio.Future[Result],
    answer: Result | MindgridError,
    why: dict[int, MindgridError],
) -> None:
    if not isinstance(answer, MindgridError):
        answered.set_result(answer)
    elif isinstance(answer, Unavailable) and why:
        answered.set_exception(next(reversed(why.values())))
    else:
        answered.set_exception(answer)
