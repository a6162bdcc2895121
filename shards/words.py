"""Search by words: BM25 over blocks of postings laid end to end, the last one a growing tail.

A position is a row's place in the concatenation of all blocks. What a row scores depends on that
row, the query and the statistics that the caller hands in, so it has the same bytes in whatever
block, shard or batch the row lies (`scores.bm25`).
"""

from __future__ import annotations

import itertools
import threading
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mindgrid.shards import scores
from mindgrid.shards.analysis import Analyzer
from mindgrid.shards.postings import Counts, Rows
from mindgrid.shards.scores import WordStats
from mindgrid.shards.vectors import Positions, Scored, cut

Mask = NDArray[np.bool_]
Integer = TypeVar("Integer", bound=np.integer)

_TERMS_KEPT = 1_024
_DENSE_SHARE = 32
"""From one posting for so many rows on, a sum for every row is cheaper than sorting postings."""
_FEW_SHARE = 8
"""So much fewer allowed rows than postings are looked up among these; else all are scored."""


class Postings(Protocol):
    """A run of rows by term: a `WordBlock`, or the part of a tail that a reader saw."""

    @property
    def lengths(self) -> Rows:
        """The length of each row."""

    def __len__(self) -> int: ...

    def postings(self, term: str) -> tuple[Rows, Counts]:
        """See `WordBlock.postings`."""


class WordTail:
    """Rows in RAM that grow at the end. One writer; any number of readers holding `block`.

    Texts are analysed when somebody first looks: so a commit costs next to nothing, and yet the
    next search sees it. Where nobody looks for words, a seal analyses all at once, for less.
    """

    def __init__(self, analyzer: Analyzer, texts: Sequence[str] = ()) -> None:
        self._analyzer = analyzer
        self._texts: list[str] = []
        self._lock = threading.Lock()
        self._lengths = array("i")
        self._postings: dict[str, array[int]] = {}
        """By term: row, count, row, count, …"""
        self.append(texts)

    @property
    def block(self) -> TailBlock:
        """The rows appended so far; later ones do not show in it."""
        return TailBlock(self, len(self._texts))

    def append(self, texts: Sequence[str]) -> None:
        """Add rows; visible in `block` when this returns."""
        self._texts += texts

    def lengths(self, rows: int) -> Rows:
        """Return the lengths of the first `rows` rows."""
        with self._lock:
            self._analyse(rows)
            return np.frombuffer(self._lengths[:rows], np.int32)

    def postings(self, term: str, rows: int) -> tuple[Rows, Counts]:
        """Return the postings of `term` among the first `rows` rows."""
        with self._lock:
            self._analyse(rows)
            # A copy, since an array that is looked into cannot grow.
            pairs = np.frombuffer(self._postings.get(term, array("i"))[:], np.int32)
        held, counts = pairs[::2], pairs[1::2].view(np.uint32)
        visible = int(np.searchsorted(held, rows))
        return held[:visible], counts[:visible]

    def _analyse(self, rows: int) -> None:
        for row in range(len(self._lengths), rows):
            document = self._analyzer.document(self._texts[row])
            for term, count in Counter(document.terms).items():
                pairs = self._postings.get(term)
                if pairs is None:
                    pairs = self._postings[term] = array("i")
                pairs.extend((row, count))
            self._lengths.append(document.length)
            self._texts[row] = ""


class TailBlock:
    """The rows of a tail when somebody looked."""

    def __init__(self, tail: WordTail, rows: int) -> None:
        self._tail = tail
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    @property
    def lengths(self) -> Rows:
        """The length of each row."""
        return self._tail.lengths(self._rows)

    def postings(self, term: str) -> tuple[Rows, Counts]:
        """See `WordBlock.postings`."""
        return self._tail.postings(term, self._rows)


class Words:
    """An immutable view of the words of all rows: blocks laid end to end."""

    def __init__(self, blocks: Sequence[Postings]) -> None:
        self.blocks = tuple(block for block in blocks if len(block))
        # starts[i] is the first position of block i; the last entry is the number of rows.
        self.starts = [0, *itertools.accumulate(len(block) for block in self.blocks)]
        self._found: dict[str, tuple[tuple[Rows, Counts], ...]] = {}

    def __len__(self) -> int:
        return self.starts[-1]

    def totals(self, counted: Mask | None = None) -> tuple[int, int]:
        """Return how many rows count and their length in all; `counted` as in `stats`.

        It reads the length of every row: whoever asks often keeps it until a row changes.
        """
        rows, length = 0, 0
        for block, mask in self._masks(counted):
            lengths = block.lengths if mask is None else block.lengths[mask]
            rows += len(lengths)
            length += int(lengths.sum(dtype=np.int64))
        return rows, length

    def stats(
        self, terms: Sequence[str], counted: Mask | None, totals: tuple[int, int]
    ) -> WordStats:
        """Return the statistics of a query's terms, as `Analyzer.query` gives them.

        `counted` says by position which rows count, (len,) bool, None for all; `totals` is what
        `totals(counted)` returned.
        """
        frequencies = dict.fromkeys(terms, 0)
        masks = [mask for _, mask in self._masks(counted)]
        for term in frequencies:
            for (rows, _), mask in zip(self._postings(term), masks, strict=True):
                held = len(rows) if mask is None else int(np.count_nonzero(mask.take(rows)))
                frequencies[term] += held
        return WordStats(*totals, tuple(frequencies.values()))

    def search(
        self, terms: Sequence[str], stats: WordStats, allowed: Positions | None, k: int
    ) -> Scored:
        """Return the k best rows that share a term, and all that tie with the k-th, in no order.

        `stats` are those of the whole collection for these terms; `allowed` are sorted positions
        without repeats, None for all rows. The scores are final, so `scores.best` with the ids of
        these positions gives the answer.
        """
        assert k > 0
        weights = stats.weights(terms)
        parts = list(self._parts(weights, allowed))
        if not parts:
            return Scored(np.empty(0, np.int64), np.empty(0, np.float32))
        positions = np.concatenate([part.positions for part in parts])
        added = scores.bm25(
            np.concatenate([part.counts for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.repeat([part.weight for part in parts], [len(part.counts) for part in parts]),
            stats.mean_length,
        )
        scored = _sums(positions, added, len(self))
        return cut(scored, k) if allowed is None else _best(scored, allowed, k, len(self))

    def _parts(self, weights: dict[str, float], allowed: Positions | None) -> Iterator[_Part]:
        """Yield the postings of each term and block, at the least those of the allowed rows.

        Those of one row come in the order of `weights`.
        """
        found = {term: self._postings(term) for term in weights}
        for block, start, some in self._blocks(allowed):
            lengths = self.blocks[block].lengths
            for term, weight in weights.items():
                rows, counts = found[term][block]
                if some is not None and len(some) * _FEW_SHARE < len(rows):
                    # As int32, or `searchsorted` would first make int64 of all the postings.
                    few = (some - start).astype(np.int32)
                    at, there = _look_up(few, rows)
                    rows, counts = few[there], counts[at[there]]
                if len(rows):
                    yield _Part(rows + np.int64(start), counts, lengths.take(rows), weight)

    def _postings(self, term: str) -> tuple[tuple[Rows, Counts], ...]:
        """Return the postings of a term in each block; what was looked up last is kept.

        The statistics need them as well as the ranking, and the next query often too.
        """
        found = self._found.get(term)
        if found is None:
            if len(self._found) >= _TERMS_KEPT:
                self._found.clear()
            found = self._found[term] = tuple(block.postings(term) for block in self.blocks)
        return found

    def _blocks(self, allowed: Positions | None) -> Iterator[tuple[int, int, Positions | None]]:
        """Yield the places of blocks that have allowed rows, their starts, and those positions."""
        if allowed is None:
            for i in range(len(self.blocks)):
                yield i, self.starts[i], None
            return
        bounds = np.searchsorted(allowed, self.starts).tolist()
        for i, (low, high) in enumerate(itertools.pairwise(bounds)):
            if low < high:
                yield i, self.starts[i], allowed[low:high]

    def _masks(self, counted: Mask | None) -> Iterator[tuple[Postings, Mask | None]]:
        assert counted is None or counted.shape == (len(self),)
        for block, (low, high) in zip(self.blocks, itertools.pairwise(self.starts), strict=True):
            yield block, None if counted is None else counted[low:high]


@dataclass(frozen=True, slots=True)
class _Part:
    """Postings of one term in one block, and its weight."""

    positions: Positions
    counts: Counts
    lengths: Rows
    weight: float


def _sums(positions: Positions, added: NDArray[np.float64], size: int) -> Scored:
    """Return the score of each distinct position: all that is added to it, in the order given.

    `bincount` adds up in the order of its input, so both ways give the same bytes.
    """
    if len(positions) * _DENSE_SHARE < size:
        # Stable sorting merges runs that ascend already, as each term's; `np.unique` does not.
        order = np.argsort(positions, kind="stable")
        ordered = positions[order]
        first = np.diff(ordered, prepend=-1) > 0
        found, sums = ordered[first], np.bincount(np.cumsum(first) - 1, added[order])
    else:
        every = np.bincount(positions, added, size)
        # No part is 0. Of floats themselves `flatnonzero` takes ten times as long.
        found = np.flatnonzero(every > 0.0)
        sums = every[found]
    return Scored(found, sums.astype(np.float32))


def _best(scored: Scored, allowed: Positions, k: int, size: int) -> Scored:
    """Return the k best of the allowed rows and all that tie with the k-th.

    Most rows are looked up in vain, so only as many of the best as should do, then four times as
    many. Each time all that tie with the last are among them, hence none better is left out.
    """
    most = 2 * k * size // len(allowed)
    while True:
        top = cut(scored, most)
        _, there = _look_up(top.positions, allowed)
        passed = Scored(top.positions[there], top.scores[there])
        if len(passed.positions) >= k or len(top.positions) == len(scored.positions):
            return cut(passed, k)
        most *= 4


def _look_up(
    wanted: NDArray[Integer], held: NDArray[Integer]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return where in `held` each wanted value would be, and whether it is there; both ascend."""
    at = np.searchsorted(held, wanted)
    at[at == len(held)] = 0
    return at, held[at] == wanted
