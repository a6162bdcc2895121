"""What a log knows once its cluster was closed and started anew, over the same folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.callers import FUTURE
from tests.support.log_callers import local_logs

from mindgrid.shards.config import Driver
from mindgrid.shards.episodic.types import EventRange
from mindgrid.shards.errors import LostEvents


def test_events_keys_and_tombstones_are_there_after_a_restart(tmp_path: Path) -> None:
    with local_logs(tmp_path, Driver.LANCE) as local:
        log = local.desk.log()
        first = log.append("v1", role="user", dedupKey="k")
        log.fill(200)
        log.append("v2", supersedes=[first["id"]])
        told = log.range(includeDeleted=True)
    with local_logs(tmp_path, Driver.LANCE) as local:
        log = local.desk.log()
        assert log.range(includeDeleted=True) == told
        assert log.append(dedupKey="k") == told[0]
        assert log.cursors() == list(range(2, 203))
        assert log.append(expectedCursor=202)["cursor"] == "203"


def test_no_cursor_is_given_again_after_everything_was_removed(tmp_path: Path) -> None:
    with local_logs(tmp_path, Driver.LANCE) as local:
        log = local.desk.log()
        log.fill(100)
        assert log.expire("HARD_DELETE", beforeTime=FUTURE) == 100
    with local_logs(tmp_path, Driver.LANCE) as local:
        log = local.desk.log()
        assert log.extent() == (101, 100)
        assert log.range(includeDeleted=True) == []
        log.refused("Append", code=9, type="message", expectedCursor=0)
        assert log.append(dedupKey="k")["cursor"] == "101"


def test_who_followed_a_log_in_ram_is_told_that_its_host_lost_it(tmp_path: Path) -> None:
    with local_logs(tmp_path, Driver.MEMORY) as local:
        log = local.desk.log()
        tail = log.tail()
        log.fill(5)
        assert tail.cursors(5) == [1, 2, 3, 4, 5]
        local.desk.run(local.cluster.restart("host-0"))
        error = tail.error()
        assert error["code"] == 15
        assert "ends at cursor 0, but was at 5" in error["message"]
        log.append()
        assert log.cursors() == [1]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_range_that_its_host_loses_on_the_way_ends_with_an_error(
    tmp_path: Path, reverse: bool
) -> None:
    with local_logs(tmp_path, Driver.MEMORY) as local:
        log, grid = local.desk.log(), local.desk.grid
        log.fill(2_500)

        async def read() -> None:
            parts = await grid.logs.range(log.namespace, EventRange(reverse=reverse))
            first = await anext(parts)
            assert len(first) == 1_000
            await local.cluster.restart("host-0")
            with pytest.raises(LostEvents):
                await anext(parts)

        local.desk.run(read())


def test_a_replay_that_its_host_loses_on_the_way_ends_with_an_error(tmp_path: Path) -> None:
    with local_logs(tmp_path, Driver.MEMORY) as local:
        log, grid = local.desk.log(), local.desk.grid
        log.fill(2_500)

        async def read() -> None:
            tail = await grid.logs.tail(log.namespace, EventRange(), historical=True)
            assert len(await tail.next()) == 1_000
            await local.cluster.restart("host-0")
            with pytest.raises(LostEvents):
                await tail.next()
            tail.close()

        local.desk.run(read())
