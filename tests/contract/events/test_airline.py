"""The log of an airline's desk: 200 real episodes written, reconstructed, followed and expired."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from itertools import groupby

import pytest
from tests.support.data import airline_events
from tests.support.log_callers import Json, LogCaller

BATCH = 400
"""Events a call, as an agent's harness flushes them; the last of a batch come one by one."""
ALONE = 20


def draft(event: Json) -> Json:
    """Return the append of an event of the file."""
    metadata = {name: str(value) for name, value in event["metadata"].items()}
    if event["tool"] is not None:
        metadata["tool"] = event["tool"]
    return {
        "type": event["kind"],
        "payload": base64.b64encode(event["content"].encode()).decode(),
        "metadata": metadata,
        "role": event["actor"],
        "sessionId": event["episode"],
        "dedupKey": event["id"],
    }


def write(log: LogCaller, drafts: Sequence[Json]) -> list[int]:
    """Append them in their order, and return their cursors."""
    cursors: list[int] = []
    for start in range(0, len(drafts), BATCH):
        *batch, end = range(start, min(start + BATCH, len(drafts)) - ALONE + 1)
        stored = log.call("AppendBatch", events=[drafts[n] for n in batch])["events"]
        stored += [log.call("Append", **one)["event"] for one in drafts[end : start + BATCH]]
        cursors += [int(event["cursor"]) for event in stored]
    return cursors


def as_given(events: Sequence[Json]) -> list[Json]:
    """Return what of stored events a client had given, but for the dedup key."""
    fields = ("type", "payload", "metadata", "role", "sessionId")
    return [{field: event.get(field, "") for field in fields} for event in events]


@pytest.mark.skipif(airline_events() is None, reason="the airline log is absent")
def test_a_log_of_real_episodes_is_appended_replayed_followed_and_expired(log: LogCaller) -> None:
    file = airline_events()
    assert file is not None
    drafts = [draft(event) for event in file]
    given = as_given(drafts)
    episodes = {id: list(lines) for id, lines in groupby(given, lambda one: one["sessionId"])}
    assert (len(file), len(episodes)) == (5_108, 200)

    half = len(drafts) // 2
    late = given[-1]["sessionId"]
    one_episode = log.tail(sessionId=late)
    assert write(log, drafts[:half]) == list(range(1, half + 1))
    live = log.tail()
    assert write(log, drafts[half:]) == list(range(half + 1, len(drafts) + 1))
    assert as_given(live.next(len(drafts) - half)) == given[half:]
    assert as_given(one_episode.next(len(episodes[late]))) == episodes[late]

    # Every retry finds what is there already.
    assert write(log, drafts) == list(range(1, len(drafts) + 1))

    whole = log.range()
    assert as_given(whole) == given
    assert log.replay().next(len(drafts)) == whole
    for id, lines in episodes.items():
        assert as_given(log.range(sessionId=id)) == lines
    for id in list(episodes)[::20]:
        for field in ("role", "type"):
            for value in {line[field] for line in episodes[id]}:
                chosen = [line for line in episodes[id] if line[field] == value]
                assert as_given(log.range(sessionId=id, **{field: value})) == chosen
        newest = episodes[id][:-4:-1]
        assert as_given(log.range(sessionId=id, reverse=True, limit=3)) == newest

    # What is behind the first half grows old: hidden first, then removed.
    steps: list[int] = []
    while not steps or steps[-1]:
        steps.append(log.expire("SOFT_DELETE", 1_000, beforeCursor=half + 1))
    assert steps == [1_000, 1_000, half - 2_000, 0]
    assert log.range() == whole[half:]
    retained = log.range(includeDeleted=True)
    assert as_given(retained) == given
    assert all("deletedAt" in event for event in retained[:half])
    assert log.expire("HARD_DELETE", 1_500, beforeCursor=half + 1) == 1_500
    assert log.cursors(includeDeleted=True) == list(range(1_501, len(drafts) + 1))
    assert log.expire("HARD_DELETE", 10_000, beforeCursor=half + 1) == half - 1_500
    assert log.range(includeDeleted=True) == whole[half:]
    assert as_given(log.range(sessionId=late)) == episodes[late]

    # Their keys are free again, and no cursor comes back.
    assert int(log.call("Append", **drafts[0])["event"]["cursor"]) == len(drafts) + 1
