"""The episodic block for code that is not asynchronous: what `Handle.logs` is."""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from typing import Protocol, TypeVar

from mindgrid.cluster.logs import Extent, Logs
from mindgrid.cluster.tails import Tail
from mindgrid.shards.clock import Instant
from mindgrid.shards.episodic.types import Appended, Event, EventAction, EventDraft, EventRange
from mindgrid.shards.errors import MindgridError
from mindgrid.shards.types import Expired

T = TypeVar("T")


class Wait(Protocol):
    """Runs work in the loop of a handle and waits for its result."""

    def __call__(self, work: Coroutine[None, None, T]) -> T:
        """Return what the work returns."""
        ...


class OpenTail:
    """The events of a tail as they come, until it is closed; ends with the error that ends it.

    A context manager, and to be closed: an open tail keeps its place in the log's feed.
    """

    def __init__(self, wait: Wait, tail: Tail) -> None:
        """See `LogHandle.tail`."""
        self._wait = wait
        self._tail = tail
        self._ready: deque[Event] = deque()
        self._is_closed = False

    @property
    def last_cursor(self) -> int:
        """The newest event that was handed out; whoever resumes goes on behind it."""
        return self._ready[0].cursor - 1 if self._ready else self._tail.last_cursor

    def next(self, wait_s: float | None = None) -> list[Event]:
        """Return the next events; none if there is none within `wait_s`. See `Tail.next`."""
        ready = list(self._ready)
        self._ready.clear()
        return ready or self._wait(self._tail.next(wait_s))

    def close(self) -> None:
        """Follow no longer; an iteration ends, in whichever thread it is."""
        self._is_closed = True
        self._wait(self._close())

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        while not self._ready:
            try:
                self._ready.extend(self.next())
            except MindgridError:
                if self._is_closed:
                    raise StopIteration from None
                raise
        return self._ready.popleft()

    def __enter__(self) -> OpenTail:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _close(self) -> None:
        self._tail.close()


class LogHandle:
    """The episodic namespaces of a cluster; every method does and raises what that of `Logs` does.

    Methods may be called from any thread.
    """

    def __init__(self, wait: Wait, logs: Logs) -> None:
        """See `Handle.logs`."""
        self._wait = wait
        self._logs = logs

    def append(
        self,
        namespace: str,
        drafts: Sequence[EventDraft],
        expected_cursor: int | None = None,
        transaction_id: str = "",
        deadline_s: float | None = None,
    ) -> Appended:
        """Append all events under one run of cursors, or none. See `Logs.append`."""
        return self._wait(
            self._logs.append(namespace, drafts, expected_cursor, transaction_id, deadline_s)
        )

    def expire(
        self,
        namespace: str,
        action: EventAction,
        max_rows: int,
        before_cursor: int = 0,
        before_time: Instant | None = None,
        transaction_id: str = "",
        deadline_s: float | None = None,
    ) -> Expired:
        """Tombstone or remove the oldest events of a window. See `Logs.expire`."""
        return self._wait(
            self._logs.expire(
                namespace,
                action,
                max_rows,
                before_cursor,
                before_time,
                transaction_id,
                deadline_s,
            )
        )

    def range(
        self,
        namespace: str,
        range: EventRange | None = None,
        limit: int = 0,
        deadline_s: float | None = None,
    ) -> Iterator[Event]:
        """Return the events of a range, read as they are asked for. See `Logs.range`."""
        parts = self._wait(self._logs.range(namespace, range or EventRange(), limit, deadline_s))

        async def part() -> tuple[Event, ...]:
            # Not `anext(parts, ())`: Python 3.11 takes that tuple apart (SystemError).
            async for found in parts:
                return found
            return ()

        def events() -> Iterator[Event]:
            while found := self._wait(part()):
                yield from found

        return events()

    def describe(self, namespace: str, deadline_s: float | None = None) -> Extent:
        """Return where the log begins and ends. See `Extent`."""
        return self._wait(self._logs.describe(namespace, deadline_s))

    def tail(
        self,
        namespace: str,
        range: EventRange | None = None,
        historical: bool = False,
        deadline_s: float | None = None,
    ) -> OpenTail:
        """Follow the log from its end, or with `historical` from a cursor. See `Logs.tail`."""
        tail = self._logs.tail(namespace, range or EventRange(), historical, deadline_s)
        return OpenTail(self._wait, self._wait(tail))
