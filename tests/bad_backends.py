"""Backends that tests of the isolation plant, beside the suite's own hostile ones. Each serves logprob@1."""

from __future__ import annotations

import os
import time

from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.spec.logprob import LogprobCall
from rlkernel_torch.logprob import logprob as right


def backend(name: str) -> Backend:
    requires = Requires(device="cpu", dtypes=("float32",))
    impl = Impl(op="logprob@1", target=f"tests.bad_backends:{name}", requires=requires)
    return Backend(name=f"bad-{name.replace('_', '-')}", api=API_VERSION, impls=(impl,))


def bad(function):
    globals()[f"{function.__name__}_manifest"] = backend(function.__name__)
    return function


@bad
def hangs(call: LogprobCall):
    while True:
        time.sleep(0.1)


@bad
def leaves(call: LogprobCall):
    os._exit(0)
    return right(call)


@bad
def goes_on_in_a_child(call: LogprobCall):
    os.fork()
    return right(call)


@bad
def works(call: LogprobCall):
    return right(call)
