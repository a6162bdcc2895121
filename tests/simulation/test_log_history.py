"""Any history of appends, expiries, seals, merges and restarts reads on disk as in the oracle."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mindgrid.shards.clock import Instant
from mindgrid.shards.episodic.memory import MemoryLog
from mindgrid.shards.episodic.types import (
    Append,
    Appended,
    EpisodicLog,
    Event,
    EventAction,
    EventDraft,
    EventRange,
    ExpireEvents,
    LogCommand,
    LogConfig,
)
from mindgrid.shards.errors import MindgridError
from tests.support.clocks import START, TurnedClock
from tests.support.logs import events, open_log

RAM = "/dev/shm" if Path("/dev/shm").is_dir() else None
CONFIG = LogConfig(
    seal_events=6, seal_after_s=1e9, merge_fanout=2, recent_events=4, retention_events=60
)
PATHS = ("seals", "merges", "reopened", "compacted", "from_runs", "removed", "repeated")
"""What the histories of a run must have met, each at least once."""


class Turn(int):
    """Moves the clock."""


class Again(int):
    """Repeats an earlier command that has a transaction id."""


REOPEN, COMPACT, TEND = "reopen", "compact", "tend"
_NAMES = st.sampled_from(["", "a", "b", "c"])
_CURSORS = st.integers(0, 80)
_TIMES = st.none() | st.integers(-5, 200).map(lambda n: Instant(START + n))

_DRAFTS = st.builds(
    EventDraft,
    type=st.sampled_from(["message", "fact"]),
    payload=st.binary(max_size=8),
    metadata=st.dictionaries(_NAMES, _NAMES, max_size=2),
    role=_NAMES,
    session_id=_NAMES,
    dedup_key=st.sampled_from([*[""] * 9, *"klmnopqrs"]),
    # Cursors stand for the ids that each log has given them.
    supersedes=st.lists(st.integers(1, 60).map(str), max_size=2).map(tuple),
    source=_NAMES,
)
_IDS = st.sampled_from(["", "", "t1", "t2", "t3", "t4"])
_APPENDS = st.builds(
    Append,
    st.lists(_DRAFTS, max_size=6).map(tuple),
    st.sampled_from([None] * 7 + [0]) | _CURSORS,
    _IDS,
)
_EXPIRIES = st.builds(
    ExpireEvents,
    action=st.sampled_from(EventAction),
    max_rows=st.integers(1, 6),
    before_cursor=st.integers(1, 80),
    before_time=_TIMES,
    transaction_id=_IDS,
)
_RANGES = st.builds(
    EventRange,
    after_cursor=st.just(0) | _CURSORS,
    before_cursor=st.just(0) | _CURSORS,
    after_time=_TIMES,
    before_time=_TIMES,
    session_id=_NAMES,
    role=_NAMES,
    type=st.sampled_from(["", "message"]),
    include_deleted=st.booleans(),
    reverse=st.booleans(),
)
_OPERATIONS = st.one_of(
    *[_APPENDS] * 6,
    _EXPIRIES,
    _RANGES,
    _RANGES,
    st.integers(-3, 20).map(Turn),
    st.integers(0, 50).map(Again),
    st.sampled_from([REOPEN, COMPACT, TEND]),
)
HISTORIES = st.lists(_OPERATIONS, min_size=20, max_size=60)


class Pair:
    """A log on disk and its oracle, which are told the same."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = TurnedClock()
        self.epoch = 1
        self.log = open_log(folder, CONFIG, self.clock, self.epoch)
        self.oracle = MemoryLog(CONFIG, self.clock)
        self.paths: Counter[str] = Counter()
        self.commands: list[LogCommand] = []

    def run(self, operation: object) -> None:
        if isinstance(operation, Turn):
            self.clock.turn(operation)
        elif isinstance(operation, Again):
            remembered = [one for one in self.commands if one.transaction_id]
            if remembered:
                self.paths["repeated"] += 1
                self._submit(remembered[operation % len(remembered)])
        elif isinstance(operation, EventRange):
            self._read(operation)
        elif isinstance(operation, Append | ExpireEvents):
            self.commands.append(operation)
            self._submit(operation)
        elif operation == REOPEN:
            self.reopen()
        elif operation == COMPACT:
            self.log.compact()
            self.paths["compacted"] += 1
        else:
            self.log.tend()
            self.oracle.tend()

    def reopen(self) -> None:
        self.paths.update(self.log.counters)
        self.log.close()
        self.epoch += 1
        self.log = open_log(self.folder, CONFIG, self.clock, self.epoch)
        self.paths["reopened"] += 1
        self._read(EventRange(include_deleted=True))

    def _submit(self, command: LogCommand) -> None:
        told = [_told(log, command) for log in (self.log, self.oracle)]
        assert told[0] == told[1], f"{told[0]} on disk, {told[1]} in the oracle, of {command}"
        if isinstance(command, ExpireEvents) and command.action is EventAction.HARD_DELETE:
            self.paths["removed"] += 1

    def _read(self, range: EventRange) -> None:
        for page in (3, 1_000):
            found, wanted = (
                list(map(_blank, events(log, range, page))) for log in (self.log, self.oracle)
            )
            assert found == wanted
        if found and found[0].cursor < self.log._store.recent_first:
            self.paths["from_runs"] += 1
        last = self.log.read(EventRange(), 1).last_cursor
        assert last == self.oracle.read(EventRange(), 1).last_cursor


def _told(log: EpisodicLog, command: LogCommand) -> object:
    if isinstance(command, Append):
        command = replace(
            command,
            drafts=tuple(
                replace(draft, supersedes=tuple(_id_of(log, int(at)) for at in draft.supersedes))
                for draft in command.drafts
            ),
        )
    try:
        result = log.submit(command).result()
    except MindgridError as error:
        return type(error), str(error)
    if isinstance(result, Appended):
        return result.committed_at, tuple(map(_blank, result.events))
    return result


def _id_of(log: EpisodicLog, cursor: int) -> str:
    found = log.read(EventRange(cursor - 1, cursor + 1, include_deleted=True), 1).events
    return found[0].id if found else "nobody"


def _blank(event: Event) -> Event:
    """Return the event without what is each log's own."""
    return replace(event, id="", supersedes=("",) * len(event.supersedes))


def _settings(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        # Each step has a fixed price, so a shorter history tells no more and takes minutes to find.
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


def run_history(operations: list[object], paths: Counter[str]) -> None:
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        pair = Pair(Path(folder) / "log")
        try:
            for operation in operations:
                pair.run(operation)
            pair.reopen()
        finally:
            pair.log.close()
        paths.update(pair.paths)


def test_any_history_reads_as_in_the_oracle() -> None:
    paths: Counter[str] = Counter()

    @_settings(80)
    @given(HISTORIES)
    def histories(operations: list[object]) -> None:
        run_history(operations, paths)

    histories()
    assert all(paths[path] for path in PATHS), paths


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_ten_minutes_of_histories_read_as_in_the_oracle() -> None:
    paths: Counter[str] = Counter()
    until = time.monotonic() + 600

    @_settings(200)
    @given(HISTORIES)
    def histories(operations: list[object]) -> None:
        run_history(operations, paths)

    while time.monotonic() < until:
        histories()
    print(paths)
