"""Over 1, 2 and 5 shards every history gives the same bytes as one shard of the memory driver."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from msgspec.structs import replace

from mindgrid.cluster.client import Grid
from mindgrid.cluster.embedders.protocol import Vectors
from mindgrid.cluster.local import LocalCluster
from mindgrid.cluster.openers import Opened, open_shard
from mindgrid.cluster.spec import Bounds, GridSpec, NamespaceKey, NamespaceSpec
from mindgrid.shards.clock import Instant
from mindgrid.shards.config import Driver
from mindgrid.shards.driver import Found, SemanticShard
from mindgrid.shards.errors import MindgridError, PreconditionFailed
from mindgrid.shards.memory import MemoryShard
from mindgrid.shards.shard import LanceShard
from mindgrid.shards.types import (
    NO_VECTOR,
    Answer,
    Command,
    Delete,
    Expire,
    Explanation,
    FusionMethod,
    Hit,
    Mode,
    Query,
    Result,
    Selection,
    Stamp,
    Upsert,
    Want,
)
from tests.simulation.test_shard_history import CONFIG, RAM, outcome, page_view, record_view, view
from tests.support.clocks import TurnedClock
from tests.support.histories import (
    Compact,
    Get,
    Maintain,
    Operation,
    Page,
    Reopen,
    Search,
    Turn,
    histories,
)

EXACT = dataclasses.replace(CONFIG, exact_rows_max=10_000)
"""Approximate answers are compared in `test_shard_history`; here every byte has to agree."""

KEY = NamespaceKey("semantic", "h")


class Grids:
    """A grid over `shards` shards on disk beside one shard of the oracle, under one clock."""

    def __init__(self, storage: Path, shards: int, seen: Counter[str]) -> None:
        self.clock = TurnedClock()
        self.oracle = MemoryShard(EXACT, self.clock)
        self._seen = seen
        self._opened: list[SemanticShard] = []
        namespace = NamespaceSpec(KEY, EXACT, Driver.LANCE, shards)
        spec = GridSpec(storage, (namespace,), 2, Bounds(skew_max_s=3600.0))
        self.cluster = LocalCluster(spec, self._open, self.clock)
        self.vector = NO_VECTOR
        self.grid = Grid(self.cluster, self, self.clock)

    def _open(self, opened: Opened[NamespaceSpec]) -> SemanticShard:
        shard = open_shard(opened)
        self._opened.append(shard)
        return shard

    async def close(self) -> None:
        await self.grid.close()
        await self.cluster.close()
        for shard in self._opened:
            assert isinstance(shard, LanceShard)
            self._seen.update(shard.counters)

    async def do(self, operation: Operation) -> None:
        # Each operation has an instant of its own, so that the shards of a batch agree on it.
        self.clock.turn(1_000)
        match operation:
            case Upsert() | Delete() | Expire():
                await self._write(operation)
            case Turn(micros):
                self.clock.turn(max(0, micros))
            case Maintain():
                for shard in self._running():
                    await asyncio.to_thread(shard.maintain)
            case Compact():
                for shard in self._running():
                    await asyncio.to_thread(shard.compact)
            case Reopen():
                for name in list(self.cluster.hosts):
                    await self.cluster.restart(name)
            case Search():
                await self._search(operation)
            case Get():
                await self._get(operation)
            case Page(scan, known_at_ago):
                known_at = self._ago(known_at_ago)
                asked = replace(scan, selection=replace(scan.selection, known_at=known_at))
                expected = self.oracle.scan(asked, Stamp(self.clock.now()))
                assert page_view(await self.grid.page("h", asked)) == page_view(expected)
                self._seen["pages"] += 1

    def _running(self) -> list[LanceShard]:
        # A shard that was closed by a restart refuses maintenance without a word.
        return [
            shard
            for shard in self._opened
            if isinstance(shard, LanceShard)
            and not isinstance(
                shard.get((), Selection(), Want.ID, Stamp(self.clock.now())), MindgridError
            )
        ]

    async def _write(self, command: Command) -> None:
        # An id that is used for two requests is known only where both have the same home.
        command = replace(command, transaction_id="")
        found: object
        try:
            found = await self._commit(command)
        except MindgridError as error:
            found = str(error)
            if isinstance(error, PreconditionFailed) and isinstance(command, Upsert):
                # Of several that fail, which is named depends on the shards they lie in.
                command = Upsert("", tuple(d for d in command.drafts if d.id == error.id))
        self._seen["writes"] += 1
        assert found == outcome(self.oracle, command)

    async def _commit(self, command: Command) -> Result:
        match command:
            case Upsert(transaction_id, drafts):
                _, upserted = await self.grid.upsert("h", drafts, transaction_id)
                return upserted
            case Delete(transaction_id, id, hard):
                return await self.grid.delete("h", id, hard, transaction_id)
            case Expire(transaction_id, equals, action, max_rows):
                return await self.grid.expire("h", equals, action, max_rows, transaction_id)

    async def _search(self, search: Search) -> None:
        selection = replace(
            search.query.selection,
            as_of=self._ago(search.as_of_ago),
            known_at=self._ago(search.known_at_ago),
        )
        query = replace(search.query, selection=selection)
        if query.mode is Mode.SPARSE and search.hybrid:
            query = replace(query, mode=Mode.HYBRID)
        expected = hybrid_search(self.oracle, query, Stamp(self.clock.now()))
        text = "" if query.mode is Mode.DENSE else query.text
        self.vector = query.vector
        asked = replace(query, vector=NO_VECTOR, text="") if text else replace(query, text="")
        assert view(await self.grid.search("h", asked, text)) == view(expected)
        self._seen[query.mode.name] += 1

    async def embed(self, namespace: NamespaceKey, texts: Sequence[str]) -> Vectors:
        """Answer for the grid's embedder: each text means what the query at hand does."""
        return np.stack([self.vector] * len(texts))

    async def _get(self, get: Get) -> None:
        selection = Selection(
            known_at=self._ago(get.known_at_ago), include_invalidated=get.include_invalidated
        )
        want = Want.VALUES | Want.PAYLOAD | Want.VECTOR
        expected = self.oracle.get(get.ids, selection, want, Stamp(self.clock.now()))
        assert isinstance(expected, Found)
        found = await self.grid.get("h", get.ids, want, selection)
        assert [record_view(r) for r in found] == [record_view(r) for r in expected.records]

    def _ago(self, micros: int | None) -> Instant | None:
        return None if micros is None else Instant(self.clock.now() - micros)


def hybrid_search(oracle: MemoryShard, query: Query, stamp: Stamp) -> Answer:
    """Return the oracle's answer; its lanes are joined here, one hit after the other."""
    if query.mode is not Mode.HYBRID:
        (answer,) = oracle.search([query], stamp)
        assert isinstance(answer, Answer)
        return _explained(query, answer)
    found: list[Answer] = []
    for mode in (Mode.DENSE, Mode.SPARSE):
        depth = max(query.depth, query.top_k)
        (lane,) = oracle.search([replace(query, mode=mode, top_k=depth)], stamp)
        assert isinstance(lane, Answer)
        found.append(lane)
    hits: dict[str, Hit] = {}
    for lane, weight in zip(found, query.fusion.weights, strict=True):
        for rank, hit in enumerate(lane.hits, 1):
            if query.fusion.method is FusionMethod.RRF:
                part = weight / (query.fusion.k + rank)
            else:
                best = lane.hits[0].score
                part = weight * (hit.score / best) if best > 0 else 0.0
            known = hits.get(hit.id, replace(hit, score=0.0, explanation=Explanation()))
            names = (
                ("dense_rank", "dense_score")
                if lane is found[0]
                else ("sparse_rank", "sparse_score")
            )
            assert known.explanation is not None
            why = replace(known.explanation, **dict(zip(names, (rank, hit.score), strict=True)))
            hits[hit.id] = replace(known, score=known.score + part, explanation=why)
    ranked = sorted(
        (replace(hit, score=float(np.float32(hit.score))) for hit in hits.values()),
        key=lambda hit: (-hit.score, hit.id),
    )
    if not query.explain:
        ranked = [replace(hit, explanation=None) for hit in ranked]
    dense, sparse = found
    return Answer(tuple(ranked[: query.top_k]), dense.instant, True, dense.scanned + sparse.scanned)


def _explained(query: Query, answer: Answer) -> Answer:
    if not query.explain:
        return answer
    hits: list[Hit] = []
    for rank, hit in enumerate(answer.hits, 1):
        dense = query.mode is Mode.DENSE
        why = Explanation(rank, hit.score) if dense else Explanation(0, 0.0, rank, hit.score)
        hits.append(replace(hit, explanation=why))
    return replace(answer, hits=tuple(hits))


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_every_history_reads_like_one_shard_of_the_oracle(shards: int) -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=20,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(histories)
    def run(history: list[Operation]) -> None:
        async def main(storage: Path) -> None:
            grids = Grids(storage, shards, seen)
            await grids.cluster.start()
            try:
                for operation in history:
                    await grids.do(operation)
                    seen["operations"] += 1
            finally:
                await grids.close()

        with tempfile.TemporaryDirectory(dir=RAM) as folder:
            asyncio.run(main(Path(folder)))

    run()
    assert seen["operations"] >= 500
    for path in ("exact", "words", "seals", "writes", "DENSE", "SPARSE", "HYBRID"):
        assert seen[path] > 0, f"no history took the path {path}: {dict(seen)}"
