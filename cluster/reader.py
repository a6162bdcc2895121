"""A shard as one call of a host reads it: what it fails with bears its name, whatever it is."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mindgrid.cluster.port import ShardKey
from mindgrid.shards.driver import Found, SemanticShard
from mindgrid.shards.errors import (
    InDoubt,
    Locked,
    MindgridError,
    OperatorError,
    RetryError,
    Unavailable,
)
from mindgrid.shards.types import Answer, Query, Scan, Scanned, Selection, Stamp, Want

log = logging.getLogger(__name__)


class Reader:
    """A shard as one call reads it: its errors bear its name, and a bug is one of them.

    `failed` says whether one was no caller's fault.
    """

    __slots__ = ("failed", "key", "shard")

    def __init__(self, key: ShardKey, shard: SemanticShard) -> None:
        self.key = key
        self.shard = shard
        self.failed = False

    def search(self, queries: Sequence[Query], stamp: Stamp) -> list[Answer | MindgridError]:
        """See `SemanticShard.search`; raises nothing."""
        try:
            answers = self.shard.search(queries, stamp)
        except Exception as error:  # noqa: BLE001 - see `named`
            return [self._noted(error)] * len(queries)
        return [self._noted(a) if isinstance(a, MindgridError) else a for a in answers]

    def get(
        self, ids: Sequence[str], selection: Selection, want: Want, stamp: Stamp
    ) -> Found | MindgridError:
        """See `SemanticShard.get`; raises nothing."""
        try:
            found = self.shard.get(ids, selection, want, stamp)
        except Exception as error:  # noqa: BLE001 - see `named`
            return self._noted(error)
        return self._noted(found) if isinstance(found, MindgridError) else found

    def scan(self, scan: Scan, stamp: Stamp) -> Scanned | MindgridError:
        """See `SemanticShard.scan`; raises nothing."""
        try:
            scanned = self.shard.scan(scan, stamp)
        except Exception as error:  # noqa: BLE001 - see `named`
            return self._noted(error)
        return self._noted(scanned) if isinstance(scanned, MindgridError) else scanned

    def probe(self, stamp: Stamp) -> MindgridError | None:
        """Return why the shard answers nothing any more, not even a read of no id.

        None for one that answers, and for a bug, which it would have again when opened anew.
        """
        try:
            found: object = self.shard.get((), Selection(), Want.ID, stamp)
        except Exception as error:  # noqa: BLE001 - see `named`
            found = self._noted(error) if isinstance(error, MindgridError) else None
        return found if isinstance(found, MindgridError) and is_fault(found) else None

    def _noted(self, error: Exception) -> MindgridError:
        self.failed = self.failed or is_fault(error)
        return named(f"shard {self.key}", error)


def is_fault(error: BaseException | None) -> bool:
    """Return whether it says that the shard itself is in trouble, whoever asks."""
    waits = isinstance(error, InDoubt | Locked)
    return isinstance(error, RetryError | OperatorError) and not waits


def named(what: str, error: BaseException) -> MindgridError:
    """Return what callers are told: the cluster's name of the part, or that there is a bug.

    A shard knows itself by its folder only. A bug is logged here with its traceback.
    """
    if isinstance(error, Unavailable):
        return Unavailable(what, error.reason)
    if isinstance(error, MindgridError):
        return error
    log.error("a call of %s failed", what, exc_info=error)
    return Unavailable(what, "internal error; see the host's log")
