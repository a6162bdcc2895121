"""The one score and the one order: the same bytes however the rows are handed over."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mindgrid.shards.scores import best, cosine, squares

Rows = NDArray[np.float32]
MAX = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).smallest_subnormal)


def _random(rng: np.random.Generator, n: int, d: int) -> Rows:
    return rng.standard_normal((n, d), np.float32)


def test_a_score_does_not_depend_on_how_many_rows_are_scored_with_it() -> None:
    rng = np.random.default_rng(1)
    for d in (1, 2, 7, 8, 9, 127, 128, 129, 384, 1000, 1536, 9001, 13_000):
        rows, query = _random(rng, 67 if d < 2000 else 5, d), _random(rng, 1, d)[0]
        together = cosine(rows, query).tobytes()
        alone = b"".join(cosine(rows[i : i + 1], query).tobytes() for i in range(len(rows)))
        assert together == alone, d
        assert together == cosine(rows, query, squares(rows)).tobytes(), d


@given(st.integers(1, 70), st.integers(1, 400), st.integers(0, 2**32 - 1))
def test_any_slice_of_a_batch_scores_as_in_the_batch(n: int, d: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, query = _random(rng, n, d), _random(rng, 1, d)[0]
    low = int(rng.integers(0, n))
    high = int(rng.integers(low, n)) + 1
    assert cosine(rows, query)[low:high].tobytes() == cosine(rows[low:high], query).tobytes()


def test_a_score_does_not_depend_on_memory_layout(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    rows, query = _random(rng, 1000, 384), _random(rng, 1, 384)[0]
    expected = cosine(rows, query).tobytes()
    path = tmp_path / "rows"
    rows.tofile(path)
    unaligned = np.frombuffer(b"x" + rows.tobytes(), np.uint8)[1:].view(np.float32)
    layouts = {
        "mapped": np.memmap(path, np.float32, "r", shape=rows.shape),
        "fortran": np.asfortranarray(rows),
        "unaligned": unaligned.reshape(rows.shape),
        "gaps": np.repeat(rows, 2, axis=1)[:, ::2],
        "reversed": np.ascontiguousarray(rows[::-1])[::-1],
        "read-only": np.frombuffer(rows.tobytes(), np.float32).reshape(rows.shape),
    }
    for name, same in layouts.items():
        assert cosine(same, query).tobytes() == expected, name
    assert cosine(rows, np.repeat(query, 3)[::3]).tobytes() == expected


def test_a_score_is_the_exact_cosine_rounded_once() -> None:
    rng = np.random.default_rng(3)
    rows, query = _random(rng, 50, 96), _random(rng, 1, 96)[0]
    q = query.astype(float).tolist()
    for row, score in zip(rows.astype(float).tolist(), cosine(rows, query), strict=True):
        dot = math.fsum(a * b for a, b in zip(row, q, strict=True))
        norms = math.sqrt(math.fsum(a * a for a in row)) * math.sqrt(math.fsum(b * b for b in q))
        assert abs(float(score) - dot / norms) <= 2.0**-24


@pytest.mark.parametrize("scale", [MAX, 1e30, 1.0, 1e-30, TINY])
def test_a_row_scores_exactly_one_with_itself_at_any_magnitude(scale: float) -> None:
    rng = np.random.default_rng(4)
    rows = (rng.uniform(-1, 1, (20, 33)) * scale).astype(np.float32)
    rows[:, 0] = scale
    for row in rows:
        assert cosine(row[np.newaxis], row)[0] == 1.0
        assert cosine(-row[np.newaxis], row)[0] == -1.0


def test_the_largest_and_the_smallest_floats_compare_as_any_others() -> None:
    rows = np.array([[MAX, MAX], [TINY, TINY], [MAX, -MAX], [TINY, -TINY]], np.float32)
    for query in (rows[0], rows[1]):
        assert cosine(rows, query).tolist() == [1.0, 1.0, 0.0, 0.0]


def test_scores_are_clamped_and_never_minus_zero() -> None:
    rng = np.random.default_rng(5)
    row = _random(rng, 1, 384)
    scaled = (row * np.linspace(0.1, 9, 500, dtype=np.float32)[:, np.newaxis]).astype(np.float32)
    found = cosine(np.concatenate([scaled, -scaled]), row[0])
    assert np.abs(found).max() <= 1.0
    zero = cosine(np.array([[0.0, -1.0]], np.float32), np.array([1.0, 0.0], np.float32))
    assert not np.signbit(zero[0])


def test_zeros_score_zero_and_no_rows_score_nothing() -> None:
    zeros = np.zeros((2, 3), np.float32)
    assert cosine(zeros, np.ones(3, np.float32)).tolist() == [0.0, 0.0]
    assert cosine(zeros[:0], np.ones(3, np.float32)).shape == (0,)


@given(
    st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0]), st.text(max_size=3))),
    st.integers(0, 30),
)
def test_best_is_the_head_of_the_sorted_list(pairs: list[tuple[float, str]], k: int) -> None:
    values = np.array([score for score, _ in pairs], np.float32)
    ids = [id for _, id in pairs]
    expected = sorted(range(len(pairs)), key=lambda i: (-pairs[i][0], ids[i], i))[:k]
    assert best(values, ids, k).tolist() == expected


def test_ties_go_by_code_point_and_not_by_utf16() -> None:
    ids = ["\U00010000", "\uffff", "a", "Z"]
    assert best(np.zeros(4, np.float32), ids, 3).tolist() == [3, 2, 1]
