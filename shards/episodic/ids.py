"""Event ids: UUIDs that hold their event's cursor, so that no index from id to event is needed.

A version 8 UUID (RFC 9562, 5.8) of the cursor in 48 bits and 74 bits of a hash of it under the
log's own key. An id says where its event stands and is checked against the hash; nobody without the
key can make one, and two logs' ids differ. A dictionary would cost 130 bytes an event instead.
"""

from __future__ import annotations

import hashlib
import uuid

KEY_BYTES = 16
CURSOR_MAX = 2**48 - 1

_VARIANTS = dict(zip("0123456789abcdef", "89ab" * 4, strict=True))
"""A hexadecimal digit whose first two bits are the variant's, for each of the hash."""


def event_id(key: bytes, cursor: int) -> str:
    """Return the id of the event at this cursor, 1 to CURSOR_MAX, of the log with this key."""
    assert 0 < cursor <= CURSOR_MAX
    # Put together by hand: a UUID object costs as much again, and replays make ids by the thousand.
    low = hashlib.blake2b(cursor.to_bytes(6, "big"), digest_size=10, key=key).hexdigest()
    high = f"{cursor:012x}"
    return f"{high[:8]}-{high[8:]}-8{low[:3]}-{_VARIANTS[low[3]]}{low[4:7]}-{low[7:19]}"


def cursor_of(key: bytes, id: str) -> int | None:
    """Return the cursor in an id of this log, in any spelling of a UUID; None for other text."""
    try:
        spelled = uuid.UUID(id)
    except ValueError:
        return None
    cursor = spelled.int >> 80
    return cursor if cursor and event_id(key, cursor) == str(spelled) else None
