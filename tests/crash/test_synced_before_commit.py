"""Whatever a manifest names was synced before the commit that names it, as strace saw it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.traces import COMMAND, Trace

ROOT = Path(__file__).resolve().parents[2]

_CHILD = """
import json, os, sys
from pathlib import Path
from mindgrid.shards import faults
from tests.support.clocks import TurnedClock
from tests.support.shards import do, history, open_here

folder, marks, careless = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "careless"
if careless:
    os.fsync = lambda fd: None
marks = os.open(marks, os.O_WRONLY | os.O_CREAT)

def mark(event, files=()):
    os.write(marks, (json.dumps({"event": event, "files": list(files)}) + "\\n").encode())

def hook(name):
    if name == "manifest.switched":
        named = shard._maintenance.manifest.folders
        mark(name, [f"{folder}/{digest.path}" for folder, files in named for digest in files])
    elif name == "manifest.switching":
        mark(name)

clock = TurnedClock()
shard = open_here(folder, clock=clock)
faults.set_hook(hook)
for command in history():
    clock.turn(1_000)
    do(shard, command)
    mark("acknowledged")
clock.turn(100_000_000)
shard.compact()
print(json.dumps(shard.counters))
shard.close()
"""


@dataclass(frozen=True)
class Run:
    """A traced writer: its trace, and what it said at each of the trace's marks."""

    folder: Path
    trace: Trace
    said: list[tuple[int, str, list[str]]]
    counters: dict[str, int]


@pytest.fixture(scope="module")
def careful(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("careful"), "careful")


def run(tmp_path: Path, how: str) -> Run:
    """Trace a child that writes, seals, merges, indexes and compacts."""
    if shutil.which(COMMAND[0]) is None:
        pytest.skip("strace is not installed, and only it sees what is synced")
    folder, marks, trace = (tmp_path / n for n in ("storage/ns/g1/s0", "marks", "trace"))
    command = [*COMMAND, "-o", str(trace), sys.executable, "-c", _CHILD]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        [*command, str(folder), str(marks), how],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if "ptrace" in done.stderr and "not permitted" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    read = Trace(trace.read_text(errors="replace").splitlines(), marks)
    lines = [json.loads(line) for line in marks.read_text().splitlines()]
    assert len(lines) == len(read.marks)
    said = [(at, line["event"], line["files"]) for at, line in zip(read.marks, lines, strict=True)]
    return Run(folder, read, said, json.loads(done.stdout))


def losses(run: Run) -> list[str]:
    """Return what a power cut right at one of the manifest's commits might have lost."""
    found: list[str] = []
    for (began, event, _), (_, done, files) in zip(run.said, run.said[1:], strict=False):
        if event != "manifest.switching":
            continue
        assert done == "manifest.switched"
        commit = run.trace.first_sync(run.folder / "journal.sqlite-wal", began)
        paths = {run.folder / file for file in files}
        # Folders too, up to those that were there before: a name in each is what leads to a file.
        paths |= {up for path in paths for up in path.parents if run.trace.made(up)}
        found += filter(None, (run.trace.unsynced(path, commit) for path in sorted(paths)))
    return found


def test_all_that_a_manifest_names_was_synced_before_the_commit_that_names_it(
    careful: Run,
) -> None:
    assert careful.counters["seals"] > 5
    assert careful.counters["merges"] > 2
    assert careful.counters["index_builds"] > 0
    assert careful.counters["index_extends"] > 0
    switched = [files for _, event, files in careful.said if event == "manifest.switched"]
    assert len(switched) > 15
    named = {Path(file).name for files in switched for file in files}
    assert named >= {"vectors.f32", "squares.f64", "values.arrow", "ivf.faiss", "numbers.npy"}
    assert losses(careful) == []
    strange = [call for call in careful.trace.strange if str(careful.folder) in call]
    assert all("journal.sqlite-shm" in call for call in strange), "written past this test's eyes"


def test_every_acknowledged_commit_was_synced_before_the_answer(careful: Run) -> None:
    answers = [at for at, event, _ in careful.said if event == "acknowledged"]
    assert len(answers) > 10
    for at in answers:
        for name in ("journal.sqlite", "journal.sqlite-wal"):
            assert not careful.trace.unsynced(careful.folder / name, at)


def test_a_writer_that_does_not_sync_is_found_out(tmp_path: Path) -> None:
    found = losses(run(tmp_path, "careless"))
    for kind in ("vectors.f32: its bytes", "values.arrow: its bytes", ".manifest: its bytes"):
        assert any(loss.endswith(kind) for loss in found), kind
    assert any(loss.endswith("rows.lance: its name") for loss in found)
