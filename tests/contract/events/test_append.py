"""Append and AppendBatch: cursors, what comes back, idempotency, revision and conditions."""

from __future__ import annotations

import base64
import uuid
from datetime import UTC, datetime, timedelta

from tests.support.callers import instant
from tests.support.log_callers import Desk, Json, LogCaller

MESSAGE: Json = {"type": "message"}
BATCH_MAX = 1_000
TEXT_BYTES_MAX = 512

ODD_TEXTS = [
    *("\u2028", "a\u2029b", "a\u0085b", "\x0b\x0c\x1c\x1d\x1e", "\r\n", "\n", "\x00", "\x7f"),
    *('"', "'", '"\\', "\\u2028", "\\n", '{"result": {}}', "</script>", "%2F", "null", "0"),
    *(" ", "  a  ", "\ufeff", "\uffff", "e\u0301", "\u00e9", "日本語", "שלום"),
    *("\U0001f600", "\U0001f468\u200d\U0001f469", "\U0001d11e" * (TEXT_BYTES_MAX // 4)),
]
"""Each is a line's end, a mark of JSON or a character that some code takes for something else."""


def batch(log: LogCaller, *events: Json, **more: object) -> list[Json]:
    """Append events at once and return them."""
    stored: list[Json] = log.call("AppendBatch", events=events, **more).get("events", [])
    return stored


def cursors_of(events: list[Json]) -> list[int]:
    return [int(event["cursor"]) for event in events]


# One event


def test_the_first_event_has_cursor_1_and_each_next_one_more(log: LogCaller) -> None:
    assert [log.append()["cursor"] for _ in range(5)] == ["1", "2", "3", "4", "5"]


def test_two_namespaces_count_by_themselves(desk: Desk, log: LogCaller) -> None:
    other = desk.log()
    log.fill(3)
    assert other.append()["cursor"] == "1"
    assert log.append()["cursor"] == "4"
    assert other.append()["cursor"] == "2"
    assert (log.cursors(), other.cursors()) == ([1, 2, 3, 4], [1, 2])


def test_appends_that_are_under_way_at_once_have_one_run_of_cursors(log: LogCaller) -> None:
    answers = log.at_once("Append", [{"type": f"t{n}"} for n in range(100)])
    events = [answer["event"] for answer in answers]
    assert [event["type"] for event in events] == [f"t{n}" for n in range(100)]
    assert sorted(cursors_of(events)) == list(range(1, 101))
    assert log.range() == sorted(events, key=lambda event: int(event["cursor"]))


def test_id_and_time_are_the_servers(log: LogCaller) -> None:
    events = [log.append() for _ in range(20)]
    assert len({uuid.UUID(event["id"]) for event in events}) == 20
    for event in events:
        assert abs(instant(event["timestamp"]) - datetime.now(UTC)) < timedelta(minutes=1)
    for field in ("id", "cursor", "timestamp"):
        words = log.refused("Append", **MESSAGE | {field: events[0][field]})
        assert words.startswith(f"{field}: ")


def test_times_never_decrease(log: LogCaller) -> None:
    for _ in range(30):
        log.append()
        log.fill(2)
    times = [instant(event["timestamp"]) for event in log.range()]
    assert len(times) == 90
    assert times == sorted(times)


def test_an_event_comes_back_with_every_field_it_was_given(log: LogCaller) -> None:
    given = {
        "type": "tool_call",
        "payload": base64.b64encode(bytes(range(256))).decode(),
        "metadata": {"k": "v", "ü": "", "": "x"},
        "role": "assistant",
        "sessionId": "sess-1",
        "source": "  corr-7 ?ü\n",
        "supersedes": [str(uuid.uuid4())],
    }
    event = log.call("Append", dedupKey="a key is not shown", **given)["event"]
    assert event == {
        **given,
        "id": event["id"],
        "cursor": "1",
        "timestamp": event["timestamp"],
    }
    log.fill(200)
    assert log.range(limit=1) == [event]


def test_any_text_comes_back_as_it_was_given(log: LogCaller) -> None:
    tail = log.tail()
    told = []
    for text in ODD_TEXTS:
        given = {
            "type": text,
            "role": text,
            "sessionId": text,
            "source": text * 100,
            "metadata": {text: "", "": text, text + "key": text * 50},
            "supersedes": [text],
            "payload": base64.b64encode(text.encode()).decode(),
        }
        event = log.call("Append", dedupKey=text, **given)["event"]
        server_set = ("id", "cursor", "timestamp")
        assert event == given | {field: event[field] for field in server_set}
        told.append(event)
    log.fill(200)
    assert log.range(limit=len(told)) == tail.next(len(told)) == told
    assert log.replay().next(len(told)) == told
    for text, event in zip(ODD_TEXTS, told, strict=True):
        # Each is a key and a value of its own, and equal to nothing else.
        assert log.append(type="else", dedupKey=text) == event
        assert log.range(type=text) == log.range(role=text) == log.range(sessionId=text) == [event]


def test_empty_and_large_values_come_back_as_they_were_given(log: LogCaller) -> None:
    large = "\u2028\U0001f600 and more" * 20_000
    octets = base64.b64encode(bytes(range(256)) * 8_000).decode()
    metadata = {"": "", "large": large} | {f"key {n}": "" for n in range(1_000)}
    tail = log.tail()
    empty: Json = {"role": "", "sessionId": "", "source": "", "dedupKey": ""}
    empty |= {"payload": "", "metadata": {}, "supersedes": []}
    told = [
        log.call("Append", type="large", payload=octets, source=large, metadata=metadata)["event"],
        log.call("Append", type="empty", **empty)["event"],
    ]
    assert (told[0]["payload"], told[0]["source"]) == (octets, large)
    assert told[0]["metadata"] == metadata
    assert told[1].keys() == {"id", "cursor", "timestamp", "type"}
    assert log.range() == tail.next(2) == log.replay().next(2) == told
    log.fill(200)
    assert log.range(limit=2) == told


def test_an_event_needs_nothing_but_its_type(log: LogCaller) -> None:
    event = log.call("Append", type="observation")["event"]
    assert event.keys() == {"id", "cursor", "timestamp", "type"}
    without: list[Json] = [{}, {"type": ""}, {"payload": "aGk=", "role": "user"}]
    for body in without:
        assert log.refused("Append", **body).startswith("type: ")
    assert log.cursors() == [1]


def test_a_text_that_is_too_long_is_named_with_its_limit(log: LogCaller) -> None:
    fields = {"type": "type", "role": "role", "sessionId": "session_id", "dedupKey": "dedup_key"}
    for spelled, named in fields.items():
        log.append(**{spelled: "ü" * (TEXT_BYTES_MAX // 2)})
        words = log.refused("Append", **MESSAGE | {spelled: "ü" * (TEXT_BYTES_MAX // 2) + "x"})
        assert words.startswith(f"{named}: ")
        assert str(TEXT_BYTES_MAX) in words
    assert log.cursors() == [1, 2, 3, 4]


def test_a_request_is_read_in_both_spellings(log: LogCaller) -> None:
    one = {"session_id": "s", "dedup_key": "k", "expected_cursor": 0}
    two = {"sessionId": "s", "dedupKey": "k", "expectedCursor": "0"}
    first = log.call("Append", **MESSAGE, **one)["event"]
    assert first["sessionId"] == "s"
    assert log.call("Append", **MESSAGE, **two)["event"] == first


def test_an_unknown_namespace_is_not_found_by_any_write(log: LogCaller) -> None:
    log.namespace = "nowhere"
    assert "episodic/nowhere" in log.refused("Append", 404, 5, **MESSAGE)
    assert "episodic/nowhere" in log.refused("AppendBatch", 404, 5, events=[MESSAGE])
    expire: Json = {"action": "EXPIRE_ACTION_HARD_DELETE", "maxRows": 1, "beforeCursor": 5}
    assert "episodic/nowhere" in log.refused("Expire", 404, 5, **expire)
    log.namespace = "n" * 70_000
    assert len(log.refused("Append", 404, 5, **MESSAGE)) < 200


def test_a_namespace_must_be_named(log: LogCaller) -> None:
    log.namespace = ""
    for method in ("AppendBatch", "Range", "Tail"):
        assert log.refused(method).startswith("namespace: ")
    assert log.refused("Append", **MESSAGE).startswith("namespace: ")


# Idempotency


def test_a_repeated_dedup_key_returns_the_stored_event_whatever_else_it_carries(
    log: LogCaller,
) -> None:
    first = log.append("v1", role="user", metadata={"k": "v"}, dedupKey="msg-42")
    assert log.append("v1", role="user", metadata={"k": "v"}, dedupKey="msg-42") == first
    log.fill(300)
    other = {"type": "note", "role": "tool", "sessionId": "s", "source": "x"}
    assert log.append("v2", dedupKey="msg-42", **other) == first
    assert log.cursors() == list(range(1, 302))
    assert log.range(limit=1) == [first]


def test_of_appends_under_one_key_that_are_under_way_at_once_one_writes(log: LogCaller) -> None:
    bodies: list[Json] = [{"type": f"t{n}", "dedupKey": f"k{n % 5}"} for n in range(50)]
    events = [answer["event"] for answer in log.at_once("Append", bodies)]
    stored = log.range()
    assert cursors_of(stored) == [1, 2, 3, 4, 5]
    for key in range(5):
        told = events[key::5]
        assert told == told[:1] * 10
        assert told[0] in stored


def test_an_empty_dedup_key_is_none(log: LogCaller) -> None:
    assert [log.append(dedupKey="")["cursor"] for _ in range(2)] == ["1", "2"]


def test_a_dedup_key_belongs_to_its_namespace(desk: Desk, log: LogCaller) -> None:
    mine, other = log.append(dedupKey="k"), desk.log().append(dedupKey="k")
    assert mine["id"] != other["id"]
    assert log.append(dedupKey="K")["cursor"] == "2", "keys are compared as they are"


def test_a_repeat_supersedes_nothing_not_even_itself(log: LogCaller) -> None:
    earlier, first = log.append(), log.append(dedupKey="k")
    ids = [earlier["id"], first["id"]]
    assert log.append(dedupKey="k", supersedes=ids) == first
    assert log.cursors() == [1, 2]


def test_a_dedup_key_is_freed_by_a_hard_delete_alone(log: LogCaller) -> None:
    first = log.append(dedupKey="expired")
    second = log.append(dedupKey="revised")
    assert log.expire("SOFT_DELETE", beforeCursor=2) == 1
    log.append(supersedes=[second["id"]])
    for key, stored in (("expired", first), ("revised", second)):
        repeat = log.append(dedupKey=key)
        assert repeat == stored | {"deletedAt": repeat["deletedAt"]}
    assert log.expire("HARD_DELETE", beforeCursor=3) == 2
    assert log.append(dedupKey="expired")["cursor"] == "4"
    assert log.append(dedupKey="revised")["cursor"] == "5"


# Revision


def test_an_event_tombstones_those_it_supersedes_in_its_own_commit(log: LogCaller) -> None:
    one, _, three = (log.append(f"v{n}") for n in range(3))
    new = log.append("v3", supersedes=[one["id"], three["id"]], source="corr-7")
    assert new["supersedes"] == [one["id"], three["id"]]
    assert log.cursors() == [2, 4]
    tombstones = [event.get("deletedAt") for event in log.range(includeDeleted=True)]
    assert tombstones == [new["timestamp"], None, new["timestamp"], None]


def test_a_tombstone_keeps_its_time(log: LogCaller) -> None:
    one = log.append()
    two = log.append(supersedes=[one["id"]])
    log.append(supersedes=[one["id"], two["id"]])
    assert log.range(includeDeleted=True)[0]["deletedAt"] == two["timestamp"]
    assert log.cursors() == [3]


def test_ids_that_name_no_event_of_the_log_are_ignored(desk: Desk, log: LogCaller) -> None:
    theirs = desk.log().append()["id"]
    mine = log.append()["id"]
    ids = ["nobody", str(uuid.uuid4()), theirs, mine + "0", "1"]
    assert log.append(supersedes=ids)["supersedes"] == ids
    assert log.cursors() == [1, 2]


def test_an_event_that_was_removed_is_superseded_by_nobody(log: LogCaller) -> None:
    gone = log.append()["id"]
    log.expire("HARD_DELETE", beforeCursor=2)
    log.append(supersedes=[gone])
    assert log.cursors(includeDeleted=True) == [2]


def test_an_id_may_be_spelled_as_any_uuid(log: LogCaller) -> None:
    ids = [log.append()["id"] for _ in range(3)]
    log.append(supersedes=[ids[0].upper(), f"{{{ids[1]}}}", ids[2].replace("-", "")])
    assert log.cursors() == [4]


def test_an_append_that_is_refused_supersedes_nothing(log: LogCaller) -> None:
    id = log.append()["id"]
    log.refused("Append", code=9, **MESSAGE, supersedes=[id], expectedCursor=7)
    events = [MESSAGE | {"supersedes": [id]}, {}]
    log.refused("AppendBatch", events=events)
    assert log.cursors(includeDeleted=True) == log.cursors() == [1]


# Conditions


def test_expected_cursor_0_stands_for_a_log_that_was_never_written_to(log: LogCaller) -> None:
    assert log.append(expectedCursor=0)["cursor"] == "1"
    log.refused("Append", code=9, **MESSAGE, expectedCursor=0)
    log.expire("HARD_DELETE", beforeCursor=2)
    log.refused("Append", code=9, **MESSAGE, expectedCursor=0)
    assert log.append(expectedCursor=1)["cursor"] == "2"


def test_where_the_log_ends_elsewhere_nothing_is_appended(log: LogCaller) -> None:
    log.fill(3)
    for expected in ("2", "4"):
        words = log.refused("Append", code=9, **MESSAGE, expectedCursor=expected)
        assert f"expected_cursor is {expected}" in words
        assert "last cursor is 3" in words
        log.refused("AppendBatch", code=9, events=[MESSAGE] * 2, expectedCursor=expected)
    assert log.cursors() == [1, 2, 3]
    assert cursors_of(batch(log, MESSAGE, MESSAGE, expectedCursor="3")) == [4, 5]


def test_a_repeat_by_dedup_key_is_answered_wherever_the_log_ends(log: LogCaller) -> None:
    first = log.append(dedupKey="k", expectedCursor=0)
    log.fill(5)
    assert log.append(dedupKey="k", expectedCursor=0) == first
    keyed = MESSAGE | {"dedupKey": "k"}
    assert cursors_of(batch(log, keyed, keyed, expectedCursor=0)) == [1, 1]
    # One that is to be written needs the log to end there.
    log.refused("AppendBatch", code=9, events=[keyed, MESSAGE], expectedCursor=0)
    assert log.cursors() == [1, 2, 3, 4, 5, 6]


# Many events


def test_a_batch_is_one_run_of_cursors_in_its_order(log: LogCaller) -> None:
    log.append()
    stored = batch(log, *({"type": f"t{n}", "role": "user"} for n in range(BATCH_MAX)))
    assert cursors_of(stored) == list(range(2, BATCH_MAX + 2))
    assert [event["type"] for event in stored] == [f"t{n}" for n in range(BATCH_MAX)]
    assert log.range(afterCursor=1) == stored


def test_a_batch_answers_with_payloads_only_where_asked_to(log: LogCaller) -> None:
    given = MESSAGE | {"payload": "aGk=", "sessionId": "s", "metadata": {"k": "v"}}
    (bare,) = batch(log, given)
    assert "payload" not in bare
    (whole,) = batch(log, given, includePayload=True)
    assert log.range() == [bare | {"payload": "aGk="}, whole]


def test_a_batch_of_nothing_writes_nothing(log: LogCaller) -> None:
    assert batch(log) == []
    assert log.append()["cursor"] == "1"


def test_a_batch_has_1000_events_at_most(log: LogCaller) -> None:
    words = log.refused("AppendBatch", events=[MESSAGE] * (BATCH_MAX + 1))
    assert words.startswith("events: has 1001")
    assert "1000" in words
    assert log.cursors() == []


def test_a_refused_event_is_named_by_its_place_and_takes_its_batch_along(log: LogCaller) -> None:
    def refused(bad: Json) -> str:
        return log.refused("AppendBatch", events=[MESSAGE, MESSAGE, bad, MESSAGE])

    assert refused({"role": "user"}).startswith("events[2].type: ")
    assert refused(MESSAGE | {"sessionId": "s" * 513}).startswith("events[2].session_id: ")
    assert refused(MESSAGE | {"cursor": "3"}).startswith("events[2].cursor: ")
    assert log.cursors() == []
    assert log.append()["cursor"] == "1"


def test_a_known_key_takes_no_cursor_of_the_run(log: LogCaller) -> None:
    old = MESSAGE | {"dedupKey": "old"}
    new = {"type": "note", "dedupKey": "new"}
    first = log.append("", **old)
    stored = batch(log, MESSAGE, old, new, new | {"type": "else"}, MESSAGE)
    assert cursors_of(stored) == [2, 1, 3, 3, 4]
    assert stored[1] == first
    assert stored[2] == stored[3]
    assert log.cursors() == [1, 2, 3, 4]


def test_a_batch_revises_what_came_before_it(log: LogCaller) -> None:
    ids = [log.append()["id"] for _ in range(3)]
    stored = batch(log, *(MESSAGE | {"supersedes": [id, ids[0]]} for id in ids[:2]))
    assert log.cursors() == [3, 4, 5]
    gone = log.range(includeDeleted=True, limit=2)
    assert [event["deletedAt"] for event in gone] == [stored[0]["timestamp"]] * 2


def test_a_repeated_transaction_is_answered_and_not_done_again(log: LogCaller) -> None:
    first = batch(log, MESSAGE, MESSAGE, transactionId="t")
    log.fill(300)
    assert batch(log, MESSAGE, MESSAGE, transactionId="t") == first
    assert batch(log, MESSAGE, MESSAGE, transactionId="t", expectedCursor=7) == first
    words = log.refused("AppendBatch", events=[MESSAGE], transactionId="t")
    assert words.startswith("transaction_id: ")
    assert log.append()["cursor"] == "303"


def test_a_transaction_that_comes_back_with_other_events_is_refused(log: LogCaller) -> None:
    named = {"type": "message", "metadata": {"a": "1", "b": "2"}}
    first = batch(log, named, transactionId="t")
    turned = named | {"metadata": {"b": "2", "a": "1"}}
    assert batch(log, turned, transactionId="t") == first
    for other in ({"type": "note"}, MESSAGE, named | {"metadata": {"a": "1"}}):
        words = log.refused("AppendBatch", events=[other], transactionId="t")
        assert words.startswith("transaction_id: 't' was used for another request")
    assert log.cursors() == [1]


def test_a_repeated_transaction_tells_of_its_own_events_even_if_they_were_removed(
    log: LogCaller,
) -> None:
    first = batch(log, MESSAGE, {"type": "note"}, transactionId="t")
    log.expire("HARD_DELETE", beforeCursor=2)
    assert batch(log, MESSAGE, {"type": "note"}, transactionId="t") == first
    log.expire("HARD_DELETE", beforeCursor=3)
    assert batch(log, MESSAGE, {"type": "note"}, transactionId="t") == first
    words = log.refused("AppendBatch", events=[MESSAGE, MESSAGE], transactionId="t")
    assert words.startswith("transaction_id: ")


def test_a_repeated_transaction_never_tells_of_another_event_than_the_first_time(
    log: LogCaller,
) -> None:
    log.append("first", dedupKey="k")
    asked = MESSAGE | {"dedupKey": "k"}
    batch(log, asked, MESSAGE, transactionId="t")
    log.expire("HARD_DELETE", beforeCursor=2)
    words = log.refused("AppendBatch", events=[asked, MESSAGE], transactionId="t")
    assert words.startswith("transaction_id: 't' was answered with the event at cursor 1")
