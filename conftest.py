"""What holds for every test of the repository."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def what_was_there_before() -> None:
    """Collections of garbage in a module look at its own objects: thousands of tests leave millions in a process."""
    gc.collect()
    gc.freeze()
