"""Rules that both drivers follow: what an event is made of, and what retention asks for. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from mindgrid.shards.clock import Instant
from mindgrid.shards.episodic.types import Event, EventAction, EventDraft, ExpireEvents, LogConfig

RETENTION_STEP_EVENTS = 10_000
"""So many events are removed in one commit, so that appends come in between."""


def stored(draft: EventDraft, id: str, cursor: int, at: Instant) -> Event:
    """Return the event that a draft becomes."""
    return Event(
        id=id,
        cursor=cursor,
        timestamp=at,
        type=draft.type,
        payload=draft.payload,
        metadata=draft.metadata,
        role=draft.role,
        session_id=draft.session_id,
        supersedes=draft.supersedes,
        source=draft.source,
        deleted_at=None,
    )


def retention(config: LogConfig, now: Instant, last_cursor: int) -> Iterator[ExpireEvents]:
    """Yield the commands that remove what a log no longer keeps, a step of each bound."""
    hard, step = EventAction.HARD_DELETE, RETENTION_STEP_EVENTS
    if config.retention_age_s is not None:
        oldest = Instant(now - int(config.retention_age_s * 1e6))
        yield ExpireEvents(hard, step, before_time=oldest)
    if config.retention_events is not None and last_cursor > config.retention_events:
        yield ExpireEvents(hard, step, before_cursor=last_cursor - config.retention_events + 1)
