"""The smallest application behind Serve: a bare ASGI callable that names its process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ray import serve

from mindgrid.shards.errors import ConfigError

Message = MutableMapping[str, Any]


class App:
    """Answers every path with its process; /slow after a second."""

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Answer one ASGI connection. Serve wants the lifespan answered too, or does not start."""
        if scope["type"] == "lifespan":
            while True:
                phase = (await receive())["type"]
                await send({"type": f"{phase}.complete"})
                if phase == "lifespan.shutdown":
                    return
        if scope["path"] == "/slow":
            await asyncio.sleep(1)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(os.getpid()).encode()})


class Front:
    """One replica."""


def build(config_file: str) -> serve.Application:
    """Return the application; what stands in the configuration does not matter."""
    front = serve.ingress(App())(Front)
    return serve.deployment(
        name="front", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0}
    )(front).bind()


def refuse(config_file: str) -> serve.Application:
    """Find something wrong that only a person can mend."""
    raise ConfigError(config_file, "holds nothing")
