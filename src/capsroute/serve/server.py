"""The process: a socket, uvicorn, and an end that loses nothing in flight."""

import gc
import ipaddress
import signal
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from capsroute.serve.uploads import refuse_bombs

GRACE = 30  # seconds that a request in flight has to finish


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, or an OSError that says which address could not be had."""
    if not 0 <= port <= 65535:
        raise ValueError(f"`port` must be between 0 and 65535, got {port}")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise OSError(f"cannot listen on {host} port {port}: {reason}") from None


def address_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(sock: socket.socket) -> bool:
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback


class Server(uvicorn.Server):
    """Tells when it answers."""

    def __init__(self, app: FastAPI, on_ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nothing here depends on who asks
            timeout_graceful_shutdown=GRACE,
        )
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()


def run(app: FastAPI, sock: socket.socket, on_ready: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGINT or SIGTERM, finish the requests in flight, then return.

    A second SIGINT does not wait. Being told to stop is how a server ends, so neither signal is
    an error.
    """
    refuse_bombs()
    # PyTorch's 200,000 objects stay: looking through them took 120 ms every 2,000 requests
    gc.collect()
    gc.freeze()
    # uvicorn raises the signal again when it is done; SIGTERM would then end us as if killed
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        Server(app, on_ready).run(sockets=[sock])
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, previous)
