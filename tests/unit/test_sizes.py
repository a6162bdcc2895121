"""What bounds of bytes count: every part of a record or an event that a caller may make large."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mindgrid.cluster.gate import write_bytes
from mindgrid.cluster.port import ShardKey, Write
from mindgrid.cluster.spec import NamespaceKey
from mindgrid.shards.episodic.types import Append, EventDraft
from mindgrid.shards.types import Draft, Upsert

MANY = "x" * 10_000
LARGE: list[dict[str, Any]] = [
    {"payload": MANY.encode()},
    {"metadata": {"k": MANY}},
    {"metadata": {MANY: "v"}},
    {"source": MANY},
    {"supersedes": ("i" * 100,) * 100},
]


@pytest.mark.parametrize("large", [*LARGE, {"content": MANY}, {"vector": np.zeros(2_500, "f4")}])
def test_a_record_on_its_way_counts_whole(large: dict[str, Any]) -> None:
    draft = Draft(id="i", **({"content": ""} | large))
    upsert = Upsert("", (draft, draft))
    shard = ShardKey(NamespaceKey("semantic", "notes"), 1, 0)
    assert 20_000 <= write_bytes(Write(shard, upsert)) < 22_000


@pytest.mark.parametrize("large", LARGE)
def test_an_event_on_its_way_counts_whole(large: dict[str, Any]) -> None:
    draft = EventDraft("message", **large)
    shard = ShardKey(NamespaceKey("episodic", "runs"), 1, 0)
    assert 20_000 <= write_bytes(Write(shard, Append((draft, draft)))) < 22_000
