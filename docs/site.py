"""What the site has beside the pages of this folder; a hook of mkdocs, see mkdocs.yml.

README.md is the first page. A page of reference per operator is written from its spec: signature, arguments, features,
clauses, tolerances. Sections of the navigation that name a folder list its pages, and a page that none names stands
under More. A link to a file of the repository that is no page becomes its path.
"""

from __future__ import annotations

import inspect
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File

from rlkernel_core.spec import OPERATORS

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated, and settle the navigation."""
    pages = {"index.md": (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")}
    pages |= {f"reference/{name}.md": reference(spec) for name, spec in OPERATORS.items()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    there = sorted(f.src_uri for f in files.documentation_pages())
    nav = listed(config.nav, there)
    if more := [page for page in there if page not in set(named(nav))]:
        nav.append({"More": more})
    config.nav = nav
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 mkdocs names them
    """Links that leave the site become the path of the file in the repository."""

    def link(found: re.Match[str]) -> str:
        target, _, _ = found["target"].partition("#")
        if "://" in target or not target:
            return found[0]
        at = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), target))
        if at.startswith("docs/") and files.get_file_from_path(at.removeprefix("docs/")):
            return found[0]
        return f"{found['text']} (`{at.removeprefix('docs/')}`)"

    return LINK.sub(link, markdown)


def listed(nav: Any, pages: list[str]) -> Any:
    """The navigation with folders replaced by their pages, an index first."""
    if isinstance(nav, list):
        return [listed(entry, pages) for entry in nav]
    if isinstance(nav, dict):
        return {title: listed(entry, pages) for title, entry in nav.items()}
    if nav.endswith("/"):
        inside = [page for page in pages if page.startswith(nav)]
        return sorted(inside, key=lambda page: (not page.endswith("/index.md"), page))
    return nav


def named(nav: Any) -> list[str]:
    """Every page of a navigation."""
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in named(entry)]


def reference(spec: Any) -> str:
    """What a spec says, as a page."""
    parts = [f"# {spec.id}", spec.summary.capitalize() + "."]
    guide = ROOT / "docs" / "ops" / f"{spec.name}.md"
    if guide.exists():
        parts.append(f"[The guide](../ops/{spec.name}.md) has examples, costs and what was measured.")
    lines = [f"    {p}," for p in map(str, spec.parameters.values())]
    parts += ["```python", f"rlkernel.{spec.name}(", *lines, ")", "```"]
    parts += ["```text", inspect.getdoc(spec.signature) or "", "```"]
    parts += table("Features", ("name", "what it is"), [(f"`{f.name}`", f.text) for f in spec.features])
    clauses = [(c.id, c.title, c.text, c.feature and f"`{c.feature}`") for c in spec.clauses]
    parts += table("Clauses", ("id", "", "what is promised", "feature"), clauses)
    close = [(t.output, t.dtype, f"{t.atol:g}", f"{t.rtol:g}", t.source) for t in spec.tolerances]
    parts += table("Tolerances", ("result", "dtype", "absolute", "relative", "source"), close)
    return "\n\n".join(parts[:2]) + "\n\n" + "\n".join(parts[2:]) + "\n"


def table(title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    """A heading and a table, or nothing."""
    if not rows:
        return []
    cells = [" | ".join(str(x or "").replace("|", "\\|") for x in row) for row in rows]
    return [
        "",
        f"## {title}",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
        *(f"| {c} |" for c in cells),
    ]
