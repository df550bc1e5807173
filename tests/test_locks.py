"""What CI and the images install: pinned by version and digest, what distributions ask for, used where it is said."""

from __future__ import annotations

import importlib.util
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.distributions import FOLDERS, ROOT

_SPEC = importlib.util.spec_from_file_location("lock", ROOT / "tools" / "lock.py")
lock = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(lock)

PROJECTS = {p["name"]: p for f in FOLDERS for p in [tomllib.loads((f / "pyproject.toml").read_text())["project"]]}
DOCKERFILES = {p.name.partition(".")[0]: p.read_text() for p in sorted((ROOT / "docker").glob("*.Dockerfile"))}
ENVIRONMENT = {"python_full_version": "3.12.0", "python_version": "3.12", "platform_system": "Linux"}
ENVIRONMENT |= {"sys_platform": "linux", "platform_machine": "x86_64", "os_name": "posix", "extra": ""}


def entries(name: str) -> list[str]:
    """The packages of a lock, each with its digests, as one line."""
    text = "\n".join(
        line for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines() if line[:1] != "#"
    )
    return text.replace("\\\n", " ").splitlines()


def pinned(name: str) -> dict[str, str]:
    """Package -> version, on Linux with Python 3.12."""
    found = [Requirement(entry.partition("--hash")[0].strip()) for entry in entries(name)]
    here = [r for r in found if r.marker is None or r.marker.evaluate(ENVIRONMENT)]
    return {canonicalize_name(r.name): next(iter(r.specifier)).version for r in here}


def asked(text: str) -> list[Requirement]:
    """What a distribution of ours asks for with these extras, and what ours among them ask for in turn."""
    wanted = Requirement(text)
    project = PROJECTS[wanted.name]
    own = [*project["dependencies"], *(r for e in wanted.extras for r in project["optional-dependencies"][e])]
    found = [Requirement(r) for r in own]
    return [r for r in found if r.name not in PROJECTS] + [
        s for r in found if r.name in PROJECTS for s in asked(str(r))
    ]


def test_each_lock_is_written_by_the_tool_and_each_file_is_one_of_its() -> None:
    assert {p.stem for p in (ROOT / "requirements").iterdir()} == set(lock.LOCKS)


@pytest.mark.parametrize("name", lock.LOCKS)
def test_every_package_has_one_version_and_digests(name) -> None:
    form = re.compile(r"[a-z0-9-]+==\S+( ; [^\\]+?)?( +--hash=sha256:[0-9a-f]{64})+")
    assert [entry for entry in entries(name) if not form.fullmatch(entry.rstrip())] == []


@pytest.mark.parametrize("name", lock.LOCKS)
def test_a_lock_holds_what_is_asked_for_in_a_version_that_will_do(name) -> None:
    made = lock.LOCKS[name]
    wants = [
        r for text in made.wants for r in (asked(text) if Requirement(text).name in PROJECTS else [Requirement(text)])
    ]
    have = pinned(name)
    lacking = [
        str(r)
        for r in wants
        if (r.marker is None or r.marker.evaluate(ENVIRONMENT))
        and not re.fullmatch(made.without, r.name)
        and not (r.name in have and r.specifier.contains(have[r.name]))
    ]
    assert lacking == [], "run `make lock`"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_installs_by_digest_from_the_clone_or_from_the_index_of_torch(name) -> None:
    lines = DOCKERFILES[name].replace("\\\n", " ")
    installs = re.findall(r"pip (?:install|wheel) [^&\n]+", lines)
    kinds = {"--require-hashes", "--no-index", "--no-build-isolation", '--index-url "$TORCH_INDEX"'}
    assert [one for one in installs if not any(kind in one for kind in kinds)] == []
    assert f"source=requirements/{name}.txt" in lines
    assert ("torch" in pinned(name)) == (name == "cuda")


def test_the_image_of_the_judge_has_the_torch_that_is_tested() -> None:
    assert f'--index-url "$TORCH_INDEX" {lock._torch()} ' in DOCKERFILES["judge"]


def test_tests_and_releases_install_by_digest() -> None:
    flows = [(ROOT / ".github/workflows" / f"{name}.yml").read_text() for name in ("tests", "release")]
    runs = [line for flow in flows for line in re.findall(r"run: (make (?:check|test).*)", flow)]
    assert len(runs) == 3
    assert [run for run in runs if not run.endswith(" LOCK=requirements/ci.txt")] == []


def test_packages_that_break_with_a_major_version_are_bounded_from_above() -> None:
    every = [Requirement(r) for p in PROJECTS.values() for r in p["dependencies"]]
    every += [
        Requirement(r) for p in PROJECTS.values() for rs in p.get("optional-dependencies", {}).values() for r in rs
    ]
    open_above = {r.name for r in every if not any(s.operator in {"<", "=="} for s in r.specifier)}
    assert {"pydantic", "hypothesis", "triton", "flashinfer-python", "transformers", "trl"} & open_above == set()
