"""The examples of the episodic specification, call by call, in the words that are printed there.

Its `grpcurl` calls are made as the HTTP bodies that they are, but for the namespace, which is the
claim's own. Its Python example is made of bodies too until there is a client.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from tests.support.log_callers import EPISODIC, Json, LogCaller

APPEND = """{"namespace":"events","type":"tool_call","payload":"aGk="}"""
RANGE = """{"namespace":"events","after_cursor":0}"""
SESSION = """{"namespace":"events","session_id":"sess-1"}"""
EXPIRE = """{"namespace":"events","before_cursor":1000,"action":"EXPIRE_ACTION_SOFT_DELETE","max_rows":500}"""  # noqa: E501 - as it is printed
TAIL = """{"namespace":"events"}"""


def answers(log: LogCaller, method: str, body: str) -> list[Json]:
    """Return the lines of an answer to a printed body."""
    mine = body.replace('"events"', f'"{log.namespace}"', 1)
    answer = log.desk.post(f"{EPISODIC}/{method}", mine)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.split("\n") if line]


def test_the_printed_calls_answer_as_the_text_around_them_says(log: LogCaller) -> None:
    (told,) = answers(log, "Append", APPEND)
    event = told["event"]
    assert event == {
        "id": event["id"],
        "cursor": "1",
        "timestamp": event["timestamp"],
        "type": "tool_call",
        "payload": "aGk=",
    }
    said = log.append(sessionId="sess-1")
    assert answers(log, "Range", RANGE) == [{"result": event}, {"result": said}]
    assert answers(log, "Range", SESSION) == [{"result": said}]
    assert answers(log, "Expire", EXPIRE) == [{"affected": "2"}]
    assert answers(log, "Range", RANGE) == []

    namespace = {"namespace": log.namespace}
    tail = log.desk.stream(f"{EPISODIC}/Tail", json.loads(TAIL) | namespace)
    assert tail.is_quiet(0.1)
    answers(log, "Append", APPEND)
    assert tail.cursors(1) == [3]


def test_the_python_example_runs_line_by_line(log: LogCaller) -> None:
    hi: Json = {"role": "user", "session_id": "sess-1", "dedup_key": "msg-42"}
    ev = log.append("hi", **hi)
    assert (ev["cursor"], ev["role"], ev["sessionId"]) == ("1", "user", "sess-1")
    assert log.append("hi", **hi) == ev

    v2 = log.append("v2", type="fact", supersedes=[ev["id"]], source="corr-7")
    # What "sess-1" said is what `v2` revises, so that nothing of it is left to handle.
    assert log.range(session_id="sess-1", role="user") == []
    assert len(log.range(session_id="sess-1", role="user", include_deleted=True)) == 1

    since = datetime.now(UTC) - timedelta(hours=1)
    assert log.range(after_time=since.isoformat()) == [v2]

    assert log.expire("SOFT_DELETE", 500, before_cursor=1000) == 1

    tail = log.tail(include_historical=True, after_cursor=0)
    assert tail.is_quiet(0.1)
    assert [log.append("new")] == tail.next()
