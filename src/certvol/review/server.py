"""Serve the labelling page on this machine only.

Every address begins with a secret token. Requests with another Host or Origin are refused, so that
no other page in the browser can read or label anything. The page names images by their number in
the queue; no text of a request is ever used as a path.
"""

import json
import secrets
import socket
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from certvol.errors import Interrupted, UserError
from certvol.review.session import BadAnswer, Session

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")
FIRST_PORT, PORTS = 8765, 20  # where a free port is looked for
MOST_BODY, MOST_DIGITS = 4096, 9
CTRL_C = 130  # exit code
ASSETS = {
    "review.html": "text/html",
    "review.css": "text/css",
    "review.js": "text/javascript",
    "typing.js": "text/javascript",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Handler = Callable[[Request], Awaitable[Response]]


def make_app(session: Session, token: str) -> ASGIApp:
    """Return the application; it serves requests of the pages that know the token."""

    async def asset(request: Request) -> Response:
        name = request.path_params.get("name", "review.html")
        if name not in ASSETS:
            return _refusal(404, "not found")
        text = (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")
        return Response(text, media_type=ASSETS[name])

    async def data(request: Request) -> Response:
        return JSONResponse(session.page_data())

    async def picture(request: Request) -> Response:
        number = request.path_params["number"]
        if not (number.isascii() and number.isdecimal() and len(number) <= MOST_DIGITS):
            return _refusal(404, "there is no such image")
        try:
            found = await run_in_threadpool(session.picture, int(number))
        except BadAnswer:
            return _refusal(404, "there is no such image")
        if found is None:
            return _refusal(410, "this image cannot be read")
        keep = {"Cache-Control": "private, max-age=3600"}
        return Response(found, media_type="image/webp", headers=keep)

    async def answer(request: Request) -> Response:
        body = await _json_body(request)
        if isinstance(body, Response):
            return body
        try:
            session.give(body.get("item"), body.get("answer"), body.get("label"))
        except BadAnswer as error:
            return _refusal(400, str(error))
        except UserError as error:
            return _refusal(507, str(error))
        return JSONResponse({"estimates": session.estimates().data()})

    async def undo(request: Request) -> Response:
        body = await _json_body(request)
        if isinstance(body, Response):
            return body
        try:
            number = session.undo()
        except UserError as error:
            return _refusal(507, str(error))
        return JSONResponse({"item": number, "estimates": session.estimates().data()})

    own = f"/{token}"
    routes = [
        Route(f"{own}/", asset),
        Route(f"{own}/assets/{{name}}", asset),
        Route(f"{own}/data", data),
        Route(f"{own}/image/{{number}}", picture),
        Route(f"{own}/answer", answer, methods=["POST"]),
        Route(f"{own}/undo", undo, methods=["POST"]),
    ]
    return _Guard(Starlette(routes=routes), token)


class _Guard:
    """Refuse requests from elsewhere, before anything looks at them, and add safe headers."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                message["headers"] += [
                    (name.lower().encode(), value.encode())
                    for name, value in HEADERS.items()
                    if name.lower().encode() not in given
                ]
            await send(message)

        refused = self._refused(scope)
        await (refused or self.app)(scope, receive, guarded)

    def _refused(self, scope: Scope) -> Response | None:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        host, *others = headers.get(b"host", [b""])
        if others or host.rpartition(b":")[0].decode("latin-1") not in NAMES:
            return _refusal(403, "this page answers to 127.0.0.1 and localhost only")
        origins = headers.get(b"origin", [b"http://" + host] if scope["method"] == "GET" else [])
        if origins != [b"http://" + host]:
            return _refusal(403, "requests from other pages are refused")
        if headers.get(b"sec-fetch-site", [b"none"])[0] not in (b"none", b"same-origin"):
            return _refusal(403, "requests from other pages are refused")
        first = scope["path"].lstrip("/").partition("/")[0]
        if not secrets.compare_digest(
            first.encode("utf-8", "surrogateescape"), self.token.encode()
        ):
            return _refusal(403, "open the address that `certvol review` printed")
        return None


def _refusal(status: int, reason: str) -> Response:
    return PlainTextResponse(reason, status)


async def _json_body(request: Request) -> dict[str, Any] | Response:
    """Read a small JSON object; a larger body is refused before it is in memory."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        return _refusal(415, "expected JSON")
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > MOST_BODY:
                return _refusal(413, "too large")
        found = json.loads(body)
    except (ValueError, RecursionError, ClientDisconnect):
        return _refusal(400, "not JSON")
    return found if isinstance(found, dict) else _refusal(400, "expected an object")


def listen(port: int | None) -> socket.socket:
    """Listen on this port, or on the first free one from 8765."""
    ports = range(FIRST_PORT, FIRST_PORT + PORTS) if port is None else [port]
    for each in (*ports, *([0] if port is None else [])):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, each))
            listener.listen(64)
            return listener
        except OSError as error:
            listener.close()
            reason = (error.strerror or str(error)).lower()
        except OverflowError:
            listener.close()
            reason = "ports lie between 0 and 65535"
    raise UserError(f"cannot listen on port {port}: {reason}; give another --port")


def make_server(session: Session, token: str) -> uvicorn.Server:
    config = uvicorn.Config(
        make_app(session, token),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        limit_concurrency=100,
        ws="none",
        lifespan="off",
    )
    return uvicorn.Server(config)


def serve(session: Session, listener: socket.socket, token: str) -> None:
    """Serve until Ctrl-C, which is the usual end, or SIGTERM."""
    try:
        make_server(session, token).run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    except Interrupted as stop:  # the command line's handler of Ctrl-C raises this instead
        if stop.exit_code != CTRL_C:
            raise
