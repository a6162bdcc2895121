"""The cosine and the BM25 that every answer's score comes from, and the one order of answers.

Two paths may show the same record's score only if they show the same bytes, so the obvious
`rows @ query` will not do: BLAS picks its kernel, and with it the order of the sum, by the number
of rows, the alignment, the threads and the machine. Here each step has one result:

- a product of two float32 values is exact in float64 (24 + 24 bits fit into 53), and no product or
  sum of squares leaves float64's range, for float32's largest value as for its smallest denormal;
- `np.add.reduce` along the contiguous axis of a fresh float64 array is NumPy's pairwise sum, whose
  order depends on the length of the row alone (plain additions in C, eight accumulators, the same
  on every machine);
- what remains (product, root, quotient, rounding) is correctly rounded by IEEE 754.

BM25 is plainer: each step is correctly rounded by itself, and a row adds the parts of its terms
one after the other. Only the logarithm is the C library's, the same in every process of one build.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

K1, B = 1.2, 0.75

_CHUNK_VALUES = 12_288
"""Two float64 buffers of this size stay in the second-level cache: twice as fast as at once."""


def cosine(
    rows: NDArray[np.float32],
    query: NDArray[np.float32],
    squares: NDArray[np.float64] | None = None,
    owners: NDArray[np.int64] | None = None,
) -> NDArray[np.float32]:
    """Return the cosine of each row with the query: (n,) float32 in [-1, 1].

    `rows` is (n, d), `query` (d,), of any strides, RAM or mapped; values must be finite. The result
    for a row depends on that row and the query alone, to the byte. A row equal to the query, or a
    power of two times it, scores exactly 1. A row or query of zeros scores 0.

    `squares` is what `squares(rows)` returns, for callers that keep it: it saves half of the work
    and changes nothing. With `owners`, (n,), `query` is (m, d), and row i meets query owners[i].
    """
    assert rows.dtype == np.float32
    assert query.dtype == np.float32
    n, d = rows.shape
    wide = np.ascontiguousarray(query, np.float64).reshape(-1, d)
    assert (query.shape == (d,)) if owners is None else (owners.shape == (n,))
    own = _row_sums(wide * wide)
    dots = np.empty(n, np.float64)
    known = np.empty(n, np.float64) if squares is None else squares
    assert known.shape == (n,)
    step = max(1, _CHUNK_VALUES // max(1, d))
    values = np.empty((min(step, n), d), np.float64)
    products = np.empty_like(values)
    for start in range(0, n, step):
        stop = min(start + step, n)
        value, product = values[: stop - start], products[: stop - start]
        value[...] = rows[start:stop]
        met = wide if owners is None else wide[owners[start:stop]]
        dots[start:stop] = _row_sums(np.multiply(value, met, out=product))
        if squares is None:
            known[start:stop] = _row_sums(np.multiply(value, value, out=product))
    # The root of the product, not the product of the roots: sqrt(x * x) is exactly x, so a row
    # scores exactly 1 with itself.
    length = np.sqrt(known * (own if owners is None else own[owners]))
    length[length == 0.0] = 1.0
    dots /= length
    np.minimum(dots, 1.0, out=dots)
    np.maximum(dots, -1.0, out=dots)
    dots += 0.0  # -0.0 becomes 0.0
    return dots.astype(np.float32)


def squares(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return each row's sum of squares, (n,) float64, as `cosine` computes it for (n, d) rows."""
    assert rows.dtype == np.float32
    n, d = rows.shape
    sums = np.empty(n, np.float64)
    step = max(1, _CHUNK_VALUES // max(1, d))
    values = np.empty((min(step, n), d), np.float64)
    for start in range(0, n, step):
        stop = min(start + step, n)
        value = values[: stop - start]
        value[...] = rows[start:stop]
        sums[start:stop] = _row_sums(np.multiply(value, value, out=value))
    return sums


@dataclass(frozen=True, slots=True)
class WordStats:
    """What BM25 knows of a collection: `+` makes those of two shards into those of both.

    `rows` with `length` terms altogether, and how many of them hold each distinct term of the
    query, in the order in which the query names them first.
    """

    rows: int
    length: int
    frequencies: tuple[int, ...]

    def __add__(self, other: WordStats) -> WordStats:
        pairs = zip(self.frequencies, other.frequencies, strict=True)
        return WordStats(
            self.rows + other.rows, self.length + other.length, tuple(a + b for a, b in pairs)
        )

    @property
    def mean_length(self) -> float:
        """The mean length; 1 where there is no row or no word to take one of."""
        return self.length / self.rows if self.length else 1.0

    def weights(self, terms: Sequence[str]) -> dict[str, float]:
        """Return the weight of each distinct term, in order of first occurrence.

        That is how often the query has it, times ln(1 + (N - df + 0.5) / (df + 0.5)): the form
        that never becomes negative (Lucene's).
        """
        counted = Counter(terms)
        assert len(counted) == len(self.frequencies)
        return {
            term: times * math.log(1.0 + (self.rows - df + 0.5) / (df + 0.5))
            for (term, times), df in zip(counted.items(), self.frequencies, strict=True)
        }


def bm25(
    counts: NDArray[np.integer],
    lengths: NDArray[np.int32],
    weights: NDArray[np.float64],
    mean_length: float,
) -> NDArray[np.float64]:
    """Return what each posting adds to the score of its row: (n,) float64, all above 0.

    A posting is a term's `counts` occurrences in a row of `lengths` terms; all are (n,). A row's
    score is 0.0 plus the parts of its terms in order of first occurrence in the query, then rounded
    to float32: so it depends on that row, the query and the statistics alone, to the byte.

    tf * (k1 + 1) / (tf + k1 * (1 - b + b * dl / avgdl)): Robertson and Zaragoza, The Probabilistic
    Relevance Framework: BM25 and Beyond (2009), 3.4.
    """
    saturation = lengths / mean_length
    saturation *= B
    saturation += 1.0 - B
    saturation *= K1
    saturation += counts
    parts = weights * counts
    parts *= K1 + 1.0
    parts /= saturation
    return parts


def best(scores: NDArray[np.float32], ids: Sequence[str], k: int) -> NDArray[np.int64]:
    """Return the positions of the k best, best first: (min(k, n),) int64.

    Order is score descending, then id ascending by code point. `ids` is aligned with `scores` and
    read only where a score reaches the k-th; equal ids keep the order of their positions.
    """
    assert k >= 0
    n = len(scores)
    assert len(ids) == n
    if k == 0 or n == 0:
        return np.empty(0, np.int64)
    if k < n:
        # Every tie of the k-th competes; argpartition alone would cut them by position.
        floor = np.partition(scores, n - k)[n - k]
        rivals = np.flatnonzero(scores >= floor)
    else:
        rivals = np.arange(n)
    order = rivals[np.argsort(-scores[rivals], kind="stable")]
    ordered = scores[order]
    ends = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1, len(order))
    starts = np.append(0, ends[:-1])
    tied = ends - starts > 1
    # Python compares ids by code point, and only where scores are equal.
    for low, high in zip(starts[tied].tolist(), ends[tied].tolist(), strict=True):
        order[low:high] = sorted(order[low:high].tolist(), key=ids.__getitem__)
    return order[:k]


def _row_sums(products: NDArray[np.float64]) -> NDArray[np.float64]:
    # Pairwise only along the axis that is contiguous; along another one NumPy adds row by row.
    assert products.flags.c_contiguous
    sums: NDArray[np.float64] = np.add.reduce(products, axis=1)
    return sums
