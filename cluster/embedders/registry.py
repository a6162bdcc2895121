"""Finds the provider files of this folder."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from mindgrid.cluster import embedders
from mindgrid.cluster.embedders.protocol import Provider
from mindgrid.shards.errors import Unimplemented

_NOT_PROVIDERS = frozenset(
    {
        "cache",
        "coalescer",
        "model_server",
        "protocol",
        "refusals",
        "registry",
        "service",
        "serving",
    }
)


@functools.cache
def names() -> tuple[str, ...]:
    """Return the name of each provider that is built, sorted. Looks at the folder once."""
    files = {module.name for module in pkgutil.iter_modules(embedders.__path__)}
    return tuple(sorted(files - _NOT_PROVIDERS))


def find(name: str) -> Provider:
    """Return the provider; Unimplemented if there is none of that name."""
    if name not in names():
        raise Unimplemented(
            f"the embedding provider {name!r} is not part of this release; it has: "
            f"{', '.join(names())}. Records and queries with vectors work without it"
        )
    provider = importlib.import_module(f"{embedders.__name__}.{name}").PROVIDER
    assert isinstance(provider, Provider), f"{name}.py must set PROVIDER"
    return provider
