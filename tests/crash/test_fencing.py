"""Exactly one process writes in a shard's folder, whatever happens to the other or to its locks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from mindgrid.shards.errors import Moved, StorageLocked, Unavailable
from mindgrid.shards.journal import Entry, Journal
from mindgrid.shards.lock import FolderLock

_OWNER = """
import os, sys
from pathlib import Path
from mindgrid.shards import errors
from mindgrid.shards.journal import Entry, Journal
from mindgrid.shards.lock import FolderLock
folder = Path(sys.argv[1])
lock = FolderLock(folder)
journal = Journal(lock, int(sys.argv[2]))
print("open", flush=True)
for line in sys.stdin:
    try:
        if line == "append\\n":
            seq = journal.last_seq + 1
            journal.append(Entry(seq, seq, 1, sys.argv[2].encode()))
        elif line == "stray\\n":  # drops every POSIX lock of this process on the file
            os.close(os.open(folder / "journal.sqlite", os.O_RDONLY))
            os.close(os.open(folder / "journal.sqlite-shm", os.O_RDONLY))
        elif line == "blind\\n":  # as if the LOCK file's guard did not exist
            lock.is_held = lambda: True
        print("ok", flush=True)
    except errors.MindgridError as error:
        print(type(error).__name__, flush=True)
"""


class Owner:
    """A process that owns the folder and does what it is told."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OWNER, str(folder), str(epoch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "open"

    def tell(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    started = Owner(tmp_path, 1)
    yield started
    started.end()


def payloads(folder: Path) -> list[bytes]:
    with FolderLock(folder) as lock:
        journal = Journal(lock, 9)
        found = [entry.payload for entry in journal.replay()]
        journal.close()
    return found


def test_a_second_process_is_refused_and_told_who_has_it(owner: Owner, tmp_path: Path) -> None:
    assert owner.tell("append") == "ok"
    with pytest.raises(StorageLocked, match=f"process {owner.process.pid} "):
        FolderLock(tmp_path)
    assert owner.tell("append") == "ok"


def test_a_stopped_owner_keeps_the_folder(owner: Owner, tmp_path: Path) -> None:
    os.kill(owner.process.pid, signal.SIGSTOP)
    with pytest.raises(StorageLocked):
        FolderLock(tmp_path)
    os.kill(owner.process.pid, signal.SIGCONT)
    assert owner.tell("append") == "ok"


def test_a_stray_open_and_close_lets_nobody_in(owner: Owner, tmp_path: Path) -> None:
    assert owner.tell("append") == "ok"
    assert owner.tell("stray") == "ok"
    with pytest.raises(StorageLocked):
        FolderLock(tmp_path)
    assert owner.tell("append") == "ok"
    owner.end()
    assert payloads(tmp_path) == [b"1", b"1"]


def test_an_owner_that_died_leaves_the_folder_free(owner: Owner, tmp_path: Path) -> None:
    assert owner.tell("append") == "ok"
    owner.end()
    assert payloads(tmp_path) == [b"1"]


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("stray", [False, True])
@pytest.mark.parametrize("epoch", [1, 2])
def test_an_owner_whose_lock_was_lost_cannot_commit_after_the_next_one_opened(
    owner: Owner, tmp_path: Path, stopped: bool, stray: bool, epoch: int
) -> None:
    """Someone deleted LOCK: only the head row fences now, even between two equal epochs."""
    assert owner.tell("append") == "ok"
    assert owner.tell("blind") == "ok"
    if stray:
        assert owner.tell("stray") == "ok"
    if stopped:
        os.kill(owner.process.pid, signal.SIGSTOP)
    (tmp_path / "LOCK").unlink()
    with FolderLock(tmp_path) as lock:
        journal = Journal(lock, epoch)
        journal.append(Entry(2, 2, 1, b"new owner"))
        os.kill(owner.process.pid, signal.SIGCONT)
        assert owner.tell("append") == "Moved"
        assert owner.tell("append") == "Unavailable"
        journal.append(Entry(3, 3, 1, b"new owner"))
        journal.close()
    owner.end()
    assert payloads(tmp_path) == [b"1", b"new owner", b"new owner"]


def test_an_owner_notices_by_itself_that_its_lock_file_is_gone(
    owner: Owner, tmp_path: Path
) -> None:
    assert owner.tell("append") == "ok"
    (tmp_path / "LOCK").unlink()
    assert owner.tell("append") == "Unavailable"


def test_an_older_appointment_is_refused(owner: Owner, tmp_path: Path) -> None:
    owner.end()
    with FolderLock(tmp_path) as lock:
        Journal(lock, 3).close()
        with pytest.raises(Moved, match="epoch 3"):
            Journal(lock, 2)


def _try_to_append(journal: Journal, lock: FolderLock) -> None:
    assert not lock.is_held()
    try:
        journal.append(Entry(journal.last_seq + 1, journal.last_seq + 1, 1, b"child"))
    except Unavailable:
        os._exit(7)
    os._exit(1)


def _say_that_it_runs_and_sleep(runs: Connection) -> None:
    runs.send(None)
    signal.pause()


def test_a_forked_child_neither_writes_nor_keeps_the_lock(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    journal = Journal(lock, 1)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_try_to_append, args=(journal, lock))
    child.start()
    child.join()
    assert child.exitcode == 7
    runs, said = context.Pipe(duplex=False)
    sleeper = context.Process(target=_say_that_it_runs_and_sleep, args=(said,))
    sleeper.start()
    assert runs.poll(30)  # it closes its copy of the lock before it comes to say so
    journal.append(Entry(1, 1, 1, b"parent"))
    journal.close()
    lock.release()
    try:
        assert payloads(tmp_path) == [b"parent"]
    finally:
        sleeper.kill()
        sleeper.join()


def test_a_program_that_the_owner_starts_does_not_inherit_the_lock(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    lock.release()
    try:
        FolderLock(tmp_path).release()
    finally:
        child.kill()
        child.wait()
