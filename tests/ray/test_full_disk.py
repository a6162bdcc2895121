"""A server whose disk fills up: writes are refused with the remedy, all else goes on."""

from __future__ import annotations

import base64
import os
import time
from pathlib import Path

import pytest
from tests.support.disks import fill, small_disk
from tests.support.servers import KillableServer, Refused, eventually

pytestmark = pytest.mark.ray

DISK_BYTES = 64 << 20


def test_a_server_on_a_full_disk_goes_on_answering_and_writes_once_there_is_room(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        server = KillableServer(disk, {"kept": 2, "other": 1})
        try:
            server.start()
            for name in ("kept", "other"):
                server.call("Upsert", {"records": [{"id": "a", "content": "a"}]}, name)
                server.call("Search", {"queryText": "a"}, name)  # opens every shard
            ballast = fill(disk)
            payload = base64.b64encode(os.urandom(1 << 18)).decode()
            big = {"records": [{"id": "big", "content": "big", "payload": payload}]}
            for _ in range(3):
                with pytest.raises(Refused) as refusal:
                    server.call("Upsert", big)
                assert (refusal.value.http, refusal.value.code) == (503, 14)
                assert "the disk is full; free space on it" in refusal.value.message
            # The supervisor writes its record every ten seconds.
            until = time.monotonic() + 15
            while time.monotonic() < until:
                for name in ("kept", "other"):
                    found = server.call("Search", {"queryText": "a"}, name)
                    assert [hit["record"]["id"] for hit in found["hits"]] == ["a"]
                assert server.ask("GET", "/healthz")[0] == 200
                time.sleep(1)
            ballast.unlink()
            assert server.call("Upsert", big)["versions"] == ["1"]
            eventually(server.is_ready)
        finally:
            server.close()
