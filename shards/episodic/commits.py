"""What a commit does to a log, resolved: no clock and no lookup is left in it.

The journal stores commits; applying the same commits in the same order to an empty log gives the
same state, however often.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from mindgrid.shards.clock import Instant
from mindgrid.shards.encoding import decoder, encode
from mindgrid.shards.episodic.types import Append, LogCommand


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
    """What a transaction was told: the cursors of its drafts' events, or how many were affected.

    Cursors from `fresh_from` on are of events that it wrote itself. `request` is the digest of what
    it asked for.
    """

    at: Instant
    request: bytes
    cursors: list[int] | None
    fresh_from: int = 0
    affected: int = 0


def digest(command: LogCommand) -> bytes:
    """Return 16 bytes that tell requests apart; what a log must be at is not what is asked for."""
    asked = command.drafts if isinstance(command, Append) else replace(command, transaction_id="")
    return blake2b(_encode_sorted(asked), digest_size=16).digest()


# The order of metadata is no part of it.
_encode_sorted = msgspec.msgpack.Encoder(order="deterministic").encode
encode_commits = encode
decode_commits = decoder(list[LogCommit]).decode
decode_told = decoder(Told).decode


def encode_told(told: Told) -> bytes:
    """Return the bytes under which a transaction's result is remembered."""
    return encode(told)
