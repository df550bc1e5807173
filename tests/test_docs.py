"""README and docs: every code block runs, every command exists, every link leads somewhere.

Blocks by language: `python` runs in order in one namespace per page; `console` runs each `$ rlkernel …` line and must
print what stands below it (`...` stands for any lines); `bash` runs `rlkernel` and `python` commands and checks that
others (make, pip, git) name things that exist; `toml` must parse, and a `[rlkernel]` table must validate.
Three pages run in environments of their own: docs/write-a-backend.md in tests/test_new_backend_page.py,
docs/start/vendor.md and docs/judge.md in tests/test_newcomer.py. A notebook's cells must print what is committed below
them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

import rlkernel as rlk
from rlkernel.cli import main
from rlkernel.config import validated
from rlkernel_core.reasons import CODES

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\((?P<target>[^)#]+)(?:#[^)]*)?\)")
# Run elsewhere: the first two install what they write, a judge is slow enough once.
INSTALLING = [ROOT / "docs" / page for page in ("write-a-backend.md", "start/vendor.md", "judge.md")]
NAMES = [str(p.relative_to(ROOT)) for p in PAGES]
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
# Take minutes or the network; what they name is checked instead.
NOT_RUN = {"pip", "git", "cd", "make", "export", "pytest"}
SLOW = (
    "rlkernel demo",
    "rlkernel conformance mutants",
    "rlkernel bench run --size full",
    "rlkernel conformance table",
    "rlkernel conformance run torch --op group_filter --profile standard",  # test_conformance_parts runs such parts
    "rlkernel conformance run acme --op acme_relu2 --manifest acme_relu2:backend",  # test_brought_operators runs it
    "python tools",
    "python docs",
    "python examples",
    "python -m pytest --pyargs",  # test_conformance_plugin runs it
)


PROSE = sorted([*PAGES, ROOT / "SECURITY.md", *(ROOT / "backends").glob("*/README.md")])
# Sentences that pages once had, and turns of phrase that readers had to read twice.
UNCLEAR = (
    "a silent fallback is not slow",
    "held to, clause by clause",
    "backend that is about this device",
    "a line a clause on standard error",
    "nothing is taken that cannot be done",
    "in a version that does not do",
    "is to be had",
    "and nothing else does",
    "cannot be had by cheating",
    "divide one by the other",
    "that lacks any",
    "held against",
    "was held to",
    "worth having",
    "cry wolf",
    "stand in line",
    "owes",
    "in vain",
    "whoever",
)


@dataclass(frozen=True)
class Block:
    language: str
    options: dict[str, str]
    code: str


def blocks(page: Path) -> list[Block]:
    found = []
    for fence in FENCE.finditer(page.read_text()):
        language, *rest = fence["info"].split() or [""]
        found.append(Block(language, dict(r.partition("=")[::2] for r in rest), fence["code"]))
    return found


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty folder to work in, and a fresh process state."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    rlk.refresh()
    yield folder
    rlk.configure()
    rlk.refresh()


@pytest.mark.parametrize("page", [p for p in PAGES if p not in INSTALLING], ids=lambda p: str(p.relative_to(ROOT)))
def test_every_block_runs(page, project) -> None:
    namespace: dict[str, object] = {"__name__": "docs"}
    for i, block in enumerate(blocks(page)):
        if "file" in block.options:
            (project / block.options["file"]).write_text(block.code)
        elif block.language == "python":
            exec(compile(block.code, f"{page.name}[{i}]", "exec"), namespace)  # our own docs
        elif block.language == "console":
            for command, expected in sessions(block.code):
                assert_printed(run(command, project), expected)
        elif block.language == "bash":
            for command in block.code.replace("\\\n", " ").splitlines():
                shell(command.partition("#")[0].strip(), project)
        elif block.language == "toml":
            table = tomllib.loads(block.code).get("rlkernel")
            if table is not None:
                validated(table, page.name, {*rlk.policy.known_names(rlk.policy.installed()), "acme"})
        else:
            assert block.language in {"text", "json", "make", "yaml", ""}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.name)
def test_every_cell_of_a_notebook_prints_what_stands_below_it(notebook, project) -> None:
    namespace: dict[str, object] = {"__name__": "notebook"}
    cells = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    assert cells
    for i, cell in enumerate(cells):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{notebook.name}[{i}]", "exec"), namespace)  # our own docs
        assert printed.getvalue() == "".join(line for out in cell["outputs"] for line in out["text"])
        assert cell["execution_count"] == i + 1  # in order, from a fresh kernel


def sessions(code: str) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for line in code.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line.rstrip())
    return found


def assert_printed(printed: str, expected: list[str]) -> None:
    lines = [line.rstrip() for line in printed.splitlines()]
    if "..." not in expected:
        assert lines == expected or not expected
        return
    at = 0
    for line in (e for e in expected if e != "..."):
        assert line in lines[at:]
        at = lines.index(line, at) + 1


def run(command: str, folder: Path) -> str:
    words = shlex.split(command)
    assert words[0] in {"rlkernel", "python"}, command
    if words[0] == "rlkernel":
        return run_here(words[1:])
    done = subprocess.run(
        [sys.executable, *words[1:]],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def run_here(words: list[str]) -> str:
    """A command in this process, which has imported torch already, as if it were a new one."""
    rlk.refresh()
    printed, told = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(told),
    ):
        patch.setenv("COLUMNS", "200")
        warnings.simplefilter("default")
        try:
            main(words)
            code = 0
        except SystemExit as end:
            code = end.code
    assert not code, f"rlkernel {' '.join(words)}\n{printed.getvalue()}{told.getvalue()}"
    return printed.getvalue()


def shell(command: str, project: Path) -> None:
    if not command:
        return
    words = shlex.split(command)
    if command.startswith(SLOW):
        known = run(" ".join([*words[:2], "--help"]) if words[0] == "rlkernel" else "python -c ''", project)
        assert all(w in known for w in words[2:] if w.startswith("--")) or words[0] == "python"
    elif words[0] in {"rlkernel", "python"}:
        run(command, project)
    else:
        assert words[0] in NOT_RUN, command
        if words[0] == "make":
            targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert set(words[1:]) <= set(targets), command
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for named in re.findall(r"(?:rlkernel|\.)\[([a-z,]+)\]", command):
            assert set(named.split(",")) <= set(extras), command


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_to_a_file(page) -> None:
    prose = FENCE.sub("", page.read_text())
    targets = [m["target"] for m in LINK.finditer(prose) if "://" not in m["target"]]
    assert [t for t in targets if not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_no_cell_of_a_table_is_longer_than_a_line(page) -> None:
    rows = [line for line in FENCE.sub("", page.read_text()).splitlines() if line.startswith("|")]
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    shown = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).replace("`", "").strip() for cell in cells]
    assert [cell for cell in shown if len(cell) > 79 and "$" not in cell] == []  # tests/test_site.py measures formulas


@pytest.mark.parametrize("page", PROSE, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_is_in_plain_words(page) -> None:
    prose = " ".join(FENCE.sub("", page.read_text()).lower().split())
    assert [said for said in UNCLEAR if re.search(rf"\b{re.escape(said)}", prose)] == []


def test_every_page_stands_in_the_navigation_of_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r"(?:: |- )(\S+(?:\.md|/))$", nav, re.MULTILINE)
    own = [p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")]
    others = [
        f"{kind}/{p.parent.name}.md" for kind in ("examples", "backends") for p in ROOT.glob(f"{kind}/*/README.md")
    ]
    folders = tuple(name for name in named if name.endswith("/"))
    assert [page for page in [*own, *others] if page not in named and not page.startswith(folders)] == []
    made = {"index.md", "changelog.md", "contributing.md", "security.md"}  # by docs/site.py
    generated = re.compile(r"reference/.*")  # by docs/reference.py
    assert [n for n in named if n not in {*own, *others, *made, *folders} and not generated.match(n)] == []
    assert len(named) == len(set(named))


def test_every_reason_code_is_explained() -> None:
    page = (ROOT / "docs" / "reasons.md").read_text()
    assert [code for code in sorted(CODES) if f"`{code}`" not in page] == []
