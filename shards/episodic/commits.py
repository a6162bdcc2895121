"""What a commit does to a log, resolved: no clock and no lookup is left in it.

The journal stores commits; applying the same commits in the same order to an empty log gives the
same state, however often.
"""

from __future__ import annotations

import msgspec

from mindgrid.shards.clock import Instant
from mindgrid.shards.encoding import decoder, encode


class EventWrite(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One new event, as its draft says; its commit has the time and the cursor."""

    type: str
    payload: bytes
    metadata: dict[str, str]
    role: str
    session_id: str
    dedup_key: str
    supersedes: tuple[str, ...]
    source: str


class LogCommit(msgspec.Struct, array_like=True, frozen=True):
    """One atomic change: events get the cursors `first_cursor`, `first_cursor` + 1, …

    First come the events, then the tombstones (they may be of events of this commit), at the
    commit's time; then all events up to `removed_until` are gone, 0 for none.
    """

    seq: int
    at: int
    transaction_id: str
    first_cursor: int
    events: list[EventWrite]
    tombstones: list[int]
    removed_until: int
    result: bytes


class Told(msgspec.Struct, array_like=True, frozen=True):
    """What a transaction was told: the cursors of its drafts' events, or how many were affected."""

    at: Instant
    cursors: list[int] | None
    affected: int = 0


encode_commits = encode
decode_commits = decoder(list[LogCommit]).decode
decode_told = decoder(Told).decode


def encode_told(told: Told) -> bytes:
    """Return the bytes under which a transaction's result is remembered."""
    return encode(told)
