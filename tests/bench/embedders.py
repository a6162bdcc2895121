"""Measures the local embedder: `PYTHONPATH=src python tests/bench/embedders.py`.

Texts are docstrings of the standard library, as `make demo` indexes them. The peer in the same run
is the bare model: one text a call, no queue, no cache, nothing around it.
"""

from __future__ import annotations

import ast
import asyncio
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from mindgrid.cluster.embedders.local import Local
from mindgrid.cluster.embedders.protocol import EmbedderSpec, Embedding
from mindgrid.cluster.embedders.service import EmbedService
from mindgrid.cluster.spec import NamespaceKey
from mindgrid.shards.types import Space

SEED = 7
TEXTS = 400
QUERIES = 40
SPEC = EmbedderSpec(Space("local", "all-MiniLM-L6-v2", "", 384))
NOTES = NamespaceKey("semantic", "notes")


def docstrings() -> list[str]:
    """Return docstrings of the standard library, drawn with a fixed seed."""
    found = set()
    for file in sorted(Path(os.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (
                text := ast.get_docstring(node)
            ):
                found.add(text)
    return random.Random(SEED).sample(sorted(found), TEXTS)


def timed(start: tuple[float, float]) -> tuple[float, float]:
    """Return the wall and the processor seconds since `start`."""
    return time.perf_counter() - start[0], time.process_time() - start[1]


def now() -> tuple[float, float]:
    """Return a start for `timed`."""
    return time.perf_counter(), time.process_time()


async def one_by_one(model: Local, texts: list[str]) -> float:
    """Return texts per processor second of the bare model."""
    start = now()
    for text in texts:
        await model.embed([text])
    return len(texts) / timed(start)[1]


async def main() -> None:
    """Print every figure."""
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, seed {SEED}")
    print(f"Python {platform.python_version()}: {' '.join(sys.argv)}")
    texts = docstrings()
    start = now()
    model = Local(SPEC)
    print(f"model loaded and verified in {timed(start)[0]:.2f} s")
    tokens = sum(len(one.ids) for one in model._tokenizer.encode_batch(texts))
    print(f"{len(texts)} texts of {tokens / len(texts):.0f} tokens in the mean (256 at most)")

    bare = await one_by_one(model, texts)
    print(
        f"bare model         {bare:7.1f} texts/s of processor, {bare * tokens / TEXTS:.0f} tokens/s"
    )

    service = EmbedService({NOTES: Embedding(SPEC)})
    await service.embed(NOTES, ["warm"])
    start = now()
    vectors = await service.embed(NOTES, texts)
    wall, processor = timed(start)
    rate = TEXTS / processor
    print(
        f"service, one batch {rate:7.1f} texts/s of processor ({rate / bare:.2f} of the bare model)"
    )
    print(f"                   {TEXTS / wall:7.1f} texts/s by the clock")

    start = now()
    again = await service.embed(NOTES, texts)
    assert np.array_equal(vectors, again)
    print(f"service, cached    {TEXTS / timed(start)[0]:7.0f} texts/s by the clock")

    print(f"query of 7 words   p50 {await latency(service, 'idle'):.0f} ms alone")
    load = asyncio.create_task(service.embed(NOTES, [f"again: {text}" for text in texts]))
    await asyncio.sleep(0.1)
    print(f"                   p50 {await latency(service, 'busy'):.0f} ms beside that batch")
    load.cancel()


async def latency(service: EmbedService, word: str) -> float:
    """Return the median milliseconds of a query that is in no cache."""
    took = []
    for number in range(QUERIES if word == "idle" else 8):
        start = now()
        await service.embed(NOTES, [f"how to {word} split a string {number}"])
        took.append(timed(start)[0] * 1000)
    return statistics.median(took)


if __name__ == "__main__":
    asyncio.run(main())
