"""Open pages in headless Chromium, and get their documents after their scripts have run."""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest

LIMIT = 600  # s: the machine may be busy with other work


def program() -> str | None:
    """Return the path of Chromium; None if it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """A running Chromium with a fresh profile and no network, which opens pages in one tab.

    Messages of the Chrome DevTools Protocol pass through two pipes.
    """

    def __init__(self, *options: str) -> None:
        found = program()
        if found is None:
            pytest.skip("chromium is not installed")
        profile = tempfile.TemporaryDirectory()
        given = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={profile.name}"),
            *options,
        ]
        (commands, self.commands), (self.replies, replies) = os.pipe(), os.pipe()
        script = f'exec "$0" "$@" 3<&{commands} 4>&{replies} 2>/dev/null'
        self.process = subprocess.Popen(
            ["bash", "-c", script, found, *given], pass_fds=(commands, replies)
        )
        atexit.register(self.close, profile)
        os.close(commands)
        os.close(replies)
        self.messages, self.numbers = self.received(), itertools.count(1)
        self.events: set[str | None] = set()
        try:
            self.new_tab()
        except (EOFError, OSError):  # its end shows first when reading, or when writing
            pytest.skip("chromium does not start here")

    def close(self, profile: tempfile.TemporaryDirectory) -> None:
        os.close(self.commands)
        self.process.wait()
        os.close(self.replies)
        profile.cleanup()

    def received(self) -> Iterator[dict[str, Any]]:
        rest = b""
        while chunk := os.read(self.replies, 1 << 20):
            *texts, rest = (rest + chunk).split(b"\0")
            yield from map(json.loads, texts)
        raise EOFError("chromium ended")

    def wait(self, event: str) -> None:
        while event not in self.events:
            self.events.add(next(self.messages).get("method"))
        self.events.clear()

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol; return its result."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters, **self.session}
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while (reply := next(self.messages)).get("id") != number:
            self.events.add(reply["method"])
        return reply["result"]

    def new_tab(self) -> None:
        self.session: dict[str, str] = {}
        tab = self.call("Target.createTarget", url="about:blank")
        self.session = self.call("Target.attachToTarget", flatten=True, **tab)
        self.call("Page.enable")

    def document(self, address: str, width: int, until: str | None) -> str:
        if until:
            self.new_tab()  # once a tab has virtual time, its frames load too late
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        if not until:
            self.call("Emulation.setVirtualTimePolicy", policy="advance")
        for place in ("about:blank", address):  # a change of the fragment alone loads nothing
            self.call("Page.navigate", url=place)
            self.wait("Page.loadEventFired")
        if not until:
            policy = {"policy": "pauseIfNetworkFetchesPending", "budget": 60_000}
            self.call("Emulation.setVirtualTimePolicy", **policy)
            self.wait("Emulation.virtualTimeBudgetExpired")
        text = f"""new Promise((done) => {{
          const look = () => document.querySelector({json.dumps(until or "*")})
            ? done(document.documentElement.outerHTML) : setTimeout(look, 20);
          look();
        }})"""
        shown = self.call("Runtime.evaluate", expression=text, awaitPromise=True)
        return shown["result"]["value"]


@functools.cache
def started(*options: str) -> Browser:
    """Return a browser that runs until the process ends, so that most pages start none."""
    return Browser(*options)


def document(
    address: str,
    *options: str,
    width: int = 1280,
    dark: bool = False,
    until: str | None = None,
) -> str:
    """Open a page, and return its document; skip the test if no browser starts.

    Args:
        options: Options of the browser.
        until: Wait until the page has an element with this selector; by default, let the timers
            of the page fire, without waiting.
    """
    # An emulated preference would override the colour scheme of a frame.
    scheme = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0") if dark else ()
    browser = started(*options, *scheme)
    watchdog = threading.Timer(LIMIT, browser.process.kill)
    watchdog.start()
    try:
        return browser.document(address, width, until)
    except (EOFError, OSError):
        started.cache_clear()  # other tests start another browser
        raise
    finally:
        watchdog.cancel()


def logged(document: str) -> list[str]:
    """Return the log of a script in the page."""
    assert 'data-log="' in document, "the script failed"
    return unescape(re.search(r'data-log="([^"]*)"', document)[1]).split(" | ")


def acted(script: str) -> str:
    """Wrap a script that logs texts with `log(text)` and pauses with `wait(milliseconds)`."""
    return f"""
      (async () => {{
        const seen = [], log = (...what) => seen.push(what.join(' ')), $$ = (s) =>
          [...document.querySelectorAll(s)], text = (id) => document.getElementById(id).textContent,
          wait = (ms) => new Promise((done) => setTimeout(done, ms)),
          press = (id) => document.getElementById(id).click(),
          visible = (id) => document.getElementById(id).checkVisibility(),
          direct = (tensor) => $$(`input[value=${{tensor}}]`)[0].click(),
          cell = (name) => $$('.panel button').find((b) =>
            b.getAttribute('aria-label').startsWith(name + ' ')),
          marked = (kind) => $$(kind).map((b) => b.getAttribute('aria-label').split(' ')[0]).join(),
          key = (name) => document.activeElement.dispatchEvent(new KeyboardEvent('keydown',
            {{ key: name, bubbles: true, cancelable: true }}));
        try {{ {script} }} catch (error) {{ log('failed', error.message); }}
        document.body.dataset.log = seen.join(' | ');
      }})();
    """
