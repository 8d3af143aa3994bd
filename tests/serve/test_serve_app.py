"""The API and the page's files, over real sockets."""

import http.client
import io
import json
import re
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from pictures import BROKEN, UNUSUAL, colour, encoded, form, grey
from PIL import Image
from servers import make_predictor

import capsroute.serve
from capsroute.explain import explain
from capsroute.inference import Predictor
from capsroute.serve import Limits, schemas, service
from capsroute.serve.uploads import open_picture

IMAGE = encoded(grey())
PAGE = Path(capsroute.serve.__file__).parent / "page"


def expected(predictor, data, top_k=5):
    prediction = predictor.predict([Image.open(io.BytesIO(data))], top_k)[0]
    return prediction.labels, prediction.ranked


def told(answer):
    return answer["labels"], [(one["label"], one["probability"]) for one in answer["ranked"]]


def check_same(answer, predictor, data, top_k=5):
    (labels, ranked), (own_labels, own_ranked) = told(answer), expected(predictor, data, top_k)
    assert labels == own_labels
    assert [name for name, _ in ranked] == [name for name, _ in own_ranked]
    shares = [torch.tensor([share for _, share in pairs]) for pairs in (ranked, own_ranked)]
    torch.testing.assert_close(*shares)


class Held(Predictor):
    """A predictor that waits before it answers, or fails."""

    @classmethod
    def around(cls, predictor):
        held = cls(predictor.description, predictor._run, predictor.model)
        held.may_go = threading.Event()
        held.may_go.set()
        held.entered = threading.Event()
        held.fails = False
        return held

    def probabilities(self, images):
        self.entered.set()
        assert self.may_go.wait(20)
        if self.fails:
            raise RuntimeError("secret/path/of/weights.safetensors")
        return super().probabilities(images)


@pytest.fixture
def held(predictor):
    return Held.around(predictor)


def in_thread(call):
    """Call it aside; `result()` waits for the answer."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()

    def result():
        thread.join(30)
        return results[0]

    return result


def test_a_form_a_body_and_curls_default_give_the_models_answer(server, predictor):
    body, kind = form(IMAGE)
    for answer in (
        server.ask("POST", "/predict", body, content_type=kind),
        server.ask("POST", "/predict", IMAGE, content_type="image/png"),
        server.ask("POST", "/predict", IMAGE, content_type="application/x-www-form-urlencoded"),
    ):
        assert answer.status == 200
        schemas.PredictionAnswer.model_validate(answer.json)
        check_same(answer.json, predictor, IMAGE)


def test_many_at_once_get_each_their_own_answer(server, predictor):
    pictures = [encoded(grey(seed=seed)) for seed in range(24)]
    results = [in_thread(lambda data=data: server.predict(data)) for data in pictures]
    for data, result in zip(pictures, results, strict=True):
        check_same(result().json, predictor, data)


@pytest.mark.parametrize("data", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_pictures(server, predictor, data):
    answer = server.predict(data)
    assert answer.status == 200
    check_same(answer.json, predictor, data)


@pytest.mark.parametrize("path", ["/predict", "/explain"])
@pytest.mark.parametrize(("data", "status"), BROKEN.values(), ids=BROKEN)
def test_broken_uploads(server, path, data, status):
    answer = server.ask("POST", path, data)
    assert answer.status == status
    (message,) = answer.json.values()
    assert list(answer.json) == ["error"] and "\n" not in message and "0x" not in message


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (form(IMAGE, name="picture")[0], form(IMAGE)[1]),
        (form(IMAGE)[0], "multipart/form-data"),
        (form(IMAGE)[0], "multipart/form-data; boundary=other"),
        (form(IMAGE)[0][:40], form(IMAGE)[1]),
        (b"", form(IMAGE)[1]),
        (b'--b\r\ncontent-disposition: form-data; name="image"\r\n\r\nx\r\n--b--\r\n',
         "multipart/form-data; boundary=b"),
    ],
    ids=["another name", "no boundary", "wrong boundary", "cut", "empty", "a text field"],
)  # fmt: skip
def test_broken_forms(server, body, kind):
    answer = server.ask("POST", "/predict", body, content_type=kind)
    assert answer.status == 422 and "image" in answer.json["error"]


def test_top_k(server, predictor):
    check_same(server.predict(IMAGE, "?top_k=3").json, predictor, IMAGE, top_k=3)
    assert len(server.predict(IMAGE, "?top_k=10").json["ranked"]) == 10
    for wrong in ("0", "11", "three", ""):
        answer = server.predict(IMAGE, f"?top_k={wrong}")
        assert answer.status == 422 and answer.json["error"].startswith("`top_k`: ")


def test_an_explanation(server, predictor):
    answer = server.ask("POST", "/explain?top_k=10", IMAGE)
    assert answer.status == 200
    explained = schemas.ExplanationAnswer.model_validate(answer.json)
    check_same(answer.json["prediction"], predictor, IMAGE, top_k=10)
    assert explained.explanation.classes and explained.explanation.links
    for one in explained.explanation.classes:
        assert one.rival in predictor.class_names and one.rival != one.name
    assert explained.image.startswith("data:image/png;base64,")


def test_a_model_without_capsules_predicts_and_is_not_explained(serving):
    with serving(make_predictor("cnn_multimnist")) as server:
        about = server.ask("GET", "/model").json
        assert (about["explainable"], about["unexplained"]) == (False, "it has no capsules")
        assert server.predict(IMAGE).status == 200
        answer = server.ask("POST", "/explain", IMAGE)
        assert answer.status == 404
        assert answer.json["error"] == "cnn_multimnist cannot be explained: it has no capsules"


def test_a_colour_model(serving):
    predictor = make_predictor("inverted_simple_cifar10", iterations=1)
    with serving(predictor) as server:
        about = server.ask("GET", "/model").json
        assert about["digits"] is False and about["in_channels"] == 3
        data = encoded(colour(), "JPEG")
        check_same(server.predict(data).json, predictor, data)
        assert server.ask("POST", "/explain", data).status == 200


def test_what_the_model_is(server, predictor):
    about = server.ask("GET", "/model").json
    assert about["name"] == about["title"] == "inverted_small_multimnist"
    assert about["source"] is None and about["digits"] is True
    assert (about["explainable"], about["unexplained"]) == (True, None)
    assert about["class_names"] == predictor.class_names
    assert about["image_size"] == [36, 36] and about["multilabel"] is True
    assert about["parameters"] == sum(p.numel() for p in predictor.model.parameters())
    assert about["limits"]["upload_bytes"] == 8 * 2**20


def test_health(server):
    answer = server.ask("GET", "/health")
    assert answer.json["status"] == "ok" and answer.json["predictions_in_progress"] == 0


@pytest.mark.parametrize(
    "path", ["/", "/docs", "/openapi.json", "/page/main.js", "/model", "/health"]
)
def test_head_is_answered_like_get_without_its_body(server, path):
    head, full = server.ask("HEAD", path), server.ask("GET", path)
    assert (head.status, head.body) == (200, b"") and full.body
    for name in ("content-type", "content-length", "content-security-policy"):
        assert head.headers[name] == full.headers[name]


def test_what_a_light_ground_is_told_with(server):
    light = server.predict(encoded(Image.new("L", (36, 36), 250))).json
    assert light["remark"].startswith("a light background; ")
    assert server.predict(encoded(Image.new("L", (36, 36), 5))).json["remark"] is None
    explained = server.ask("POST", "/explain", encoded(Image.new("L", (36, 36), 250))).json
    assert explained["prediction"]["remark"] == light["remark"]


def test_wrong_addresses_and_methods(server):
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/page/../app.py", 404),
        ("GET", "/predict", 405),
        ("DELETE", "/model", 405),
    ):
        answer = server.ask(method, path)
        assert answer.status == status and list(answer.json) == ["error"]
    assert server.ask("HEAD", "/predict").status == 405
    allowed = server.ask("DELETE", "/model").headers["allow"]
    assert set(allowed.split(", ")) == {"GET", "HEAD"}


PROTECTION = {
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


def check_protected(answer):
    for name, value in PROTECTION.items():
        assert answer.headers.get_all(name) == [value]


@pytest.mark.parametrize("path", ["/", "/docs", "/page/main.js", "/page/style.css", "/model"])
def test_every_answer_forbids_what_is_outside(server, path):
    answer = server.ask("GET", path)
    assert answer.status == 200
    check_protected(answer)
    for refused in (server.ask("GET", path, host="evil.example"), server.ask("PATCH", path)):
        assert refused.status in (403, 405)
        check_protected(refused)


def test_the_page_names_no_outside_resource():
    for path in PAGE.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(https?:)?//[a-z0-9-]+\.[a-z]", text), path


def test_the_api_describes_itself(server):
    api = server.ask("GET", "/openapi.json").json
    assert {path: list(methods) for path, methods in api["paths"].items()} == {
        "/predict": ["post"], "/explain": ["post"], "/model": ["get"], "/health": ["get"]
    }  # fmt: skip
    body = api["paths"]["/predict"]["post"]["requestBody"]["content"]
    assert set(body) == {"multipart/form-data", "application/octet-stream"}
    assert "HTTPValidationError" not in json.dumps(api)
    operations = [found for methods in api["paths"].values() for found in methods.values()]
    names = [operation["operationId"] for operation in operations]
    assert names == ["predict", "explain", "model", "health"]  # of a generated client's methods
    assert all("403" in operation["responses"] for operation in operations)
    busy = api["paths"]["/predict"]["post"]["responses"]["503"]
    assert busy["headers"]["Retry-After"]["schema"]["type"] == "integer"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "[::1]:80", "10.1.2.3", "LOCALHOST"]
)
def test_hosts_that_are_ours(server, host):
    assert server.ask("GET", "/health", host=host).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:80", "localhost.", "[", ""]
)
def test_a_name_that_was_made_to_point_here_is_refused(server, host):
    assert server.ask("GET", "/model", host=host).status in (400, 403)


def test_a_name_can_be_allowed(serving, predictor):
    with serving(predictor, allowed_hosts=["Pets.example"]) as server:
        assert server.ask("GET", "/health", host="pets.example:80").status == 200


def test_pages_of_other_sites_cannot_ask(server):
    own = f"http://127.0.0.1:{server.port}"
    assert server.predict(IMAGE, origin=own).status == 200
    broken = ("http://[", "http://[::1", "http://[x]")
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", *broken):
        for method in ("POST", "PUT", "DELETE"):
            answer = server.ask(method, "/predict", IMAGE, origin=origin)
            assert answer.status == 403 and "other sites" in answer.json["error"]


def test_too_many_bytes(serving, predictor):
    with serving(predictor, Limits(upload=2000)) as server:
        assert server.predict(IMAGE).status == 200
        large = IMAGE + bytes(1000)
        assert server.predict(large).status == 413  # by what it declares
        undeclared = iter([IMAGE, bytes(1000)])
        assert server.ask("POST", "/predict", undeclared).status == 413  # in chunks


def test_an_upload_that_is_refused_early_still_gets_its_answer(server):
    answer = server.predict(bytes(9 * 2**20))
    assert answer.status == 413 and "8,388,608 bytes" in answer.json["error"]


def test_a_busy_server_says_when_to_come_back(serving, held):
    with serving(held, Limits(predictions=1)) as server:
        held.may_go.clear()
        held.entered.clear()
        first = in_thread(lambda: server.predict(IMAGE))
        assert held.entered.wait(10)
        answer = server.predict(IMAGE)
        assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
        assert server.ask("GET", "/health").json["predictions_in_progress"] == 1
        held.may_go.set()
        assert first().status == 200
        assert server.predict(IMAGE).status == 200


def test_explanations_have_places_of_their_own(serving, predictor, monkeypatch):
    entered, may_go = threading.Event(), threading.Event()

    def held(*arguments):
        entered.set()
        assert may_go.wait(20)
        return explain(*arguments)

    with serving(predictor) as server:
        monkeypatch.setattr(service, "explain", held)
        results = [in_thread(lambda: server.ask("POST", "/explain", IMAGE)) for _ in range(8)]
        assert entered.wait(10)
        until = time.monotonic() + 10
        while server.ask("GET", "/health").json["explanations_in_progress"] < 8:
            assert time.monotonic() < until
            time.sleep(0.02)
        ninth = server.ask("POST", "/explain", IMAGE)
        assert ninth.status == 503 and int(ninth.headers["retry-after"]) >= 1
        assert server.predict(IMAGE).status == 200
        may_go.set()
        assert [result().status for result in results] == [200] * 8


def test_an_answer_that_takes_too_long_is_a_503(serving, held):
    with serving(held, Limits(seconds=0.3)) as server:
        held.may_go.clear()
        answer = server.predict(IMAGE)
        held.may_go.set()
        assert answer.status == 503 and answer.headers["retry-after"]


def test_a_picture_that_takes_too_long_to_decode_is_a_503(serving, held):
    may_go = threading.Event()

    def decode(_):
        assert may_go.wait(5)

    with serving(held, Limits(seconds=0.3)) as server:
        held.prepare = decode
        answer = server.predict(encoded(grey(200)))
        may_go.set()
        assert answer.status == 503 and answer.headers["retry-after"]


def test_a_header_that_takes_long_to_read_holds_up_nobody(serving, predictor, monkeypatch):
    """Such as millions of empty segments of a JPEG, which take seconds."""
    opening, may_go = threading.Event(), threading.Event()

    def held(*arguments):
        opening.set()
        assert may_go.wait(5)
        return open_picture(*arguments)

    monkeypatch.setattr(service.uploads, "open_picture", held)
    with serving(predictor) as server:
        slow = in_thread(lambda: server.predict(encoded(grey(100))))
        assert opening.wait(10)
        assert server.ask("GET", "/health").json["predictions_in_progress"] == 1
        may_go.set()
        assert slow().status == 200


def half_sent(port):
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\nPNG")
    return client


def test_an_upload_that_does_not_come_is_a_408(serving, predictor):
    with serving(predictor, Limits(seconds=0.3)) as server, half_sent(server.port) as client:
        assert b" 408 " in client.recv(1000)


def test_a_client_that_goes_away_leaves_its_place(serving, held):
    with serving(held, Limits(predictions=2)) as server:
        half_sent(server.port).close()
        held.may_go.clear()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            head = f"POST /predict HTTP/1.1\r\nhost: a\r\ncontent-length: {len(IMAGE)}\r\n\r\n"
            client.sendall(head.replace("host: a", "host: localhost").encode() + IMAGE)
            time.sleep(0.1)
        held.may_go.set()
        until = time.monotonic() + 10
        while server.ask("GET", "/health").json["predictions_in_progress"]:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert server.predict(IMAGE).status == 200


def test_what_goes_wrong_inside_stays_inside(serving, held):
    with serving(held) as server:
        held.fails = True
        answer = server.predict(IMAGE)
        assert answer.status == 500
        check_protected(answer)
        assert "secret" not in answer.body.decode() and "Traceback" not in answer.body.decode()
        held.fails = False
        assert server.predict(IMAGE).status == 200


def test_stopping_finishes_what_is_in_flight(serving, held):
    with serving(held) as server:
        held.may_go.clear()
        held.entered.clear()
        first = in_thread(lambda: server.predict(IMAGE))
        assert held.entered.wait(10)
        server.server.should_exit = True
        time.sleep(0.3)
        held.may_go.set()
        assert first().status == 200
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            server.predict(IMAGE)


def test_limits_must_make_sense():
    for name, value in (("max_batch", 0), ("upload", 0), ("seconds", 0.0), ("max_wait", -1.0)):
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            Limits(**{name: value})
