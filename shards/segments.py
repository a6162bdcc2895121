"""A segment: sealed rows in one folder that is written once, synced, and never changed.

    <folder>/rows.lance      every column of every row, as the row was written (a Lance table)
    <folder>/changes.lance   lifecycle changes made while these rows were written, to any rows
    <folder>/vectors.f32     the raw vectors again, (n, d) float32, to be memory-mapped
    <folder>/squares.f64     the sum of squares of each, as the final score needs it
    <folder>/words.bin       the postings of the contents' words, to be memory-mapped
    <folder>/values.arrow    content, metadata, source and supersedes again, to be memory-mapped:
                             a Lance take of ten rows costs more than the search that found them

Segments are immutable and each has its Lance tables to itself. So nothing is ever restored or
cleaned up inside a table: a merge writes a new folder, the manifest names it, and what the
manifest does not name is deleted. Hard-deleted rows leave the disk with their folder.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lance
import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mindgrid.shards.analysis import Analyzer
from mindgrid.shards.clock import NEVER
from mindgrid.shards.commits import RowWrite
from mindgrid.shards.errors import Corruption
from mindgrid.shards.files import FileDigest, digest_tree, sync_tree
from mindgrid.shards.folders import reading, writing
from mindgrid.shards.postings import WORDS_FILE, WordBlock
from mindgrid.shards.rows import RowColumns
from mindgrid.shards.scores import squares
from mindgrid.shards.values import VALUES, Values, ValuesFile
from mindgrid.shards.vectors import SQUARES_FILE, VECTORS_FILE, Block, open_block

Int64s = NDArray[np.int64]

BATCH_ROWS = 1_024
ROWS_TABLE, CHANGES_TABLE, VALUES_FILE = "rows", "changes", "values.arrow"

_TIME = pa.timestamp("us", tz="UTC")
_METADATA = pa.map_(pa.string(), pa.string())
CHANGES = pa.schema(
    [("at", _TIME), ("number", pa.int64()), ("valid_to", _TIME), ("deleted_at", _TIME)]
)


def rows_schema(dimensions: int) -> pa.Schema:
    """Return the columns of `rows.lance`; `committed_at` is null where the row was erased."""
    return pa.schema(
        [
            ("number", pa.int64()),
            ("seq", pa.int64()),
            ("committed_at", _TIME),
            ("id", pa.string()),
            ("version", pa.int64()),
            ("created_at", _TIME),
            ("valid_from", _TIME),
            ("valid_to", _TIME),
            ("deleted_at", _TIME),
            ("content", pa.large_string()),
            ("payload", pa.large_binary()),
            ("metadata", _METADATA),
            ("source", pa.string()),
            ("supersedes", pa.list_(pa.string())),
            ("vector", pa.list_(pa.float32(), dimensions)),
        ]
    )


class SegmentInfo(msgspec.Struct, frozen=True):
    """What the manifest says of a segment."""

    folder: str
    rows: int
    first_number: int
    last_number: int
    tier: int
    payload_bytes: int
    files: tuple[FileDigest, ...]


class StoredRow(msgspec.Struct, frozen=True, gc=False):
    """A row on its way into a segment."""

    number: int
    seq: int
    committed_at: int
    row: RowWrite


def rows_batch(
    rows: list[StoredRow], vectors: NDArray[np.float32], erased: set[int], dimensions: int
) -> pa.RecordBatch:
    """Return the rows as one batch of `rows_schema`; of an erased row only its number is left."""
    gone = [stored.number in erased for stored in rows]
    vectors = np.where(np.array(gone)[:, None], np.float32(0), vectors)
    kept = [None if g else stored for g, stored in zip(gone, rows, strict=True)]
    columns = [
        pa.array([stored.number for stored in rows], pa.int64()),
        pa.array([stored.seq for stored in rows], pa.int64()),
        _times([s.committed_at if s else NEVER for s in kept]),
        pa.array([s.row.id if s else "" for s in kept], pa.string()),
        pa.array([s.row.version if s else 0 for s in kept], pa.int64()),
        _times([s.row.created_at if s else NEVER for s in kept]),
        _times([s.row.valid_from if s else NEVER for s in kept]),
        _times([s.row.valid_to if s else NEVER for s in kept]),
        _times([s.row.deleted_at if s else NEVER for s in kept]),
        pa.array([s.row.content if s else "" for s in kept], pa.large_string()),
        pa.array([s.row.payload if s else b"" for s in kept], pa.large_binary()),
        pa.array([list(s.row.metadata.items()) if s else [] for s in kept], _METADATA),
        pa.array([s.row.source if s else "" for s in kept], pa.string()),
        pa.array([s.row.supersedes if s else [] for s in kept], pa.list_(pa.string())),
        pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), dimensions),
    ]
    return pa.record_batch(columns, schema=rows_schema(dimensions))


def changes_table(at: Int64s, number: Int64s, valid_to: Int64s, deleted_at: Int64s) -> pa.Table:
    """Return lifecycle changes as a table of `CHANGES`."""
    columns = [
        _times(at.tolist()),
        pa.array(number),
        _times(valid_to.tolist()),
        _times(deleted_at.tolist()),
    ]
    return pa.table(columns, schema=CHANGES)


def write_segment(
    folder: Path,
    dimensions: int,
    tier: int,
    batches: Iterator[pa.RecordBatch],
    words: WordBlock | None,
    changes: pa.Table,
) -> SegmentInfo:
    """Write a new segment folder and sync all of it; return what the manifest has to say of it.

    The batches are streamed, so memory is bounded by one of them; `words` are those of their rows,
    None without any. Raises Unavailable if the disk is full or fails, after which the folder is
    gone.
    """
    tally = _Tally()
    first = next(batches, None)
    with writing(folder):
        # Its import takes seconds, and whoever only reads needs none of it.
        import lancedb

        database = lancedb.connect(folder)
        if first is not None:
            with _vectors_writer(folder) as add_vectors, _values_writer(folder) as values:

                def tee() -> Iterator[pa.RecordBatch]:
                    for batch in itertools.chain([first], batches):
                        tally.add(batch)
                        add_vectors(vectors_of(batch))
                        values.write_batch(_values_of(batch))
                        yield batch

                reader = pa.RecordBatchReader.from_batches(rows_schema(dimensions), tee())
                database.create_table(ROWS_TABLE, reader)
        if words is not None:
            words.save(folder)
        if changes.num_rows:
            database.create_table(CHANGES_TABLE, changes)
        sync_tree(folder)
        files = digest_tree(folder)
    return SegmentInfo(
        folder.name, tally.rows, tally.first, tally.last, tier, tally.payload_bytes, files
    )


class _Tally:
    def __init__(self) -> None:
        self.rows = 0
        self.first = self.last = -1
        self.payload_bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        numbers = batch.column("number")
        if self.rows == 0:
            self.first = numbers[0].as_py()
        self.last = numbers[len(numbers) - 1].as_py()
        self.rows += len(numbers)
        self.payload_bytes += sum(len(value) for value in batch.column("payload").to_pylist())


class Segment:
    """An open segment. Safe for any number of reading threads."""

    def __init__(
        self, folder: Path, info: SegmentInfo, dimensions: int, analyzer: Analyzer
    ) -> None:
        """Map the segment's files, whose digests the caller has checked."""
        self.folder = folder
        self.info = info
        self.dimensions = dimensions
        self.block: Block | None = None
        self.words: WordBlock | None = None
        """Both None in a segment of changes alone."""
        if info.rows == 0:
            return
        with reading(folder):
            self.block = open_block(folder, info.rows, dimensions)
            self._values = ValuesFile(folder / VALUES_FILE)
            self._rows = lance.dataset(folder / f"{ROWS_TABLE}.lance")
            self.words = self._words(analyzer)
        if len(self._values) != info.rows:
            raise Corruption(str(folder), "its files do not agree on the number of rows")

    def _words(self, analyzer: Analyzer) -> WordBlock:
        """Return the stored postings; made anew in RAM if an older release, or another
        `text_search`, sealed these rows: until a merge writes them."""
        named = any(file.path == WORDS_FILE for file in self.info.files)
        if named:
            words = WordBlock.open(self.folder, self.info.rows)
            if words.fingerprint == analyzer.fingerprint:
                return words
        contents = [self._values.read(row).content for row in range(self.info.rows)]
        return WordBlock.of(contents, analyzer)

    def values(self, offset: int) -> Values:
        """Return the values of the row at this offset in the segment."""
        return self._values.read(offset)

    def payloads(self, offsets: list[int]) -> list[bytes]:
        """Return the payloads of the rows at these offsets, in their order."""
        if self.info.payload_bytes == 0 or not offsets:
            return [b""] * len(offsets)
        with reading(self.folder):
            column = self._rows.take(offsets, columns=["payload"]).column("payload")
            return [bytes(value) for value in column.to_pylist()]

    def columns(self) -> RowColumns:
        """Return what of this segment lives in RAM while the shard is open."""
        names = ["number", "id", "version", "committed_at"]
        names += ["created_at", "valid_from", "valid_to", "deleted_at"]
        with reading(self.folder):
            table = self._rows.to_table(columns=names)
            metadata = self._values.metadata()
        return RowColumns(
            numbers=table.column("number").to_numpy(),
            ids=np.array(table.column("id").to_pylist(), dtype=np.object_),
            versions=table.column("version").to_numpy(),
            committed_at=_int64s(table.column("committed_at")),
            created_at=_int64s(table.column("created_at")),
            valid_from=_int64s(table.column("valid_from")),
            valid_to=_int64s(table.column("valid_to")),
            deleted_at=_int64s(table.column("deleted_at")),
            metadata=metadata,
        )

    def changes(self) -> pa.Table:
        """Return the lifecycle changes sealed with this segment, oldest first."""
        path = self.folder / f"{CHANGES_TABLE}.lance"
        if not path.exists():
            return CHANGES.empty_table()
        with reading(self.folder):
            return lance.dataset(path).to_table()

    def batches(self, kept: Int64s) -> Iterator[pa.RecordBatch]:
        """Yield the rows whose numbers are in `kept` (ascending), in bounded batches."""
        if self.info.rows == 0:
            return
        with reading(self.folder):
            for batch in self._rows.to_batches(batch_size=BATCH_ROWS):
                numbers = batch.column("number").to_numpy()
                wanted = np.isin(numbers, kept, assume_unique=True)
                if wanted.any():
                    yield batch.filter(pa.array(wanted))


def change_columns(table: pa.Table) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Return (at, number, valid_to, deleted_at) of a table of `CHANGES`."""
    return (
        _int64s(table.column("at")),
        table.column("number").to_numpy(),
        _int64s(table.column("valid_to")),
        _int64s(table.column("deleted_at")),
    )


def vectors_of(batch: pa.RecordBatch) -> NDArray[np.float32]:
    """Return a batch's vectors, (n, d) float32, without a copy."""
    column = batch.column("vector")
    flat: NDArray[np.float32] = column.flatten().to_numpy()
    return flat.reshape(len(column), -1)


@contextmanager
def _vectors_writer(folder: Path) -> Iterator[Callable[[NDArray[np.float32]], None]]:
    with (folder / VECTORS_FILE).open("wb") as rows, (folder / SQUARES_FILE).open("wb") as sums:

        def add(vectors: NDArray[np.float32]) -> None:
            rows.write(np.ascontiguousarray(vectors).data)
            sums.write(squares(vectors).data)

        yield add


@contextmanager
def _values_writer(folder: Path) -> Iterator[pa.ipc.RecordBatchFileWriter]:
    with (
        pa.OSFile(str(folder / VALUES_FILE), "wb") as sink,
        pa.ipc.new_file(sink, VALUES) as writer,
    ):
        yield writer


def _values_of(batch: pa.RecordBatch) -> pa.RecordBatch:
    encode = msgspec.json.Encoder().encode
    metadata = [encode(dict(items)) for items in batch.column("metadata").to_pylist()]
    columns = [batch.column(name) for name in VALUES.names]
    columns[VALUES.names.index("metadata")] = pa.array(metadata, pa.binary())
    return pa.record_batch(columns, schema=VALUES)


def _times(values: list[int]) -> pa.Array:
    return pa.array([None if v == NEVER else v for v in values], pa.int64()).cast(_TIME)


def _int64s(column: pa.ChunkedArray) -> Int64s:
    filled: Int64s = column.cast(pa.int64()).fill_null(NEVER).to_numpy()
    return filled
