"""Every error that mindgrid raises on purpose, in one tree, sorted by who can act on it.

MindgridError
├── CallerError                the request must change
│   ├── InvalidRequest         a value is wrong: names the field and its limit
│   ├── NotFound               no such namespace or record
│   ├── PreconditionFailed     `if_version` does not hold: names the current version
│   ├── CursorMismatch         `expected_cursor` does not hold: names the log's last cursor
│   ├── Unimplemented          a promise of a later release
│   ├── Unauthenticated        no credential, or one that does not verify
│   ├── PermissionDenied       a credential that does not cover the call
│   ├── TooLarge               the body is over the limit
│   ├── TextRefused            the embedding model does not take a text: says which and why
│   ├── ClusterReplaced        the server was started anew: connect again
│   ├── Lagged                 a subscriber fell behind and was detached: names its last cursor
│   └── Exhausted              a queue or a rate is full: slow down
├── RetryError                 the same request may succeed later
│   ├── Unavailable            a shard, host or embedder does not answer: names it and why
│   ├── DeadlineExceeded       the time given ran out
│   ├── Moved                  the routing table is old: fetch it and start over
│   ├── Locked                 a commit over several shards holds the id: wait for its end
│   └── InDoubt                such a commit may be part of the answer: ask again at that instant
└── OperatorError              someone must look at the machine
    ├── Corruption             stored bytes are not what was written: names the file
    ├── LostEvents             a log begins anew: names the cursor that was seen in it
    ├── StorageLocked          another process owns the folder
    ├── FormatTooNew           a newer release wrote the folder: names both formats
    └── ConfigError            the configuration cannot be used: names the line

Data sits in fields, words in `__str__`. Every field goes to `super().__init__` in order, so that
pickle, and with it Ray, can build the same error on the other side.
"""

from __future__ import annotations


class MindgridError(Exception):
    """The root; never raised itself."""


class CallerError(MindgridError):
    """The request must change before it can succeed."""


class RetryError(MindgridError):
    """The same request may succeed later."""


class OperatorError(MindgridError):
    """Someone must look at the machine or its configuration."""


class InvalidRequest(CallerError):
    """A value of the request is not allowed."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}" if self.field else self.problem


class NotFound(CallerError):
    """The named thing does not exist."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(kind, name)
        self.kind = kind
        self.name = name

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r:.80} does not exist; the configuration says which do"


class PreconditionFailed(CallerError):
    """The record is at another version than `if_version` asks for."""

    def __init__(self, id: str, expected: int, current: int) -> None:
        super().__init__(id, expected, current)
        self.id = id
        self.expected = expected
        self.current = current

    def __str__(self) -> str:
        return (
            f"record {self.id!r}: if_version is {self.expected}, "
            f"but the current version is {self.current}; nothing was changed"
        )


class CursorMismatch(CallerError):
    """The log's last cursor is another one than `expected_cursor`."""

    def __init__(self, expected: int, last: int) -> None:
        super().__init__(expected, last)
        self.expected = expected
        self.last = last

    def __str__(self) -> str:
        return (
            f"expected_cursor is {self.expected}, but the log's last cursor is {self.last}; "
            "nothing was appended"
        )


class Unimplemented(CallerError):
    """A promise that this release does not keep yet."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return self.what


class Unauthenticated(CallerError):
    """The credential is missing or does not verify."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class PermissionDenied(CallerError):
    """The credential does not cover the call."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class TooLarge(CallerError):
    """The body is over the limit."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(size_bytes, limit_bytes)
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes

    def __str__(self) -> str:
        return (
            f"the request body of {self.size_bytes} bytes is over the limit of "
            f"{self.limit_bytes} bytes (server.http.body_bytes_max); send smaller batches"
        )


class TextRefused(CallerError):
    """The embedding model does not take a text: the one at `index` of those it was given."""

    def __init__(self, index: int, text: str, reason: str) -> None:
        super().__init__(index, text, reason)
        self.index = index
        self.text = text
        self.reason = reason

    def __str__(self) -> str:
        return f"text {self.index}: {self.problem}"

    @property
    def problem(self) -> str:
        """The same without the index, for a caller who knows the text by another name."""
        return f"the text {_beginning(self.text)} is refused: {self.reason}"


class Exhausted(CallerError):
    """A bounded queue is full."""

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(what, limit)
        self.what = what
        self.limit = limit

    def __str__(self) -> str:
        return f"{self.what} is full (limit {self.limit}); retry later or with fewer clients"


class Lagged(CallerError):
    """A subscriber did not read as fast as events came, and gets no more of them.

    `last_cursor` is that of the last event it was sent; 0 if it was sent none from the beginning.
    `limit` says how far behind it may be, in events or bytes.
    """

    def __init__(self, namespace: str, last_cursor: int, limit: str) -> None:
        super().__init__(namespace, last_cursor, limit)
        self.namespace = namespace
        self.last_cursor = last_cursor
        self.limit = limit

    def __str__(self) -> str:
        return (
            f"this tail of {self.namespace} is detached: it is more than {self.limit} "
            f"behind; the last cursor sent is {self.last_cursor}, resume with "
            f"after_cursor={self.last_cursor} and include_historical"
        )


class ClusterReplaced(CallerError):
    """The Ray cluster of the server that this process joined has ended; another took its place."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address

    def __str__(self) -> str:
        return (
            f"the server at {self.address} was started anew since this process joined its Ray "
            "cluster; close the handle and call mindgrid.connect again"
        )


class Unavailable(RetryError):
    """A part does not answer now; `what` names it, `reason` says why.

    `retry_after_s` is how long it asks to be left alone; 0 where it does not say.
    """

    def __init__(self, what: str, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(what, reason, retry_after_s)
        self.what = what
        self.reason = reason
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.what} is unavailable: {self.reason}"


class DeadlineExceeded(RetryError):
    """The time given to the call ran out."""

    def __init__(self, what: str, deadline_s: float) -> None:
        super().__init__(what, deadline_s)
        self.what = what
        self.deadline_s = deadline_s

    def __str__(self) -> str:
        return f"{self.what} did not answer within {self.deadline_s:g} s"


class Moved(RetryError):
    """The caller's routing table is older than the host's."""

    def __init__(self, shard: str, epoch: int) -> None:
        super().__init__(shard, epoch)
        self.shard = shard
        self.epoch = epoch

    def __str__(self) -> str:
        return f"shard {self.shard} has moved (epoch {self.epoch} is not this host's)"


class Locked(RetryError):
    """A commit over several shards holds the id; whoever orders those commits waits for its end.

    `key` names the attempt and `home` the shard that knows what became of it.
    """

    def __init__(self, id: str, key: str, home: int) -> None:
        super().__init__(id, key, home)
        self.id = id
        self.key = key
        self.home = home

    def __str__(self) -> str:
        return f"record {self.id!r} is part of another commit that is not decided yet"


class InDoubt(RetryError):
    """A read at `instant` depends on a commit over several shards that is not decided yet."""

    def __init__(self, what: str, instant: int) -> None:
        super().__init__(what, instant)
        self.what = what
        self.instant = instant

    def __str__(self) -> str:
        return f"{self.what} waits for a commit over several shards to be decided"


class Corruption(OperatorError):
    """Stored bytes are not what was written; nothing of them is served."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return (
            f"{self.path} is damaged: {self.problem}. Nothing of this shard is served; "
            "restore its folder from a backup"
        )


class LostEvents(OperatorError):
    """A log has forgotten events that it had; one in RAM does, when its host ends."""

    def __init__(self, namespace: str, seen: int, last_cursor: int) -> None:
        super().__init__(namespace, seen, last_cursor)
        self.namespace = namespace
        self.seen = seen
        self.last_cursor = last_cursor

    def __str__(self) -> str:
        return (
            f"{self.namespace} ends at cursor {self.last_cursor}, but was at {self.seen}: its "
            f"events are lost, as those of driver memory are when their host ends; begin anew"
        )


class StorageLocked(OperatorError):
    """Another process owns the folder."""

    def __init__(self, path: str, owner: str) -> None:
        super().__init__(path, owner)
        self.path = path
        self.owner = owner

    def __str__(self) -> str:
        return (
            f"{self.path} is in use by {self.owner}; "
            "stop that process or choose another storage.path"
        )


class FormatTooNew(OperatorError):
    """A newer release wrote this, in a format that this one does not know."""

    def __init__(self, path: str, found: int, known: int) -> None:
        super().__init__(path, found, known)
        self.path = path
        self.found = found
        self.known = known

    def __str__(self) -> str:
        return (
            f"{self.path} has format {self.found}, and this release knows formats up to "
            f"{self.known}; run the newer mindgrid that wrote it"
        )


class ConfigError(OperatorError):
    """The configuration cannot be used."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, problem)
        self.where = where
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}" if self.where else self.problem


_BEGINNING_CHARS = 64


def _beginning(text: str) -> str:
    """Return the text in quotes, a long one by its beginning."""
    return repr(text) if len(text) <= _BEGINNING_CHARS else f"{text[:_BEGINNING_CHARS]!r}…"


def _leaves(root: type[MindgridError]) -> dict[str, type[MindgridError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_leaves(child))
    return found


def pack(error: MindgridError) -> tuple[str, list[str | int | float]]:
    """Return the error's name and fields, for the bytes between two processes."""
    return type(error).__name__, list(error.args)


def unpack(name: str, fields: list[str | int | float]) -> MindgridError:
    """Return the error that `pack` took apart."""
    return BY_NAME[name](*fields)


BY_NAME: dict[str, type[MindgridError]] = _leaves(MindgridError)
