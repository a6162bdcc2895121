"""A filter allows exactly the rows that a plain loop over all of them allows, at every instant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import ge, gt, le, lt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindgrid.shards.checks import numeric
from mindgrid.shards.clock import NEVER, Instant
from mindgrid.shards.commits import Change
from mindgrid.shards.filters import MetadataIndex
from mindgrid.shards.rows import RowColumns, Rows
from mindgrid.shards.types import Predicate, PredicateOp, Selection

KEYS = ["kind", "number", "mostly", "seldom"]
VALUES = ["a", "b", "1", "1.0", "2.5", "-3e2", "NaN", "inf", "1e999", "", " 1", "0x10", "ß"]
ORDER: dict[PredicateOp, Callable[[float, float], bool]] = {
    PredicateOp.GT: gt,
    PredicateOp.GTE: ge,
    PredicateOp.LT: lt,
    PredicateOp.LTE: le,
}


def satisfies(metadata: Mapping[str, str], predicate: Predicate) -> bool:
    """Return what the contract says, for one row."""
    if predicate.key not in metadata:
        return False
    value, op = metadata[predicate.key], predicate.op
    if op is PredicateOp.NEQ:
        return value != predicate.values[0]
    if op in (PredicateOp.EQ, PredicateOp.IN):
        return value in predicate.values
    number, bound = numeric(value), numeric(predicate.values[0])
    return number is not None and bound is not None and ORDER[op](number, bound)


def matches(metadata: Mapping[str, str], selection: Selection) -> bool:
    return all(metadata.get(key) == value for key, value in selection.equals.items()) and all(
        satisfies(metadata, predicate) for predicate in selection.predicates
    )


_values = st.sampled_from(VALUES)
_predicates = st.one_of(
    st.builds(
        Predicate,
        key=st.sampled_from([*KEYS, "absent"]),
        op=st.sampled_from([PredicateOp.EQ, PredicateOp.NEQ]),
        values=st.tuples(_values),
    ),
    st.builds(
        Predicate,
        key=st.sampled_from(KEYS),
        op=st.just(PredicateOp.IN),
        values=st.lists(_values, min_size=1, max_size=12).map(tuple),
    ),
    st.builds(
        Predicate,
        key=st.sampled_from(KEYS),
        op=st.sampled_from(list(ORDER)),
        values=st.tuples(st.sampled_from(["1", "-300", "2.5", "0"])),
    ),
)
_equals = st.dictionaries(st.sampled_from([*KEYS, "absent"]), _values, max_size=2)
_filters = st.builds(
    Selection, equals=_equals, predicates=st.lists(_predicates, max_size=3).map(tuple)
)


@st.composite
def _metadata(draw: st.DrawFn) -> list[dict[str, str]]:
    """Return up to 300 rows; how many carry a key is drawn for each key, from none to all."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shares = {key: draw(st.sampled_from([0.0, 0.02, 0.1, 0.3, 0.9, 1.0])) for key in KEYS}
    kinds = draw(st.integers(1, len(VALUES)))
    return [
        {key: VALUES[rng.integers(kinds)] for key in KEYS if rng.random() < shares[key]}
        for _ in range(draw(st.sampled_from([0, 1, 2, 30, 100, 300])))
    ]


@given(st.lists(st.tuples(_metadata(), st.booleans()), max_size=5), st.lists(_filters, max_size=5))
def test_a_filter_finds_what_a_loop_finds_after_every_append_and_every_merge(
    parts: list[tuple[list[dict[str, str]], bool]], filters: list[Selection]
) -> None:
    index, held = MetadataIndex(), list[dict[str, str]]()
    for rows, merges in parts:
        index.extend(len(held), rows)
        held += rows
        if merges:
            # Some values, and the rows of the first part that had the key, vanish.
            kept = np.array([row.get("kind") != "a" and i % 3 > 0 for i, row in enumerate(held)])
            index.keep(kept.astype(np.bool_))
            held = [row for row, stays in zip(held, kept, strict=True) if stays]
        for selection in filters:
            found = index.matching(selection.equals, selection.predicates)
            if not selection.equals and not selection.predicates:
                assert found is None
                continue
            true = [at for at, row in enumerate(held) if matches(row, selection)]
            assert found is not None
            assert found.dtype == np.int64
            assert found.tobytes() == np.array(true, np.int64).tobytes()


@dataclass
class PlainRow:
    """A row with all that ever happened to it, and the rule that a read goes by."""

    number: int
    id: str
    committed: int
    created: int
    valid_from: int
    valid_to: int
    metadata: Mapping[str, str]
    replaced: int = NEVER
    changes: list[tuple[int, int, int]] = field(default_factory=list)
    """(at, valid_to, deleted)"""

    def allowed(self, selection: Selection, known_at: int, as_of: int) -> bool:
        valid_to, deleted = self.valid_to, int(NEVER)
        for at, *now in self.changes:
            if at <= known_at:
                valid_to, deleted = now
        after, before = selection.created_after, selection.created_before
        return (
            self.committed <= known_at < self.replaced
            and (
                selection.include_invalidated
                or (deleted == NEVER and self.valid_from <= as_of < valid_to)
            )
            and (after is None or self.created > after)
            and (before is None or self.created < before)
            and matches(self.metadata, selection)
        )


def columns(rows: Sequence[PlainRow]) -> RowColumns:
    def of(name: str) -> np.typing.NDArray[np.int64]:
        return np.array([getattr(row, name) for row in rows], np.int64)

    return RowColumns(
        numbers=of("number"),
        ids=np.array([row.id for row in rows], np.object_),
        versions=np.ones(len(rows), np.int64),
        committed_at=of("committed"),
        created_at=of("created"),
        valid_from=of("valid_from"),
        valid_to=of("valid_to"),
        deleted_at=np.full(len(rows), NEVER),
        metadata=[row.metadata for row in rows],
    )


class Both:
    """`Rows` and the plain rows, told the same."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.rows, self.plain = Rows(), list[PlainRow]()
        self.now, self.next = 1_000, 0

    def write(self, metadata: Sequence[Mapping[str, str]]) -> None:
        """Add rows of one commit, of which some replace others."""
        self.now += 10
        fresh = list[PlainRow]()
        for one in metadata:
            near = self.now + self.rng.integers(-40, 40, 2)
            open_ended = self.rng.random() < 0.6
            # A commit has one row of an id.
            id = f"id{self.next if self.rng.random() < 0.8 else self.next % 50}"
            if any(row.id == id for row in fresh):
                id = f"new{self.next}"
            valid_to = NEVER if open_ended else int(near.max()) + 1
            created = self.now - int(self.rng.integers(0, 30))
            row = PlainRow(self.next, id, self.now, created, int(near.min()), valid_to, dict(one))
            fresh.append(row)
            self.next += 1
        for row in fresh:
            for old in self.plain:
                if old.id == row.id and old.replaced == NEVER:
                    old.replaced = self.now
        self.rows.add(columns(fresh))
        self.plain += fresh
        self.rows.last_commit = self.now

    def change(self, share: float) -> None:
        """Change some rows, and a few of them twice."""
        self.now += 10
        for row in self.plain:
            while row.committed != NEVER and self.rng.random() < share:
                deleted = self.now if self.rng.random() < 0.5 else NEVER
                valid_to = self.now + int(self.rng.integers(-20, 20))
                row.changes.append((self.now, valid_to, deleted))
                self.rows.change(self.now, Change(row.number, valid_to, deleted))
        self.rows.last_commit = self.now

    def erase(self) -> None:
        """Erase the newest row of every seventh id, as if these had no other."""
        for row in self.plain[::7]:
            if row.committed != NEVER:
                self.rows.erase([row.number])
                row.committed = NEVER

    def merge(self) -> None:
        """Drop what was erased or replaced, and forget changes up to some instant."""
        kept = np.array(
            [row.committed != NEVER and row.replaced == NEVER for row in self.plain], np.bool_
        )
        self.rows.drop(kept, self.now - 10)
        self.plain = [row for row, stays in zip(self.plain, kept, strict=True) if stays]

    def check(self, selection: Selection, known_at: int, as_of: int) -> None:
        found = self.rows.allowed(selection, known_at, as_of)
        true = [at for at, row in enumerate(self.plain) if row.allowed(selection, known_at, as_of)]
        assert found.dtype == np.int64
        assert found.tobytes() == np.array(true, np.int64).tobytes()


_near = st.integers(-60, 40)
_created = st.none() | st.none() | _near


@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.lists(
        st.tuples(_metadata(), st.sampled_from([0.0, 0.05, 0.5]), st.booleans(), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    reads=st.lists(
        st.tuples(
            _filters, st.none() | _near, st.integers(0, 60), st.booleans(), _created, _created
        ),
        max_size=6,
    ),
)
def test_a_read_is_allowed_what_a_loop_allows_at_every_instant(
    seed: int,
    steps: list[tuple[list[dict[str, str]], float, bool, bool]],
    reads: list[tuple[Selection, int | None, int, bool, int | None, int | None]],
) -> None:
    both = Both(seed)
    floor = 0
    for metadata, changed, erases, merges in steps:
        both.write(metadata)
        both.change(changed)
        if erases:
            both.erase()
        if merges:
            both.merge()
            floor = both.now
        for asked, as_of, ago, invalidated, after, before in reads:
            known_at = max(floor, both.now - ago)
            selection = Selection(
                asked.equals,
                asked.predicates,
                created_after=None if after is None else Instant(both.now + after),
                created_before=None if before is None else Instant(both.now + before),
                include_invalidated=invalidated,
            )
            both.check(selection, known_at, known_at if as_of is None else both.now + as_of)
            both.check(selection, both.now, both.now)
            both.now += 1


def test_an_answer_stays_as_it_was_while_rows_are_added() -> None:
    both = Both(1)
    both.write([{"kind": "a"}] * 100)
    every = both.rows.allowed(Selection(), both.now, both.now)
    some = both.rows.allowed(Selection({"kind": "a"}), both.now, both.now)
    before = every.tobytes(), some.tobytes()
    both.write([{"kind": "a"}] * 100)
    both.change(0.9)
    both.rows.allowed(Selection(), both.now, both.now)
    assert (every.tobytes(), some.tobytes()) == before


@pytest.mark.parametrize("rows", [1, 100, 5_000])
def test_keys_and_values_that_no_row_carries_any_more_are_forgotten(rows: int) -> None:
    index = MetadataIndex()
    index.extend(0, [{"all": str(n), f"key{n}": "x"} for n in range(rows)])
    index.keep(np.arange(rows) < rows // 4)
    assert len(index._keys) == (1 + rows // 4 if rows // 4 else 0)
    if rows // 4:
        assert len(index._keys["all"].code_of) == rows // 4
    last = Predicate("all", PredicateOp.GTE, (str(rows // 4 - 1),))
    found = index.matching({}, [last])
    assert found is not None
    assert found.tolist() == ([rows // 4 - 1] if rows // 4 else [])


def test_a_key_of_the_first_rows_takes_no_room_for_all_that_come_later() -> None:
    index = MetadataIndex()
    index.extend(0, [{"early": "x", "all": "y"}] * 200)
    index.extend(200, [{"all": "y"}] * 20_000)
    index.extend(20_200, [{"early": "z"}])
    assert not index._keys["early"].dense
    assert index._keys["all"].dense
    late = index.matching({"early": "z"}, ())
    assert late is not None
    assert late.tolist() == [20_200]
    both = index.matching({"early": "x", "all": "y"}, ())
    assert both is not None
    assert both.tolist() == list(range(200))
