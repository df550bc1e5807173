"""A fixture of every test."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def older_objects_are_frozen() -> None:
    """Garbage collection within a module skips older objects: thousands of collected tests are millions of them."""
    gc.collect()
    gc.freeze()
