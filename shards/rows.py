"""The lifecycle of every row of a shard, in RAM: who is visible at which instant.

A row is never rewritten. What changes about it (its end of validity, its tombstone, the row that
replaces it) lives in int64 columns, and each change leaves what it overwrote in an undo log, so
that the columns as known at a past instant are a copy with the newer changes taken back:

    known_at ──► rows committed by then and not yet replaced then
    as_of    ──► of those, the valid ones: no tombstone, valid_from <= as_of < valid_to

Positions number the rows in RAM without gaps; they shift when rows are dropped. A row's number is
given once and kept for ever; it rises with the position.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindgrid.shards.clock import NEVER, Instant
from mindgrid.shards.columns import Column
from mindgrid.shards.commits import Change, Commit
from mindgrid.shards.filters import Mask, MetadataIndex, Positions, few, those
from mindgrid.shards.plan import Head
from mindgrid.shards.types import Expire, ExpireAction, Selection

Int64s = NDArray[np.int64]

_SORTED_MOST = 4_096
"""So many rows are sorted for a page of them; of more, all ids are kept in order."""


class Lifecycle(NamedTuple):
    """What a record's lifecycle columns read at the instant of knowledge asked for."""

    created_at: int
    valid_from: int
    valid_to: int
    deleted_at: int
    version: int


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Rows as they were written, by column, aligned; NEVER for a null time.

    A row whose `committed_at` is NEVER was erased before it was sealed: a hole that only keeps its
    number, without metadata.
    """

    numbers: Int64s
    ids: NDArray[np.object_]
    versions: Int64s
    committed_at: Int64s
    created_at: Int64s
    valid_from: Int64s
    valid_to: Int64s
    deleted_at: Int64s
    metadata: Sequence[Mapping[str, str]]

    @classmethod
    def of(cls, commit: Commit) -> RowColumns:
        """Return the rows of a commit."""
        rows, first = commit.rows, commit.first_number
        return cls(
            numbers=np.arange(first, first + len(rows)),
            ids=np.array([row.id for row in rows], np.object_),
            versions=np.array([row.version for row in rows], np.int64),
            committed_at=np.full(len(rows), commit.at),
            created_at=np.array([row.created_at for row in rows], np.int64),
            valid_from=np.array([row.valid_from for row in rows], np.int64),
            valid_to=np.array([row.valid_to for row in rows], np.int64),
            deleted_at=np.array([row.deleted_at for row in rows], np.int64),
            metadata=[row.metadata for row in rows],
        )


class Rows:
    """All rows of a shard without their values. Not thread-safe: the shard's lock guards it."""

    def __init__(self) -> None:
        self.ids: Column[np.object_] = Column(np.object_)
        self.numbers: Column[np.int64] = Column(np.int64)
        self.committed: Column[np.int64] = Column(np.int64)
        """NEVER for an erased row, which so is visible at no instant."""
        self.replaced: Column[np.int64] = Column(np.int64)
        self.created: Column[np.int64] = Column(np.int64)
        self.valid_from: Column[np.int64] = Column(np.int64)
        self.valid_to: Column[np.int64] = Column(np.int64)
        self.deleted: Column[np.int64] = Column(np.int64)
        self.versions: Column[np.int64] = Column(np.int64)
        self.metadata = MetadataIndex()
        self.erased: set[int] = set()
        """Numbers of erased rows whose bytes are not yet gone from disk."""
        self._newest: dict[str, int] = {}
        self._ordered: list[str] = []
        """Ids in order, with some that are gone; `_unordered` are those added since."""
        self._unordered: list[str] = []
        self._older: dict[str, list[int]] = {}
        """Numbers of an id's rows but the newest, for ids that have any."""
        self.last_commit = 0
        self._undo = _UndoLog()
        self._live = _LiveMask()

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def records(self) -> int:
        """How many ids have a newest row."""
        return len(self._newest)

    def head(self, id: str) -> Head | None:
        """Return the id's newest row; see `plan.Heads`."""
        number = self._newest.get(id)
        if number is None:
            return None
        at = self.position(number)
        return Head(
            number,
            int(self.versions.view()[at]),
            int(self.created.view()[at]),
            int(self.valid_to.view()[at]),
            int(self.deleted.view()[at]),
        )

    def to_expire(self, command: Expire, now: int) -> list[tuple[Instant, str]]:
        """Return the records that `command` touches at `now`; see `plan.Heads`."""
        matching = self.metadata.matching(command.equals, ())
        if command.ids is not None:
            named = self._places_of(command.ids)
            matching = named if matching is None else np.intersect1d(named, matching)
        at: Positions | slice = slice(None) if matching is None else matching
        # The newest row of each id that was not hard-deleted; the metadata are its own.
        touched = (self.committed.view()[at] != NEVER) & (self.replaced.view()[at] == NEVER)
        if command.action is not ExpireAction.HARD_DELETE:
            touched &= self.deleted.view()[at] == NEVER
        if command.action is ExpireAction.INVALIDATE:
            touched &= self.valid_to.view()[at] > now
        places = np.flatnonzero(touched) if matching is None else matching[touched]
        created, ids = self.created.view()[places], self.ids.view()[places]
        if len(places) > command.max_rows:
            # All that tie with the last one compete for its place by their ids.
            last = np.partition(created, command.max_rows - 1)[command.max_rows - 1]
            created, ids = created[created <= last], ids[created <= last]
        oldest = sorted(zip(map(Instant, created.tolist()), ids.tolist(), strict=True))
        return oldest[: command.max_rows]

    def _places_of(self, ids: Iterable[str]) -> Positions:
        numbers = (self._newest.get(id) for id in ids)
        places = [self.position(number) for number in numbers if number is not None]
        return np.sort(np.array(places, dtype=np.int64))

    def position(self, number: int) -> int:
        """Return where the row with this number stands; it must be held."""
        numbers = self.numbers.view()
        at = number - int(numbers[0])
        if at >= len(numbers) or numbers[at] != number:  # rows before it were dropped
            at = int(np.searchsorted(numbers, number))
        assert numbers[at] == number
        return at

    def places(self, numbers: Int64s) -> Positions:
        """Return where these rows stand; -1 for one that was dropped or erased."""
        held = self.numbers.view()
        if not len(held):
            return np.full(len(numbers), -1)
        places = np.searchsorted(held, numbers)
        np.minimum(places, len(held) - 1, out=places)
        there = (held[places] == numbers) & (self.committed.view()[places] != NEVER)
        return np.where(there, places, -1)

    def apply(self, commit: Commit) -> None:
        """Carry out a resolved commit."""
        if commit.rows:
            self.add(RowColumns.of(commit))
        for change in commit.changes:
            self.change(commit.at, change, commit.seq)
        for id in commit.erased:
            self._erase_id(id)
        self.last_commit = max(self.last_commit, commit.at)

    def add(self, rows: RowColumns) -> None:
        """Add rows, as they were written, behind all others."""
        start = len(self.numbers)
        self.ids.extend(rows.ids)
        self.numbers.extend(rows.numbers)
        self.committed.extend(rows.committed_at)
        self.replaced.extend(np.full(len(rows.numbers), NEVER))
        self.created.extend(rows.created_at)
        self.valid_from.extend(rows.valid_from)
        self.valid_to.extend(rows.valid_to)
        self.deleted.extend(rows.deleted_at)
        self.versions.extend(rows.versions)
        self.metadata.extend(start, rows.metadata)
        self._live.touch(range(start, len(self.numbers)))
        written = zip(
            rows.ids.tolist(), rows.numbers.tolist(), rows.committed_at.tolist(), strict=True
        )
        for id, number, committed in written:
            if committed == NEVER:
                continue
            before = self._newest.get(id)
            if before is None:
                self._unordered.append(id)
            else:
                self._older.setdefault(id, []).append(before)
                replaced_at = self.position(before)
                self.replaced.view()[replaced_at] = committed
                self._live.touch((replaced_at,))
            self._newest[id] = number

    def load_changes(self, at: Int64s, number: Int64s, valid_to: Int64s, deleted: Int64s) -> None:
        """Apply sealed changes, oldest first; those of rows that a merge dropped are void."""
        numbers = self.numbers.view()
        places = np.minimum(np.searchsorted(numbers, number), max(len(numbers) - 1, 0))
        held = numbers[places] == number if len(numbers) else np.zeros(len(number), dtype=bool)
        columns = (at, number, valid_to, deleted)
        for when, *change in zip(*(column[held].tolist() for column in columns), strict=True):
            self.change(when, Change(*change))

    def change(self, at: int, change: Change, seq: int = 0) -> None:
        """Overwrite a row's lifecycle values from the instant `at` on; `seq` is the commit's."""
        position = self.position(change.number)
        valid_to, deleted = self.valid_to.view(), self.deleted.view()
        self._undo.note(seq, at, position, int(valid_to[position]), int(deleted[position]))
        valid_to[position] = change.valid_to
        deleted[position] = change.deleted_at
        self._live.touch((position,))

    def erase(self, numbers: Iterable[int]) -> None:
        """Hide the rows with these numbers at every instant."""
        committed = self.committed.view()
        for number in numbers:
            position = self.position(number)
            committed[position] = NEVER
            self.erased.add(number)
            self._live.touch((position,))
            id = self.ids.view()[position]
            if self._newest.get(id) == number:
                del self._newest[id]

    def _erase_id(self, id: str) -> None:
        self.erase([*self._older.pop(id, ()), self._newest[id]])

    def forget_erased(self, numbers: Iterable[int]) -> None:
        """Note that nothing is left on disk of these erased rows."""
        self.erased.difference_update(numbers)

    def lifecycles(self, positions: Positions, known_at: int) -> list[Lifecycle]:
        """Return the lifecycle values of rows as they were known at an instant."""
        columns = (self.created, self.valid_from, self.valid_to, self.deleted, self.versions)
        now = zip(*(column.view()[positions].tolist() for column in columns), strict=True)
        lives = list(map(Lifecycle._make, now))
        if self._undo.reaches(known_at):
            for at, position in enumerate(positions.tolist()):
                valid_to, deleted = self._undo.value(position, known_at, lives[at][2:4])
                lives[at] = lives[at]._replace(valid_to=valid_to, deleted_at=deleted)
        return lives

    def allowed(self, selection: Selection, known_at: int, as_of: int) -> Positions:
        """Return the rows that a read may return, ascending.

        The array is shared by every read that asks for the same rows: do not write to it.
        """
        matching = self.metadata.matching(selection.equals, selection.predicates)
        at: Positions | slice = slice(None)
        if matching is not None and few(len(matching), len(self)):
            at = matching
        bounded = selection.created_after is not None or selection.created_before is not None
        usual = known_at == as_of >= self.last_commit and not selection.include_invalidated
        # Six columns are rarely in the CPU's cache, the mask of a byte a row is; but for few rows
        # it does not pay to judge all others anew, until as many have been judged one by one.
        asked = len(self) if matching is None or at is not matching else len(matching)
        if usual and self._live.pays(asked, len(self), as_of):
            live = self._live.mask(self, as_of)
        else:
            live = None
        if live is None:
            shown = self._selected(at, selection, known_at, as_of)
        elif matching is None and not bounded:
            return self._live.positions()
        else:
            shown = self._created(live[at].copy(), at, selection)
        if matching is None:
            return np.flatnonzero(shown)
        return those(matching, shown if at is matching else shown.take(matching))

    def _selected(
        self, at: Positions | slice, selection: Selection, known_at: int, as_of: int
    ) -> Mask:
        """Return which rows a read may return, metadata apart."""
        shown = self._known(at, known_at)
        if not selection.include_invalidated:
            shown &= self._valid(at, known_at, as_of)
        return self._created(shown, at, selection)

    def _created(self, shown: Mask, at: Positions | slice, selection: Selection) -> Mask:
        """Clear in `shown`, which is returned, what was created outside of the bounds."""
        if selection.created_after is not None:
            shown &= self.created.view()[at] > selection.created_after
        if selection.created_before is not None:
            shown &= self.created.view()[at] < selection.created_before
        return shown

    def known(self, known_at: int) -> Mask:
        """Return by position which rows were the newest of their ids at an instant: (n,) bool."""
        return self._known(slice(None), known_at)

    def shown(self, places: Positions, selection: Selection, known_at: int, as_of: int) -> Mask:
        """Return which of these rows, each the newest of its id at `known_at`, a read may return.

        `places` in any order; as `allowed`, at the cost of the rows asked about.
        """
        shown = np.ones(len(places), np.bool_)
        matching = self.metadata.matching(selection.equals, selection.predicates)
        if matching is not None:
            shown = np.isin(places, matching)
        return shown & self._selected(places, selection, known_at, as_of)

    def _known(self, at: Positions | slice, known_at: int) -> Mask:
        known: Mask = self.committed.view()[at] <= known_at
        known &= self.replaced.view()[at] > known_at
        return known

    def _valid(self, at: Positions | slice, known_at: int, as_of: int) -> Mask:
        valid_from = self.valid_from.view()[at]
        valid = _valid_at(as_of, valid_from, self.valid_to.view()[at], self.deleted.view()[at])
        if self._undo.reaches(known_at):
            changed, valid_to, deleted = self._undo.taken_back(at, len(self), known_at)
            valid[changed] = _valid_at(as_of, valid_from.take(changed), valid_to, deleted)
        return valid

    def newest_known(self, id: str, known_at: int) -> int | None:
        """Return the position of the row that was the id's newest at `known_at`."""
        newest = self._newest.get(id)
        if newest is None:
            return None
        for number in (newest, *reversed(self._older.get(id, ()))):
            position = self.position(number)
            if self.committed.view()[position] <= known_at:
                return position
        return None

    def page(
        self, allowed: Positions, known_at: int, after: str, limit: int
    ) -> tuple[Positions, bool]:
        """Return the first `limit` of these rows by id behind `after`, and whether more follow.

        `allowed` are the newest rows of their ids at `known_at`, ascending.
        """
        if len(allowed) <= _SORTED_MOST:
            ids = self.ids.view()[allowed].tolist()
            found = sorted(
                (id, at) for id, at in zip(ids, allowed.tolist(), strict=True) if id > after
            )
            return np.array([at for _, at in found[:limit]], np.int64), len(found) > limit
        mask = np.zeros(len(self), np.bool_)
        mask[allowed] = True
        places: list[int] = []
        for id in self._ids_behind(after):
            at = self.newest_known(id, known_at)
            if at is not None and mask[at]:
                if len(places) == limit:
                    return np.array(places, np.int64), True
                places.append(at)
        return np.array(places, np.int64), False

    def _ids_behind(self, after: str) -> Iterator[str]:
        if self._unordered:
            # Two runs that are sorted already: linear.
            self._ordered = sorted(set(self._ordered).union(self._unordered))
            self._unordered.clear()
        start = bisect_right(self._ordered, after)
        return itertools.islice(self._ordered, start, None)

    def changes_since(self, seq: int) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """Return (at, number, valid_to, deleted_at) of the changes by commits after `seq`.

        The values are the new ones, in the order in which they were made.
        """
        return self._undo.redo(self, seq)

    def drop(self, kept: NDArray[np.bool_], floor: int) -> None:
        """Forget the rows where `kept` is false, and every change up to `floor`."""
        gone = set(self.numbers.view()[~kept].tolist())
        for id in set(self.ids.view()[~kept].tolist()):
            still = [n for n in self._older.get(id, ()) if n not in gone]
            if still:
                self._older[id] = still
            else:
                self._older.pop(id, None)
        self.erased -= gone
        for column in (
            self.ids,
            self.numbers,
            self.committed,
            self.replaced,
            self.created,
            self.valid_from,
            self.valid_to,
            self.deleted,
            self.versions,
        ):
            column.replace(column.view()[kept])
        self.metadata.keep(kept)
        self._undo.forget(floor, kept)
        self._live = _LiveMask()


class _UndoLog:
    """What each change of a row overwrote, in the order of the commits.

    That is the order of time for the changes of one row, but not of all: a commit over several
    shards takes effect at an instant that other commits may have passed by then.
    """

    def __init__(self) -> None:
        self._newest = 0
        self._seq: Column[np.int64] = Column(np.int64)
        self._at: Column[np.int64] = Column(np.int64)
        self._before: Column[np.int64] = Column(np.int64)
        """When the row changed before this, 0 for never."""
        self._position: Column[np.int64] = Column(np.int64)
        self._valid_to: Column[np.int64] = Column(np.int64)
        self._deleted: Column[np.int64] = Column(np.int64)
        self._last: dict[int, list[int]] = {}
        """Entries by position, for point reads."""

    def note(self, seq: int, at: int, position: int, valid_to: int, deleted: int) -> None:
        entries = self._last.setdefault(position, [])
        self._before.append(self._at.view()[entries[-1]] if entries else 0)
        entries.append(len(self._at))
        self._newest = max(self._newest, at)
        self._seq.append(seq)
        self._at.append(at)
        self._position.append(position)
        self._valid_to.append(valid_to)
        self._deleted.append(deleted)

    def reaches(self, known_at: int) -> bool:
        """Return whether a change is newer than `known_at`."""
        return self._newest > known_at

    def taken_back(
        self, at: Positions | slice, rows: int, known_at: int
    ) -> tuple[Positions, Int64s, Int64s]:
        """Return (indices into `at`, valid_to, deleted), as known then, of what changed since.

        `at` in any order, or the slice of everything; `rows` is how many rows there are.
        """
        # Of the changes of a row that are newer, the first one overwrote what was known.
        entries = np.flatnonzero((self._at.view() > known_at) & (self._before.view() <= known_at))
        changed = self._position.view().take(entries)
        if not isinstance(at, slice):
            entry_of = np.zeros(rows, np.int32)
            entry_of[changed] = entries + 1
            asked = entry_of.take(at)
            changed = np.flatnonzero(asked)
            entries = asked[changed] - np.int64(1)
        return changed, self._valid_to.view().take(entries), self._deleted.view().take(entries)

    def value(self, position: int, known_at: int, now: tuple[int, int]) -> tuple[int, int]:
        """Return (valid_to, deleted) of one row as known at an instant."""
        for entry in self._last.get(position, ()):
            if self._at.view()[entry] > known_at:
                return int(self._valid_to.view()[entry]), int(self._deleted.view()[entry])
        return now

    def redo(self, rows: Rows, seq: int) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """Return the changes by commits after `seq` with the values they set."""
        at = self._at.view()
        start, end = int(np.searchsorted(self._seq.view(), seq, side="right")), len(at)
        positions = self._position.view()[start:end]
        valid_to, deleted = rows.valid_to.view()[positions], rows.deleted.view()[positions]
        for out, position in enumerate(positions.tolist()):
            later = [entry for entry in self._last[position] if entry > start + out]
            if later:
                valid_to[out] = self._valid_to.view()[later[0]]
                deleted[out] = self._deleted.view()[later[0]]
        return at[start:end].copy(), rows.numbers.view()[positions], valid_to, deleted

    def forget(self, floor: int, kept_rows: Mask) -> None:
        """Drop the changes up to `floor` and those of rows that are not kept; renumber."""
        kept = (self._at.view() > floor) & kept_rows[self._position.view()]
        moved = np.cumsum(kept_rows) - 1
        self._position.replace(moved[self._position.view()])
        for column in (
            self._seq,
            self._at,
            self._before,
            self._position,
            self._valid_to,
            self._deleted,
        ):
            column.replace(column.view()[kept])
        self._newest = int(self._at.view().max(initial=0))
        self._last = {}
        for entry, position in enumerate(self._position.view().tolist()):
            self._last.setdefault(position, []).append(entry)


class _LiveMask:
    """Which rows are live and valid now, kept up to date instead of computed anew.

    It holds until the first `valid_from` or `valid_to` that time has yet to reach; a read
    re-judges only the rows touched since the last one.
    """

    def __init__(self) -> None:
        self._mask: Mask = np.zeros(0, dtype=np.bool_)
        self._since = 0
        self._until = 0
        self._touched: list[int] = []
        self._positions: Positions | None = None
        self._asked = 0
        """How many rows were asked about since the mask last held."""

    def touch(self, positions: Iterable[int]) -> None:
        self._touched.extend(positions)

    def pays(self, asked: int, rows: int, as_of: int) -> bool:
        """Return whether `mask` costs no more than what reads of so many rows would without it."""
        if self._covers(as_of):
            return True
        self._asked += asked
        return self._asked >= rows

    def mask(self, rows: Rows, as_of: int) -> Mask | None:
        """Return by position which rows are live at `as_of`, not to be written to.

        None where `as_of` lies before what the mask covers.
        """
        if as_of < self._since:
            return None
        if not self._covers(as_of):
            self._mask = np.zeros(len(rows), dtype=np.bool_)
            self._until = NEVER
            self._judge(rows, slice(None), as_of)
        elif self._touched:
            grown = np.zeros(len(rows), dtype=np.bool_)
            grown[: len(self._mask)] = self._mask
            self._mask = grown
            self._judge(rows, np.array(self._touched, dtype=np.int64), as_of)
        self._touched.clear()
        self._since = as_of
        self._asked = 0
        return self._mask

    def positions(self) -> Positions:
        """Return the live rows of the mask as last returned."""
        if self._positions is None:
            self._positions = np.flatnonzero(self._mask)
        return self._positions

    def _covers(self, as_of: int) -> bool:
        """Return whether the mask holds at `as_of`, but for the rows touched since."""
        return self._since <= as_of < self._until and len(self._touched) <= len(self._mask)

    def _judge(self, rows: Rows, at: Positions | slice, as_of: int) -> None:
        valid_from, valid_to = rows.valid_from.view()[at], rows.valid_to.view()[at]
        live = rows.committed.view()[at] <= as_of
        live &= rows.replaced.view()[at] == NEVER
        live &= rows.deleted.view()[at] == NEVER
        for edges in (valid_from[live], valid_to[live]):
            ahead = edges[edges > as_of]
            if len(ahead):
                self._until = min(self._until, int(ahead.min()))
        self._mask[at] = live & (valid_from <= as_of) & (as_of < valid_to)
        self._positions = None


def _valid_at(as_of: int, valid_from: Int64s, valid_to: Int64s, deleted: Int64s) -> Mask:
    valid: Mask = deleted == NEVER
    valid &= valid_from <= as_of
    valid &= valid_to > as_of
    return valid


def instants(selection: Selection, instant: Instant) -> tuple[Instant, Instant]:
    """Return (known_at, as_of) of a read that takes place at `instant`."""
    known_at = instant if selection.known_at is None else selection.known_at
    return known_at, known_at if selection.as_of is None else selection.as_of
