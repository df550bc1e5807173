"""Kernel tests run on a GPU, or in Triton's interpreter where TRITON_INTERPRET=1; elsewhere none is collected."""

import os
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from rlkernel_triton.interpreted import backend as interpreted
from tests.interpreted import language_replaced_once_a_launch

__all__ = ["language_replaced_once_a_launch"]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_ignore_collect(collection_path, config):
    """Nothing here runs without a GPU or the interpreter; test_kernels_interpreted.py runs it in a child."""
    return None if INTERPRETED or torch.cuda.is_available() else collection_path.suffix == ".py"


def pytest_collection_modifyitems(items):
    """SHARE=2/4: of four shares the one with the tests 2, 6, 10 ...; tests of the same processes count as one."""
    share, _, shares = os.environ.get("SHARE", "0/1").partition("/")
    units = {}
    for item in items:
        units.setdefault(item.path if "ranks" in item.fixturenames else item.nodeid, []).append(item)
    items[:] = [item for unit in list(units.values())[int(share) :: int(shares)] for item in unit]


@pytest.fixture(scope="session")
def device():
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def kernels_run():
    """Calls of operators reach the kernels and nothing else."""
    import rlkernel as rlk
    from rlkernel import policy
    from rlkernel_triton import backend

    manifest = interpreted if INTERPRETED else backend
    here = nullcontext() if manifest.name in policy.installed() else rlk.registered(manifest)
    with here, rlk.use(manifest.name, fallback="error"):
        yield


@pytest.fixture(autouse=True)
def silent_arithmetic():
    """Under the interpreter numpy would warn of every infinity; kernels mean IEEE arithmetic."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
