"""Headless Chromium over its DevTools protocol, on two pipes: no driver, no package."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",  # CI is root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)


# Chromium reads the protocol from descriptor 3 and writes it to descriptor 4
LAUNCH = """
import fcntl, os, sys
out, back = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(out, 3)
os.dup2(back, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


class PageError(AssertionError):
    """The page, or a request of its own, went wrong."""


class Page:
    """One tab. `evaluate` runs JavaScript; the rest is what a person does."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._ids = itertools.count(1)
        self._session: str | None = None
        self.errors: list[str] = []
        """Exceptions, refusals by the content security policy, and console errors so far."""
        self.requested: list[str] = []
        """Addresses that the page asked for so far."""
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise PageError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _read(self, timeout: float = 60.0) -> dict[str, Any]:
        until = time.monotonic() + timeout
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], until - time.monotonic())
            data = os.read(self._from, 1 << 20) if ready else b""
            if not data:
                raise PageError("Chromium does not answer")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])

    def evaluate(self, expression: str) -> Any:
        answer = self.command(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise PageError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout: float = 30.0) -> Any:
        """The expression's value, once it is true."""
        until = time.monotonic() + timeout
        while not (value := self.evaluate(expression)):
            if time.monotonic() > until:
                raise PageError(f"not true after {timeout:g} s: {expression}; {self.errors}")
            time.sleep(0.05)
        return value

    def view(self, width: int, height: int, *, phone: bool = False, dark: bool = False) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        self.command("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        self.command("Page.navigate", url=address)
        self.wait_for(f"location.href.startsWith({address!r}) && document.readyState=='complete'")

    def box(self, selector: str) -> dict[str, float]:
        """Its place in the window, scrolled to if need be."""
        return self.evaluate(
            f"(() => {{ const e = document.querySelector({selector!r});"
            "e.scrollIntoView({block: 'nearest'}); const b = e.getBoundingClientRect();"
            "return {x: b.x, y: b.y, width: b.width, height: b.height}; })()"
        )

    def click(self, selector: str) -> None:
        box = self.box(selector)
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind in ("mousePressed", "mouseReleased"):
            self._mouse(kind, x, y)

    def stroke(self, selector: str, points: list[tuple[float, float]]) -> None:
        """Press, move and release the mouse; points are shares of the element's size."""
        box = self.box(selector)
        places = [(box["x"] + u * box["width"], box["y"] + v * box["height"]) for u, v in points]
        self._mouse("mousePressed", *places[0])
        for x, y in places[1:]:
            self._mouse("mouseMoved", x, y)
        self._mouse("mouseReleased", *places[-1])

    def _mouse(self, kind: str, x: float, y: float) -> None:
        self.command(
            "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1
        )

    def touch_stroke(self, selector: str, points: list[tuple[float, float]]) -> None:
        box = self.box(selector)
        kinds = ["touchStart", *["touchMove"] * (len(points) - 1)]
        for kind, (u, v) in zip(kinds, points, strict=True):
            place = {"x": box["x"] + u * box["width"], "y": box["y"] + v * box["height"]}
            self.command("Input.dispatchTouchEvent", type=kind, touchPoints=[place])
        self.command("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, key: str, times: int = 1) -> None:
        code = {"Tab": 9, "Enter": 13, " ": 32, "ArrowUp": 38, "ArrowDown": 40}.get(key, 0)
        parameters: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code}
        for _ in range(times):
            self.command("Input.dispatchKeyEvent", type="rawKeyDown", **parameters)
            self.command("Input.dispatchKeyEvent", type="keyUp", **parameters)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def chromium(binary: str) -> Iterator[Page]:
    """A browser with an empty profile of its own, and one tab in it."""
    commands_out, commands_in = os.pipe()
    answers_out, answers_in = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        pipes = [str(commands_out), str(answers_in)]
        browser = [binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *pipes, *browser],
            pass_fds=(commands_out, answers_in),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands_out)
        os.close(answers_in)
        try:
            yield Page(commands_in, answers_out)
        finally:
            process.terminate()
            process.wait(30)
            os.close(commands_in)
            os.close(answers_out)
