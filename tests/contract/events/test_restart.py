"""What a log knows once its cluster was closed and started anew, over the same folder."""

from __future__ import annotations

from pathlib import Path

from tests.support.callers import FUTURE
from tests.support.log_callers import local_logs

from mindgrid.shards.config import Driver


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
        assert log.range(includeDeleted=True) == []
        log.refused("Append", code=9, type="message", expectedCursor=0)
        assert log.append(dedupKey="k")["cursor"] == "101"
