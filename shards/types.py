"""The values that cross the engine's surface: records, commands and queries, and their answers."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from msgspec import field
from numpy.typing import NDArray

from mindgrid.shards.clock import Instant
from mindgrid.shards.scores import WordStats

Vector = NDArray[np.float32]
"""float32, one dimension, C-contiguous."""

NO_VECTOR: Vector = np.empty(0, dtype=np.float32)
"""Stands for a vector that is left out."""

ID_BYTES_MAX = 512
TOP_K_DEFAULT = 10
TOP_K_MAX = 10_000
DEPTH_DEFAULT = 50


@dataclass(frozen=True, slots=True)
class Space:
    """The identity of an embedding model; vectors of two spaces are never compared."""

    provider: str
    model: str
    revision: str
    dimensions: int


class Value(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What travels by the hundred: made and encoded at a fifth of what a dataclass costs.

    Positional on the wire between processes, and left to reference counting: none holds a cycle.
    """


class Draft(Value, frozen=True):
    """A record as a writer hands it in: id chosen, times unset where the shard decides.

    `vector` has length 0 until the content is embedded; a shard takes only drafts with a vector.
    """

    id: str
    content: str
    vector: Vector = NO_VECTOR
    payload: bytes = b""
    metadata: Mapping[str, str] = field(default_factory=dict)
    created_at: Instant | None = None
    valid_from: Instant | None = None
    valid_to: Instant | None = None
    deleted_at: Instant | None = None
    supersedes: tuple[str, ...] = ()
    source: str = ""
    if_version: int | None = None


class Record(Value, frozen=True):
    """A stored record, as one instant of the store's knowledge saw it.

    What an answer leaves out is empty: `vector` has length 0, `payload` and `content` too.
    """

    id: str
    content: str
    vector: Vector
    payload: bytes
    metadata: Mapping[str, str]
    created_at: Instant
    valid_from: Instant
    valid_to: Instant | None
    deleted_at: Instant | None
    supersedes: tuple[str, ...]
    source: str
    version: int


class Supersession(Value, frozen=True):
    """The end of a record's validity by a draft that lies in another shard.

    It takes place once the first `place` drafts of its Upsert are written; `valid_from` is that of
    the other draft, None for the commit's own time.
    """

    target: str
    valid_from: Instant | None
    place: int


class Upsert(Value, frozen=True, tag="upsert"):
    """Write all drafts or none. An empty `transaction_id` is never remembered.

    `supersessions`, in order, is what drafts of other shards do to records of this one.
    """

    transaction_id: str
    drafts: tuple[Draft, ...]
    supersessions: tuple[Supersession, ...] = ()


class Delete(Value, frozen=True, tag="delete"):
    """Tombstone a record, or with `hard` remove it at every instant of knowledge."""

    transaction_id: str
    id: str
    hard: bool = False


class ExpireAction(enum.Enum):
    """What Expire does to a record."""

    INVALIDATE = 1
    """End its validity now, if it has no tombstone and would be valid for longer."""
    SOFT_DELETE = 2
    """Tombstone it, if it has none."""
    HARD_DELETE = 3
    """Remove it, tombstoned or not, at every instant of knowledge."""


class Expire(Value, frozen=True, tag="expire"):
    """Do `action` to the `max_rows` oldest records that it applies to and whose metadata match.

    The oldest by `created_at`, ties to the smaller id. An empty `equals` matches every record.
    With `ids`, only these are looked at.
    """

    transaction_id: str
    equals: Mapping[str, str]
    action: ExpireAction
    max_rows: int
    ids: tuple[str, ...] | None = None


Command = Upsert | Delete | Expire


class Upserted(Value, frozen=True, tag="upserted"):
    """The new versions, aligned with the drafts, and when the commit took effect."""

    versions: tuple[int, ...]
    committed_at: Instant


class Deleted(Value, frozen=True, tag="deleted"):
    """Whether there was a record to delete, and when the commit took effect."""

    existed: bool
    committed_at: Instant


class Expired(Value, frozen=True, tag="expired"):
    """How many records were touched, and when the commit took effect."""

    affected: int
    committed_at: Instant


Result = Upserted | Deleted | Expired


class PredicateOp(enum.Enum):
    """How a metadata value is compared; EQ, NEQ and IN as strings, the others as float64."""

    EQ = 1
    NEQ = 2
    GT = 3
    GTE = 4
    LT = 5
    LTE = 6
    IN = 7


class Predicate(Value, frozen=True):
    """One comparison with the value under `key`; a record without the key never matches."""

    key: str
    op: PredicateOp
    values: tuple[str, ...]


class Selection(Value, frozen=True):
    """Which records a read may return; the parts are ANDed, an empty one matches everything."""

    equals: Mapping[str, str] = field(default_factory=dict)
    predicates: tuple[Predicate, ...] = ()
    created_after: Instant | None = None
    created_before: Instant | None = None
    as_of: Instant | None = None
    known_at: Instant | None = None
    include_invalidated: bool = False


class Want(enum.IntFlag):
    """Which parts of a record an answer carries beside its id."""

    ID = 0
    """The id alone; in reads by id and in pages also the version and the lifecycle columns."""
    VALUES = 1
    """Content, metadata, source and supersedes, and whatever else is small."""
    PAYLOAD = 2
    VECTOR = 4


class Mode(enum.Enum):
    """What a search compares."""

    DENSE = 1
    """Vectors, by cosine."""
    SPARSE = 2
    """Words, by BM25; only records that share a word with the query are found."""
    HYBRID = 3
    """Both, each to some depth, and what they find is fused."""


class FusionMethod(enum.Enum):
    """How HYBRID joins what its two lanes found."""

    RRF = 1
    """Reciprocal rank fusion: the sum of weight / (k + rank), the best having rank 1."""
    CONVEX = 2
    """The weighted sum of each lane's score, divided by the best score of that lane."""


class Fusion(Value, frozen=True):
    """Weights of the lanes, and RRF's `k`.

    Where neither weight is set, RRF takes both lanes alike, and CONVEX 0.3 of meaning and 0.7 of
    words: the best of a trial on real texts, in which plain RRF lost to BM25 alone.
    """

    method: FusionMethod = FusionMethod.RRF
    dense_weight: float | None = None
    sparse_weight: float | None = None
    k: int = 60

    @property
    def weights(self) -> tuple[float, float]:
        """The weights of meaning and of words."""
        if self.dense_weight is None and self.sparse_weight is None:
            return (1.0, 1.0) if self.method is FusionMethod.RRF else (0.3, 0.7)
        return self.dense_weight or 0.0, self.sparse_weight or 0.0


class Query(Value, frozen=True):
    """The `top_k` best records for `vector`, `text` or both among those `selection` allows.

    `vector` has length 0 until the query's text is embedded; what compares vectors must have one.
    `depth` is how many candidates each lane of HYBRID contributes, at least `top_k`.

    A shard answers lanes, DENSE and SPARSE. By words it scores with `stats`, those of the whole
    namespace for this text, or with its own where they are None; asked for a `top_k` of 0 it says
    what its own are.
    """

    vector: Vector = NO_VECTOR
    top_k: int = TOP_K_DEFAULT
    selection: Selection = field(default_factory=Selection)
    want: Want = Want.VALUES
    exact: bool = False
    text: str = ""
    mode: Mode = Mode.DENSE
    depth: int = DEPTH_DEFAULT
    fusion: Fusion = field(default_factory=Fusion)
    explain: bool = False
    stats: WordStats | None = None


class Scan(Value, frozen=True):
    """The first `limit` records in the order of their ids behind the id `after`.

    Of those that `selection` allows; all of these are counted too, wherever they stand. A `limit`
    of 0 counts only.
    """

    selection: Selection = field(default_factory=Selection)
    after: str = ""
    limit: int = 0
    want: Want = Want.VALUES


class Scanned(Value, frozen=True):
    """A page of records, whether others follow, and how many there are on all pages."""

    records: tuple[Record, ...]
    more: bool
    count: int
    instant: Instant


class Stamp(Value, frozen=True):
    """When a read takes place.

    A shard answers at the later of `at` and its newest commit and names that instant; with
    `exactly` it answers at `at` itself, which must not be in its future.
    """

    at: Instant
    exactly: bool = False


class Explanation(Value, frozen=True):
    """What each lane said of a hit; rank 0: the lane did not find it."""

    dense_rank: int = 0
    dense_score: float = 0.0
    sparse_rank: int = 0
    sparse_score: float = 0.0


class Hit(Value, frozen=True):
    """One record found; `score` has float32 precision.

    It is the cosine in [-1, 1], BM25's score, or in HYBRID what fusion made of both.
    """

    id: str
    score: float
    record: Record | None
    explanation: Explanation | None = None


class Answer(Value, frozen=True):
    """The hits of one query, best first, ties to the smaller id.

    `instant` is the instant answered at; `exact` says that no better record can have been missed;
    `scanned` counts the vectors that were compared, or the records in which words were looked for.
    `stats` is there if they were asked for.
    """

    hits: tuple[Hit, ...]
    instant: Instant
    exact: bool
    scanned: int
    stats: WordStats | None = None
