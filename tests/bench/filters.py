"""Time and size of metadata filters and validity, beside pyarrow on plain columns. Seeded.

    PYTHONPATH=src:. python tests/bench/filters.py [rows ...]

Times are CPU time of the calling thread (all of it on one core), since the machines are shared. No
two calls of a case ask for the same values; "after a write" is the first call after a commit.
"""

from __future__ import annotations

import os
import platform
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

# Threads of NumPy's would compete with what is measured.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mindgrid.shards.clock import NEVER, Instant
from mindgrid.shards.commits import Change
from mindgrid.shards.filters import MetadataIndex, Positions
from mindgrid.shards.rows import RowColumns, Rows, instants
from mindgrid.shards.types import Predicate, PredicateOp, Selection

T = TypeVar("T")

CALLS = 200
PEER_CALLS = 5
STEP = 1_000
"""Microseconds from one row to the next."""
START = 1_700_000_000_000_000
BATCH_ROWS = 10_000
FLAGS = [f"flag{n}" for n in range(10)]
COMPARE = {
    PredicateOp.EQ: pc.equal,
    PredicateOp.NEQ: pc.not_equal,
    PredicateOp.GT: pc.greater,
    PredicateOp.GTE: pc.greater_equal,
    PredicateOp.LT: pc.less,
    PredicateOp.LTE: pc.less_equal,
}


def main() -> None:
    """Print one section per number of rows."""
    sizes = [int(size) for size in sys.argv[1:]] or [100_000, 1_000_000]
    print(f"PYTHONPATH=src:. python tests/bench/filters.py {' '.join(map(str, sizes))}")
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, "
        f"numpy {np.__version__}, pyarrow {pa.__version__}"
    )
    _adding()
    _sizes()
    for size in sizes:
        _section(Shard.of(size))


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows of which a tenth replace others, a tenth end, and half were changed later."""

    rows: Rows
    table: pa.Table
    now: Instant
    """After every row and change; the changes took place one `STEP` after the other."""

    @classmethod
    def of(cls, size: int) -> Shard:
        """Return a shard of `size` rows with 14 keys each."""
        rng = np.random.default_rng(21)
        rows, tables = Rows(), []
        for first in range(0, size, BATCH_ROWS):
            table = _metadata(rng, first, min(BATCH_ROWS, size - first))
            rows.add(_columns(rng, first, table.to_pylist()))
            tables.append(table)
        at = START + size * STEP
        for number in rng.permutation(size)[: size // 2].tolist():
            deleted = at if rng.random() < 0.5 else NEVER
            rows.change(at, Change(number, at, deleted))
            at += STEP
        rows.last_commit = at
        return cls(rows, pa.concat_tables(tables).combine_chunks(), Instant(at + STEP))


def _metadata(rng: np.random.Generator, first: int, count: int) -> pa.Table:
    def text(prefix: str, numbers: NDArray[np.int64]) -> list[str]:
        return [f"{prefix}{number}" for number in numbers.tolist()]

    columns = {
        "tenant": text("t", rng.integers(0, 100, count)),
        "user": text("u", rng.integers(0, 10_000, count)),
        "number": text("", rng.integers(0, 1_000, count)),
        "serial": text("", first + rng.permutation(count)),
    }
    for flag in FLAGS:
        columns[flag] = ["on" if on else "off" for on in (rng.random(count) < 0.8).tolist()]
    return pa.table(columns)


def _columns(
    rng: np.random.Generator, first: int, metadata: Sequence[dict[str, str]]
) -> RowColumns:
    count = len(metadata)
    numbers = np.arange(first, first + count)
    at = START + numbers * STEP
    named = np.where(rng.random(count) < 0.1, rng.integers(0, first + 1, count), numbers)
    return RowColumns(
        numbers=numbers,
        ids=np.array([f"id{n}" for n in named.tolist()], np.object_),
        versions=np.ones(count, np.int64),
        committed_at=at,
        created_at=at,
        valid_from=at,
        valid_to=np.where(rng.random(count) < 0.1, at + 1_000 * STEP, NEVER),
        deleted_at=np.full(count, NEVER),
        metadata=metadata,
    )


def _cases(shard: Shard) -> dict[str, Callable[[int], Selection]]:
    """Return by name what the n-th call of a case selects."""
    size = len(shard.table)
    end = START + size * STEP

    def where(key: str, op: PredicateOp, *values: object) -> Predicate:
        return Predicate(key, op, tuple(map(str, values)))

    def users(n: int, count: int) -> Predicate:
        return where("user", PredicateOp.IN, *(f"u{(n + 7 * i) % 10_000}" for i in range(count)))

    def ago(n: int) -> Instant:
        """Return an instant at which half of the rows and no change had been committed."""
        return Instant(START + (size // 2 - n) * STEP)

    def below(n: int, share: float) -> Predicate:
        return where("serial", PredicateOp.LT, int(size * share) + n)

    def changing(n: int) -> Instant:
        """Return an instant that half of the changes come after."""
        return Instant(end + (size // 4 - n) * STEP)

    one = [{"tenant": f"t{n}"} for n in range(100)]
    return {
        "nothing asked": lambda _: Selection(),
        "= 20 % (a flag off)": lambda n: Selection({FLAGS[n % 10]: "off"}),
        "= 1 % (tenant)": lambda n: Selection(one[n % 100]),
        "= 0.01 % (user)": lambda n: Selection({"user": f"u{n}"}),
        "= one row (serial)": lambda n: Selection({"serial": str(n * 17)}),
        "!= 99 % (tenant)": lambda n: Selection({}, (where("tenant", PredicateOp.NEQ, f"t{n}"),)),
        "!= all (serial)": lambda n: Selection({}, (where("serial", PredicateOp.NEQ, n),)),
        "range 50 % (1,000 values)": lambda n: Selection(
            {}, (where("number", PredicateOp.GTE, 400 + n),)
        ),
        "range 1 % (1,000 values)": lambda n: Selection(
            {}, (where("number", PredicateOp.GT, n), where("number", PredicateOp.LTE, n + 10))
        ),
        "range 50 % (all distinct)": lambda n: Selection({}, (below(n, 0.5),)),
        "range 0.01 % (all distinct)": lambda n: Selection(
            {}, (where("serial", PredicateOp.GTE, n), below(n, 0.0001))
        ),
        "IN 100 users, 1 %": lambda n: Selection({}, (users(n, 100),)),
        "IN 1,000 users, 10 %": lambda n: Selection({}, (users(n, 1_000),)),
        "tenant, IN 1,000, range": lambda n: Selection(
            one[n % 100], (users(n, 1_000), where("number", PredicateOp.LT, 500 + n))
        ),
        "10 keys ANDed, 10 %": lambda n: Selection(
            dict.fromkeys(FLAGS, "on") | {FLAGS[n % 10]: "off"}
        ),
        "10 keys and a user": lambda n: Selection(dict.fromkeys(FLAGS, "on") | {"user": f"u{n}"}),
        "created, 1 %": lambda n: Selection(
            created_after=Instant(ago(n)), created_before=Instant(ago(n) + size // 100 * STEP)
        ),
        "created, 50 %": lambda n: Selection(created_after=ago(n)),
        "created, 50 %, and tenant": lambda n: Selection(one[n % 100], created_after=ago(n)),
        "as_of past": lambda n: Selection(as_of=ago(n)),
        "as_of past, tenant": lambda n: Selection(one[n % 100], as_of=ago(n)),
        "invalidated too": lambda _: Selection(include_invalidated=True),
        "invalidated too, tenant": lambda n: Selection(one[n % 100], include_invalidated=True),
        "known_at, all changes later": lambda n: Selection(known_at=ago(n)),
        "known_at, half later": lambda n: Selection(known_at=changing(n)),
        "known_at, half later, tenant": lambda n: Selection(one[n % 100], known_at=changing(n)),
        "known_at, half later, user": lambda n: Selection({"user": f"u{n}"}, known_at=changing(n)),
    }


def _section(shard: Shard) -> None:
    print(f"\n{len(shard.rows)} rows, {len(shard.table.column_names)} keys; ms")
    heads = "".join(f"{head:>15}" for head in ("p50", "p99", "after a write", "pyarrow", "ratio"))
    print(f"{'':30}{'rows':>9}{heads}")
    for name, select in _cases(shard).items():
        selections = [select(n) for n in range(CALLS)]
        peer = _Peer(shard, selections[0])
        found, _ = _timed(lambda: _allowed(shard, selections[0]))  # noqa: B023
        theirs, _ = _timed(peer.allowed)
        assert np.array_equal(found, theirs), name
        times = [_timed(lambda s=s: _allowed(shard, s))[1] for s in selections]  # type: ignore[misc]
        p50, p99 = np.percentile(times, [50, 99])
        after = np.median([_after_a_write(shard, s) for s in selections[:40]])
        peers = np.median([_timed(peer.allowed)[1] for _ in range(PEER_CALLS)])
        cells = "".join(f"{ms:15.3f}" for ms in (p50, p99, after, peers))
        print(f"{name:30}{len(found):9d}{cells}{peers / p50:15.0f}")


def _allowed(shard: Shard, selection: Selection) -> Positions:
    return shard.rows.allowed(selection, *instants(selection, shard.now))


def _after_a_write(shard: Shard, selection: Selection) -> float:
    """Return the ms of a call after an erased row was added, which no answer shows."""
    rows = shard.rows
    number = np.array([int(rows.numbers.view()[-1]) + 1])
    never, one = np.array([NEVER]), np.array([1])
    metadata = [{"tenant": "t0", "user": "u0", "number": "0", "serial": f"n{number[0]}"}]
    ids = np.array([""], np.object_)
    rows.add(RowColumns(number, ids, one, never, one, one, never, never, metadata))
    return _timed(lambda: _allowed(shard, selection))[1]


class _Peer:
    """What a scan by pyarrow and NumPy over plain columns takes.

    Its numbers are float64 already, and its lifecycle is known at the instant asked about.
    """

    def __init__(self, shard: Shard, selection: Selection) -> None:
        self._selection = selection
        self._known_at, self._as_of = instants(selection, shard.now)
        self._table = shard.table
        size, rows = len(shard.table), shard.rows
        self._floats = {
            key: pc.cast(shard.table[key], pa.float64()) for key in ("number", "serial")
        }
        lives = rows.lifecycles(np.arange(size), self._known_at)
        self._valid_to = np.array([life.valid_to for life in lives])
        self._deleted = np.array([life.deleted_at for life in lives])
        self._created = rows.created.view()[:size].copy()
        self._valid_from = rows.valid_from.view()[:size].copy()
        self._committed = rows.committed.view()[:size].copy()
        self._replaced = rows.replaced.view()[:size].copy()

    def allowed(self) -> Positions:
        selection = self._selection
        shown = (self._committed <= self._known_at) & (self._replaced > self._known_at)
        if not selection.include_invalidated:
            shown &= (self._deleted == NEVER) & (self._valid_from <= self._as_of)
            shown &= self._valid_to > self._as_of
        if selection.created_after is not None:
            shown &= self._created > selection.created_after
        if selection.created_before is not None:
            shown &= self._created < selection.created_before
        for mask in self._masks():
            shown &= mask.to_numpy()
        return np.flatnonzero(shown)

    def _masks(self) -> Iterator[pa.ChunkedArray]:
        for key, value in self._selection.equals.items():
            yield pc.equal(self._table[key], value)
        for predicate in self._selection.predicates:
            key, op, values = predicate.key, predicate.op, predicate.values
            if op is PredicateOp.IN:
                yield pc.is_in(self._table[key], pa.array(values))
            elif op in (PredicateOp.EQ, PredicateOp.NEQ):
                yield COMPARE[op](self._table[key], values[0])
            else:
                yield COMPARE[op](self._floats[key], float(values[0]))


def _adding() -> None:
    """Print what the write path pays for the metadata of a row."""
    rng = np.random.default_rng(22)
    print("\nadding to 100,000 rows with 14 keys each; us/row, best of 5")
    filled = MetadataIndex()
    filled.extend(0, _metadata(rng, 0, 100_000).to_pylist())
    start = 100_000
    for batch, times in ((1, 1_000), (100, 40), (1_000, 10)):
        each = []
        for _ in range(5):
            rows = _metadata(rng, start, batch * times).to_pylist()
            parts = [rows[low : low + batch] for low in range(0, len(rows), batch)]
            begun = time.thread_time()
            for part in parts:
                filled.extend(start, part)
                start += batch
            each.append((time.thread_time() - begun) / len(rows) * 1e6)
        print(f"batches of {batch:5}: {min(each):8.2f}")


def _sizes() -> None:
    rng = np.random.default_rng(23)
    rows = 100_000
    flags = ["on" if on else "off" for on in (rng.random(rows) < 0.8).tolist()]
    serials = [str(n) for n in rng.permutation(rows).tolist()]
    keys = [f"key{n}" for n in range(rows)]
    print("\nbytes beside the strings themselves")
    for name, metadata in (
        ("a row, one key of two values", [{"flag": flag} for flag in flags]),
        ("a row, one key, all distinct", [{"serial": serial} for serial in serials]),
        ("a key that occurs once", [{key: "1"} for key in keys]),
    ):
        tracemalloc.start()
        index = MetadataIndex()
        for low in range(0, rows, BATCH_ROWS):
            index.extend(low, metadata[low : low + BATCH_ROWS])
        fresh = tracemalloc.get_traced_memory()[0] / rows
        key = next(iter(metadata[0]))
        index.matching({key: "1"}, ())
        index.matching({}, (Predicate(key, PredicateOp.GT, ("5",)),))
        used = tracemalloc.get_traced_memory()[0] / rows
        index.keep(np.ones(rows, np.bool_))
        kept = tracemalloc.get_traced_memory()[0] / rows
        tracemalloc.stop()
        print(f"{name:30}{fresh:9.1f}, after queries {used:7.1f}, after a merge {kept:7.1f}")


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.thread_time()
    result = work()
    return result, (time.thread_time() - start) * 1e3


if __name__ == "__main__":
    main()
