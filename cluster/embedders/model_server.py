"""A model behind HTTP: one bounded POST of JSON, and each failure in words of who can act on it.

It asks once; `service` tries again. The key comes out of the environment and goes into one header.
It is in no error of ours: what the server says is left out where it repeats a part of the key, and
an error of the HTTP library, which holds the request, is never chained to one of ours. It is in no
log: those of the library are silenced below warnings, since they repeat what the server answers.
Redirects are not followed, so that no other host is sent the key or the texts.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import NamedTuple, TypeVar

import httpx2
import msgspec
import numpy as np

from mindgrid.cluster.embedders.protocol import EmbedderSpec, Vectors
from mindgrid.shards.errors import ConfigError, InvalidRequest, MindgridError, Unavailable
from mindgrid.shards.types import Vector

T = TypeVar("T")

for _name in ("httpx2", "httpcore2"):
    logging.getLogger(_name).setLevel(logging.WARNING)

_CONNECTIONS_MAX = 64
_WORDS_CHARS_MAX = 300
_ERROR_BYTES_MAX = 64 * 2**10

# A number takes up to 25 bytes of JSON. Vectors of another length than the wanted one are still
# read up to 4,096 numbers, so that the error can name both lengths.
_NUMBER_BYTES_MAX = 32
_LENGTH_READ_MIN = 4_096

_REFUSED = frozenset({400, 413, 422})
_MAY_PASS = frozenset({408, 425, 429})

# Both answer 500 to a text that is too long, where 400 is meant. llama.cpp's words, from
# tools/server/server-context.cpp: "input (102 tokens) is too large to process"; Ollama's: "the
# input length exceeds the context length".
_TOO_LONG = re.compile(r"too large to process|exceeds (the|maximum) context length")

# A proxy of the environment is used as everywhere, but leads to no server on this machine.
_NO_PROXY: dict[str, None] = {
    "all://localhost": None,
    "all://127.0.0.1": None,
    "all://[::1]": None,
}


class ModelServer:
    """The server of one model. Belongs to the event loop it is first used in."""

    def __init__(self, spec: EmbedderSpec, url: str, key_variable: str) -> None:
        """Take the address of the one route used, and which variable has the key; none: no key.

        Raises ConfigError if the address is none, or the key is missing.
        """
        if sentence := url_problem(url) or key_problem(key_variable):
            raise ConfigError(str(spec), sentence)
        self._spec = spec
        self._url = url
        self._key_variable = key_variable
        self._key = _key(key_variable)
        self._client = self._new_client()

    async def ask(self, request: msgspec.Struct, answer: type[T], texts: int) -> T:
        """Return what the server answers to a request with so many texts.

        Fails as `Embedder.embed` says. Takes as long as it takes: the caller times it.
        """
        numbers = max(self._spec.space.dimensions, _LENGTH_READ_MIN)
        bytes_max = _ERROR_BYTES_MAX + texts * numbers * _NUMBER_BYTES_MAX
        body = msgspec.json.encode(request)
        # Raised outside of `except`, or the library's error with the request would be its context.
        try:
            status, headers, said = await self._post(body, bytes_max)
        except httpx2.HTTPError as error:
            failure = self._unavailable(f"{type(error).__name__}: {error}")
        else:
            if status != 200:
                raise self._failure(status, headers, said)
            try:
                return msgspec.json.decode(said, type=answer)
            except msgspec.MsgspecError as error:
                failure = self._unavailable(f"it answers what is no embeddings ({error})")
        raise failure

    def broken(self, problem: str) -> Unavailable:
        """Return the error of an answer that can be read and still is wrong."""
        return self._unavailable(f"it answers {problem}")

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _new_client(self) -> httpx2.AsyncClient:
        headers = {"content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        try:
            return httpx2.AsyncClient(
                headers=headers,
                timeout=None,
                follow_redirects=False,
                limits=httpx2.Limits(
                    max_connections=_CONNECTIONS_MAX, max_keepalive_connections=_CONNECTIONS_MAX
                ),
                mounts=_NO_PROXY,
            )
        except (ValueError, ImportError):
            problem = "the proxy that the environment names (ALL_PROXY, HTTPS_PROXY) is not usable"
        raise ConfigError(str(self._spec), problem)

    async def _post(self, body: bytes, bytes_max: int) -> tuple[int, Mapping[str, str], bytes]:
        said = bytearray()
        async with self._client.stream("POST", self._url, content=body) as response:
            if response.status_code != 200:
                bytes_max = _ERROR_BYTES_MAX
            async for chunk in response.aiter_bytes():
                said += chunk
                if len(said) > bytes_max:
                    break
        if response.status_code == 200 and len(said) > bytes_max:
            raise self.broken(f"more than {bytes_max} bytes")
        return response.status_code, response.headers, bytes(said[:bytes_max])

    def _failure(self, status: int, headers: Mapping[str, str], body: bytes) -> MindgridError:
        """Return what an answer other than 200 means, by who can act on it."""
        problem = _problem(body)
        words = self._keyless(problem.message)
        said = f"{self._url} answers {status}" + (f": {words}" if words else "")
        if status in _REFUSED or (status == 500 and _TOO_LONG.search(problem.message)):
            return InvalidRequest("", f"{self._spec} answers {status}: {words}")
        if status in (401, 403):
            # Without its words: they like to show a part of the key.
            return ConfigError(str(self._spec), f"{self._url} answers {status}: {self._remedy()}")
        if problem.code == "insufficient_quota":
            return ConfigError(str(self._spec), said)
        if status >= 500 or status in _MAY_PASS:
            return Unavailable(str(self._spec), said, retry_after_s(headers))
        hint = "look at embedder.model and embedder.options.base_url"
        if 300 <= status < 400:
            hint = "redirects are not followed; embedder.options.base_url must be the last address"
        return ConfigError(str(self._spec), f"{said}; {hint}")

    def _remedy(self) -> str:
        if self._key_variable:
            return f"it does not take the key in the environment variable {self._key_variable}"
        return "it wants a key; name its environment variable in embedder.options.api_key_env"

    def _unavailable(self, problem: str) -> Unavailable:
        return Unavailable(str(self._spec), f"{self._url}: {self._keyless(problem)}")

    def _keyless(self, words: str) -> str:
        """Return a server's words on one bounded line, or that they are left out for our key."""
        if self._key and _shares(words, self._key):
            return "(its words repeat a part of the key, and are left out)"
        line = " ".join("".join(c if c.isprintable() else " " for c in words).split())
        return line if len(line) <= _WORDS_CHARS_MAX else f"{line[:_WORDS_CHARS_MAX]}…"


def url_problem(url: str) -> str:
    """Return a sentence if nothing can be asked under the address; it does not repeat it."""
    try:
        port = httpx2.URL(url).port
    except httpx2.InvalidURL:
        port = 0
    # A port out of range would be an OverflowError when it is connected to.
    if port is None or 0 < port < 2**16:
        return ""
    return "has no address of a server in options.base_url; look at its host and port"


def key_problem(variable: str) -> str:
    """Return a sentence if the environment variable holds no key that could be sent."""
    if not variable:
        return ""
    key = _key(variable)
    if not key:
        return (
            f"the environment variable {variable} is not set; put the key into it, or let "
            "embedder.options.api_key_env name another"
        )
    if re.fullmatch(r"[\x21-\x7e]+", key) is None:
        # The HTTP library would refuse it too, and repeat it in its error.
        return f"the environment variable {variable} holds what no HTTP header can carry"
    return ""


def _key(variable: str) -> str:
    # A key that was read from a file often ends with its newline.
    return os.environ.get(variable, "").strip() if variable else ""


_SHARED_CHARS = 8


def _shares(words: str, key: str) -> bool:
    """Return whether a part of the key stands in the words, eight characters or all of it."""
    size = min(len(key), _SHARED_CHARS)
    return any(key[at : at + size] in words for at in range(len(key) - size + 1))


class _Problem(NamedTuple):
    message: str
    code: str


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _Failure(msgspec.Struct):
    """The forms of OpenAI and llama.cpp, of Ollama, and of vLLM and FastAPI."""

    error: _Error | str | None = None
    message: str = ""
    detail: str = ""


def _problem(body: bytes) -> _Problem:
    """Return what the body of a failure says; all of it where it has no known form."""
    try:
        failure = msgspec.json.decode(body, type=_Failure)
    except msgspec.MsgspecError:
        failure = _Failure()
    if isinstance(failure.error, _Error) and failure.error.message:
        return _Problem(failure.error.message, str(failure.error.code or ""))
    words = failure.error if isinstance(failure.error, str) else failure.message or failure.detail
    return _Problem(words or body.decode(errors="replace"), "")


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Return how many seconds the server asks to be left alone; 0 if it does not say.

    A date counts from the answer's own `Date`, so that nobody's clock has to be right.
    """
    asked = headers.get("retry-after", "")
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", asked):
        return float(asked)
    try:
        until, now = (parsedate_to_datetime(headers.get(n, "")) for n in ("retry-after", "date"))
        return max(0.0, (until - now).total_seconds())
    except (TypeError, ValueError):
        return 0.0


def stacked(server: ModelServer, rows: Sequence[Vector | Sequence[float]]) -> Vectors:
    """Return the rows as one array; Unavailable if their lengths differ."""
    lengths = {len(row) for row in rows}
    if len(lengths) > 1:
        raise server.broken(f"vectors of {min(lengths)} and of {max(lengths)} numbers")
    # A number beyond float32 becomes infinite here, and is then refused.
    with np.errstate(over="ignore"):
        return np.array(rows, np.float32).reshape(len(rows), *lengths)
