"""Two processes on one shard's folder: exactly one can write, whatever happens to the other."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.shards import do, draft, open_here

from mindgrid.shards.clock import SystemClock
from mindgrid.shards.driver import Found
from mindgrid.shards.errors import StorageLocked
from mindgrid.shards.shard import LanceShard
from mindgrid.shards.types import Selection, Stamp, Upsert, Want

ROOT = Path(__file__).resolve().parents[2]

_OWNER = """
import os, sys
from pathlib import Path
from mindgrid.shards.errors import MindgridError
from mindgrid.shards.types import Upsert
from tests.support.shards import do, draft, open_here
for line in sys.stdin:
    order, *words = line.split()
    try:
        if order == "open":
            folder = Path(words[0])
            shard = open_here(folder)
        elif order == "write":
            do(shard, Upsert("", (draft(0, words[0], id=words[0]),)))
        elif order == "fill":  # enough to seal, merge and index
            for start in range(0, 144, 24):
                do(shard, Upsert("", tuple(draft(n) for n in range(start, start + 24))))
        elif order == "compact":
            shard.compact()
        elif order == "stray":  # drops every POSIX lock of this process on the file
            for name in ("journal.sqlite", "journal.sqlite-shm"):
                os.close(os.open(folder / name, os.O_RDONLY))
        elif order == "blind":  # as if the LOCK file's guard did not exist
            shard._lock.is_held = lambda: True
        elif order == "close":
            shard.close()
        print("ok", flush=True)
    except MindgridError as error:
        print(type(error).__name__, flush=True)
"""


class Owner:
    """A process that does with a folder what it is told."""

    def __init__(self) -> None:
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OWNER],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, order: str) -> str:
        self.ask(order)
        return self.answer()

    def ask(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        """Return `ok`, or the name of the error."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture(scope="module")
def process() -> Iterator[Owner]:
    """One for all tests, as it takes seconds to import what a shard needs."""
    started = Owner()
    yield started
    started.end()


@pytest.fixture
def owner(process: Owner, tmp_path: Path) -> Iterator[Owner]:
    """A process that has the shard in `tmp_path / "s0"`, of epoch 1."""
    assert process.tell(f"open {tmp_path / 's0'}") == "ok"
    yield process
    process.send(signal.SIGCONT)
    assert process.tell("close") == "ok"


def written(shard: LanceShard, ids: list[str]) -> list[str]:
    """Return those of the ids that are there, once each."""
    found = shard.get(ids, Selection(), Want.VALUES, Stamp(SystemClock().now()))
    assert isinstance(found, Found)
    assert all(record is None or record.version == 1 for record in found.records)
    return [record.id for record in found.records if record is not None]


def assert_refused(folder: Path, owner: Owner) -> None:
    with pytest.raises(StorageLocked, match=f"process {owner.process.pid} "):
        open_here(folder, 2)


def test_a_second_process_is_refused_and_told_who_has_it(owner: Owner, tmp_path: Path) -> None:
    assert owner.tell("write a") == "ok"
    assert_refused(tmp_path / "s0", owner)
    assert owner.tell("write b") == "ok"
    assert owner.tell("close") == "ok"
    shard = open_here(tmp_path / "s0", 2)
    assert written(shard, ["a", "b"]) == ["a", "b"]
    shard.close()


def test_a_stopped_owner_keeps_the_shard(owner: Owner, tmp_path: Path) -> None:
    owner.send(signal.SIGSTOP)
    assert_refused(tmp_path / "s0", owner)
    owner.send(signal.SIGCONT)
    assert owner.tell("write a") == "ok"


@pytest.mark.parametrize("stopped", [False, True])
def test_a_stray_open_and_close_in_the_owner_lets_nobody_in(
    owner: Owner, tmp_path: Path, stopped: bool
) -> None:
    assert owner.tell("fill") == "ok"
    assert owner.tell("stray") == "ok"
    if stopped:
        owner.send(signal.SIGSTOP)
    assert_refused(tmp_path / "s0", owner)
    owner.send(signal.SIGCONT)
    assert owner.tell("write a") == "ok"
    assert owner.tell("compact") == "ok"


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("stray", [False, True])
@pytest.mark.parametrize("order", ["write late", "compact"])
def test_an_owner_whose_lock_was_lost_cannot_change_what_the_next_one_has(
    owner: Owner, tmp_path: Path, blind: bool, stray: bool, order: str
) -> None:
    """Someone deleted LOCK while the owner was stopped: the journal's head row fences it."""
    folder = tmp_path / "s0"
    assert owner.tell("fill") == "ok"
    assert owner.tell("write a") == "ok"
    if stray:
        assert owner.tell("stray") == "ok"
    if blind:
        assert owner.tell("blind") == "ok"
    owner.send(signal.SIGSTOP)
    (folder / "LOCK").unlink()
    shard = open_here(folder, 2)
    do(shard, Upsert("", (draft(1, "b", id="b"),)))
    owner.send(signal.SIGCONT)
    assert owner.tell(order) == ("Moved" if blind else "Unavailable")
    assert owner.tell("write later") in ("Moved", "Unavailable")
    do(shard, Upsert("", (draft(1, "c", id="c"),)))
    shard.compact()
    assert written(shard, ["a", "b", "c", "late", "later"]) == ["a", "b", "c"]
    assert owner.tell("close") == "ok"
    shard.close()
    shard = open_here(folder, 3)
    assert written(shard, ["a", "b", "c", "late", "later"]) == ["a", "b", "c"]
    assert len(written(shard, [f"r{n:03}" for n in range(144)])) == 144
    shard.close()


def compete(folder: Path, seed: int, rounds: int) -> list[str]:
    """Let two processes open, write, close and die at random; return the acknowledged ids.

    Checks that no two of them had the shard at the same time.
    """
    rng = random.Random(seed)
    owners = [Owner() for _ in range(2)]
    held: set[int] = set()
    acknowledged: list[str] = []
    for round_ in range(rounds):
        # All are asked at once, and then all answers are read.
        orders = {
            at: rng.choice([f"write {round_}-{at}"] * 3 + ["close"])
            if at in held
            else f"open {folder}"
            for at in range(2)
        }
        for at, order in orders.items():
            owners[at].ask(order)
        for at, order in orders.items():
            word = owners[at].answer()
            if order.startswith("open"):
                assert word in ("ok", "StorageLocked"), f"{seed=}: {word}"
                held |= {at} if word == "ok" else set()
            elif order == "close":
                held.remove(at)
            else:
                assert word == "ok", f"{seed=}: an owner was disturbed: {word}"
                acknowledged.append(order.split()[1])
        if held and round_ % 30 == 29:
            at = held.pop()
            owners[at].end()
            owners[at] = Owner()
        assert len(held) <= 1, f"{seed=}: two owners at once in round {round_}"
    for owner in owners:
        owner.end()
    return acknowledged


def test_processes_that_compete_for_a_shard_have_it_one_after_the_other(tmp_path: Path) -> None:
    seed = random.randrange(10**9)
    print(f"{seed=}")
    acknowledged = compete(tmp_path / "s0", seed, 40)
    assert len(acknowledged) > 5
    shard = open_here(tmp_path / "s0", 2)
    assert written(shard, acknowledged) == acknowledged
    shard.close()


@pytest.mark.soak
def test_processes_compete_for_long(tmp_path: Path) -> None:
    seed = random.randrange(10**9)
    print(f"{seed=}")
    acknowledged = compete(tmp_path / "s0", seed, 2_000)
    shard = open_here(tmp_path / "s0", 2)
    assert written(shard, acknowledged) == acknowledged
    shard.close()
