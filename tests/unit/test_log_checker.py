"""The checker of log histories accepts what is right, and sees each kind of fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.support.log_history import (
    Attempt,
    Entry,
    Followed,
    Read,
    check_attempts,
    check_log,
    check_read,
    check_tail,
)

LOG = [Entry(n, f"id-{n}", f"time {n}", f"name-{n}", "odd" if n % 2 else "even") for n in (1, 2, 3)]
ALONE, BATCH = Attempt(("name-1",), 1.0), Attempt(("name-2", "name-3"), 2.0)
READ = Read(0, 0, 0, False, "", 2, tuple(LOG))


def test_what_is_right_passes() -> None:
    check_log(LOG)
    check_attempts(LOG, [replace(ALONE, acknowledged=(LOG[0],), repeats=[(LOG[0],)]), BATCH])
    check_attempts(LOG, [ALONE, BATCH, Attempt(("never",), 3.0, refused=True)])
    check_tail(LOG, Followed(True, 0.0, 0, LOG), [ALONE, BATCH])
    check_tail(LOG, Followed(False, 1.5, 1, LOG[1:]), [ALONE, BATCH])
    for read in (
        READ,
        replace(READ, answer=tuple(LOG[:2])),
        replace(READ, reverse=True, limit=1, answer=(LOG[1],)),
        replace(READ, reverse=True, limit=1, answer=(LOG[2],)),
        replace(READ, session="even", after=1, before=3, answer=(LOG[1],)),
    ):
        check_read(LOG, read)


@pytest.mark.parametrize(
    "claim",
    [
        lambda: check_log([LOG[0], LOG[2]]),
        lambda: check_log([LOG[0], replace(LOG[0], cursor=2, id="other")]),
        lambda: check_log([LOG[0], replace(LOG[1], id="id-1")]),
        lambda: check_log([LOG[0], replace(LOG[1], timestamp="time 0")]),
        lambda: check_attempts(LOG, [BATCH]),
        lambda: check_attempts(LOG[:2], [ALONE, BATCH]),
        lambda: check_attempts(LOG, [ALONE, replace(BATCH, refused=True)]),
        lambda: check_attempts(LOG, [replace(ALONE, expected_cursor=1), BATCH]),
        lambda: check_attempts(LOG[:1], [ALONE, replace(BATCH, acknowledged=tuple(LOG[1:]))]),
        lambda: check_attempts(LOG, [replace(ALONE, acknowledged=(LOG[1],)), BATCH]),
        lambda: check_attempts(LOG, [replace(ALONE, repeats=[(LOG[1],)]), BATCH]),
        lambda: check_attempts(LOG, [ALONE, replace(BATCH, names=BATCH.names[::-1])]),
        lambda: check_tail(LOG, Followed(True, 0.0, 0, LOG[1:]), []),
        lambda: check_tail(LOG, Followed(True, 0.0, 0, LOG[:2]), []),
        lambda: check_tail(LOG, Followed(True, 0.0, 0, [LOG[0], LOG[2]]), []),
        lambda: check_tail(LOG, Followed(False, 0.0, 2, LOG[1:]), []),
        lambda: check_tail(LOG, Followed(False, 1.5, 0, LOG[2:]), [ALONE, BATCH]),
        lambda: check_read(LOG, replace(READ, answer=tuple(LOG[:1]))),
        lambda: check_read(LOG, replace(READ, answer=(LOG[0], LOG[2]))),
        lambda: check_read(LOG, replace(READ, reverse=True, limit=1, answer=(LOG[0],))),
        lambda: check_read(LOG, replace(READ, reverse=True, answer=())),
        lambda: check_read(LOG, replace(READ, session="even", answer=tuple(LOG))),
    ],
)
def test_what_is_wrong_fails(claim: Callable[[], None]) -> None:
    with pytest.raises(AssertionError):
        claim()
