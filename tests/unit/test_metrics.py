"""What Prometheus is told: a gauge is there for as long as the process."""

from __future__ import annotations

import time

import pytest

from mindgrid.api import metrics


class Noted:
    """A gauge that keeps what it was set to."""

    def __init__(self, *_: object, **__: object) -> None:
        self.values: list[tuple[str, float]] = []

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values.append((tags["namespace"], value))


def test_a_count_that_does_not_change_is_told_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gauge = Noted()
    monkeypatch.setattr(metrics, "Gauge", lambda *_, **__: gauge)
    monkeypatch.setattr(metrics, "REPEAT_S", 0.01)
    tell = metrics.TailGauge()
    tell("a", 1)
    tell("a", 2)
    tell("b", 0)
    told = gauge.values[:3]
    assert told == [("a", 1), ("a", 2), ("b", 0)]
    gauge.values.clear()
    until = time.monotonic() + 10
    while len(gauge.values) < 6 and time.monotonic() < until:
        time.sleep(0.01)
    assert set(gauge.values) == {("a", 2), ("b", 0)}
