"""Keeps other web sites away from a server on one's own machine.

A page of any site may send requests to 127.0.0.1, and a site whose name is made to point there
(DNS rebinding) may read the answers as its own. So a request must name a host that is ours: an
address, which cannot be rebound, or a name that was allowed. And one that changes or costs
something must not come from a page of another origin.
"""

import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK_NAMES = ("localhost",)
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")

HEADERS = {
    # nothing from outside, nothing inline: pictures may be data, which is how heat maps come
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
_RAW_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


class Guard:
    """ASGI middleware: checks `Host` and `Origin`, adds the headers above to every answer."""

    def __init__(self, app: ASGIApp, allowed_names: Iterable[str] = ()) -> None:
        self._app = app
        self._names = {name.lower() for name in (*LOOPBACK_NAMES, *allowed_names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_RAW_HEADERS]
            await send(message)

        problem = self._problem(scope["method"], Headers(scope=scope))
        if problem is None:
            await self._app(scope, receive, send_guarded)
        else:
            refusal = JSONResponse({"error": problem}, status_code=403)
            await refusal(scope, receive, send_guarded)

    def _problem(self, method: str, headers: Headers) -> str | None:
        host = headers.get("host", "").lower()
        if not self._is_ours(host):
            return "the Host header names another server; start with --allow-host to add a name"
        origin = headers.get("origin")
        if origin and method not in SAFE_METHODS and _site(origin) != host:
            return "requests from pages of other sites are not taken"
        return None

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:  # such as an unclosed bracket
            return False
        return name in self._names or _is_address(name)


def _site(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # as above
        return ""  # nobody's


@lru_cache(maxsize=256)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
