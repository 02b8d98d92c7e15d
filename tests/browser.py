"""Run headless Chromium to get a page's document after its scripts have run, or its picture."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from html import unescape

LIMIT = 600  # s: the machine may be busy with other work


def program() -> str | None:
    """Return the path of Chromium; None if it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def run(
    address: str,
    *options: str,
    width: int = 1280,
    height: int = 900,
    dark: bool = False,
    timers: bool = True,
):
    """Run a browser on an address, with a fresh profile and no network.

    Args:
        timers: let the timers of the page fire, without waiting, before the browser ends; otherwise
            it ends once the page and its frames are loaded.

    Returns:
        The finished process, with its output.
    """
    found = program()
    assert found, "chromium is not installed"
    with tempfile.TemporaryDirectory() as profile:
        given = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            "--hide-scrollbars",
            *(["--virtual-time-budget=60000"] if timers else []),
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            *(["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []),
            *options,
        ]
        return subprocess.run(
            [found, *given, address], capture_output=True, text=True, timeout=LIMIT, check=False
        )


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
