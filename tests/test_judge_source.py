"""Static checks before anything of a candidate runs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel_judge.source import FORBIDDEN, MAX_BYTES, read
from tests.judged import RIGHT


def codes(text: str, op: str = "logprob") -> set[tuple[str, int]]:
    return {(f.code, f.line) for f in read(text.encode(), op).findings}


def test_a_right_candidate_is_read_without_complaint() -> None:
    reading = read(RIGHT.encode(), "logprob")
    assert (reading.fault, reading.forbidden, reading.claims, reading.dtypes) == (None, (), frozenset(), ())


@pytest.mark.parametrize(
    "data, fault, words",
    [
        (b"x" * (MAX_BYTES + 1), "rejected", "at most"),
        (b"\x7fELF\x00\x00\xff\xfe", "rejected", "binary"),
        (b"def logprob(logits, ids): return 1\0", "rejected", "zero byte"),
        (b"def logprob(logits, ids:\n", "syntax_error", "line 1"),
        (b"(" * 9999, "syntax_error", "line 1"),
        (b"-" * 200_000 + b"1", "rejected", "cannot be parsed"),
        (b"def other(): ...", "rejected", "no function named 'logprob'"),
        (b"async def logprob(logits, ids): ...", "rejected", "async"),
        (b"def logprob(logits): ...", "rejected", "lacks the parameter 'ids'"),
        (b"def logprob(logits, ids, blocks): ...", "rejected", "needs 'blocks'"),
        (b"def logprob(logits, ids, /): ...", "rejected", "must take keywords"),
        (b"def logprob(call, blocks): ...", "rejected", "needs 'blocks'"),
        (b"def logprob(call, logits): ...", "rejected", "needs 'logits'"),
        (b"def logprob(ids, call): ...", "rejected", "lacks the parameter 'logits'"),
        (b"CLAIMS = {'grd'}\ndef logprob(logits, ids): ...", "rejected", "did you mean 'grad'"),
        (b"CLAIMS = set(dir())\ndef logprob(logits, ids): ...", "rejected", "literal set"),
        (b"DTYPES = ('int4',)\ndef logprob(logits, ids): ...", "rejected", "unknown dtype 'int4'"),
    ],
)
def test_what_is_no_candidate_is_refused_with_the_reason(data, fault, words) -> None:
    reading = read(data, "logprob")
    assert (reading.fault, words in reading.message) == (fault, True), reading.message


@pytest.mark.parametrize(
    "text",
    [
        "def logprob(logits, ids): ...",
        "def logprob(logits, ids, *, temperature=1.0, block=128): ...",
        "def logprob(*, ids, logits): ...",
        "def logprob(**given): ...",
        "def logprob(call): ...",
        "def logprob(call, /): ...",
        "from rlkernel_core.spec.logprob import LogprobCall\ndef logprob(call: LogprobCall, *, block=128): ...",
        "from x import kernel\nlogprob = kernel",
    ],
)
def test_every_way_to_name_the_function_is_taken(text) -> None:
    assert read(text.encode(), "logprob").fault is None


def test_claims_are_read_without_running_the_source() -> None:
    text = 'CLAIMS = ["grad", "entropy"]\nDTYPES = {"bfloat16"}\nraise SystemExit\ndef logprob(logits, ids): ...\n'
    reading = read(text.encode(), "logprob")
    assert (reading.claims, reading.dtypes) == ({"grad", "entropy"}, ("bfloat16",))


@pytest.mark.parametrize(
    "line",
    [
        "import subprocess",
        "import socket as s",
        "from ctypes import string_at",
        "import rlkernel.dispatch",
        "from rlkernel_torch.logprob import logprob as right",
        "import os; os.fork()",
        "from os import execv as go",
        "import os as o; o._exit(0)",
        "import sys; sys._getframe(1)",
        "from inspect import stack",
        "import inspect; inspect.stack()",
        "import gc",
        "eval('1')",
        "__import__('os')",
        "import torch; torch.empty = None",
        "import time; time.perf_counter = lambda: 0",
        "import torch; setattr(torch.cuda.Event, 'elapsed_time', None)",
        "import torch; torch.Tensor.__eq__ = None",
    ],
)
def test_what_a_kernel_has_no_use_for_is_told_with_its_line(line) -> None:
    reading = read(f"\n{line}\ndef logprob(logits, ids): ...\n".encode(), "logprob")
    assert {f.line for f in reading.forbidden} == {2}, reading.findings


def test_a_result_class_of_the_contract_is_no_forbidden_import() -> None:
    text = "from rlkernel_core.spec.logprob import LogprobResult\nimport os, sys, inspect, torch\n"
    assert read((text + "x = torch.empty(3)\ndef logprob(logits, ids): ...").encode(), "logprob").forbidden == ()


def test_plain_torch_is_told_apart_from_a_kernel() -> None:
    kernel = "import triton\n@triton.jit\ndef k(x): ...\n"
    inline = "from torch.utils.cpp_extension import load_inline\nm = load_inline('m', '', functions=['f'])\n"
    plain = "def logprob(logits, ids): ...\n"
    assert [("no_kernel", 0) in codes(t + plain) for t in ("", kernel, inline)] == [True, False, False]


def test_streams_lazy_tensors_and_caught_exceptions_are_noted() -> None:
    text = (
        "import torch\n"
        "s = torch.cuda.Stream()\n"
        "class L(torch.Tensor): ...\n"
        "def logprob(logits, ids):\n"
        "    try: return 1\n"
        "    except Exception: return 2\n"
    )
    assert codes(text) == {("stream", 2), ("lazy", 3), ("swallows", 6), ("no_kernel", 0)}


@settings(deadline=None, derandomize=True)
@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(data) -> None:
    assert read(data, "whiten").fault in {None, "rejected", "syntax_error"}


def test_every_forbidden_name_has_its_reason() -> None:
    assert [name for name, why in FORBIDDEN.items() if not why] == []
