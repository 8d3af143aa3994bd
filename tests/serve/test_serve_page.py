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


DROP_WHITE = (
    "(async () => { const c = new OffscreenCanvas(72, 72); const x = c.getContext('2d');"
    "x.fillStyle = 'white'; x.fillRect(0, 0, 72, 72); const t = new DataTransfer();"
    "t.items.add(new File([await c.convertToBlob()], 'a.png', {type: 'image/png'}));"
    "dispatchEvent(new DragEvent('drop', {dataTransfer: t, cancelable: true})); })()"
)
UNDO_BY_KEY = "dispatchEvent(new KeyboardEvent('keydown', {key: 'z', ctrlKey: true})); 0"
# the server's answers come when `window.release` is called, and not before
HOLD_ANSWERS = (
    "{ const send = window.fetch; const go = new Promise((r) => { window.release = r; });"
    "window.fetch = async (...all) => { const answer = await send(...all);"
    "window.answers = (window.answers ?? 0) + 1; await go; return answer; }; } 0"
)
INK = (
    "(() => { const c = document.querySelector('#sketch'); const d = c.getContext('2d')"
    ".getImageData(0, 0, c.width, c.height).data;"
    "let n = 0; for (let i = 0; i < d.length; i += 4) n += d[i]; return n; })()"
)


def test_an_answer_about_a_picture_that_was_cleared_is_not_told(page):
    page.stroke("#sketch", ONE)
    page.wait_for(f"{LABELS} === '1'")
    page.click("#clear")
    page.evaluate(HOLD_ANSWERS)
    page.evaluate("new Promise((r) => setTimeout(r, 800))")
    assert page.evaluate(SPOKEN) == ""  # though the answer was about to be read out
    page.stroke("#sketch", ONE)
    page.wait_for("window.answers === 1")
    page.click("#clear")
    page.evaluate(
        "window.seen = []; new MutationObserver(() => window.seen.push("
        f"{LABELS})).observe(document.querySelector('#labels'), {{childList: true}}); 0"
    )
    page.stroke("#sketch", [(0.1, 0.1)])
    page.evaluate("window.release()")
    page.wait_for("window.answers === 2")
    page.wait_for(SPOKEN)
    assert set(page.evaluate("window.seen")) == {"no class reaches 50\u202f%"}


def test_an_image_that_is_refused_takes_no_answer_from_the_picture_before(page):
    page.stroke("#sketch", ONE)
    page.wait_for(f"{LABELS} === '1'")
    page.evaluate('window.fetch = async () => new Response(\'{"error": "no"}\', {status: 413}); 0')
    page.evaluate(DROP_WHITE)
    # the stroke's own last question may be refused before: its answer stays until the image comes
    page.wait_for(f"{LABELS} === 'waiting for a digit'")
    page.wait_for("document.querySelector('#problem').textContent === 'No.'")
    assert page.evaluate(LABELS) == "waiting for a digit"
    assert page.evaluate("document.querySelector('#tree-section').hidden")


def test_of_two_files_the_later_counts_however_long_the_first_takes(page):
    page.evaluate(
        "const read = window.createImageBitmap; let first = true; window.createImageBitmap ="
        "async (file) => { const slow = first; first = false; const image = await read(file);"
        "if (slow) { await new Promise((r) => setTimeout(r, 700)); window.late = true; }"
        "return image; }; 0"
    )
    page.evaluate(DROP_WHITE)
    page.stroke("#sketch", ONE)
    page.wait_for("window.late")
    page.wait_for(f"{LABELS} === '1'")
    assert page.evaluate("document.querySelector('#invert').hidden")  # no image


def test_a_stroke_that_is_taken_back_while_it_is_drawn_ends(page):
    box = page.box("#sketch")
    at = [(box["x"] + share * box["width"], box["y"] + 99) for share in (0.2, 0.4, 0.6)]
    page._mouse("mousePressed", *at[0])
    page._mouse("mouseMoved", *at[1])
    page.evaluate(UNDO_BY_KEY)
    page._mouse("mouseMoved", *at[2])
    page._mouse("mouseReleased", *at[2])
    assert page.evaluate(INK) == 0
    page.evaluate("document.querySelector('#sketch').focus()")
    page.press(" ")
    page.evaluate(DROP_WHITE)
    page.wait_for("!document.querySelector('#invert').hidden")
    page.press("ArrowDown")  # the pen was down on a picture that is no more


def test_a_second_finger_draws_nothing(page, digits):
    page.view(390, 900, phone=True)
    page.open(f"http://127.0.0.1:{digits.port}/?fingers")
    page.wait_for("document.querySelector('#bars').children.length == 10")
    page.touch_stroke("#sketch", ONE)
    alone = page.evaluate(INK)
    page.click("#clear")
    box = page.box("#sketch")

    def fingers(kind, *points):
        places = [
            {"x": box["x"] + u * box["width"], "y": box["y"] + v * box["height"], "id": number}
            for number, (u, v) in enumerate(points)
        ]
        page.command("Input.dispatchTouchEvent", type=kind, touchPoints=places)

    fingers("touchStart", ONE[0])
    fingers("touchStart", ONE[0], (0.9, 0.2))
    for u, v in ONE[1:]:
        fingers("touchMove", (u, v), (0.9, v))
    fingers("touchEnd")
    assert page.evaluate(INK) == pytest.approx(alone, rel=0.02)
    page.touch_stroke("#sketch", [(0.1, 0.1), (0.1, 0.9)])
    assert page.evaluate(INK) > 1.5 * alone  # the next one draws again


def test_the_canvas_has_the_screens_pixels_at_every_size(page):
    page.stroke("#sketch", ONE)
    sides = "(({width, clientWidth}) => [width, clientWidth])(document.querySelector('#sketch'))"
    for width, finer in ((768, 1), (800, 3), (390, 2), (1280, 1)):
        page.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=finer,
            mobile=False,
        )
        page.wait_for(f"(([own, css]) => own === {finer} * css)({sides})", timeout=5)
        assert page.evaluate(INK) > 0  # what was drawn is drawn again


def test_the_focus_stays_when_a_button_can_no_longer_be_pressed(page):
    page.stroke("#sketch", ONE)
    page.evaluate("document.querySelector('#clear').focus()")
    page.press(" ")
    page.wait_for("document.querySelector('#clear').disabled")
    assert page.evaluate("document.activeElement.id") == "sketch"


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_server_that_is_busy_or_behind_a_proxy_that_lost_it_is_asked_again(page, status):
    page.evaluate(
        "{ const send = window.fetch; let asked = 0; window.fetch = (...all) => asked++ ?"
        f" send(...all) : Promise.resolve(new Response('', {{status: {status}}})); }} 0"
    )
    page.stroke("#sketch", ONE)
    page.wait_for("document.querySelector('#problem').textContent.includes('busy')")
    page.wait_for(f"{LABELS} === '1'")
    assert page.evaluate("document.querySelector('#problem').hidden")


def test_an_answer_that_breaks_off_is_asked_for_again(page):
    page.evaluate(
        "{ const send = window.fetch; let asked = 0; window.fetch = (...all) => asked++ ?"
        " send(...all) : Promise.resolve(new Response('{', {status: 200})); } 0"
    )
    page.stroke("#sketch", ONE)
    page.wait_for("document.querySelector('#problem').textContent.includes('reached')")
    page.wait_for(f"{LABELS} === '1'")


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


TOPS = "[...new Set([...document.querySelectorAll({!r})].map((e) => e.offsetTop))].length"
SHOWN_BUTTONS = "[...document.querySelectorAll('.tools button')].filter((e) => e.offsetWidth)"


@pytest.mark.parametrize(("width", "rows"), [(1280, 1), (860, 1), (768, 1), (390, 2), (320, 2)])
def test_three_classes_fill_their_rows(tab, three, width, rows):
    tab.view(width, 900, phone=width < 700)
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


def test_short_names_stand_side_by_side_each_with_its_share(tab):
    predictor = make_predictor("inverted_simple_cifar10", list("abcdefghij"), iterations=1)
    predictor.model.probabilities = lambda scores: torch.full((len(scores), 10), 0.1)
    with running(predictor) as server:
        tab.view(1280, 900)
        tab.open(f"http://127.0.0.1:{server.port}/")
        tab.wait_for("document.querySelector('#bars').children.length == 10")
        tab.evaluate(DROP_WHITE)
        tab.wait_for(ANSWERED)
        shares = "[...document.querySelectorAll('.bars .share')].map((e) => e.textContent)"
        assert tab.evaluate(shares) == ["10\u202f%"] * 10


def test_bars_are_seen_where_the_system_chooses_the_colours(page):
    forced = {"name": "forced-colors", "value": "active"}
    page.command("Emulation.setEmulatedMedia", features=[forced])
    page.stroke("#sketch", ONE)
    page.wait_for(f"{LABELS} === '1'")
    part = "getComputedStyle(document.querySelector('.bars .chosen .{}')).backgroundColor"
    assert page.evaluate(part.format("fill")) != page.evaluate(part.format("track"))


SCRIPT = "<img src=x onerror=alert(1)>"
LONG = "great_white_shark_carcharodon_carcharias_of_the_southern_ocean"
PAST_THE_EDGE = (
    "[...document.querySelectorAll('main :not(.hidden)')].filter((e) => !e.closest('.scroll')"
    " && e.getBoundingClientRect().right > innerWidth).map((e) => e.id || e.tagName)"
)
OUT_OF_THE_TREE = (
    "(() => { const tree = document.querySelector('.trees svg').getBoundingClientRect();"
    "return [...document.querySelectorAll('.trees rect.root, .trees text')].filter((e) => {"
    "const b = e.getBoundingClientRect(); return b.left < tree.left || b.right > tree.right; })"
    ".map((e) => e.textContent); })()"
)


@pytest.fixture(scope="module")
def hundred():
    """A server of a hundred classes that sees the first in everything."""
    names = [LONG, SCRIPT, *(f"sea_mammal_of_kind_{index}" for index in range(98))]
    predictor = make_predictor("inverted_resnet_cifar100", names, iterations=8)
    shares = torch.full((100,), 0.001)
    shares[:2] = torch.tensor([0.6, 0.3])
    predictor.model.probabilities = lambda scores: shares.expand(len(scores), -1)
    predictor.model.decide = lambda scores: torch.arange(100).expand(len(scores), -1) == 0
    with running(predictor) as server:
        yield server


@pytest.mark.parametrize("width", [1280, 768, 390, 320])
def test_class_names_are_text_and_however_long_stay_on_the_page(tab, hundred, width):
    tab.view(width, 900, phone=width < 700)
    tab.open(f"http://127.0.0.1:{hundred.port}/?{width}")
    tab.wait_for("document.querySelector('#bars').children.length == 6")
    tab.errors.clear()
    tab.evaluate(DROP_WHITE)
    tab.wait_for(f"{HEAT_OF} === {LONG!r}")
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.evaluate(PAST_THE_EDGE) == []
    shown = "[...document.querySelectorAll('.bars .name')].map((e) => e.textContent)"
    assert tab.evaluate(shown)[:2] == [LONG, SCRIPT]
    assert tab.evaluate("document.querySelectorAll('img').length") == 1  # the icon
    sides = "[...document.querySelectorAll('#heat canvas')].map((e) => e.offsetWidth)"
    assert len(set(tab.evaluate(sides))) == 1
    assert tab.evaluate(OUT_OF_THE_TREE) == []
    top = "(({left, right}) => [left, right])(document.querySelector('.root')"
    left, right = tab.evaluate(f"{top}.getBoundingClientRect())")
    assert 0 < left < right < width  # in view, though the leaves may need scrolling
    assert tab.evaluate("document.querySelector('#sketch').tabIndex") == -1  # not to be drawn on
    assert tab.errors == []


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_has_a_contrast_of_4_5(page, dark):
    page.view(1280, 900, dark=dark)
    style = "getComputedStyle(document.documentElement).getPropertyValue"
    names = [
        "--card",
        "--text",
        "--quiet",
        "--accent",
        "--bad",
        *(f"--class-{n}" for n in range(4)),
    ]
    card, *inks = [page.evaluate(f"{style}('{name}')") for name in names]
    contrasts = {name: contrast(ink, card) for name, ink in zip(names[1:], inks, strict=True)}
    assert min(contrasts.values()) >= 4.5, contrasts


def contrast(one, other):
    """As WCAG 2 defines it."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour):
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("path", ["", "docs"])
def test_without_javascript_it_says_so_and_shows_nothing_empty(digits, path):
    with chromium(find_chromium()) as tab:
        tab.view(1280, 900)
        tab.command("Emulation.setScriptExecutionDisabled", value=True)
        tab.open(f"http://127.0.0.1:{digits.port}/{path}")
        assert "needs JavaScript" in tab.evaluate("document.body.innerText")
        assert tab.evaluate("document.querySelector('main, .shapes').offsetHeight") == 0


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
