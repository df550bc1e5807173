"""The form of a file of results: what every reader of one may rely on.

The hash in it is against edits, and anyone can compute it: what a file says is looked at whole before it is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Final

from rlkernel_core.documents import formed
from rlkernel_core.errors import FileError

REMEDY: Final = "Write it with rlkernel bench run --out FOLDER."
_TEXT: Final = (str, None)
_NUMBER: Final = (float, None)
_SPREADS: Final = ("graph", "host", "process", "eager", "hot", "rested", "times_ruler")
_SPREAD: Final = (None, {"median?": float, "low?": float, "high?": float, "n?": int, "message?": str})
_RATES: Final = ("speedup_over_torch", "percent_of_floor", "gb_s", "tflop_s", "tokens_s")
_LEAST: Final = {"speedup_over_torch": 1e-30}  # a logarithm is taken of it
_CANDIDATE: Final = {
    **dict.fromkeys(("name", "kind", "status", "message"), str),
    "version": _TEXT,
    **{f"{name}?": _SPREAD for name in _SPREADS},
    **{f"{name}?": _NUMBER for name in _RATES},
    "errors?": {str: {"over": float}},
    "memory?": {"extra_bytes?": (int, None)},
    "goals?": (None, [{"number": float, "unit": str, "have": float, "met": bool}]),
    "sources?": {str: _TEXT},
}
_MEASURED: Final[Mapping[str, Any]] = {  # of a workload that has candidates
    "sizes": {str: float},
    "dtype": str,
    "task": str,
    "why": str,
    "clock": str,
    "ruler": _TEXT,
    "floor": {"us": float, "bytes": (str, int, float), "flops": (str, int, float)},
}
_RESULT: Final = {
    **dict.fromkeys(("suite", "op", "work"), str),
    "candidates": [_CANDIDATE],
    "message?": str,
    "status?": str,
    "gpu?": (None, {"sm_mhz": object, "watts": object, "throttled_by": object}),
    **{f"{name}?": form for name, form in _MEASURED.items()},
}
_CEILINGS: Final = {"copy": float, "read": float, "flops": {str: float}}
_ENVIRONMENT: Final = {
    **dict.fromkeys(("rlkernel", "python", "torch", "device_name"), str),
    "device_arch?": _TEXT,
    "device_driver?": (None, [_TEXT]),
}
_PLACE: Final = {"environment": _ENVIRONMENT, "ceilings": _CEILINGS}
FORM: Final = {
    **dict.fromkeys(("device", "size", "created", "hash"), str),
    **_PLACE,
    "devices?": (None, [_PLACE]),
    "suites": [str],
    "results": [_RESULT],
    "ended?": str,
}
_SUITE: Final = re.compile(r"\w[\w -]*")  # stands in the names of pictures


def checked(content: dict[str, Any], file: Path) -> dict[str, Any]:
    """Results whose parts are of the form, and whose numbers are such as a clock gives.

    Raises:
        FileError: one is not; the message has its place.
    """
    formed(content, FORM, file, REMEDY)
    for place, problem in _odd(content):
        raise FileError(file, place, problem, REMEDY)
    return content


def _odd(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What no run writes: place and problem."""
    for place in (content, *(content.get("devices") or ())):
        limits = place["ceilings"]
        if not limits["flops"] or any(
            not 0 < x < 1e30 for x in (limits["copy"], limits["read"], *limits["flops"].values())
        ):
            yield "ceilings", "must be numbers above 0, of a dtype at least"
    for i, result in enumerate(content["results"]):
        if problem := _odd_result(result):
            yield f"results[{i}]", problem
        for j, candidate in enumerate(result["candidates"]):
            for problem in _odd_numbers(candidate):
                yield f"results[{i}].candidates[{j}]", problem


def _odd_result(result: Mapping[str, Any]) -> str | None:
    lacking = [name for name in _MEASURED if name not in result]
    if not _SUITE.fullmatch(result["suite"]):
        return "has a suite that is no name"
    if lacking:
        return f"has no {', '.join(lacking)}" if result["candidates"] or not result.get("message") else None
    if not 0 <= result["floor"]["us"] < 1e30 or not all(map(_plain, result["sizes"].values())):
        return "has a floor or sizes that are none"
    return "names no size" if result["candidates"] and not result["sizes"] else None


def _odd_numbers(candidate: Mapping[str, Any]) -> Iterator[str]:
    for name in _SPREADS:
        spread = candidate.get(name) or {}
        numbers = [spread.get(part) for part in ("median", "low", "high")]
        if "median" in spread and (None in numbers or not all(0 < x < 1e30 for x in numbers)):
            yield f"{name} must have median, low and high, above 0"
    for name in _RATES:
        if candidate.get(name) is not None and not (_LEAST.get(name, 0.0) <= candidate[name] < 1e30):
            yield f"{name} must be a rate"
    goals = candidate.get("goals") or ()
    if not all(_plain(goal[part]) for goal in goals for part in ("number", "have")):
        yield "a goal must be a number"


def _plain(x: float) -> bool:
    return isfinite(x) and abs(x) < 1e30
