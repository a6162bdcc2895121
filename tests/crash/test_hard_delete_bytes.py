"""After a hard delete and a compaction no file holds a byte of the record: each is decoded."""

from __future__ import annotations

import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import msgspec
import numpy as np
import pyarrow as pa
import pytest
from tests.support.clocks import TurnedClock
from tests.support.shards import do, draft, open_here

from mindgrid.shards.shard import LanceShard
from mindgrid.shards.types import Delete, Draft, Upsert
from mindgrid.shards.vectors import units

VECTOR = np.array([0.731, -1.913, 2.117, -0.377], np.float32)
SECRETS = {
    "id": b"id-4d1e77",
    "content": b"content-93b1c2",
    "a word": b"zebrafinch7",
    "payload": b"payload-\x00\x80\xff-5f0a",
    "metadata key": b"key-77aa10",
    "metadata value": b"value-c0ffee",
    "source": b"source-8e8e8e",
    "supersedes": b"earlier-1b2b3b",
    "vector": VECTOR.tobytes(),
}
DIRECTION = units(VECTOR[None, :]).tobytes()
"""What an index learns from a vector."""


def secret(version: int = 1) -> Draft:
    """Return a record each part of which can be told from everything else."""
    return Draft(
        SECRETS["id"].decode(),
        f"version {version} of {SECRETS['content'].decode()} and a {SECRETS['a word'].decode()}",
        VECTOR,
        payload=SECRETS["payload"],
        metadata={SECRETS["metadata key"].decode(): SECRETS["metadata value"].decode()},
        supersedes=(SECRETS["supersedes"].decode(),),
        source=SECRETS["source"].decode(),
    )


def places(folder: Path) -> dict[str, set[str]]:
    """Return for each secret the kinds of files in which it is found."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for kind, content in decoded(folder):
        for name, value in SECRETS.items():
            if value in content:
                found[name].add(kind)
        if DIRECTION in content:
            found["vector"].add(f"direction in {kind}")
    return dict(found)


def decoded(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield every file's bytes as they are, and what can be read from them, each with its kind."""
    for path in folder.rglob("*"):
        if path.is_file():
            yield (
                path.name if path.suffix != ".lance" else f"raw {path.parts[-3]}",
                path.read_bytes(),
            )
        if path.name == "values.arrow":
            table = pa.ipc.open_file(pa.OSFile(str(path))).read_all()
            yield "values.arrow, read", flattened(table.to_pylist())
        if path.is_dir() and path.suffix == ".lance":
            dataset = lance.dataset(path)
            for version in dataset.versions():
                rows = dataset.checkout_version(version["version"]).to_table().to_pylist()
                yield f"{path.name}, read", flattened(rows)
    copy = folder.with_name("copy of the journal")
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for name in ("journal.sqlite", "journal.sqlite-wal"):
        if (folder / name).exists():
            shutil.copy(folder / name, copy / name)
    with sqlite3.connect(copy / "journal.sqlite") as database:
        for table in ("entries", "results", "state"):
            yield "journal, read", flattened(database.execute(f"SELECT * FROM {table}").fetchall())
    database.close()


def flattened(value: Any) -> bytes:
    """Return all bytes, texts and vectors in a nested value, one after the other."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict):
        return b"|".join(flattened(part) for item in value.items() for part in item)
    if isinstance(value, list | tuple):
        if value and all(isinstance(number, float) for number in value):
            return np.array(value, np.float32).tobytes()
        return b"|".join(map(flattened, value))
    return b""


def fill(shard: LanceShard, first: int) -> None:
    """Write 24 other records, which seals the tail."""
    do(shard, Upsert("", tuple(draft(n) for n in range(first, first + 24))))


JOURNAL = "journal, read"
SEALED = {
    "id": {"rows.lance, read"},
    "content": {"rows.lance, read", "values.arrow, read", "values.arrow"},
    "a word": {"rows.lance, read", "values.arrow, read", "values.arrow", "words.bin"},
    "payload": {"rows.lance, read"},
    "metadata key": {"rows.lance, read", "values.arrow, read"},
    "metadata value": {"rows.lance, read", "values.arrow, read"},
    "source": {"rows.lance, read", "values.arrow, read"},
    "supersedes": {"rows.lance, read", "values.arrow, read"},
    "vector": {"rows.lance, read", "vectors.f32"},
}
"""Where each secret must be found once sealed, or this scan would be blind."""


def in_the_tail(shard: LanceShard) -> None:
    fill(shard, 0)
    do(shard, Upsert("tx", (secret(),)))


def sealed(shard: LanceShard) -> None:
    do(shard, Upsert("tx", (secret(),)))
    fill(shard, 0)


def sealed_and_in_the_tail(shard: LanceShard) -> None:
    sealed(shard)
    do(shard, Upsert("", (secret(2),)))


def in_two_segments_with_changes(shard: LanceShard) -> None:
    sealed(shard)
    do(shard, Upsert("", (secret(2),)))
    do(shard, Delete("", SECRETS["id"].decode()))
    fill(shard, 24)


def merged(shard: LanceShard) -> None:
    sealed_and_in_the_tail(shard)
    fill(shard, 24)
    fill(shard, 48)
    assert shard.counters["merges"] > 0


def indexed(shard: LanceShard) -> None:
    merged(shard)
    fill(shard, 72)
    assert shard.counters["index_extends"] > 0


def deleted_and_written_again_and_deleted(shard: LanceShard) -> None:
    indexed(shard)
    do(shard, Delete("", SECRETS["id"].decode(), hard=True))
    do(shard, Upsert("", (secret(3),)))


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        in_the_tail,
        sealed,
        sealed_and_in_the_tail,
        in_two_segments_with_changes,
        merged,
        indexed,
        deleted_and_written_again_and_deleted,
    ],
)
def test_nothing_of_a_hard_deleted_record_is_left_after_compaction(
    tmp_path: Path, write: Callable[[LanceShard], None], reopened: bool
) -> None:
    folder, clock = tmp_path / "s0", TurnedClock()
    shard = open_here(folder, clock=clock)
    write(shard)
    before = places(folder)
    assert before.keys() == SECRETS.keys()
    for name, kinds in SEALED.items():
        expected = {JOURNAL} if write is in_the_tail else kinds
        assert before[name] >= expected, f"the scan does not see the {name}"
    do(shard, Delete("gone", SECRETS["id"].decode(), hard=True))
    if reopened:
        shard.close()
        shard = open_here(folder, 2, clock=clock)
    shard.compact()
    assert places(folder) == {}
    do(shard, Upsert("", (draft(100),)))
    shard.close()
    assert places(folder) == {}
    shard = open_here(folder, 3, clock=clock)
    assert places(folder) == {}
    shard.close()


def test_a_record_alone_in_its_shard_leaves_nothing_either(tmp_path: Path) -> None:
    folder, clock = tmp_path / "s0", TurnedClock()
    shard = open_here(folder, clock=clock)
    do(shard, Upsert("", (secret(),)))
    do(shard, Delete("", SECRETS["id"].decode(), hard=True))
    shard.compact()
    assert places(folder) == {}
    shard.close()
    shard = open_here(folder, 2, clock=clock)
    assert (shard.status().rows, shard.status().records) == (0, 0)
    shard.close()


def test_an_index_of_which_every_record_is_deleted_goes_with_them(tmp_path: Path) -> None:
    folder, clock = tmp_path / "s0", TurnedClock()
    shard = open_here(folder, clock=clock)
    for first in range(0, 72, 24):
        fill(shard, first)
    assert shard.status().indexed_rows > 0
    for n in range(72):
        do(shard, Delete("", draft(n).id, hard=True))
    shard.compact()
    do(shard, Upsert("", (draft(100),)))
    shard.close()
    shard = open_here(folder, 2, clock=clock)
    assert (shard.status().rows, shard.status().records) == (1, 1)
    shard.close()


def test_the_index_forgets_a_direction_that_only_the_deleted_record_had(tmp_path: Path) -> None:
    """The centre of a cell with one row in it is that row's vector."""
    folder, clock = tmp_path / "s0", TurnedClock()
    shard = open_here(folder, clock=clock)
    for first in range(0, 72, 24):
        near = [
            msgspec.structs.replace(one, vector=one.vector / np.float32(10) - VECTOR)
            for one in map(draft, range(first, first + 24))
        ]
        more = (secret(),) if first == 0 else ()
        do(shard, Upsert("", (*near, *more)))
    assert "direction in ivf.faiss" in places(folder)["vector"]
    do(shard, Delete("", SECRETS["id"].decode(), hard=True))
    shard.compact()
    assert places(folder) == {}
    shard.close()
