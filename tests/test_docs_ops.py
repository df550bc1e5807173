"""Every operator has a page, and every one of its parameters is on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlkernel_core.spec import OPERATORS

PAGES = {path.stem: path.read_text() for path in (Path(__file__).parents[1] / "docs" / "ops").glob("*.md")}
# Operators that are documented on the page of the one they serve.
ON_PAGE = {
    "quantize": "qmatmul",
    "dequantize": "qmatmul",
    "prepack": "qmatmul",
    "whiten": "advantage",
    "group_filter": "advantage",
    "shape_rewards": "advantage",
}

# Operators whose arguments mean what they mean in others.
REFERS = {
    "linear_logprob": ("logprob",),
    "linear_policy_loss": ("policy_loss", "linear_logprob"),
    "lm_head_sample": ("sample", "linear_logprob"),
    "verify": ("sample",),
}


def test_every_page_is_about_an_operator() -> None:
    assert set(PAGES) == {ON_PAGE.get(operator, operator) for operator in OPERATORS}


@pytest.mark.parametrize("operator", OPERATORS)
def test_its_page_shows_a_call_of_it(operator) -> None:
    assert re.search(rf"\brlk\.{operator}\(", PAGES[ON_PAGE.get(operator, operator)])


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_parameter_is_on_the_page_or_on_one_that_it_refers_to(operator) -> None:
    code = code_of(operator)
    assert [name for name in OPERATORS[operator].parameters if not re.search(rf"\b{name}\b", code)] == []


def code_of(operator: str) -> str:
    """Everything in code on the operator's page, and on those that it links to for the meaning of its arguments."""
    own = ON_PAGE.get(operator, operator)
    code = " ".join(re.findall(r"```.*?```|`[^`\n]+`", PAGES[own], re.DOTALL))
    for other in REFERS.get(operator, ()):
        assert f"({other}.md" in PAGES[own]
        code += code_of(other)
    return code
