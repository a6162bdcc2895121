"""The work behind a log's back: sealing what is new, merging runs, dropping what was removed.

As in the semantic block (`shards.maintenance`): new folders are written and synced, the manifest is
switched in one journal transaction, then readers see it. One thread at a time.
"""

from __future__ import annotations

import shutil
import uuid
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from mindgrid.shards import faults
from mindgrid.shards.episodic.runs import (
    Run,
    RunInfo,
    batches_of,
    tombstones_table,
    write_run,
)
from mindgrid.shards.episodic.store import LogStore
from mindgrid.shards.episodic.types import LogConfig
from mindgrid.shards.errors import Corruption, FormatTooNew
from mindgrid.shards.files import FileDigest, sync
from mindgrid.shards.journal import Journal
from mindgrid.shards.manifest import run_to_merge

FORMAT = 1
_DEAD_SHARE = 1 / 3


class LogManifest(msgspec.Struct, frozen=True):
    """A log's sealed state after the commit `covered_seq`; the journal holds what came later.

    `key` is that of the event ids. `first` is the oldest cursor that was not removed, `last` the
    newest that was given.
    """

    key: str
    format: int = FORMAT
    runs: list[RunInfo] = []
    covered_seq: int = 0
    first: int = 1
    last: int = 0
    last_commit: int = 0

    @property
    def folders(self) -> list[tuple[str, tuple[FileDigest, ...]]]:
        """The folders this manifest names, each with the digests of its files."""
        return [(run.folder, run.files) for run in self.runs]


def encode_manifest(manifest: LogManifest) -> bytes:
    """Return the manifest as JSON, so that a person can read it too."""
    return msgspec.json.encode(manifest)


def decode_manifest(blob: bytes, journal: Path) -> LogManifest:
    """Return the manifest in these bytes; raises Corruption naming the journal, or FormatTooNew."""
    try:
        manifest = msgspec.json.decode(blob, type=LogManifest)
    except msgspec.MsgspecError as error:
        raise Corruption(str(journal), f"its manifest cannot be read: {error}") from error
    if manifest.format > FORMAT:
        raise FormatTooNew(str(journal), manifest.format, FORMAT)
    return manifest


class LogMaintenance:
    """Seals and merges one log. Its methods are called by one thread at a time."""

    def __init__(
        self, folder: Path, config: LogConfig, journal: Journal, store: LogStore, now: LogManifest
    ) -> None:
        self._folder = folder
        self._config = config
        self._journal = journal
        self._store = store
        self.manifest = now

    def seal(self) -> bool:
        """Turn what is new into a run, and drop the runs of removed events; False if nothing is."""
        store = self._store
        with store.lock:
            if store.last_seq == self.manifest.covered_seq:
                return False
            first, timestamps, events = store.unsealed()
            tombstones = dict(store.tombstones)
            covered_seq, last_commit = store.last_seq, store.last_commit
            oldest, last = store.columns.first, store.columns.last
            gone = [run for run in store.runs if run.info.last < oldest]
        # A run of tombstones alone has no events: it stands behind the last cursor.
        infos = [run for run in self.manifest.runs if not _is_gone(run, oldest)]
        fresh: Run | None = None
        if events or tombstones:
            info = write_run(
                self._new_folder(),
                first,
                0,
                batches_of(first, timestamps, events),
                tombstones_table(list(tombstones), list(tombstones.values())),
            )
            fresh = Run(self._folder / info.folder, info)
            infos.append(info)
        faults.reach("seal.written")
        self._switch(
            msgspec.structs.replace(
                self.manifest,
                runs=infos,
                covered_seq=covered_seq,
                first=oldest,
                last=last,
                last_commit=last_commit,
            )
        )
        with store.lock:
            kept = tuple(run for run in store.runs if run not in gone)
            store.runs = (*kept, fresh) if fresh is not None else kept
            store.sealed_to = max(store.sealed_to, last)
            for cursor, at in tombstones.items():
                if store.tombstones.get(cursor) == at:
                    del store.tombstones[cursor]
            store.forget_recent()
            store.counters["seals"] += 1
        _delete_when_unused(gone)
        return True

    def merge(self, dead_share: float = _DEAD_SHARE) -> bool:
        """Merge neighbours, or rewrite a run that has lost `dead_share`; False if none is due."""
        store = self._store
        with store.lock:
            runs = store.runs
        # What the manifest does not cover is not lost yet: the journal replays onto these runs.
        oldest = self.manifest.first
        infos = [run.info for run in runs]
        dead = [min(max(0, oldest - info.first), info.rows) for info in infos]
        due = run_to_merge(infos, dead, self._config.merge_fanout, dead_share)
        if due is None:
            return False
        merged = runs[due]
        info = self._merged(merged, oldest)
        fresh = Run(self._folder / info.folder, info)
        faults.reach("merge.written")
        named = list(self.manifest.runs)
        named[due] = [info]
        self._switch(msgspec.structs.replace(self.manifest, runs=named))
        with store.lock:
            at = store.runs.index(merged[0])
            store.runs = (*store.runs[:at], fresh, *store.runs[at + len(merged) :])
            store.counters["merges"] += 1
        _delete_when_unused(merged)
        return True

    def compact(self) -> None:
        """Rewrite all that holds a removed event, so that no byte of one is left on the disk."""
        self.seal()
        while self.merge(dead_share=0):
            pass
        self._journal.checkpoint_wal()

    def _merged(self, runs: Sequence[Run], oldest: int) -> RunInfo:
        tombstones: dict[int, int] = {}
        for run in runs:
            cursors, times = run.tombstones()
            tombstones.update(
                (cursor, at) for cursor, at in zip(cursors, times, strict=True) if cursor >= oldest
            )
        return write_run(
            self._new_folder(),
            max(runs[0].info.first, oldest),
            max(run.info.tier for run in runs) + (len(runs) > 1),
            (batch for run in runs for batch in run.table(oldest).to_batches()),
            tombstones_table(list(tombstones), list(tombstones.values())),
        )

    def _switch(self, new: LogManifest) -> None:
        """Make `new` the manifest, durably, and trim the journal to what it does not cover."""
        sync(self._folder)  # the new folder's name
        faults.reach("manifest.switching")
        self._journal.commit_manifest(encode_manifest(new), new.covered_seq)
        self.manifest = new
        faults.reach("manifest.switched")

    def _new_folder(self) -> Path:
        return self._folder / f"run-{uuid.uuid4().hex[:16]}"


def _is_gone(run: RunInfo, oldest: int) -> bool:
    return run.last < oldest


def _delete_when_unused(runs: Iterable[Run]) -> None:
    """Delete each folder once the last read that still needs it is over."""
    for run in runs:
        cleanup = weakref.finalize(run, shutil.rmtree, run.folder, ignore_errors=True)
        # At exit it is left to the next open, which knows it for an orphan.
        cleanup.atexit = False
