"""A shard's part in a commit over several shards: what it is asked, and what it remembers of it.

    Choose  ─► Chosen      which records an Expire would touch; nothing is promised
    Prepare ─► Prepared    checked, its ids locked, durable: it can be carried out, or given up
    Decide  ─► Decided     at one shard, the home: its own part is carried out, and with it, in one
                           commit, it is decided that the others' are too, and when
    Resolve ─► Resolved    at the others: the promise is carried out at that time, or given up
    Ask     ─► Decided     at the home, in doubt; what it has not decided it gives up for good
    Forget  ─► Resolved    at the home: everyone knows, nobody will ask any more

A key names one attempt at a commit and is never used again. Whoever asks is `cluster.transactions`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mindgrid.shards.clock import NEVER, Instant
from mindgrid.shards.errors import Locked, Unavailable
from mindgrid.shards.types import (
    Command,
    Delete,
    Expire,
    Expired,
    Result,
    Upsert,
    Upserted,
    Value,
)


class Choose(Value, frozen=True, tag="choose"):
    """Name the records that `command` would touch now."""

    command: Expire


class Prepare(Value, frozen=True, tag="prepare"):
    """Promise to carry out `command`, whose decision lies with the shard `home`."""

    key: str
    home: int
    command: Upsert | Expire


class Prepared(Value, frozen=True, tag="prepared"):
    """A promise: no read has looked beyond `at`, so the commit's time may be that or any later.

    `versions` are those of the drafts. `touched` records will be expired whenever it is, and
    besides those whose validity, one of `ends`, will not have ended by then.
    """

    at: Instant
    versions: tuple[int, ...] = ()
    touched: int = 0
    ends: tuple[Instant, ...] = ()


class Decide(Value, frozen=True, tag="decide"):
    """Carry out `command`, and decide the others' parts, at the latest of all proposals.

    `votes` are the other shards' promises. `order` names the shard of each draft of the whole
    Upsert, in its order; it is empty for an Expire.
    """

    key: str
    command: Upsert | Expire
    votes: tuple[tuple[int, Prepared], ...]
    order: tuple[int, ...] = ()


class Decided(Value, frozen=True, tag="decided"):
    """The time of the commit, None if this attempt is given up; and what its caller is told.

    An attempt is given up with a result where an earlier one of the transaction was carried out.
    """

    at: Instant | None
    result: Upserted | Expired | None


class Resolve(Value, frozen=True, tag="resolve"):
    """Carry out what was promised under `key`, at `at`; give it up if that is None."""

    key: str
    at: Instant | None


class Ask(Value, frozen=True, tag="ask"):
    """Say what was decided under `key`; if nothing was, decide to give it up."""

    key: str


class Forget(Value, frozen=True, tag="forget"):
    """Forget the decision under `key`."""

    key: str


class Chosen(Value, frozen=True, tag="chosen"):
    """(created_at, id) of the records, oldest first, ties to the smaller id."""

    keys: tuple[tuple[Instant, str], ...]


class Resolved(Value, frozen=True, tag="resolved"):
    """It is done, or was before."""


Request = Choose | Prepare | Decide | Resolve | Ask | Forget
Reply = Chosen | Prepared | Decided | Resolved


@dataclass(frozen=True, slots=True)
class Promise:
    """An open prepare; `seq` is the commit that made it durable."""

    seq: int
    at: Instant
    home: int
    command: Upsert | Expire


@dataclass(frozen=True, slots=True)
class Decision:
    """What a home decided, at what instant of its own, and who has to learn of it."""

    noted_at: Instant
    decided: Decided
    participants: tuple[int, ...]


@dataclass(slots=True)
class Doubts:
    """The open prepares of a shard with the ids they lock, and what it decided for others.

    Pure: no clock and no disk. A shard changes it when it applies a durable commit.
    """

    promises: dict[str, Promise] = field(default_factory=dict)
    decisions: dict[str, Decision] = field(default_factory=dict)
    _holders: dict[str, str] = field(default_factory=dict)
    """The key that locks each locked id."""

    def copy(self) -> Doubts:
        """Return a copy that can be changed by itself."""
        return Doubts(dict(self.promises), dict(self.decisions), dict(self._holders))

    def check(self, ids: Iterable[str]) -> None:
        """Raise Locked if one of the ids belongs to an open prepare."""
        if not self._holders:
            return
        for id in ids:
            key = self._holders.get(id)
            if key is not None:
                raise Locked(id, key, self.promises[key].home)

    def check_undecided(self, key: str) -> None:
        """Raise Unavailable if the attempt was decided: given up, while Decide was on its way."""
        if key in self.decisions:
            raise Unavailable("shard", "a commit over several shards came late and was given up")

    def promise(self, key: str, promise: Promise) -> None:
        """Keep a prepare and lock its ids."""
        self.promises[key] = promise
        self._holders.update(dict.fromkeys(ids_of(promise.command), key))

    def settle(self, key: str) -> None:
        """Drop a prepare, which must be open, and unlock its ids."""
        for id in ids_of(self.promises.pop(key).command):
            del self._holders[id]

    def forget(self, key: str) -> None:
        """Drop a decision."""
        self.decisions.pop(key, None)

    def forget_given_up(self, before: Instant) -> None:
        """Drop decisions against a commit that are so old that no message of it is on its way."""
        for key, decision in list(self.decisions.items()):
            if decision.decided.at is None and decision.noted_at < before:
                del self.decisions[key]

    @property
    def are_none(self) -> bool:
        """Whether there is neither an open prepare nor a decision."""
        return not self.promises and not self.decisions

    @property
    def latest(self) -> int:
        """The latest proposal of the open prepares, 0 without any."""
        return max((promise.at for promise in self.promises.values()), default=0)

    @property
    def oldest_seq(self) -> int | None:
        """The commit of the oldest open prepare, from which on the journal must be kept."""
        return min((promise.seq for promise in self.promises.values()), default=None)

    def concern(self, instant: Instant) -> bool:
        """Return whether an open prepare may yet take effect at or before `instant`."""
        return any(promise.at <= instant for promise in self.promises.values())


def ids_of(command: Command) -> set[str]:
    """Return every id that a command reads or writes, as far as it names them itself."""
    if isinstance(command, Delete):
        return {command.id}
    if isinstance(command, Expire):
        return set(command.ids or ())
    ids = {draft.id for draft in command.drafts}
    for draft in command.drafts:
        ids.update(draft.supersedes)
    ids.update(one.target for one in command.supersessions)
    return ids


def proposal(now: Instant, votes: Iterable[tuple[int, Prepared]]) -> Instant:
    """Return the time of a commit: the latest that its home, at `now`, or another proposes."""
    return Instant(max([now, *(vote.at for _, vote in votes)]))


def promised(at: Instant, result: Result, ends: Sequence[Instant]) -> Prepared:
    """Return the promise of what at `at` would have this result.

    `ends` are those of the validities that an INVALIDATE would cut short.
    """
    if isinstance(result, Upserted):
        return Prepared(at, versions=result.versions)
    assert isinstance(result, Expired)
    finite = tuple(end for end in ends if end != NEVER)
    return Prepared(at, touched=result.affected - len(finite), ends=finite)


def whole(own: Result, decide: Decide) -> Upserted | Expired:
    """Return the result of the whole commit from the home's own and the others' promises."""
    if isinstance(own, Expired):
        at = own.committed_at
        affected = own.affected
        for _, vote in decide.votes:
            affected += vote.touched + sum(end > at for end in vote.ends)
        return Expired(affected, at)
    assert isinstance(own, Upserted)
    others = {shard: iter(vote.versions) for shard, vote in decide.votes}
    mine = iter(own.versions)
    versions = tuple(next(others.get(shard, mine)) for shard in decide.order)
    return Upserted(versions, own.committed_at)
