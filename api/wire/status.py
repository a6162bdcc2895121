"""Which gRPC code and which HTTP status each error answers with; the only place that knows."""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from mindgrid.shards import errors

_log = logging.getLogger(__name__)

HTTP = {
    1: 499,  # CANCELLED
    2: 500,  # UNKNOWN
    3: 400,  # INVALID_ARGUMENT
    4: 504,  # DEADLINE_EXCEEDED
    5: 404,  # NOT_FOUND
    6: 409,  # ALREADY_EXISTS
    7: 403,  # PERMISSION_DENIED
    8: 429,  # RESOURCE_EXHAUSTED
    9: 400,  # FAILED_PRECONDITION
    10: 409,  # ABORTED
    11: 400,  # OUT_OF_RANGE
    12: 501,  # UNIMPLEMENTED
    13: 500,  # INTERNAL
    14: 503,  # UNAVAILABLE
    15: 500,  # DATA_LOSS
    16: 401,  # UNAUTHENTICATED
}

_CODES: dict[type[errors.MindgridError], int] = {
    errors.InvalidRequest: 3,
    errors.NotFound: 5,
    errors.PreconditionFailed: 9,
    errors.CursorMismatch: 9,
    errors.Unimplemented: 12,
    errors.Unauthenticated: 16,
    errors.PermissionDenied: 7,
    errors.TooLarge: 8,
    errors.TextRefused: 3,
    errors.Exhausted: 8,
    errors.Lagged: 8,
    errors.Unavailable: 14,
    errors.DeadlineExceeded: 4,
    # Of handles only; a replica ends with its cluster.
    errors.ClusterReplaced: 14,
    # A caller that meets Moved has outrun every retry of ours; the same request may succeed.
    errors.Moved: 14,
    # Nor of these: whoever orders the commits, or asks again, has waited until the deadline.
    errors.Locked: 14,
    errors.InDoubt: 14,
    errors.Corruption: 15,
    errors.LostEvents: 15,
    errors.StorageLocked: 14,
    errors.FormatTooNew: 14,
    errors.ConfigError: 14,
}


class Status(NamedTuple):
    """What a failed call answers."""

    code: int
    http: int
    message: str


NO_ROUTE = 5
"""No such path; 404."""
NO_METHOD = 12
"""The path knows no such HTTP method; 405, as grpc-gateway answers it."""


def of(error: BaseException) -> Status:
    """Return what `error` answers; one that is not ours is logged, and tells the caller nothing."""
    code = _code(error)
    if code is not None:
        http = 413 if isinstance(error, errors.TooLarge) else HTTP[code]
        return Status(code, http, str(error))
    if isinstance(error, asyncio.CancelledError):
        return Status(1, HTTP[1], "the call was cancelled")
    _log.error("a call failed by a bug", exc_info=error)
    return Status(13, HTTP[13], "internal error; the server's log says more")


def _code(error: BaseException) -> int | None:
    for kind in type(error).__mro__:
        if kind in _CODES:
            return _CODES[kind]
    return None
