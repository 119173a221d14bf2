"""Control a headless Chromium over its DevTools pipe, with only the standard library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_PATIENCE = 120.0


class Browser:
    """One tab: its console messages, its network requests, and the results of its scripts.

    Attributes:
        messages: console messages and errors, including violations of the security policy.
        requests: the addresses that pages requested, including the pages themselves.
    """

    def __init__(self, profile: Path) -> None:
        reads, writes = os.pipe(), os.pipe()
        # Chromium reads commands from descriptor 3 and writes to 4; a zero byte ends each message.
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$@" 3<&{reads[0]} 4>&{writes[1]}',
                "bash",
                str(CHROMIUM),
                *_FLAGS,
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            pass_fds=(reads[0], writes[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads[0])
        os.close(writes[1])
        self._out, self._in = reads[1], writes[0]
        self._buffer, self._number = b"", 0
        self.messages: list[str] = []
        self.requests: list[str] = []
        [target, *_] = self._pages()
        attached = self._send("Target.attachToTarget", session=None, targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")
        self._send("Emulation.setFocusEmulationEnabled", enabled=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(_PATIENCE)
        os.close(self._out)
        os.close(self._in)

    def open(self, path: Path, fragment: str = "") -> None:
        """Load a file, and wait until its search is ready."""
        self._send("Page.navigate", url="about:blank")
        self.messages.clear()
        self.requests.clear()
        self._send("Page.navigate", url=path.as_uri() + fragment)
        self.wait("document.readyState === 'complete'")
        self.wait("!document.getElementById('data') || document.documentElement.dataset.ready")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        result = self._send("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in result:
            raise ValueError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + _PATIENCE
        while not self.run(script):
            if time.monotonic() > end:
                raise TimeoutError(script)
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Press a key such as Tab or Enter."""
        text = {"text": "\r"} if key == "Enter" else {}
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        for kind in ("keyDown", "keyUp"):
            shared: dict[str, Any] = {"key": key, "code": key}
            shared |= {"windowsVirtualKeyCode": codes[key], **text}
            self._send("Input.dispatchKeyEvent", type=kind, **shared)

    def type(self, text: str) -> None:
        """Type text into the focused element."""
        self._send("Input.insertText", text=text)

    def resize(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Show the page in a window of this width."""
        self._send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Save the visible part or the whole page as a PNG file."""
        shot = self._send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def print_pdf(self, path: Path) -> None:
        """Save the page as it is printed."""
        pdf = self._send("Page.printToPDF", printBackground=True)
        path.write_bytes(base64.b64decode(pdf["data"]))

    def _pages(self) -> list[str]:
        targets = self._send("Target.getTargets", session=None)["targetInfos"]
        return [target["targetId"] for target in targets if target["type"] == "page"]

    def _send(self, method: str, session: str | None = "", **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise ValueError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], _PATIENCE)
            block = os.read(self._in, 1 << 20) if ready else b""
            if not block:
                raise TimeoutError("the browser does not answer")
            self._buffer += block
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        about = event.get("params", {})
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif event["method"] == "Log.entryAdded":
            self.messages.append(about["entry"]["text"])
        elif event["method"] == "Runtime.exceptionThrown":
            self.messages.append(about["exceptionDetails"]["text"])
        elif event["method"] == "Runtime.consoleAPICalled":
            self.messages.append(str([argument.get("value") for argument in about["args"]]))
