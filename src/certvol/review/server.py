"""Serve the labelling page on this machine only.

Every address begins with a secret token. Requests with another Host or Origin are refused, so that
no other page in the browser can read or label anything. The page names images by their number in
the queue; no text of a request is ever used as a path.
"""

import json
import secrets
import socket
from collections.abc import Callable
from importlib import resources
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from certvol.errors import Interrupted, UserError
from certvol.review.session import BadAnswer, Session

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")
FIRST_PORT, PORTS = 8765, 20  # where a free port is looked for
MOST_BODY = 4096
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


def make_app(session: Session, token: str) -> ASGIApp:
    """Return the application; it serves requests of the pages that know the token."""

    async def asset(request: Request) -> Response:
        name = request.path_params.get("name", "review.html")
        if name not in ASSETS:
            raise HTTPException(404, "not found")
        text = (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")
        return Response(text, media_type=ASSETS[name])

    async def data(request: Request) -> Response:
        return JSONResponse(session.page_data())

    async def picture(request: Request) -> Response:
        try:
            found = await run_in_threadpool(session.picture, int(request.path_params["number"]))
        except ValueError:  # not a number, of too many digits, or not in the queue
            raise HTTPException(404, "there is no such image") from None
        if found is None:
            raise HTTPException(410, "this image cannot be read")
        keep = {"Cache-Control": "private, max-age=3600"}
        return Response(found, media_type="image/webp", headers=keep)

    async def answer(request: Request) -> Response:
        body = await _json_body(request)
        session.give(body.get("item"), body.get("answer"), body.get("label"))
        return JSONResponse({"estimates": session.estimates().data()})

    async def undo(request: Request) -> Response:
        await _json_body(request)
        number = session.undo()
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
    # A UserError says that the answer cannot be written, such as on a full disk.
    refusals: dict[Any, Any] = {BadAnswer: _refusal_with(400), UserError: _refusal_with(507)}
    return _Guard(Starlette(routes=routes, exception_handlers=refusals), token)


def _refusal_with(status: int) -> Callable[[Request, Exception], Response]:
    return lambda request, error: PlainTextResponse(str(error), status)


class _Guard:
    """Refuse requests from elsewhere, before anything looks at them, and add safe headers."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refusal(scope)
        answer = self.app if refusal is None else PlainTextResponse(refusal, 403)
        await answer(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> str | None:
        """Return why a request is refused, or None."""
        headers = Headers(scope=scope)
        host, *others = headers.getlist("host") or [""]
        if others or host.rpartition(":")[0] not in NAMES:
            return "this page answers to 127.0.0.1 and localhost only"
        own = f"http://{host}"
        if (headers.getlist("origin") or ([own] if scope["method"] == "GET" else [])) != [own]:
            return "requests from other pages are refused"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return "requests from other pages are refused"
        first = scope["path"].lstrip("/").partition("/")[0]
        if not secrets.compare_digest(
            first.encode("utf-8", "surrogateescape"), self.token.encode()
        ):
            return "open the address that `certvol review` printed"
        return None


async def _json_body(request: Request) -> dict[str, Any]:
    """Read a small JSON object; a larger body is refused before it is in memory."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise HTTPException(415, "expected JSON")
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > MOST_BODY:
                raise HTTPException(413, "too large")
        found = json.loads(body)
    except (ValueError, RecursionError, ClientDisconnect):
        raise HTTPException(400, "not JSON") from None
    if not isinstance(found, dict):
        raise HTTPException(400, "expected an object")
    return found


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
