"""The command line: `mindgrid serve`, `status` and `demo`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from mindgrid.cluster.embedders.service import check_here
from mindgrid.cluster.settings import Settings, load
from mindgrid.shards.errors import MindgridError

APPLICATION = "mindgrid.api.deploy:build"

app = typer.Typer(
    help="A memory service for agents, from a laptop to a Ray cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Config = Annotated[
    Path, typer.Option("--config", help="The configuration; see docs/configuration.md.")
]


@app.command()
def serve(
    config: Config = Path("deploy/mindgrid.yaml"),
    address: Annotated[
        str | None,
        typer.Option(help="Join this Ray cluster (host:port, ray's own port) and start none."),
    ] = None,
) -> None:
    """Serve in the foreground until SIGTERM; says when it is ready, and when it has stopped."""
    from mindgrid.cluster.supervisor import ServerOptions, Supervisor

    with _for_people():
        settings = load(config)
        if address is None:
            # Of a cluster of others, this process does not know the environment.
            check_here(embedding.spec for embedding in settings.embeddings().values())
        _warn_of_no_tokens(settings)
        options = ServerOptions(
            storage=settings.grid_spec().storage,
            host=settings.server.host,
            http_port=settings.server.http.port,
            grpc_port=settings.server.grpc.port,
            config_file=config.absolute(),
            app=APPLICATION,
            address=address,
        )
        Supervisor(options, _say).run()


@app.command()
def status(config: Config = Path("deploy/mindgrid.yaml")) -> None:
    """Show namespaces, shards and processes of the server that runs on the storage folder."""
    from mindgrid.jobs import status as shown

    with _for_people():
        shown.show(load(config).grid_spec().storage)


@app.command()
def demo(
    keep: Annotated[
        Path | None, typer.Option(help="Keep the demo's storage in this new folder.")
    ] = None,
) -> None:
    """Index this Python's docstrings, ask, revise a fact, kill a host, and ask again."""
    from mindgrid.jobs import demo as shown

    with _for_people():
        shown.run(keep)


def _say(line: str) -> None:
    # Who started the server may have read enough: `mindgrid serve | head -1`.
    with suppress(BrokenPipeError):
        print(line, flush=True)


def _warn_of_no_tokens(settings: Settings) -> None:
    if settings.auth.mode == "off":
        typer.echo(
            f"auth is off: whoever reaches {settings.server.host} may do everything",
            err=True,
        )


@contextmanager
def _for_people() -> Iterator[None]:
    """Say errors that a person can act on in a sentence; bugs keep their traceback."""
    logging.basicConfig(
        level=os.environ.get("MINDGRID_LOG", "WARNING"), format="%(levelname)s %(name)s %(message)s"
    )
    try:
        yield
    except MindgridError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app()
