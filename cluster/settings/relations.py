"""What settings must satisfy together, once each is right by itself."""

from __future__ import annotations

import difflib
import ipaddress
from collections import Counter
from collections.abc import Iterator

from mindgrid.cluster.embedders import registry
from mindgrid.cluster.settings.model import (
    Embedder,
    Namespace,
    Retention,
    Settings,
    embedder_spec,
)
from mindgrid.cluster.settings.yaml_lines import KeyPath
from mindgrid.cluster.spec import EPISODIC, SEMANTIC

Problem = tuple[KeyPath, str]
"""Where, and a sentence that starts with what is wrong there."""


def problems(settings: Settings) -> Iterator[Problem]:
    """Yield everything that cannot work together."""
    yield from _server(settings)
    yield from _policy(settings)
    yield from _backends(settings)
    yield from _namespaces(settings)
    if settings.cluster.retry_most < settings.cluster.retry_first:
        yield ("cluster", "retry_most"), "must not be shorter than cluster.retry_first"
    if settings.engine.transactions_kept < settings.cluster.deadline:
        yield (
            ("engine", "transactions_kept"),
            f"must be at least cluster.deadline, {settings.cluster.deadline:g} s: a write that is "
            "tried again within it would be done twice",
        )


def _server(settings: Settings) -> Iterator[Problem]:
    server = settings.server
    if server.http.port == server.grpc.port:
        yield (
            ("server", "grpc", "port"),
            f"is {server.grpc.port}, which server.http.port has already; choose another port",
        )
    if not _is_loopback(server.host):
        yield (
            ("server", "host"),
            'must be 127.0.0.1 (or another loopback address) while auth.mode is "off"; '
            "other addresses need tokens, which come with a later release",
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _policy(settings: Settings) -> Iterator[Problem]:
    # Accepting a rule without enforcing it would be worse than refusing it.
    if settings.policy.rules:
        yield ("policy", "rules"), "come with tokens in a later release; leave them out"
    if settings.policy.default != "allow":
        yield ("policy", "default"), "must be allow until tokens come with a later release"


def _backends(settings: Settings) -> Iterator[Problem]:
    seen = Counter[str]()
    for index, backend in enumerate(settings.backends):
        seen[backend.name] += 1
        if seen[backend.name] > 1:
            yield ("backends", index, "name"), f"{backend.name!r} is used twice; choose another"
        if backend.driver == "postgres":
            yield (
                ("backends", index, "driver"),
                "postgres comes with a later release; write `driver: lance`, "
                "which keeps everything in storage.path",
            )


def _namespaces(settings: Settings) -> Iterator[Problem]:
    seen = Counter[tuple[str, str]]()
    backends = sorted({backend.name for backend in settings.backends})
    for index, space in enumerate(settings.namespaces):
        path: KeyPath = ("namespaces", index)
        seen[space.block, space.name] += 1
        if seen[space.block, space.name] > 1:
            yield (
                (*path, "name"),
                f"{space.block}/{space.name} is described twice; remove one or rename it",
            )
        for inner, sentence in _namespace(space, backends):
            yield (*path, *inner), sentence


def _namespace(space: Namespace, backends: list[str]) -> Iterator[Problem]:
    if not space.backend and len(backends) > 1:
        yield ("backend",), f"must name one of: {', '.join(backends)}"
    if space.backend and space.backend not in backends:
        yield (
            ("backend",),
            f"{space.backend!r} is not described under backends; it has: {', '.join(backends)}",
        )
    if space.block != EPISODIC and space.retention != Retention():
        yield ("retention",), f"must be left out; only an {EPISODIC} namespace has events to keep"
    if space.block == EPISODIC and space.shards > 1:
        yield (
            ("shards",),
            f"is {space.shards}, but an episodic namespace is one log in one order; write 1",
        )
    if space.block == EPISODIC:
        for name in ("text_search", "history", "recall"):
            if name in space.model_fields_set:
                yield (name,), "must be left out; an episodic namespace is not searched"
    if space.block == SEMANTIC and space.embedder is None:
        yield (
            ("embedder",),
            "is missing; a semantic namespace needs one, for example "
            "`embedder: {provider: local, model: all-MiniLM-L6-v2, dimensions: 384}`",
        )
    if space.block != SEMANTIC and space.embedder is not None:
        yield ("embedder",), f"must be left out; a namespace of block {space.block} embeds nothing"
    elif space.embedder is not None:
        for path, sentence in _embedder(space.embedder):
            yield ("embedder", *path), sentence


def _embedder(embedder: Embedder) -> Iterator[Problem]:
    known = registry.names()
    if embedder.provider not in known:
        near = difflib.get_close_matches(embedder.provider, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        yield ("provider",), f"is not known; {hint}There are: {', '.join(known)}"
        return
    provider = registry.find(embedder.provider)
    if not embedder.model and not provider.model_default:
        yield ("model",), f"is missing; name a model of {embedder.provider}"
    for name in embedder.options.more():
        if name not in provider.options:
            yield (
                ("options", name),
                unknown(name, [*type(embedder.options).model_fields, *provider.options]),
            )
    if sentence := provider.problem(embedder_spec(embedder)):
        yield (), sentence


def unknown(name: str, known: list[str]) -> str:
    """Return the sentence for a name that means nothing where it stands."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"is not a setting; {hint}Known here: {', '.join(known)}"
