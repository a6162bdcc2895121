"""Streams of an ASGI application, line by line; httpx's transport would wait for their end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

from mindgrid.api.app import Door

Json = dict[str, Any]


class Stream:
    """One POST whose answer is read as it comes."""

    def __init__(self, door: Door, path: str, body: Json) -> None:
        """Begin it; needs a running loop."""
        self.status = 0
        self.bodies = 0
        self._body: bytes | None = json.dumps(body).encode()
        self._left = asyncio.Event()
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._begun = asyncio.Event()
        self._rest = b""
        self._go_on = asyncio.Event()
        self._go_on.set()
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        self._task = asyncio.ensure_future(door(scope, self._receive, self._send))

    async def begun(self) -> int:
        """Return the status once it is there."""
        await asyncio.wait_for(self._begun.wait(), 20)
        return self.status

    async def line(self, wait_s: float = 20.0) -> bytes | None:
        """Return the next line, None at the end; raises TimeoutError."""
        return await asyncio.wait_for(self._lines.get(), wait_s)

    def stall(self) -> None:
        """Read nothing until `go_on`."""
        self._go_on.clear()

    def go_on(self) -> None:
        """Read again."""
        self._go_on.set()

    async def leave(self, goes_on: bool = True) -> None:
        """Hang up, and return once the application is done; unless it goes on, sends hang."""
        self._left.set()
        if goes_on:
            self._go_on.set()
        await asyncio.wait_for(self._task, 20)

    async def _receive(self) -> MutableMapping[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        await self._go_on.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._begun.set()
            return
        self.bodies += 1
        *lines, self._rest = (self._rest + message["body"]).split(b"\n")
        for line in lines:
            self._lines.put_nowait(line)
        if not message.get("more_body", False):
            if self._rest:
                self._lines.put_nowait(self._rest)
            self._lines.put_nowait(None)
