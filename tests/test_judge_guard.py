"""An implementation of ours is refused to a candidate by every route; one process tries them all."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rlkernel_judge.guard import our_functions

ARMED = """
import importlib, importlib.util, json, sys
from pathlib import Path
import torch
from rlkernel_core.spec.logprob import LogprobCall
from rlkernel_judge.guard import Guard
home = Path(importlib.util.find_spec("rlkernel_torch").origin).parent
text = next(iter(home.rglob("logprob.py"))).read_text()
functions, routes = json.load(sys.stdin)
Guard(functions).arm()
said = {}
for name, route in routes.items():
    try:
        exec(route)
    except ImportError as error:
        said[name] = str(error)
    else:
        said[name] = ""
print(json.dumps(said))
"""
ROUTES = {
    "import": "import rlkernel_torch",
    "importlib": "importlib.import_module('rlkernel_core.' + 'definitions.logprob')",
    "a codec": "from rlkernel_core.quant import quantize",
    "the front door": "import rlkernel; rlkernel.logprob(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))",
    "its file": "(home / 'direct.py').read_text()",
    "its text from elsewhere": "exec(compile(text, 'mine', 'exec'))",
}
TYPES = "from rlkernel_core.quant import FORMATS, QuantSpec, QuantTensor; from rlkernel_core.spec import sample"


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What the guard says to each route; nothing where it lets it pass."""
    given = json.dumps([our_functions(), {**ROUTES, "types": TYPES}])
    done = subprocess.run([sys.executable, "-c", ARMED], input=given, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("route", ROUTES)
def test_no_route_leads_to_an_implementation_of_ours(said, route) -> None:
    assert "not for a candidate" in said[route]


def test_what_arguments_and_results_are_made_of_may_be_used(said) -> None:
    assert said["types"] == ""
