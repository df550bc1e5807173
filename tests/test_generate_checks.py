"""Rows of a rollout that would draw the same tokens."""

from __future__ import annotations

import pytest

import rlkernel as rlk
from rlkernel.nn.generate_checks import check_siblings

PROMPTS = [[1, 2], [3], [1, 2]]


def test_equal_prompts_with_one_seed_are_refused_by_their_rows() -> None:
    with pytest.raises(rlk.ArgumentError, match="^seeds: .*same tokens from equal prompts; got 7 for rows 0 and 2"):
        check_siblings("seeds", PROMPTS, [7, 8, 7])


@pytest.mark.parametrize("seeds", [[7, 7, 8], [7, 8, 9]])
def test_equal_prompts_with_seeds_of_their_own_and_others_that_share_one_are_taken(seeds) -> None:
    check_siblings("seeds", PROMPTS, seeds)
