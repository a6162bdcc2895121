"""Makes the stored namespace that a test opens for ever after: python -m tests.format.make FOLDER.

FOLDER becomes a server's storage with one namespace of two shards, as a kill leaves it. What is
committed as `v1` was made by the first release and is never made anew: a release that changes the
format adds `v2` beside it, and opens both.

    120 fillers a shard   in the third and fourth dimension: merged segments and an index
    the rest              in the first two, so that their scores can be worked out by hand
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tests.support.clocks import TurnedClock
from tests.support.shards import do, open_here

from mindgrid.cluster.catalog import Catalog
from mindgrid.cluster.placement import shard_of
from mindgrid.cluster.spec import GridSpec, NamespaceKey, NamespaceSpec, shard_folder
from mindgrid.shards.clock import Instant
from mindgrid.shards.config import History, ShardConfig
from mindgrid.shards.types import Command, Delete, Draft, Expire, Space, Upsert, Vector

START = Instant(1_767_225_600_000_000)
"""2026-01-01T00:00:00Z; the n-th commit of a shard is n seconds later."""
SECOND = 1_000_000
KEY = NamespaceKey("semantic", "notes")
SHARDS = 2
SPEC = NamespaceSpec(
    KEY,
    ShardConfig(
        space=Space("fake", "fake", "1", 4),
        history=History(age_s=None),
        seal_rows=40,
        seal_after_s=1e9,
        exact_rows_max=16,
        index_rows_min=60,
        merge_fanout=3,
        skew_max_s=0.0,
    ),
    shards=SHARDS,
)


def main(storage: Path) -> None:
    """Write the namespace into a new folder."""
    spec = GridSpec(storage, (SPEC,), hosts=1)
    catalog = Catalog(storage, TurnedClock(START))
    catalog.configure(spec)
    catalog.close()
    for shard in range(SHARDS):
        _write(shard_folder(storage, KEY, 1, shard), shard)
    for lock in storage.rglob("LOCK"):
        lock.unlink()


def _write(folder: Path, shard: int) -> None:
    clock = TurnedClock(START)
    opened = open_here(folder, 1, SPEC.config, clock)
    for command in sealed(shard):
        clock.turn(SECOND)
        do(opened, command)
    opened.compact()
    for command in since_the_compaction(shard):
        clock.turn(SECOND)
        do(opened, command)
    # Opened anew, so that the log is short: it holds what follows and nothing else.
    opened.close()
    opened = open_here(folder, 1, SPEC.config, clock)
    for command in in_the_journal_alone(shard):
        clock.turn(SECOND)
        do(opened, command)
    killed = folder.with_name("killed")
    shutil.copytree(folder, killed)
    opened.close()
    shutil.rmtree(folder)
    (killed / "journal.sqlite-shm").unlink()
    killed.rename(folder)


def sealed(shard: int) -> Iterator[Command]:
    """Yield three times forty rows: segments that are merged, and an index over them."""
    mine = [n for n in range(400) if shard_of(f"filler-{n}", SHARDS) == shard][:120]
    for start in (0, 40, 80):
        yield Upsert(f"fill-{start}", tuple(filler(n) for n in mine[start : start + 40]))


def since_the_compaction(shard: int) -> Iterator[Command]:
    """Yield revisions, deletions and a seal, and then a deletion of sealed rows."""
    yield from _here(shard, Upsert("first", (plain("alpha", 1, 0, "alpha, first version"),)))
    yield from _here(shard, Upsert("", (plain("alpha", 3, 4, "alpha, second version"),)))
    yield from _here(shard, Upsert("", (rich(),)))
    yield from _here(shard, Upsert("", (plain("wiki", 0, 2, "The notes are in the wiki."),)))
    moved = plain("repo", 0, 5, "The notes are in the repository.", "wiki")
    yield from _here(shard, Upsert("", (moved,)))
    yield from _here(shard, Upsert("", (plain("dropped", 1, 1, "soft-deleted"),)))
    yield from _here(shard, Delete("drop", "dropped"))
    yield from _here(
        shard, Upsert("", (plain("erased", 2, 1, "hard-deleted after it was sealed"),))
    )
    more = [n for n in range(400, 800) if shard_of(f"filler-{n}", SHARDS) == shard][:41]
    yield Upsert("seal", tuple(filler(n) for n in more))
    yield from _here(shard, Delete("erase", "erased", hard=True))
    yield from _here(shard, Delete("", f"filler-{more[0]}"))
    yield Upsert("", tuple(filler(n, "revised") for n in more[1:]))


def in_the_journal_alone(shard: int) -> Iterator[Command]:
    """Yield what no segment holds."""
    yield from _here(shard, Upsert("", (plain("tail", -1, 0, "in the journal alone"),)))
    yield from _here(shard, Upsert("", (plain("brief", 1, 2, "hard-deleted at once"),)))
    yield from _here(shard, Delete("", "brief", hard=True))
    yield from _here(shard, Delete("last", "repo"))


def _here(shard: int, command: Command) -> Iterator[Command]:
    assert not isinstance(command, Expire), "it has no shard"
    id = command.id if isinstance(command, Delete) else command.drafts[0].id
    if shard_of(id, SHARDS) == shard:
        yield command


def plain(id: str, x: float, y: float, content: str, *supersedes: str) -> Draft:
    """Return a record in the first two dimensions."""
    return Draft(id, content, _vector(x, y, 0, 0), metadata={"kind": "note"}, supersedes=supersedes)


def rich() -> Draft:
    """Return a record with a value in every field."""
    return Draft(
        "ünï/códe#?",
        "内容 with \N{ROCKET} and \x00",
        _vector(4, 3, 0, 0),
        payload=bytes(range(256)),
        metadata={"kind": "rich", "ключ": "значение", "": "", "n": "-2.5e3"},
        created_at=Instant(START - 10 * SECOND),
        valid_from=Instant(START - 5 * SECOND),
        valid_to=Instant(START + 3_600 * SECOND),
        source="events/42",
    )


def filler(n: int, content: str = "filler") -> Draft:
    """Return the n-th of many records that are at a right angle to all others."""
    return Draft(
        f"filler-{n}",
        f"{content} {n}",
        _vector(0, 0, np.cos(n), np.sin(n)),
        payload=bytes([n % 256]),
        metadata={"kind": "filler", "n": str(n)},
    )


def _vector(*values: float) -> Vector:
    return np.array(values, dtype=np.float32)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
