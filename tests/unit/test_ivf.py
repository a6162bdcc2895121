"""The index reaches the recall it was asked for, filtered or grown, and never returns damage."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.data import DataSet, mixture

from mindgrid.shards.background import NICENESS, background_pool
from mindgrid.shards.errors import Corruption
from mindgrid.shards.ivf import INDEX_FILE, META_FILE, Bitmap, IvfIndex
from mindgrid.shards.tuning import Level, covers, plan
from mindgrid.shards.vectors import Block, Vectors

Mask = NDArray[np.bool_]


def _vectors(rows: NDArray[np.float32]) -> Vectors:
    third = len(rows) // 3
    parts = (rows[:third], rows[third:])
    return Vectors(rows.shape[1], [Block.of(np.ascontiguousarray(part)) for part in parts])


@pytest.fixture(scope="module")
def data() -> DataSet:
    return mixture(8_000, 200, dimensions=96, clusters=40)


@pytest.fixture(scope="module")
def vectors(data: DataSet) -> Vectors:
    return _vectors(data.rows)


@pytest.fixture(scope="module")
def index(vectors: Vectors) -> IvfIndex:
    return IvfIndex.build(vectors)


def _recall(
    index: IvfIndex,
    vectors: Vectors,
    queries: NDArray[np.float32],
    k: int = 10,
    mask: Mask | None = None,
) -> float:
    allowed = None if mask is None else np.flatnonzero(mask)
    bitmap = None if mask is None else Bitmap.of(mask)
    truth = vectors.exact(queries, k, allowed)
    hits = 0
    for query, true, found in zip(queries, truth, index.search(queries, k, bitmap), strict=True):
        assert np.all(np.diff(found.positions) > 0)
        assert 0 < len(found.positions) <= found.scanned
        if mask is not None:
            assert np.all(mask[found.positions])
        ranked = vectors.exact(query[np.newaxis], k, found.positions)[0]
        hits += min(k, np.isin(ranked.positions, true.positions).sum())
    return hits / (k * len(queries))


def test_held_out_queries_reach_the_recall(
    index: IvfIndex, vectors: Vectors, data: DataSet
) -> None:
    assert index.meta.reached
    assert index.recall >= 0.95
    assert _recall(index, vectors, data.queries) >= 0.95


def test_the_index_looks_at_a_part_of_the_rows_only(index: IvfIndex, data: DataSet) -> None:
    found = index.search(data.queries, 10)
    assert np.mean([one.scanned for one in found]) < index.rows / 3
    assert np.mean([len(one.positions) for one in found]) < 300


def test_a_higher_recall_is_reached_too(vectors: Vectors, data: DataSet) -> None:
    index = IvfIndex.build(vectors, recall=0.99)
    assert _recall(index, vectors, data.queries) >= 0.985


@pytest.mark.parametrize("k", [1, 40, 100, 150])
def test_other_depths_reach_it_too(
    index: IvfIndex, vectors: Vectors, data: DataSet, k: int
) -> None:
    assert _recall(index, vectors, data.queries[:50], k) >= 0.94


def test_a_depth_that_was_not_measured_has_no_candidates(index: IvfIndex, data: DataSet) -> None:
    assert not index.search(data.queries[:1], 6_000)[0].positions.size


@pytest.mark.parametrize("share", [0.5, 0.1, 0.07])
def test_a_filter_at_random_does_not_cost_recall(
    index: IvfIndex, vectors: Vectors, data: DataSet, share: float
) -> None:
    mask = np.random.default_rng(1).random(len(vectors)) < share
    assert _recall(index, vectors, data.queries, mask=mask) >= 0.94


def test_a_filter_that_empties_the_nearest_cells_still_fills_the_answer(
    index: IvfIndex, vectors: Vectors
) -> None:
    query = vectors.gather(np.array([0]))
    scored = vectors.exact(query, len(vectors))[0]
    order = scored.positions[np.argsort(-scored.scores, kind="stable")]
    mask = np.ones(len(vectors), np.bool_)
    mask[order[:6_000]] = False
    found = index.search(query, 10, Bitmap.of(mask))[0]
    assert len(found.positions) >= 10
    assert np.all(mask[found.positions])


def test_a_filter_by_topic_serves_queries_of_other_topics(
    index: IvfIndex, vectors: Vectors, data: DataSet
) -> None:
    topic = data.rows[0]
    near, far = data.rows @ topic, data.queries @ topic
    mask = near > np.quantile(near, 0.7)
    assert _recall(index, vectors, data.queries[far < np.median(far)], mask=mask) >= 0.9
    assert _recall(index, vectors, data.queries[far > np.quantile(far, 0.8)], mask=mask) >= 0.94


def test_a_bitmap_may_be_shorter_or_longer_than_the_index(
    index: IvfIndex, vectors: Vectors, data: DataSet
) -> None:
    for rows in (3_000, 20_000):
        mask = np.arange(rows) % 3 == 0
        for found in index.search(data.queries[:5], 10, Bitmap.of(mask)):
            assert len(found.positions) >= 10
            assert np.all(found.positions % 3 == 0)
            assert found.positions.max() < rows


def test_too_few_allowed_rows_show_in_the_count(index: IvfIndex, vectors: Vectors) -> None:
    mask = np.zeros(len(vectors), np.bool_)
    mask[[5, 7_000]] = True
    for allowed in (mask, np.zeros(len(vectors), np.bool_)):
        for found in index.search(vectors.gather(np.array([1, 2])), 10, Bitmap.of(allowed)):
            assert len(found.positions) < 10


def test_a_batch_finds_what_single_queries_find(index: IvfIndex, data: DataSet) -> None:
    together = index.search(data.queries[:32], 10)
    for query, found in zip(data.queries, together, strict=False):
        alone = index.search(query[np.newaxis], 10)[0]
        assert np.array_equal(alone.positions, found.positions)
        assert alone.scanned == found.scanned


def test_the_same_rows_give_the_same_index(vectors: Vectors, data: DataSet) -> None:
    some = np.arange(0, len(vectors), 4)
    first, second = IvfIndex.build(vectors, some), IvfIndex.build(vectors, some[::-1])
    assert first.meta == second.meta
    for one, other in zip(
        first.search(data.queries, 10), second.search(data.queries, 10), strict=True
    ):
        assert np.array_equal(one.positions, other.positions)


def test_growing_fourfold_keeps_the_recall_and_the_old_index(
    vectors: Vectors, data: DataSet
) -> None:
    start = IvfIndex.build(vectors, np.arange(2_000))
    before = start.search(data.queries, 10)
    index = start
    for low in range(2_000, 8_000, 1_500):
        index = index.extend(vectors, np.arange(low, low + 1_500))
    assert (index.rows, index.trained_rows, start.rows) == (8_000, 2_000, 2_000)
    assert np.array_equal(index.positions(), np.arange(8_000))
    assert _recall(index, vectors, data.queries) >= 0.94
    for old, now in zip(before, start.search(data.queries, 10), strict=True):
        assert np.array_equal(old.positions, now.positions)


def test_searches_go_on_while_the_index_grows(
    index: IvfIndex, vectors: Vectors, data: DataSet
) -> None:
    small = IvfIndex.build(vectors, np.arange(7_000))
    expected = [found.positions.tolist() for found in small.search(data.queries[:8], 10)]
    pool = background_pool(1, "grow")
    grown = pool.submit(small.extend, vectors, np.arange(7_000, 8_000))
    pool.shutdown(wait=False)
    rounds = 0
    while not grown.done() or rounds == 0:
        found = small.search(data.queries[:8], 10)
        assert [one.positions.tolist() for one in found] == expected
        rounds += 1
        time.sleep(0.001)
    assert grown.result().rows == index.rows


def test_removed_rows_are_found_no_more(index: IvfIndex, vectors: Vectors, data: DataSet) -> None:
    gone = np.arange(0, len(vectors), 3)
    fewer = index.remove(np.append(gone, 10**6))
    assert fewer.rows == len(vectors) - len(gone)
    assert index.rows == len(vectors)
    for found in fewer.search(data.queries, 10):
        assert not np.isin(found.positions, gone).any()
    assert index.remove(np.empty(0, np.int64)).rows == index.rows


def test_compaction_renumbers_without_training(
    index: IvfIndex, vectors: Vectors, data: DataSet
) -> None:
    kept = np.arange(len(vectors)) % 3 != 0
    places = np.where(kept, np.cumsum(kept) - 1, -1)
    compact = _vectors(np.ascontiguousarray(data.rows[kept]))
    moved = index.renumber(places)
    assert np.array_equal(moved.positions(), np.arange(len(compact)))
    assert np.array_equal(index.positions(), np.arange(len(vectors)))
    assert _recall(moved, compact, data.queries) >= 0.94


@pytest.mark.parametrize("rows", [1, 2, 5, 11, 30, 200])
def test_small_indexes_find_everything(rows: int) -> None:
    k = max(1, min(rows - 1, 10))
    small = mixture(rows, 20, dimensions=8, clusters=3)
    vectors = _vectors(small.rows)
    index = IvfIndex.build(vectors)
    assert _recall(index, vectors, small.queries, k) >= 0.95
    grown = _vectors(np.concatenate([small.rows, small.queries]))
    more = index.extend(grown, np.arange(rows, rows + 20))
    assert _recall(more, grown, small.queries, k) >= 0.9


def test_equal_rows_and_extreme_magnitudes_are_indexed() -> None:
    rows = np.ones((500, 16), np.float32)
    rows[100:200] *= np.float32(3e38)
    rows[200:300] *= np.float32(1e-44)
    rows[300:] = np.random.default_rng(2).standard_normal((200, 16), np.float32)
    vectors = _vectors(rows)
    index = IvfIndex.build(vectors)
    found = index.search(rows[:1], 10)[0]
    assert np.all(vectors.exact(rows[:1], 10, found.positions)[0].scores == 1.0)


def test_finer_codes_are_used_where_one_bit_does_not_reach_the_recall() -> None:
    small = mixture(4_000, 100, dimensions=16, clusters=1)
    vectors = _vectors(small.rows)
    index = IvfIndex.build(vectors, recall=0.999)
    assert index.meta.code == "sq8"
    assert _recall(index, vectors, small.queries) >= 0.98


def test_a_saved_index_loads_as_it_was(index: IvfIndex, data: DataSet, tmp_path: Path) -> None:
    checked: list[str] = []
    assert [path.name for path in index.save(tmp_path)] == [INDEX_FILE, META_FILE]
    loaded = IvfIndex.load(tmp_path, lambda path, _: checked.append(path.name))
    assert checked == [INDEX_FILE, META_FILE]
    assert (loaded.meta, loaded.rows) == (index.meta, index.rows)
    for one, other in zip(
        index.search(data.queries, 10), loaded.search(data.queries, 10), strict=True
    ):
        assert np.array_equal(one.positions, other.positions)


def test_the_check_comes_before_anything_is_parsed(index: IvfIndex, tmp_path: Path) -> None:
    index.save(tmp_path)
    (tmp_path / INDEX_FILE).write_bytes(b"garbage")

    def refuse(path: Path, _: bytes) -> None:
        raise Corruption(str(path), "its digest differs")

    with pytest.raises(Corruption, match=r"ivf\.faiss.*digest"):
        IvfIndex.load(tmp_path, refuse)


def _flip(rng: np.random.Generator) -> Callable[[bytes], bytes]:
    def flip(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[rng.integers(len(changed))] ^= 1 << int(rng.integers(8))
        return bytes(changed)

    return flip


@pytest.mark.parametrize("name", [INDEX_FILE, META_FILE])
def test_damage_anywhere_is_corruption(index: IvfIndex, tmp_path: Path, name: str) -> None:
    index.save(tmp_path)
    path = tmp_path / name
    good = path.read_bytes()
    damages = [_flip(np.random.default_rng(seed)) for seed in range(40)]
    damages += [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b + b"x"]
    for damage in damages:
        path.write_bytes(damage(good))
        with pytest.raises(Corruption):
            IvfIndex.load(tmp_path)
    path.unlink()
    with pytest.raises(Corruption, match="missing"):
        IvfIndex.load(tmp_path)


def test_a_newer_format_is_refused(index: IvfIndex, tmp_path: Path) -> None:
    index.save(tmp_path)
    meta = tmp_path / META_FILE
    fields = json.loads(meta.read_text())
    fields["format"] += 1
    meta.write_text(json.dumps(fields))
    with pytest.raises(Corruption, match="format"):
        IvfIndex.load(tmp_path)


def test_plan_meets_the_levels_and_interpolates_between_them() -> None:
    levels = (Level(10, 4, 50, 1.0), Level(40, 16, 100, 1.0), Level(160, 16, 400, 1.0))
    assert plan(levels, 1, 1.0) == (4, 50)
    assert plan(levels, 10, 1.0) == (4, 50)
    assert plan(levels, 20, 1.0) == pytest.approx((8, 50 * 2**0.5))
    assert plan(levels, 40, 1.0) == pytest.approx((16, 100))
    # A quarter allowed: cells as for 40, and never fewer candidates than without a filter.
    assert plan(levels, 10, 0.25) == pytest.approx((16, 50))
    assert covers(levels, 160, 1.0)
    assert not covers(levels, 161, 1.0)
    assert not covers(levels, 81, 0.5)


def test_background_work_gives_way_and_leaves_the_others_as_they_are() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = priority()
    with background_pool(1, "work") as pool:
        assert pool.submit(priority).result() == min(19, before + NICENESS)
    assert priority() == before
