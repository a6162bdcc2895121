"""Models of an Ollama server: `POST /api/embed`.

`truncate` is sent as false, where Ollama's own default is true: it would cut a text that is longer
than the model reads without a word, and what stands behind the cut would never be found. So such a
text is refused and named. `options: {truncate: true}` is for who would rather have it cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mindgrid.cluster.embedders.model_server import (
    ModelServer,
    key_problem,
    stacked,
    url_problem,
)
from mindgrid.cluster.embedders.protocol import EmbedderSpec, Limits, Provider, Vectors
from mindgrid.shards.errors import ConfigError
from mindgrid.shards.types import Space

_BASE_URL = "http://localhost:11434"

# About 8,000 tokens of English: what a small model embeds on a processor within a time-out of 30 s.
_BATCH_TEXTS = 256
_BATCH_TOKENS = 32_768
_CALL_BYTES_MAX = 16 * 2**20


class _Request(msgspec.Struct, omit_defaults=True):
    model: str
    input: list[str]
    truncate: bool
    dimensions: int = 0


class _Answer(msgspec.Struct):
    embeddings: list[list[float]]


class Ollama:
    """One model behind `POST /api/embed`. Belongs to the event loop it is first used in."""

    def __init__(self, spec: EmbedderSpec) -> None:
        self.space: Space = spec.space
        self._truncate = spec.flag("truncate", False)
        self._dimensions = spec.space.dimensions if spec.flag("send_dimensions", False) else 0
        self._server = ModelServer(spec, _url(spec), spec.options.api_key_env)

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Return one vector for each text, in order."""
        request = _Request(self.space.model, list(texts), self._truncate, self._dimensions)
        answer = await self._server.ask(request, _Answer, len(texts))
        return stacked(self._server, answer.embeddings)

    async def close(self) -> None:
        """Close the connections."""
        await self._server.close()


def _url(spec: EmbedderSpec) -> str:
    return f"{(spec.options.base_url or _BASE_URL).rstrip('/')}/api/embed"


def _limits(spec: EmbedderSpec) -> Limits:
    return Limits(
        batch_texts=spec.count("batch_texts", _BATCH_TEXTS),
        batch_tokens=spec.count("batch_tokens", _BATCH_TOKENS),
        call_bytes=_CALL_BYTES_MAX,
    )


def _problem(spec: EmbedderSpec) -> str:
    try:
        _limits(spec)
        spec.flag("truncate", False)
        spec.flag("send_dimensions", False)
    except ConfigError as error:
        return error.problem
    return url_problem(_url(spec))


PROVIDER = Provider(
    build=Ollama,
    limits=_limits,
    options={
        "batch_texts": f"Texts in one request at most; {_BATCH_TEXTS} by default.",
        "batch_tokens": f"Tokens in one request at most, counted as bytes; {_BATCH_TOKENS} by "
        "default.",
        "send_dimensions": "Whether `dimensions` is part of the request, for models that can "
        "shorten their vectors; false by default.",
        "truncate": "Whether a text longer than the model reads is cut, and found by its "
        "beginning only; by default it is refused.",
    },
    problem=_problem,
    lacks=lambda spec: key_problem(spec.options.api_key_env),
)
