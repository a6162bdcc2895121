"""The rules of a commit over several shards: who is asked what, in which order, and who waits.

    admitted ─► Prepare to every shard but the home ─► all promise ─► Decide at the home
                      │ one refuses or is silent                          │ silent: Ask it
                      ▼                                                   ▼
                Resolve(None) to all that may have promised        Resolve(time) to the others
                                                                          ▼
                                                          all say so: Forget at the home

All or nothing: only the home's one durable commit decides. Before it nobody has carried out
anything; after it every other shard holds a durable promise, and whoever finds one asks the home.
A home that knows nothing gives the attempt up for good before it says so.

No deadlock: a shard never waits, it answers Locked; and commits are admitted in the order in which
they come, each once all its ids are free, all at once. So the only waiting is here, first come
first served, by id.

Pure: no I/O, no clock. `committer` carries the messages; tests/unit/test_transactions.py lets a
model of shards with skewed clocks lose, delay and reorder them, and kills whoever takes part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from mindgrid.shards.errors import CallerError, MindgridError, OperatorError, Unavailable
from mindgrid.shards.transactions import (
    Ask,
    Chosen,
    Decide,
    Decided,
    Forget,
    Prepare,
    Prepared,
    Reply,
    Request,
    Resolve,
    Resolved,
)
from mindgrid.shards.types import (
    Command,
    Delete,
    Draft,
    Expire,
    Expired,
    Supersession,
    Upsert,
    Upserted,
)

Sends = list[tuple[int, Request]]
"""Messages to shards, by their numbers, to be sent at once."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A command, taken apart: what each shard does, and which of them decides.

    The home is found from the command alone, so that a retry asks the shard that remembers.
    """

    home: int
    commands: Mapping[int, Upsert | Expire]
    order: tuple[int, ...] = ()


def parts_of_upsert(command: Upsert, shard_of: Callable[[str], int]) -> Parts:
    """Return each shard's part of an Upsert: its drafts, and what other drafts do to its records.

    Within a shard everything stays in the order of the batch.
    """
    order = tuple(shard_of(draft.id) for draft in command.drafts)
    drafts: dict[int, list[Draft]] = {}
    ended: dict[int, list[Supersession]] = {}
    for shard, draft in zip(order, command.drafts, strict=True):
        drafts.setdefault(shard, []).append(draft)
        for target in draft.supersedes:
            other = shard_of(target)
            if other != shard:
                place = len(drafts.get(other, ()))
                ended.setdefault(other, []).append(Supersession(target, draft.valid_from, place))
    home = order[0]
    return Parts(
        home,
        {
            shard: Upsert(
                command.transaction_id if shard == home else "",
                tuple(drafts.get(shard, ())),
                tuple(ended.get(shard, ())),
            )
            for shard in sorted(drafts.keys() | ended.keys())
        },
        order,
    )


def parts_of_expire(command: Expire, chosen: Mapping[int, Chosen]) -> Parts:
    """Return each shard's part of an Expire: of what they chose, the oldest of all.

    The home is the first shard, even if nothing of it is touched.
    """
    keys = sorted((key, shard) for shard, choice in chosen.items() for key in choice.keys)
    ids: dict[int, list[str]] = {0: []}
    for (_, id), shard in keys[: command.max_rows]:
        ids.setdefault(shard, []).append(id)
    return Parts(
        0,
        {
            shard: Expire(
                command.transaction_id if shard == 0 else "",
                command.equals,
                command.action,
                command.max_rows,
                tuple(mine),
            )
            for shard, mine in ids.items()
        },
    )


@dataclass(slots=True)
class Transaction:
    """One attempt at a commit of several parts, under a key of its own.

    `start` and `heard` return what is to be sent now. Every message is answered by `heard` exactly
    once: with the shard's reply, with an error if nothing was done, or with None if what became of
    it is unknown. `answer` is set once the caller may be told; the rest is nobody's wait.
    """

    key: str
    parts: Parts
    answer: Upserted | Expired | MindgridError | None = None
    over: bool = False
    """Whether nothing is left to be heard of."""
    unsure: bool = False
    """Whether a shard may be left with a promise that somebody must yet resolve."""
    _votes: dict[int, Prepared] = field(default_factory=dict)
    _silent: set[int] = field(default_factory=set)
    _awaited: set[int] = field(default_factory=set)
    _outcome: Upserted | Expired | MindgridError | None = None
    _decided: Decided | None = None

    def start(self) -> Sends:
        """Return the first messages."""
        home, commands = self.parts.home, self.parts.commands
        return self._send([(s, Prepare(self.key, home, commands[s])) for s in self._others])

    def heard(self, shard: int, reply: Reply | MindgridError | None) -> Sends:
        """Take what became of the message to `shard`."""
        self._awaited.remove(shard)
        if self._decided is not None:
            return self._heard_of_end(shard, reply)
        if shard == self.parts.home:
            return self._heard_of_decision(reply)
        return self._heard_of_promise(shard, reply)

    @property
    def _others(self) -> list[int]:
        return [shard for shard in self.parts.commands if shard != self.parts.home]

    def _heard_of_promise(self, shard: int, reply: Reply | MindgridError | None) -> Sends:
        if isinstance(reply, Prepared):
            self._votes[shard] = reply
        elif isinstance(reply, MindgridError):
            self._outcome = _told_first(self._outcome, reply)
        else:
            self._silent.add(shard)
        if self._awaited:
            return []
        if len(self._votes) < len(self._others):
            return self._give_up(Unavailable("shard", "it did not answer to a prepare"))
        home = self.parts.home
        votes = tuple(sorted(self._votes.items()))
        decide = Decide(self.key, self.parts.commands[home], votes, self.parts.order)
        return self._send([(home, decide)])

    def _heard_of_decision(self, reply: Reply | MindgridError | None) -> Sends:
        home = self.parts.home
        if isinstance(reply, Decided):
            self._outcome = reply.result
            if reply.at is None:
                return self._give_up(Unavailable("shard", "the commit was given up"))
            return self._end(reply, self._others)
        if home not in self._silent:
            if isinstance(reply, MindgridError):
                return self._give_up(reply)
            assert reply is None
            self._silent.add(home)
            return self._send([(home, Ask(self.key))])
        # It is away, and nobody else knows; its promises stay until it is asked again.
        self.answer = Unavailable("shard", "it did not answer to a decide")
        self.over = self.unsure = True
        return []

    def _give_up(self, why: MindgridError) -> Sends:
        self._outcome = self._outcome or why
        # One that was silent may have promised, or may do so yet.
        self.unsure = bool(self._silent - {self.parts.home})
        holding = [s for s in self._others if s in self._votes or s in self._silent]
        return self._end(Decided(None, None), holding)

    def _end(self, decided: Decided, shards: Sequence[int]) -> Sends:
        self._decided = decided
        if not shards:
            self.answer, self.over = self._outcome, True
        return self._send([(shard, Resolve(self.key, decided.at)) for shard in shards])

    def _heard_of_end(self, shard: int, reply: Reply | MindgridError | None) -> Sends:
        assert self._decided is not None
        if shard == self.parts.home:
            self.over = True
            return []
        self.unsure = self.unsure or not isinstance(reply, Resolved)
        if self._awaited:
            return []
        self.answer = self._outcome
        if self._decided.at is None or self.unsure:
            self.over = True
            return []
        return self._send([(self.parts.home, Forget(self.key))])

    def _send(self, messages: Sends) -> Sends:
        self._awaited = {shard for shard, _ in messages}
        return messages


def _told_first(one: object, other: MindgridError) -> MindgridError:
    """Return what the caller must change, rather than what may pass by itself."""
    return one if isinstance(one, CallerError | OperatorError) else other


class Ticket:
    """A place in the queues of all ids of a commit; `admitted` once it is the first in each."""

    def __init__(self, ids: Collection[Hashable]) -> None:
        self.ids = ids
        self.behind = 0
        self.admitted: Callable[[], None] = lambda: None


class Admission:
    """Lets commits begin whose ids are free, each with all its ids at once, first come first."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Ticket]] = {}

    def enter(self, ids: Collection[Hashable]) -> Ticket:
        """Return a ticket, which is admitted if its `behind` is 0; else `admitted` is called."""
        ticket = Ticket(ids)
        for id in ids:
            queue = self._queues.setdefault(id, deque())
            ticket.behind += bool(queue)
            queue.append(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Free its ids, whether it was admitted or not; admit those that waited for them alone."""
        for id in ticket.ids:
            queue = self._queues[id]
            was_first = queue[0] is ticket
            queue.remove(ticket)
            if not queue:
                del self._queues[id]
            elif was_first:
                queue[0].behind -= 1
                if queue[0].behind == 0:
                    queue[0].admitted()


def single_part(command: Command, shard_of: Callable[[str], int]) -> int | None:
    """Return the only shard that a command concerns; None if there are several, or any.

    An Expire chooses among all records.
    """
    if isinstance(command, Delete):
        return shard_of(command.id)
    if isinstance(command, Expire):
        return None
    parts = {shard_of(draft.id) for draft in command.drafts}
    for draft in command.drafts:
        parts.update(map(shard_of, draft.supersedes))
    return parts.pop() if len(parts) == 1 else None
