"""A host's followers: what a call answers, and what late, lost and repeated calls change."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest
from tests.support.clocks import TurnedClock

from mindgrid.cluster import port
from mindgrid.cluster.follows import FOLLOWERS_MAX, Follows
from mindgrid.cluster.port import Done, Failed, FollowAnswer, FollowCall, FollowItem, ShardKey
from mindgrid.cluster.spec import NamespaceKey
from mindgrid.shards.episodic.memory import MemoryLog
from mindgrid.shards.episodic.types import Append, EpisodicLog, EventDraft, LogConfig
from mindgrid.shards.errors import Exhausted, MindgridError, Moved

A, B = NamespaceKey("episodic", "a"), NamespaceKey("episodic", "b")


class Shelf:
    """Two logs, and what `find` says of them."""

    def __init__(self) -> None:
        self.logs: dict[NamespaceKey, EpisodicLog | MindgridError | Future[None]] = {
            name: MemoryLog(LogConfig(), TurnedClock()) for name in (A, B)
        }
        self.follows = Follows(lambda key: self.logs[key.namespace], self.looked_at)
        self.looks: list[ShardKey] = []

    def looked_at(self, key: ShardKey, log: EpisodicLog) -> None:
        self.looks.append(key)

    def append(self, name: NamespaceKey, count: int = 1) -> None:
        log = self.logs[name]
        assert isinstance(log, MemoryLog)
        log.submit(Append((EventDraft("t"),) * count)).result()

    def call(
        self,
        *moved: tuple[NamespaceKey, int],
        life: int = 1,
        begins: bool = False,
        left: tuple[NamespaceKey, ...] = (),
        wait_s: float = 0.0,
        follower: str = "f",
    ) -> FollowAnswer:
        items = [FollowItem(name, 1, after) for name, after in moved]
        return self.follows.answer(FollowCall(1, follower, life, begins, items, list(left), wait_s))


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def cursors(answer: FollowAnswer) -> dict[str, list[int]]:
    assert answer.known
    found = {}
    for news in answer.news:
        assert isinstance(news.outcome, Done)
        found[news.namespace.name] = [event.cursor for event in news.outcome.value.events]
    return found


def test_a_call_answers_with_what_lies_behind_each_place(shelf: Shelf) -> None:
    shelf.append(A, 5)
    shelf.append(B, 2)
    assert cursors(shelf.call((A, 3), (B, 0), begins=True)) == {"a": [4, 5], "b": [1, 2]}
    assert cursors(shelf.call((A, 5), (B, 2))) == {}
    shelf.append(B)
    assert cursors(shelf.call()) == {"b": [3]}


def test_a_waiting_call_is_answered_at_the_commit(shelf: Shelf) -> None:
    shelf.call((A, 0), begins=True)
    late = threading.Timer(0.1, lambda: shelf.append(A))
    late.start()
    started = time.monotonic()
    assert cursors(shelf.call(wait_s=20)) == {"a": [1]}
    assert time.monotonic() - started < 10


def test_a_newer_call_has_the_older_one_answered_at_once(shelf: Shelf) -> None:
    shelf.call((A, 0), begins=True)
    older: list[FollowAnswer] = []
    waiting = threading.Thread(target=lambda: older.append(shelf.call(wait_s=60)))
    waiting.start()
    time.sleep(0.1)
    shelf.call((B, 0))
    waiting.join(10)
    assert [cursors(one) for one in older] == [{}]


def test_a_log_that_was_left_is_heard_of_no_more(shelf: Shelf) -> None:
    shelf.call((A, 0), (B, 0), begins=True)
    shelf.call(left=(A,))
    shelf.append(A)
    shelf.append(B)
    assert cursors(shelf.call()) == {"b": [1]}


def test_an_unknown_follower_must_begin(shelf: Shelf) -> None:
    assert shelf.call((A, 0)) == FollowAnswer(False, [])
    assert shelf.call((A, 0), begins=True).known


def test_a_new_life_forgets_the_one_before_and_late_calls_of_that_change_nothing(
    shelf: Shelf,
) -> None:
    shelf.call((A, 0), begins=True)
    shelf.call((B, 0), life=2, begins=True)
    shelf.append(A)
    shelf.append(B)
    assert cursors(shelf.call(life=2)) == {"b": [1]}
    assert shelf.call((A, 0), left=(B,), life=1) == FollowAnswer(False, [])
    assert shelf.call((A, 0), life=1, begins=True) == FollowAnswer(False, [])
    shelf.append(B)
    assert cursors(shelf.call((B, 1), life=2)) == {"b": [2]}


def test_a_log_that_opens_later_is_heard_of_then(shelf: Shelf) -> None:
    log, opening = shelf.logs[A], Future[None]()
    shelf.logs[A] = opening
    assert cursors(shelf.call((A, 0), begins=True)) == {}
    shelf.logs[A] = log
    shelf.append(A)
    opening.set_result(None)
    assert cursors(shelf.call(wait_s=10)) == {"a": [1]}


def test_a_log_that_is_gone_is_told_by_its_error(shelf: Shelf) -> None:
    shelf.call((A, 0), begins=True)
    shelf.logs[A] = Moved("episodic/a/0", 1)
    (news,) = shelf.call((A, 0)).news
    assert isinstance(news.outcome, Failed)
    assert isinstance(news.outcome.rebuild(), Moved)


def test_a_log_that_was_opened_anew_is_watched_anew(shelf: Shelf) -> None:
    shelf.append(A)
    shelf.call((A, 1), begins=True)
    shelf.logs[A] = MemoryLog(LogConfig(), TurnedClock())
    shelf.append(A)
    shelf.call((A, 1))
    threading.Timer(0.1, lambda: shelf.append(A)).start()
    assert cursors(shelf.call(wait_s=10)) == {"a": [2]}


def test_followers_have_a_bound_and_the_next_is_refused(shelf: Shelf) -> None:
    for number in range(FOLLOWERS_MAX):
        shelf.call((A, 0), begins=True, follower=str(number))
    with pytest.raises(Exhausted, match=str(FOLLOWERS_MAX)):
        shelf.call((A, 0), begins=True, follower="one more")
    assert shelf.call((A, 0), life=2, begins=True, follower="0").known


def test_a_call_says_the_same_after_its_way_over_the_wire() -> None:
    call = FollowCall(3, "f", 2, True, [FollowItem(A, 1, 7)], [B], 20.0)
    assert port.decode_follow(port.encode(call)) == call
