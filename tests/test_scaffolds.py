"""A format, a host and an operator are added to a copy of the packages, in the places that CONTRIBUTING names, and run.

A backend is scaffolded by `rlkernel new-backend`: tests/test_new_backend.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("rlkernel_core", "registry/rlkernel", "backends/common/rlkernel_common", "backends/torch/rlkernel_torch")

CODEC = '''"""Signs: a code is the sign of a weight, a scale the mean size of a row; w' = scale or -scale."""

from __future__ import annotations

import torch


class Signs:
    def storage(self, spec, shape):
        return {"codes": (shape, torch.bool), "scale": ((shape[0],), torch.float32)}

    def constants(self, spec):
        return {}

    def encode_(self, parts, weight, spec):
        parts["codes"].copy_(weight < 0)
        parts["scale"].copy_(weight.float().abs().mean(-1))

    def decode(self, parts, spec, shape, start, stop):
        scale = parts["scale"][start:stop, None]
        return torch.where(parts["codes"][start:stop], -scale, scale)

    def error_bound(self, parts, weight, spec):
        return (weight.abs() - parts["scale"][:, None]).abs().double()


CODEC = Signs()
'''

INTEGRATION = '''"""Acme: the log-probabilities of its trainer through `rlkernel.logprob`, for a block."""

from rlkernel.integrations.host import Host, Symbol, replaced

SCORE = Symbol("acme_trainer", "score", "logits, ids")
HOST = Host("acme", "acme-trainer", ">=2,<3", "2.1", "logprob under its trainer, inside a block", (SCORE,))


def enabled(*, force=False):
    def make(_, calls):
        def score(logits, ids):
            import rlkernel as rlk

            calls["logprob"] += 1
            return rlk.logprob(logits, ids).logprob

        return score

    return replaced(HOST, SCORE, make, force=force)
'''

SPEC = '''"""scale_rewards@1: y = factor * x. Imports no torch."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from rlkernel_core import checks
from rlkernel_core.spec.form import DETERMINISTIC, Clause, Feature, OpCall, OpSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False)
class ScaleRewardsCall(OpCall["Tensor"]):
    """Rewards times a factor.

    Args:
        rewards: [B].
        factor: what they are multiplied with.
    """

    rewards: Tensor
    _: KW_ONLY
    factor: float = 1.0


def check(call: ScaleRewardsCall) -> None:
    checks.tensor("rewards", call.rewards, ndim=1, kind="floating")
    checks.number("factor", call.factor)


SPEC = OpSpec(
    name="scale_rewards",
    record=ScaleRewardsCall,
    summary="rewards times a factor",
    primary="rewards",
    check=check,
    features=(DETERMINISTIC, Feature("factor", "another factor than 1")),
    clauses=(Clause("XR-01", "matches float64", "y is factor * x", "accuracy"),),
)
'''


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of the core, the registry and the backend `torch`."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def insert(file: Path, behind: str, line: str) -> None:
    """One line behind another in a file."""
    text = file.read_text()
    assert text.count(behind) == 1
    file.write_text(text.replace(behind, behind + line))


def said(copy: Path, code: str) -> str:
    """What code prints that imports the packages of the copy."""
    environ = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", f"import torch, rlkernel as rlk\n{code}"]
    done = subprocess.run(command, cwd=copy, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


FORMAT_RUNS = """
from rlkernel_core.spec import OPERATORS
weight, x = torch.randn(32, 64), torch.randn(3, 64)
with rlk.use("torch"):
    w = rlk.quantize(weight, "{name}")
    dense = rlk.dequantize(w)
    assert torch.allclose(rlk.qmatmul(x, w), x @ dense.T, atol=1e-4)
    again = rlk.QuantTensor.from_state_dict(w.state_dict())
assert again.same_bits(w)
from rlkernel_core.quant import error_bound
assert ((weight - dense).abs() <= error_bound(w, weight)).all()
print(all("format:{name}" in OPERATORS[op].feature_names for op in ("quantize", "dequantize", "prepack", "qmatmul")))
"""


def test_a_format_of_a_known_codec_is_one_row(copy) -> None:
    row = 'Format(QuantSpec("q4l_g16", "int4", group=16, scale_rule="absmax/7.5"), _GRID, "a scale per 16 columns"),'
    insert(copy / "rlkernel_core/quant/spec.py", "        *(_table(*row) for row in _TABLES),\n", f"        {row}\n")
    assert said(copy, FORMAT_RUNS.format(name="q4l_g16")) == "True"


def test_a_format_of_its_own_codec_is_one_row_and_one_module(copy) -> None:
    row = 'Format(QuantSpec("sign", "sign"), "rlkernel_core.quant.signs:CODEC", "a bit a weight, a scale per row"),'
    insert(copy / "rlkernel_core/quant/spec.py", "        *(_table(*row) for row in _TABLES),\n", f"        {row}\n")
    (copy / "rlkernel_core/quant/signs.py").write_text(CODEC)
    assert said(copy, FORMAT_RUNS.format(name="sign")) == "True"


def test_a_host_is_one_module_and_its_name(copy) -> None:
    (copy / "rlkernel/integrations/acme.py").write_text(INTEGRATION)
    insert(copy / "rlkernel/integrations/__init__.py", '    "vllm_quant",\n', '    "acme",\n')
    (copy / "acme_trainer.py").write_text("def score(logits, ids):\n    return None\n")
    (copy / "acme_trainer-2.1.dist-info").mkdir()
    (copy / "acme_trainer-2.1.dist-info/METADATA").write_text("Name: acme-trainer\nVersion: 2.1\n")
    code = """
import acme_trainer
from rlkernel.integrations import acme, hosts
logits, ids = torch.zeros(1, 2), torch.tensor([0])
with acme.enabled() as entry:
    inside = acme_trainer.score(logits, ids).item()
print(f"{inside:.2f}", acme_trainer.score(logits, ids), entry, [h.supported for h in hosts() if h.name == "acme"])
"""
    assert said(copy, code) == "-0.69 None acme 2.1: acme_trainer.score (logprob x1) [True]"


def test_an_operator_is_a_spec_and_an_implementation_of_the_backend_torch(copy) -> None:
    (copy / "rlkernel_core/spec/scale_rewards.py").write_text(SPEC)
    insert(
        copy / "rlkernel_core/spec/__init__.py",
        '    "whiten": "whiten:SPEC",\n',
        '    "scale_rewards": "scale_rewards:SPEC",\n',
    )
    (copy / "rlkernel_torch/scale_rewards.py").write_text(
        "def scale_rewards(call):\n    return call.rewards * call.factor\n"
    )
    row = '"scale_rewards": ("rlkernel_torch.scale_rewards:scale_rewards", _FLOATS, frozenset()),'
    insert(
        copy / "rlkernel_torch/__init__.py",
        '    "capture": ("rlkernel_torch.capture:capture", _ANY, frozenset()),\n',
        f"    {row}\n",
    )
    code = """
with rlk.use("torch"):
    print(rlk.scale_rewards(torch.ones(2), factor=3.0).tolist(), *rlk.last_decision("scale_rewards").call.features)
    try:
        rlk.scale_rewards(torch.ones(2), factor="much")
    except rlk.ArgumentError as error:
        print(error.argument)
"""
    assert re.split(r"\n", said(copy, code)) == ["[3.0, 3.0] factor", "factor"]
