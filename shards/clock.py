"""Time as the engine sees it: whole microseconds since 1970, from a clock that is passed in."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import NewType, Protocol

Instant = NewType("Instant", int)
"""Microseconds since 1970-01-01T00:00:00Z; between YEAR_1 and YEAR_9999."""

YEAR_1 = Instant(-62_135_596_800_000_000)
YEAR_9999 = Instant(253_402_300_799_999_999)
NEVER = Instant(2**63 - 1)
"""A bound that no instant reaches: an open end in a lifecycle column."""


def spelled(instant: int) -> str:
    """Return the instant in RFC 3339, for people."""
    when = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=instant)
    return when.isoformat().replace("+00:00", "Z")


class Clock(Protocol):
    """Where the time comes from; tests pass one they can turn."""

    def now(self) -> Instant:
        """Return the wall-clock time; it may step back."""
        ...


class SystemClock:
    """The machine's own wall clock."""

    def now(self) -> Instant:
        """Return the wall-clock time, cut to the microsecond."""
        return Instant(time.time_ns() // 1000)
