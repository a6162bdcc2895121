"""Raw vectors by position, in memory-mapped files and a growing tail, and exact search over them.

A position is a row's place in the concatenation of all blocks. Exact search compares in float32
and leaves the verdict to `scores.cosine`: a row is ruled out only if float32 cannot have been
wrong about it (`_slack`), and all rows that the k-th best ties with stay in.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import faiss
import numpy as np
from numpy.typing import NDArray

from mindgrid.shards import scores
from mindgrid.shards.errors import Corruption

Positions = NDArray[np.int64]
Rows = NDArray[np.float32]
Number = TypeVar("Number", bound=np.generic)

VECTORS_FILE = "vectors.f32"
SQUARES_FILE = "squares.f64"

_NORM_MIN, _NORM_MAX = 2.0**-100, 2.0**100
"""Between these, float32 products with a unit query neither overflow nor lose bits that count."""
_CHUNK_ROWS = 16_384
_GEMM_QUERIES_MIN = 4
"""From so many queries on, one matrix product is cheaper than a pass over the rows for each."""
_GEMM_ROWS = 512


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that never change, with what is kept of each in RAM.

    `rows` (n, d) float32, C order, RAM or mapped; `squares` (n,) float64 as `scores.squares` gives
    them; `inverse` (n,) float32, one over the norm, and 0 for the rows listed in `strange`, whose
    norm float32 cannot work with: exact search always rescores those.
    """

    rows: Rows
    squares: NDArray[np.float64]
    inverse: NDArray[np.float32]
    strange: Positions

    @classmethod
    def of(cls, rows: Rows, squares: NDArray[np.float64] | None = None) -> Block:
        """Return the block of these rows, which must not change any more."""
        assert rows.dtype == np.float32
        assert rows.ndim == 2
        assert rows.flags.c_contiguous
        if squares is None:
            squares = scores.squares(rows)
        inverse, strange = _inverse_norms(squares)
        return cls(rows, squares, inverse, strange)


@dataclass(frozen=True, slots=True)
class Scored:
    """Rows with their final scores: `positions` (m,) int64, `scores` (m,) float32, aligned."""

    positions: Positions
    scores: NDArray[np.float32]


class Tail:
    """Rows in RAM that grow at the end. One writer; any number of readers holding `block`.

    A reader's block stays as it was: rows are written behind its end, and growing copies into a
    new array, never under a reader.
    """

    def __init__(self, dimensions: int, capacity: int = 1024) -> None:
        assert capacity > 0
        self._rows = np.empty((capacity, dimensions), np.float32)
        self._squares = np.empty(capacity, np.float64)
        self._inverse = np.empty(capacity, np.float32)
        self._strange = np.empty(0, np.int64)
        self._block = self._view(0)

    @property
    def block(self) -> Block:
        """The rows appended so far."""
        return self._block

    def __len__(self) -> int:
        return len(self._block.rows)

    def append(self, rows: Rows) -> None:
        """Add (n, d) float32 rows; visible in `block` when this returns."""
        start = len(self)
        stop = start + len(rows)
        if stop > len(self._rows):
            self._grow(max(stop, 2 * len(self._rows)), start)
        self._rows[start:stop] = rows
        squares = scores.squares(self._rows[start:stop])
        inverse, strange = _inverse_norms(squares)
        self._squares[start:stop] = squares
        self._inverse[start:stop] = inverse
        if strange.size:
            self._strange = np.concatenate([self._strange, strange + start])
        # One assignment, so that a reader sees all of it or nothing.
        self._block = self._view(stop)

    def _grow(self, capacity: int, n: int) -> None:
        rows = np.empty((capacity, self._rows.shape[1]), np.float32)
        squares, inverse = np.empty(capacity, np.float64), np.empty(capacity, np.float32)
        rows[:n], squares[:n], inverse[:n] = self._rows[:n], self._squares[:n], self._inverse[:n]
        self._rows, self._squares, self._inverse = rows, squares, inverse

    def _view(self, n: int) -> Block:
        return Block(self._rows[:n], self._squares[:n], self._inverse[:n], self._strange)


class Vectors:
    """An immutable view of all rows of one space: blocks laid end to end."""

    def __init__(self, dimensions: int, blocks: Sequence[Block]) -> None:
        self.dimensions = dimensions
        self.blocks = tuple(block for block in blocks if len(block.rows))
        assert all(block.rows.shape[1] == dimensions for block in self.blocks)
        # starts[i] is the first position of block i; the last entry is the number of rows.
        self.starts = np.cumsum([0, *(len(block.rows) for block in self.blocks)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def gather(self, positions: Positions) -> Rows:
        """Return a copy of the rows at these positions, in their order: (m, d) float32."""
        return self._fetch(positions)[0]

    def best_of(
        self, queries: Rows, ks: Sequence[int], listed: Sequence[Positions]
    ) -> list[Scored]:
        """Return for each query the k best of its own rows and all that tie with the k-th.

        As `exact`, for many queries with few rows each: query i compares `listed[i]`, sorted
        positions without repeats, and keeps `ks[i]`. What NumPy and FAISS cost a call is paid once
        for all of them: for 16 queries with 100 rows each a sixth of what they cost one by one.
        """
        half = len(listed) // 2
        if half and sum(map(len, listed)) > _CHUNK_ROWS:
            # In parts, so that memory stays bounded.
            first = self.best_of(queries[:half], ks[:half], listed[:half])
            return first + self.best_of(queries[half:], ks[half:], listed[half:])
        kept = list(listed)
        # Where every row is among the k best there is nothing to choose.
        crowded = [i for i, positions in enumerate(listed) if len(positions) > ks[i]]
        if crowded:
            close = self._pairs(units(queries[crowded]), [listed[i] for i in crowded])
            slack = _slack(self.dimensions)
            for i, row in zip(crowded, close, strict=True):
                floor = _floor(row[~np.isnan(row)], ks[i], slack)
                # What float32 cannot compare stays in.
                kept[i] = listed[i][~(row < floor)]
        positions, owners = _joined(kept)
        rows, squares = self._fetch(positions)
        final = parted(scores.cosine(rows, queries, squares, owners), kept)
        return [
            cut(Scored(positions, part), k)
            for positions, part, k in zip(kept, final, ks, strict=True)
        ]

    def exact(self, queries: Rows, k: int, allowed: Positions | None = None) -> list[Scored]:
        """Return for each query the k best rows and all that tie with the k-th, in no order.

        `queries` is (m, d) float32, each finite and not zero; `allowed` are sorted positions
        without repeats, None for all rows. The scores are final, so `scores.best` with the ids of
        these positions gives the answer.
        """
        assert k > 0
        products = _Products(units(queries))
        tops = [_Top(k, _slack(self.dimensions)) for _ in queries]
        strange = self._strange(allowed)
        n = len(self) if allowed is None else len(allowed)
        for low in range(0, n, _CHUNK_ROWS):
            high = min(low + _CHUNK_ROWS, n)
            positions = np.arange(low, high) if allowed is None else allowed[low:high]
            close = self._compare(positions, products, len(queries))
            if strange.size:
                usual = np.isin(positions, strange, assume_unique=True, invert=True)
                positions, close = positions[usual], close[:, usual]
            for top, row in zip(tops, close, strict=True):
                top.add(row, positions)
        kept = [np.sort(np.concatenate([top.positions(), strange])) for top in tops]
        # Each list is chosen already: all of it is scored, and only then cut.
        every = self.best_of(queries, [len(positions) for positions in kept], kept)
        return [cut(scored, k) for scored in every]

    def _pairs(self, units: Rows, listed: Sequence[Positions]) -> list[NDArray[np.float32]]:
        """Return the float32 cosines of each query with its own rows; NaN for strange rows."""
        positions, owners = _joined(listed)
        close = np.empty(len(positions), np.float32)
        blocks = np.searchsorted(self.starts, positions, side="right") - 1
        faiss.omp_set_num_threads(1)
        with np.errstate(all="ignore"):
            for i in np.flatnonzero(np.bincount(blocks)).tolist():
                block, here = self.blocks[i], np.flatnonzero(blocks == i)
                # Named, since `swig_ptr` does not keep what it points to.
                asking, local = owners[here], positions[here] - self.starts[i]
                products = np.empty(len(here), np.float32)
                faiss.pairwise_indexed_inner_product(  # type: ignore[attr-defined]
                    self.dimensions,
                    len(here),
                    faiss.swig_ptr(units),
                    faiss.swig_ptr(asking),
                    faiss.swig_ptr(block.rows),
                    faiss.swig_ptr(local),
                    faiss.swig_ptr(products),
                )
                inverse = block.inverse[local]
                products *= inverse
                if block.strange.size:
                    products[inverse == 0.0] = np.nan
                close[here] = products
        return parted(close, listed)

    def _strange(self, allowed: Positions | None) -> Positions:
        """Return the positions that float32 cannot compare and `allowed` has."""
        parts = [
            block.strange + start
            for block, start in zip(self.blocks, self.starts, strict=False)
            if block.strange.size
        ]
        if not parts:
            return np.empty(0, np.int64)
        strange = np.concatenate(parts)
        return strange if allowed is None else np.intersect1d(strange, allowed, assume_unique=True)

    def _compare(
        self, positions: Positions, products: _Products, queries: int
    ) -> NDArray[np.float32]:
        """Return float32 cosines (queries, rows) for sorted positions."""
        close = np.empty((queries, len(positions)), np.float32)
        inverse = np.empty(len(positions), np.float32)
        # Rows whose norm is out of range may overflow here; the caller takes them out.
        with np.errstate(all="ignore"):
            for i, low, high in self._spans(positions):
                block, local = self.blocks[i], positions[low:high] - self.starts[i]
                inverse[low:high] = block.inverse[local]
                if local[-1] - local[0] == len(local) - 1:
                    # Without gaps, as the rows behind an index are: nothing need be copied.
                    rows = block.rows[local[0] : local[-1] + 1]
                    products.fill(rows, None, close[:, low:high])
                else:
                    products.fill(block.rows, local, close[:, low:high])
            close *= inverse
        return close

    def _fetch(self, positions: Positions) -> tuple[Rows, NDArray[np.float64]]:
        assert positions.dtype == np.int64
        if len(self.blocks) == 1:
            return self.blocks[0].rows[positions], self.blocks[0].squares[positions]
        if (positions[1:] < positions[:-1]).any():
            order = np.argsort(positions, kind="stable")
            rows, squares = self._fetch(positions[order])
            back = np.argsort(order)
            return rows[back], squares[back]
        rows = np.empty((len(positions), self.dimensions), np.float32)
        squares = np.empty(len(positions), np.float64)
        for i, low, high in self._spans(positions):
            block, local = self.blocks[i], positions[low:high] - self.starts[i]
            # By "raise", its default, `take` would write into a copy of `out` first.
            block.rows.take(local, axis=0, out=rows[low:high], mode="clip")
            block.squares.take(local, out=squares[low:high], mode="clip")
        return rows, squares

    def _spans(self, ordered: Positions) -> Iterator[tuple[int, int, int]]:
        """Yield (block, low, high): ordered[low:high] lie in that block."""
        bounds = np.searchsorted(ordered, self.starts).tolist()
        for i, (low, high) in enumerate(itertools.pairwise(bounds)):
            if low < high:
                yield i, low, high


class _Top:
    """Every row that may still be among the k best of one query, while rows go by in pieces."""

    def __init__(self, k: int, slack: float) -> None:
        self._k = k
        self._slack = slack
        self._floor = np.float32(-np.inf)
        self._kept: list[tuple[NDArray[np.float32], Positions]] = []
        self._count = 0

    def add(self, close: NDArray[np.float32], positions: Positions) -> None:
        if self._count == 0:
            self._raise_floor(close)
        hits = np.flatnonzero(close >= self._floor)
        self._kept.append((close[hits], positions[hits]))
        self._count += len(hits)
        if self._count > 4 * self._k + 1024:
            self._prune()

    def positions(self) -> Positions:
        self._prune()
        return self._kept[0][1] if self._kept else np.empty(0, np.int64)

    def _prune(self) -> None:
        if not self._kept:
            return
        close = np.concatenate([part[0] for part in self._kept])
        positions = np.concatenate([part[1] for part in self._kept])
        self._raise_floor(close)
        keep = close >= self._floor
        self._kept = [(close[keep], positions[keep])]
        self._count = int(np.count_nonzero(keep))

    def _raise_floor(self, close: NDArray[np.float32]) -> None:
        self._floor = max(self._floor, _floor(close, self._k, self._slack))


def write_block(folder: Path, rows: Rows) -> tuple[Path, ...]:
    """Write (n, d) float32 rows and their squares into `folder`; return the files, synced.

    The folder itself is not synced. The files are overwritten if they exist.
    """
    assert rows.dtype == np.float32
    written = []
    for name, array in ((VECTORS_FILE, rows), (SQUARES_FILE, scores.squares(rows))):
        path = folder / name
        with path.open("wb") as file:
            file.write(np.ascontiguousarray(array).data)
            file.flush()
            os.fsync(file.fileno())
        written.append(path)
    return tuple(written)


def open_block(folder: Path, rows: int, dimensions: int) -> Block:
    """Return the block that `write_block` left in `folder`, its rows mapped and read on demand.

    Raises Corruption if a file is missing or not of the size that `rows` asks for. A mapped file
    must not be truncated while the block is in use.
    """
    vectors = _checked(folder / VECTORS_FILE, rows * dimensions * 4)
    squares = _checked(folder / SQUARES_FILE, rows * 8)
    if rows == 0:
        return Block.of(np.empty((0, dimensions), np.float32))
    mapped = np.asarray(np.memmap(vectors, np.float32, "r", shape=(rows, dimensions)))
    return Block.of(mapped, np.fromfile(squares, np.float64))


def _checked(path: Path, size: int) -> Path:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise Corruption(str(path), "the file is missing") from None
    if found != size:
        raise Corruption(str(path), f"it has {found} bytes and should have {size}")
    return path


def _inverse_norms(squares: NDArray[np.float64]) -> tuple[NDArray[np.float32], Positions]:
    norms = np.sqrt(squares)
    strange = ~((norms >= _NORM_MIN) & (norms <= _NORM_MAX))
    norms[strange] = np.inf
    return (1.0 / norms).astype(np.float32), np.flatnonzero(strange)


def units(queries: Rows) -> Rows:
    """Return (m, d) float32 rows scaled to length 1, whatever their magnitude; none may be 0."""
    assert queries.dtype == np.float32
    assert queries.ndim == 2
    norms = np.sqrt(scores.squares(queries))
    units: Rows = (queries / norms[:, np.newaxis]).astype(np.float32)
    return units


def _slack(dimensions: int) -> float:
    """Return how far a float32 cosine may be from `scores.cosine`, for rows that are not strange.

    With u = 2^-24, a float32 dot product of d terms, summed in any order, fused or not, is off by
    at most d*u / (1 - d*u) of the product of the norms (Higham, Accuracy and Stability of Numerical
    Algorithms, 3.1). Rounding the unit query, the inverse norm, the last product and the final
    score adds 4u. The norm range keeps underflow below 2^-40 of that; 8u covers it.
    """
    assert dimensions <= 2**17
    return 1.01 * (dimensions + 8) * 2.0**-24


class _Products:
    """Float32 dot products of unit queries, (m, d), with rows, on one core and without the GIL.

    Measured (100k x 384): one query over listed rows is twice as fast by `by_idx`, which copies
    nothing, as after a copy; 32 queries take a sixth of the time as one matrix product. That goes
    through FAISS's own BLAS, since NumPy's starts a thread per core and those wait for each other
    when the machine is busy (32 x 100k: 75 ms became 560).
    """

    def __init__(self, units: Rows) -> None:
        m, d = units.shape
        self._units = units
        self._product: faiss.LinearTransform | None = None
        if m >= _GEMM_QUERIES_MIN:
            self._product = faiss.LinearTransform(d, m, False)
            faiss.copy_array_to_vector(units.ravel(), self._product.A)
            self._product.is_trained = True
        # FAISS keeps the number of threads per calling thread.
        faiss.omp_set_num_threads(1)

    def fill(self, rows: Rows, local: Positions | None, out: NDArray[np.float32]) -> None:
        """Fill `out` (m, n) with the products of the listed rows, None for all."""
        if self._product is not None:
            self._multiply(rows, local, out)
            return
        n, d = out.shape[1], rows.shape[1]
        y = faiss.swig_ptr(rows)
        for unit, products in zip(self._units, out, strict=True):
            x, to = faiss.swig_ptr(unit), faiss.swig_ptr(products)
            if local is None:
                faiss.fvec_inner_products_ny(to, x, y, d, n)  # type: ignore[attr-defined]
            else:
                ids = faiss.swig_ptr(local)
                faiss.fvec_inner_products_by_idx(to, x, y, ids, d, 1, n)  # type: ignore[attr-defined]

    def _multiply(self, rows: Rows, local: Positions | None, out: NDArray[np.float32]) -> None:
        assert self._product is not None
        m, n = out.shape
        for low in range(0, n, _GEMM_ROWS):
            high = min(low + _GEMM_ROWS, n)
            part = rows[low:high] if local is None else rows[local[low:high]]
            products = np.empty((high - low, m), np.float32)
            x, to = faiss.swig_ptr(part), faiss.swig_ptr(products)
            self._product.apply_noalloc(high - low, x, to)  # type: ignore[attr-defined]
            out[:, low:high] = products.T


def _floor(close: NDArray[np.float32], k: int, slack: float) -> np.float32:
    """Return what a row must reach in float32 to be among the k best; -inf for fewer than k.

    k rows reach the k-th of these, so a row further below than two errors is not among the k best:
    one error for the k-th, which may be worse than it looks, one for the row itself.
    """
    at = len(close) - k
    if at < 0:
        return np.float32(-np.inf)
    kth = float(np.partition(close, at)[at])
    return np.float32(np.nextafter(np.float32(kth - 2 * slack), np.float32(-np.inf)))


def _joined(listed: Sequence[Positions]) -> tuple[Positions, Positions]:
    """Return all positions one list after the other, and which list each is of."""
    sizes = [len(positions) for positions in listed]
    return np.concatenate(listed), np.repeat(np.arange(len(listed)), sizes)


def parted(joined: NDArray[Number], lists: Sequence[Sized]) -> list[NDArray[Number]]:
    """Return what belongs to each list of an array aligned with all of them end to end."""
    return np.split(joined, np.cumsum([len(one) for one in lists])[:-1])


def cut(scored: Scored, k: int) -> Scored:
    """Return the k best rows and all that tie with the k-th, in no order."""
    n = len(scored.scores)
    if n <= k:
        return scored
    keep = scored.scores >= np.partition(scored.scores, n - k)[n - k]
    return Scored(scored.positions[keep], scored.scores[keep])
