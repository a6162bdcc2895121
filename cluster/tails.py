"""Live tails: many subscribers of many logs, and one call that waits at each host for all of them.

    follow (one call a host) ─► the log's feed ─► a bounded buffer a subscriber ─► `Tail.next`

A subscriber first reads the log page by page, as a range does. At its end it joins the log's feed,
reads what lies between, and from then on lives on its buffer. One that falls behind is detached;
neither writers nor other subscribers wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from mindgrid.cluster import port
from mindgrid.cluster.gate import HostAway
from mindgrid.cluster.port import Failed, FollowItem, News
from mindgrid.cluster.routing import Router
from mindgrid.cluster.spec import NamespaceKey
from mindgrid.cluster.table import LogRoute
from mindgrid.shards.episodic.checks import CURSOR_MAX, check_whole
from mindgrid.shards.episodic.types import Event, EventPage, EventRange
from mindgrid.shards.errors import Exhausted, Lagged, MindgridError, Moved, RetryError, Unavailable
from mindgrid.shards.sizes import values_bytes

log = logging.getLogger(__name__)

BUFFER_EVENTS = 1_024
BUFFER_BYTES = 32 * 2**20
_WAIT_S = 20.0
"""How long a host keeps a call without news."""
_CALLS_MAX = 3
"""Of one follower at one host under way: the host answers the older ones at once."""
_SPARE_S = 10.0
"""How much longer it may take to say so, before it counts as away."""

Read = Callable[[NamespaceKey, EventRange], Awaitable[EventPage]]
Note = Callable[[str, int], None]
"""Is told a namespace and how many subscribers it has now."""


class Tail:
    """One subscriber. Made by `Tails.open`; to be closed."""

    def __init__(
        self, tails: Tails, key: NamespaceKey, range: EventRange, after: int, buffer_events: int
    ) -> None:
        """Not for callers."""
        self.key = key
        self.last_cursor = after
        """The newest event that was handed out, or where the tail began."""
        self._tails = tails
        self._range = range
        self._buffer_max = buffer_events
        self._at = after
        self._seen = 0
        """Where the log ended when it was last read."""
        self._gap_end = 0
        """While the log is read up to where the feed begins for us: the cursor there."""
        self._live = False
        self._buffer: list[Event] = []
        self._buffer_bytes = 0
        self._error: MindgridError | None = None
        self._news = asyncio.Event()

    async def next(self, wait_s: float | None = None) -> list[Event]:
        """Return the next events once there are any, none when the time is over.

        Raises Lagged once this subscriber has fallen behind, Unavailable if the log cannot be read
        for as long as a call may take, and whatever else it fails with; and again ever after.
        """
        events: list[Event] = []
        while not events and not self._live:
            events = await self._replay()
        if not events:
            if not self._buffer and self._error is None:
                try:
                    async with asyncio.timeout(wait_s):
                        await self._news.wait()
                except TimeoutError:
                    return []
            self._news.clear()
            events, self._buffer, self._buffer_bytes = self._buffer, [], 0
            if not events and self._error is not None:
                raise self._error
        if events:
            self.last_cursor = events[-1].cursor
        return events

    def close(self) -> None:
        """Take nothing any more; who waits for the next events is told."""
        self.end(Unavailable(f"namespace {self.key}", "this tail is closed"))

    def push(self, events: list[Event]) -> None:
        """Take events of the feed, which are in order; those that were read already are left out.

        One that would hold too many is detached instead, with what it holds.
        """
        chosen = [one for one in events if one.cursor > self._at and self._is_wanted(one)]
        if not chosen:
            return
        size = sum(map(values_bytes, chosen))
        if len(self._buffer) + len(chosen) > self._buffer_max:
            self._detach(f"{self._buffer_max} events")
        elif self._buffer and self._buffer_bytes + size > BUFFER_BYTES:
            self._detach(f"{BUFFER_BYTES} bytes")
        else:
            self._buffer += chosen
            self._buffer_bytes += size
            self._news.set()

    def end(self, error: MindgridError) -> None:
        """Hand out nothing more than the buffer, then this error, unless it has ended before."""
        self._live, self._error = True, self._error or error
        self._tails.leave(self)
        self._news.set()

    def _detach(self, limit: str) -> None:
        self._buffer = []
        self.end(Lagged(str(self.key), self.last_cursor, limit))

    def _is_wanted(self, event: Event) -> bool:
        wanted = self._range
        return (
            wanted.session_id in ("", event.session_id)
            and wanted.role in ("", event.role)
            and wanted.type in ("", event.type)
        )

    async def _replay(self) -> list[Event]:
        """Return the next page of what is behind us in the log; join the feed at its end."""
        range = replace(self._range, after_cursor=self._at, before_cursor=self._gap_end)
        page = await self._tails.read(self.key, range)
        if self._live:
            return []  # Detached meanwhile.
        check_whole(str(self.key), self._seen, page.last_cursor)
        self._seen = page.last_cursor
        if page.more:
            self._at = page.events[-1].cursor
        elif self._gap_end:
            # What the feed brings begins where the gap ends.
            self._at, self._live = self._gap_end - 1, True
        else:
            # Others join where the log ends, however far ahead of it we were told to begin.
            self._at = max(self._at, page.last_cursor)
            self.join(page.last_cursor)
        return list(page.events)

    def join(self, edge: int) -> None:
        """Join the feed of a log that ends at `edge`; without a gap the tail is live at once."""
        position = self._tails.join(self, edge)
        if position > self._at:
            self._gap_end = position + 1
        else:
            self._live = True


@dataclass(slots=True)
class _Feed:
    """What is live of one log: how far it was heard, and by whom."""

    key: NamespaceKey
    position: int
    route: LogRoute
    tails: set[Tail] = field(default_factory=set)
    failing_since: float | None = None

    def item(self) -> FollowItem:
        return FollowItem(self.key, self.route.generation, self.position)


class _Follower:
    """Our call at one host, and what it has still to say there."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.life = 0
        self.begins = True
        self.feeds: dict[NamespaceKey, _Feed] = {}
        self.moved: set[NamespaceKey] = set()
        self.left: set[NamespaceKey] = set()
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def add(self, feed: _Feed) -> None:
        self.feeds[feed.key] = feed
        self.left.discard(feed.key)
        self.moved.add(feed.key)
        self.changed.set()

    def drop(self, key: NamespaceKey) -> None:
        del self.feeds[key]
        self.moved.discard(key)
        self.left.add(key)
        self.changed.set()

    def said(self, name: str, epoch: int) -> port.FollowCall:
        """Return the next call, which says all that is to be said."""
        moved = self.feeds if self.begins else self.moved
        call = port.FollowCall(
            epoch,
            name,
            self.life,
            self.begins,
            [self.feeds[key].item() for key in moved],
            [] if self.begins else list(self.left),
            _WAIT_S if self.feeds else 0.0,
        )
        self.begins = False
        self.moved.clear()
        self.left.clear()
        self.changed.clear()
        return call


class Tails:
    """All tails of one `Grid`. Belongs to the event loop it is first used in."""

    def __init__(self, router: Router, read: Read, buffer_events: int = BUFFER_EVENTS) -> None:
        """Take what reads a page of a log."""
        self.read = read
        self.note: Note | None = None
        self._router = router
        self._buffer_events = buffer_events
        self._name = str(uuid.uuid4())
        self._feeds: dict[NamespaceKey, _Feed] = {}
        self._followers: dict[str, _Follower] = {}
        self._open: dict[NamespaceKey, set[Tail]] = {}

    async def open(self, key: NamespaceKey, range: EventRange, historical: bool) -> Tail:
        """Return a tail of what `range` filters: from its `after_cursor`, or the live edge on.

        The edge is fixed when this returns: what is appended from then on is handed out.
        """
        if historical:
            tail = Tail(self, key, range, range.after_cursor, self._buffer_events)
        else:
            edge = await self.read(key, EventRange(after_cursor=CURSOR_MAX))
            tail = Tail(self, key, range, edge.last_cursor, self._buffer_events)
            tail.join(edge.last_cursor)
        self._open.setdefault(key, set()).add(tail)
        self._tell(key)
        return tail

    def count(self, key: NamespaceKey) -> int:
        """Return how many tails of the log are open."""
        return len(self._open.get(key, ()))

    def join(self, tail: Tail, at: int) -> int:
        """Let the tail hear of events from now on; return behind which cursor they begin."""
        feed = self._feeds.get(tail.key)
        if feed is None:
            feed = _Feed(tail.key, at, self._router.routes.log(tail.key))
            self._feeds[tail.key] = feed
            self._place(feed)
        feed.tails.add(tail)
        return feed.position

    def leave(self, tail: Tail) -> None:
        """Forget the tail."""
        feed = self._feeds.get(tail.key)
        if feed is not None and tail in feed.tails:
            feed.tails.discard(tail)
            if not feed.tails:
                del self._feeds[tail.key]
                self._followers[feed.route.host].drop(tail.key)
        opened = self._open.get(tail.key)
        if opened is not None and tail in opened:
            opened.discard(tail)
            if not opened:
                del self._open[tail.key]
            self._tell(tail.key)

    async def close(self) -> None:
        """End all tails."""
        for tail in [tail for tails in self._open.values() for tail in tails]:
            tail.end(Unavailable(f"namespace {tail.key}", "the service is closed"))
        tasks = [one.task for one in self._followers.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tell(self, key: NamespaceKey) -> None:
        if self.note is not None:
            self.note(key.name, self.count(key))

    def _place(self, feed: _Feed) -> None:
        host = feed.route.host
        follower = self._followers.get(host)
        if follower is None:
            follower = self._followers[host] = _Follower(host)
        follower.add(feed)
        if follower.task is None:
            follower.task = asyncio.create_task(self._follow(follower))

    async def _follow(self, follower: _Follower) -> None:
        """Keep a call at the host while anybody listens; a newer one while there is more to say."""
        calls: set[asyncio.Task[bool]] = set()
        changed = asyncio.create_task(follower.changed.wait())
        tries = 0
        try:
            while follower.feeds or follower.left:
                if not calls or (follower.changed.is_set() and len(calls) < _CALLS_MAX):
                    calls.add(asyncio.create_task(self._ask(follower)))
                    continue
                if changed.done():
                    changed = asyncio.create_task(follower.changed.wait())
                waits = {*calls, changed} if len(calls) < _CALLS_MAX else calls
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                ended = {call for call in calls if call.done()}
                calls -= ended
                if all(call.result() for call in ended):
                    tries = 0 if ended else tries
                    continue
                bounds = self._router.bounds
                pause_s = min(bounds.retry_first_s * 2 ** min(tries, 16), bounds.retry_most_s)
                tries += 1
                await asyncio.sleep(pause_s)
        finally:
            follower.task = None
            rest = [*calls, changed]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

    async def _ask(self, follower: _Follower) -> bool:
        """Make one call and hand on what it brings; False if it failed, or a log did."""
        gate = self._router.gate(follower.host)
        life = follower.life
        call = follower.said(self._name, gate.epoch)
        try:
            async with asyncio.timeout(_WAIT_S + _SPARE_S):
                answer = await gate.follow(call)
        except (MindgridError, TimeoutError) as error:
            if life != follower.life:
                return True  # A call of an earlier life; what became of that is known.
            await self._begin_anew(follower, error)
            return False
        if life != follower.life:
            return True
        if not answer.known:
            self._forget(follower)
        errors = [self._hear(follower, news) for news in answer.news]
        if any(isinstance(error, Moved) for error in errors):
            await self._look_anew(follower, "")
        return not any(errors)

    def _forget(self, follower: _Follower) -> None:
        follower.life, follower.begins = follower.life + 1, True
        follower.changed.set()

    async def _begin_anew(self, follower: _Follower, error: MindgridError | TimeoutError) -> None:
        """Say everything again, to whichever hosts have the logs by now."""
        self._forget(follower)
        if isinstance(error, TimeoutError):
            error = HostAway(follower.host, "it does not answer")
        if not isinstance(error, RetryError | Exhausted):
            log.error("following logs at %s failed", follower.host, exc_info=error)
        for feed in list(follower.feeds.values()):
            self._fail(feed, error)
        suspect = follower.host if isinstance(error, HostAway) else ""
        await self._look_anew(follower, suspect)

    async def _look_anew(self, follower: _Follower, suspect: str) -> None:
        """Follow each log at the host that the newest table names."""
        try:
            await self._router.has_newer(suspect)
        except MindgridError as error:
            for feed in list(follower.feeds.values()):
                self._fail(feed, error)
        for feed in list(follower.feeds.values()):
            self._replace(feed)

    def _replace(self, feed: _Feed) -> None:
        """Follow the log at the host that the newest table names, if that is another one."""
        if feed.key not in self._feeds:
            return
        try:
            route = self._router.routes.log(feed.key)
        except MindgridError as error:
            self._end(feed, error)
            return
        former, feed.route = feed.route, route
        if former.host != route.host:
            self._followers[former.host].drop(feed.key)
            self._place(feed)

    def _hear(self, follower: _Follower, news: News) -> MindgridError | None:
        """Hand on what is new of one log; return the error if it is one."""
        feed = follower.feeds.get(news.namespace)
        if feed is None:
            # We left, but of two calls the host read the older one last.
            follower.left.add(news.namespace)
            return None
        follower.moved.add(feed.key)
        if isinstance(news.outcome, Failed):
            error = news.outcome.rebuild()
            self._fail(feed, error)
            return error
        feed.failing_since = None
        fresh = [one for one in news.outcome.value.events if one.cursor > feed.position]
        if fresh:
            feed.position = fresh[-1].cursor
            for tail in list(feed.tails):
                tail.push(fresh)
        return None

    def _fail(self, feed: _Feed, error: MindgridError) -> None:
        """Let the tails wait while it may pass, as long as a call may take; else end them."""
        now = asyncio.get_running_loop().time()
        feed.failing_since = feed.failing_since or now
        passes = isinstance(error, RetryError | Exhausted)
        if not passes or now - feed.failing_since > self._router.bounds.deadline_s:
            self._end(feed, error)

    def _end(self, feed: _Feed, error: MindgridError) -> None:
        for tail in list(feed.tails):
            tail.end(error)
