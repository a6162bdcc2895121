"""A process that holds a handle over its server's restart: `python -m … STORAGE`.

It says where it is, a line at a time, and goes on when it reads one.
"""

from __future__ import annotations

import os

# Ray looks at it when it is imported.
os.environ.setdefault("RAY_AUTH_MODE", "token")

import sys
from pathlib import Path

import mindgrid
from mindgrid.cluster.handle import Handle
from mindgrid.shards.episodic.types import EventDraft, EventRange
from mindgrid.shards.errors import MindgridError

LOG = "runs"


def main(storage: Path) -> None:
    """Append and follow before the restart and after it, first by the old handle."""
    with mindgrid.connect(storage=storage) as handle:
        tail = handle.logs.tail(LOG, EventRange(), historical=True)
        append(handle)
        say(f"followed {next(tail).cursor}")
        sys.stdin.readline()
        for broken in (lambda: append(handle), lambda: next(tail)):
            try:
                broken()
            except MindgridError as error:
                say(type(error).__name__)
    with mindgrid.connect(storage=storage) as handle:
        append(handle)
        with handle.logs.tail(LOG, EventRange(after_cursor=1), historical=True) as tail:
            say(f"followed {next(tail).cursor}")


def append(handle: Handle) -> None:
    """Append one event."""
    handle.logs.append(LOG, [EventDraft("note")], deadline_s=60)


def say(words: str) -> None:
    """Tell the test."""
    print(words, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
