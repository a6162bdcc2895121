"""Who follows the logs of one host: each follower has one call waiting, whatever it follows.

    commit ─► the log calls its watchers ─► it is due for a follower ─► whose call reads and answers

A follower (`tails`) says in each call only what has changed. What was sent counts as received once
the follower moves behind it; one whose answer was lost begins anew, so nothing is lost with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from mindgrid.cluster import port
from mindgrid.cluster.port import Done, News, ShardKey, failed
from mindgrid.cluster.reader import is_fault, named
from mindgrid.cluster.spec import NamespaceKey
from mindgrid.shards.episodic.checks import check_whole
from mindgrid.shards.episodic.types import EpisodicLog, EventRange
from mindgrid.shards.errors import Exhausted, LostEvents, MindgridError

FOLLOWERS_MAX = 64
"""Each Front replica, and each handle that tails, is one; its call keeps a thread."""
PAGE_EVENTS = 1_000
_SILENT_S = 60.0
"""After so long without a call a follower is gone."""

Find = Callable[[ShardKey], EpisodicLog | MindgridError | Future[None]]


class _Follower:
    """What one follower follows. `lock` guards all of it; nothing else is locked while it is held.

    Watchers take it inside a log's own lock.
    """

    def __init__(self, life: int) -> None:
        self.life = life
        self.lock = threading.Condition()
        self.items: dict[NamespaceKey, port.FollowItem] = {}
        self.watched: dict[NamespaceKey, tuple[EpisodicLog, Callable[[], None]]] = {}
        self.due: set[NamespaceKey] = set()
        self.calls = 0
        self.waiting = 0
        self.ended = False
        self.silent_since_s = time.monotonic()

    def wake(self, namespace: NamespaceKey) -> None:
        """Have the waiting call look at this log."""
        with self.lock:
            if namespace in self.items:
                self.due.add(namespace)
                self.lock.notify_all()

    def end(self) -> None:
        """Answer the waiting call, and watch nothing any more."""
        with self.lock:
            self.ended = True
            watched = list(self.watched.values())
            self.watched.clear()
            self.lock.notify_all()
        for _, unwatch in watched:
            unwatch()


class Follows:
    """All methods may be called from any thread."""

    def __init__(self, find: Find, look_at: Callable[[ShardKey, EpisodicLog], None]) -> None:
        """Take what finds a log, and what is called with one whose reading failed."""
        self._find = find
        self._look_at = look_at
        self._lock = threading.Lock()
        self._followers: dict[str, _Follower] = {}

    def answer(self, call: port.FollowCall) -> port.FollowAnswer:
        """Wait for news of what the follower follows; raises Exhausted beyond FOLLOWERS_MAX."""
        follower = self._follower(call)
        if follower is None:
            return port.FollowAnswer(False, [])
        until = time.monotonic() + call.wait_s
        with follower.lock:
            follower.calls += 1
            follower.waiting += 1
            turn = follower.calls
            for item in call.moved:
                follower.items[item.namespace] = item
                follower.due.add(item.namespace)
            left = [follower.watched.pop(name) for name in call.left if name in follower.watched]
            for name in call.left:
                follower.items.pop(name, None)
                follower.due.discard(name)
            follower.lock.notify_all()
        for _, unwatch in left:
            unwatch()
        try:
            return self._wait(follower, turn, until)
        finally:
            with follower.lock:
                follower.waiting -= 1
                follower.silent_since_s = time.monotonic()

    def tend(self) -> None:
        """Forget followers that are silent."""
        horizon = time.monotonic() - _SILENT_S
        with self._lock:
            gone = [
                name
                for name, one in self._followers.items()
                if not one.waiting and one.silent_since_s < horizon
            ]
            ended = [self._followers.pop(name) for name in gone]
        for follower in ended:
            follower.end()

    def end(self) -> None:
        """Answer every call, and forget all followers."""
        with self._lock:
            followers = list(self._followers.values())
            self._followers.clear()
        for follower in followers:
            follower.end()

    def _follower(self, call: port.FollowCall) -> _Follower | None:
        with self._lock:
            known = self._followers.get(call.follower)
            if known is not None and call.life <= known.life:
                # A late call of an earlier life must change nothing.
                return known if call.life == known.life else None
            if not call.begins:
                return None
            if known is None and len(self._followers) >= FOLLOWERS_MAX:
                raise Exhausted("the followers of one host", FOLLOWERS_MAX)
            fresh = self._followers[call.follower] = _Follower(call.life)
        if known is not None:
            known.end()
        return fresh

    def _wait(self, follower: _Follower, turn: int, until: float) -> port.FollowAnswer:
        while True:
            with follower.lock:
                while not follower.due and turn == follower.calls and not follower.ended:
                    left = until - time.monotonic()
                    if left <= 0:
                        break
                    follower.lock.wait(left)
                if follower.ended:
                    return port.FollowAnswer(False, [])
                if turn != follower.calls or not follower.due:
                    return port.FollowAnswer(True, [])
                due = [follower.items[name] for name in follower.due]
                follower.due.clear()
            news = [one for item in due if (one := self._read(follower, item)) is not None]
            if news:
                return port.FollowAnswer(True, news)

    def _read(self, follower: _Follower, item: port.FollowItem) -> News | None:
        """Return the events behind the follower's place in one log; None if there is none yet."""
        name = item.namespace
        key = ShardKey(name, item.generation, 0)
        log = self._find(key)
        if isinstance(log, Future):
            log.add_done_callback(lambda _: follower.wake(name))
            return None
        if isinstance(log, MindgridError):
            return News(name, failed(log))
        self._watch(follower, name, log)
        try:
            after = EventRange(after_cursor=item.after_cursor, include_deleted=True)
            page = log.read(after, PAGE_EVENTS)
        except Exception as error:  # noqa: BLE001 - one log's bug is not the others'
            if is_fault(error):
                self._look_at(key, log)
            return News(name, failed(named(f"log {name}", error)))
        try:
            check_whole(str(name), item.after_cursor, page.last_cursor)
        except LostEvents as error:
            return News(name, failed(error))
        return News(name, Done(page)) if page.events else None

    def _watch(self, follower: _Follower, name: NamespaceKey, log: EpisodicLog) -> None:
        """Watch the log, if it is not watched already; before it is read, or a commit is missed."""
        with follower.lock:
            watched = follower.watched.get(name)
            if (watched is not None and watched[0] is log) or name not in follower.items:
                return
        unwatch = log.watch(lambda: follower.wake(name))
        with follower.lock:
            former = follower.watched.get(name)
            gone = follower.ended or name not in follower.items
            if not gone:
                follower.watched[name] = log, unwatch
        if gone:
            unwatch()
        if former is not None:
            former[1]()
