"""Random histories of a semantic namespace, for comparing a driver with the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from msgspec.structs import replace

from mindgrid.shards.clock import Instant
from mindgrid.shards.types import (
    Delete,
    Draft,
    Expire,
    ExpireAction,
    Fusion,
    FusionMethod,
    Mode,
    Predicate,
    PredicateOp,
    Query,
    Scan,
    Selection,
    Supersession,
    Upsert,
    Vector,
    Want,
)
from tests.support.clocks import START

DIMENSIONS = 6
IDS = [*(f"id{n}" for n in range(60)), "ä/#?", "日本", "\U0001f600", " "]
TEXTS = ["apple pie", "an apple, a pie and a pie", "café", "日本語", "text of apple"]
_AROUND = 3_000_000


@dataclass(frozen=True)
class Search:
    """Ask both drivers the same; times are relative to the clock's now.

    By words, `hybrid` asks by meaning too where there is a grid to join the lanes.
    """

    query: Query
    as_of_ago: int | None
    known_at_ago: int | None
    hybrid: bool = False


@dataclass(frozen=True)
class Get:
    """Ask both drivers for the same ids."""

    ids: tuple[str, ...]
    known_at_ago: int | None
    include_invalidated: bool


@dataclass(frozen=True)
class Page:
    """Ask both drivers for the same page."""

    scan: Scan
    known_at_ago: int | None


@dataclass(frozen=True)
class Turn:
    """Move the clock."""

    micros: int


@dataclass(frozen=True)
class Maintain:
    """Seal, merge and index, whatever is due."""


@dataclass(frozen=True)
class Compact:
    """Rewrite everything that holds a dead row."""


@dataclass(frozen=True)
class Reopen:
    """Close the shard and open it from its folder."""


@dataclass(frozen=True)
class Promise:
    """Prepare a commit over several shards, of which this one has a part."""

    slot: int
    command: Upsert | Expire


@dataclass(frozen=True)
class Settle:
    """End a promise: carry it out so long after its proposal, or give it up."""

    slot: int
    after: int | None


Operation = (
    Promise
    | Settle
    | Upsert
    | Delete
    | Expire
    | Search
    | Get
    | Page
    | Turn
    | Maintain
    | Compact
    | Reopen
)

_ids = st.sampled_from(IDS)
_micros = st.integers(-_AROUND, _AROUND)
_instants = _micros.map(lambda micros: Instant(START + micros))
_values = st.sampled_from(["a", "b", "1", "2.5", "-3e2", "NaN", "", "0x10", "ß"])
_metadata = st.dictionaries(st.sampled_from(["k", "kind", "n"]), _values, max_size=3)


def _vector(numbers: tuple[int, ...]) -> Vector:
    return np.array(numbers, dtype=np.float32)


# Small whole numbers, so that equal scores are common and ties are put to the test.
_vectors = (
    st.tuples(*[st.integers(-3, 3)] * DIMENSIONS).filter(lambda numbers: any(numbers)).map(_vector)
)


@st.composite
def _drafts(draw: st.DrawFn) -> Draft:
    return Draft(
        id=draw(_ids),
        content=draw(st.sampled_from(["", *TEXTS])),
        vector=draw(_vectors),
        payload=draw(st.sampled_from([b"", b"\x00\xff", b"payload"])),
        metadata=draw(_metadata),
        created_at=draw(st.none() | _instants),
        valid_from=draw(st.none() | _instants),
        valid_to=draw(st.none() | st.none() | _instants),
        deleted_at=draw(st.none() | st.none() | st.none() | _instants),
        supersedes=tuple(draw(st.lists(_ids, max_size=2))),
        source=draw(st.sampled_from(["", "events/7"])),
        if_version=draw(st.none() | st.none() | st.none() | st.integers(0, 2)),
    )


_upserts = st.builds(
    Upsert,
    transaction_id=st.sampled_from(["", "", "", "t1", "t2"]),
    drafts=st.lists(_drafts(), min_size=1, max_size=8).map(tuple),
)
_deletes = st.builds(
    Delete, transaction_id=st.sampled_from(["", "t3"]), id=_ids, hard=st.booleans()
)
_expires = st.builds(
    Expire,
    transaction_id=st.sampled_from(["", "", "t4"]),
    equals=st.dictionaries(st.sampled_from(["k", "kind"]), _values, max_size=1),
    action=st.sampled_from(ExpireAction),
    max_rows=st.sampled_from([1, 2, 5, 20]),
)
_predicates = st.one_of(
    st.builds(
        Predicate,
        key=st.sampled_from(["k", "kind", "n"]),
        op=st.sampled_from([PredicateOp.EQ, PredicateOp.NEQ]),
        values=st.tuples(_values),
    ),
    st.builds(
        Predicate,
        key=st.sampled_from(["k", "kind", "n"]),
        op=st.sampled_from([PredicateOp.GT, PredicateOp.GTE, PredicateOp.LT, PredicateOp.LTE]),
        values=st.sampled_from(["1", "2.5", "-300", "0"]).map(lambda value: (value,)),
    ),
    st.builds(
        Predicate,
        key=st.sampled_from(["k", "kind", "n"]),
        op=st.just(PredicateOp.IN),
        values=st.lists(_values, min_size=1, max_size=3).map(tuple),
    ),
)
_selections = st.builds(
    Selection,
    equals=st.dictionaries(st.sampled_from(["k", "kind"]), _values, max_size=1),
    predicates=st.lists(_predicates, max_size=2).map(tuple),
    created_after=st.none() | st.none() | _instants,
    created_before=st.none() | st.none() | _instants,
    include_invalidated=st.booleans(),
)
_queries = st.builds(
    Query,
    vector=_vectors,
    top_k=st.sampled_from([1, 3, 10, 100]),
    selection=st.just(Selection()) | st.just(Selection(include_invalidated=True)) | _selections,
    want=st.sampled_from([Want.ID, Want.VALUES, Want.VALUES | Want.PAYLOAD | Want.VECTOR]),
    exact=st.booleans(),
    mode=st.sampled_from([Mode.DENSE, Mode.DENSE, Mode.SPARSE]),
    text=st.sampled_from([*TEXTS, "pie", "Apple apple text", "語", "本語", "nothing"]),
    explain=st.booleans(),
    depth=st.sampled_from([3, 50]),
    fusion=st.sampled_from(
        [Fusion(), Fusion(FusionMethod.CONVEX), Fusion(dense_weight=0.2, sparse_weight=2.0, k=1)]
    ),
)
_ago = st.none() | st.none() | st.integers(0, 2 * _AROUND)
_searches = st.builds(
    Search,
    query=_queries,
    as_of_ago=_ago | st.integers(-_AROUND, 0),
    known_at_ago=_ago,
    hybrid=st.booleans(),
)
_gets = st.builds(
    Get,
    ids=st.lists(_ids, max_size=6).map(tuple),
    known_at_ago=_ago,
    include_invalidated=st.booleans(),
)
_pages = st.builds(
    Page,
    scan=st.builds(
        Scan,
        selection=st.just(Selection()) | st.just(Selection(include_invalidated=True)) | _selections,
        after=st.just("") | _ids | st.just("id3"),
        limit=st.sampled_from([0, 1, 7, 100]),
        want=st.sampled_from([Want.ID, Want.VALUES, Want.VALUES | Want.PAYLOAD | Want.VECTOR]),
    ),
    known_at_ago=_ago,
)
operations = st.one_of(
    _upserts,
    _upserts,
    _upserts,
    _deletes,
    _expires,
    _searches,
    _searches,
    _searches,
    _gets,
    _pages,
    st.builds(Turn, micros=st.integers(-1_000, 200_000)),
    st.builds(Maintain),
    st.builds(Compact),
    st.builds(Reopen),
)


def _as_part(command: Upsert | Expire) -> Upsert | Expire:
    """Return the command as a part of a commit whose transaction another shard remembers."""
    if isinstance(command, Expire):
        return replace(command, transaction_id="", ids=tuple(IDS[::3]))
    supersessions = tuple(
        Supersession(target, draft.valid_from, place)
        for place, draft in enumerate(command.drafts)
        for target in draft.supersedes[:1]
    )
    return replace(command, transaction_id="", supersessions=supersessions)


def _bulk(seed: int) -> list[Operation]:
    """Return writes of every id, enough of them to be sealed, merged and indexed.

    Then one more, too few to be sealed, and searches: of the index and a row it lacks, of all rows,
    and of words.
    """
    rng = np.random.default_rng(seed)

    def draft(id: str) -> Draft:
        vector = rng.integers(-3, 4, DIMENSIONS).astype(np.float32) + np.float32(0.5)
        return Draft(id, f"text of {id}", vector)

    writes: list[Operation] = []
    for part in range(0, len(IDS), 16):
        writes.append(Upsert("", tuple(draft(id) for id in IDS[part : part + 16])))
        writes.append(Maintain())
    late = draft(IDS[0])
    searches: list[Operation] = [
        Search(query, None, None)
        for query in (
            Query(late.vector, 3),
            Query(late.vector, 3, exact=True),
            Query(late.vector, 3, text="text", mode=Mode.SPARSE),
        )
    ]
    return [*writes, Upsert("", (late,)), *searches]


_promises = st.builds(
    Promise, slot=st.integers(0, 1), command=_upserts.map(_as_part) | _expires.map(_as_part)
)
_settles = st.builds(
    Settle, slot=st.integers(0, 1), after=st.none() | st.integers(0, 50_000) | st.just(0)
)
promising_histories = st.builds(
    lambda seed, operations: [*_bulk(seed), *operations, Settle(0, 0), Settle(1, None)],
    seed=st.integers(0, 2**32 - 1),
    operations=st.lists(
        st.one_of(_promises, _settles, _settles, operations, operations, operations),
        min_size=30,
        max_size=90,
    ),
)
histories = st.builds(
    lambda seed, operations: [*_bulk(seed), *operations],
    seed=st.integers(0, 2**32 - 1),
    operations=st.lists(operations, min_size=20, max_size=80),
)
