"""A real browser shows each page: nothing is requested, nothing is said in its console, nothing is cut off."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import undrift
from adapt_support import small
from support import convnet, images
from undrift.adapt import adapt
from undrift.likelihood import entropy

from .test_report import continual

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no browser: Chromium is not installed"),
]

WATCH = "const e = document.documentElement; document.title = 'wide ' + Math.max(0, e.scrollWidth - e.clientWidth)"


def look(page: Path, width: int, profile: Path) -> tuple[str, str, list[str]]:
    """Return what the browser made of a page, what its console said, and the addresses that it asked for."""
    assert BROWSER is not None
    log = profile.with_suffix(".json")
    found = subprocess.run(
        [
            BROWSER,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-component-update",
            "--enable-logging=stderr",
            f"--user-data-dir={profile}",
            f"--log-net-log={log}",
            f"--window-size={width},2000",
            "--virtual-time-budget=2000",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    console = [line for line in found.stderr.splitlines() if ":CONSOLE" in line]
    asked = []
    if log.exists():
        try:
            events = json.loads(log.read_text())["events"]
        except ValueError:  # cut off where the browser ended
            events = []
        found_params = [e["params"] for e in events if isinstance(e.get("params"), dict) and "url" in e["params"]]
        # What the browser asks for itself, its updates, has no page as its origin.
        asked = [p["url"] for p in found_params if p.get("initiator", "not an origin") != "not an origin"]
    return found.stdout, "\n".join(console), asked


@pytest.mark.parametrize("kind", ["adapt", "stream", "evaluate"])
def test_a_browser_shows_the_page_and_asks_for_nothing(tmp_path: Path, kind: str) -> None:
    page = tmp_path / "page.html"
    if kind == "adapt":
        adapt(small(), images(24), entropy, epochs=2).page(page, images(24), labels=torch.zeros(24, dtype=torch.long))
    elif kind == "stream":
        stream = undrift.stream(convnet(), images(96).split(12), method="tent", packs=())
        stream.record(names=lambda: ["a/very/long/path" * 20] * 12)
        for _ in stream:
            pass
        stream.report.reset("collapsed")
        stream.page(page)
    else:
        continual().page(page, source=continual())
    dom, console, asked = look(page, 1100, tmp_path / "profile")
    assert "<h1>" in dom
    assert console == ""
    assert not [url for url in asked if not url.startswith(("data:", "file:"))]


def test_a_picture_from_elsewhere_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    continual().page(page)
    page.write_text(page.read_text().replace("<h1>", "<img src='http://127.0.0.1:9/x.png'><h1>"))
    _, console, _ = look(page, 1100, tmp_path / "profile")
    assert "http://127.0.0.1:9/x.png" in console  # the page's own policy refuses it, and says so


@pytest.mark.parametrize("width", [360, 1100])
def test_nothing_is_wider_than_the_window(tmp_path: Path, width: int) -> None:
    page = tmp_path / "page.html"
    stream = undrift.stream(convnet(), images(96).split(12), method="tent", packs=())
    stream.model.classes = tuple("a class of a very long name without an end " * 4 + str(i) for i in range(5))
    stream.record(names=lambda: ["a/very/long/path" * 20] * 12)
    for _ in stream:
        pass
    stream.page(page)
    # The page's own policy forbids scripts; a frame of this width tells what it would scroll.
    text = page.read_text().replace("default-src 'none'", "script-src 'unsafe-inline'")
    page.write_text(text.replace("</body>", f"<script>{WATCH}</script></body>"))
    outer = tmp_path / "outer.html"
    outer.write_text(
        f"<title>x</title><iframe id=f style='width:{width}px;height:900px;border:0' src='page.html'></iframe>"
        "<script>f.onload = () => { document.title = f.contentDocument.title }</script>"
    )
    assert BROWSER is not None
    dom = subprocess.run(
        [
            BROWSER,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--allow-file-access-from-files",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=3000",
            "--window-size=1400,1000",
            "--dump-dom",
            outer.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    assert "<title>wide 0</title>" in dom, dom[:200]
