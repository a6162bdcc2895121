"""Finds the one text that a model refuses, where it only says that it refuses the whole call.

    refused ········ ─► left half taken ····, so it is in the right ─► ·· ─► · refused: this one

One bad text of n costs log₂ n calls and two more. A call that was refused for its size alone gets
its vectors from the parts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np

from mindgrid.cluster.embedders.protocol import Vectors
from mindgrid.shards.errors import InvalidRequest, TextRefused

Call = Callable[[list[str]], Awaitable[Vectors]]
"""Asks the model once; InvalidRequest says that it refuses these texts together."""


async def embed(call: Call, texts: list[str]) -> Vectors:
    """Return one vector for each text, in order; what is refused is asked for in parts.

    Raises TextRefused for a text that is refused by itself; its index counts in `texts`.
    """
    answer = await _asked(call, texts)
    if isinstance(answer, str):
        return await _in_parts(call, texts, answer, 0)
    return answer


async def _in_parts(call: Call, texts: list[str], reason: str, index: int) -> Vectors:
    """Return the vectors of texts that were refused together; the first of them is `index`."""
    if len(texts) == 1:
        raise TextRefused(index, texts[0], reason)
    half = len(texts) // 2
    left = await _asked(call, texts[:half])
    suspected = not isinstance(left, str)
    if isinstance(left, str):
        left = await _in_parts(call, texts[:half], left, index)
    # With the left half taken at once it is the right one that was refused: to ask for all of it
    # would tell nothing, unless it is one text.
    right: Vectors | str = reason
    if not suspected or len(texts) == 2:
        right = await _asked(call, texts[half:])
    if isinstance(right, str):
        right = await _in_parts(call, texts[half:], right, index + half)
    return np.concatenate([left, right])


async def _asked(call: Call, texts: list[str]) -> Vectors | str:
    """Return the vectors, or why they are refused."""
    try:
        return await call(texts)
    except InvalidRequest as refused:
        return refused.problem
