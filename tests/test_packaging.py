"""The built wheel holds what it should, declares no torch, and works where no clone is."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from rlkernel.plugin_template import Plugin, files
from tests.distributions import ROOT, build

TEXTS = ROOT / "registry" / "rlkernel" / "plugin_template" / "files"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    (made,) = build([ROOT], tmp_path_factory.mktemp("dist"))
    return made.wheel


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith("/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_it_holds_its_packages_and_nothing_else(wheel) -> None:
    roots = {n.partition("/")[0] for n in names(wheel)}
    assert {r for r in roots if not r.endswith(".dist-info")} == {
        "rlkernel",
        "rlkernel_core",
        "rlkernel_common",
        "rlkernel_torch",
        "rlkernel_conformance",
        "rlkernel_judge",
        "rlkernel_bench",
    }
    assert {n for n in names(wheel) if n.startswith("rlkernel_core") and n.endswith(".py")} == {
        str(p.relative_to(ROOT)) for p in (ROOT / "rlkernel_core").rglob("*.py")
    }


def test_it_is_typed_and_licensed(wheel) -> None:
    assert {"rlkernel_core/py.typed", "rlkernel/py.typed"} <= names(wheel)
    assert any(n.endswith("licenses/LICENSE") for n in names(wheel))


def test_torch_is_an_extra_and_never_a_dependency(wheel) -> None:
    required = metadata(wheel).get_all("Requires-Dist")
    assert [r for r in required if r.startswith(("torch", "triton", "numpy")) and "extra ==" not in r] == []
    assert any(r.startswith("torch") and "extra == 'cpu'" in r for r in required)


def test_it_works_from_another_folder(wheel, tmp_path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True)
    code = (
        "import torch, rlkernel as rlk\n"
        "rlk.logprob(torch.zeros(2, 3), torch.tensor([0, 1]))\n"
        "print(rlk.__file__, rlk.last_decision('logprob').backend)"
    )
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path, env=env
    )
    assert done.stdout.split() == [str(site / "rlkernel" / "__init__.py"), "torch"]


def test_it_writes_a_new_plugin_from_its_own_texts(wheel, tmp_path) -> None:
    command = [sys.executable, "-m", "rlkernel", "new-backend", "acme"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(wheel)})
    folder = tmp_path / "rlkernel-acme"
    written = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}
    assert written == files(Plugin("acme"))
    assert {n for n in names(wheel) if n.startswith("rlkernel/plugin_template/files/")} == {
        f"rlkernel/plugin_template/files/{p.relative_to(TEXTS)}" for p in TEXTS.rglob("*") if p.is_file()
    }
