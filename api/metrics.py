"""What the door tells Prometheus, by way of Ray's metrics port, which prefixes the names."""

from __future__ import annotations

from ray.util.metrics import Gauge


class TailGauge:
    """How many subscribers each episodic namespace has at this replica."""

    def __init__(self) -> None:
        """Register the gauge."""
        words = "Open tails of an episodic namespace at one replica of the door."
        self._gauge = Gauge("mindd_tail_subscribers", words, tag_keys=("namespace",))

    def __call__(self, namespace: str, count: int) -> None:
        """Note that the namespace has so many now."""
        self._gauge.set(count, tags={"namespace": namespace})
