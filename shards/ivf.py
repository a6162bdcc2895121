"""The approximate index of one shard and space: which rows are worth an exact comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mindgrid.shards.vectors import Positions, Rows, Vectors

Check = Callable[[Path, bytes], None]
"""Called with each file's content before any of it is parsed; raises Corruption to refuse it."""


@dataclass(frozen=True, slots=True)
class Bitmap:
    """The rows a search may return, one bit each, little-endian; `count` of them are set."""

    bits: NDArray[np.uint8]
    count: int

    @classmethod
    def of(cls, mask: NDArray[np.bool_]) -> Bitmap:
        """Return the bitmap of a mask over positions 0..n-1."""
        return cls(np.packbits(mask, bitorder="little"), int(np.count_nonzero(mask)))


@dataclass(frozen=True, slots=True)
class Candidates:
    """`positions` (m,) int64 to be scored exactly, in no order; `scanned` codes were compared."""

    positions: Positions
    scanned: int


class IvfIndex:
    """An immutable index; every change returns a new one, so searches need no lock."""

    rows: int
    trained_rows: int
    recall: float
    """What the tuned parameters reached on sampled rows."""

    @classmethod
    def build(
        cls, vectors: Vectors, positions: Positions | None = None, recall: float = 0.95
    ) -> IvfIndex:
        """Train on and add these positions (None: all); tune to `recall` at top 10."""
        raise NotImplementedError

    def extend(self, vectors: Vectors, positions: Positions) -> IvfIndex:
        """Return an index that also holds these positions, under the same centroids."""
        raise NotImplementedError

    def remove(self, positions: Positions) -> IvfIndex:
        """Return an index without these positions; unknown ones are ignored."""
        raise NotImplementedError

    def renumber(self, places: Positions) -> IvfIndex:
        """Return an index where position p is now places[p], and gone where that is -1."""
        raise NotImplementedError

    def search(self, queries: Rows, k: int, allowed: Bitmap | None = None) -> Sequence[Candidates]:
        """Return candidates for each query; fewer than min(k, allowed) means: search exactly."""
        raise NotImplementedError

    def save(self, folder: Path) -> tuple[Path, ...]:
        """Write the index into `folder`; return the files, synced. The folder is not synced."""
        raise NotImplementedError

    @classmethod
    def load(cls, folder: Path, check: Check | None = None) -> IvfIndex:
        """Return what `save` wrote; raises Corruption naming the file."""
        raise NotImplementedError
