"""The rule by which a read over several shards sees one instant of all of them.

A commit over several shards has one time T. Shards that are asked one after the other answer at
different instants, so a reader could see the part of a commit that lies in one shard and not the
part in another. Therefore

    stamp ──► each shard answers at J = max(stamp, its newest commit, prepares open at arrival)
          ──► I = the largest of these instants
          ──► shards that answered earlier are asked once more, at exactly I

Two rounds are enough if a shard keeps two promises. It fixes J when the read arrives and proposes
no time at or before J from then on; and it answers only once the prepares that were open at that
moment are decided. (If J moved with a commit made during the wait, a prepare that came in between
could still commit before it.) Per-shard times tear 5.5 % of such reads, one clock for all 3.2 %;
tests/unit/test_instants.py is the model that says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindgrid.shards.clock import Clock, Instant
from mindgrid.shards.types import Selection, Stamp


def stamp_read(clock: Clock) -> Stamp:
    """Return the stamp of a read that begins now; each read is stamped once."""
    return Stamp(clock.now())


def settled(instants: Sequence[Instant]) -> Stamp:
    """Return the stamp of the second round: exactly the largest instant of the first."""
    return Stamp(max(instants), exactly=True)


def behind(instants: Sequence[Instant], selection: Selection) -> list[int]:
    """Return which answers, by position, must be asked for again at the settled instant.

    A read with `known_at` names its instant itself: every shard has answered at that one already.
    """
    if selection.known_at is not None:
        return []
    newest = max(instants)
    return [position for position, instant in enumerate(instants) if instant != newest]
