"""On real data: what 200 episodes of an agent say is what a log of them says.

5,108 messages, tool calls and results of an airline's desk, with the sizes and texts that agents
write. Skipped where the data is absent.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest
from tests.support.data import AgentEvent, airline
from tests.support.log_callers import Desk, Json, LogCaller

EVENTS = airline() or []
CURSORS = list(range(1, len(EVENTS) + 1))
BATCH, STEP = 300, 500

REAL = pytest.mark.skipif(not EVENTS, reason="the airline data set is absent")


def episodes(events: Iterable[AgentEvent]) -> dict[str, list[AgentEvent]]:
    """Return what was said in each episode, in order."""
    found: dict[str, list[AgentEvent]] = defaultdict(list)
    for event in events:
        found[event.episode].append(event)
    return found


def shown(events: Iterable[AgentEvent]) -> list[Json]:
    """Return how a range shows events of the file, but for what the server sets."""
    return [_body(event) for event in events]


def bare(stored: Iterable[Json]) -> list[Json]:
    """Return stored events without what the server sets."""
    server_set = {"id", "cursor", "timestamp", "deletedAt"}
    return [{key: event[key] for key in event.keys() - server_set} for event in stored]


def write(log: LogCaller, events: Sequence[AgentEvent]) -> list[Json]:
    """Append most events a batch at a time and the last of each by itself; return the stored."""
    stored: list[Json] = []
    for start in range(0, len(events), BATCH):
        *many, last = (
            _body(event) | {"dedupKey": f"{event.episode}:{event.seq}"}
            for event in events[start : start + BATCH]
        )
        stored += log.call("AppendBatch", events=many, includePayload=True).get("events", [])
        stored.append(log.call("Append", **last)["event"])
    return stored


def _body(event: AgentEvent) -> Json:
    payload = base64.b64encode(event.content.encode()).decode()
    metadata = {"tool": event.tool or ""} | {key: str(n) for key, n in event.metadata.items()}
    return {
        "type": event.kind,
        "role": event.actor,
        "sessionId": event.episode,
        "metadata": metadata,
        # What is empty is not shown.
        **({"payload": payload} if payload else {}),
    }


@pytest.fixture(scope="module")
def told(desk: Desk) -> tuple[LogCaller, list[Json]]:
    """A log with all events in the order of the file, and what its client was answered.

    For claims that change nothing of it.
    """
    log = desk.log()
    return log, write(log, EVENTS)


@REAL
def test_each_episode_is_reconstructed_by_its_session(told: tuple[LogCaller, list[Json]]) -> None:
    log, _ = told
    of_the_file = episodes(EVENTS)
    assert len(of_the_file) == 200
    for episode, events in of_the_file.items():
        assert bare(log.range(sessionId=episode)) == shown(events)


@REAL
def test_a_part_of_an_episode_is_found_by_role_type_and_from_its_end(
    told: tuple[LogCaller, list[Json]],
) -> None:
    log, _ = told
    for episode, events in list(episodes(EVENTS).items())[::8]:
        for role in ("user", "assistant", "tool"):
            found = bare(log.range(sessionId=episode, role=role))
            assert found == shown(event for event in events if event.actor == role)
        calls = log.range(sessionId=episode, role="assistant", type="tool_call")
        assert bare(calls) == shown(event for event in events if event.kind == "tool_call")
        assert bare(log.range(sessionId=episode, reverse=True)) == shown(events[::-1])
        assert bare(log.range(sessionId=episode, reverse=True, limit=3)) == shown(events[:-4:-1])


@REAL
def test_the_log_replayed_is_the_file(told: tuple[LogCaller, list[Json]]) -> None:
    log, answered = told
    assert bare(answered) == shown(EVENTS)
    assert [int(event["cursor"]) for event in answered] == CURSORS
    assert log.range() == answered
    assert log.replay().next(len(EVENTS)) == answered


@REAL
def test_a_client_that_writes_everything_again_changes_nothing(
    told: tuple[LogCaller, list[Json]],
) -> None:
    log, answered = told
    tail = log.tail()
    assert write(log, EVENTS) == answered
    assert log.range() == answered
    assert tail.is_quiet()


@REAL
def test_tails_that_come_in_the_middle_get_the_rest_and_their_episode(log: LogCaller) -> None:
    # All episodes at once, as many agents would write: each lies in pieces all over the log.
    events = sorted(EVENTS, key=lambda event: (event.seq, event.episode))
    middle = len(events) // 2
    before = write(log, events[:middle])
    wanted = episodes(events)
    longest = max(wanted, key=lambda episode: len(wanted[episode]))
    live, replayed = log.tail(), log.replay(after=middle - BATCH)
    of_one = log.replay(sessionId=longest)
    assert replayed.next(BATCH) == before[-BATCH:]
    for start in range(middle, len(events), BATCH):
        stored = write(log, events[start : start + BATCH])
        # Read along: who falls 1,024 events behind is detached.
        assert live.next(len(stored)) == replayed.next(len(stored)) == stored
    assert bare(of_one.next(len(wanted[longest]))) == shown(wanted[longest])
    assert all(tail.is_quiet(0.1) for tail in (live, replayed, of_one))
    for episode, said in wanted.items():
        assert bare(log.range(sessionId=episode)) == shown(said)


@REAL
def test_old_episodes_expire_in_steps_and_the_young_stay_whole(log: LogCaller) -> None:
    stored = write(log, EVENTS)
    of_the_file = episodes(EVENTS)
    old, young = list(of_the_file)[:100], list(of_the_file)[100:]
    count = sum(len(of_the_file[episode]) for episode in old)

    def expire(action: str, **of_all: object) -> None:
        """Expire the old episodes step by step, the oldest events first."""
        for done in range(0, count, STEP):
            due = min(STEP, count - done)
            assert log.expire(action, STEP, beforeCursor=count + 1) == due
            assert log.cursors(limit=1, **of_all) == [done + due + 1]
        assert log.expire(action, STEP, beforeCursor=count + 1) == 0
        assert log.range() == stored[count:]

    expire("SOFT_DELETE")
    audit = log.range(includeDeleted=True)
    assert bare(audit) == shown(EVENTS)
    assert [int(event["cursor"]) for event in audit if "deletedAt" in event] == CURSORS[:count]
    assert log.range(sessionId=old[-1]) == []
    assert bare(log.range(sessionId=old[-1], includeDeleted=True)) == shown(of_the_file[old[-1]])

    expire("HARD_DELETE", includeDeleted=True)
    assert log.range(includeDeleted=True) == stored[count:]
    for episode in young:
        assert bare(log.range(sessionId=episode)) == shown(of_the_file[episode])
    # Their keys are free, and what is written under them is new and comes last.
    again = write(log, of_the_file[old[0]])
    assert [int(event["cursor"]) for event in again] == [
        len(EVENTS) + n for n in range(1, len(again) + 1)
    ]
    assert log.range(sessionId=old[0]) == again
