"""A web page and a JSON API for one model. Needs the extra `serve`."""

from capsroute.serve.app import create_app
from capsroute.serve.limits import Limits
from capsroute.serve.server import listen, run

__all__ = ["Limits", "create_app", "listen", "run"]
