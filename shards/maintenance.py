"""The work behind a shard's back: sealing the tail, merging segments, building the index.

Each step writes new folders, syncs them, switches the manifest in one journal transaction, and
only then shows the result to readers. A crash at any point leaves orphans, which the next open
deletes, and the state before or after the switch, never one in between. One thread at a time.
"""

from __future__ import annotations

import shutil
import uuid
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mindgrid.shards import faults, manifest
from mindgrid.shards.analysis import analyzer_of
from mindgrid.shards.clock import NEVER, Clock, Instant
from mindgrid.shards.config import KNOWN_S_MIN, ShardConfig
from mindgrid.shards.files import digest_tree, sync, sync_tree
from mindgrid.shards.folders import reading, writing
from mindgrid.shards.ivf import IvfIndex
from mindgrid.shards.journal import Journal
from mindgrid.shards.manifest import IndexInfo, Manifest
from mindgrid.shards.postings import WordBlock
from mindgrid.shards.postings import merged as merged_words
from mindgrid.shards.segments import (
    BATCH_ROWS,
    Segment,
    SegmentInfo,
    StoredRow,
    changes_table,
    rows_batch,
    write_segment,
)
from mindgrid.shards.store import Store

Int64s = NDArray[np.int64]
NUMBERS_FILE = "numbers.npy"
_RETRAIN_GROWTH = 4


class Maintenance:
    """Seals, merges and indexes one shard. Its methods are called by one thread at a time."""

    def __init__(
        self,
        folder: Path,
        config: ShardConfig,
        journal: Journal,
        store: Store,
        clock: Clock,
        current: Manifest,
    ) -> None:
        self._folder = folder
        self._config = config
        self._journal = journal
        self._store = store
        self._clock = clock
        self.manifest = current
        self._trim_seq = journal.trimmed_seq
        """Up to here the journal is not needed any more."""

    def seal(self) -> bool:
        """Turn the tail, and the changes since the last seal, into a segment; False if empty."""
        store, dimensions = self._store, self._config.space.dimensions
        with store.lock:
            rows = list(store.tail_rows)
            vectors = store.tail.block.rows
            changes = store.rows.changes_since(self.manifest.covered_seq)
            erased = set(store.rows.erased)
            covered_seq, last_commit = store.last_seq, store.rows.last_commit
            decisions = list(store.doubts.decisions.items())
            # A promise that is open then is nowhere but in the journal, and its end comes later.
            oldest = store.doubts.oldest_seq
        if covered_seq == self.manifest.covered_seq:
            return False

        def batches() -> Iterator[pa.RecordBatch]:
            for start in range(0, len(rows), BATCH_ROWS):
                part = slice(start, start + BATCH_ROWS)
                yield rows_batch(rows[part], vectors[part], erased, dimensions)

        segments = list(self.manifest.segments)
        fresh: Segment | None = None
        if rows or len(changes[0]):
            name = self._new_name("segment")
            info = write_segment(
                self._folder / name,
                dimensions,
                0,
                batches(),
                self._words_of(rows, erased),
                changes_table(*changes),
            )
            fresh = self._open_segment(info)
            segments.append(info)
        faults.reach("seal.written")
        self._trim_seq = covered_seq if oldest is None else min(covered_seq, oldest - 1)
        tail_numbers = {stored.number for stored in rows}
        self._switch(
            msgspec.structs.replace(
                self.manifest,
                segments=segments,
                covered_seq=covered_seq,
                next_number=rows[-1].number + 1 if rows else self.manifest.next_number,
                last_commit=last_commit,
                erased=sorted(erased - tail_numbers),
                decisions=decisions,
            )
        )
        with store.lock:
            if fresh is not None:
                store.segments = (*store.segments, fresh)
                store.replace_tail(len(rows))
                store.rows.forget_erased(erased & tail_numbers)
            store.relayout()
            store.counters["seals"] += 1
        return True

    def merge(self, dead_share: float = 1 / 3) -> bool:
        """Merge one run of segments if one is due; False if there is none.

        A segment is rewritten alone once `dead_share` of its rows are dead; 0 means any.
        """
        horizon = self._horizon()
        run = self._run_to_merge(horizon, dead_share)
        if run is None:
            return False
        store = self._store
        with store.lock:
            merged = store.segments[run]
            numbers = store.rows.numbers.view()
            before = sum(segment.info.rows for segment in store.segments[: run.start])
            count = sum(segment.info.rows for segment in merged)
            dead = self._dead(horizon)
            dead[:before] = dead[before + count :] = False
            inside = numbers[before : before + count]
            kept = inside[~dead[before : before + count]]
            gone = inside[dead[before : before + count]]
        forgets = bool(len(np.setdiff1d(gone, self.manifest.erased)))
        name = self._new_name("segment")
        info = write_segment(
            self._folder / name,
            self._config.space.dimensions,
            max(segment.info.tier for segment in merged) + (len(merged) > 1),
            (batch for segment in merged for batch in segment.batches(kept)),
            _merged_words(merged, ~dead[before : before + count]),
            _changes_of(merged, gone),
        )
        faults.reach("merge.written")
        segments = list(self.manifest.segments)
        segments[run] = [info] if info.files else []
        floor = horizon if forgets else self.manifest.floor
        erased = sorted(set(self.manifest.erased) - set(gone.tolist()))
        if forgets:
            with store.lock:  # before a row is gone, so that no read misses it unknowingly
                store.history_floor = Instant(max(store.history_floor, floor))
        fresh = self._open_segment(info)
        index = self._index_without(dead)
        old = self.manifest.index
        self._switch(
            msgspec.structs.replace(
                self.manifest,
                segments=segments,
                floor=floor,
                erased=erased,
                index=old if index is not None else None,
            )
        )
        with store.lock:
            # Commits made meanwhile only added positions behind the run.
            alive = np.ones(len(store.rows), dtype=np.bool_)
            alive[: len(dead)] = ~dead
            if index is None:
                store.indexed = 0
            elif len(gone):
                places = np.where(alive, np.cumsum(alive) - 1, -1)
                index = index.renumber(places[: store.indexed].astype(np.int64))
                store.indexed = int(np.count_nonzero(alive[: store.indexed]))
            store.index = index
            if len(gone):
                store.rows.drop(alive, min(floor, self._sealed_until()))
            store.segments = (
                *store.segments[: run.start],
                *([fresh] if info.files else []),
                *store.segments[run.stop :],
            )
            store.relayout()
            store.counters["merges"] += 1
        _delete_when_unused(merged if info.files else [*merged, fresh])
        if len(gone):
            self._journal.checkpoint_wal()
            if index is not None:
                self._save_index(index, store.indexed)
        if old is not None and index is None:
            shutil.rmtree(self._folder / old.folder)
        return True

    def _index_without(self, dead: NDArray[np.bool_]) -> IvfIndex | None:
        """Return today's index; None if it must go with the dead rows, to be built anew.

        That is when nothing is left of it, and when the centre of a cell is a hard-deleted row.
        """
        store = self._store
        index = store.index
        if index is None or dead[: store.indexed].all():
            return None
        erased = dead & np.isin(store.rows.numbers.view()[: len(dead)], self.manifest.erased)
        rows = store.vectors.gather(np.flatnonzero(erased))
        return None if len(rows) and index.has_centre_in(rows) else index

    def compact(self) -> None:
        """Rewrite all that holds a dead row, so that no byte of a hard-deleted record is left."""
        self.seal()
        while self.merge(dead_share=0):
            pass
        self._journal.checkpoint_wal()
        self.index()

    def index(self) -> bool:
        """Build, extend or train anew the index over the sealed rows; False if it is good."""
        store = self._store
        with store.lock:
            sealed = len(store.rows) - len(store.tail_rows)
            indexed, current, vectors = store.indexed, store.index, store.vectors
            committed = store.rows.committed.view()[:sealed].copy()
        if sealed < self._config.index_rows_min or sealed == indexed:
            return False
        if current is None or sealed >= _RETRAIN_GROWTH * current.trained_rows:
            positions = np.flatnonzero(committed != NEVER)
            if len(positions) < self._config.index_rows_min:
                return False
            index = IvfIndex.build(vectors, positions, self._config.recall)
            store.counters["index_builds"] += 1
        else:
            fresh = np.flatnonzero(committed[indexed:] != NEVER) + indexed
            index = current.extend(vectors, fresh)
            store.counters["index_extends"] += 1
        self._save_index(index, sealed)
        with store.lock:
            store.index, store.indexed = index, sealed
        return True

    def load_index(self, info: IndexInfo) -> tuple[IvfIndex, int] | None:
        """Return the stored index in today's positions, and how many positions it covers.

        None where a merge left no sealed row.
        """
        folder = self._folder / info.folder
        with reading(folder):
            stored = np.load(folder / NUMBERS_FILE)
            index = IvfIndex.load(folder)
        numbers = self._store.rows.numbers.view()
        if not len(numbers):
            return None
        covered = int(np.searchsorted(numbers, info.last_number, side="right"))
        if len(stored) == covered and np.array_equal(stored, numbers[:covered]):
            return index, covered
        places = np.searchsorted(numbers, stored)
        held = numbers[np.minimum(places, len(numbers) - 1)] == stored
        return index.renumber(np.where(held, places, -1).astype(np.int64)), covered

    def _save_index(self, index: IvfIndex, covered: int) -> None:
        with self._store.lock:
            numbers = self._store.rows.numbers.view()[:covered].copy()
        folder = self._folder / self._new_name("index")
        with writing(folder):
            index.save(folder)
            np.save(folder / NUMBERS_FILE, numbers)
            sync_tree(folder)
            info = IndexInfo(folder.name, int(numbers[-1]), digest_tree(folder))
        faults.reach("index.written")
        old = self.manifest.index
        self._switch(msgspec.structs.replace(self.manifest, index=info))
        if old is not None:
            shutil.rmtree(self._folder / old.folder)

    def _switch(self, new: Manifest) -> None:
        """Make `new` the manifest, durably, and trim the journal to what it does not cover."""
        sync(self._folder)  # the new folder's name
        faults.reach("manifest.switching")
        self._journal.commit_manifest(manifest.encode(new), new.covered_seq, self._trim_seq)
        self.manifest = new
        faults.reach("manifest.switched")

    def _run_to_merge(self, horizon: Instant, dead_share: float) -> slice | None:
        with self._store.lock:
            dead = self._dead(horizon)
            infos = [segment.info for segment in self._store.segments]
        counts: list[int] = []
        start = 0
        for info in infos:
            counts.append(int(np.count_nonzero(dead[start : start + info.rows])))
            start += info.rows
        return manifest.run_to_merge(infos, counts, self._config.merge_fanout, dead_share)

    def _dead(self, horizon: Instant) -> NDArray[np.bool_]:
        """Return by position which sealed rows no read can ask for any more. Under the lock.

        Only what the manifest covers counts: later commits still stand in the journal, which
        replays onto the rows it was written against.
        """
        rows = self._store.rows
        numbers = rows.numbers.view()
        # A row that was replaced after the last seal may be one that the journal still changes.
        dead = rows.replaced.view() <= min(horizon, self._sealed_until())
        dead |= np.isin(numbers, self.manifest.erased)
        sealed = len(numbers) - len(self._store.tail_rows)
        holes = rows.committed.view()[:sealed] == NEVER
        dead[:sealed] |= holes & ~np.isin(
            numbers[:sealed], np.fromiter(rows.erased, np.int64, len(rows.erased))
        )
        dead[sealed:] = False
        return dead

    def _sealed_until(self) -> int:
        return self._store.sealed_until(self.manifest.covered_seq, self.manifest.last_commit)

    def _horizon(self) -> Instant:
        """Return the instant before which replaced rows are no longer kept."""
        history, now = self._config.history, self._clock.now()
        oldest = now - int(KNOWN_S_MIN * 1e6)
        horizon = 0
        if history.age_s is not None:
            horizon = now - int(history.age_s * 1e6)
        if history.rows_max is not None:
            with self._store.lock:
                replaced = self._store.rows.replaced.view()
                past = np.sort(replaced[replaced != NEVER])
            if len(past) > history.rows_max:
                horizon = max(horizon, int(past[len(past) - history.rows_max - 1]))
        return Instant(max(0, min(horizon, oldest)))

    def _words_of(self, rows: Sequence[StoredRow], erased: set[int]) -> WordBlock | None:
        if not rows:
            return None
        texts = ["" if stored.number in erased else stored.row.content for stored in rows]
        return WordBlock.of(texts, analyzer_of(self._config.text_search))

    def _open_segment(self, info: SegmentInfo) -> Segment:
        dimensions, analyzer = self._config.space.dimensions, analyzer_of(self._config.text_search)
        return Segment(self._folder / info.folder, info, dimensions, analyzer)

    def _new_name(self, kind: str) -> str:
        return f"{kind}-{uuid.uuid4().hex[:16]}"


def _merged_words(segments: Sequence[Segment], kept: NDArray[np.bool_]) -> WordBlock | None:
    """Return the words of the kept rows; None if none is kept."""
    blocks = [segment.words for segment in segments if segment.words is not None]
    if not kept.any():
        return None
    bounds = np.cumsum([len(block) for block in blocks])[:-1]
    return merged_words(list(zip(blocks, np.split(kept, bounds), strict=True)))


def _changes_of(segments: Sequence[Segment], gone: Int64s) -> pa.Table:
    """Return the segments' sealed changes without those of rows that are gone."""
    changes = pa.concat_tables([segment.changes() for segment in segments])
    numbers = changes.column("number").to_numpy()
    return changes.filter(pa.array(~np.isin(numbers, gone)))


def _delete_when_unused(segments: Sequence[Segment]) -> None:
    """Delete each folder once the last search that still reads from it is over."""
    for segment in segments:
        cleanup = weakref.finalize(segment, shutil.rmtree, segment.folder, ignore_errors=True)
        # At exit it is left to the next open, which knows it for an orphan.
        cleanup.atexit = False
