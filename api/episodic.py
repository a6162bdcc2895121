"""The handlers of the episodic block, one a verb; see `front`.

Those of streams return an iterator of lists of messages; an empty list says only that the stream is
still there.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Protocol

from msgspec.structs import replace

from mindgrid.api.principal import Principal
from mindgrid.api.wire import convert
from mindgrid.api.wire.events import (
    AppendBatchRequest,
    AppendBatchResponse,
    AppendRequest,
    AppendResponse,
    DescribeRequest,
    DescribeResponse,
    Event,
    ExpireRequest,
    ExpireResponse,
    RangeRequest,
    TailRequest,
)
from mindgrid.cluster.logs import Extent
from mindgrid.cluster.tails import Tail
from mindgrid.shards.clock import Instant
from mindgrid.shards.episodic import types
from mindgrid.shards.episodic.types import Appended, EventAction, EventDraft, EventRange
from mindgrid.shards.types import Expired

IDLE_S = 15.0
"""After so long without an event a tail says that it is still there."""


class Logs(Protocol):
    """The cluster's logs as the handlers use them; `cluster.logs.Logs` is one."""

    async def append(
        self,
        namespace: str,
        drafts: Sequence[EventDraft],
        expected_cursor: int | None = None,
        transaction_id: str = "",
        deadline_s: float | None = None,
        batch: bool = True,
    ) -> Appended:
        """Append all events or none."""
        ...

    async def expire(
        self,
        namespace: str,
        action: EventAction,
        max_rows: int,
        before_cursor: int = 0,
        before_time: Instant | None = None,
        transaction_id: str = "",
    ) -> Expired:
        """Tombstone or remove the oldest events of a window."""
        ...

    async def range(
        self, namespace: str, range: EventRange, limit: int = 0
    ) -> AsyncIterator[tuple[types.Event, ...]]:
        """Return the events of a range in parts."""
        ...

    async def describe(self, namespace: str) -> Extent:
        """Return where the log begins and ends."""
        ...

    async def tail(self, namespace: str, range: EventRange, historical: bool = False) -> Tail:
        """Return a tail."""
        ...


class Episodic:
    """The verbs of `mindd.episodic.v1.Episodic`."""

    def __init__(self, logs: Logs) -> None:
        """Answer from `logs`."""
        self._logs = logs

    async def append(self, principal: Principal, message: AppendRequest) -> AppendResponse:
        """Write one event."""
        draft = convert.event_draft(message)
        appended = await self._logs.append(
            message.namespace, [draft], message.expected_cursor, batch=False
        )
        return AppendResponse(event=convert.event(appended.events[0]))

    async def range(
        self, principal: Principal, message: RangeRequest
    ) -> AsyncGenerator[Sequence[Event], None]:
        """Replay a window of the log."""
        range = convert.event_range(message)
        parts = await self._logs.range(message.namespace, range, message.limit)
        return ([convert.event(one) for one in part] async for part in parts)

    async def tail(
        self, principal: Principal, message: TailRequest
    ) -> AsyncGenerator[Sequence[Event], None]:
        """Follow the log."""
        range, historical = convert.followed(message), message.include_historical
        told = _told(await self._logs.tail(message.namespace, range, historical))
        await anext(told)
        return told

    async def expire(self, principal: Principal, message: ExpireRequest) -> ExpireResponse:
        """Tombstone or remove events of a window, oldest first."""
        expired = await self._logs.expire(
            message.namespace,
            convert.event_action(message.action),
            message.max_rows,
            message.before_cursor,
            message.before_time,
            message.transaction_id,
        )
        return ExpireResponse(affected=expired.affected)


class Events:
    """The verbs of `mindgrid.v1.Events`."""

    def __init__(self, logs: Logs) -> None:
        """Answer from `logs`."""
        self._logs = logs

    async def append_batch(
        self, principal: Principal, message: AppendBatchRequest
    ) -> AppendBatchResponse:
        """Write many events under one run of cursors, or none."""
        appended = await self._logs.append(
            message.namespace,
            [convert.event_draft(event) for event in message.events],
            message.expected_cursor,
            message.transaction_id,
        )
        events = [convert.event(one) for one in appended.events]
        if not message.include_payload:
            events = [replace(one, payload=b"") for one in events]
        return AppendBatchResponse(events=events)

    async def describe(self, principal: Principal, message: DescribeRequest) -> DescribeResponse:
        """Return where the log begins and ends."""
        extent = await self._logs.describe(message.namespace)
        return DescribeResponse(first_cursor=extent.first_cursor, last_cursor=extent.last_cursor)


async def _told(tail: Tail) -> AsyncGenerator[Sequence[Event], None]:
    """Yield an empty part, then what comes: closing a generator that never began does nothing."""
    try:
        yield []
        while True:
            yield [convert.event(one) for one in await tail.next(IDLE_S)]
    finally:
        tail.close()
