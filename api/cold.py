"""Everything over HTTP that need not be fast: documentation, routes yet to come, and refusals."""

from __future__ import annotations

from collections.abc import Collection
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from mindgrid import __version__
from mindgrid.api import openapi
from mindgrid.api.wire import http, status
from mindgrid.api.wire.http import Answer
from mindgrid.shards.errors import Unimplemented

ASSETS = "/docs/assets"


def application(built: Collection[str]) -> FastAPI:
    """Return the application behind the hot routes, whose paths are `built`."""
    # Docs pages of FastAPI's own would load Swagger UI from the network.
    app = FastAPI(title="mindgrid", docs_url=None, redoc_url=None, openapi_url=None)
    document = openapi.document(__version__, built)

    @app.get("/openapi.json", include_in_schema=False)
    async def schema() -> dict[str, Any]:
        return document

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="mindgrid",
            swagger_js_url=f"{ASSETS}/swagger-ui-bundle.js",
            swagger_css_url=f"{ASSETS}/swagger-ui.css",
            swagger_favicon_url=f"{ASSETS}/favicon.png",
        )

    static = resources.files("fastapi_offline").joinpath("static")
    app.mount(ASSETS, StaticFiles(directory=str(static)), name="assets")
    for path in set(openapi.method_paths()) - set(built):
        app.add_api_route(path, _later, methods=["POST"], include_in_schema=False)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Exception, _failed)
    return app


async def _later(request: Request) -> Response:
    verb = request.url.path.removeprefix("/")
    return _response(http.failure(Unimplemented(f"{verb} comes with a later release")))


async def _refused(request: Request, error: Exception) -> Response:
    """Turn what Starlette itself refuses into our shape."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:256]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("allow") or (error.headers or {}).get("Allow", "")
        words = f"{path} takes {allowed}, not {request.method[:16]}"
        return _response(http.refusal(405, status.NO_METHOD, words, (b"allow", allowed.encode())))
    if error.status_code == 404:
        return _response(http.refusal(404, status.NO_ROUTE, f"there is no {path}; see /docs"))
    return _response(http.refusal(error.status_code, 2, str(error.detail)))


async def _failed(request: Request, error: Exception) -> Response:
    return _response(http.failure(error))


def _response(answer: Answer) -> Response:
    headers = {name.decode(): value.decode() for name, value in answer.headers}
    return Response(answer.body, answer.http, headers, media_type="application/json")
