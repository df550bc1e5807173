"""Every page of the site in a browser, at the widths of a laptop and of a phone: nothing raw, nothing cut, no error.

Needs mkdocs-material (`pip install -e '.[docs]'`), Chromium and its driver (Debian: `apt-get install chromium
chromium-driver`). Skipped by name where one of them is not there.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import httpx
import pytest

ROOT = Path(__file__).parents[1]
MISSING = [
    *(name for name in ("mkdocs", "material") if importlib.util.find_spec(name) is None),
    *(name for name in ("chromium", "chromedriver") if shutil.which(name) is None),
]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
WIDTHS = (1280, 390)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
# What a page shows: text outside of code, what is wider than its frame, links, formulas that failed.
ASKED = """
const answer = arguments[arguments.length - 1];
const formulas = () => [...document.querySelectorAll(".arithmatex")];
const look = () => {
const page = document.querySelector("article") || document.body;
const prose = page.cloneNode(true);
prose.querySelectorAll("pre, code, .katex, script, style, svg").forEach((node) => node.remove());
const scrolls = (node) => {
  for (let at = node; at && at !== document.documentElement; at = at.parentElement) {
    if (["auto", "scroll", "hidden"].includes(getComputedStyle(at).overflowX)) return true;
  }
  return false;
};
const wide = [...page.querySelectorAll("*")].filter(
  (node) => node.getBoundingClientRect().right > window.innerWidth + 1 && !scrolls(node));
return {
  prose: prose.textContent,
  overflow: document.documentElement.scrollWidth - window.innerWidth,
  wide: wide.slice(0, 3).map((node) => node.outerHTML.slice(0, 120)),
  links: [...document.querySelectorAll("a[href], img[src]")].map((node) => node.href || node.src),
  broken: [...page.querySelectorAll(".katex-error")].map((node) => node.textContent),
};
};
const rendered = () => formulas().every((node) => node.querySelector(".katex"));
const settled = () => (rendered() ? answer(look()) : setTimeout(settled, 20));
settled();
"""


class Site(NamedTuple):
    folder: Path
    address: str

    @property
    def pages(self) -> list[str]:
        return sorted(str(page.relative_to(self.folder)) for page in self.folder.rglob("*.html"))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built and served."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield Site(folder, f"http://127.0.0.1:{server.server_port}/")
        server.shutdown()
        thread.join()


class Browser:
    """A session of chromedriver (W3C WebDriver) at a port."""

    def __init__(self, port: int, profile: Path) -> None:
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        chrome = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
        self._at = ""
        self._at = f"/session/{self('/session', capabilities={'alwaysMatch': wanted})['sessionId']}"

    def __call__(self, path: str, **body: Any) -> Any:
        answer = self._http.post(self._at + path, json=body).json()["value"]
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(f"{path}: {answer['message']}")
        return answer

    def looked_at(self, page: str, width: int) -> dict[str, Any]:
        """What the page shows at a width, and what the browser's console says."""
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self("/goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=screen)
        self("/url", url=page)
        seen = self("/execute/async", script=ASKED, args=[])
        return seen | {"console": [e["message"] for e in self("/se/log", type="browser") if e["level"] == "SEVERE"]}

    def close(self) -> None:
        self._http.delete(self._at)
        self._http.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as driver:
        assert any("started successfully" in line for line in driver.stdout)
        browser = Browser(port, tmp_path_factory.mktemp("profile"))
        yield browser
        browser.close()
        driver.terminate()


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_shows_raw_text_overflows_or_raises(site, browser, width) -> None:
    found = {}
    for page in site.pages:
        seen = browser.looked_at(site.address + page, width)
        wrong = {
            "fence": re.findall(r"```.{0,40}", seen["prose"]),
            "dollar": re.findall(r"\$\$.{0,40}|\$\\\w.{0,40}|\$[A-Za-z]\$", seen["prose"]),
            "formula": seen["broken"],
            "wide": seen["wide"] if seen["overflow"] > 0 else [],
            "console": seen["console"],
        }
        if any(wrong.values()):
            found[page] = {name: told for name, told in wrong.items() if told}
    assert found == {}


def test_every_link_within_the_site_leads_somewhere(site, browser) -> None:
    dead = []
    for page in site.pages:
        for link in browser.looked_at(site.address + page, WIDTHS[0])["links"]:
            target, _, anchor = link.partition("#")
            if not target.startswith(site.address):
                continue
            file = site.folder / (target.removeprefix(site.address) or "index.html")
            if not file.is_file() or (anchor and file.suffix == ".html" and f'id="{anchor}"' not in file.read_text()):
                dead.append((page, link.removeprefix(site.address)))
    assert dead == []
