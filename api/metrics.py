"""What the door tells Prometheus, by way of Ray's metrics port, which prefixes the names."""

from __future__ import annotations

import threading
import time

from ray.util.metrics import Gauge

REPEAT_S = 5.0
"""Ray forgets a gauge that was not set for two of its reports, 20 s at most."""


class TailGauge:
    """How many subscribers each episodic namespace has at this replica."""

    def __init__(self) -> None:
        """Register the gauge; a thread that ends with the process sets it again and again."""
        words = "Open tails of an episodic namespace at one replica of the door."
        self._gauge = Gauge("mindd_tail_subscribers", words, tag_keys=("namespace",))
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        threading.Thread(target=self._repeat, name="tail gauge", daemon=True).start()

    def __call__(self, namespace: str, count: int) -> None:
        """Note that the namespace has so many now."""
        with self._lock:
            self._counts[namespace] = count
            self._gauge.set(count, tags={"namespace": namespace})

    def _repeat(self) -> None:
        while True:
            time.sleep(REPEAT_S)
            with self._lock:
                for namespace, count in self._counts.items():
                    self._gauge.set(count, tags={"namespace": namespace})
