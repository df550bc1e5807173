"""What the site has beside the pages of this folder; a hook of mkdocs, see mkdocs.yml.

README.md is the first page; READMEs of examples and backends, the changelog and what contributors read are pages too.
Reference is written from the specs (signature, arguments, features, clauses, tolerances) and from the manifests of
our backends. Sections of the navigation that name a folder list its pages, and a page that none names stands under
More. A link to another file of the repository becomes its path; plots beside measurements come along.
"""

from __future__ import annotations

import inspect
import posixpath
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File

from rlkernel_core.spec import OPERATORS
from rlkernel_torch import backend as reference_backend

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

    from rlkernel_core import Backend

ROOT = Path(__file__).resolve().parents[1]
# What tests read behind the language of a fence ("console exit=1") is nothing that a renderer knows.
FENCE = re.compile(r"^(?P<fence>```\w+) [^\n`]*$", re.MULTILINE)
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
# page of the site -> file of the repository
ELSEWHERE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    **{
        f"examples/{p.parent.name}.md": f"examples/{p.parent.name}/README.md" for p in ROOT.glob("examples/*/README.md")
    },
    **{
        f"backends/{p.parent.name}.md": f"backends/{p.parent.name}/README.md" for p in ROOT.glob("backends/*/README.md")
    },
    **{
        f"backends/{p.parents[2].name}/{p.parent.name}.md": p.relative_to(ROOT).as_posix()
        for p in ROOT.glob("backends/*/rlkernel_*/*/README.md")
    },
}
PLOTS = {
    f"plots/{p.relative_to(ROOT / 'benchmarks/results')}": str(p.relative_to(ROOT))
    for p in ROOT.glob("benchmarks/results/**/*.png")
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated, and settle the navigation."""
    pages = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in ELSEWHERE.items()}
    pages |= {f"reference/{name}.md": reference(spec) for name, spec in OPERATORS.items()}
    pages["reference/manifests.md"] = manifests()
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for path, source in PLOTS.items():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / source)))
    there = sorted(f.src_uri for f in files.documentation_pages())
    nav = listed(config.nav, there)
    if more := [page for page in there if page not in set(named(nav))]:
        nav.append({"More": more})
    config.nav = nav
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 mkdocs names them
    """Links between files of the repository become links of the site or paths; fences lose their options."""
    uri = page.file.src_uri
    at = ELSEWHERE.get(uri, f"docs/{uri}")
    places = {source: page for page, source in (ELSEWHERE | PLOTS).items()}

    def link(found: re.Match[str]) -> str:
        target, _, anchor = found["target"].partition("#")
        if "://" in target or not target:
            return found[0]
        source = posixpath.normpath(posixpath.join(posixpath.dirname(at), target))
        place = places.get(source, source.removeprefix("docs/"))
        if files.get_file_from_path(place) is None:
            return f"{found['text']} (`{source}`)"
        place = posixpath.relpath(place, posixpath.dirname(uri) or ".")
        return f"{found['image']}[{found['text']}]({place}{'#' * bool(anchor)}{anchor})"

    return FENCE.sub(r"\g<fence>", LINK.sub(link, markdown))


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


def backends() -> list[Backend]:
    """Manifests of the reference and of our backends in the clone; they claim, and run nothing."""
    folders = sorted(p.parent for p in ROOT.glob("backends/*/pyproject.toml"))
    before = list(sys.path)
    sys.path[:0] = map(str, folders)  # some share claims with another
    found = [import_module(f"rlkernel_{folder.name}").backend for folder in folders]
    sys.path[:] = before
    return [reference_backend, *found]


def devices(claimed: str | tuple[str, ...]) -> tuple[str, ...]:
    """The devices that a manifest names, by one name or several."""
    return (claimed,) if isinstance(claimed, str) else claimed


def manifests() -> str:
    """What every backend claims: a table each."""
    parts = [
        "# Backends",
        "What each backend claims in its manifest. What it was held to stands on the [first page](../index.md).",
    ]
    for backend in backends():
        rows = [
            (
                f"[`{impl.op}`]({impl.op.partition('@')[0]}.md)",
                " ".join((*devices(impl.requires.device), *impl.requires.arch)),
                ", ".join(impl.requires.dtypes),
                ", ".join(sorted(impl.supports)),
                f"`{impl.target}`",
            )
            for impl in backend.impls
        ]
        columns = ("operator", "device", "dtypes", "features", "function")
        parts.append("\n".join(table(f"`{backend.name}`", columns, rows)).strip())
    return "\n\n".join(parts) + "\n"


def reference(spec: Any) -> str:
    """What a spec says, as a page."""
    parts = [f"# {spec.id}", spec.summary.capitalize() + "."]
    guide = ROOT / "docs" / "ops" / f"{spec.name}.md"
    if guide.exists():
        parts.append(f"[The guide](../ops/{spec.name}.md) has examples, costs and what was measured.")
    lines = [f"    {p}," for p in map(str, spec.parameters.values())]
    parts += ["```python", f"rlkernel.{spec.name}(", *lines, ")", "```"]
    parts += ["```text", inspect.getdoc(spec.record) or "", "```"]
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
