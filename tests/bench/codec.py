"""Times the JSON codec against protobuf's json_format in one run: `python tests/bench/codec.py`."""

from __future__ import annotations

import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable

import numpy as np
from google.protobuf import json_format

from mindd.semantic.v1 import semantic_pb2
from mindgrid.api.wire import codec
from mindgrid.api.wire.messages import Hit, Record, SearchRequest, SearchResponse, UpsertRequest
from mindgrid.shards.clock import Instant

SEED = 7
DIMENSIONS = 384


def _vector(random_: random.Random) -> list[float]:
    return [float(np.float32(random_.gauss(0, 0.05))) for _ in range(DIMENSIONS)]


def _best_us(run: Callable[[], object], repeats: int) -> float:
    """Return the least mean over 5 rounds, in CPU time: other programs disturb it least."""
    rounds = []
    for _ in range(5):
        start = time.thread_time()
        for _ in range(repeats):
            run()
        rounds.append((time.thread_time() - start) / repeats)
    return min(rounds) * 1e6


def _row(name: str, ours: Callable[[], object], theirs: Callable[[], object], repeats: int) -> None:
    mine, other = _best_us(ours, repeats), _best_us(theirs, max(1, repeats // 10))
    print(f"{name:44} {mine:12.1f} {other:14.1f} {other / mine:8.1f}")


def _hits() -> SearchResponse:
    hits = [
        Hit(
            record=Record(
                id=f"record-{number}",
                content="the quick brown fox jumps over the lazy dog " * 4,
                metadata={"topic": "animals", "lang": "en"},
                created_at=Instant(1_700_000_000_123_456 + number * 61_000_000),
                valid_from=Instant(1_700_000_000_123_456 + number * 61_000_000),
                version=number,
            ),
            score=float(np.float32(0.9 - number / 37)),
        )
        for number in range(1, 11)
    ]
    return SearchResponse(hits=hits, exact=True, scanned=100_000)


def main() -> None:
    """Print the machine, the command and one row per case."""
    random_ = random.Random(SEED)
    query = {"namespace": "notes", "queryVector": _vector(random_), "topK": 10}
    search = json.dumps(query).encode()
    snake = search.replace(b"queryVector", b"query_vector").replace(b"topK", b"top_k")
    mixed = search.replace(b"topK", b"top_k")
    records = [
        {"id": f"r{number}", "content": "x" * 200, "vector": _vector(random_)}
        for number in range(500)
    ]
    batch = json.dumps({"namespace": "notes", "records": records}).encode()
    hits = _hits()
    printed = codec.encode(hits)
    hits_pb = json_format.Parse(printed, semantic_pb2.SearchResponse())

    def parse_search(body: bytes) -> object:
        return json_format.Parse(body, semantic_pb2.SearchRequest())

    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{sys.executable} {' '.join(sys.argv)}; seed {SEED}\n")
    print(f"{'':44} {'ours, µs':>12} {'json_format':>14} {'ratio':>8}")
    for name, body in (("camelCase", search), ("snake_case", snake), ("mixed: careful", mixed)):
        _row(
            f"read a search of {DIMENSIONS} floats, {name}",
            lambda body=body: codec.decode(SearchRequest, body),  # type: ignore[misc]
            lambda body=body: parse_search(body),  # type: ignore[misc]
            1000,
        )
    _row(
        "print ten hits",
        lambda: codec.encode(hits),
        lambda: json_format.MessageToJson(hits_pb, indent=None),
        2000,
    )
    _row(
        f"read an upsert of 500 x {DIMENSIONS} ({len(batch) / 2**20:.1f} MiB)",
        lambda: codec.decode(UpsertRequest, batch),
        lambda: json_format.Parse(batch, semantic_pb2.UpsertRequest()),
        10,
    )


if __name__ == "__main__":
    main()
