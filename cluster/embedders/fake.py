"""An embedder without a model: vectors drawn from the text's SHA-256, equal on every machine.

For tests and trials. Equal texts (case aside) have cosine 1; other texts are unrelated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from mindgrid.cluster.embedders.protocol import EmbedderSpec, Provider, Vectors
from mindgrid.shards.types import Space, Vector

_WORDS = 8  # a digest is eight uint32


class Fake:
    """Digests instead of meaning."""

    def __init__(self, spec: EmbedderSpec) -> None:
        self.space: Space = spec.space

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Return one vector for each text, in order."""
        out = np.empty((len(texts), self.space.dimensions), np.float32)
        for row, text in zip(out, texts, strict=True):
            row[:] = fake_vector(text, self.space.dimensions)
        return out

    async def close(self) -> None:
        """Do nothing."""


def fake_vector(text: str, dimensions: int) -> Vector:
    """Return the text's vector, of length 1.

    The algorithm is part of the outside contract, shared with other implementations: SHA-256 of
    the lower-cased UTF-8 text gives 8 little-endian uint32, the next digest is the SHA-256 of the
    previous one; u becomes u / (2^32 - 1) · 2 - 1 as float32; the norm is summed in float64.
    """
    digest = hashlib.sha256(text.lower().encode()).digest()
    digests = bytearray(digest)
    for _ in range((dimensions - 1) // _WORDS):
        digest = hashlib.sha256(digest).digest()
        digests += digest
    drawn = np.frombuffer(digests, "<u4", dimensions)
    values = (drawn / (2**32 - 1) * 2 - 1).astype(np.float32).astype(np.float64)
    return (values / np.sqrt(values @ values)).astype(np.float32)


PROVIDER = Provider(build=Fake, model_default="fake")
