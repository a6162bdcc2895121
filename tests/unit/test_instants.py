"""The read rule on a model: skewed clocks, commits over several shards, any interleaving."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from mindgrid.cluster.instants import behind, settled, stamp_read
from mindgrid.shards.clock import Instant
from mindgrid.shards.types import Selection, Stamp

EVERYTHING = Selection()
Steps = Iterator[Callable[[], bool] | None]
"""A process: runs to its next yield, then goes on whenever what it yielded holds."""


@dataclass
class World:
    """True time and one clock for each place, each off by its own constant."""

    rng: random.Random
    time: int = 1_000

    def tick(self) -> None:
        self.time += self.rng.choice((0, 0, 1, 3))


@dataclass
class SkewedClock:
    world: World
    skew: int

    def now(self) -> Instant:
        return Instant(self.world.time + self.skew)


@dataclass
class ModelShard:
    """What DESIGN §4 asks of a shard, and nothing else."""

    clock: SkewedClock
    floor: int = 0
    commits: list[tuple[int, str, int]] = field(default_factory=list)
    prepares: dict[int, int] = field(default_factory=dict)

    def prepare(self, transaction: int) -> int:
        self.floor = max(self.clock.now(), self.floor + 1)
        self.prepares[transaction] = self.floor
        return self.floor

    def commit(self, transaction: int, at: int, id: str, value: int) -> None:
        self.prepares.pop(transaction, None)
        self.commits.append((at, id, value))
        self.floor = max(self.floor, at)

    def arrive(self, stamp: Stamp) -> tuple[Instant, Callable[[], bool]]:
        """Fix the instant of a read, and what it waits for, when it arrives.

        Both are fixed here and not when the wait is over: a prepare that comes in between must
        propose a later time, and its commit must not move this read.
        """
        newest = max((at for at, _, _ in self.commits), default=0)
        open_now = dict(self.prepares)
        instant = stamp.at if stamp.exactly else max(stamp.at, newest, *open_now.values(), 0)
        self.floor = max(self.floor, instant)
        return Instant(instant), lambda: not (open_now.keys() & self.prepares.keys())

    def value(self, id: str, instant: int) -> int:
        known = [(at, value) for at, key, value in self.commits if key == id and at <= instant]
        return max(known, default=(0, 0))[1]


@dataclass
class Run:
    """One random history: writers of pairs that must stay equal, and readers of both halves."""

    seed: int
    rounds: int = 2
    torn: int = 0
    lost: int = 0
    reads: int = 0

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.world = World(rng)
        self.shards = [ModelShard(self.clock()) for _ in range(rng.choice((2, 3, 4)))]
        self.transactions = 0
        self.locked: set[str] = set()

    def clock(self) -> SkewedClock:
        return SkewedClock(self.world, self.rng.choice((0, 0, -5, 4, 9, -20)))

    def go(self) -> Run:
        pairs = [f"pair{number}" for number in range(2)]
        running: list[tuple[Steps, Callable[[], bool] | None]] = []
        for _ in range(5):
            running.append((self.writer(self.rng.choice(pairs)), None))
            running.append((self.reader(self.rng.choice(pairs)), None))
            running.append((self.loner(), None))
        while running:
            ready = [n for n, (_, held) in enumerate(running) if held is None or held()]
            assert ready, f"seed {self.seed}: every process waits for another"
            steps, _ = running.pop(self.rng.choice(ready))
            self.world.tick()
            try:
                running.append((steps, next(steps)))
            except StopIteration:
                continue
        return self

    def writer(self, pair: str) -> Steps:
        for _ in range(3):
            yield lambda: pair not in self.locked
            if pair in self.locked:
                continue
            self.locked.add(pair)
            self.transactions += 1
            transaction = value = self.transactions
            proposals = []
            for shard in self.rng.sample(self.shards, len(self.shards)):
                proposals.append(shard.prepare(transaction))
                yield None
            for shard in self.rng.sample(self.shards, len(self.shards)):
                shard.commit(transaction, max(proposals), pair, value)
                yield None
            self.locked.discard(pair)
            yield from self.read(pair, self.clock(), at_least=value)

    def loner(self) -> Steps:
        for _ in range(6):
            shard = self.rng.choice(self.shards)
            shard.commit(0, max(shard.clock.now(), shard.floor + 1), "other", 0)
            yield None

    def reader(self, pair: str) -> Steps:
        clock = self.clock()
        for _ in range(4):
            yield from self.read(pair, clock)

    def read(self, pair: str, clock: SkewedClock, at_least: int = 0) -> Steps:
        stamp = stamp_read(clock)
        instants: list[Instant] = [Instant(0)] * len(self.shards)
        values = [0] * len(self.shards)
        asked = self.rng.sample(range(len(self.shards)), len(self.shards))
        for round in range(self.rounds):
            for position in asked:
                instants[position], free = self.shards[position].arrive(stamp)
                yield free
                values[position] = self.shards[position].value(pair, instants[position])
                yield None
            if round == 0:
                asked, stamp = behind(instants, EVERYTHING), settled(instants)
        self.reads += 1
        self.torn += len(set(values)) > 1
        self.lost += min(values) < at_least


def test_no_read_is_torn_and_every_writer_sees_its_own_write() -> None:
    for seed in range(200):
        run = Run(seed).go()
        assert (run.torn, run.lost) == (0, 0), f"seed {seed}: {run}"


@pytest.mark.soak
def test_no_read_is_torn_in_a_hundred_thousand_interleavings() -> None:
    reads = 0
    for seed in range(1_000, 6_000):
        run = Run(seed).go()
        assert (run.torn, run.lost) == (0, 0), f"seed {seed}: {run}"
        reads += run.reads
    assert reads > 100_000


def test_the_model_tears_without_the_second_round() -> None:
    runs = [Run(seed, rounds=1).go() for seed in range(20)]
    assert sum(run.torn for run in runs) > 5, "a model that cannot tear proves nothing"


def test_shards_that_agree_are_not_asked_again() -> None:
    assert behind([Instant(5), Instant(5)], EVERYTHING) == []


def test_only_shards_behind_the_latest_are_asked_again_at_exactly_its_instant() -> None:
    instants = [Instant(5), Instant(7), Instant(6)]
    assert behind(instants, EVERYTHING) == [0, 2]
    assert settled(instants) == Stamp(Instant(7), exactly=True)


def test_a_read_at_a_known_instant_needs_no_second_round() -> None:
    assert behind([Instant(5), Instant(7)], Selection(known_at=Instant(3))) == []
