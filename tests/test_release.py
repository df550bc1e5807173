"""Every distribution: built twice to the same bytes, complete, and installed with the others in a new environment."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import rlkernel_core
from rlkernel.discover import FIRST_PARTY
from rlkernel_cuda import fa3, flashinfer
from rlkernel_triton.launchers import triton_abi
from tests.distributions import FOLDERS, ROOT, Built, build
from tests.environments import Environment, environment, without_rlkernel
from tools.index import write

__all__ = ["environment"]
PROJECTS = [tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in FOLDERS]
NAMES = [project["name"] for project in PROJECTS]


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> dict[str, Built]:
    """Every distribution of the clone; that for Jetson with the kernels of one operator, as all take minutes."""
    folders = {folder.name: folder for folder in FOLDERS}
    folders["jetson"] = tmp_path_factory.mktemp("copy") / "jetson"
    shutil.copytree(
        ROOT / "backends" / "jetson", folders["jetson"], ignore=shutil.ignore_patterns("bundles", "__pycache__")
    )
    bundle = folders["jetson"] / "rlkernel_jetson" / "bundles" / "jetson.zip"
    asked = f"['sm_87', 'sm_110'], ['prepack'], out={str(bundle)!r}, jobs=1"
    code = f"from rlkernel_triton.aot.command import build; build({asked})"
    path = os.pathsep.join([str(ROOT / "backends" / "triton"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(NAMES, build(list(folders.values()), tmp_path_factory.mktemp("dist")), strict=True))


def metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_second_build_from_the_sdists_has_the_same_bytes(dist, tmp_path) -> None:
    folders = [one.unpacked(tmp_path / "src") for one in dist.values()]  # other paths, other times of files
    with zipfile.ZipFile(dist["rlkernel-jetson"].wheel) as archive:  # compiled kernels are in no sdist
        bundle = next(n for n in archive.namelist() if n.endswith("jetson.zip"))
        archive.extract(bundle, folders[NAMES.index("rlkernel-jetson")])
    again = dict(zip(NAMES, build(folders, tmp_path / "dist", TZ="Asia/Tokyo", PYTHONHASHSEED="1"), strict=True))
    for name, one in dist.items():
        assert digest(one.wheel) == digest(again[name].wheel), name
        assert digest(one.sdist) == digest(again[name].sdist), name


def test_the_time_of_a_release_is_that_of_its_files(tmp_path) -> None:
    folder = next(f for f in FOLDERS if f.name == "template")
    (made,) = build([folder], tmp_path, SOURCE_DATE_EPOCH="1700000000")
    with zipfile.ZipFile(made.wheel) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(2023, 11, 14, 22, 13, 20)}


@pytest.mark.parametrize("project", PROJECTS, ids=NAMES)
def test_a_distribution_says_what_it_is(dist, project) -> None:
    one = dist[project["name"]]
    told = metadata(one.wheel)
    assert (told["Name"], told["Version"], told["License-Expression"]) == (
        project["name"],
        project["version"],
        "Apache-2.0",
    )
    assert told["Description-Content-Type"] == "text/markdown"
    assert told.get_payload().strip()  # the page on a package index
    with zipfile.ZipFile(one.wheel) as archive:
        inside = archive.namelist()
    assert [n for n in inside if n.endswith("licenses/LICENSE")]
    assert [n for n in inside if "/tests/" in n or n.endswith((".pyc", ".orig")) or "__pycache__" in n] == []
    pinned = [r for r in told.get_all("Requires-Dist") or [] if r.startswith("rlkernel") and "extra ==" not in r]
    third_party = project["name"] == "rlkernel-template"
    assert [r for r in pinned if not third_party and not r.endswith(f"=={rlkernel_core.__version__}")] == []


@pytest.mark.parametrize(
    ("extra", "brought"),
    [
        ("", set()),
        ("[cpu]", {"torch", "numpy"}),
        ("[triton]", {"rlkernel-triton", "torch", "triton"}),
        ("[cuda]", {"rlkernel-cuda", "rlkernel-triton", "torch", "triton", "flashinfer-python"}),
        ("[fa3]", {"rlkernel-cuda", "rlkernel-triton", "torch", "triton", "fa3-fwd"}),
        ("[rocm]", {"rlkernel-rocm", "rlkernel-triton"}),  # neither torch nor Triton, nor what PyPI calls aiter
        ("[jetson]", {"rlkernel-jetson", "rlkernel-triton"}),
    ],
)
def test_an_extra_brings_a_backend_and_what_it_needs(extra, brought) -> None:
    found: set[str] = set()
    waiting = [Requirement(f"rlkernel{extra}")]
    while waiting:
        wanted = waiting.pop()
        found.add(wanted.name)
        if wanted.name in NAMES:
            project = PROJECTS[NAMES.index(wanted.name)]
            extras = project.get("optional-dependencies", {})
            waiting += map(Requirement, [*project["dependencies"], *(r for e in wanted.extras for r in extras[e])])
    assert found - {"rlkernel", *(Requirement(r).name for r in PROJECTS[0]["dependencies"])} == brought


def test_our_distributions_pin_each_other_to_this_version() -> None:
    ours = [p for p in PROJECTS if p["name"] != "rlkernel-template"]  # a third party's takes newer ones
    tables = [[*p["dependencies"], *chain(*p.get("optional-dependencies", {}).values())] for p in ours]
    asked = [Requirement(text) for text in chain(*tables) if Requirement(text).name in NAMES]
    assert {str(one.specifier) for one in asked} == {f"=={rlkernel_core.__version__}"}


def test_every_requirement_of_triton_ends_with_the_newest_version_that_launches_know() -> None:
    newest = max(triton_abi.FORMS)
    tables = [[*p["dependencies"], *chain(*p.get("optional-dependencies", {}).values())] for p in PROJECTS]
    asked = [Requirement(text) for text in chain(*tables) if Requirement(text).name == "triton"]
    assert len(asked) == 3  # dev, rlkernel-triton[cuda], rlkernel-cuda
    for one in asked:
        assert one.specifier.contains(f"{newest[0]}.{newest[1]}.9")
        assert not one.specifier.contains(f"{newest[0]}.{newest[1] + 1}.0")
        assert str(one.marker) == 'platform_system == "Linux"'


def test_the_extra_cuda_asks_for_the_flashinfer_that_its_backend_takes() -> None:
    asked = [Requirement(text) for text in PROJECTS[0]["optional-dependencies"]["cuda"]]
    (library,) = [one for one in asked if one.name == "flashinfer-python"]
    assert library.specifier == Requirement(flashinfer.NEEDED).specifier
    assert str(library.marker) == 'platform_system == "Linux"'


def test_the_extra_fa3_asks_for_the_flashattention_that_its_backend_takes() -> None:
    asked = [Requirement(text) for text in PROJECTS[0]["optional-dependencies"]["fa3"]]
    (library,) = [one for one in asked if one.name == "fa3-fwd"]
    assert library.specifier == Requirement(fa3.NEEDED).specifier


@pytest.fixture(scope="module")
def wheelhouse(dist) -> Path:
    """What `make wheelhouse` makes, and in the place of FlashInfer's 62 MB a wheel that has its name and version."""
    folder = next(iter(dist.values())).wheel.parent
    about = "flashinfer_python-0.7.2.dist-info"
    with zipfile.ZipFile(folder / "flashinfer_python-0.7.2-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.7.2\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    write(folder)
    return folder


@pytest.mark.parametrize(
    ("extra", "hidden", "place", "brought"),
    [
        ("cpu", (), ("--device", "cpu"), []),
        # What `triton` brings comes with `cuda` too.
        ("cuda", (), ("--device", "cuda", "--arch", "sm90", "--dtype", "bfloat16"), ["cuda", "triton"]),
        # Where no triton can be found, pip would fail for one that asks for it.
        ("rocm", ("triton",), ("--device", "cuda", "--arch", "gfx942", "--dtype", "bfloat16"), ["rocm", "triton"]),
        ("jetson", ("triton",), ("--device", "cuda", "--arch", "sm87", "--dtype", "bfloat16"), ["jetson", "triton"]),
    ],
)
def test_an_extra_installs_from_the_wheelhouse_and_its_commands_run(
    wheelhouse, tmp_path, extra, hidden, place, brought
) -> None:
    made = without_rlkernel(tmp_path, *hidden)
    made.run("pip", "install", f"--find-links={wheelhouse}", f"rlkernel[{extra}]")
    assert "\n0 problem(s), 0 warning(s)" in made.run("rlkernel", "doctor").stdout
    rows = json.loads(made.run("rlkernel", "backends", "--json").stdout)
    here = {row["name"] for row in rows if row["state"] != "not installed"}
    assert {name for name in FIRST_PARTY if name in here} == {*brought, "torch"}
    said = made.run("rlkernel", "explain", "linear_logprob", *place).stdout
    assert re.findall(r"^  YES +(\S+)", said, re.MULTILINE) == [*brought, "torch"][:1]


def test_pip_installs_from_its_index_and_compares_digests(wheelhouse, tmp_path) -> None:
    made = without_rlkernel(tmp_path, "triton")
    index = (wheelhouse / "simple").as_uri()
    made.run("pip", "install", "--dry-run", f"--index-url={index}", "rlkernel[rocm]")
    page = wheelhouse / "simple" / "rlkernel-rocm" / "index.html"
    page.write_text(page.read_text().replace("#sha256=", "#sha256=0"))
    said = made.run("pip", "install", "--dry-run", f"--index-url={index}", "rlkernel[rocm]", expected=1)
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in said.stderr


def test_all_of_them_installed_work(dist, environment: Environment) -> None:
    environment.run("pip", "install", *(str(one.wheel) for one in dist.values()))
    rows = {row["name"]: row for row in json.loads(environment.run("rlkernel", "backends", "--json").stdout)}
    known = {name for project in PROJECTS for name in project.get("entry-points", {}).get("rlkernel.backends", {})}
    assert known <= set(rows)
    strange = {name for name, row in rows.items() if row["kind"] == "third party"}
    states = {n: row["state"] for n, row in rows.items()}
    assert {n: states[n] for n in strange} == {"template": "not loaded"}
    assert {states[n] for n in rows if n not in strange} <= {"ready", "no device", "environment/missing-package"}
    assert {n for n, state in states.items() if state.startswith("environment/")} <= {"aiter", "fa3", "flashinfer"}
    assert states["torch"] == "ready"
    code = """
import importlib.metadata as md, pathlib, sys, torch, rlkernel as rlk
logits, ids = torch.randn(2, 5), torch.tensor([0, 1])
with rlk.use("template"):
    own = rlk.logprob(logits, ids).logprob
assert rlk.last_decision("logprob").backend == "template"
torch.testing.assert_close(own, rlk.logprob(logits, ids).logprob)
print(sorted({str(md.distribution(d).version) for d in sys.argv[1:]}), pathlib.Path(rlk.__file__).parents[1])
"""
    said = environment.run("python", "-c", code, *NAMES).stdout.split("] ")
    assert said[0] == f"['{rlkernel_core.__version__}'"
    assert Path(said[1].strip()).is_relative_to(environment.python.parents[1])  # not the clone
    environment.run("rlkernel", "explain", "logprob", "--device", "cuda", "--arch", "sm90", "--dtype", "bfloat16")
    (bundle,) = environment.python.parents[1].rglob("rlkernel_jetson/bundles/jetson.zip")
    listed = json.loads(environment.run("rlkernel", "aot", "list", str(bundle), "--json").stdout)
    assert listed["targets"] == {"sm_87": ["cubin", "ptx"], "sm_110": ["cubin"]}
    assert {row["kernel"] for row in listed["kernels"]} == {"rlkernel_triton.quant.dequantize_kernels:repack_kernel"}


def test_upgrade_notes_and_changelog_speak_of_this_version() -> None:
    version = rlkernel_core.__version__
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"## {version}" in (ROOT / "docs" / "upgrading.md").read_text()
    assert f"| {'.'.join(version.split('.')[:2])}" in (ROOT / "SECURITY.md").read_text()
