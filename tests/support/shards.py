"""Shards of which every step runs in the calling thread, and the whole of what one answers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindgrid.shards.clock import Clock, Instant, SystemClock
from mindgrid.shards.config import History, ShardConfig
from mindgrid.shards.driver import Found
from mindgrid.shards.groups import Workers
from mindgrid.shards.shard import LanceShard
from mindgrid.shards.types import (
    Answer,
    Command,
    Delete,
    Draft,
    Query,
    Record,
    Selection,
    Space,
    Stamp,
    Upsert,
    Want,
)
from tests.support.clocks import START, TurnedClock

DIMENSIONS = 4
SMALL = ShardConfig(
    space=Space("fake", "fake", "", DIMENSIONS),
    history=History(age_s=None),
    seal_rows=24,
    seal_after_s=1e9,
    exact_rows_max=16,
    index_rows_min=48,
    merge_fanout=3,
    skew_max_s=0.0,
)
ALL = Want.VALUES | Want.PAYLOAD | Want.VECTOR
_IDS = [*(f"r{n:03}" for n in range(192)), "late", "gone", "doomed", "brief"]
_PAST = Instant(START + 3_500)


class Here(Executor):
    """Runs what it is given at once, in the thread that gives it."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - handed to whoever waits for the future
            future.set_exception(error)
        return future


def open_here(
    folder: Path, epoch: int = 1, config: ShardConfig = SMALL, clock: Clock | None = None
) -> LanceShard:
    """Open a shard whose commits seal, merge and index before they are answered."""
    here = Here()
    return LanceShard.open(folder, config, epoch, clock or SystemClock(), Workers(here, here))


def do(shard: LanceShard, command: Command) -> None:
    """Carry it out; raises what it fails with."""
    shard.submit(command).result()


def history() -> Iterator[Command]:
    """Yield writes that leave a bit of everything behind in a shard of the config SMALL.

    In the end: merged and young segments with payloads and lifecycle changes, an index, erased
    rows both in a segment and in the tail, and commits in the journal alone.
    """
    for start in range(0, 144, 24):
        yield Upsert(f"tx{start}", tuple(draft(n) for n in range(start, start + 24)))
    yield Delete("", "r007")
    yield Upsert("", (draft(0, "r000 anew", supersedes=("r001", "r010")), draft(195, id="doomed")))
    yield Upsert("", tuple(draft(n) for n in range(144, 168)))
    yield Delete("", "doomed", hard=True)
    yield Delete("", "r020", hard=True)
    yield Upsert("tx168", tuple(draft(n) for n in range(168, 192)))
    yield Upsert("", (draft(192, id="late"), draft(193, id="brief"), draft(194, id="gone")))
    yield Delete("", "brief", hard=True)
    yield Delete("", "gone")
    yield Upsert("last", (draft(3, "r003 anew", supersedes=("r011",)),))


def draft(n: int, content: str = "", id: str = "", supersedes: tuple[str, ...] = ()) -> Draft:
    """Return the n-th record; the same one whenever it is asked for."""
    vector = np.random.default_rng(n).normal(size=DIMENSIONS).astype(np.float32)
    return Draft(
        id or f"r{n:03}",
        content or f"content of {n}",
        vector,
        payload=f"payload {n}".encode() if n % 3 == 0 else b"",
        metadata={"kind": "abc"[n % 3], "n": str(n)},
        supersedes=supersedes,
        source=f"source/{n}",
    )


Answers = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class State:
    """Everything that a shard answers, to be compared: now, and as known at a past instant."""

    now: Answers
    past: Answers = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """A folder as a kill leaves it, and what the shard answered after each of its commits."""

    folder: Path
    states: list[State]

    @property
    def whole(self) -> State:
        """What it answered last."""
        return self.states[-1]


def store(folder: Path, killed: Path) -> Stored:
    """Write `history` into a new shard; `killed` becomes its folder as a kill would leave it.

    The first state is that of an empty shard, the others those after each commit.
    """
    clock = TurnedClock()
    shard = open_here(folder, clock=clock)
    states = [state(shard, clock.now())]
    for command in history():
        clock.turn(1_000)
        do(shard, command)
        states.append(state(shard, clock.now()))
    shutil.copytree(folder, killed)
    shard.close()
    return Stored(killed, states)


def state(shard: LanceShard, now: Instant) -> State:
    """Return all that the shard knows of `history`."""
    past = _records(shard, now, Selection(known_at=_PAST)) if now > _PAST else ()
    answers: list[object] = []
    for invalidated in (False, True):
        answers.append(_records(shard, now, Selection(include_invalidated=invalidated)))
    for seed in (1, 2):
        vector = np.random.default_rng(1_000 + seed).normal(size=DIMENSIONS).astype(np.float32)
        for exact in (False, True):
            answers.append(_hits(shard, Query(vector, 20, want=ALL, exact=exact), now))
        filtered = Selection(equals={"kind": "b"})
        answers.append(_hits(shard, Query(vector, 20, filtered, exact=True), now))
    return State(tuple(answers), past)


def opened_state(folder: Path, epoch: int = 9) -> State:
    """Open a shard that holds (a part of) `history`, and return what it answers."""
    clock = TurnedClock(Instant(START + 1_000_000))
    shard = open_here(folder, epoch, clock=clock)
    try:
        return state(shard, clock.now())
    finally:
        shard.close()


def _records(shard: LanceShard, now: Instant, selection: Selection) -> Answers:
    found = shard.get(_IDS, selection, ALL, Stamp(now))
    assert isinstance(found, Found), found
    return tuple(_plain(record) for record in found.records)


def _hits(shard: LanceShard, query: Query, now: Instant) -> Answers:
    (answer,) = shard.search([query], Stamp(now))
    assert isinstance(answer, Answer), answer
    return tuple((hit.id, hit.score, _plain(hit.record)) for hit in answer.hits)


def _plain(record: Record | None) -> tuple[object, ...] | None:
    if record is None:
        return None
    return (
        *(record.id, record.content, record.vector.tobytes(), record.payload, record.source),
        *(tuple(sorted(record.metadata.items())), record.supersedes, record.version),
        *(record.created_at, record.valid_from, record.valid_to, record.deleted_at),
    )


def contents(folder: Path, but: Iterable[str] = ()) -> dict[str, bytes]:
    """Return every file below `folder` with its bytes, without those named in `but`.

    An empty log of SQLite is as good as none, and left out.
    """
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in but
    }
    if not found.get("journal.sqlite-wal", b"-"):
        del found["journal.sqlite-wal"]
    return found
