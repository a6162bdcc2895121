"""OpenAI's embeddings, and every server that speaks like it: `POST /v1/embeddings`.

Vectors are asked for in base64, as OpenAI's own clients do: the exact float32 in a quarter of the
bytes of JSON numbers, and a fraction of the time to read them. Servers that answer numbers all the
same are understood too. `dimensions` is sent only to models that are known to take it; others
refuse it, or ignore it and are found out by the length of what they answer.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec
import numpy as np

from mindgrid.cluster.embedders.model_server import (
    ModelServer,
    key_problem,
    stacked,
    url_problem,
)
from mindgrid.cluster.embedders.protocol import EmbedderSpec, Limits, Provider, Vectors
from mindgrid.shards.errors import ConfigError
from mindgrid.shards.types import Space, Vector

_BASE_URL = "https://api.openai.com/v1"
_HOST = "api.openai.com"
_KEY_VARIABLE = "OPENAI_API_KEY"
_SHORTENED = "text-embedding-3-"

# Of OpenAI's own models; those of `_SHORTENED` may be asked for less.
_LENGTHS = {
    "text-embedding-3-small": 1536,
    "text-embedding-3-large": 3072,
    "text-embedding-ada-002": 1536,
}

# OpenAI's own bounds of one request: 2,048 texts, 300,000 tokens.
_BATCH_TEXTS = 2_048
_BATCH_TOKENS = 300_000
_CALL_BYTES_MAX = 64 * 2**20


class _Request(msgspec.Struct, omit_defaults=True):
    model: str
    input: list[str]
    encoding_format: str
    dimensions: int = 0


class _Row(msgspec.Struct):
    index: int
    embedding: str | list[float]


class _Answer(msgspec.Struct):
    data: list[_Row]


class OpenAI:
    """One model behind `POST /v1/embeddings`. Belongs to the event loop it is first used in."""

    def __init__(self, spec: EmbedderSpec) -> None:
        self.space: Space = spec.space
        self._dimensions = spec.space.dimensions if _sends_dimensions(spec) else 0
        self._server = ModelServer(spec, _url(spec), _key_variable(spec))

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Return one vector for each text, in order."""
        request = _Request(self.space.model, list(texts), "base64", self._dimensions)
        answer = await self._server.ask(request, _Answer, len(texts))
        rows = sorted(answer.data, key=lambda row: row.index)
        if [row.index for row in rows] != list(range(len(rows))):
            raise self._server.broken("vectors whose index is not that of a text, each once")
        return stacked(self._server, [self._vector(row) for row in rows])

    async def close(self) -> None:
        """Close the connections."""
        await self._server.close()

    def _vector(self, row: _Row) -> Vector | list[float]:
        if not isinstance(row.embedding, str):
            return row.embedding
        try:
            return np.frombuffer(base64.b64decode(row.embedding, validate=True), "<f4")
        except (binascii.Error, ValueError):
            raise self._server.broken("a vector that is no base64 of float32") from None


def _url(spec: EmbedderSpec) -> str:
    """Return the address asked; a base without a path gets the usual /v1."""
    base = (spec.options.base_url or _BASE_URL).rstrip("/")
    return f"{base}/embeddings" if urlsplit(base).path else f"{base}/v1/embeddings"


def _is_openai(spec: EmbedderSpec) -> bool:
    """Return whether OpenAI itself is asked; it has hosts for regions too, as eu.api.openai.com."""
    host = urlsplit(_url(spec)).hostname or ""
    return host == _HOST or host.endswith(f".{_HOST}")


def _key_variable(spec: EmbedderSpec) -> str:
    """Return the variable that holds the key; a server of one's own may want none."""
    return spec.options.api_key_env or (_KEY_VARIABLE if _is_openai(spec) else "")


def _sends_dimensions(spec: EmbedderSpec) -> bool:
    return spec.flag("send_dimensions", spec.space.model.startswith(_SHORTENED))


def _limits(spec: EmbedderSpec) -> Limits:
    return Limits(
        batch_texts=spec.count("batch_texts", _BATCH_TEXTS),
        batch_tokens=spec.count("batch_tokens", _BATCH_TOKENS),
        call_bytes=_CALL_BYTES_MAX,
    )


def _problem(spec: EmbedderSpec) -> str:
    try:
        _limits(spec)
        sends = _sends_dimensions(spec)
    except ConfigError as error:
        return error.problem
    if sentence := url_problem(_url(spec)):
        return sentence
    length = _LENGTHS.get(spec.space.model)
    wanted = spec.space.dimensions
    if _is_openai(spec) and length and (wanted > length or (wanted < length and not sends)):
        return f"has dimensions {wanted}, but {spec.space.model} has {length}; write that"
    return ""


PROVIDER = Provider(
    build=OpenAI,
    limits=_limits,
    options={
        "batch_texts": f"Texts in one request at most; {_BATCH_TEXTS} by default, OpenAI's bound.",
        "batch_tokens": f"Tokens in one request at most, counted as bytes; {_BATCH_TOKENS} by "
        "default, OpenAI's bound.",
        "send_dimensions": "Whether `dimensions` is part of the request, for models that can "
        f"shorten their vectors; by default for `{_SHORTENED}…` only.",
    },
    problem=_problem,
    lacks=lambda spec: key_problem(_key_variable(spec)),
)
