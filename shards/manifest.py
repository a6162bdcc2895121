"""The manifest: the row from which a shard's files are found; what it does not name is nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from mindgrid.shards.errors import Corruption, FormatTooNew
from mindgrid.shards.files import FileDigest
from mindgrid.shards.segments import SegmentInfo
from mindgrid.shards.transactions import Decision

FORMAT = 1


class IndexInfo(msgspec.Struct, frozen=True):
    """The folder of the IVF, and the number of the last row it may hold."""

    folder: str
    last_number: int
    files: tuple[FileDigest, ...]


class Manifest(msgspec.Struct, frozen=True):
    """A shard's sealed state after the commit `covered_seq`; the journal holds what came later.

    `erased` are the numbers of sealed rows that are hard-deleted but still in their segment;
    `floor` is the earliest instant that `known_at` still reaches; `decisions` are those about
    commits over several shards that were not forgotten by then, by their keys.
    """

    format: int = FORMAT
    segments: list[SegmentInfo] = []
    index: IndexInfo | None = None
    covered_seq: int = 0
    next_number: int = 0
    last_commit: int = 0
    floor: int = 0
    erased: list[int] = []
    decisions: list[tuple[str, Decision]] = []

    @property
    def folders(self) -> list[tuple[str, tuple[FileDigest, ...]]]:
        """The folders this manifest names, each with the digests of its files."""
        named = [(segment.folder, segment.files) for segment in self.segments]
        return named + ([(self.index.folder, self.index.files)] if self.index else [])


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as JSON, so that a person can read it too."""
    return msgspec.json.encode(manifest)


def decode(blob: bytes, journal: Path) -> Manifest:
    """Return the manifest in these bytes; raises Corruption naming the journal they came from, and
    FormatTooNew."""
    try:
        manifest = msgspec.json.decode(blob, type=Manifest)
    except msgspec.MsgspecError as error:
        raise Corruption(str(journal), f"its manifest cannot be read: {error}") from error
    if manifest.format > FORMAT:
        raise FormatTooNew(str(journal), manifest.format, FORMAT)
    return manifest


class Tiered(Protocol):
    """What is merged: how many rows it has, and how often they were merged."""

    @property
    def rows(self) -> int:
        """How many rows it has."""
        ...

    @property
    def tier(self) -> int:
        """0 as it was sealed, one more with each merge."""
        ...


def run_to_merge(
    segments: Sequence[Tiered], dead_rows: Sequence[int], fanout: int, dead_share: float
) -> slice | None:
    """Return the neighbours that should become one segment, or None.

    Tiers: `fanout` neighbours of one tier become one of the next, so each row is rewritten about
    log(rows) / log(fanout) times. Besides, a segment of which `dead_share` is dead (erased, or
    older than the history kept) is rewritten by itself.
    """
    start = 0
    for end in range(1, len(segments) + 1):
        if end < len(segments) and segments[end].tier == segments[start].tier:
            continue
        if end - start >= fanout:
            return slice(start, start + fanout)
        start = end
    for at, (segment, dead) in enumerate(zip(segments, dead_rows, strict=True)):
        if dead and dead >= dead_share * segment.rows:
            return slice(at, at + 1)
    return None
