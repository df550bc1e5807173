"""A fixture of every test, which tests go first, and how often garbage is looked for."""

import gc

import pytest

# Thousands of collected tests are millions of objects, which Python's own thresholds look through over and over.
gc.set_threshold(100_000, 20, 100)

# Tens of seconds a test: begun last, one process would work alone at the end.
LONGEST = (
    "test_kernels_interpreted.py",
    "test_emulated.py",
    "test_new_backend_page.py",
    "test_newcomer.py",
    "test_demo.py",
    "test_new_backend_installed.py",
    "test_release.py",
    "test_aot_recordings.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first; all others stay in their order."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="module", autouse=True)
def older_objects_are_frozen() -> None:
    """Garbage collection within a module skips older objects: thousands of collected tests are millions of them."""
    gc.collect()
    gc.freeze()
