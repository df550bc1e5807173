"""backends/template as a wheel in a fresh environment: listed, refused until it is named, true to its claims."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from tests.environments import Environment, environment

__all__ = ["environment"]
TEMPLATE = Path(__file__).parents[1] / "backends" / "template"


@pytest.fixture(scope="module")
def installed(environment: Environment) -> Environment:
    source = environment.folder / "template"
    shutil.copytree(TEMPLATE, source)
    environment.run("pip", "wheel", str(source), "--wheel-dir", "dist")
    environment.run("pip", "install", str(wheel(environment)))
    shutil.rmtree(source / "rlkernel_template")  # what its tests import is what was installed
    return environment


def wheel(environment: Environment) -> Path:
    (found,) = (environment.folder / "dist").glob("*.whl")
    return found


def test_its_wheel_holds_its_package_and_its_licence(installed) -> None:
    with zipfile.ZipFile(wheel(installed)) as archive:
        names = archive.namelist()
    assert {n.partition("/")[0] for n in names} == {"rlkernel_template", "rlkernel_template-0.1.0.dist-info"}
    assert "rlkernel_template-0.1.0.dist-info/licenses/LICENSE" in names


def test_it_is_listed_without_being_imported(installed) -> None:
    rows = {row["name"]: row for row in json.loads(installed.run("rlkernel", "backends", "--json").stdout)}
    assert (rows["template"]["kind"], rows["template"]["state"]) == ("third party", "not loaded")


def test_loaded_it_is_ready(installed) -> None:
    rows = {r["name"]: r for r in json.loads(installed.run("rlkernel", "backends", "--load", "--json").stdout)}
    assert (rows["template"]["state"], rows["template"]["operators"]) == (
        "ready",
        ["advantage@1", "logprob@1", "whiten@1"],
    )


def test_its_own_tests_pass_and_every_clause_of_its_claims(installed) -> None:
    said = installed.run("pytest", "-v", cwd=installed.folder / "template").stdout
    claimed = ("LP-11 mask selects", "LP-13 gradient", "AD-11 a constant group", "WH-05 masked values", "test_choice")
    assert [c for c in claimed if not re.search(rf"{c}.* PASSED", said)] == []
    assert re.search("LP-10 softcap before temperature.* SKIPPED", said)


def test_without_its_device_the_clauses_are_skipped_and_the_reason_is_said(installed) -> None:
    installed.run("rlkernel", "new-backend", "far", "--op", "whiten", "--device", "far")
    installed.run("pip", "install", "./rlkernel-far")
    said = installed.run("pytest", "-rs", cwd=installed.folder / "rlkernel-far").stdout
    assert re.search(r"SKIPPED \[\d+\] .*no device of type far here", said)
    assert " 3 passed" in said
