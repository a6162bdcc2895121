"""What one shard is told when it opens: its space, its promises and its bounds."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from mindgrid.shards.types import Space


class Driver(enum.Enum):
    """What keeps a shard's rows."""

    LANCE = "lance"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class History:
    """How much of the past stays readable by `known_at`; None is without bound.

    Past either bound the floor rises. `KNOWN_S_MIN` are kept whatever this says, since a read
    over several shards asks for an instant that is already past.
    """

    age_s: float | None = 7 * 86_400.0
    rows_max: int | None = None


KNOWN_S_MIN = 60.0


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """Everything a shard's behaviour depends on besides its folder.

    `recall` is what an approximate answer's top 10 must reach on average; up to
    `exact_rows_max` allowed rows every answer is exact. `seal_rows` tail rows become a segment;
    `index_rows_min` sealed rows get an IVF; `merge_fanout` segments of a tier become one. A tail
    smaller than `seal_rows` is sealed after `seal_after_s` too, or a twelfth of it without a write,
    once it is an eighth of that, and a journal of `journal_bytes_max` is sealed whatever it holds.
    The bytes of hard-deleted records leave the disk after `purge_after_s`, from every answer they
    are gone at once.
    `skew_max_s` is how far clocks may differ: so long the first commit after an open waits, for
    the reads that the last owner answered.
    """

    space: Space
    recall: float = 0.95
    history: History = field(default_factory=History)
    text_search: str = "simple"
    seal_rows: int = 8_192
    seal_after_s: float = 60.0
    exact_rows_max: int = 20_000
    index_rows_min: int = 32_768
    merge_fanout: int = 8
    purge_after_s: float = 3_600.0
    group_rows_max: int = 16_384
    transactions_kept_s: float = 600.0
    skew_max_s: float = 0.25
    journal_bytes_max: int = 256 * 1024 * 1024
