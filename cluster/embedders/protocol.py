"""What an embedding model is to the rest: texts in, one float32 vector each out.

A provider is one file of this folder that ends with `PROVIDER = Provider(build=…)`; its name in
the configuration is the file's name. Nothing else has to be touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mindgrid.shards.errors import ConfigError
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

    def count(self, name: str, default: int) -> int:
        """Return an option of the provider's own that is a number above 0; else ConfigError."""
        written = dict(self.options.more).get(name, str(default))
        if re.fullmatch(r"[1-9][0-9]{0,8}", written) is None:
            raise ConfigError(str(self), f"needs a whole number above 0 in options.{name}")
        return int(written)

    def flag(self, name: str, default: bool) -> bool:
        """Return an option of the provider's own that is true or false; else ConfigError."""
        written = dict(self.options.more).get(name, str(default))
        # As Python spells what YAML reads, and as an environment variable may.
        if written.lower() not in ("true", "false"):
            raise ConfigError(str(self), f"needs true or false in options.{name}")
        return written.lower() == "true"


CACHE_SIZE_DEFAULT = 4_096

# Serve's replicas take at most 4 MiB in a message (RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH), and
# gRPC clients as much by default; half of it leaves room for the envelope.
CALL_BYTES_MAX = 2 * 2**20


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

    At most `batch_texts` texts of `batch_tokens` tokens together (0: as many as there are), and
    `call_bytes` there and back; a text that is over these by itself travels alone. It is cut to
    `text_chars` characters before, where the model reads no further anyway; 0 cuts nothing.

    Tokens are counted as the UTF-8 bytes of the texts, without any model's tokenizer. That is an
    upper bound: a token of byte-level BPE or WordPiece stands for at least one byte of its text.
    """

    batch_texts: int = 256
    batch_tokens: int = 0
    call_bytes: int = CALL_BYTES_MAX
    text_chars: int = 0


class Embedder(Protocol):
    """A model that is ready to embed. Used from one event loop."""

    @property
    def space(self) -> Space:
        """The space its vectors belong to."""
        ...

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Return one vector for each text, in order.

        The texts are within the provider's `Limits`. The caller checks shape and values, so an
        adapter may hand on what its model said; it also tries again and times each try, so an
        adapter asks once. Fails with Unavailable; with ConfigError where the operator must act;
        with InvalidRequest where the model refuses the texts as they stand, and the caller finds
        out which. It may be cancelled at any await.
        """
        ...

    async def close(self) -> None:
        """Give back connections and threads. Nothing is asked of it at the time or later."""
        ...


@dataclass(frozen=True, slots=True)
class Provider:
    """One kind of embedder.

    `own_process` gives each model a Serve deployment of its own, for models that compute here.
    `options` names the settings under `embedder.options` that only this provider has, with a
    sentence on each. `problem` returns a sentence if a spec cannot work whatever the machine, and
    `lacks` if it cannot work in this process; both are asked before anything starts.
    """

    build: Callable[[EmbedderSpec], Embedder]
    own_process: bool = False
    model_default: str = ""
    limits: Callable[[EmbedderSpec], Limits] = lambda spec: Limits()
    options: Mapping[str, str] = field(default_factory=dict)
    problem: Callable[[EmbedderSpec], str] = lambda spec: ""
    lacks: Callable[[EmbedderSpec], str] = lambda spec: ""
