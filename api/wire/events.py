"""The messages of the episodic protos as plain structs; see `messages`, whose rules are theirs.

Apart from those of the semantic block, with which some share their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from mindgrid.api.wire.messages import Message
from mindgrid.shards.clock import Instant


class Event(Message, frozen=True, kw_only=True):
    """A stored event."""

    id: str = ""
    cursor: int = 0
    timestamp: Instant | None = None
    type: str = ""
    payload: bytes = b""
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)
    role: str = ""
    session_id: str = ""
    supersedes: Sequence[str] = ()
    source: str = ""
    deleted_at: Instant | None = None


class AppendRequest(Message, frozen=True, kw_only=True):
    """Append one event."""

    namespace: str = ""
    type: str = ""
    payload: bytes = b""
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)
    role: str = ""
    session_id: str = ""
    dedup_key: str = ""
    supersedes: Sequence[str] = ()
    source: str = ""
    expected_cursor: int | None = None


class AppendResponse(Message, frozen=True, kw_only=True):
    """The event as it is stored."""

    event: Event | None = None


class RangeRequest(Message, frozen=True, kw_only=True):
    """Replay a window."""

    namespace: str = ""
    after_cursor: int = 0
    before_cursor: int = 0
    limit: int = 0
    reverse: bool = False
    after_time: Instant | None = None
    before_time: Instant | None = None
    include_deleted: bool = False
    session_id: str = ""
    role: str = ""
    type: str = ""


class TailRequest(Message, frozen=True, kw_only=True):
    """Follow the log."""

    namespace: str = ""
    after_cursor: int = 0
    include_historical: bool = False
    session_id: str = ""
    role: str = ""
    type: str = ""
    include_deleted: bool = False


class ExpireRequest(Message, frozen=True, kw_only=True):
    """Do `action`, a number of the episodic proto's ExpireAction, to the oldest of a window."""

    namespace: str = ""
    before_cursor: int = 0
    before_time: Instant | None = None
    action: int = 0
    max_rows: int = 0
    transaction_id: str = ""


class ExpireResponse(Message, frozen=True, kw_only=True):
    """How many were touched."""

    affected: int = 0


class NewEvent(Message, frozen=True, kw_only=True):
    """One event of a batch."""

    type: str = ""
    payload: bytes = b""
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)
    role: str = ""
    session_id: str = ""
    dedup_key: str = ""
    supersedes: Sequence[str] = ()
    source: str = ""


class AppendBatchRequest(Message, frozen=True, kw_only=True):
    """Append many events, all or none."""

    namespace: str = ""
    events: Sequence[NewEvent] = ()
    expected_cursor: int | None = None
    include_payload: bool = False
    transaction_id: str = ""


class DescribeRequest(Message, frozen=True, kw_only=True):
    """Ask where a log begins and ends."""

    namespace: str = ""


class DescribeResponse(Message, frozen=True, kw_only=True):
    """The oldest cursor that is there, and the newest that was given."""

    first_cursor: int = 0
    last_cursor: int = 0


class AppendBatchResponse(Message, frozen=True, kw_only=True):
    """Aligned with the request's events."""

    events: Sequence[Event] = ()
