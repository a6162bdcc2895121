"""A text that a model refuses is found among all texts of a call, in few calls."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindgrid.cluster.embedders import refusals
from mindgrid.cluster.embedders.protocol import Vectors
from mindgrid.shards.errors import InvalidRequest, TextRefused


class Model:
    """Takes at most `most` texts at once, and none of those in `bad`."""

    def __init__(self, bad: set[int], most: int) -> None:
        self.bad = bad
        self.most = most
        self.calls: list[list[str]] = []

    async def call(self, texts: list[str]) -> Vectors:
        self.calls.append(texts)
        found = [text for text in texts if int(text) in self.bad]
        if found:
            raise InvalidRequest("", f"{found} in {len(texts)}")
        if len(texts) > self.most:
            raise InvalidRequest("", f"{len(texts)} are too many")
        return np.array([[int(text)] for text in texts], np.float32)

    def embed(self, count: int) -> Vectors:
        return asyncio.run(refusals.embed(self.call, [str(number) for number in range(count)]))


@given(st.integers(1, 70), st.sets(st.integers(0, 69), max_size=4), st.integers(1, 80))
def test_all_vectors_in_order_or_a_text_that_is_refused_by_itself(
    count: int, bad: set[int], most: int
) -> None:
    model = Model({number for number in bad if number < count}, most)
    if not model.bad:
        assert model.embed(count)[:, 0].tolist() == list(range(count))
        return
    with pytest.raises(TextRefused) as caught:
        model.embed(count)
    assert caught.value.index in model.bad
    assert caught.value.text == str(caught.value.index)
    assert caught.value.reason == f"['{caught.value.text}'] in 1"


@pytest.mark.parametrize("count", [1, 2, 3, 31, 32, 33, 2048])
def test_one_bad_text_costs_the_logarithm_and_two_calls(count: int) -> None:
    for bad in {0, 1, count // 3, count // 2, count - 1} & set(range(count)):
        model = Model({bad}, count)
        with pytest.raises(TextRefused) as caught:
            model.embed(count)
        assert caught.value.index == bad
        assert len(model.calls) <= math.ceil(math.log2(count)) + 2


def test_a_refusal_that_was_none_of_the_texts_ends_with_all_vectors() -> None:
    model = Model(set(), most=32)
    assert model.embed(2048)[:, 0].tolist() == list(range(2048))
    # Half of all calls are refused, and where a half was taken the other is asked for in parts.
    assert len(model.calls) < 2048 / 32 * 8
