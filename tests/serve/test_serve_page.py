"""The page in a real browser: drawn on with mouse, finger and keys, and looked at."""

import json
import re

import pytest
import torch
from browser import chromium, find_chromium
from PIL import Image
from servers import make_predictor, running

from capsroute.inference import Predictor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_chromium() is None, reason="no Chromium here: apt-get install chromium"
    ),
]

ONE = [(0.5, 0.16 + 0.07 * step) for step in range(11)]
SEVEN = [
    *((0.3 + 0.05 * step, 0.2) for step in range(9)),
    *((0.7 - 0.025 * step, 0.2 + 0.06 * step) for step in range(1, 12)),
]
LABELS = "document.querySelector('#labels').textContent"
SPOKEN = "document.querySelector('#spoken').textContent"
HEAT_OF = "document.querySelector('#heat figcaption b')?.textContent"
ANSWERED = f"!!{HEAT_OF}"


@pytest.fixture(scope="module")
def digits():
    """The weights that ship, so that what is drawn is read."""
    with running(Predictor.load("inverted_small_multimnist", device="cpu")) as server:
        yield server


@pytest.fixture(scope="module")
def tab():
    with chromium(find_chromium()) as page:
        yield page


@pytest.fixture
def page(tab, digits):
    """The page, just opened at a desktop's width; at the end nothing must have gone wrong."""
    tab.view(1280, 900)
    tab.open(f"http://127.0.0.1:{digits.port}/")
    tab.wait_for("document.querySelector('#bars').children.length == 10")
    tab.errors.clear()
    tab.requested.clear()
    yield tab
    assert tab.errors == []
    outside = [address for address in tab.requested if not address.startswith(("data:", "blob:"))]
    assert all(address.startswith(f"http://127.0.0.1:{digits.port}/") for address in outside)


def check_screenshot(page, path, *, columns):
    page.screenshot(path)
    with Image.open(path) as shot:
        assert shot.width == columns
        assert len(shot.convert("RGB").getcolors(1 << 24)) > 100  # not a blank page


def test_a_stroke_is_answered_with_bars_heat_and_a_tree(page, tmp_path):
    page.stroke("#sketch", ONE)
    page.wait_for(f"{LABELS} === '1'")
    assert page.wait_for(SPOKEN).startswith("Answer: 1, ")
    chosen = "[...document.querySelectorAll('.bars .chosen .name')].map((e) => e.textContent)"
    assert page.evaluate(chosen) == ["1"]
    page.wait_for(f"{HEAT_OF} === '1'")
    heat_caption = "document.querySelector('#heat figcaption:has(b)').textContent"
    assert re.fullmatch(r"1 rather than [02-9]", page.evaluate(heat_caption))
    assert page.evaluate("document.querySelectorAll('#trees svg image').length") > 6
    cut = "getComputedStyle(document.querySelector('#trees svg svg svg')).overflow"
    assert page.evaluate(cut) == "hidden"  # full light ends where the capsule's part does
    captions = "[...document.querySelectorAll('#trees figcaption')].map((e) => e.textContent)"
    assert all("links to" in caption for caption in page.evaluate(captions))
    assert page.evaluate("document.querySelectorAll('#routing tbody tr').length") == 2
    check_screenshot(page, tmp_path / "desktop.png", columns=1280)


def test_two_digits_then_undo_and_clear(page):
    page.stroke("#sketch", [(0.24 + 0.02 * step, 0.15 + 0.07 * step) for step in range(11)])
    page.wait_for(SPOKEN)
    first = page.evaluate(LABELS)
    page.stroke("#sketch", SEVEN)
    page.wait_for(f"{LABELS} !== {json.dumps(first)}")
    page.click("#undo")
    page.wait_for(f"{LABELS} === {json.dumps(first)}")
    page.click("#clear")
    page.wait_for(f"{LABELS} === 'waiting for a digit'")
    assert page.evaluate("document.querySelector('#undo').disabled")


def test_the_keyboard_alone(page):
    page.evaluate("document.querySelector('#sketch').focus()")
    page.press("ArrowUp", times=9)
    page.press(" ")
    page.press("ArrowDown", times=19)
    page.press(" ")
    page.wait_for(f"{LABELS} === '1'")
    reached = set()
    for _ in range(8):
        page.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert {"undo", "clear", "example", "choose"} <= reached


def test_a_phone(page, digits, tmp_path):
    page.view(375, 812, phone=True)
    page.open(f"http://127.0.0.1:{digits.port}/?phone")
    page.wait_for("document.querySelector('#bars').children.length == 10")
    page.touch_stroke("#sketch", ONE)
    page.wait_for(f"{LABELS} === '1'")
    page.wait_for(ANSWERED)
    assert page.evaluate("document.documentElement.scrollWidth") == 375  # nothing sticks out
    assert page.evaluate("scrollY") == 0  # the finger drew, it did not scroll
    check_screenshot(page, tmp_path / "phone.png", columns=750)


def test_the_example_is_drawn_and_answered(page):
    page.click("#example")
    page.wait_for(ANSWERED)
    page.wait_for(f"{SPOKEN}.startsWith('Answer: ')")


def test_never_more_than_one_request_at_a_time(page):
    page.evaluate(
        "window.most = window.now = 0; const send = window.fetch;"
        "window.fetch = async (...all) => { window.most = Math.max(window.most, ++window.now);"
        "try { return await send(...all); } finally { window.now--; } }; 0"
    )
    page.stroke("#sketch", ONE * 5)
    page.wait_for(SPOKEN)
    assert page.evaluate("window.most") == 1
    asked = [address for address in page.requested if "/explain" in address]
    assert 1 <= len(asked) < 5 * len(ONE)


def test_a_server_that_is_gone_is_told_and_found_again(tab):
    predictor = make_predictor()
    with running(predictor) as server:
        tab.view(1280, 900)
        tab.open(f"http://127.0.0.1:{server.port}/")
        tab.wait_for("document.querySelector('#bars').children.length == 10")
    tab.stroke("#sketch", ONE)
    problem = "!document.querySelector('#problem').hidden"
    tab.wait_for(problem)
    assert "cannot be reached" in tab.evaluate("document.querySelector('#problem').textContent")
    with running(predictor, port=server.port):
        tab.wait_for(f"!({problem})")
        tab.wait_for(ANSWERED)


@pytest.fixture(scope="module")
def three():
    """A server that sees 1, 3 and 7 in everything."""
    predictor = make_predictor()
    shares = torch.full((10,), 0.44)
    shares[[1, 3, 7]] = 0.99
    predictor.model.probabilities = lambda scores: shares.expand(len(scores), -1)
    predictor.model.decide = lambda scores: shares.expand(len(scores), -1) > 0.5
    with running(predictor) as server:
        yield server


DROP_WHITE = (
    "(async () => { const c = new OffscreenCanvas(72, 72); const x = c.getContext('2d');"
    "x.fillStyle = 'white'; x.fillRect(0, 0, 72, 72); const t = new DataTransfer();"
    "t.items.add(new File([await c.convertToBlob()], 'a.png', {type: 'image/png'}));"
    "dispatchEvent(new DragEvent('drop', {dataTransfer: t, cancelable: true})); })()"
)
TOPS = "[...new Set([...document.querySelectorAll({!r})].map((e) => e.offsetTop))].length"
SHOWN_BUTTONS = "[...document.querySelectorAll('.tools button')].filter((e) => e.offsetWidth)"


@pytest.mark.parametrize(("width", "rows"), [(1280, 1), (390, 2), (320, 2)])
def test_three_classes_fill_their_rows(tab, three, width, rows):
    tab.view(width, 900, phone=width < 1000)
    tab.open(f"http://127.0.0.1:{three.port}/?{width}")
    tab.wait_for("document.querySelector('#bars').children.length == 10")
    assert tab.evaluate(TOPS.format(".tools button:not([hidden])")) == 1
    tab.evaluate(DROP_WHITE)
    tab.wait_for(f"{LABELS} === '1, 3 and 7'")
    tab.wait_for("document.querySelectorAll('#heat figure').length == 4")
    assert tab.evaluate(TOPS.format("#heat figure")) == rows
    names = tab.evaluate(f"{SHOWN_BUTTONS}.map((e) => e.textContent)")
    assert names == ["Undo", "Clear", "Invert", "Image…"]  # no example over an image
    assert tab.evaluate(TOPS.format(".tools button:not([hidden])")) == 1
    heights = "[...document.querySelectorAll('.bars .share')].map((e) => e.offsetHeight)"
    assert len(set(tab.evaluate(heights))) == 1  # no percentage in two lines
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    tab.click("#clear")
    tab.wait_for("!document.querySelector('#example').hidden")


def test_why_a_model_is_not_explained(tab):
    predictor = make_predictor("cnn_multimnist")
    predictor.source = "mine"
    with running(predictor) as server:
        tab.view(1280, 900)
        tab.open(f"http://127.0.0.1:{server.port}/")
        tab.wait_for("document.querySelector('#bars').children.length == 10")
        assert tab.evaluate("document.title") == "capsroute: mine (cnn_multimnist)"
        tab.stroke("#sketch", ONE)
        tab.wait_for(SPOKEN)
        reason = tab.evaluate("document.querySelector('#unexplained').innerText")
        assert reason == "This model cannot be explained: it has no capsules."
        assert tab.evaluate("document.querySelector('#tree-section').hidden")


def test_an_image_is_dropped_for_a_model_of_another_kind(tab, tmp_path):
    names = [f"kind of thing {index}" for index in range(10)]
    predictor = make_predictor("inverted_simple_cifar10", names, iterations=1)
    with running(predictor) as server:
        tab.view(1280, 900)
        tab.open(f"http://127.0.0.1:{server.port}/")
        tab.wait_for("document.querySelector('#labels').textContent === 'waiting for an image'")
        assert tab.evaluate("document.querySelector('#example').hidden")
        tab.errors.clear()
        tab.evaluate(
            "(async () => { const c = new OffscreenCanvas(80, 50); const x = c.getContext('2d');"
            "x.fillStyle = 'teal'; x.fillRect(0, 0, 80, 50); const t = new DataTransfer();"
            "t.items.add(new File([await c.convertToBlob()], 'a.png', {type: 'image/png'}));"
            "dispatchEvent(new DragEvent('drop', {dataTransfer: t, cancelable: true})); })()"
        )
        tab.wait_for(ANSWERED)
        assert tab.evaluate("document.querySelectorAll('.bars.lying li').length") == 6
        assert tab.errors == []
        check_screenshot(tab, tmp_path / "drop.png", columns=1280)


def test_a_file_that_is_no_image_is_told(page):
    page.evaluate(
        "(() => { const t = new DataTransfer(); t.items.add(new File(['text'], 'a.txt'));"
        "dispatchEvent(new DragEvent('drop', {dataTransfer: t, cancelable: true})); })()"
    )
    page.wait_for("document.querySelector('#problem').textContent.includes('no image')")


def test_the_description_of_the_api(page, digits):
    page.open(f"http://127.0.0.1:{digits.port}/docs")
    page.wait_for("document.querySelectorAll('#endpoints section').length == 4")
    assert "curl -F image=@picture.png" in page.evaluate("document.body.textContent")
