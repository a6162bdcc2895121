"""The seam between fan-out and hosts: what a host can be asked, and the bytes it is asked in.

Hot calls are bytes both ways: Ray moves bytes at half the price of objects, and one msgpack
message carries the work of many callers. An outcome belongs to one item of a call, so a query
that fails does not touch the others of its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from mindgrid.cluster.process import Process
from mindgrid.cluster.spec import NamespaceKey
from mindgrid.cluster.table import Table
from mindgrid.shards import encoding
from mindgrid.shards.clock import Instant
from mindgrid.shards.driver import Found, ShardStatus
from mindgrid.shards.episodic.types import (
    EventPage,
    EventRange,
    LogCommand,
    LogResult,
    LogStatus,
)
from mindgrid.shards.errors import MindgridError, pack, unpack
from mindgrid.shards.transactions import Reply, Request
from mindgrid.shards.types import (
    Answer,
    Command,
    Query,
    Result,
    Scan,
    Scanned,
    Selection,
    Stamp,
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

    async def scan(self, call: bytes) -> bytes:
        """Answer a ScanCall by a list of outcomes, one an item."""
        ...

    async def events(self, call: bytes) -> bytes:
        """Answer an EventsCall by a list of outcomes, one an item."""
        ...

    async def follow(self, call: bytes) -> bytes:
        """Answer a FollowCall by a FollowAnswer, once there is news or the wait is over."""
        ...

    async def commit(self, call: bytes) -> bytes:
        """Answer a CommitCall, once all of it is durable or refused, one outcome an item."""
        ...

    async def transact(self, call: bytes) -> bytes:
        """Answer a CommitCall of requests for commits over several shards, as `commit` does.

        Apart from it, so that neither waits for the other.
        """
        ...

    async def warm(self, call: bytes) -> bytes:
        """Open the shards of a WarmCall; answer, when all are open or failed, one outcome each.

        With an instant it waits, a second at most, until no commit over several shards is
        undecided that may take effect by then.
        """
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
    """Where the routing table and the hosts are found, and who orders what concerns several."""

    async def table(self, older_than: int, suspect: str) -> Table:
        """Return the table, if possible a newer one than version `older_than`.

        `suspect` names a host whose calls fail, or is empty: that one is looked at first.
        """
        ...

    def port(self, host: str) -> Port:
        """Return the way to a host; cheap, and never fails."""
        ...

    async def commit(self, call: bytes) -> bytes:
        """Carry out an OrderedCall, over all shards or none; answer its Result, encoded.

        Raises what the shards refuse it with, Unavailable if it may or may not be carried out: the
        same call again then tells, by its transaction id.
        """
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


class ScanItem(_Message, frozen=True):
    """A page of some shards of one namespace."""

    namespace: NamespaceKey
    generation: int
    shards: tuple[int, ...]
    scan: Scan
    stamp: Stamp | None


class ScanCall(_Message, frozen=True):
    """Pages for one host."""

    epoch: int
    items: list[ScanItem]


class EventsItem(_Message, frozen=True):
    """The first events of a range of one log, `limit` at most."""

    namespace: NamespaceKey
    generation: int
    range: EventRange
    limit: int


class EventsCall(_Message, frozen=True):
    """Ranges for one host."""

    epoch: int
    items: list[EventsItem]


class FollowItem(_Message, frozen=True):
    """A log, and the cursor of the newest event that the follower has of it."""

    namespace: NamespaceKey
    generation: int
    after_cursor: int


class FollowCall(_Message, frozen=True):
    """What has changed in the logs that a follower has at this host, since its last call.

    A follower is whoever chose the name `follower`. One that `begins` has said nothing yet in this
    `life`; a higher life ends the one before. The host answers an earlier call at once.
    """

    epoch: int
    follower: str
    life: int
    begins: bool
    moved: list[FollowItem]
    left: list[NamespaceKey]
    wait_s: float


class Write(_Message, frozen=True):
    """A command, or a step of a commit over several shards, for one shard or log."""

    shard: ShardKey
    request: Command | Request | LogCommand


class CommitCall(_Message, frozen=True):
    """Writes for one host; those of one shard are submitted in order."""

    epoch: int
    items: list[Write]


class OrderedCall(_Message, frozen=True):
    """A command that concerns several shards, or an id that such a one holds."""

    namespace: NamespaceKey
    command: Command
    deadline_s: float


class WarmCall(_Message, frozen=True):
    """Shards that must be open, and with `settled` in no doubt of that instant."""

    epoch: int
    shards: list[ShardKey]
    settled: Instant | None = None


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


class Doubt(_Message, frozen=True):
    """What an open shard knows of a commit over several shards that others may still ask about.

    An open prepare if `home` is another shard; if it is the shard itself, its decision, which the
    `participants` may not have learned.
    """

    shard: ShardKey
    key: str
    home: int
    participants: tuple[int, ...]


class HostHealth(_Message, frozen=True):
    """A host's process, its clock, its appointment, and what its open shards are in doubt of."""

    process: Process
    now: Instant
    epoch: int
    doubts: tuple[Doubt, ...] = ()


class ShardReport(_Message, frozen=True):
    """The state of one shard: open with its status, failed with the reason, or being opened."""

    shard: ShardKey
    status: ShardStatus | None
    failure: str


class LogReport(_Message, frozen=True):
    """The state of one log, as a `ShardReport` tells that of a shard."""

    log: NamespaceKey
    status: LogStatus | None
    failure: str


class HostStatus(_Message, frozen=True):
    """What a host holds; shards that nobody asked for yet are not open and not listed."""

    health: HostHealth
    rss_bytes: int
    shards: list[ShardReport]
    logs: list[LogReport]


AnswerOutcome = Done[Answer] | Failed | Opening
FoundOutcome = Done[Found] | Failed | Opening
ScannedOutcome = Done[Scanned] | Failed | Opening
EventsOutcome = Done[EventPage] | Failed | Opening
StepOutcome = Done[Result | Reply] | Failed | Opening
"""Of a step of a commit over several shards, or of a command that such a commit became."""
WriteOutcome = Done[Result | Reply | LogResult] | Failed | Opening
WarmOutcome = Done[None] | Failed


class News(_Message, frozen=True):
    """Events that a follower does not have, or why none can come."""

    namespace: NamespaceKey
    outcome: Done[EventPage] | Failed


class FollowAnswer(_Message, frozen=True):
    """News of some logs. If the follower is not `known`, it must begin anew."""

    known: bool
    news: list[News]


def failed(error: MindgridError) -> Failed:
    """Return the outcome of an item that failed."""
    return Failed(*pack(error))


encode = encoding.encode
decode_search = encoding.decoder(SearchCall).decode
decode_get = encoding.decoder(GetCall).decode
decode_commit = encoding.decoder(CommitCall).decode
decode_ordered = encoding.decoder(OrderedCall).decode
decode_result: Callable[[bytes], Result] = encoding.decoder(Result).decode  # type: ignore[arg-type]
decode_warm = encoding.decoder(WarmCall).decode
decode_appointment = encoding.decoder(Appointment).decode
decode_health = encoding.decoder(HostHealth).decode
decode_status = encoding.decoder(HostStatus).decode
decode_table = encoding.decoder(Table).decode
decode_answers = encoding.decoder(list[AnswerOutcome]).decode
decode_scan = encoding.decoder(ScanCall).decode
decode_scanned = encoding.decoder(list[ScannedOutcome]).decode
decode_found = encoding.decoder(list[FoundOutcome]).decode
decode_events = encoding.decoder(EventsCall).decode
decode_read = encoding.decoder(list[EventsOutcome]).decode
decode_follow = encoding.decoder(FollowCall).decode
decode_followed = encoding.decoder(FollowAnswer).decode
decode_written = encoding.decoder(list[WriteOutcome]).decode
decode_steps = encoding.decoder(list[StepOutcome]).decode
decode_warmed = encoding.decoder(list[WarmOutcome]).decode
