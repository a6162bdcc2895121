"""Commits over several shards on a model: messages are lost, late and reordered, anyone may die.

The rules are the real ones (`cluster.transactions`, `cluster.instants`, and the memory driver's
part in `shards.transactions`); time, clocks and the network are the model's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from mindgrid.cluster.instants import behind, settled, stamp_read
from mindgrid.cluster.transactions import Admission, Transaction, parts_of_upsert
from mindgrid.shards.clock import Instant
from mindgrid.shards.config import History, ShardConfig
from mindgrid.shards.driver import Found
from mindgrid.shards.errors import InDoubt, Locked, MindgridError, Unavailable
from mindgrid.shards.memory import MemoryShard
from mindgrid.shards.transactions import (
    Ask,
    Decided,
    Forget,
    Reply,
    Request,
    Resolve,
    Resolved,
    ids_of,
)
from mindgrid.shards.types import Draft, Selection, Space, Stamp, Upsert, Want

CONFIG = ShardConfig(Space("fake", "fake", "", 1), history=History(None), transactions_kept_s=60.0)
VECTOR = np.ones(1, dtype=np.float32)
SKEWS = (0, 0, -5, 4, 9, -20)
SKEW_MAX = 30
FACTS, PAIRS = 6, 2

Steps = Iterator[Callable[[], bool]]
"""A process: goes on some time after what it yielded holds."""


def free() -> bool:
    return True


@dataclass
class SkewedClock:
    world: World
    skew: int

    def now(self) -> Instant:
        return Instant(self.world.time + self.skew)


class Shard(MemoryShard):
    """A shard whose process can die: what it promised is durable, what it had read is forgotten."""

    lives = 0

    def die(self) -> None:
        self.lives += 1
        self._floor = Instant(max(self._last_commit, self._doubts.latest))


@dataclass
class Life:
    """One committer, from its start until it is killed."""

    admission: Admission = field(default_factory=Admission)
    running: set[str] = field(default_factory=set)
    dead: bool = False


@dataclass
class World:
    """One random history, its trouble dealt out by `trouble` per cent of messages and steps.

    Writers replace a fact by the next one in another shard, and write pairs that must stay equal.
    """

    seed: int
    trouble: int = 6
    rounds: int = 2
    time: int = 1_000
    torn: int = 0
    lost: int = 0
    reads: int = 0
    commits: int = 0
    counted: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.shards = [Shard(CONFIG, self.clock()) for _ in range(self.rng.choice((2, 3, 4)))]
        self.life = Life()
        self.keys = self.flying = 0
        self.writers = 3
        self.processes: list[tuple[Steps, Callable[[], bool]]] = []
        for id in ("fact0", *(f"{half}{n}" for n in range(PAIRS) for half in "ab")):
            self.shards[self.shard_of(id)].submit(Upsert("", (draft(id, "0"),))).result()

    def clock(self) -> SkewedClock:
        return SkewedClock(self, self.rng.choice(SKEWS))

    def shard_of(self, id: str) -> int:
        return sum(id.encode()) % len(self.shards)

    def count(self, what: str) -> None:
        self.counted[what] = self.counted.get(what, 0) + 1

    def go(self) -> World:
        self.begin(self.revise())
        for pair in range(PAIRS):
            self.begin(self.write_pair(pair))
        for _ in range(3):
            self.begin(self.read_on())
        self.begin(self.sweep())
        self.begin(self.kill())
        while self.processes:
            ready = [n for n, (_, holds) in enumerate(self.processes) if holds()]
            assert ready, f"seed {self.seed}: every process waits for another"
            steps, _ = self.processes.pop(self.rng.choice(ready))
            self.time += self.rng.choice((0, 0, 1, 3))
            try:
                self.processes.append((steps, next(steps)))
            except StopIteration:
                continue
        return self

    def begin(self, steps: Steps) -> None:
        self.processes.append((steps, free))

    def unlucky(self) -> bool:
        return self.writers > 0 and self.rng.randrange(100) < self.trouble

    # Writers

    def revise(self) -> Steps:
        clock = self.clock()
        for number in range(1, FACTS):
            fact = draft(f"fact{number}", "x", supersedes=(f"fact{number - 1}",), if_version=0)
            yield from self.commit(Upsert(f"revise{number}", (fact,)))
            yield from self.read(clock, fact_at_least=number)
        self.writers -= 1

    def write_pair(self, pair: int) -> Steps:
        clock = self.clock()
        for value in range(1, 5):
            drafts = draft(f"a{pair}", str(value)), draft(f"b{pair}", str(value))
            yield from self.commit(Upsert(f"pair{pair}/{value}", drafts))
            yield from self.read(clock, pair=pair, value_at_least=value)
        self.writers -= 1

    def commit(self, command: Upsert) -> Steps:
        """Send the command until its outcome is known, as `Grid` does with one transaction id."""
        answer: object = None
        while not isinstance(answer, tuple):
            said: list[object] = []
            yield from self.order(self.life, command, said)
            (result,) = said or [None]
            if result is not None and not isinstance(result, MindgridError):
                answer = (result,)
            yield free
        self.commits += 1

    def order(self, life: Life, command: Upsert, said: list[object]) -> Steps:
        """One call of a committer, which may die at any step; what it says goes into `said`."""
        ticket = life.admission.enter(ids_of(command))
        yield lambda: life.dead or ticket.behind == 0
        while not life.dead and not said:
            self.keys += 1
            key = f"key{self.keys}"
            life.running.add(key)
            parts = parts_of_upsert(command, self.shard_of)
            if len(parts.commands) == 1:
                yield from self.alone(command, parts.home, said)
            else:
                yield from self.attempt(life, Transaction(key, parts), said)
            life.running.discard(key)
            if said and isinstance(said[0], Locked):
                self.count("locked")
                locked = said.pop()
                assert isinstance(locked, Locked)
                if locked.key not in life.running:
                    holder = self.shard_of(locked.id)
                    yield from self.clear(life, locked.key, locked.home, (holder,), False)
        if not life.dead:
            life.admission.leave(ticket)

    def alone(self, command: Upsert, shard: int, said: list[object]) -> Steps:
        yield free
        try:
            said.append(self.shards[shard].submit(command).result())
        except MindgridError as error:
            said.append(error)

    def attempt(self, life: Life, transaction: Transaction, said: list[object]) -> Steps:
        mailbox: list[tuple[int, Reply | MindgridError | None]] = []
        for shard, request in transaction.start():
            self.post(shard, request, mailbox)
        while not transaction.over:
            yield lambda: life.dead or bool(mailbox)
            if life.dead:
                self.count("committer died")
                return
            shard, reply = mailbox.pop(self.rng.randrange(len(mailbox)))
            for other, request in transaction.heard(shard, reply):
                self.post(other, request, mailbox)
        self.count("over")
        said.append(transaction.answer)

    def post(
        self, shard: int, request: Request, mailbox: list[tuple[int, Reply | MindgridError | None]]
    ) -> None:
        self.flying += 1
        self.begin(self.message(shard, request, mailbox))

    def message(
        self, number: int, request: Request, mailbox: list[tuple[int, Reply | MindgridError | None]]
    ) -> Steps:
        yield from self.carry(number, request, mailbox)
        self.flying -= 1

    def carry(
        self, number: int, request: Request, mailbox: list[tuple[int, Reply | MindgridError | None]]
    ) -> Steps:
        shard = self.shards[number]
        life = shard.lives
        if self.unlucky():
            self.count("lost")
            mailbox.append((number, None))
            return
        yield free
        late, silent = self.unlucky(), self.unlucky()
        if late:
            self.count("late")
            mailbox.append((number, None))
            for _ in range(self.rng.randrange(40)):
                yield free
        reply: Reply | MindgridError | None = None
        if shard.lives != life:
            self.count("died with its host")
        else:
            try:
                reply = shard.transact(request).result()
            except Unavailable:
                pass
            except MindgridError as error:
                reply = error
        yield free
        if not late:
            mailbox.append((number, None if silent else reply))

    # Trouble, and what mends it

    def kill(self) -> Steps:
        while self.writers:
            yield free
            if self.unlucky() and self.rng.random() < 0.3:
                shard = self.rng.choice(self.shards)
                shard.die()
                self.time += SKEW_MAX  # So long its first commit waits.
            if self.unlucky() and self.rng.random() < 0.3:
                self.life.dead = True
                self.life = Life()

    def sweep(self) -> Steps:
        while self.writers or self.flying or any(map(self.stale, self.shards)):
            yield free
            life = self.life
            for number, shard in enumerate(self.shards):
                for key, home, participants, own in self.stale(shard, number):
                    if key not in life.running:
                        self.count("swept")
                        yield from self.clear(life, key, home, participants, own)

    def stale(self, shard: Shard, number: int = 0) -> list[tuple[str, int, tuple[int, ...], bool]]:
        doubts = shard.doubts()
        promises = [
            (key, promise.home, (number,), False) for key, promise in doubts.promises.items()
        ]
        return promises + [
            (key, number, decision.participants, True)
            for key, decision in doubts.decisions.items()
            if decision.decided.at is not None
        ]

    def clear(self, life: Life, key: str, home: int, shards: tuple[int, ...], own: bool) -> Steps:
        decided: list[tuple[int, Reply | MindgridError | None]] = []
        self.post(home, Ask(key), decided)
        yield lambda: bool(decided)
        said = decided[0][1]
        if life.dead or not isinstance(said, Decided):
            return
        done: list[tuple[int, Reply | MindgridError | None]] = []
        for shard in shards:
            self.post(shard, Resolve(key, said.at), done)
        yield lambda: len(done) >= len(shards)
        if own and not life.dead and all(isinstance(reply, Resolved) for _, reply in done):
            self.post(home, Forget(key), [])

    # Readers

    def read_on(self) -> Steps:
        clock = self.clock()
        while self.writers:
            yield from self.read(clock)

    def read(
        self,
        clock: SkewedClock,
        fact_at_least: int = 0,
        pair: int | None = None,
        value_at_least: int = 0,
    ) -> Steps:
        ids = [f"fact{n}" for n in range(FACTS)]
        if pair is not None or self.rng.random() < 0.5:
            pair = self.rng.randrange(PAIRS) if pair is None else pair
            ids = [f"a{pair}", f"b{pair}"]
        by_shard: dict[int, list[str]] = {}
        for id in ids:
            by_shard.setdefault(self.shard_of(id), []).append(id)
        numbers = self.rng.sample(sorted(by_shard), len(by_shard))
        found: dict[int, Found] = {}
        stamps = dict.fromkeys(numbers, stamp_read(clock))
        again = list(numbers)
        for round in range(self.rounds):
            while again:
                number = again.pop(0)
                shard = self.shards[number]
                answer = shard.get(by_shard[number], Selection(), Want.VALUES, stamps[number])
                if isinstance(answer, InDoubt):
                    self.count("in doubt")
                    stamps[number] = Stamp(Instant(answer.instant), exactly=True)
                    again.append(number)
                else:
                    assert isinstance(answer, Found)
                    found[number] = answer
                yield free
            instants = [found[number].instant for number in numbers]
            if round == 0:
                again = [numbers[at] for at in behind(instants, Selection())]
                stamps = dict.fromkeys(numbers, settled(instants))
        self.reads += 1
        records = [r for number in numbers for r in found[number].records if r is not None]
        if pair is not None:
            values = {int(record.content) for record in records}
            self.torn += len(values) != 1
            self.lost += min(values) < value_at_least
        else:
            facts = [int(record.id.removeprefix("fact")) for record in records]
            self.torn += len(facts) != 1
            self.lost += max(facts, default=0) < fact_at_least

    def check_end(self) -> None:
        """Everything was written once, and nothing is left open."""
        for shard in self.shards:
            assert not shard.doubts().promises
            shards_records = shard.get(
                [f"a{n}" for n in range(PAIRS)] + [f"b{n}" for n in range(PAIRS)],
                Selection(),
                Want.VALUES,
                Stamp(Instant(self.time + SKEW_MAX)),
            )
            assert isinstance(shards_records, Found)
            for record in shards_records.records:
                assert record is None or (record.version, record.content) == (5, "4")


def draft(
    id: str, content: str, supersedes: tuple[str, ...] = (), if_version: int | None = None
) -> Draft:
    return Draft(id, content, VECTOR, supersedes=supersedes, if_version=if_version)


def check(world: World) -> None:
    assert (world.torn, world.lost) == (0, 0), f"seed {world.seed}: {world.torn} {world.lost}"
    assert world.commits == FACTS - 1 + 4 * PAIRS
    world.check_end()


def test_no_commit_is_torn_or_lost_whatever_is_lost_late_or_killed() -> None:
    counted: dict[str, int] = {}
    for seed in range(150):
        world = World(seed).go()
        check(world)
        for what, times in world.counted.items():
            counted[what] = counted.get(what, 0) + times
    for what in ("lost", "late", "died with its host", "committer died", "swept", "locked"):
        assert counted.get(what, 0) > 10, f"no history met: {what}: {counted}"
    assert counted["in doubt"] > 100


@pytest.mark.soak
def test_no_commit_is_torn_or_lost_in_a_hundred_thousand_reads() -> None:
    reads = 0
    for seed in range(1_000, 20_000):
        world = World(seed, trouble=seed % 12).go()
        check(world)
        reads += world.reads
        if reads > 100_000:
            return
    raise AssertionError(f"only {reads} reads")


def test_without_the_second_round_the_model_tears() -> None:
    worlds = [World(seed, rounds=1).go() for seed in range(60)]
    assert sum(world.torn for world in worlds) > 0, "a model that cannot tear proves nothing"
