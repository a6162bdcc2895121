"""What readers of a shard see: rows, segments, tail, vectors and index, and how they answer.

One lock guards it. Searches hold it twice for a moment: to fix the instant and the allowed rows,
and to read the records they found; the vectors are compared outside of it, on a view that never
changes. Between the two a merge may shift positions, so hits travel as row numbers; a hit whose
row was erased meanwhile makes the query start over.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from mindgrid.shards.analysis import analyzer_of
from mindgrid.shards.clock import Instant, spelled
from mindgrid.shards.commits import Commit, RowWrite, note, unbound
from mindgrid.shards.config import ShardConfig
from mindgrid.shards.driver import Found
from mindgrid.shards.errors import InDoubt, InvalidRequest, MindgridError, Unavailable
from mindgrid.shards.filters import Positions
from mindgrid.shards.ivf import Bitmap, IvfIndex
from mindgrid.shards.rows import Lifecycle, Rows, instants
from mindgrid.shards.scores import WordStats, best
from mindgrid.shards.segments import Segment, StoredRow
from mindgrid.shards.transactions import Doubts
from mindgrid.shards.types import (
    NO_VECTOR,
    Answer,
    Hit,
    Mode,
    Query,
    Record,
    Scan,
    Scanned,
    Selection,
    Stamp,
    Vector,
    Want,
)
from mindgrid.shards.values import Values
from mindgrid.shards.vectors import Block, Scored, Tail, Vectors, cut, parted
from mindgrid.shards.words import Words, WordTail

READ_WAIT_S = 10.0
"""How long a read waits for a commit on its way to the disk."""
_NO_VALUES = Values("", {}, "", ())
_ATTEMPTS_MAX = 8
"""How often a query starts over because a hit was erased under it."""
_FEW_ROWS = 256
_APART_ROWS, _APART_QUERIES = 4_096, 4
"""Up to so many rows are compared in one pass with those of other queries, but if they are not few
and more than so many queries ask for the same ones, these share a matrix product."""


@dataclass(frozen=True, slots=True)
class _View:
    """What a search works on outside the lock; nothing in it ever changes."""

    vectors: Vectors
    index: IvfIndex | None
    indexed: int
    ids: NDArray[np.object_]
    numbers: NDArray[np.int64]
    words: Words


class _Counted:
    """The rows over which BM25 counts, with their number and length altogether.

    `mask` is by position, None for all rows.
    """

    def __init__(self, words: Words, mask: NDArray[np.bool_] | None) -> None:
        self._words = words
        self._mask = mask

    @functools.cached_property
    def _totals(self) -> tuple[int, int]:
        return self._words.totals(self._mask)

    def stats(self, terms: Sequence[str]) -> WordStats:
        """Return the statistics of a query's terms."""
        return self._words.stats(terms, self._mask, self._totals)


@dataclass(frozen=True, slots=True)
class _Target:
    """One query with the rows it may return; by words also those that count."""

    query: Query
    known_at: Instant
    allowed: Positions
    counted: _Counted | None = None


@dataclass(frozen=True, slots=True)
class _Ranked:
    """The row numbers, ids and scores of a query's hits, best first."""

    numbers: NDArray[np.int64]
    ids: list[str]
    scores: NDArray[np.float32]
    exact: bool
    scanned: int
    stats: WordStats | None = None


@dataclass(frozen=True, slots=True)
class _Shortlist:
    """The rows, ascending, among which the best of a query are, and what led to them."""

    positions: Positions
    exact: bool
    scanned: int


_NOTHING = _Ranked(np.empty(0, np.int64), [], np.empty(0, np.float32), exact=True, scanned=0)


class _Located(NamedTuple):
    """Where a row's values are to be read, without the lock: its segment, or the row itself."""

    id: str
    life: Lifecycle
    block: Block
    offset: int
    source: Segment | RowWrite


class Store:
    """The readable state of one shard. Writers call `apply` and the `swap_` methods."""

    def __init__(self, config: ShardConfig) -> None:
        self._config = config
        self.lock = threading.Condition()
        self.rows = Rows()
        self.segments: tuple[Segment, ...] = ()
        self.tail_rows: list[StoredRow] = []
        self.tail = Tail(config.space.dimensions)
        self.analyzer = analyzer_of(config.text_search)
        self._word_tail = WordTail(self.analyzer)
        self.index: IvfIndex | None = None
        self.indexed = 0
        """Positions below this are in the index."""
        self.last_seq = 0
        self.history_floor = Instant(0)
        self.floor = Instant(0)
        """Every later commit is later than this: no read has looked beyond it."""
        self.doubts = Doubts()
        self._late: list[tuple[int, int]] = []
        """(sequence, time) of commits that took effect before another that was already there."""
        self.in_flight: Instant | None = None
        """The first commit time of the group that is being made durable."""
        self.failure: MindgridError | None = None
        """Why nothing more is read or written: what the disk holds is not known any more."""
        self.counters: Counter[str] = Counter()
        self._starts: list[int] = [0]
        self._vectors = Vectors(config.space.dimensions, ())
        self._words = Words(())
        self._counted: tuple[int, _Counted] | None = None
        """The count at the newest commit, and that commit's sequence."""
        self._bitmap: tuple[Positions, IvfIndex, Bitmap | None] | None = None

    def apply(self, commits: Sequence[Commit], vectors: Sequence[Vector]) -> None:
        """Make durable commits visible. The caller holds the lock."""
        for commit in commits:
            note(self.doubts, commit)
            if commit.takes_place:
                if commit.at < self.rows.last_commit:
                    self._late.append((commit.seq, commit.at))
                self.rows.apply(commit)
            self._word_tail.append([row.content for row in commit.rows])
            for offset, row in enumerate(commit.rows):
                number = commit.first_number + offset
                self.tail_rows.append(StoredRow(number, commit.seq, commit.at, row))
            self.last_seq = commit.seq
            self.floor = Instant(max(self.floor, commit.at))
        if vectors:
            self.tail.append(np.stack(vectors))
            self.relayout()

    def recall(self, commit: Commit) -> None:
        """Keep the promises of a commit that is sealed otherwise. The caller holds the lock.

        What else it noted is in the manifest.
        """
        known = commit.resolves in self.doubts.promises
        resolves = commit.resolves if known else ""
        note(self.doubts, replace(commit, decides=None, forgets="", resolves=resolves))

    def sealed_until(self, covered_seq: int, last_commit: int) -> int:
        """Return an instant before every commit after `covered_seq`. The caller holds the lock.

        `last_commit` is the latest of those up to `covered_seq`, but is not before all others: a
        commit over several shards may take effect earlier than what was committed before it.
        """
        self._late = [(seq, at) for seq, at in self._late if seq > covered_seq]
        return min([last_commit, *(at - 1 for _, at in self._late)])

    def replace_tail(self, sealed: int) -> None:
        """Forget the first `sealed` rows of the tail. The caller holds the lock."""
        del self.tail_rows[:sealed]
        rest = self.tail.block.rows[sealed:]
        self.tail = Tail(self._config.space.dimensions)
        self.tail.append(rest)
        texts = [stored.row.content for stored in self.tail_rows]
        self._word_tail = WordTail(self.analyzer, texts)

    def relayout(self) -> None:
        """Lay out positions anew after segments or the tail changed. The caller holds the lock."""
        dimensions = self._config.space.dimensions
        self._starts = [0]
        for segment in self.segments:
            self._starts.append(self._starts[-1] + segment.info.rows)
        blocks = [segment.block for segment in self.segments if segment.block is not None]
        self._vectors = Vectors(dimensions, [*blocks, self.tail.block])
        words = [segment.words for segment in self.segments if segment.words is not None]
        self._words = Words([*words, self._word_tail.block])
        self._counted = None
        assert len(self._vectors) == len(self.rows) == self._starts[-1] + len(self.tail_rows)

    @property
    def vectors(self) -> Vectors:
        """All raw vectors by position."""
        return self._vectors

    def search(self, queries: Sequence[Query], stamp: Stamp) -> list[Answer | MindgridError]:
        """See `SemanticShard.search`; raises what keeps the shard from being read."""
        with self.lock:
            instant = self._read_instant(stamp)
        answers: list[Answer | MindgridError | None] = [None] * len(queries)
        for _ in range(_ATTEMPTS_MAX):
            open_ = [at for at, answer in enumerate(answers) if answer is None]
            if not open_:
                break
            found = self._search([queries[at] for at in open_], instant)
            for at, answer in zip(open_, found, strict=True):
                answers[at] = answer
        lost = Unavailable("shard", "its records were deleted faster than they could be read")
        return [lost if answer is None else answer for answer in answers]

    def _search(
        self, queries: Sequence[Query], instant: Instant
    ) -> list[Answer | MindgridError | None]:
        with self.lock:
            view = _View(
                self._vectors,
                self.index,
                self.indexed,
                self.rows.ids.view(),
                self.rows.numbers.view(),
                self._words,
            )
            targets = self._targets(queries, instant)
        answers: list[Answer | MindgridError | None] = [
            target if isinstance(target, InvalidRequest) else None for target in targets
        ]
        asked = [(at, t) for at, t in enumerate(targets) if isinstance(t, _Target)]
        ranked = self._rank(view, [target for _, target in asked])
        with self.lock:
            located = self._find(ranked, [target for _, target in asked])
        for (at, target), result, places in zip(asked, ranked, located, strict=True):
            answers[at] = _answer(target.query.want, result, places, instant)
        return answers

    def get(
        self, ids: Sequence[str], selection: Selection, want: Want, stamp: Stamp
    ) -> Found | MindgridError:
        """See `SemanticShard.get`."""
        with self.lock:
            instant = self._read_instant(stamp)
            try:
                known_at, as_of = self._instants(selection, instant)
            except InvalidRequest as error:
                return error
            newest = [self.rows.newest_known(id, known_at) for id in ids]
            held = np.array([at for at in newest if at is not None], np.int64)
            shown = held[self.rows.shown(held, selection, known_at, as_of)]
            located = self._locate(shown, known_at)
        records = dict(zip(shown.tolist(), _records(located, want), strict=True))
        return Found(tuple(None if at is None else records.get(at) for at in newest), instant)

    def scan(self, scan: Scan, stamp: Stamp) -> Scanned | MindgridError:
        """See `SemanticShard.scan`."""
        with self.lock:
            instant = self._read_instant(stamp)
            try:
                known_at, as_of = self._instants(scan.selection, instant)
            except InvalidRequest as error:
                return error
            allowed = self.rows.allowed(scan.selection, known_at, as_of)
            located: list[_Located] = []
            more = False
            if scan.limit:
                places, more = self.rows.page(allowed, known_at, scan.after, scan.limit)
                located = self._locate(places, known_at)
        records = tuple(_records(located, scan.want))
        return Scanned(records, more, len(allowed), instant)

    def _read_instant(self, stamp: Stamp) -> Instant:
        """Return the instant of a read and keep later commits behind it; raises InDoubt.

        It is fixed when the read arrives, not after the wait: a commit that ends meanwhile is a
        later one (see `cluster.instants` for what tears otherwise).
        """
        newest = max(stamp.at, self.rows.last_commit, self.doubts.latest)
        instant = stamp.at if stamp.exactly else Instant(newest)
        self.floor = Instant(max(self.floor, instant))

        # A commit on its way to the disk already has its time. A read at a later instant would
        # miss it, and the next read at the same instant would not; so it waits for that one group.
        def behind() -> bool:
            return self.in_flight is None or instant < self.in_flight

        if not self.lock.wait_for(behind, READ_WAIT_S):
            raise Unavailable("shard", f"its disk has not synced a commit for {READ_WAIT_S:g} s")
        if self.failure is not None:
            raise self.failure
        # A promise that is made after this moment proposes a later time.
        if self.doubts.concern(instant):
            raise InDoubt("shard", instant)
        return instant

    def _instants(self, selection: Selection, instant: Instant) -> tuple[Instant, Instant]:
        known_at, as_of = instants(selection, instant)
        if known_at > instant:
            raise InvalidRequest("known_at", "lies in the future of the store")
        if known_at < self.history_floor:
            problem = f"lies before {spelled(self.history_floor)}, how far the history reaches back"
            raise InvalidRequest("known_at", problem)
        return known_at, as_of

    def _targets(
        self, queries: Sequence[Query], instant: Instant
    ) -> list[_Target | InvalidRequest]:
        targets: list[_Target | InvalidRequest] = []
        seen: list[tuple[Selection, Instant, Positions]] = []
        for query in queries:
            same = next((one for one in seen if one[0] == query.selection), None)
            if same is None:
                try:
                    known_at, as_of = self._instants(query.selection, instant)
                except InvalidRequest as error:
                    targets.append(error)
                    continue
                allowed = self.rows.allowed(query.selection, known_at, as_of)
                same = query.selection, known_at, allowed
                seen.append(same)
            _, known_at, allowed = same
            counts = query.mode is Mode.SPARSE and query.stats is None
            counted = self._count_at(known_at) if counts else None
            targets.append(_Target(query, known_at, allowed, counted))
        return targets

    def _count_at(self, known_at: Instant) -> _Counted:
        now = known_at >= self.rows.last_commit
        if now and self._counted is not None and self._counted[0] == self.last_seq:
            return self._counted[1]
        mask = self.rows.known(known_at)
        # Where no row was ever replaced there is nothing to look up.
        counted = _Counted(self._words, None if mask.all() else mask)
        if now:
            self._counted = self.last_seq, counted
        return counted

    def _rank(self, view: _View, targets: Sequence[_Target]) -> list[_Ranked]:
        """Return the best rows for each query."""
        found: list[_Ranked | _Shortlist] = [_NOTHING] * len(targets)
        for group in _grouped(targets):
            asked = [targets[at] for at in group]
            for at, one in zip(group, self._shortlist(view, asked), strict=True):
                found[at] = one
        # All that is left to compare, of all queries, goes in one pass.
        short = {at: one for at, one in enumerate(found) if isinstance(one, _Shortlist)}
        if short:
            vectors = _vectors([targets[at] for at in short])
            ks = [targets[at].query.top_k for at in short]
            best_of = view.vectors.best_of(vectors, ks, [one.positions for one in short.values()])
            for (at, one), k, scored in zip(short.items(), ks, best_of, strict=True):
                found[at] = _top(view, scored, k, one.exact, one.scanned)
        return [one for one in found if isinstance(one, _Ranked)]

    def _shortlist(self, view: _View, targets: Sequence[_Target]) -> Sequence[_Ranked | _Shortlist]:
        """Return the best rows, or which may be, for queries that `_grouped` put together."""
        query, allowed = targets[0].query, targets[0].allowed
        if query.mode is Mode.SPARSE:
            return [self._rank_by_words(view, target) for target in targets]
        if len(allowed) == 0:
            return [_NOTHING] * len(targets)
        split = int(np.searchsorted(allowed, view.indexed))
        if query.exact or view.index is None or split <= self._config.exact_rows_max:
            self.counters["exact"] += len(targets)
            if _is_apart(len(allowed), len(targets)):
                return [_Shortlist(allowed, exact=True, scanned=len(allowed))] * len(targets)
            scored = view.vectors.exact(_vectors(targets), query.top_k, _all_or(allowed, view))
            return [_top(view, one, query.top_k, True, len(allowed)) for one in scored]
        return self._shortlist_by_index(view, view.index, targets, split)

    def _rank_by_words(self, view: _View, target: _Target) -> _Ranked:
        query, allowed = target.query, target.allowed
        terms = self.analyzer.query(query.text)
        stats = target.counted.stats(terms) if target.counted is not None else query.stats
        assert stats is not None
        if query.top_k == 0 or len(allowed) == 0:
            scanned = len(allowed) if query.top_k else 0
            return dataclasses.replace(_NOTHING, scanned=scanned, stats=stats)
        self.counters["words"] += 1
        scored = view.words.search(terms, stats, _all_or(allowed, view), query.top_k)
        return _top(view, scored, query.top_k, True, len(allowed))

    def _shortlist_by_index(
        self, view: _View, index: IvfIndex, targets: Sequence[_Target], split: int
    ) -> list[_Ranked | _Shortlist]:
        vectors = _vectors(targets)
        top_k, allowed = targets[0].query.top_k, targets[0].allowed
        bitmap = self._bitmap_of(index, allowed, split, view.indexed)
        fresh = allowed[split:]
        fresh_best: Sequence[Positions] = [fresh] * len(vectors)
        if len(fresh):
            self.counters["fresh"] += len(vectors)
        if not _is_apart(len(fresh), len(vectors)):
            # Of many rows only the best go on to be compared once more with the candidates.
            found = view.vectors.exact(vectors, top_k, fresh)
            fresh_best = [np.sort(scored.positions) for scored in found]
        near = index.search(vectors, top_k, bitmap)
        shortlists: list[_Ranked | _Shortlist] = []
        for vector, candidates, extra in zip(vectors, near, fresh_best, strict=True):
            if len(candidates.positions) < min(top_k, split):
                self.counters["fallback"] += 1
                scored = view.vectors.exact(vector[None, :], top_k, _all_or(allowed, view))[0]
                shortlists.append(_top(view, scored, top_k, True, len(allowed)))
                continue
            self.counters["ivf"] += 1
            positions = np.concatenate([candidates.positions, extra])
            scanned = candidates.scanned + len(fresh)
            shortlists.append(_Shortlist(positions, exact=False, scanned=scanned))
        return shortlists

    def _bitmap_of(
        self, index: IvfIndex, allowed: Positions, split: int, indexed: int
    ) -> Bitmap | None:
        """Return the indexed part of `allowed` as a bitmap, None where it is everything."""
        if split == indexed:
            return None
        cached = self._bitmap
        if cached is not None and cached[0] is allowed and cached[1] is index:
            return cached[2]
        mask = np.zeros(indexed, dtype=np.bool_)
        mask[allowed[:split]] = True
        bitmap = Bitmap.of(mask)
        self._bitmap = (allowed, index, bitmap)
        return bitmap

    def _find(
        self, ranked: Sequence[_Ranked], targets: Sequence[_Target]
    ) -> list[list[_Located] | None]:
        """Return where the values of each query's rows are, none if only ids are wanted.

        None if one of its rows was erased. The caller holds the lock.
        """
        if not ranked:
            return []
        numbers = [result.numbers for result in ranked]
        found = parted(self.rows.places(np.concatenate(numbers)), numbers)
        located: list[list[_Located] | None] = [[] for _ in ranked]
        at_once: dict[Instant, list[int]] = {}
        for at, (target, positions) in enumerate(zip(targets, found, strict=True)):
            if positions.min(initial=0) < 0:
                located[at] = None
            elif target.query.want:
                at_once.setdefault(target.known_at, []).append(at)
        for known_at, queries in at_once.items():
            rows = iter(self._locate(np.concatenate([found[at] for at in queries]), known_at))
            for at in queries:
                located[at] = list(itertools.islice(rows, len(found[at])))
        return located

    def _locate(self, positions: Positions, known_at: Instant) -> list[_Located]:
        """Return where these rows' values are. The caller holds the lock."""
        lives = self.rows.lifecycles(positions, known_at)
        ids = self.rows.ids.view()[positions].tolist()
        return [
            _Located(id, life, *self._source(position))
            for position, id, life in zip(positions.tolist(), ids, lives, strict=True)
        ]

    def _source(self, position: int) -> tuple[Block, int, Segment | RowWrite]:
        sealed = self._starts[-1]
        if position >= sealed:
            offset = position - sealed
            return self.tail.block, offset, self.tail_rows[offset].row
        at = bisect_right(self._starts, position) - 1
        segment = self.segments[at]
        assert segment.block is not None
        return segment.block, position - self._starts[at], segment


def _answer(
    want: Want, ranked: _Ranked, located: list[_Located] | None, instant: Instant
) -> Answer | None:
    if located is None:
        return None
    records: Sequence[Record | None] = [None] * len(ranked.ids)
    if want:
        records = _records(located, want)
    hits = tuple(map(Hit, ranked.ids, ranked.scores.tolist(), records))
    return Answer(hits, instant, ranked.exact, ranked.scanned, ranked.stats)


def _records(located: Sequence[_Located], want: Want) -> list[Record]:
    payloads = _payloads(located) if want & Want.PAYLOAD else [b""] * len(located)
    with_vector = bool(want & Want.VECTOR)
    with_values = bool(want & Want.VALUES)
    records: list[Record] = []
    for place, payload in zip(located, payloads, strict=True):
        source, life = place.source, place.life
        values: RowWrite | Values = _NO_VALUES
        if with_values:
            values = source if isinstance(source, RowWrite) else source.values(place.offset)
        records.append(
            Record(
                id=place.id,
                content=values.content,
                vector=place.block.rows[place.offset].copy() if with_vector else NO_VECTOR,
                payload=payload,
                metadata=values.metadata,
                created_at=Instant(life.created_at),
                valid_from=Instant(life.valid_from),
                valid_to=unbound(life.valid_to),
                deleted_at=unbound(life.deleted_at),
                supersedes=tuple(values.supersedes),
                source=values.source,
                version=life.version,
            )
        )
    return records


def _payloads(located: Sequence[_Located]) -> list[bytes]:
    payloads = [b""] * len(located)
    by_segment: dict[int, tuple[Segment, list[int]]] = {}
    for out, place in enumerate(located):
        if isinstance(place.source, RowWrite):
            payloads[out] = place.source.payload
        else:
            by_segment.setdefault(id(place.source), (place.source, []))[1].append(out)
    for segment, outs in by_segment.values():
        taken = segment.payloads([located[out].offset for out in outs])
        for out, payload in zip(outs, taken, strict=True):
            payloads[out] = payload
    return payloads


def _grouped(targets: Sequence[_Target]) -> list[list[int]]:
    """Return the places of the targets in groups that are ranked alike."""
    groups: dict[tuple[int, int, bool, Mode], list[int]] = {}
    for at, target in enumerate(targets):
        query = target.query
        key = (id(target.allowed), query.top_k, query.exact, query.mode)
        groups.setdefault(key, []).append(at)
    return list(groups.values())


def _vectors(targets: Sequence[_Target]) -> NDArray[np.float32]:
    return np.stack([target.query.vector for target in targets])


def _is_apart(rows: int, queries: int) -> bool:
    return rows <= _FEW_ROWS or (rows <= _APART_ROWS and queries <= _APART_QUERIES)


def _all_or(allowed: Positions, view: _View) -> Positions | None:
    return None if len(allowed) == len(view.vectors) else allowed


def _top(view: _View, scored: Scored, top_k: int, exact: bool, scanned: int) -> _Ranked:
    scored = cut(scored, top_k)  # Of a hundred candidates only the best need their ids.
    ids = view.ids[scored.positions].tolist()
    order = best(scored.scores, ids, top_k)
    positions = scored.positions[order]
    named = [ids[at] for at in order.tolist()]
    return _Ranked(view.numbers[positions], named, scored.scores[order], exact, scanned)
