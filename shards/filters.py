"""Which rows a metadata filter allows: per key a code for each row's value.

A filter compares codes, 4 bytes a row, one key after the other; as soon as few rows are left, it
looks at these only. Nothing is sorted or cached, so a write costs an append, and the next filter
no more than the one before. Postings of each value would find a rare one in a tenth of the time,
which is short already, for an order that every write and every merge had to keep.

A key that few rows carry lists them; so ten thousand keys that each occur once cost as much as one
key that occurs ten thousand times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from mindgrid.shards.checks import numeric
from mindgrid.shards.columns import Column
from mindgrid.shards.types import Predicate, PredicateOp

Positions = NDArray[np.int64]
"""Row positions, ascending and distinct."""
Codes = NDArray[np.int32]
Mask = NDArray[np.bool_]

_NO_POSITIONS: Positions = np.empty(0, dtype=np.int64)
_COMPARE: dict[PredicateOp, np.ufunc] = {
    PredicateOp.GT: np.greater,
    PredicateOp.GTE: np.greater_equal,
    PredicateOp.LT: np.less,
    PredicateOp.LTE: np.less_equal,
}
_FEW_SHARE = 16
"""Up to one row in so many is looked up by position; more are read as a whole column."""
_FEW_VALUES = 8
"""So many values are compared one by one; a pass costs an eighth of a look-up for each row."""
_DENSE_SHARE = 8
"""A key that more than one row in so many carries has a code for every row."""
_DENSE_MIN = 64
"""No key that fewer rows carry, so that the first rows of a shard do not make each key dense."""
_CODE_BITS = 32


def few(positions: int, rows: int) -> bool:
    """Return whether looking up so many rows costs less than reading whole columns."""
    return positions * _FEW_SHARE < rows


def those(positions: Positions, mask: Mask) -> Positions:
    """Return the positions whose mask is set; several times faster than `positions[mask]`."""
    kept: Positions = positions.take(np.flatnonzero(mask))
    return kept


class MetadataIndex:
    """Finds rows by their metadata; rows are added in rising position. Not thread-safe."""

    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}
        self._rows = 0

    def extend(self, start: int, rows: Sequence[Mapping[str, str]]) -> None:
        """Add the rows at the positions `start`, `start` + 1, …"""
        fresh: dict[str, tuple[list[int], list[int]]] = {}
        for position, metadata in enumerate(rows, start):
            for key, value in metadata.items():
                column = self._keys.get(key)
                if column is None:
                    column = self._keys[key] = _Key()
                if key not in fresh:
                    fresh[key] = ([], [])
                positions, codes = fresh[key]
                positions.append(position)
                codes.append(column.code(value))
        self._rows = start + len(rows)
        for key, (positions, codes) in fresh.items():
            self._keys[key].add(positions, codes, self._rows)

    def matching(
        self, equals: Mapping[str, str], predicates: Sequence[Predicate]
    ) -> Positions | None:
        """Return the rows that satisfy everything, or None if nothing is asked.

        Costs a pass over the codes of each key until few rows are left, then what these cost.
        """
        asked = [Predicate(key, PredicateOp.EQ, (value,)) for key, value in equals.items()]
        asked += predicates
        if not asked:
            return None
        pairs = [(self._keys[one.key], one) for one in asked if one.key in self._keys]
        if len(pairs) < len(asked):
            return _NO_POSITIONS
        for column, _ in pairs:
            column.fit(self._rows)
        # Keys that few rows carry come first, so that every mask is one of all rows.
        pairs.sort(key=lambda pair: (pair[0].dense, pair[0].expected(pair[1])))
        mask: Mask | None = None
        found: Positions | None = None
        for column, predicate in pairs:
            if found is not None:
                found = those(found, column.allows(column.layout.codes_at(found), predicate))
            elif isinstance(column.layout, _Sparse):
                positions, codes = column.layout.pairs()
                found = those(positions, column.allows(codes, predicate))
            else:
                allowed = column.allows(column.layout.codes.view(), predicate)
                mask = allowed if mask is None else np.logical_and(mask, allowed, out=mask)
                if few(int(np.count_nonzero(mask)), self._rows):
                    found = np.flatnonzero(mask)
        if found is None:
            assert mask is not None
            found = np.flatnonzero(mask)
        return found

    def keep(self, kept: Mask) -> None:
        """Drop the rows where `kept` is false and close the gaps."""
        moved = np.cumsum(kept, dtype=np.int64) - 1
        self._rows = int(np.count_nonzero(kept))
        for column in self._keys.values():
            positions, codes = column.layout.pairs()
            still = np.flatnonzero(kept[positions])
            column.replace(moved[positions[still]], codes[still], self._rows)
        self._keys = {key: column for key, column in self._keys.items() if column.count}


class _Key:
    """The values under one metadata key. Codes count from 1; 0 stands for no value."""

    __slots__ = ("code_of", "count", "layout", "numbers")

    def __init__(self) -> None:
        self.count = 0
        """How many rows carry the key."""
        self.layout: _Sparse | _Dense = _Sparse()
        self.code_of: dict[str, int] = {}
        self.numbers: Column[np.float64] = Column(np.float64)
        """By code: the value as float64, NaN where it is no number, which no bound allows."""
        self.numbers.append(np.nan)

    @property
    def dense(self) -> bool:
        return isinstance(self.layout, _Dense)

    def code(self, value: str) -> int:
        """Return the value's code, a new one if it is new."""
        code = self.code_of.get(value)
        if code is None:
            code = self.code_of[value] = len(self.numbers)
            number = numeric(value)
            self.numbers.append(np.nan if number is None else number)
        return code

    def add(self, positions: list[int], codes: list[int], rows: int) -> None:
        """Add rows behind all others; `rows` is how many there are with those that lack the key."""
        self.count += len(positions)
        self.fit(rows)
        self.layout.add(positions, codes)

    def fit(self, rows: int) -> None:
        """Choose how to lay out the codes among so many rows.

        A change of mind costs O(rows), and needs twice as many rows or half as many.
        """
        if isinstance(self.layout, _Dense):
            if self.count * 2 * _DENSE_SHARE < rows:
                self.layout = _Sparse(*self.layout.pairs())
            else:
                self.layout.codes.pad(rows)
        elif self.count >= _DENSE_MIN and self.count * _DENSE_SHARE > rows:
            self.layout = _Dense(*self.layout.pairs(), rows)

    def replace(self, positions: Positions, codes: Codes, rows: int) -> None:
        """Carry exactly these; values that are gone are forgotten once they are the most."""
        used = np.zeros(len(self.numbers), np.bool_)
        used[codes] = True
        used[0] = True
        if np.count_nonzero(used) * 2 < len(used):
            fresh = np.cumsum(used, dtype=np.int32) - 1
            self.code_of = {
                value: int(fresh[code]) for value, code in self.code_of.items() if used[code]
            }
            self.numbers.replace(self.numbers.view()[used])
            codes = fresh[codes]
        self.count = len(positions)
        self.layout = _Sparse(positions, codes)
        self.fit(rows)

    def expected(self, predicate: Predicate) -> float:
        """Return about how many rows satisfy the predicate, if values were equally frequent."""
        if predicate.op in (PredicateOp.EQ, PredicateOp.IN):
            return self.count * len(predicate.values) / len(self.code_of)
        return self.count

    def allows(self, codes: Codes, predicate: Predicate) -> Mask:
        """Return for each code whether its value satisfies the predicate; 0 never does."""
        if predicate.op in _COMPARE:
            bound = numeric(predicate.values[0])
            assert bound is not None, "checks.py refuses a bound that is no number"
            compare, numbers = _COMPARE[predicate.op], self.numbers.view()
            in_order: Mask = (
                compare(numbers.take(codes), bound)
                if len(codes) < len(numbers)
                else compare(numbers, bound).take(codes)
            )
            return in_order
        wanted = set(map(self.code_of.get, predicate.values, repeat(0)))
        wanted.discard(0)
        if len(wanted) > _FEW_VALUES:
            by_code = np.zeros(len(self.numbers), np.bool_)
            by_code[list(wanted)] = True
            equal: Mask = by_code.take(codes)
        else:
            equal = codes == wanted.pop() if wanted else np.zeros(len(codes), np.bool_)
            for code in wanted:
                equal |= codes == code
        return ~equal & (codes != 0) if predicate.op is PredicateOp.NEQ else equal


class _Sparse:
    """The rows that carry a key, 8 bytes each: position and code in one number, ascending."""

    __slots__ = ("_entries",)

    def __init__(self, positions: Positions | None = None, codes: Codes | None = None) -> None:
        self._entries: Column[np.int64] = Column(np.int64)
        if positions is not None and codes is not None:
            self._entries.replace(positions << _CODE_BITS | codes)

    def add(self, positions: list[int], codes: list[int]) -> None:
        self._entries.extend(np.array(positions, np.int64) << _CODE_BITS | np.array(codes))

    def pairs(self) -> tuple[Positions, Codes]:
        """Return the rows that carry the key, and their codes."""
        entries = self._entries.view()
        return entries >> _CODE_BITS, entries.astype(np.int32)

    def codes_at(self, rows: Positions) -> Codes:
        """Return the codes of these rows, in any order."""
        positions, codes = self.pairs()
        if not len(positions):
            return np.zeros(len(rows), np.int32)
        at = np.minimum(np.searchsorted(positions, rows), len(positions) - 1)
        found: Codes = np.where(positions[at] == rows, codes[at], np.int32(0))
        return found


class _Dense:
    """A code for every row."""

    __slots__ = ("codes",)

    def __init__(self, positions: Positions, codes: Codes, rows: int) -> None:
        self.codes: Column[np.int32] = Column(np.int32)
        self.codes.pad(rows)
        self.codes.view()[positions] = codes

    def add(self, positions: list[int], codes: list[int]) -> None:
        self.codes.view()[positions] = codes

    def pairs(self) -> tuple[Positions, Codes]:
        """Return the rows that carry the key, and their codes."""
        codes = self.codes.view()
        positions = np.flatnonzero(codes)
        return positions, codes[positions]

    def codes_at(self, rows: Positions) -> Codes:
        """Return the codes of these rows, in any order."""
        found: Codes = self.codes.view().take(rows)
        return found
