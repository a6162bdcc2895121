"""mindgrid: a memory service for agents that scales from a laptop to a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindgrid.cluster.handle import connect

__version__ = "0.1.0"
__all__ = ["__version__", "connect"]


def __getattr__(name: str) -> object:
    # Ray takes a second to import: who wants a type or the version does not pay for it.
    if name == "connect":
        from mindgrid.cluster.handle import connect

        return connect
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
