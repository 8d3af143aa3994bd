"""`capsroute serve` as a user types it."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from contextlib import closing

import pytest
import torch

import capsroute
from capsroute.extras import install_hint
from capsroute.models.weights import save_model


@pytest.fixture(autouse=True)
def same_threads():
    """The command sets the number of threads of its process, which here is the tests'."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    model = capsroute.create_model("inverted_small_multimnist")
    save_model(model, tmp_path / "mine.safetensors")
    return tmp_path / "mine.safetensors"


def start(*arguments):
    command = [sys.executable, "-m", "capsroute", "serve", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_stop(checkpoint, number):
    with start(checkpoint, "--port", "0") as process:
        line = process.stdout.readline()
        title, port = re.match(r"(.+) on http://127\.0\.0\.1:(\d+) ", line).groups()
        assert title == "mine.safetensors (inverted_small_multimnist)"
        with closing(http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)) as client:
            client.request("GET", "/model")
            about = client.getresponse().read().decode()
        told = json.loads(about)
        assert (told["title"], told["source"]) == (title, "mine.safetensors")
        assert told["name"] == "inverted_small_multimnist" and checkpoint.parent.name not in about
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "stopped\n", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--port", "70000"), "`--port` must be between 0 and 65535, got 70000"),
        (("--max-batch", "0"), "`--max-batch` must be at least 1, got 0"),
        (("--queue", "0"), "`--queue` must be at least 1, got 0"),
        (("--timeout", "-1"), "`--timeout` must be above 0, got -1"),
        (("--max-wait", "-1"), "`--max-wait` must be 0 milliseconds or more, got -1"),
        (("--max-upload", "inf"), "`--max-upload` must be a number of MiB above 0, got inf"),
        (("--threads", "0"), "`--threads` must be at least 1, got 0"),
        (("--host", "no such host"), "cannot listen on no such host port 8000"),
        (("--prot", "1"), "did you mean --port?"),
    ],
)
def test_a_wrong_option_is_one_line(run, checkpoint, options, message):
    status, out, err = run("serve", checkpoint, *options)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_a_port_that_is_taken(run, checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        status, _, err = run("serve", checkpoint, "--port", port)
    assert status == 2 and f"cannot listen on 127.0.0.1 port {port}: " in err


def test_a_model_that_is_not_there(run, tmp_path):
    status, _, err = run("serve", tmp_path / "nothing.safetensors")
    assert status == 2 and "no such model" in err and err.count("\n") == 1


def test_without_the_extra(run, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("capsroute.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    status, _, err = run("serve", "anything")
    assert status == 2
    assert f"needs fastapi: {install_hint('serve')}" in err


def test_beyond_loopback_there_is_a_warning(run, checkpoint, monkeypatch):
    served = []
    monkeypatch.setattr("capsroute.serve.run", lambda app, sock, on_ready: served.append(sock))
    for host, warns in (("0.0.0.0", True), ("127.0.0.1", False)):
        status, _, err = run("serve", checkpoint, "--host", host, "--port", "0")
        assert status == 0 and err.startswith("warning: ") is warns
        served.pop().close()
