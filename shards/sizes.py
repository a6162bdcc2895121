"""How large records and events are, about: what every bound of bytes counts, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from mindgrid.shards.types import Draft


class Valued(Protocol):
    """A record or an event in any of its forms: as handed in, as written, or stored."""

    @property
    def payload(self) -> bytes:
        """What the writer wants back."""
        ...

    @property
    def metadata(self) -> Mapping[str, str]:
        """Its pairs."""
        ...

    @property
    def supersedes(self) -> tuple[str, ...]:
        """Ids of others."""
        ...

    @property
    def source(self) -> str:
        """Where it comes from."""
        ...


def values_bytes(item: Valued) -> int:
    """Return about how many bytes all that has no bound of its own takes; of text, characters."""
    texts = (item.source, *item.supersedes, *item.metadata, *item.metadata.values())
    return len(item.payload) + sum(map(len, texts))


def draft_bytes(draft: Draft) -> int:
    """Return about how many bytes a record's draft is, with content and vector."""
    return values_bytes(draft) + len(draft.content) + draft.vector.nbytes
