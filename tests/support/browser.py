"""Drive Debian's chromium by the DevTools protocol over a pipe, without driver, port or package."""

import base64
import contextlib
import csv
import io
import json
import os
import selectors
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from certvol.progress import Silent
from certvol.report import page
from support.made_runs import MadeRun

FLAGS = (
    "--headless --no-sandbox --disable-gpu "
    "--disable-background-networking --disable-component-update "
    "--disable-sync --disable-dev-shm-usage --no-first-run --no-default-browser-check "
    "--disable-extensions --disable-default-apps --hide-scrollbars --mute-audio "
    "--disable-features=Translate,OptimizationHints,MediaRouter --remote-debugging-pipe"
).split()
KEYS = {"Enter": 13, "Escape": 27, "End": 35, "ArrowRight": 39, "ArrowDown": 40}
TWO_FRAMES = (
    "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))"
)


def find_browser() -> str | None:
    programs = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    return next((program for program in programs if program), None)


class Browser:
    """One page at a time. `events` has what happened since it was opened."""

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, self.out = os.pipe()
        self.input, from_browser = os.pipe()
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        words = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", script, "browser", *words],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.buffer, self.number = b"", 0
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.input, selectors.EVENT_READ)
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.out)
        os.close(self.input)

    def call(self, method: str, timeout: float = 60.0, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session is not None and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        wanted, until = self.number, time.monotonic() + timeout
        while (answer := self._next(until)).get("id") != wanted:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            if not self.selector.select(max(0.0, until - time.monotonic())):
                raise TimeoutError("the browser does not answer")
            part = os.read(self.input, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self.buffer += part
        raw, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        if "method" in message:
            self.events.append(message)
        return message

    def open(
        self, page: Path | str, width: int = 1280, height: int = 900, dark: bool = False
    ) -> None:
        """Open a file or an address in a new tab; return when it has loaded."""
        if self.session is not None:
            self.call("Page.close")
            self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events = []
        self.address = page if isinstance(page, str) else page.resolve().as_uri()
        self.call("Page.navigate", url=self.address)
        until = time.monotonic() + 120
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._next(until)
        self.run(TWO_FRAMES)

    def run(self, expression: str) -> Any:
        options = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = self.call("Runtime.evaluate", expression=expression, **options)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"])[:1000])
        return answer["result"].get("value")

    def each(self, selector: str, expression: str) -> list[Any]:
        """Evaluate an expression in `e` for every element."""
        return list(
            self.run(
                f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => {expression})"
            )
        )

    def count(self, selector: str) -> int:
        return len(self.each(selector, "0"))

    def one(self, selector: str, expression: str) -> Any:
        return self.run(f"((e) => {expression})(document.querySelector({json.dumps(selector)}))")

    def text(self, selector: str) -> str:
        return str(self.one(selector, "e.textContent.trim()"))

    def choose(self, selector: str, value: str) -> None:
        """Set a slider, a list or a text field as a user does."""
        events = (
            "for (const name of ['input', 'change']) "
            "e.dispatchEvent(new Event(name, {bubbles: true}));"
        )
        self.one(selector, f"{{ e.value = {json.dumps(value)}; {events} }}")
        self.run(TWO_FRAMES)

    def key(self, name: str) -> None:
        key: dict[str, Any] = {"key": name, "code": name, "windowsVirtualKeyCode": KEYS[name]}
        text: dict[str, Any] = {"text": "\r"} if name == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)
        self.run(TWO_FRAMES)

    def press(self, character: str) -> None:
        """Press the key of a character, or Backspace."""
        text: dict[str, Any] = {"text": character} if len(character) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=character, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=character)

    def wait(self, condition: str, seconds: float = 60) -> None:
        """Return when an expression is true on the page."""
        until = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < until, f"never true: {condition}"
            time.sleep(0.01)

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.run(TWO_FRAMES)

    def screenshot(self, file: Path, whole: bool = False) -> Path:
        options: dict[str, Any] = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options = {"captureBeyondViewport": True, "clip": {**size, "scale": 1}}
        data = self.call("Page.captureScreenshot", format="png", **options)["data"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(data))
        return file

    def _params(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event["method"] == method]

    @property
    def requests(self) -> list[str]:
        """Addresses the page requested, without its own and what it holds."""
        asked = [params["request"]["url"] for params in self._params("Network.requestWillBeSent")]
        own = (self.address, "data:", "blob:")
        return [url[:200] for url in asked if not url.startswith(own)]

    @property
    def blocked(self) -> list[dict[str, Any]]:
        """Requests that the page's policy did not allow."""
        failed = self._params("Network.loadingFailed")
        return [params for params in failed if params.get("blockedReason") == "csp"]

    @property
    def complaints(self) -> list[str]:
        """Exceptions, and errors and warnings on the console."""
        bad = ("error", "warning", "assert")
        found = [str(each["exceptionDetails"]) for each in self._params("Runtime.exceptionThrown")]
        calls = self._params("Runtime.consoleAPICalled")
        found += [str(each["args"]) for each in calls if each["type"] in bad]
        entries = [each["entry"] for each in self._params("Log.entryAdded")]
        return found + [str(entry["text"]) for entry in entries if entry["level"] in bad]


def open_report(browser: Browser, made: MadeRun, **look: Any) -> Path:
    place = page.write_report(made.path, Silent())
    browser.open(place, **look)
    return place


def assert_quiet(browser: Browser) -> None:
    assert browser.requests == []
    assert browser.complaints == []


def download(browser: Browser, folder: Path) -> list[dict[str, str]]:
    folder.mkdir(exist_ok=True)
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    browser.one("#download", "e.click()")
    file, until = folder / "selection.csv", time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < until, "nothing was downloaded"
        time.sleep(0.05)
    text = file.read_bytes().decode("utf-8")
    file.unlink()
    return list(csv.DictReader(io.StringIO(text, newline="")))
