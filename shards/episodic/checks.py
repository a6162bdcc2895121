"""What a command or a read of an episodic log must satisfy, in one place for every caller.

As `checks` for the semantic block: pure, raising InvalidRequest that names the field as the wire
calls it. A log asserts these rules and words no errors of its own.
"""

from __future__ import annotations

from mindgrid.shards.checks import (
    MAX_ROWS_MAX,
    check_ids,
    check_map,
    check_text,
    check_time,
)
from mindgrid.shards.episodic.types import (
    EventAction,
    EventDraft,
    EventRange,
    ExpireEvents,
    LogCommand,
)
from mindgrid.shards.errors import InvalidRequest, LostEvents
from mindgrid.shards.types import ID_BYTES_MAX

BATCH_EVENTS_MAX = 1_000
LIMIT_MAX = 2**32 - 1
"""What the wire can say."""
CURSOR_MAX = 2**64 - 1
"""What the wire can say; more than a log ever gives."""


def check_log_command(command: LogCommand, batch: bool = False) -> None:
    """Refuse a command with any value that a log could not keep.

    With `batch` a draft's fields are named with its place among the `events`.
    """
    check_text(command.transaction_id, "transaction_id", ID_BYTES_MAX)
    if isinstance(command, ExpireEvents):
        _check_expire(command)
        return
    if command.expected_cursor is not None:
        _check_cursor(command.expected_cursor, "expected_cursor")
    if len(command.drafts) > BATCH_EVENTS_MAX:
        problem = f"has {len(command.drafts)} events, but at most {BATCH_EVENTS_MAX} are allowed"
        raise InvalidRequest("events", problem)
    for index, draft in enumerate(command.drafts):
        try:
            _check_draft(draft)
        except InvalidRequest as error:
            if not batch:
                raise
            field = f"events[{index}].{error.field}".removesuffix(".")
            raise InvalidRequest(field, error.problem) from None


def check_log_repeat(command: LogCommand, is_the_same: bool) -> None:
    """Refuse a transaction id that comes back with another request than its first."""
    if not is_the_same:
        problem = f"{command.transaction_id!r} was used for another request; choose a new one"
        raise InvalidRequest("transaction_id", problem)


def answer_removed(command: LogCommand, cursor: int) -> InvalidRequest:
    """Return the refusal of a repeat whose first answer had an event of others, now removed."""
    problem = (
        f"{command.transaction_id!r} was answered with the event at cursor {cursor}, "
        "which has been removed since; choose a new one"
    )
    return InvalidRequest("transaction_id", problem)


def check_range(range: EventRange, limit: int = 0) -> None:
    """Refuse a range with a bound or a filter that no event could be compared with."""
    if not isinstance(range, EventRange):
        raise InvalidRequest("range", f"must be an EventRange, not {type(range).__name__}")
    if not isinstance(limit, int) or not 0 <= limit <= LIMIT_MAX:
        raise InvalidRequest("limit", f"is {limit!r:.64}, but must be from 0 to {LIMIT_MAX}")
    _check_cursor(range.after_cursor, "after_cursor")
    _check_cursor(range.before_cursor, "before_cursor")
    check_time(range.after_time, "after_time")
    check_time(range.before_time, "before_time")
    check_text(range.session_id, "session_id", ID_BYTES_MAX)
    check_text(range.role, "role", ID_BYTES_MAX)
    check_text(range.type, "type", ID_BYTES_MAX)


def check_followed(range: EventRange) -> None:
    """Refuse what a tail has no use for: all bounds but `after_cursor`."""
    check_range(range)
    given = {
        "before_cursor": range.before_cursor != 0,
        "after_time": range.after_time is not None,
        "before_time": range.before_time is not None,
        "reverse": range.reverse,
    }
    for field, is_set in given.items():
        if is_set:
            raise InvalidRequest(field, "must be left out; a tail has no end and goes forward")


def check_whole(namespace: str, seen: int, last_cursor: int) -> None:
    """Refuse to go on in a log whose end lies before a cursor that was seen in it."""
    if last_cursor < seen:
        raise LostEvents(namespace, seen, last_cursor)


def _check_draft(draft: EventDraft) -> None:
    if not isinstance(draft, EventDraft):
        raise InvalidRequest("", f"must be an EventDraft, not {type(draft).__name__}")
    check_text(draft.type, "type", ID_BYTES_MAX)
    if not draft.type:
        raise InvalidRequest("type", "must not be empty")
    if not isinstance(draft.payload, bytes):
        raise InvalidRequest("payload", f"must be bytes, not {type(draft.payload).__name__}")
    check_map(draft.metadata, "metadata")
    check_text(draft.role, "role", ID_BYTES_MAX)
    check_text(draft.session_id, "session_id", ID_BYTES_MAX)
    check_text(draft.dedup_key, "dedup_key", ID_BYTES_MAX)
    check_ids(draft.supersedes, "supersedes")
    check_text(draft.source, "source")


def _check_expire(command: ExpireEvents) -> None:
    _check_cursor(command.before_cursor, "before_cursor")
    check_time(command.before_time, "before_time")
    if not command.before_cursor and command.before_time is None:
        problem = "set before_cursor, before_time or both; without a bound nothing is expired"
        raise InvalidRequest("before_cursor", problem)
    if not isinstance(command.action, EventAction):
        problem = f"must be SOFT_DELETE or HARD_DELETE, not {command.action!r:.64}"
        raise InvalidRequest("action", problem)
    if not 0 < command.max_rows <= MAX_ROWS_MAX:
        problem = f"is {command.max_rows}, but must be from 1 to {MAX_ROWS_MAX}"
        raise InvalidRequest("max_rows", problem)


def _check_cursor(cursor: int, field: str) -> None:
    if not isinstance(cursor, int) or not 0 <= cursor <= CURSOR_MAX:
        raise InvalidRequest(field, f"is {cursor}, but must be from 0 to {CURSOR_MAX}")
