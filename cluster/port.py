"""The seam between fan-out and hosts: what a host can be asked, and the bytes it is asked in.

Hot calls are bytes both ways: Ray moves bytes at half the price of objects, and one msgpack
message carries the work of many callers. An outcome belongs to one item of a call, so a query
that fails does not touch the others of its batch.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import msgspec
import numpy as np

from mindgrid.cluster.process import Process
from mindgrid.cluster.spec import NamespaceKey
from mindgrid.cluster.table import Table
from mindgrid.shards.clock import Instant
from mindgrid.shards.driver import Found, ShardStatus
from mindgrid.shards.errors import MindgridError, pack, unpack
from mindgrid.shards.types import (
    Answer,
    Delete,
    Deleted,
    Expire,
    Expired,
    Query,
    Result,
    Selection,
    Stamp,
    Upsert,
    Upserted,
    Vector,
    Want,
)


class Port(Protocol):
    """One host, as seen from outside its process.

    Every call raises Moved for an epoch that is not the host's, Unavailable if the host is away;
    what happened to the call's work is then unknown.
    """

    async def search(self, call: bytes, heavy: bool = False) -> bytes:
        """Answer a SearchCall by a list of outcomes, one a query, in order.

        Heavy calls wait for each other and delay no other.
        """
        ...

    async def get(self, call: bytes) -> bytes:
        """Answer a GetCall by a list of outcomes, one an item."""
        ...

    async def commit(self, call: bytes) -> bytes:
        """Answer a CommitCall, once all of it is durable or refused, one outcome an item."""
        ...

    async def warm(self, call: bytes) -> bytes:
        """Open the shards of a WarmCall; answer, when all are open or failed, one outcome each."""
        ...

    async def appoint(self, appointment: bytes) -> bytes:
        """Take an Appointment; answer a HostHealth once shards that went elsewhere are closed."""
        ...

    async def health(self, skew_us: int | None = None) -> bytes:
        """Answer a HostHealth; the coordinator says how far this host's clock is ahead of its."""
        ...

    async def status(self) -> bytes:
        """Answer a HostStatus."""
        ...


class Directory(Protocol):
    """Where the routing table and the hosts are found."""

    async def table(self, older_than: int, suspect: str) -> Table:
        """Return the table, if possible a newer one than version `older_than`.

        `suspect` names a host whose calls fail, or is empty: that one is looked at first.
        """
        ...

    def port(self, host: str) -> Port:
        """Return the way to a host; cheap, and never fails."""
        ...


T = TypeVar("T")


class _Message(msgspec.Struct, array_like=True, frozen=True):
    """A message between two processes of one version: fields by position, no names."""


class Done(_Message, Generic[T], tag=0, frozen=True):
    """The item was done."""

    value: T


class Failed(_Message, tag=1, frozen=True):
    """The item failed by itself."""

    error: str
    fields: list[str | int | float]

    def rebuild(self) -> MindgridError:
        """Return the error that the host's side packed."""
        return unpack(self.error, self.fields)


class Opening(_Message, tag=2, frozen=True):
    """The shard is being opened: ask again once `Port.warm` has answered.

    Waiting inside the call would make every other item of its batch wait for this shard's disk.
    """


class ShardKey(_Message, frozen=True):
    """One shard of one generation of a namespace."""

    namespace: NamespaceKey
    generation: int
    shard: int

    def __str__(self) -> str:
        return f"{self.namespace}/{self.shard}"


class SearchItem(_Message, frozen=True):
    """Queries over some shards of one namespace. Without a stamp the host's clock stamps them."""

    namespace: NamespaceKey
    generation: int
    shards: tuple[int, ...]
    stamp: Stamp | None
    queries: list[Query]


class SearchCall(_Message, frozen=True):
    """One lane's batch for one host."""

    epoch: int
    items: list[SearchItem]


class GetItem(_Message, frozen=True):
    """Ids of one namespace with the shard of each."""

    namespace: NamespaceKey
    generation: int
    ids: tuple[tuple[int, str], ...]
    selection: Selection
    want: Want
    stamp: Stamp | None


class GetCall(_Message, frozen=True):
    """Reads by id for one host."""

    epoch: int
    items: list[GetItem]


class WriteUpsert(_Message, tag=0, frozen=True):
    """An Upsert for one shard."""

    shard: ShardKey
    command: Upsert


class WriteDelete(_Message, tag=1, frozen=True):
    """A Delete for one shard."""

    shard: ShardKey
    command: Delete


class WriteExpire(_Message, tag=2, frozen=True):
    """An Expire for one shard."""

    shard: ShardKey
    command: Expire


Write = WriteUpsert | WriteDelete | WriteExpire


class CommitCall(_Message, frozen=True):
    """Commands for one host; those of one shard are submitted in order."""

    epoch: int
    items: list[Write]


class WarmCall(_Message, frozen=True):
    """Shards that must be open."""

    epoch: int
    shards: list[ShardKey]


class Appointment(_Message, frozen=True):
    """What makes a host the owner of its shards: all those that the table places on it.

    `predecessors` are the processes that were this host before; the new one ends those that are
    still there, for a stopped process keeps its locks.
    """

    host: str
    epoch: int
    table: Table
    storage: str
    predecessors: tuple[Process, ...]


class HostHealth(_Message, frozen=True):
    """A host's process, its clock and its appointment."""

    process: Process
    now: Instant
    epoch: int


class ShardReport(_Message, frozen=True):
    """The state of one shard: open with its status, failed with the reason, or being opened."""

    shard: ShardKey
    status: ShardStatus | None
    failure: str


class HostStatus(_Message, frozen=True):
    """What a host holds; shards that nobody asked for yet are not open and not listed."""

    health: HostHealth
    rss_bytes: int
    shards: list[ShardReport]


AnswerOutcome = Done[Answer] | Failed | Opening
FoundOutcome = Done[Found] | Failed | Opening


class UpsertedReply(_Message, tag=10, frozen=True):
    """An Upsert that is durable."""

    result: Upserted


class DeletedReply(_Message, tag=11, frozen=True):
    """A Delete that is durable."""

    result: Deleted


class ExpiredReply(_Message, tag=12, frozen=True):
    """An Expire that is durable."""

    result: Expired


WriteOutcome = UpsertedReply | DeletedReply | ExpiredReply | Failed | Opening
WarmOutcome = Done[None] | Failed


def write_outcome(result: Result | MindgridError) -> WriteOutcome:
    """Return the outcome of one command."""
    match result:
        case Upserted():
            return UpsertedReply(result)
        case Deleted():
            return DeletedReply(result)
        case Expired():
            return ExpiredReply(result)
        case _:
            return failed(result)


def failed(error: MindgridError) -> Failed:
    """Return the outcome of an item that failed."""
    return Failed(*pack(error))


_NO_VECTOR: Vector = np.empty(0, dtype=np.float32)


def _to_bytes(value: object) -> bytes:
    if isinstance(value, np.ndarray):
        assert value.dtype == np.float32
        return value.tobytes()
    raise NotImplementedError(f"no bytes are agreed on for {type(value).__name__}")


def _from_bytes(kind: object, value: object) -> Vector:
    # The only custom type of the messages is Vector. What comes back cannot be written to.
    assert isinstance(value, bytes)
    return np.frombuffer(value, dtype=np.float32) if value else _NO_VECTOR


M = TypeVar("M")

encode = msgspec.msgpack.Encoder(enc_hook=_to_bytes).encode


def _decoder(kind: type[M]) -> msgspec.msgpack.Decoder[M]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_from_bytes)


decode_search = _decoder(SearchCall).decode
decode_get = _decoder(GetCall).decode
decode_commit = _decoder(CommitCall).decode
decode_warm = _decoder(WarmCall).decode
decode_appointment = _decoder(Appointment).decode
decode_health = _decoder(HostHealth).decode
decode_status = _decoder(HostStatus).decode
decode_table = _decoder(Table).decode
decode_answers = _decoder(list[AnswerOutcome]).decode
decode_found = _decoder(list[FoundOutcome]).decode
decode_written = _decoder(list[WriteOutcome]).decode
decode_warmed = _decoder(list[WarmOutcome]).decode
