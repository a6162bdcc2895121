"""What the clients of one log were told, and whether the log that is left at the end agrees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Entry:
    """An event as a client saw it; its payload names the attempt that wrote it."""

    cursor: int
    id: str
    timestamp: str
    name: str
    session: str


@dataclass(slots=True)
class Attempt:
    """One append: the names of its events, and what became of it."""

    names: tuple[str, ...]
    begun: float
    """Seconds; when it was first sent."""
    expected_cursor: int | None = None
    acknowledged: tuple[Entry, ...] = ()
    """As first answered; empty while nobody knows."""
    repeats: list[tuple[Entry, ...]] = field(default_factory=list)
    """The answers to the same append sent again."""
    refused: bool = False
    """It was told that nothing was appended."""


@dataclass(slots=True)
class Followed:
    """What one tail was sent, over all connections that it took."""

    historical: bool
    opened: float
    """Seconds; when the first connection was answered. From then on it misses nothing."""
    edge: int
    """The highest cursor acknowledged before it was asked for."""
    seen: list[Entry] = field(default_factory=list)
    resumed: int = 0


@dataclass(frozen=True, slots=True)
class Read:
    """One range and its whole answer."""

    after: int
    before: int
    limit: int
    reverse: bool
    session: str
    edge: int
    """The highest cursor acknowledged before it was asked for."""
    answer: tuple[Entry, ...]

    def expected(self, log: Sequence[Entry], last: int) -> tuple[Entry, ...]:
        """Return the answer of a log that ends at cursor `last`."""
        window = [
            entry
            for entry in log[self.after : min(last, self.before - 1 if self.before else last)]
            if self.session in ("", entry.session)
        ]
        if self.reverse:
            window.reverse()
        return tuple(window[: self.limit or None])


def check_log(log: Sequence[Entry]) -> None:
    """Cursors rise by one from 1, time does not go back, and nothing is there twice."""
    assert [entry.cursor for entry in log] == list(range(1, len(log) + 1))
    times = [entry.timestamp for entry in log]
    assert times == sorted(times)
    assert len({entry.id for entry in log}) == len(log)
    names = [entry.name for entry in log]
    assert len(set(names)) == len(names), "an append was written twice"


def check_attempts(log: Sequence[Entry], attempts: Iterable[Attempt]) -> None:
    """What was acknowledged is there as it was answered, all of an append or nothing of it."""
    by_name = {entry.name: entry for entry in log}
    attempted: set[str] = set()
    for attempt in attempts:
        attempted.update(attempt.names)
        stored = tuple(by_name[name] for name in attempt.names if name in by_name)
        assert len(stored) in (0, len(attempt.names)), f"a part of {attempt} is there: {stored}"
        assert not (attempt.refused and stored), f"{attempt} is there: {stored}"
        if stored:
            first = stored[0].cursor
            if len(stored) > 1:
                assert [entry.cursor - first for entry in stored] == list(range(len(stored)))
            assert attempt.expected_cursor in (None, first - 1), f"{attempt} came to {first}"
        for answer in (attempt.acknowledged, *attempt.repeats):
            assert answer in ((), stored), f"{attempt} is in the log as {stored}"
    assert by_name.keys() <= attempted, "there is what nobody wrote"


def check_tail(log: Sequence[Entry], tail: Followed, attempts: Iterable[Attempt]) -> None:
    """It was sent a slice of the log without a gap, from its edge to the end."""
    first = tail.seen[0].cursor
    assert tail.seen == list(log[first - 1 :]), "no slice of the log up to its end"
    if tail.historical:
        assert first == 1
        return
    assert first > tail.edge, f"{first} was acknowledged before the tail began at {tail.edge}"
    cursors = {entry.name: entry.cursor for entry in log}
    later = [
        cursors[attempt.names[0]]
        for attempt in attempts
        if attempt.begun > tail.opened and attempt.names[0] in cursors
    ]
    assert first <= min(later), "an append that began after the tail is missing"


def check_read(log: Sequence[Entry], read: Read) -> None:
    """It equals the log as it was at some moment of the call."""
    if read.reverse:
        # The newest of it says how far the log went, which was not less than what was known.
        newest = max((entry.cursor for entry in read.answer), default=0)
        assert read.answer == read.expected(log, max(newest, read.edge))
        return
    assert read.answer == read.expected(log, len(log))[: len(read.answer)]
    assert len(read.answer) >= len(read.expected(log, read.edge)), f"{read} lacks some"
