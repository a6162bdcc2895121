"""The episodic block as its callers see it: `Logs` checks, routes, reads on page by page, retries.

append(drafts) ─► check ─► write lane of the log's host ─► group commit
range          ─► pages, one after another, within the log as it was when the first was read
tail           ─► the same pages up to the live edge, then what `tails` hears (one call a host)
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from mindgrid.cluster import port
from mindgrid.cluster.gate import Part, write_bytes
from mindgrid.cluster.lanes import Deadline
from mindgrid.cluster.port import ShardKey
from mindgrid.cluster.routing import Router
from mindgrid.cluster.spec import EPISODIC, NamespaceKey
from mindgrid.cluster.table import LogRoute
from mindgrid.cluster.tails import Tail, Tails
from mindgrid.shards.clock import Instant
from mindgrid.shards.episodic.checks import (
    CURSOR_MAX,
    check_followed,
    check_log_command,
    check_range,
    check_whole,
)
from mindgrid.shards.episodic.types import (
    Append,
    Appended,
    Event,
    EventAction,
    EventDraft,
    EventPage,
    EventRange,
    ExpireEvents,
    LogCommand,
    LogResult,
)
from mindgrid.shards.types import Expired

PAGE_EVENTS = 1_000
"""So many events a read asks for; large ones come fewer at a time."""


class Extent(NamedTuple):
    """Where a log begins and ends.

    `first_cursor` is the oldest that it holds: whoever resumes before it has missed what was
    removed. `last_cursor` is the newest that it ever gave, 0 for none. Where nothing is held, that
    is one less.
    """

    first_cursor: int
    last_cursor: int


class Logs:
    """All episodic namespaces of a cluster. Belongs to the event loop it is first used in.

    Every method raises what those of `Grid` do.
    """

    def __init__(self, router: Router) -> None:
        """Reach hosts by `router`."""
        self._router = router
        self.tails = Tails(router, self._read)

    async def append(
        self,
        namespace: str,
        drafts: Sequence[EventDraft],
        expected_cursor: int | None = None,
        transaction_id: str = "",
        deadline_s: float | None = None,
        batch: bool = True,
    ) -> Appended:
        """Append all events under one run of cursors, or none; return them once durable.

        At most 1,000. A draft whose `dedup_key` the log holds is answered by the stored event. An
        empty transaction id is chosen here, so that retries write nothing twice. Raises
        CursorMismatch unless `expected_cursor`, where given, is the log's last cursor. Without
        `batch` errors name fields of the one event there is, and not of `events[0]`.
        """
        key, deadline = await self._begin(namespace, deadline_s)
        keyed = all(draft.dedup_key for draft in drafts)
        id = transaction_id or ("" if keyed else str(uuid.uuid4()))
        command = Append(tuple(drafts), expected_cursor, id)
        check_log_command(command, batch)
        result = await self._written(key, command, deadline)
        assert isinstance(result, Appended)
        return result

    async def expire(
        self,
        namespace: str,
        action: EventAction,
        max_rows: int,
        before_cursor: int = 0,
        before_time: Instant | None = None,
        transaction_id: str = "",
        deadline_s: float | None = None,
    ) -> Expired:
        """Tombstone or remove the `max_rows` oldest events before both bounds, in one commit.

        Bounds are exclusive; 0 and None leave one out, but not both.
        """
        key, deadline = await self._begin(namespace, deadline_s)
        id = transaction_id or str(uuid.uuid4())
        command = ExpireEvents(action, max_rows, before_cursor, before_time, id)
        check_log_command(command)
        result = await self._written(key, command, deadline)
        assert isinstance(result, Expired)
        return result

    async def page(
        self,
        namespace: str,
        range: EventRange,
        limit: int = PAGE_EVENTS,
        deadline_s: float | None = None,
    ) -> EventPage:
        """Return the first events of a range, at most `limit`, and fewer where they are large.

        A limit of 0 leaves their number to us.
        """
        key, deadline = await self._begin(namespace, deadline_s)
        check_range(range, limit)
        return await self._page(key, range, limit or PAGE_EVENTS, deadline)

    async def range(
        self,
        namespace: str,
        range: EventRange,
        limit: int = 0,
        deadline_s: float | None = None,
    ) -> AsyncIterator[tuple[Event, ...]]:
        """Return the events of a range in parts, `limit` in all; 0 stands for all.

        The first part is read before this returns, so that what is wrong with the call is raised
        here. Events that are appended later are not in the range, whatever their number. The
        deadline is that of each part.
        """
        check_range(range, limit)
        asked = min(limit or PAGE_EVENTS, PAGE_EVENTS)
        page = await self.page(namespace, range, asked, deadline_s)
        return self._parts(namespace, range, limit, page, deadline_s)

    async def _parts(
        self,
        namespace: str,
        range: EventRange,
        limit: int,
        page: EventPage,
        deadline_s: float | None,
    ) -> AsyncIterator[tuple[Event, ...]]:
        left = limit or CURSOR_MAX
        before = min(range.before_cursor or CURSOR_MAX, page.last_cursor + 1)
        while page.events:
            yield page.events
            left -= len(page.events)
            if not page.more or not left:
                return
            end = page.events[-1].cursor
            range = (
                replace(range, before_cursor=end)
                if range.reverse
                else replace(range, after_cursor=end, before_cursor=before)
            )
            seen = page.last_cursor
            page = await self.page(namespace, range, min(left, PAGE_EVENTS), deadline_s)
            check_whole(f"{EPISODIC}/{namespace}", seen, page.last_cursor)

    async def describe(self, namespace: str, deadline_s: float | None = None) -> Extent:
        """Return where the log begins and ends."""
        page = await self.page(namespace, EventRange(after_cursor=CURSOR_MAX), 1, deadline_s)
        return Extent(page.first_cursor, page.last_cursor)

    async def tail(
        self,
        namespace: str,
        range: EventRange,
        historical: bool = False,
        deadline_s: float | None = None,
    ) -> Tail:
        """Return a tail: of the events that are appended from now on, or with `historical` those
        behind `range.after_cursor` first.

        Replay goes over into the live edge without a gap and without a repeat. Of `range` only the
        filters count, and `include_deleted` for the replay; the bounds but `after_cursor`, which
        counts only with `historical`, and `reverse` must be unset. The deadline is that of each
        page that is read.
        """
        key, _ = await self._begin(namespace, deadline_s)
        check_followed(range)
        return await self.tails.open(key, range, historical)

    async def close(self) -> None:
        """End all tails."""
        await self.tails.close()

    async def _read(self, key: NamespaceKey, range: EventRange) -> EventPage:
        return await self.page(key.name, range)

    async def _begin(
        self, namespace: str, deadline_s: float | None
    ) -> tuple[NamespaceKey, Deadline]:
        key = NamespaceKey(EPISODIC, namespace)
        _, deadline = await self._router.begin(lambda routes: routes.log(key), deadline_s)
        return key, deadline

    async def _page(
        self, key: NamespaceKey, range: EventRange, limit: int, deadline: Deadline
    ) -> EventPage:
        async def read(route: LogRoute) -> EventPage:
            item = port.EventsItem(key, route.generation, range, limit)
            gate = self._router.gate(route.host)
            return await self._router.answered(
                route.host,
                Part(key, route.generation, (0,), None),
                lambda _: gate.events.submit(key, item, deadline),
                deadline,
            )

        return await self._router.retried(deadline, lambda routes: read(routes.log(key)))

    async def _written(
        self, key: NamespaceKey, command: LogCommand, deadline: Deadline
    ) -> LogResult:
        async def write(route: LogRoute) -> LogResult:
            item = port.Write(ShardKey(key, route.generation, 0), command)
            gate = self._router.gate(route.host)
            result = await self._router.answered(
                route.host,
                Part(key, route.generation, (0,), None),
                lambda _: gate.writes.submit(key, item, deadline, write_bytes(item)),
                deadline,
            )
            assert isinstance(result, Appended | Expired)
            return result

        return await self._router.retried(deadline, lambda routes: write(routes.log(key)))
