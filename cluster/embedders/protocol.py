"""What an embedding model is to the rest: texts in, one float32 vector each out.

A provider is one file of this folder that ends with `PROVIDER = Provider(build=…)`; its name in
the configuration is the file's name. Nothing else has to be touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mindgrid.shards.types import Space

Vectors = NDArray[np.float32]
"""float32, (texts, dimensions), C-contiguous."""


@dataclass(frozen=True, slots=True)
class EmbedderOptions:
    """How a model is reached. `more` holds what only its provider understands, sorted by name."""

    timeout_s: float = 30.0
    base_url: str = ""
    api_key_env: str = ""
    path: str = ""
    replicas: int = 1
    more: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class EmbedderSpec:
    """One model and how it is reached; namespaces with equal specs share one embedder."""

    space: Space
    options: EmbedderOptions = field(default_factory=EmbedderOptions)

    def __str__(self) -> str:
        return f"embedder {self.space.provider}/{self.space.model}"


CACHE_SIZE_DEFAULT = 4_096


@dataclass(frozen=True, slots=True)
class Embedding:
    """How one namespace embeds.

    The vectors of `cache_size` texts are kept in each process; 0 stands for CACHE_SIZE_DEFAULT, a
    negative size keeps none.
    """

    spec: EmbedderSpec
    cache_size: int = CACHE_SIZE_DEFAULT


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call of an embedder may carry.

    `batch_texts` texts at most. A text is cut to `text_chars` characters before it travels, where
    the model reads no further anyway; 0 cuts nothing.
    """

    batch_texts: int = 256
    text_chars: int = 0


class Embedder(Protocol):
    """A model that is ready to embed. Used from one event loop."""

    @property
    def space(self) -> Space:
        """The space its vectors belong to."""
        ...

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Return one vector for each text, in order.

        At most `Limits.batch_texts` texts. The caller checks shape and values, so an adapter may
        hand on what its model said. Fails with Unavailable, or ConfigError where the operator
        must act; it may be cancelled at any await.
        """
        ...


@dataclass(frozen=True, slots=True)
class Provider:
    """One kind of embedder.

    `own_process` gives each model a Serve deployment of its own, for models that compute here.
    `options` names the settings under `embedder.options` that only this provider has, with a
    sentence on each. `problem` returns a sentence if a spec cannot work whatever the machine.
    """

    build: Callable[[EmbedderSpec], Embedder]
    own_process: bool = False
    model_default: str = ""
    limits: Limits = Limits()
    options: Mapping[str, str] = field(default_factory=dict)
    problem: Callable[[EmbedderSpec], str] = lambda spec: ""
