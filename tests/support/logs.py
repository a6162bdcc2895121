"""Episodic logs of which every step runs in the calling thread, one for each driver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mindgrid.shards.clock import Clock
from mindgrid.shards.episodic.log import EventLog
from mindgrid.shards.episodic.memory import MemoryLog
from mindgrid.shards.episodic.types import (
    Append,
    Appended,
    EpisodicLog,
    Event,
    EventDraft,
    EventRange,
    ExpireEvents,
    LogConfig,
)
from mindgrid.shards.groups import Workers
from mindgrid.shards.types import Expired
from tests.support.shards import Here

SMALL = LogConfig(seal_events=8, seal_after_s=1e9, merge_fanout=3, recent_events=4)
"""Seals and merges after a few events."""

OpenLog = Callable[[Path, LogConfig, Clock], EpisodicLog]


def open_log(folder: Path, config: LogConfig, clock: Clock, epoch: int = 1) -> EventLog:
    """Open a durable log whose commits seal and merge before they are answered."""
    here = Here()
    return EventLog.open(folder, config, epoch, clock, Workers(here, here))


def memory_log(_folder: Path, config: LogConfig, clock: Clock) -> MemoryLog:
    """Return the oracle."""
    return MemoryLog(config, clock)


def append(log: EpisodicLog, *drafts: EventDraft, expected: int | None = None) -> list[Event]:
    """Append in one commit and return the events; raises what it fails with."""
    result = log.submit(Append(drafts, expected)).result()
    assert isinstance(result, Appended)
    return list(result.events)


def expire(log: EpisodicLog, command: ExpireEvents) -> int:
    """Return how many events it affected."""
    result = log.submit(command).result()
    assert isinstance(result, Expired)
    return result.affected


def events(log: EpisodicLog, range: EventRange | None = None, page: int = 1_000) -> list[Event]:
    """Return a whole range, read in pages of so many events."""
    return [event for part in pages(log, range, page) for event in part]


def pages(
    log: EpisodicLog, range: EventRange | None = None, page: int = 1_000
) -> list[tuple[Event, ...]]:
    """Return the pages of a range, each read behind the last one's end."""
    from msgspec.structs import replace

    range = range or EventRange()
    found: list[tuple[Event, ...]] = []
    while True:
        one = log.read(range, page)
        found.append(one.events)
        if not one.more:
            return found
        end = one.events[-1].cursor
        range = (
            replace(range, before_cursor=end) if range.reverse else replace(range, after_cursor=end)
        )
