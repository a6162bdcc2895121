"""What a commit does to a shard, resolved: no clock, no lookup and no filter is left in it.

A command becomes a `Commit` once, while it is planned; the journal stores commits, and applying
the same commits in the same order to an empty shard gives the same state, however often.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from mindgrid.shards.clock import NEVER, Instant
from mindgrid.shards.encoding import decoder, encode
from mindgrid.shards.transactions import Decided, Decision, Doubts, Prepare, Promise
from mindgrid.shards.types import Deleted, Expired, Result, Upserted, Vector


class RowWrite(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One new row; NEVER stands for an open `valid_to` and for no tombstone."""

    id: str
    content: str
    payload: bytes
    metadata: dict[str, str]
    created_at: int
    valid_from: int
    valid_to: int
    deleted_at: int
    supersedes: list[str]
    source: str
    version: int


class Change(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """New lifecycle values of the row with this number."""

    number: int
    valid_to: int
    deleted_at: int


class Decides(msgspec.Struct, array_like=True, frozen=True):
    """What this commit, by being durable, decides for the shards that take part in it."""

    key: str
    noted_at: Instant
    decided: Decided
    participants: tuple[int, ...]


NO_INSTANT = Instant(0)
"""The time of a step that takes no instant away from others: nothing changes by it."""


class Commit(msgspec.Struct, array_like=True, frozen=True):
    """One atomic change: rows get the numbers `first_number`, `first_number` + 1, …

    Rows come first, then changes (they may touch rows of this commit), then `erased`: ids whose
    rows, up to this commit, are gone at every instant of knowledge.

    Of a commit over several shards it may be a step: `prepares` promises and changes nothing yet,
    `resolves` ends the promise of that key, `decides` is the home's decision and `forgets` ends
    one. Then `at` may lie before that of earlier commits, though of no other row of the same ids.
    It is NO_INSTANT where nothing takes place.
    """

    seq: int
    at: int
    transaction_id: str
    first_number: int
    rows: list[RowWrite]
    changes: list[Change]
    erased: list[str]
    result: bytes
    prepares: Prepare | None = None
    resolves: str = ""
    decides: Decides | None = None
    forgets: str = ""

    @property
    def takes_place(self) -> bool:
        """Whether it is carried out at `at`, and not only promised, given up or forgotten."""
        return self.at != NO_INSTANT and self.prepares is None


class Group(msgspec.Struct, array_like=True, frozen=True):
    """Commits made durable together; `vectors` holds their rows' float32 vectors, row by row."""

    commits: list[Commit]
    vectors: bytes


class _StoredResult(msgspec.Struct, array_like=True, frozen=True):
    at: int
    versions: list[int] | None
    existed: bool | None
    affected: int | None = None


_group_decoder = decoder(Group)
_result_decoder = decoder(_StoredResult)


def encode_group(commits: Sequence[Commit], vectors: Sequence[Vector]) -> bytes:
    """Return the journal's bytes for these commits; `vectors` in the order of their rows."""
    return encode(Group(list(commits), b"".join(v.tobytes() for v in vectors)))


def decode_group(blob: bytes, dimensions: int) -> tuple[list[Commit], list[Vector]]:
    """Return the commits and their rows' vectors. Raises msgspec.DecodeError on other bytes."""
    group = _group_decoder.decode(blob)
    flat = np.frombuffer(group.vectors, dtype="<f4")
    return group.commits, list(flat.reshape(-1, dimensions))


def note(doubts: Doubts, commit: Commit) -> None:
    """Carry over to `doubts` what a durable commit says of commits over several shards."""
    if commit.prepares is not None:
        asked = commit.prepares
        promise = Promise(commit.seq, Instant(commit.at), asked.home, asked.command)
        doubts.promise(asked.key, promise)
    if commit.resolves:
        doubts.settle(commit.resolves)
    if commit.decides is not None:
        decided = commit.decides
        decision = Decision(decided.noted_at, decided.decided, decided.participants)
        doubts.decisions[decided.key] = decision
    if commit.forgets:
        doubts.forget(commit.forgets)


def encode_result(result: Result) -> bytes:
    """Return the bytes under which a transaction's result is remembered."""
    if isinstance(result, Upserted):
        return encode(_StoredResult(result.committed_at, list(result.versions), None))
    if isinstance(result, Deleted):
        return encode(_StoredResult(result.committed_at, None, result.existed))
    return encode(_StoredResult(result.committed_at, None, None, result.affected))


def decode_result(blob: bytes) -> Result:
    """Return the result that `encode_result` was given."""
    stored = _result_decoder.decode(blob)
    at = Instant(stored.at)
    if stored.versions is not None:
        return Upserted(tuple(stored.versions), at)
    if stored.affected is not None:
        return Expired(stored.affected, at)
    assert stored.existed is not None
    return Deleted(stored.existed, at)


def bound(instant: Instant | None) -> int:
    """Return the column value of an optional end."""
    return NEVER if instant is None else instant


def unbound(value: int) -> Instant | None:
    """Return the optional end that a column value stands for."""
    return None if value == NEVER else Instant(value)
