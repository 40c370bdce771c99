"""Debian's chromium without a window, driven over a pipe by the DevTools protocol: no driver, no port, no package."""

import base64
import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync "
    "--disable-dev-shm-usage --no-first-run --no-default-browser-check --disable-extensions --disable-default-apps "
    "--disable-features=Translate,OptimizationHints,MediaRouter --hide-scrollbars --mute-audio --remote-debugging-pipe"
).split()


def find_browser() -> str | None:
    return next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )


class Browser:
    """One page at a time. What it asked of the network, and what its console complained of, is kept."""

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, ours_out = os.pipe()
        ours_in, from_browser = os.pipe()
        words = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "browser", *words],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.out, self.input, self.buffer, self.number = ours_out, ours_in, b"", 0
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.input, selectors.EVENT_READ)
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        self.profile = profile

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
        while True:
            answer = self._next(until)
            if answer is None:
                raise TimeoutError(f"no answer to {method} within {timeout} s")
            if answer.get("id") == wanted:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def _next(self, until: float) -> dict[str, Any] | None:
        while b"\0" not in self.buffer:
            if not self.selector.select(max(0.0, until - time.monotonic())):
                return None
            part = os.read(self.input, 1 << 20)
            if not part:
                raise RuntimeError("the browser has gone")
            self.buffer += part
        raw, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        if "method" in message:
            self.events.append(message)
        return message

    def wait_for_event(self, name: str, timeout: float = 60.0) -> dict[str, Any]:
        until = time.monotonic() + timeout
        while True:
            for event in self.events:
                if event["method"] == name:
                    return dict(event["params"])
            if self._next(until) is None:
                raise TimeoutError(f"no {name} within {timeout} s")

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """A fresh tab; returns when the page has loaded."""
        if self.session is not None:
            self.call("Page.close")
            self.session = None
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")
        self.look(width, height, dark)
        self.events = []
        self.address = page.resolve().as_uri()
        self.call("Page.navigate", url=self.address)
        self.wait_for_event("Page.loadEventFired", timeout=120)
        self.settle()

    def look(self, width: int, height: int = 900, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def settle(self) -> None:
        """Two frames later."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def run(self, expression: str) -> Any:
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"])[:1000])
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).textContent")).strip()

    def count(self, selector: str) -> int:
        return int(self.run(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def choose(self, selector: str, value: str) -> None:
        """As a user would set a slider or a list."""
        place = f"document.querySelector({json.dumps(selector)})"
        self.run(
            f"(() => {{ const e = {place}; e.value = {json.dumps(value)}; "
            "e.dispatchEvent(new Event('input', {bubbles: true})); e.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )
        self.settle()

    def key(self, name: str) -> None:
        codes = {
            "Tab": 9,
            "Enter": 13,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
            "End": 35,
            "Home": 36,
            "Escape": 27,
        }
        for kind in ("keyDown", "keyUp"):
            extra = {"text": "\r"} if name == "Enter" and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=codes[name], **extra
            )
        self.settle()

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def screenshot(self, file: Path, whole: bool = False) -> Path:
        options: dict[str, Any] = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options = {"captureBeyondViewport": True, "clip": {**size, "scale": 1}}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **options)["data"]))
        return file

    @property
    def requests(self) -> list[str]:
        """All but the page itself and what it holds within."""
        asked = [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]
        return [url[:200] for url in asked if url != self.address and not url.startswith(("data:", "blob:"))]

    @property
    def complaints(self) -> list[str]:
        found = []
        for event in self.events:
            name, of = event["method"], event["params"]
            if name == "Runtime.exceptionThrown":
                found.append(str(of["exceptionDetails"])[:500])
            elif name == "Runtime.consoleAPICalled" and of["type"] in ("error", "warning", "assert"):
                found.append(str(of["args"])[:500])
            elif name == "Log.entryAdded" and of["entry"]["level"] in ("error", "warning"):
                found.append(of["entry"]["text"][:500])
        return found
