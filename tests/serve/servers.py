"""Real servers on loopback, in threads, around small untrained models."""

import http.client
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass

import torch

import capsroute
from capsroute.inference import Predictor
from capsroute.serve import Limits, create_app, listen
from capsroute.serve.server import Server


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


@dataclass(frozen=True)
class Running:
    """A server, and the simplest client there is."""

    port: int
    server: Server

    def ask(self, method, path, body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def predict(self, image, query="", **headers):
        return self.ask("POST", f"/predict{query}", image, content_type="image/png", **headers)


@contextmanager
def running(predictor, limits=None, port=0, **options):
    sock = listen("127.0.0.1", port)
    ready = threading.Event()
    server = Server(create_app(predictor, limits or Limits(), **options), ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        assert ready.wait(30)
        yield Running(sock.getsockname()[1], server)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def make_predictor(name="inverted_small_multimnist", class_names=None, **options):
    torch.manual_seed(0)
    model = capsroute.create_model(name, **options)
    model.class_names = class_names
    return Predictor.from_model(model, device="cpu")
