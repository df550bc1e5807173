"""What the site has beside the pages of this folder; a hook of mkdocs, see mkdocs.yml.

README.md is the first page; READMEs of examples and backends, the changelog and what contributors read are pages too.
Reference is written from the specs (signature, arguments, features, clauses, tolerances) and from the manifests of
our backends. Sections of the navigation that name a folder list its pages, and a page that none names stands under
More. A link to another file of the repository becomes its path; plots beside measurements come along. A notebook is
a page too, with what its cells print.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import public_names
import reference
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

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
NOTEBOOKS = {
    f"{p.parent.relative_to(ROOT / 'docs')}/{p.stem}-notebook.md": p.relative_to(ROOT).as_posix()
    for p in sorted(ROOT.glob("docs/*/*.ipynb"))
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Stop at a public name whose docstring does not say what it has to."""
    names = [
        name for modules in public_names.PAGES.values() for module in modules for name in public_names.public(module)
    ]
    if wrong := [line for name in (*names, *public_names.records()) for line in public_names.complaints(name)]:
        raise PluginError("\n".join(("docstrings of public names lack what docs/public_names.py asks for:", *wrong)))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated, and settle the navigation."""
    pages = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in ELSEWHERE.items()}
    pages |= reference.pages()
    pages |= {page: notebook((ROOT / source).read_text(encoding="utf-8"), source) for page, source in NOTEBOOKS.items()}
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


def notebook(content: str, source: str) -> str:
    """A notebook as a page: its cells, what they print, and the file itself to download."""
    parts = []
    for cell in json.loads(content)["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        printed = "".join(line for output in cell["outputs"] for line in output.get("text", ()))
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    name = posixpath.basename(source)
    page = "\n\n".join([*parts, f"[Download {name}]({name})"]) + "\n"
    return re.sub(r"^# .*", r"\g<0> (notebook)", page, count=1)


def listed(nav: Any, pages: list[str], placed: set[str] | None = None) -> Any:
    """The navigation with folders replaced by their pages that stand nowhere else, an index first."""
    placed = set(named(nav)) if placed is None else placed
    if isinstance(nav, dict):
        return {title: listed(entry, pages, placed) for title, entry in nav.items()}
    if isinstance(nav, list):
        parts = [listed(entry, pages, placed) for entry in nav]
        return [entry for part in parts for entry in (part if isinstance(part, list) else [part])]
    if nav.endswith("/"):
        inside = [page for page in pages if page.startswith(nav) and page not in placed]
        return sorted(inside, key=lambda page: (not page.endswith("/index.md"), page))
    return nav


def named(nav: Any) -> list[str]:
    """Every page of a navigation."""
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in named(entry)]
