"""What a log keeps in RAM of each event: where it stands in time, its tombstone, its equalities.

Events are removed from the old end only (`rules` says why), so cursors have no gaps and an event's
place in every column is its cursor less the first one's. A filter compares codes of 4 bytes: 0.3 ms
for a million events, which spares an index for each session.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mindgrid.shards.clock import NEVER
from mindgrid.shards.columns import Column
from mindgrid.shards.episodic.types import EventRange

Int64s = NDArray[np.int64]
Mask = NDArray[np.bool_]
S = TypeVar("S", bound=np.generic)

_CHUNK_EVENTS = 65_536
"""So many events are looked at at once: a page seldom needs more of a long log."""
_SHRINK_SHARE = 2
"""Memory of removed events is given back once they are as many as those that are left."""
_KEY_CHARS, _DIGEST_BYTES = 40, 16


class LogColumns:
    """The events `first`, `first` + 1, … `last`. Not thread-safe: the log's lock guards it."""

    def __init__(self) -> None:
        self.first = 1
        self.timestamps: _Queue[np.int64] = _Queue(np.int64)
        self.deleted: _Queue[np.int64] = _Queue(np.int64)
        """NEVER where there is no tombstone."""
        self.types = _Coded()
        self.roles = _Coded()
        self.sessions = _Coded()
        self._dedup: dict[str | bytes, int] = {}
        """The cursor under each dedup key; stale ones of removed events among them."""

    def __len__(self) -> int:
        return len(self.timestamps)

    @property
    def last(self) -> int:
        """The cursor of the newest event that was ever added."""
        return self.first + len(self) - 1

    def start(self, first: int) -> None:
        """Begin at this cursor, while there is no event yet."""
        assert not len(self)
        self.first = first

    def add(
        self,
        timestamps: Int64s,
        types: pa.Array,
        roles: pa.Array,
        sessions: pa.Array,
        dedup_keys: pa.Array,
    ) -> None:
        """Add events behind all others, aligned; strings as Arrow arrays, empty for none."""
        cursor = self.last + 1
        self.timestamps.extend(timestamps)
        self.deleted.extend(np.full(len(timestamps), NEVER))
        self.types.extend(types)
        self.roles.extend(roles)
        self.sessions.extend(sessions)
        for key in dedup_keys.to_pylist():
            if key:
                self._dedup[_kept(key)] = cursor
            cursor += 1

    def with_key(self, dedup_key: str) -> int | None:
        """Return the cursor of the event that holds this key."""
        cursor = self._dedup.get(_kept(dedup_key))
        return cursor if cursor is not None and cursor >= self.first else None

    def holds(self, cursor: int) -> bool:
        """Return whether there is such an event."""
        return self.first <= cursor <= self.last

    def is_live(self, cursor: int) -> bool:
        """Return whether there is such an event, without a tombstone."""
        return self.holds(cursor) and bool(self.deleted.view()[cursor - self.first] == NEVER)

    def tombstone(self, cursors: Iterable[int], at: int) -> None:
        """Tombstone the events that are there and have no tombstone yet."""
        deleted = self.deleted.view()
        for cursor in cursors:
            if self.is_live(cursor):
                deleted[cursor - self.first] = at

    def remove_until(self, cursor: int) -> None:
        """Remove all events up to this one."""
        gone = min(cursor, self.last) - self.first + 1
        if gone <= 0:
            return
        for column in (self.timestamps, self.deleted, self.types, self.roles, self.sessions):
            column.drop(gone)
        self.first += gone
        if len(self._dedup) > _SHRINK_SHARE * len(self):
            self._dedup = {key: at for key, at in self._dedup.items() if at >= self.first}

    def select(self, range: EventRange, most: int) -> Int64s:
        """Return the first cursors of the range in its order, at most so many."""
        low, high = self._window(range)
        wanted = [
            (column, code)
            for column, name in (
                (self.types, range.type),
                (self.roles, range.role),
                (self.sessions, range.session_id),
            )
            if name and (code := column.code_of(name)) is not None
        ]
        if len(wanted) < sum(map(bool, (range.type, range.role, range.session_id))):
            return np.empty(0, np.int64)  # A name that no event has.
        found: list[Int64s] = []
        count = 0
        for start, stop in _pieces(low, high, range.reverse):
            part = slice(start, stop)
            mask: Mask = (
                np.ones(stop - start, np.bool_)
                if range.include_deleted
                else self.deleted.view()[part] == NEVER
            )
            for column, code in wanted:
                mask &= column.view()[part] == code
            hits = np.flatnonzero(mask) + start
            if range.reverse:
                hits = hits[::-1]
            found.append(hits[: most - count])
            count += len(found[-1])
            if count == most:
                break
        places = np.concatenate(found) if found else np.empty(0, np.int64)
        return places + self.first

    def _window(self, range: EventRange) -> tuple[int, int]:
        """Return the places from … up to, not including, that cursors and times allow."""
        low = max(range.after_cursor + 1 - self.first, 0)
        high = len(self)
        if range.before_cursor:
            high = min(range.before_cursor - self.first, high)
        # Timestamps never decrease from one cursor to the next.
        timestamps = self.timestamps.view()
        if range.after_time is not None:
            low = max(low, int(np.searchsorted(timestamps, range.after_time, side="right")))
        if range.before_time is not None:
            high = min(high, int(np.searchsorted(timestamps, range.before_time, side="left")))
        return low, high


class _Queue(Generic[S]):
    """A column that also loses values at its front."""

    def __init__(self, dtype: type[S]) -> None:
        self._column: Column[S] = Column(dtype)
        self._gone = 0

    def __len__(self) -> int:
        return len(self._column) - self._gone

    def view(self) -> NDArray[S]:
        return self._column.view()[self._gone :]

    def extend(self, values: NDArray[S]) -> None:
        self._column.extend(values)

    def drop(self, count: int) -> bool:
        """Forget the first so many; return whether their memory was given back."""
        self._gone += count
        shrinks = self._gone * _SHRINK_SHARE >= len(self._column)
        if shrinks:
            self.replace(self.view())
        return shrinks

    def replace(self, values: NDArray[S]) -> None:
        self._column.replace(values)
        self._gone = 0


class _Coded:
    """Strings that repeat, as codes; 0 is the empty one."""

    def __init__(self) -> None:
        self._codes: _Queue[np.int32] = _Queue(np.int32)
        self._code_of: dict[str, int] = {"": 0}
        self.names: list[str] = [""]

    def view(self) -> NDArray[np.int32]:
        """Return the code of each event."""
        return self._codes.view()

    def code_of(self, name: str) -> int | None:
        """Return a name's code, None if no event ever had it."""
        return self._code_of.get(name)

    def extend(self, names: pa.Array) -> None:
        encoded = names.dictionary_encode()
        codes = np.array([self._learn(name) for name in encoded.dictionary.to_pylist()], np.int32)
        self._codes.extend(codes[encoded.indices.to_numpy()] if len(names) else codes)

    def drop(self, count: int) -> None:
        if self._codes.drop(count):
            self._forget()

    def _forget(self) -> None:
        """Forget the names that no event has any more, once they are the most."""
        used = np.union1d(self.view(), [0])
        if len(used) * 2 > len(self.names):
            return
        self.names = [self.names[code] for code in used.tolist()]
        self._code_of = {name: code for code, name in enumerate(self.names)}
        self._codes.replace(np.searchsorted(used, self.view()).astype(np.int32))

    def _learn(self, name: str) -> int:
        code = self._code_of.get(name)
        if code is None:
            code = self._code_of[name] = len(self.names)
            self.names.append(name)
        return code


def _pieces(low: int, high: int, reverse: bool) -> Iterator[tuple[int, int]]:
    if reverse:
        while high > low:
            start = max(low, high - _CHUNK_EVENTS)
            yield start, high
            high = start
    else:
        while low < high:
            stop = min(high, low + _CHUNK_EVENTS)
            yield low, stop
            low = stop


def _kept(key: str) -> str | bytes:
    """Return what a dedup key is known by: itself, or if it is long a digest that no other has."""
    if len(key) <= _KEY_CHARS:
        return key
    return hashlib.blake2b(key.encode(), digest_size=_DIGEST_BYTES).digest()
