"""Four users get through README and the first pages, in an environment of their own and without a network."""

from __future__ import annotations

import pytest

from tests.environments import made
from tests.newcomer import USERS, left_out, steps


@pytest.mark.parametrize("user", USERS)
def test_every_command_that_a_user_types_does_what_the_page_says(user, tmp_path) -> None:
    done = list(steps(user, made(tmp_path)))
    assert [step.command for step in done if not step.left_out] != []
    assert {step.left_out for step in done} <= {"", "network", "CI", "docs", "before"}


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("pip install -e '.[cpu]'", ""),
        ("pip install -e '.[cuda]' -e backends/triton", ""),
        ("pip install torch --index-url https://download.pytorch.org/whl/cpu", "network"),
        ("pip install trl==1.16.0", "network"),
        ("make demo", "network"),
        ("make test", "CI"),
        ("rlkernel doctor", ""),
    ],
)
def test_what_is_left_out_without_a_network_is_what_fetches(command, why) -> None:
    assert left_out(command, offline=True) == why
