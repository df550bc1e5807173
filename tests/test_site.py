"""Every page of the site in a browser, as wide as a laptop and as a phone: nothing raw, nothing cut, no error.

Needs what builds the site and steers a browser (`pip install -e '.[docs]'`) and Debian's Chromium (`apt-get install
chromium`). Skipped by name where one of them is not there. One browser opens each page once, several at a time.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
MISSING = [
    *(name for name in ("mkdocs", "material", "mkdocstrings", "playwright") if importlib.util.find_spec(name) is None),
    *(name for name in ("chromium",) if shutil.which(name) is None),
]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
WIDTHS = (1280, 390)
TABS = 4  # pages that load at a time
CELL = 79  # characters of a cell of a table
PALETTES = ("default", "slate")
COLORED = ("index.html", "laws.html", "reference/operators/logprob.html", "reference/api/rlkernel_core.html")
CONTRAST = 3.0  # of text to what is behind it; WCAG asks for 3 of large text and of what is not essential
# Every page would index the whole site again, for a search that nobody types.
NOTHING_TO_SEARCH = {"config": {"lang": ["en"], "separator": " ", "pipeline": [], "fields": {}}, "docs": []}
RENDERED = "() => [...document.querySelectorAll('.arithmatex')].every((node) => node.querySelector('.katex'))"
# What a page shows at a width: text outside of code, what is wider than its frame, links, cells.
LOOK = """
() => {
const page = document.querySelector("article") || document.body;
const prose = page.cloneNode(true);
prose.querySelectorAll("pre, code, .katex, script, style, svg").forEach((node) => node.remove());
const scrolls = (node) => {
  for (let at = node; at && at !== document.documentElement; at = at.parentElement) {
    if (["auto", "scroll", "hidden"].includes(getComputedStyle(at).overflowX)) return true;
  }
  return false;
};
const short = (node) => node.outerHTML.slice(0, 120);
const overflows = document.documentElement.scrollWidth > window.innerWidth;
const wide = (node) => node.getBoundingClientRect().right > window.innerWidth + 1 && !scrolls(node);
const cut = (node) => node.scrollWidth > node.clientWidth + 1;
return {
  prose: prose.textContent,
  wide: overflows ? [...page.querySelectorAll("*")].filter(wide).slice(0, 3).map(short) : [],
  code: [...page.querySelectorAll("pre > code")].filter(cut).map((node) => node.textContent.slice(0, 80)),
  links: [...document.querySelectorAll("a[href], img[src]")].map((node) => node.href || node.src),
  cells: [...page.querySelectorAll("td, th")].map((node) => {
    const cell = node.cloneNode(true);
    cell.querySelectorAll(".katex-mathml").forEach((hidden) => hidden.remove());
    return cell.textContent.trim().replace(/\\s+/g, " ");
  }),
  formulas: [...page.querySelectorAll(".katex-error")].map((node) => node.textContent),
};
}
"""
# Text that hardly stands out from what is behind it, in one palette.
FAINT = """
(scheme) => {
const still = document.createElement("style");
still.textContent = "* { transition: none !important }";
document.head.append(still);
document.body.setAttribute("data-md-color-scheme", scheme);
const rgb = (color) => color.match(/[\\d.]+/g).map(Number);
const over = ([r, g, b, a = 1], under) => [r, g, b].map((x, i) => a * x + (1 - a) * under[i]);
const behind = (node) => {
  if (!node) return [255, 255, 255];
  const color = rgb(getComputedStyle(node).backgroundColor);
  return (color[3] ?? 1) === 1 ? color : over(color, behind(node.parentElement));
};
const light = (color) => color.map((x) => x / 255)
  .map((x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
  .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
const faint = (node) => {
  if (![...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) return false;
  if (node.closest(".headerlink, .katex-mathml") || !node.offsetParent) return false;
  const back = behind(node);
  const [a, b] = [light(over(rgb(getComputedStyle(node).color), back)), light(back)].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05) < CONTRAST;
};
return [...document.querySelectorAll("article *")].filter(faint).map((node) => node.outerHTML.slice(0, 120));
}
""".replace("CONTRAST", str(CONTRAST))
# Text of a drawing that leaves its box, or the paper.
SPILLED = """
() => {
const inside = (a, b) => a.left >= b.left && a.right <= b.right && a.top >= b.top && a.bottom <= b.bottom;
const paper = document.querySelector(".paper").getBoundingClientRect();
const frame = (text) => text.closest(".box")?.querySelector("rect").getBoundingClientRect() ?? paper;
return [...document.querySelectorAll("text")]
  .filter((text) => !inside(text.getBoundingClientRect(), frame(text))).map((text) => text.textContent);
}
"""


class Site(NamedTuple):
    folder: Path
    address: str

    @property
    def pages(self) -> list[str]:
        return sorted(str(page.relative_to(self.folder)) for page in self.folder.rglob("*.html"))

    @property
    def drawings(self) -> list[str]:
        return sorted(str(file.relative_to(self.folder)) for file in self.folder.glob("assets/drawings/*.svg"))


class Quiet(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Site]:
    """The site, served: SITE_FOLDER, which `make site` has built, or else built here."""
    if given := os.environ.get("SITE_FOLDER"):
        folder = ROOT / given
    else:
        folder = tmp_path_factory.mktemp("site")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
        env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
        built = subprocess.run(command, cwd=ROOT, env=env, check=False, capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield Site(folder, f"http://127.0.0.1:{server.server_port}/")
        server.shutdown()
        thread.join()


class Seen:
    """What the browser saw.

    `shown` is page -> width -> what it shows, `console` page -> errors, `faint` page and palette -> text that hardly
    stands out, `spilled` drawing -> text outside of its box.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.shown: dict[str, dict[int, dict[str, Any]]] = {}
        self.console: dict[str, list[str]] = {}
        self.faint: dict[str, list[str]] = {}
        self.spilled: dict[str, list[str]] = {}
        asyncio.run(self._look())

    async def _look(self) -> None:
        from playwright.async_api import async_playwright

        queue = iter(self.site.pages)
        async with async_playwright() as play:
            browser = await play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            context = await browser.new_context()
            context.set_default_timeout(180_000)  # milliseconds: other processes may want the same cores
            await context.route("**/search_index.json", lambda route: route.fulfill(json=NOTHING_TO_SEARCH))
            await asyncio.gather(*(self._tab(context, queue) for _ in range(TABS)))
            tab = await context.new_page()
            for page in COLORED:
                await tab.goto(self.site.address + page)
                self.faint |= {f"{page} {palette}": await tab.evaluate(FAINT, palette) for palette in PALETTES}
            for drawing in self.site.drawings:
                await tab.goto(self.site.address + drawing)
                self.spilled[drawing] = await tab.evaluate(SPILLED)
            await browser.close()

    async def _tab(self, context: Any, queue: Iterator[str]) -> None:
        tab = await context.new_page()
        said: list[str] = []
        tab.on("console", lambda message: message.type == "error" and said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        for page in queue:
            said.clear()
            await tab.set_viewport_size({"width": WIDTHS[0], "height": 900})
            await tab.goto(self.site.address + page)
            await tab.wait_for_function(RENDERED)
            self.shown[page] = {}
            for width in WIDTHS:
                await tab.set_viewport_size({"width": width, "height": 900})
                self.shown[page][width] = await tab.evaluate(LOOK)
            self.console[page] = list(said)

    def wrong(self, what: str, widths: tuple[int, ...] = WIDTHS) -> dict[str, Any]:
        """Pages that show something under this name at one of the widths."""
        found = {(page, width): self.shown[page][width][what] for page in self.site.pages for width in widths}
        return {f"{page} at {width}": told for (page, width), told in found.items() if told}

    @cached_property
    def anchors(self) -> dict[str, set[str]]:
        """Page -> the ids in it."""
        return {p: set(re.findall(r'\bid="([^"]+)"', (self.site.folder / p).read_text())) for p in self.site.pages}


@pytest.fixture(scope="module")
def seen(site) -> Seen:
    return Seen(site)


def test_no_page_shows_a_raw_fence_or_a_raw_formula(seen) -> None:
    raw = re.compile(r"```.{0,40}|\$\$.{0,40}|\$\\\w.{0,40}|\$[A-Za-z]\$|:::.{0,40}")
    shown = {page: raw.findall(widths[WIDTHS[0]]["prose"]) for page, widths in seen.shown.items()}
    assert {page: found for page, found in shown.items() if found} == {}


def test_every_formula_is_rendered(seen) -> None:
    assert seen.wrong("formulas") == {}


def test_no_page_is_wider_than_the_window(seen) -> None:
    assert seen.wrong("wide") == {}


def test_no_line_of_code_is_cut(seen) -> None:
    assert seen.wrong("code") == {}


def test_no_page_logs_an_error(seen) -> None:
    assert {page: said for page, said in seen.console.items() if said} == {}


def test_text_stands_out_in_both_palettes(seen) -> None:
    assert {where: text for where, text in seen.faint.items() if text} == {}


def test_no_cell_of_a_table_is_longer_than_a_line(seen) -> None:
    cells = {page: [c for c in widths[WIDTHS[0]]["cells"] if len(c) > CELL] for page, widths in seen.shown.items()}
    assert {page: found for page, found in cells.items() if found} == {}


def test_every_link_within_the_site_leads_somewhere(site, seen) -> None:
    dead = []
    for page in site.pages:
        for link in seen.shown[page][WIDTHS[0]]["links"]:
            target, _, anchor = link.partition("#")
            if not target.startswith(site.address):
                continue
            name = target.removeprefix(site.address) or "index.html"
            if not (site.folder / name).is_file() or (anchor and anchor not in seen.anchors.get(name, {anchor})):
                dead.append((page, link.removeprefix(site.address)))
    assert dead == []


def test_no_drawing_has_text_outside_of_its_box(seen) -> None:
    assert seen.spilled
    assert {drawing: text for drawing, text in seen.spilled.items() if text} == {}
