"""What the first release stored reads the same for ever: see make.py and expected.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.format import make
from tests.support.clocks import TurnedClock
from tests.support.grids import run

from mindgrid.cluster import port
from mindgrid.cluster.client import Grid
from mindgrid.cluster.local import LocalCluster
from mindgrid.cluster.spec import GridSpec
from mindgrid.shards.clock import Instant
from mindgrid.shards.types import (
    Draft,
    Predicate,
    PredicateOp,
    Query,
    Record,
    Selection,
    Want,
)

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "expected.json").read_text())
ALL = Want.VALUES | Want.PAYLOAD | Want.VECTOR


@pytest.fixture(params=["v1", "made now"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of what is committed, and for comparison what this tree would store."""
    folder = tmp_path / "storage"
    if request.param == "made now":
        make.main(folder)
    else:
        shutil.copytree(HERE / request.param, folder)
    return folder


def on_it(storage: Path, claim: Callable[[Grid, LocalCluster], Awaitable[None]]) -> None:
    """Run a claim on a cluster that serves the folder."""
    clock = TurnedClock(_instant(EXPECTED["now"]))

    async def main() -> None:
        async with LocalCluster(GridSpec(storage, (make.SPEC,), hosts=1), clock=clock) as cluster:
            grid = Grid(cluster, clock=clock)
            try:
                await claim(grid, cluster)
            finally:
                await grid.close()

    run(main)


def test_every_record_reads_as_it_was_written(storage: Path) -> None:
    async def claim(grid: Grid, _: LocalCluster) -> None:
        for get in EXPECTED["gets"]:
            (found,) = await grid.get("notes", [get["id"]], ALL, _selection(get))
            assert _plain(found) == get["record"], get

    on_it(storage, claim)


@pytest.mark.parametrize("exact", [False, True])
def test_every_search_finds_what_it_found(storage: Path, exact: bool) -> None:
    async def claim(grid: Grid, _: LocalCluster) -> None:
        for search in EXPECTED["searches"]:
            vector = np.array(search["vector"], dtype=np.float32)
            query = Query(vector, search["top_k"], _selection(search), Want.ID, exact)
            hits = (await grid.search("notes", query)).hits
            assert [hit.id for hit in hits] == [id for id, _ in search["hits"]], search
            scores = [score for _, score in search["hits"]]
            assert [hit.score for hit in hits] == pytest.approx(scores, abs=1e-7), search

    on_it(storage, claim)


def test_a_bit_of_everything_is_stored(storage: Path) -> None:
    async def claim(grid: Grid, cluster: LocalCluster) -> None:
        await grid.get("notes", ["alpha", "wiki"])
        status = port.decode_status(await cluster.hosts["host-0"].status())
        for report in status.shards:
            assert report.status is not None
            for name, value in EXPECTED["status"][str(report.shard.shard)].items():
                assert getattr(report.status, name) == value, f"{report.shard}: {name}"

    names = {path.name for path in storage.rglob("*")}
    assert names >= {"journal.sqlite-wal", "changes.lance", "ivf.faiss", "catalog.json"}
    on_it(storage, claim)


def test_it_is_written_to_and_reopened_as_any_other(storage: Path) -> None:
    fresh = Draft("fresh", "new", np.array([1, 0, 0, 0], np.float32))
    again = Draft("alpha", "third", np.array([2, 1, 0, 0], np.float32), if_version=2)

    async def write(grid: Grid, _: LocalCluster) -> None:
        assert (await grid.upsert("notes", [fresh]))[1].versions == (1,)
        assert (await grid.upsert("notes", [again]))[1].versions == (3,)
        for n in range(60):
            await grid.upsert("notes", [make.filler(1_000 + n)])

    async def read(grid: Grid, _: LocalCluster) -> None:
        found = await grid.get("notes", ["fresh", "alpha", "tail", "filler-1059"])
        assert [record and record.version for record in found] == [1, 3, 1, 1]

    on_it(storage, write)
    on_it(storage, read)


def _selection(asked: dict[str, Any]) -> Selection:
    below = asked.get("n_below")
    predicates = () if below is None else (Predicate("n", PredicateOp.LT, (below,)),)
    return Selection(
        equals=asked.get("filter", {}),
        predicates=predicates,
        as_of=_instant(asked["as_of"]) if "as_of" in asked else None,
        known_at=_instant(asked["known_at"]) if "known_at" in asked else None,
        include_invalidated=asked.get("include_invalidated", False),
    )


def _plain(record: Record | None) -> dict[str, Any] | None:
    if record is None:
        return None
    payload = {b"": "", bytes(range(256)): "all bytes"}[record.payload]
    return {
        "content": record.content,
        "vector": record.vector.tolist(),
        "payload": payload,
        "metadata": dict(record.metadata),
        "created_at": _seconds(record.created_at),
        "valid_from": _seconds(record.valid_from),
        "valid_to": _seconds(record.valid_to),
        "deleted_at": _seconds(record.deleted_at),
        "supersedes": list(record.supersedes),
        "source": record.source,
        "version": record.version,
    }


def _instant(seconds: float) -> Instant:
    return Instant(make.START + round(seconds * make.SECOND))


def _seconds(instant: Instant | None) -> float | None:
    return None if instant is None else (instant - make.START) / make.SECOND
