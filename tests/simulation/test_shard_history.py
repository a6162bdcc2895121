"""Any history of writes, seals, merges and restarts reads on disk as it reads in the oracle."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from msgspec.structs import asdict, replace

from mindgrid.shards.clock import Instant
from mindgrid.shards.config import History, ShardConfig
from mindgrid.shards.driver import Found, SemanticShard
from mindgrid.shards.errors import MindgridError
from mindgrid.shards.memory import MemoryShard
from mindgrid.shards.shard import LanceShard, Workers
from mindgrid.shards.types import (
    Answer,
    Command,
    Delete,
    Expire,
    Record,
    Result,
    Selection,
    Space,
    Stamp,
    Upsert,
    Want,
)
from tests.support.clocks import TurnedClock
from tests.support.histories import (
    DIMENSIONS,
    Compact,
    Get,
    Maintain,
    Operation,
    Reopen,
    Search,
    Turn,
    histories,
)

RAM = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where syncing costs nothing: what survives a crash is the subject of tests/crash."""

CONFIG = ShardConfig(
    space=Space("fake", "fake", "", DIMENSIONS),
    history=History(age_s=None),
    seal_rows=16,
    seal_after_s=0.0,
    exact_rows_max=32,
    index_rows_min=48,
    merge_fanout=3,
    skew_max_s=0.0,
)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with ThreadPoolExecutor(1) as commits, ThreadPoolExecutor(1) as maintenance:
        yield Workers(commits, maintenance)


class Pair:
    """The driver under test beside the oracle, under one clock."""

    def __init__(self, folder: Path, workers: Workers, seen: Counter[str]) -> None:
        self.clock = TurnedClock()
        self.oracle = MemoryShard(CONFIG, self.clock)
        self._folder, self._workers, self._seen = folder, workers, seen
        self._epoch = 0
        self._latest = self._opened = self.clock.now()
        self.shard = self._open()

    def _open(self) -> LanceShard:
        self._epoch += 1
        return LanceShard.open(self._folder, CONFIG, self._epoch, self.clock, self._workers)

    def close(self) -> None:
        self.shard.close()
        self._seen.update(self.shard.counters)

    def do(self, operation: Operation) -> None:
        self._latest = max(self._latest, self.clock.now())
        match operation:
            case Upsert() | Delete() | Expire():
                expected = outcome(self.oracle, operation)
                assert outcome(self.shard, operation) == expected
            case Turn(micros):
                self.clock.turn(max(micros, self._opened - self.clock.now()))
            case Maintain():
                self.shard.maintain()
            case Compact():
                self.shard.compact()
            case Reopen():
                self.close()
                # A shard that opens has forgotten the reads it answered; it waits `skew_max_s`
                # of real time instead, which this clock has to be told.
                self.clock.turn(max(0, self._latest - self.clock.now()) + 1)
                self._opened = self.clock.now()
                self.shard = self._open()
            case Search():
                self._search(operation)
            case Get():
                self._get(operation)

    def _search(self, search: Search) -> None:
        selection = replace(
            search.query.selection,
            as_of=self._ago(search.as_of_ago),
            known_at=self._ago(search.known_at_ago),
        )
        query = replace(search.query, selection=selection)
        stamp = Stamp(self.clock.now())
        expected = self.oracle.search([query], stamp)[0]
        answer = self.shard.search([query], stamp)[0]
        if isinstance(expected, MindgridError) or isinstance(answer, MindgridError):
            assert str(answer) == str(expected)
            return
        if answer.exact:
            assert view(answer) == view(expected)
            return
        self._check_approximate(query.top_k, answer, expected, stamp)

    def _check_approximate(
        self, top_k: int, answer: Answer, expected: Answer, stamp: Stamp
    ) -> None:
        assert len(answer.hits) == len(expected.hits)
        assert answer.instant == expected.instant
        right = {hit.id: hit.score for hit in expected.hits}
        for hit in answer.hits:
            assert hit.score == right.get(hit.id, hit.score)
        self._seen["wanted"] += len(right)
        self._seen["found"] += sum(hit.score >= min(right.values()) for hit in answer.hits)

    def _get(self, get: Get) -> None:
        selection = Selection(
            known_at=self._ago(get.known_at_ago), include_invalidated=get.include_invalidated
        )
        stamp, want = Stamp(self.clock.now()), Want.VALUES | Want.PAYLOAD | Want.VECTOR
        expected = self.oracle.get(get.ids, selection, want, stamp)
        found = self.shard.get(get.ids, selection, want, stamp)
        if isinstance(expected, MindgridError) or isinstance(found, MindgridError):
            assert str(found) == str(expected)
            return
        assert found_view(found) == found_view(expected)

    def _ago(self, micros: int | None) -> Instant | None:
        return None if micros is None else Instant(self.clock.now() - micros)


def outcome(shard: SemanticShard, command: Command) -> Result | str:
    try:
        return shard.submit(command).result()
    except MindgridError as error:
        return str(error)


def view(answer: Answer) -> object:
    """Everything an answer shows, in a form that compares."""
    hits = [(h.id, np.float32(h.score).tobytes(), record_view(h.record)) for h in answer.hits]
    return hits, answer.instant, answer.scanned


def record_view(record: Record | None) -> object:
    if record is None:
        return None
    fields = asdict(record)
    return {**fields, "vector": fields["vector"].tobytes(), "metadata": dict(fields["metadata"])}


def found_view(found: Found) -> object:
    return [record_view(record) for record in found.records], found.instant


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
def test_every_history_reads_like_the_oracle(workers: Workers) -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=60,
        deadline=None,
        database=None,
        # Shrinking reopens thousands of shards; run it by hand on a failure that is hard to read.
        phases=[Phase.explicit, Phase.generate],
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(histories)
    def run(history: list[Operation]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            pair = Pair(Path(folder) / "shard", workers, seen)
            try:
                for operation in history:
                    pair.do(operation)
                    seen["operations"] += 1
            finally:
                pair.close()

    run()
    for path in ("exact", "ivf", "fresh", "seals", "merges", "index_builds", "index_extends"):
        assert seen[path] > 0, f"no history took the path {path}: {dict(seen)}"
    assert seen["operations"] >= 2_000
    # A hundred answers or so: what the index promises on average is measured in test_ivf.
    assert seen["found"] >= 0.9 * seen["wanted"]
