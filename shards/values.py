"""What an ordinary answer shows of a row and no search reads, from a memory-mapped Arrow file.

Read through the Arrow buffers themselves: a row through pyarrow's scalars takes 25 µs, and ten hits
then cost more than the search that found them; this takes 2. The file is checked when its segment
is opened, so what is read here is what was written.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Literal

import msgspec
import pyarrow as pa

VALUES = pa.schema(
    [
        ("content", pa.large_string()),
        ("metadata", pa.binary()),
        ("source", pa.string()),
        ("supersedes", pa.list_(pa.string())),
    ]
)


class Values(msgspec.Struct, frozen=True, gc=False):
    """The values of one row."""

    content: str
    metadata: dict[str, str]
    source: str
    supersedes: tuple[str, ...]


class ValuesFile:
    """The values of a segment's rows. Safe for any number of reading threads."""

    def __init__(self, path: Path) -> None:
        """Map the file; raises what pyarrow raises if it is none of ours."""
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        self._batches = [_Batch(batch) for batch in table.to_batches()]
        self._starts: list[int] = [0, *accumulate(batch.rows for batch in self._batches)]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, row: int) -> Values:
        """Return the values of one row, by its place in the file."""
        at = bisect_right(self._starts, row) - 1
        return self._batches[at].read(row - self._starts[at])

    def metadata(self) -> list[dict[str, str]]:
        """Return the metadata of all rows, in order."""
        return [
            _decode(batch.metadata.read(row))
            for batch in self._batches
            for row in range(batch.rows)
        ]


class _Batch:
    def __init__(self, batch: pa.RecordBatch) -> None:
        self.rows = batch.num_rows
        self.metadata = BytesColumn(batch.column("metadata"), "i")
        self._content = BytesColumn(batch.column("content"), "q")
        self._source = BytesColumn(batch.column("source"), "i")
        supersedes = batch.column("supersedes")
        # Few batches have any.
        self._supersedes = supersedes if len(supersedes.values) else None

    def read(self, row: int) -> Values:
        return Values(
            str(self._content.read(row), "utf-8"),
            _decode(self.metadata.read(row)),
            str(self._source.read(row), "utf-8"),
            tuple(self._supersedes[row].as_py()) if self._supersedes is not None else (),
        )


class BytesColumn:
    """A column of strings or bytes: row i is data[ends[i]:ends[i + 1]]."""

    def __init__(self, column: pa.Array, offset_type: Literal["i", "q"]) -> None:
        """Take a column without nulls; its offsets are int32 ("i"), or of a large type int64."""
        _, ends, data = column.buffers()
        # A slice of an array, which these are not, would begin elsewhere in its buffers.
        assert column.offset == 0
        self._ends = memoryview(ends).cast("B").cast(offset_type)
        self._data = memoryview(data if data is not None else b"")

    def read(self, row: int) -> memoryview:
        """Return one row's bytes, without a copy."""
        return self._data[self._ends[row] : self._ends[row + 1]]


_decode = msgspec.json.Decoder(dict[str, str]).decode
