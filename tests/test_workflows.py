"""What GitHub runs and shows: valid by its schemas, and true to the Makefile, the distributions and their versions."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import rlkernel_core
from tests.distributions import FOLDERS, ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((GITHUB / "workflows").glob("*.yml"))}
JOBS = {(name, job): body for name, flow in WORKFLOWS.items() for job, body in flow["jobs"].items()}
STEPS = [(*where, step) for where, body in JOBS.items() for step in body.get("steps", [])]
USES = [step["uses"] for *_, step in STEPS if "uses" in step] + [b["uses"] for b in JOBS.values() if "uses" in b]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PROJECTS = {p["name"]: p for f in FOLDERS for p in [tomllib.loads((f / "pyproject.toml").read_text())["project"]]}


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", sorted((GITHUB / "workflows").glob("*.yml"))),
        ("github-issue-forms", [f for f in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) if f.stem != "config"]),
        ("github-issue-config", [GITHUB / "ISSUE_TEMPLATE" / "config.yml"]),
        ("dependabot", [GITHUB / "dependabot.yml"]),
        ("citation-file-format", [ROOT / "CITATION.cff"]),
    ],
)
def test_files_are_valid_by_their_schema(schema, files) -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    argv = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, files)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dockerfiles_have_no_finding() -> None:
    tool = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if tool is None:
        pytest.skip("hadolint is not installed")
    argv = [tool, "--config", str(ROOT / ".hadolint.yaml"), *map(str, DOCKERFILES)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert done.stdout + done.stderr == ""
    assert done.returncode == 0


def test_every_action_is_pinned_by_version_and_the_same_everywhere() -> None:
    foreign = {use for use in USES if not use.startswith("./")}
    assert [
        u for u in foreign if not re.fullmatch(r"[\w./-]+@v\d+(\.\d+){0,2}|docker://[\w./-]+:\d+\.\d+\.\d+", u)
    ] == []
    names = [use.partition("@")[0] for use in foreign]
    assert sorted(set(names)) == sorted(names)


def test_every_make_target_that_is_run_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    run = [line for *_, step in STEPS for line in step.get("run", "").splitlines()]
    asked = {
        word for line in run if line.startswith("make ") for word in line.split()[1:] if re.fullmatch("[a-z]+", word)
    }
    assert {"check", "test", "hosts", "site", "wheelhouse", "fresh"} <= asked
    assert asked - targets == set()


def test_every_file_that_is_named_exists() -> None:
    named = {use for use in USES if use.startswith("./")}
    named |= {f"docker/{one['name']}.Dockerfile" for one in JOBS["images", "image"]["strategy"]["matrix"]["include"]}
    named |= {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    for path in DOCKERFILES:
        named |= set(re.findall(r"\./backends/\w+", path.read_text()))
    for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml"):
        named |= set(re.findall(r"\bdocs/[\w./-]+\.md|\b[A-Z]+\.md", path.read_text()))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    assert {path.name for path in DOCKERFILES} == {Path(n).name for n in named if n.endswith(".Dockerfile")}


def test_what_a_wheel_is_built_of_reaches_the_images() -> None:
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    lacking = [p for p in build["packages"] if not any(f"{p}/".startswith(f"{one}/") for one in sent)]
    assert lacking == []


def test_every_job_ends_by_itself() -> None:
    assert [where for where, body in JOBS.items() if "uses" not in body and "timeout-minutes" not in body] == []


def test_a_job_may_write_only_what_its_work_needs() -> None:
    assert [name for name, flow in WORKFLOWS.items() if "write" in str(flow.get("permissions"))] == []
    assert [name for name, flow in WORKFLOWS.items() if "permissions" not in flow] == []  # the default may write
    written = {
        where: [k for k, v in body.get("permissions", {}).items() if v == "write"] for where, body in JOBS.items()
    }
    assert {where: sorted(what) for where, what in written.items() if what} == {
        ("images", "image"): ["packages"],
        ("release", "rlkernel"): ["id-token"],
        ("release", "portable"): ["id-token"],
        ("release", "backends"): ["id-token"],
        ("release", "github"): ["contents"],
        ("site", "publish"): ["id-token", "pages"],
    }


def test_a_distribution_is_published_with_attestations_after_those_that_it_pins() -> None:
    jobs = WORKFLOWS["release"]["jobs"]
    published: dict[str, str] = {}
    for name, body in jobs.items():
        uploads = [step for step in body["steps"] if step.get("uses", "").startswith("pypa/gh-action-pypi-publish@")]
        for step in uploads:
            assert step["with"] == {
                "packages-dir": "upload",
                "attestations": True,
            }  # the publisher is trusted: no token
            assert body["environment"]["name"] == "pypi"
        if uploads:
            rows = body.get("strategy", {}).get("matrix", {}).get("include", [{"project": name, "files": name}])
            assert [row["files"] for row in rows] == [row["project"].replace("-", "_") for row in rows]
            published |= {row["project"]: name for row in rows}
    assert set(published) == set(PROJECTS) - {"rlkernel-template"}  # a third party's

    def before(job: str) -> set[str]:
        needs = jobs[job].get("needs", [])
        direct = {needs} if isinstance(needs, str) else set(needs)
        return direct.union(*(before(one) for one in direct))

    for name, job in published.items():
        asked = [Requirement(text).name for text in PROJECTS[name]["dependencies"]]
        late = [one for one in asked if one in published and published[one] not in before(job)]
        assert late == [], name
        assert "build" in before(job)


def test_each_minor_version_of_torch_from_the_oldest_on_is_tried_every_week() -> None:
    tried = [Version(text) for text in JOBS["weekly", "torch"]["strategy"]["matrix"]["torch"]]
    oldest = next(Requirement(r) for r in PROJECTS["rlkernel"]["optional-dependencies"]["cpu"] if r.startswith("torch"))
    assert JOBS["weekly", "conformance"]["strategy"] == JOBS["weekly", "torch"]["strategy"]
    assert JOBS["weekly", "conformance"]["with"]["profile"] == "quick"
    (floor,) = [Version(one.version) for one in oldest.specifier]
    assert [v.minor for v in tried] == list(range(floor.minor, tried[-1].minor + 1))
    ours = re.search(r"^TORCH +\?= torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert Version(ours[1]) in tried
    assert WORKFLOWS["conformance"][True]["workflow_call"]["inputs"]["torch"]["default"] == str(
        oldest
    )  # yaml: `on` is true


def test_each_supported_python_is_tried() -> None:
    named = [c.rpartition(" ")[2] for c in PROJECTS["rlkernel"]["classifiers"] if re.search(r"Python :: \d\.\d+$", c)]
    assert JOBS["tests", "test"]["strategy"]["matrix"]["python"] == named


def test_citation_and_the_line_for_third_parties_name_this_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == rlkernel_core.__version__
    called = re.findall(r"conformance\.yml@v([\d.]+)", (GITHUB / "workflows" / "conformance.yml").read_text())
    assert called == [rlkernel_core.__version__]


def test_all_projects_of_ours_name_the_same_repository() -> None:
    urls = {name: project.get("urls") for name, project in PROJECTS.items() if name != "rlkernel-template"}
    assert {str(one) for one in urls.values()} == {str(PROJECTS["rlkernel"]["urls"])}
    repository = PROJECTS["rlkernel"]["urls"]["Homepage"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["repository-code"] == repository
