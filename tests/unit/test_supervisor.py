"""A supervised process: how long it pauses between starts, and what is kept of its log."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from mindgrid.cluster.supervisor import Child, keep_last


def test_a_process_that_failed_two_thousand_times_is_started_again(tmp_path: Path) -> None:
    child = Child("driver", tmp_path / "driver.log", 0.5, 30.0, failures=2_000)
    child.start([sys.executable, "-c", "print('last words')"], os.environ)
    assert child.running is not None
    child.running.wait(30)
    assert child.has_ended()
    assert 29 < child.next_start - time.monotonic() <= 30
    assert child.last_words() == "last words"


def test_the_log_of_the_last_run_is_kept_and_of_no_more(tmp_path: Path) -> None:
    log_file = tmp_path / "head.log"
    keep_last(log_file)
    for run in ("first", "second"):
        log_file.write_text(run)
        keep_last(log_file)
        assert not log_file.exists()
        assert (tmp_path / "head.log.1").read_text() == run
    assert [path.name for path in tmp_path.iterdir()] == ["head.log.1"]
