"""Exact search over blocks finds what brute force finds, ties included, at any magnitude."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mindgrid.shards import scores
from mindgrid.shards.errors import Corruption
from mindgrid.shards.vectors import Block, Tail, Vectors, open_block, units, write_block

Rows = NDArray[np.float32]


def _vectors(rows: Rows, cuts: list[int]) -> Vectors:
    parts = np.split(rows, sorted(cuts))
    return Vectors(rows.shape[1], [Block.of(np.ascontiguousarray(part)) for part in parts])


def _brute(rows: Rows, query: Rows, k: int, allowed: NDArray[np.int64]) -> dict[int, bytes]:
    """Return the k best positions and all that tie with the k-th, with their scores' bytes."""
    found = scores.cosine(rows[allowed], query)
    floor = np.sort(found)[-k] if k < len(found) else -np.inf
    return {
        int(at): score.tobytes() for at, score in zip(allowed, found, strict=True) if score >= floor
    }


def _check(rows: Rows, cuts: list[int], queries: Rows, k: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    every = np.arange(len(rows))
    some = None if share == 1.0 else np.flatnonzero(rng.random(len(rows)) < share)
    found = _vectors(rows, cuts).exact(queries, k, some)
    for query, scored in zip(queries, found, strict=True):
        got = {
            int(at): score.tobytes()
            for at, score in zip(scored.positions, scored.scores, strict=True)
        }
        assert len(got) == len(scored.positions)
        assert got == _brute(rows, query, k, every if some is None else some)


def _check_own_rows(rows: Rows, cuts: list[int], queries: Rows, k: int, seed: int) -> None:
    """Compare each query with rows of its own, of any number, none included."""
    rng = np.random.default_rng(seed)
    listed = [np.flatnonzero(rng.random(len(rows)) < rng.random() ** 3) for _ in queries]
    ks = [k + turn for turn in range(len(queries))]
    found = _vectors(rows, cuts).best_of(queries, ks, listed)
    for query, own, some, scored in zip(queries, ks, listed, found, strict=True):
        got = {
            int(at): score.tobytes()
            for at, score in zip(scored.positions, scored.scores, strict=True)
        }
        assert got == _brute(rows, query, own, some)


def _nonzero(rows: Rows) -> Rows:
    rows[~rows.any(axis=1)] = 1
    return rows


@given(
    st.integers(1, 600),
    st.integers(1, 40),
    st.integers(1, 30),
    st.sampled_from([1, 2, 7]),
    st.sampled_from([1.0, 0.5, 0.02]),
    st.sampled_from(["plain", "ties", "close", "extreme", "all extreme"]),
    st.integers(0, 2**32 - 1),
)
def test_exact_search_is_brute_force(
    n: int, d: int, k: int, m: int, share: float, kind: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, d), np.float32)
    queries = _nonzero(rng.standard_normal((m, d), np.float32))
    if kind == "ties":
        rows = np.round(rows)
    if kind == "close":
        # Differences far below what float32 sums can tell apart.
        rows = (queries[0] + rows * np.float32(1e-5)).astype(np.float32)
    if kind == "extreme":
        rows[rng.random(n) < 0.2] *= np.float32(1e37)
        rows[rng.random(n) < 0.2] *= np.float32(1e-40)
    if kind == "all extreme":
        rows *= np.float32(3e37)
        queries *= np.float32(1e-38)
    rows = np.clip(rows, -3.4e38, 3.4e38).astype(np.float32)
    cuts = rng.integers(0, n + 1, 3).tolist()
    _check(_nonzero(rows), cuts, _nonzero(queries), k, share, seed)
    _check_own_rows(rows, cuts, queries, k, seed)


def test_exact_search_is_brute_force_over_more_than_one_piece() -> None:
    rng = np.random.default_rng(1)
    rows = np.round(rng.standard_normal((40_000, 12), np.float32) * 2)
    rows[::1000] *= np.float32(1e37)
    queries = rng.standard_normal((6, 12), np.float32)
    for m in (1, 6):
        for share in (1.0, 0.9, 0.01):
            _check(_nonzero(rows), [9_000, 9_001], queries[:m], 10, share, 3)
    _check_own_rows(rows, [9_000, 9_001], queries, 10, 3)
    _check(rows, [], queries[:1], 9_999, 1.0, 3)


def test_all_rows_equal_are_all_found() -> None:
    rows = np.ones((40_000, 4), np.float32)
    found = _vectors(rows, [100]).exact(rows[:1], 10)[0]
    assert len(found.positions) == 40_000
    assert np.all(found.scores == 1.0)


def test_no_allowed_rows_and_no_rows_find_nothing() -> None:
    query = np.ones((1, 4), np.float32)
    assert not Vectors(4, []).exact(query, 3)[0].positions.size
    rows = _vectors(np.ones((5, 4), np.float32), [])
    assert not rows.exact(query, 3, np.empty(0, np.int64))[0].positions.size


def test_gather_keeps_the_order_asked_for() -> None:
    rows = np.arange(60, dtype=np.float32).reshape(20, 3)
    vectors = _vectors(rows, [4, 4, 11])
    picks = np.array([19, 0, 4, 3, 11, 10, 4])
    assert np.array_equal(vectors.gather(picks), rows[picks])


def test_a_readers_block_stays_while_the_tail_grows() -> None:
    tail = Tail(3, capacity=2)
    held: list[tuple[Block, Rows]] = []
    rng = np.random.default_rng(2)
    for size in (1, 1, 1, 5, 0, 40):
        tail.append(rng.standard_normal((size, 3), np.float32))
        held.append((tail.block, tail.block.rows.copy()))
    for block, copy in held:
        assert np.array_equal(block.rows, copy)
        assert np.array_equal(block.squares, scores.squares(copy))
    assert len(tail) == 48


def test_readers_see_whole_appends_only() -> None:
    tail = Tail(4, capacity=1)
    wrong: list[int] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            block = tail.block
            n = len(block.rows)
            filled = np.all(block.rows == np.arange(1, n + 1)[:, np.newaxis])
            if n % 3 or not filled or len(block.inverse) != n:
                wrong.append(n)

    reader = threading.Thread(target=read)
    reader.start()
    for start in range(1, 3000, 3):
        values = np.arange(start, start + 3, dtype=np.float32)
        tail.append(np.repeat(values, 4).reshape(3, 4))
    done.set()
    reader.join()
    assert not wrong


def test_a_tail_and_a_block_of_the_same_rows_are_alike() -> None:
    rows = np.array([[1, 2], [3e38, 3e38], [1e-45, 0], [5, 6]], np.float32)
    tail = Tail(2)
    tail.append(rows[:1])
    tail.append(rows[1:])
    block = Block.of(rows)
    assert block.strange.tolist() == [1, 2] == tail.block.strange.tolist()
    assert np.array_equal(block.inverse, tail.block.inverse)


def test_a_written_block_opens_as_it_was(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((100, 7), np.float32)
    assert [path.name for path in write_block(tmp_path, rows)] == ["vectors.f32", "squares.f64"]
    block = open_block(tmp_path, 100, 7)
    assert np.array_equal(block.rows, rows)
    assert np.array_equal(block.squares, scores.squares(rows))
    found = Vectors(7, [block]).exact(rows[:5], 1)
    assert [scored.positions.tolist() for scored in found] == [[0], [1], [2], [3], [4]]


def test_an_empty_block_can_be_written_and_opened(tmp_path: Path) -> None:
    write_block(tmp_path, np.empty((0, 7), np.float32))
    assert open_block(tmp_path, 0, 7).rows.shape == (0, 7)


@pytest.mark.parametrize("name", ["vectors.f32", "squares.f64"])
def test_a_missing_or_short_file_is_corruption_that_names_it(tmp_path: Path, name: str) -> None:
    write_block(tmp_path, np.ones((10, 4), np.float32))
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Corruption, match=name):
        open_block(tmp_path, 10, 4)
    path.unlink()
    with pytest.raises(Corruption, match=name):
        open_block(tmp_path, 10, 4)


@pytest.mark.parametrize("scale", [3.4e38, 1.0, 1e-38, 1e-44])
def test_unit_vectors_have_length_one_at_any_magnitude(scale: float) -> None:
    rows = (np.array([[1.0, 1.0, 0.0], [0.5, -1.0, 1.0]]) * scale).astype(np.float32)
    assert np.allclose(np.linalg.norm(units(rows), axis=1), 1.0, atol=1e-6)
