"""Public operators show their own arguments: at run time, in the file for editors, and in an editor."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path

import pytest

import rlkernel as rlk
from rlkernel_core.spec import OPERATORS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_a_public_operator_has_the_signature_of_its_record(op) -> None:
    spec = OPERATORS[op]
    assert inspect.signature(getattr(rlk, op)) == spec.signature
    assert list(spec.parameters) == list(inspect.signature(spec.record).parameters)


def test_the_file_for_editors_is_what_the_records_say() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "signatures.py"))
    assert made["FILE"].read_text() == made["text"](), "run python tools/signatures.py"


@pytest.mark.parametrize("op", sorted(OPERATORS))
@pytest.mark.parametrize("call", ["", ".bind"])
def test_an_editor_shows_the_arguments(op, call) -> None:
    jedi = pytest.importorskip("jedi")
    project = jedi.Project(ROOT, added_sys_path=[str(ROOT), str(ROOT / "registry")])
    (found,) = jedi.Script(f"import rlkernel as rlk\nrlk.{op}{call}(", project=project).get_signatures()
    shown = [p.name for p in found.params if p.name != "*"]
    assert shown == list(OPERATORS[op].parameters)


def test_an_editor_knows_what_a_call_returns() -> None:
    jedi = pytest.importorskip("jedi")
    project = jedi.Project(ROOT, added_sys_path=[str(ROOT), str(ROOT / "registry")])
    names = [c.name for c in jedi.Script("import rlkernel\nrlkernel.logprob(1, 2).", project=project).complete()]
    assert {"logprob", "lse", "entropy"} <= set(names)
