"""One HTTP exchange over ASGI: the body in, within its bound, and an answer or an error out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import orjson

from mindgrid.api.wire import status
from mindgrid.shards.errors import InvalidRequest, TooLarge

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ClientGone(Exception):
    """The client left before its request was whole; there is no one to answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole JSON answer."""

    http: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


def failure(error: BaseException) -> Answer:
    """Return the answer of a failed call."""
    code, http, message = status.of(error)
    return refusal(http, code, message)


def refusal(http: int, code: int, message: str, *headers: tuple[bytes, bytes]) -> Answer:
    """Return `{"code", "message"}` under an HTTP status."""
    # A message may quote what a client sent, lone surrogates included; orjson refuses those.
    text = message.encode(errors="backslashreplace").decode()
    return Answer(http, orjson.dumps({"code": code, "message": text}), headers)


async def send_answer(send: Send, answer: Answer) -> None:
    """Send the whole answer."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(answer.body)).encode()),
        *answer.headers,
    ]
    await send({"type": "http.response.start", "status": answer.http, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


async def send_stream(receive: Receive, send: Send, parts: AsyncGenerator[bytes, None]) -> None:
    """Send newline-delimited JSON as it comes, until it ends or the client has left."""
    sending = asyncio.ensure_future(_send_parts(send, parts))
    leaving = asyncio.ensure_future(_client_left(receive))
    try:
        await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (sending, leaving):
            task.cancel()
        await asyncio.gather(sending, leaving, return_exceptions=True)
        await parts.aclose()


async def _send_parts(send: Send, parts: AsyncIterator[bytes]) -> None:
    headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    # That the call is accepted must show before there is anything to tell.
    await send({"type": "http.response.body", "body": b"", "more_body": True})
    async for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(scope: Scope, receive: Receive, bytes_max: int) -> bytes:
    """Return the whole body; TooLarge beyond `bytes_max`, whether declared or found."""
    declared = _declared(scope)
    if declared > bytes_max:
        await _drain(receive, bytes_max)
        raise TooLarge(declared, bytes_max)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > bytes_max:
            if message.get("more_body", False):
                await _drain(receive, bytes_max)
            raise TooLarge(size, bytes_max)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _declared(scope: Scope) -> int:
    value = _header(scope, b"content-length")
    # Beyond 18 digits the number does not matter, and beyond 4,300 int() refuses it.
    return int(value[:18]) if value.isdigit() else 0


async def _drain(receive: Receive, bytes_max: int) -> None:
    """Throw away the rest of a body, up to as much again as is allowed.

    Many clients write all they have before they read: answered earlier, they see a broken pipe
    and never the reason.
    """
    left = bytes_max
    while left > 0:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
        left -= len(message.get("body", b""))


def check_content_type(scope: Scope) -> None:
    """Refuse a body that is not announced as JSON.

    This is more than form: a web page may post to a loopback address from its visitor's browser
    without asking, but only as text or as a form; JSON it must ask for, and is not granted.
    """
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() != b"identity":
            raise InvalidRequest("content-encoding", "is not supported; send the body as it is")
    given = _header(scope, b"content-type")
    if given == b"application/json":
        return
    kind, _, parameters = given.partition(b";")
    charset = parameters.strip().lower().replace(b'"', b"")
    if kind.strip().lower() != b"application/json" or charset not in (b"", b"charset=utf-8"):
        text = given[:64].decode("latin-1") or "unset"
        raise InvalidRequest("content-type", f"must be application/json in UTF-8, but is {text}")


def _header(scope: Scope, wanted: bytes) -> bytes:
    for name, value in scope["headers"]:
        if name == wanted:
            found: bytes = value
            return found
    return b""
