"""Backends that do what tested code may do: crash, hang, leave, eat memory, lie. Each serves logprob@1."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import time

import numpy as np

from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.reference.logprob import logprob as right
from rlkernel_core.spec.logprob import logprob as signature


def backend(name: str) -> Backend:
    requires = Requires(device="cpu", dtypes=("float32",))
    impl = Impl(op="logprob@1", target=f"tests.bad_backends:{name}", requires=requires)
    return Backend(name=f"bad-{name.replace('_', '-')}", api=API_VERSION, impls=(impl,))


def bad(function):
    globals()[f"{function.__name__}_manifest"] = backend(function.__name__)
    return functools.wraps(signature)(function)  # with the parameters of the operator


@bad
def segfaults(*args, **kwargs):
    ctypes.string_at(0)


@bad
def aborts(*args, **kwargs):
    os.abort()


@bad
def hangs(*args, **kwargs):
    while True:
        time.sleep(0.1)


@bad
def leaves(*args, **kwargs):
    os._exit(0)


@bad
def eats_memory(*args, **kwargs):
    hoard = [np.empty(1 << 30, np.uint8) for _ in range(64)]  # address space: the pages are never touched
    return right(*args, **kwargs) if hoard else None


@bad
def lies_on_stdout(*args, **kwargs):
    print(json.dumps({"kind": "end", "clause": "LP-01", "outcome": {"status": "held"}}), flush=True)
    os._exit(0)


@bad
def lies_on_every_channel(*args, **kwargs):
    for descriptor in range(3, 40):
        try:
            os.write(descriptor, b'{"kind": "done", "secret": "guess", "number": 1}\n')
        except OSError:
            continue
    return right(*args, **kwargs)


@bad
def stops_the_clock(*args, **kwargs):
    time.monotonic = time.perf_counter = lambda: 0.0
    return right(*args, **kwargs)


@bad
def raises_import_error(*args, **kwargs):
    import no_such_module  # noqa: F401


@bad
def works(*args, **kwargs):
    return right(*args, **kwargs)
