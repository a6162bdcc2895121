"""Micro-batching lanes: callers' single items leave together, fairly, and never late.

    submit ─► one queue a namespace ─┐
    submit ─► one queue a namespace ─┼─ round robin ─► a batch ─► send (at most `calls` under way)
    submit ─► one queue a namespace ─┘

A batch is whatever waits when a call becomes free: a lone caller pays no delay and a crowd pays one
call for all. Beside a call that is under way the next leaves only when it is worth a call of its
own, or a moment later: the answers of one call come back as new questions one by one, and the first
of them would leave alone, again and again (8 clients: 3.5 queries a call instead of 2.3).
A namespace that floods its lane delays the others by one item each, and is refused once its own
queue is full.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from mindgrid.shards.errors import DeadlineExceeded, Exhausted, MindgridError

W = TypeVar("W")
R = TypeVar("R")

Send = Callable[[list[W]], Awaitable[Sequence[R | MindgridError]]]
"""Carries a batch and returns one result for each item, in order."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The loop's time at which an answer is of no use any more, and how long that was."""

    at: float
    seconds: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline that many seconds from now; needs a running loop."""
        return cls(asyncio.get_running_loop().time() + seconds, seconds)

    def left(self) -> float:
        """Return the seconds that are left, at least 0."""
        return max(0.0, self.at - asyncio.get_running_loop().time())


@dataclass(frozen=True, slots=True)
class LaneBounds:
    """How much a lane takes; `batch_size` sums the items' sizes, whatever they count.

    Beside another call one leaves with at least `beside_items`, or after `beside_s`.
    """

    calls: int
    batch_items: int
    waiting_max: int
    batch_size: int = 2**62
    beside_items: int = 1
    beside_s: float = 0.0


@dataclass(slots=True)
class _Item(Generic[W, R]):
    work: W
    size: int
    deadline: Deadline
    future: asyncio.Future[R]


class Lane(Generic[W, R]):
    """One queue to one host. Belongs to the running event loop; not safe from other threads."""

    def __init__(self, name: str, send: Send[W, R], bounds: LaneBounds) -> None:
        self._name = name
        self._send = send
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self._queues: dict[Hashable, deque[_Item[W, R]]] = {}
        self._turns: deque[Hashable] = deque()
        self._calls: dict[asyncio.Task[None], list[_Item[W, R]]] = {}
        self._pumping = False
        self._sweeping = False
        self._held_back: asyncio.TimerHandle | None = None

    def submit(
        self, namespace: Hashable, work: W, deadline: Deadline, size: int = 1
    ) -> asyncio.Future[R]:
        """Queue `work` and return the future of its result; cancelling that withdraws it.

        The future fails with DeadlineExceeded at the deadline, wherever the item is by then.
        Raises Exhausted if the namespace has `waiting_max` items in the queue.
        """
        queue = self._queues.get(namespace)
        if queue is None:
            queue = self._queues[namespace] = deque()
            self._turns.append(namespace)
        elif len(queue) >= self._bounds.waiting_max:
            self._drop_departed(queue)
            if len(queue) >= self._bounds.waiting_max:
                what = f"the {self._name} queue of namespace {namespace}"
                raise Exhausted(what, self._bounds.waiting_max)
        item = _Item(work, size, deadline, self._loop.create_future())
        queue.append(item)
        self._pump_soon()
        if not self._sweeping:
            self._sweeping = True
            self._loop.call_later(_SWEEP_S, self._sweep)
        return item.future

    @property
    def waiting(self) -> int:
        """How many items wait, departed ones included until they are met."""
        return sum(map(len, self._queues.values()))

    async def close(self) -> None:
        """Give up everything that waits or is under way: its futures are cancelled."""
        if self._held_back is not None:
            self._held_back.cancel()
        for queue in self._queues.values():
            for item in queue:
                item.future.cancel()
        self._queues.clear()
        self._turns.clear()
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _pump_soon(self) -> None:
        # Not at once: requests that were read from their sockets in one turn of the loop are
        # submitted in that turn, and so leave in one call.
        if not self._pumping and len(self._calls) < self._bounds.calls:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        while self._is_worth_a_call() and self._start():
            pass

    def _start(self) -> bool:
        """Send the next batch; False if there is none, or no call is free."""
        if len(self._calls) >= self._bounds.calls or not (batch := self._take()):
            return False
        call = self._loop.create_task(self._carry(batch))
        self._calls[call] = batch
        call.add_done_callback(self._done)
        return True

    def _is_worth_a_call(self) -> bool:
        if not self._calls or self.waiting >= self._bounds.beside_items:
            return True
        if self._held_back is None and self._queues:
            self._held_back = self._loop.call_later(self._bounds.beside_s, self._let_go)
        return False

    def _let_go(self) -> None:
        self._held_back = None
        self._start()

    def _done(self, call: asyncio.Task[None]) -> None:
        for item in self._calls.pop(call):
            item.future.cancel()  # Only what `_carry` did not come to, when the lane was closed.
        self._pump_soon()

    def _take(self) -> list[_Item[W, R]]:
        """Take the next batch, one item of each namespace in turn."""
        batch: list[_Item[W, R]] = []
        size, now = 0, self._loop.time()
        while self._turns and len(batch) < self._bounds.batch_items:
            namespace = self._turns[0]
            queue = self._queues[namespace]
            while queue and (queue[0].future.done() or _expire(queue[0], now, self._name)):
                queue.popleft()
            if queue and batch and size + queue[0].size > self._bounds.batch_size:
                break
            self._turns.popleft()
            if queue:
                item = queue.popleft()
                size += item.size
                batch.append(item)
            if queue:
                self._turns.append(namespace)
            else:
                del self._queues[namespace]
        return batch

    async def _carry(self, batch: list[_Item[W, R]]) -> None:
        try:
            # A host that hangs must not hold the lane's slot for ever.
            async with asyncio.timeout_at(max(item.deadline.at for item in batch)):
                results = await self._send([item.work for item in batch])
        except TimeoutError:
            for item in batch:
                _expire(item, item.deadline.at, self._name)
        except Exception as error:  # noqa: BLE001 - a bug in `send` belongs to those who wait
            for item in batch:
                _fail(item, error)
        else:
            assert len(results) == len(batch), "one result for each item"
            for item, result in zip(batch, results, strict=True):
                if isinstance(result, MindgridError):
                    _fail(item, result)
                elif not item.future.done():
                    item.future.set_result(result)

    def _sweep(self) -> None:
        """Fail what has run out of time in the queue or under way; come back while there is any.

        One timer a lane: a timer for each item would cost as much as the rest of the lane.
        """
        now = self._loop.time()
        for queue in self._queues.values():
            for item in queue:
                _expire(item, now, self._name)
        for batch in self._calls.values():
            for item in batch:
                _expire(item, now, self._name)
        self._sweeping = bool(self._queues or self._calls)
        if self._sweeping:
            self._loop.call_later(_SWEEP_S, self._sweep)

    def _drop_departed(self, queue: deque[_Item[W, R]]) -> None:
        staying = [item for item in queue if not item.future.done()]
        queue.clear()
        queue.extend(staying)


_SWEEP_S = 0.05


def _expire(item: _Item[W, R], now: float, lane: str) -> bool:
    """Fail the item if its time is over; return whether it was."""
    if item.deadline.at > now:
        return False
    _fail(item, DeadlineExceeded(f"the {lane} lane", item.deadline.seconds))
    return True


def _fail(item: _Item[W, R], error: Exception) -> None:
    if not item.future.done():
        item.future.set_exception(error)
