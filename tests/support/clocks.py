"""A clock that stands still until a test turns it."""

from __future__ import annotations

from mindgrid.shards.clock import Instant

START = Instant(1_790_000_000_000_000)


class TurnedClock:
    """Shows the same instant until `turn` moves it, forwards or back."""

    def __init__(self, now: Instant = START) -> None:
        self._now = now

    def now(self) -> Instant:
        return self._now

    def turn(self, micros: int) -> None:
        self._now = Instant(self._now + micros)
