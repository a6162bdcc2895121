"""The door: one bare ASGI callable that answers the hot routes, and hands the rest to FastAPI.

A third of a constant answer's time went into FastAPI's and Starlette's eight layers of middleware
(measured), so a search passes none of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from mindgrid.api import cold
from mindgrid.api.episodic import Episodic, Events
from mindgrid.api.front import Grid, Records, Semantic
from mindgrid.api.pace import Pace
from mindgrid.api.principal import ANONYMOUS, Principal
from mindgrid.api.wire import codec, http, status
from mindgrid.api.wire.events import (
    AppendBatchRequest,
    AppendRequest,
    DescribeRequest,
    RangeRequest,
    TailRequest,
)
from mindgrid.api.wire.events import ExpireRequest as ExpireEventsRequest
from mindgrid.api.wire.http import Answer, ClientGone, Receive, Scope, Send
from mindgrid.api.wire.messages import (
    CountRequest,
    DeleteRequest,
    ExpireRequest,
    GetRequest,
    ListRequest,
    Message,
    SearchBatchRequest,
    SearchRequest,
    SearchResponse,
    UpsertRequest,
)
from mindgrid.api.writes import Writes

BODY_BYTES_MAX = 32 * 2**20
_LINES_AT_ONCE = 200
"""A few milliseconds of the event loop's time."""
_LARGE_BYTES = 64 * 1024
"""Bodies from this size on are read beside the event loop, one at a time: 13 ms for a megabyte."""


Stream = AsyncGenerator[Sequence[Message], None]
"""Messages as they come; an empty part says only that the stream is still there."""


@dataclass(frozen=True, slots=True)
class _Verb:
    """One hot route: what its body spells, and what answers it."""

    request: type[Message]
    handler: Callable[[Principal, Any], Awaitable[Message | Stream]]


class Door:
    """Answers HTTP from a grid. Any failure is an answer; none reaches the server around it.

    It does not watch for clients that leave: Serve does, and cancels the call, and with it the
    query that waits in a lane. A second watcher would cost two tasks a request.
    """

    def __init__(
        self, grid: Grid, body_bytes_max: int = BODY_BYTES_MAX, bench: bool = False
    ) -> None:
        """Answer from `grid`; `bench` adds the route of a constant answer."""
        self._body_bytes_max = body_bytes_max
        self._reader = ThreadPoolExecutor(1, "large bodies")
        self._pace = Pace()
        self._bench = bench
        self._grid = grid
        self._verbs = _verbs(grid)
        self._cold = cold.application(self._verbs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI connection."""
        path = scope["path"] if scope["type"] == "http" else ""
        verb = self._verbs.get(path)
        answer: Answer | Stream
        try:
            if verb is not None:
                answer = await self._answer(verb, scope, receive)
            elif path == "/healthz":
                answer = await self._health(scope)
            elif self._bench and path == "/bench/constant":
                answer = await self._constant(scope, receive)
            else:
                await self._cold(scope, receive, send)
                return
        except ClientGone:
            answer = http.refusal(499, 1, "the client left before its request was whole")
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets an answer.
            answer = http.failure(error)
        if isinstance(answer, Answer):
            await http.send_answer(send, answer)
        else:
            # Here, and not in `_lines`: a client may leave before a line was asked for.
            async with aclosing(answer):
                await http.send_stream(receive, send, _lines(answer))

    async def _answer(self, verb: _Verb, scope: Scope, receive: Receive) -> Answer | Stream:
        """Answer in the contract's order: size, caller, validation, work."""
        if scope["method"] != "POST":
            return _wrong_method(scope, "POST")
        body = await http.read_body(scope, receive, self._body_bytes_max)
        principal = ANONYMOUS
        http.check_content_type(scope)
        if len(body) < _LARGE_BYTES:
            self._pace.small()
            return await self._handled(verb, principal, codec.decode(verb.request, body))
        async with self._pace.large():
            loop = asyncio.get_running_loop()
            message = await loop.run_in_executor(self._reader, codec.decode, verb.request, body)
            return await self._handled(verb, principal, message)

    async def _handled(
        self, verb: _Verb, principal: Principal, message: Message
    ) -> Answer | Stream:
        answer = await verb.handler(principal, message)
        if not isinstance(answer, Message):
            return answer
        headers = _recall(answer) if isinstance(answer, SearchResponse) else ()
        return Answer(200, codec.encode(answer), headers)

    async def _health(self, scope: Scope) -> Answer:
        if scope["method"] not in ("GET", "HEAD"):
            return _wrong_method(scope, "GET")
        await self._grid.ready()
        return Answer(200, b'{"status":"ok"}')

    async def _constant(self, scope: Scope, receive: Receive) -> Answer:
        """Answer `?bytes=N` blanks in quotes: the peer that the bench compares a search with."""
        if scope["method"] != "POST":
            return _wrong_method(scope, "POST")
        await http.read_body(scope, receive, self._body_bytes_max)
        wanted = parse_qs(scope["query_string"]).get(b"bytes", [b"1200"])[0]
        size = int(wanted) if wanted.isdigit() and len(wanted) < 7 else 1200
        return Answer(200, b'"' + b" " * max(0, size - 2) + b'"')


def _verbs(grid: Grid) -> dict[str, _Verb]:
    semantic, records = Semantic(grid, Writes()), Records(grid)
    episodic, events = Episodic(grid.logs), Events(grid.logs)
    return {
        "/mindd.semantic.v1.Semantic/Upsert": _Verb(UpsertRequest, semantic.upsert),
        "/mindd.semantic.v1.Semantic/Search": _Verb(SearchRequest, semantic.search),
        "/mindd.semantic.v1.Semantic/Delete": _Verb(DeleteRequest, semantic.delete),
        "/mindd.semantic.v1.Semantic/Expire": _Verb(ExpireRequest, semantic.expire),
        "/mindd.episodic.v1.Episodic/Append": _Verb(AppendRequest, episodic.append),
        "/mindd.episodic.v1.Episodic/Range": _Verb(RangeRequest, episodic.range),
        "/mindd.episodic.v1.Episodic/Tail": _Verb(TailRequest, episodic.tail),
        "/mindd.episodic.v1.Episodic/Expire": _Verb(ExpireEventsRequest, episodic.expire),
        "/mindgrid.v1.Events/AppendBatch": _Verb(AppendBatchRequest, events.append_batch),
        "/mindgrid.v1.Events/Describe": _Verb(DescribeRequest, events.describe),
        "/mindgrid.v1.Records/Get": _Verb(GetRequest, records.get),
        "/mindgrid.v1.Records/List": _Verb(ListRequest, records.list),
        "/mindgrid.v1.Records/Count": _Verb(CountRequest, records.count),
        "/mindgrid.v1.Records/SearchBatch": _Verb(SearchBatchRequest, records.search_batch),
    }


async def _lines(stream: Stream) -> AsyncGenerator[bytes, None]:
    """Return the stream's messages as lines of JSON; a failure in the middle is the last one."""
    try:
        async for part in stream:
            for start in range(0, len(part) or 1, _LINES_AT_ONCE):
                messages = part[start : start + _LINES_AT_ONCE]
                lines = [b'{"result":%b}\n' % codec.encode(message) for message in messages]
                yield b"".join(lines) or b"\n"
    except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
        yield b'{"error":%b}\n' % http.failure(error).body


def _recall(answer: SearchResponse) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers that say what the answer's recall rests on."""
    exact = b"true" if answer.exact else b"false"
    return (b"mindgrid-exact", exact), (b"mindgrid-scanned", b"%d" % answer.scanned)


def _wrong_method(scope: Scope, allowed: str) -> Answer:
    words = f"{scope['path']} takes {allowed}, not {scope['method'][:16]}"
    return http.refusal(405, status.NO_METHOD, words, (b"allow", allowed.encode()))
