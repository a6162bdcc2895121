"""The approximate index of one shard and space: which rows are worth an exact comparison.

Rows are put into cells by k-means and kept as RaBitQ codes, one bit a dimension (Gao and Long,
RaBitQ, SIGMOD 2024), which is a 30th of the vector. The estimates are too coarse to rank by, but
good enough to choose the rows that `Vectors.exact` then ranks. Where one bit is too coarse (few
dimensions, say) eight bits a dimension are used. An index is never changed: FAISS allows no search
while it is, and a lock would let searches starve the writer.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
from numpy.typing import NDArray

from mindgrid.shards.errors import Corruption
from mindgrid.shards.tuning import Costs, Level, Sample, covers, plan, tune
from mindgrid.shards.vectors import Positions, Rows, Vectors, units

INDEX_FILE = "ivf.faiss"
META_FILE = "ivf.json"
FORMAT = 1

_SEED = 20
_CHUNK_ROWS = 4_096
_TRAINING_PER_CELL = 64
_KMEANS_ROUNDS = 10
_QUERY_BITS = 4
"""As good as 8 bits or the unrounded query (0), at three quarters and a fiftieth of the time."""
_RETUNE_GROWTH = 1.6
"""In between the depth grows with the rows, which costs searches less than tuning would."""
_SHARE_COUNTED = 0.5
"""Up to this share of allowed rows they are counted cell by cell before cells are chosen."""
_FILTERED_CELLS, _FILTERED_DEPTH = 2.0, 2.0
"""Then more is looked at, for queries that are off the allowed rows' topic: there all of them are
about equally far. WordNet, filters by topic, recall of such queries: 0.62 to 0.94 became 0.88 to
0.99, the lowest where a seventh of the rows is allowed."""
_SAME_DIRECTION = 1e-5
"""k-means moves the centre of a cell that it has just split off by a thousandth: 1e-6 off 1."""
_COSTS = {"rabitq": Costs(candidate=10.0, centroid=0.5), "sq8": Costs(candidate=5.0, centroid=0.3)}

Check = Callable[[Path, bytes], None]
"""Called with each file's content before any of it is parsed; raises Corruption to refuse it."""


@dataclass(frozen=True, slots=True)
class Bitmap:
    """The positions a search may return: one bit each, little-endian; `count` of `rows` are set."""

    bits: NDArray[np.uint8]
    rows: int
    count: int
    mask: NDArray[np.bool_]

    @classmethod
    def of(cls, mask: NDArray[np.bool_]) -> Bitmap:
        """Return the bitmap of a mask over positions 0..n-1."""
        bits = np.packbits(mask, bitorder="little")
        return cls(bits, len(mask), int(np.count_nonzero(mask)), mask)


@dataclass(frozen=True, slots=True)
class Candidates:
    """What one query found: `positions` (m,) int64, sorted; `scanned` codes were compared."""

    positions: Positions
    scanned: int


@dataclass(frozen=True, slots=True)
class Cells:
    """Where to look: (queries, nprobe) cells, -1 for none, and their nearness to the query."""

    chosen: Positions
    nearness: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Meta:
    """What an index knows of itself besides its codes.

    `trained_rows` were there when the cells were chosen, `tuned_rows` when the levels were;
    `goal` is the recall asked for and `reached` whether the sample got there.
    """

    code: str
    trained_rows: int
    tuned_rows: int
    goal: float
    reached: bool
    levels: tuple[Level, ...]


class IvfIndex:
    """An immutable index; every change returns a new one, so searches need no lock.

    Building, extending and removing keep one core busy without the interpreter's lock; run them
    in a `background_pool`.
    """

    def __init__(self, index: faiss.IndexIVF, meta: Meta) -> None:
        self.meta = meta
        self._index = index
        lists = index.invlists
        assert lists is not None
        sizes = [lists.list_size(cell) for cell in range(index.nlist)]
        self._sizes = np.array(sizes, np.int64)
        self._counted: tuple[Bitmap | None, Positions] = None, self._sizes

    @functools.cached_property
    def _last(self) -> int:
        return int(self._by_cell.max(initial=-1))

    @functools.cached_property
    def _by_cell(self) -> Positions:
        """All positions, cell by cell: the first time a filter asks, 8 bytes a row."""
        return np.concatenate([np.empty(0, np.int64), *self._ids()])

    @property
    def rows(self) -> int:
        """How many rows the index holds."""
        return int(self._index.ntotal)

    @property
    def trained_rows(self) -> int:
        """How many rows its cells were chosen for; train anew at four times as many."""
        return self.meta.trained_rows

    @property
    def recall(self) -> float:
        """The mean recall at top 10 that the sampled rows reached."""
        return self.meta.levels[0].recall

    @classmethod
    def build(
        cls, vectors: Vectors, positions: Positions | None = None, recall: float = 0.95
    ) -> IvfIndex:
        """Return an index of these positions (None: all; at least one), tuned to `recall`.

        The same rows give the same index. Memory beside it: the training sample, 64 rows a cell.
        """
        if positions is None:
            positions = np.arange(len(vectors))
        positions = np.sort(positions)
        assert len(positions) > 0
        sample = Sample.draw(vectors, positions, np.random.default_rng(_SEED))
        built = cls._build("rabitq", vectors, positions, recall, sample)
        if not built.meta.reached:
            return cls._build("sq8", vectors, positions, recall, sample)
        return built

    @classmethod
    def _build(
        cls, code: str, vectors: Vectors, positions: Positions, recall: float, sample: Sample
    ) -> IvfIndex:
        faiss.omp_set_num_threads(1)
        n = len(positions)
        index = _empty(code, vectors.dimensions, _cells(n))
        rng = np.random.default_rng(_SEED)
        # A row pulls its cell's centre towards itself and so, as a query, finds its neighbours more
        # easily than a stranger (0.97 where strangers had 0.945): no sampled row is trained on.
        others = np.setdiff1d(positions, sample.positions, assume_unique=True)
        pool = others if len(others) >= max(index.nlist, n // 2) else positions
        enough = min(len(pool), _TRAINING_PER_CELL * index.nlist)
        picks = np.sort(rng.choice(pool, enough, replace=False))
        index.train(units(vectors.gather(picks)))
        _add(index, vectors, positions)
        return cls._tuned(index, Meta(code, n, n, recall, False, ()), sample)

    @classmethod
    def _tuned(cls, index: faiss.IndexIVF, meta: Meta, sample: Sample) -> IvfIndex:
        rows = int(index.ntotal)
        draft = cls(index, meta)

        def nearest(queries: Rows, nprobe: int, depth: int) -> Positions:
            normed = units(queries)
            return draft._scan(normed, draft._nearest_cells(normed, nprobe), depth, None)[0]

        levels, reached = tune(sample, nearest, index.nlist, rows, meta.goal, _COSTS[meta.code])
        meta = dataclasses.replace(meta, tuned_rows=rows, levels=levels, reached=reached)
        return cls(index, meta)

    def extend(self, vectors: Vectors, positions: Positions) -> IvfIndex:
        """Return an index that also holds these positions, none of which it has, in its cells.

        Tuned anew once it has grown by `_RETUNE_GROWTH` since the last time.
        """
        index = faiss.clone_index(self._index)
        assert isinstance(index, faiss.IndexIVF)
        faiss.omp_set_num_threads(1)
        _add(index, vectors, positions)
        if index.ntotal < _RETUNE_GROWTH * self.meta.tuned_rows:
            return IvfIndex(index, self.meta)
        grown = IvfIndex(index, self.meta)
        sample = Sample.draw(vectors, grown.positions(), np.random.default_rng(_SEED))
        return self._tuned(index, self.meta, sample)

    def remove(self, positions: Positions) -> IvfIndex:
        """Return an index without these positions; those it does not have are ignored."""
        index = faiss.clone_index(self._index)
        assert isinstance(index, faiss.IndexIVF)
        mask = np.zeros(int(positions.max(initial=-1)) + 1, np.bool_)
        mask[positions] = True
        bits = np.packbits(mask, bitorder="little")
        faiss.omp_set_num_threads(1)
        index.remove_ids(_selector(bits))
        return IvfIndex(index, self.meta)

    def renumber(self, places: Positions) -> IvfIndex:
        """Return an index where position p is places[p], and gone where that is negative.

        For compaction, which drops rows and moves the others up. `places` covers all positions.
        """
        renumbered = self.remove(np.flatnonzero(places < 0))
        for ids in renumbered._ids():
            ids[...] = places[ids]
        return renumbered

    def has_centre_in(self, rows: Rows) -> bool:
        """Return whether the centre of a cell has the direction of one of these rows, (m, d).

        So it has if the row was alone in its cell when the cells were trained.
        """
        faiss.omp_set_num_threads(1)
        nearness, _ = self._index.quantizer.search(units(rows), 1)
        return bool((nearness > 1 - _SAME_DIRECTION).any())

    def positions(self) -> Positions:
        """Return all positions the index holds, sorted."""
        return np.sort(self._by_cell)

    def search(self, queries: Rows, k: int, allowed: Bitmap | None = None) -> list[Candidates]:
        """Return for each query, (m, d) float32, the positions worth an exact comparison.

        Among them are the true k best of the allowed rows with about the tuned recall. Fewer than
        k, or than there are allowed rows, mean that the caller must search exactly; so does none
        at all, the answer where k / (share of allowed rows) is beyond what was measured.

        Where the allowed rows lie thinner around a query than in the whole, so that the cells do
        not fill the depth, twice as many are looked into, and so on up to all of them.
        """
        assert k > 0
        share = 1.0 if allowed is None else allowed.count / max(1, allowed.rows)
        nothing = Candidates(np.empty(0, np.int64), 0)
        if share == 0.0 or self.rows == 0 or not covers(self.meta.levels, k, share):
            return [nothing for _ in queries]
        cells, wanted = plan(self.meta.levels, k, share)
        # More rows in the same cells lie closer together than the estimates can tell apart.
        wanted *= max(1.0, self.rows / self.meta.tuned_rows)
        most = self.rows if allowed is None else min(self.rows, allowed.count)
        counts = None
        if allowed is not None and share <= _SHARE_COUNTED:
            counts = self._counts(allowed)
            wanted *= _FILTERED_DEPTH
        depth = min(most, max(k, math.ceil(wanted)))
        faiss.omp_set_num_threads(1)
        normed = units(queries)
        found = [nothing for _ in queries]
        todo = np.arange(len(queries))
        while True:
            chosen = (
                self._nearest_cells(normed[todo], cells)
                if counts is None
                else self._filled_cells(
                    normed[todo], counts, cells, _FILTERED_CELLS * cells * share
                )
            )
            rows, scanned = self._scan(normed[todo], chosen, depth, allowed)
            for i, row, count in zip(todo.tolist(), rows, scanned.tolist(), strict=True):
                found[i] = Candidates(np.sort(row[row >= 0]), found[i].scanned + count)
            todo = todo[rows[:, -1] < 0]
            if cells >= self._index.nlist / share or not todo.size:
                return found
            cells *= 2

    def _nearest_cells(self, normed: Rows, cells: float) -> Cells:
        nprobe = min(self._index.nlist, math.ceil(cells))
        nearness, chosen = self._index.quantizer.search(normed, nprobe)
        return Cells(chosen, nearness)

    def _filled_cells(
        self, normed: Rows, counts: Positions, cells: float, averages: float
    ) -> Cells:
        """Choose the nearest cells with allowed rows: `cells` of them, holding enough together.

        Enough is what `averages` cells hold on average. A filter seldom falls evenly: where the
        query's neighbourhood has few allowed rows, they are spread over more cells.
        """
        nearness, chosen = self._index.quantizer.search(normed, self._index.nlist)
        filled = counts[chosen]
        before = np.cumsum(filled, axis=1) - filled
        rank = np.cumsum(filled > 0, axis=1) - 1
        enough = averages * self.rows / self._index.nlist
        taken = (filled > 0) & ((rank < cells) | (before < enough))
        width = max(1, int(taken.sum(axis=1).max()))
        # The taken ones to the front, still nearest first; FAISS passes over a cell of -1.
        order = np.argsort(~taken, axis=1, kind="stable")[:, :width]
        chosen = np.where(taken, chosen, -1)
        return Cells(
            np.ascontiguousarray(np.take_along_axis(chosen, order, axis=1)),
            np.ascontiguousarray(np.take_along_axis(nearness, order, axis=1)),
        )

    def _counts(self, allowed: Bitmap) -> Positions:
        """Return how many allowed rows each cell holds: (nlist,) int64; 0.2 ms for 100k rows."""
        # The last one is kept, as queries with the same filter often follow each other.
        bitmap, known = self._counted
        if bitmap is allowed:
            return known
        ids = self._by_cell
        if self.rows and allowed.rows <= self._last:
            inside = (ids < allowed.rows) & allowed.mask[np.minimum(ids, allowed.rows - 1)]
        else:
            inside = allowed.mask[ids]
        sums = np.concatenate([[0], np.cumsum(inside, dtype=np.int64)])
        ends = np.cumsum(self._sizes)
        counts: Positions = sums[ends] - sums[ends - self._sizes]
        self._counted = allowed, counts
        return counts

    def _scan(
        self, normed: Rows, cells: Cells, depth: int, allowed: Bitmap | None
    ) -> tuple[Positions, Positions]:
        """Return (queries, depth) positions, best estimate first, -1 where none; codes compared."""
        n, nprobe = cells.chosen.shape
        params = _parameters(self.meta.code, nprobe)
        if allowed is not None:
            params.sel = _selector(allowed.bits)
        close = np.empty((n, depth), np.float32)
        rows = np.empty((n, depth), np.int64)
        # Given the cells, so that they can be counted; FAISS's own counters mix all threads. The
        # Python wrapper of this method takes no parameters, so the bare one is called.
        pointer = faiss.swig_ptr
        self._index.search_preassigned_c(  # type: ignore[attr-defined]
            n,
            pointer(normed),
            depth,
            pointer(cells.chosen),
            pointer(cells.nearness),
            pointer(close),
            pointer(rows),
            False,
            params,
        )
        return rows, np.where(cells.chosen < 0, 0, self._sizes[cells.chosen]).sum(axis=1)

    def _ids(self) -> list[Positions]:
        """Return each cell's positions, as views of the index's own memory."""
        assert self._index.invlists is not None
        lists = faiss.downcast_InvertedLists(self._index.invlists)
        return [
            faiss.rev_swig_ptr(lists.get_ids(cell), lists.list_size(cell))
            for cell in range(self._index.nlist)
            if lists.list_size(cell)
        ]

    def save(self, folder: Path) -> tuple[Path, ...]:
        """Write the index into `folder`; return the files, synced. The folder is not synced."""
        index = faiss.serialize_index(self._index).tobytes()
        fields = {"format": FORMAT, "rows": self.rows, **dataclasses.asdict(self.meta)}
        fields["crc32"] = _crc(index, fields)
        meta = json.dumps(fields, indent=1).encode()
        written = []
        for name, content in ((INDEX_FILE, index), (META_FILE, meta)):
            path = folder / name
            with path.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            written.append(path)
        return tuple(written)

    @classmethod
    def load(cls, folder: Path, check: Check | None = None) -> IvfIndex:
        """Return what `save` wrote; raises Corruption naming the file.

        Read whole and not mapped: it is small (7 MB for 100,000 rows), and what was checked is what
        FAISS parses, which with damaged bytes might do anything.
        """
        index_path, meta_path = folder / INDEX_FILE, folder / META_FILE
        content, meta = _read(index_path, check), _read(meta_path, check)
        try:
            fields = json.loads(meta)
            stored = fields.pop("crc32")
            if fields.pop("format") != FORMAT:
                raise Corruption(str(meta_path), f"its format is not {FORMAT}")
            rows = fields.pop("rows")
            levels = tuple(Level(**level) for level in fields.pop("levels"))
            known = Meta(**fields, levels=levels)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Corruption(str(meta_path), f"it cannot be read ({error})") from error
        if stored != _crc(content, {"format": FORMAT, "rows": rows, **dataclasses.asdict(known)}):
            raise Corruption(str(index_path), f"it does not match the checksum in {META_FILE}")
        try:
            index = faiss.deserialize_index(np.frombuffer(content, np.uint8))
        except (RuntimeError, MemoryError) as error:
            raise Corruption(str(index_path), f"FAISS cannot read it ({error})") from error
        if not isinstance(index, faiss.IndexIVF) or index.ntotal != rows:
            raise Corruption(str(index_path), f"it is no IVF index of {rows} rows")
        return cls(index, known)


def _empty(code: str, dimensions: int, nlist: int) -> faiss.IndexIVF:
    flat, metric = faiss.IndexFlatIP(dimensions), faiss.METRIC_INNER_PRODUCT
    if code == "rabitq":
        index: faiss.IndexIVF = faiss.IndexIVFRaBitQ(flat, dimensions, nlist, metric)
    else:
        scalar = faiss.ScalarQuantizer.QT_8bit
        index = faiss.IndexIVFScalarQuantizer(flat, dimensions, nlist, scalar, metric)
    index.cp.niter = _KMEANS_ROUNDS
    index.cp.seed = _SEED
    index.cp.max_points_per_centroid = _TRAINING_PER_CELL
    # Else FAISS warns on stderr about small indexes, which only tests have.
    index.cp.min_points_per_centroid = 1
    return index


def _cells(rows: int) -> int:
    """Return the power of two next to 1.3 times the root of the rows (measured: flat around it)."""
    return int(min(rows, 2 ** round(math.log2(max(1.0, 1.3 * math.sqrt(rows))))))


def _parameters(code: str, nprobe: int) -> faiss.IVFSearchParameters:
    params: faiss.IVFSearchParameters = faiss.SearchParametersIVF()
    if code == "rabitq":
        params = rounded = faiss.IVFRaBitQSearchParameters()
        rounded.qb = _QUERY_BITS
    params.nprobe = nprobe
    return params


def _selector(bits: NDArray[np.uint8]) -> faiss.IDSelectorBitmap:
    selector = faiss.IDSelectorBitmap(len(bits), faiss.swig_ptr(bits))
    # FAISS keeps a bare pointer; the bits must live as long as the selector.
    selector.bits = bits  # type: ignore[attr-defined]
    return selector


def _add(index: faiss.IndexIVF, vectors: Vectors, positions: Positions) -> None:
    """Add rows in pieces, so that memory stays bounded and the interpreter is let go in between."""
    for low in range(0, len(positions), _CHUNK_ROWS):
        part = positions[low : low + _CHUNK_ROWS]
        index.add_with_ids(units(vectors.gather(part)), part)


def _crc(index: bytes, fields: dict[str, object]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode(), zlib.crc32(index))


def _read(path: Path, check: Check | None) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise Corruption(str(path), "the file is missing") from None
    if check is not None:
        check(path, content)
    return content
