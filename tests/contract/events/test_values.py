"""What plain Python callers hand in, which no wire has looked at."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
from tests.support.log_callers import Desk, LogCaller

from mindgrid.shards.clock import Instant
from mindgrid.shards.episodic.types import EventDraft, EventRange
from mindgrid.shards.errors import InvalidRequest


def refused(desk: Desk, work: Coroutine[Any, Any, object]) -> str:
    with pytest.raises(InvalidRequest) as caught:
        desk.run(work)
    return caught.value.field


@pytest.mark.parametrize("limit", [-1, 2**32, "5", 1.5])
def test_a_limit_is_a_number_that_the_wire_can_say(desk: Desk, log: LogCaller, limit: Any) -> None:
    logs = desk.grid.logs
    assert refused(desk, logs.range(log.namespace, EventRange(), limit)) == "limit"
    assert refused(desk, logs.page(log.namespace, EventRange(), limit)) == "limit"


def test_a_page_without_a_limit_is_as_long_as_we_like(desk: Desk, log: LogCaller) -> None:
    log.fill(1_200)
    page = desk.run(desk.grid.logs.page(log.namespace, EventRange(), 0))
    assert page.more
    assert [event.cursor for event in page.events] == list(range(1, 1_001))


def test_what_is_no_event_or_no_range_is_named(desk: Desk, log: LogCaller) -> None:
    logs = desk.grid.logs
    bad: Any = {"type": "message"}
    assert refused(desk, logs.append(log.namespace, [EventDraft("note"), bad])) == "events[1]"
    assert refused(desk, logs.range(log.namespace, bad)) == "range"
    assert refused(desk, logs.tail(log.namespace, bad)) == "range"
    assert log.cursors() == []


@pytest.mark.parametrize(
    "range",
    [
        EventRange(before_cursor=3),
        EventRange(after_time=Instant(1)),
        EventRange(before_time=Instant(1)),
        EventRange(reverse=True),
    ],
)
def test_a_tail_has_no_end_and_goes_forward(desk: Desk, log: LogCaller, range: EventRange) -> None:
    (field,) = {"before_cursor", "after_time", "before_time", "reverse"} & {
        name for name in EventRange.__struct_fields__ if getattr(range, name)
    }
    for historical in (False, True):
        assert refused(desk, desk.grid.logs.tail(log.namespace, range, historical)) == field
