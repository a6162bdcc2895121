"""Which rows a metadata filter allows: per key the rows that carry it, with a code per value.

A key is stored sparsely (positions and codes side by side), so that ten thousand keys that each
occur once cost as much as one key that occurs ten thousand times. A filter reads the rarest of
its equalities and checks everything else on what that leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mindgrid.shards.checks import numeric
from mindgrid.shards.columns import Column
from mindgrid.shards.types import Predicate, PredicateOp

Positions = NDArray[np.int64]
"""Row positions, ascending and distinct."""

_NO_POSITIONS: Positions = np.empty(0, dtype=np.int64)


class _Key:
    """The values under one metadata key."""

    def __init__(self) -> None:
        self.positions: Column[np.int64] = Column(np.int64)
        self.codes: Column[np.int32] = Column(np.int32)
        self.code_of: dict[str, int] = {}
        self.numbers: Column[np.float64] = Column(np.float64)
        """By code: the value as float64, NaN where it is no number."""

    def code(self, value: str) -> int:
        """Return the value's code, a new one if it is new."""
        code = self.code_of.get(value)
        if code is None:
            code = self.code_of[value] = len(self.code_of)
            number = numeric(value)
            self.numbers.append(np.nan if number is None else number)
        return code

    def matching(self, predicate: Predicate) -> Positions:
        codes = self.codes.view()
        found: Positions = self.positions.view()[self._allowed(predicate)[codes]]
        return found

    def equal(self, value: str) -> Positions:
        code = self.code_of.get(value)
        if code is None:
            return _NO_POSITIONS
        found: Positions = self.positions.view()[self.codes.view() == code]
        return found

    def _allowed(self, predicate: Predicate) -> NDArray[np.bool_]:
        """Return by code whether its value satisfies the predicate."""
        op = predicate.op
        if op in (PredicateOp.EQ, PredicateOp.IN, PredicateOp.NEQ):
            allowed = np.zeros(len(self.code_of), dtype=np.bool_)
            for value in predicate.values:
                code = self.code_of.get(value)
                if code is not None:
                    allowed[code] = True
            return ~allowed if op is PredicateOp.NEQ else allowed
        bound = numeric(predicate.values[0])
        assert bound is not None, "checks.py refuses a bound that is no number"
        numbers = self.numbers.view()
        # NaN, which stands for "no number", compares false with everything.
        if op is PredicateOp.GT:
            return numbers > bound
        if op is PredicateOp.GTE:
            return numbers >= bound
        if op is PredicateOp.LT:
            return numbers < bound
        return numbers <= bound


class MetadataIndex:
    """Finds rows by their metadata; rows are added in rising position."""

    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}

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
        for key, (positions, codes) in fresh.items():
            self._keys[key].positions.extend(np.array(positions, np.int64))
            self._keys[key].codes.extend(np.array(codes, np.int32))

    def matching(
        self, equals: Mapping[str, str], predicates: Sequence[Predicate]
    ) -> Positions | None:
        """Return the rows that satisfy everything, or None if nothing is asked."""
        if not equals and not predicates:
            return None
        parts: list[Positions] = []
        for key, value in equals.items():
            column = self._keys.get(key)
            parts.append(column.equal(value) if column else _NO_POSITIONS)
        for predicate in predicates:
            column = self._keys.get(predicate.key)
            parts.append(column.matching(predicate) if column else _NO_POSITIONS)
        parts.sort(key=len)
        found = parts[0]
        for part in parts[1:]:
            found = _intersect(found, part)
        return found

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Drop the rows where `kept` is false and close the gaps."""
        moved = np.cumsum(kept, dtype=np.int64) - 1
        for column in self._keys.values():
            positions = column.positions.view()
            still = kept[positions]
            column.codes.replace(column.codes.view()[still])
            column.positions.replace(moved[positions[still]])


def _intersect(few: Positions, many: Positions) -> Positions:
    """Return the common positions; both ascending, `few` not longer than `many`."""
    if len(few) == 0 or len(many) == 0:
        return _NO_POSITIONS
    at = np.searchsorted(many, few)
    at[at == len(many)] = 0
    common: Positions = few[many[at] == few]
    return common
