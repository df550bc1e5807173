"""Two runs, workload by workload: what got slower, larger or wrong, beyond a threshold and beyond the noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlkernel_bench.evidence import Present
from rlkernel_bench.results import best
from rlkernel_core.errors import ConfigError

_TIMED = frozenset({"measured", "coarse"})


@dataclass(frozen=True)
class Change:
    """One candidate on one workload, before and after."""

    where: str  # "logprob 8192x128256 bfloat16 forward: triton"
    what: str  # "graph", "times_ruler", "memory" or "status"
    old: str
    new: str
    ratio: float | None  # new over old
    verdict: str  # "slower", "faster", "same", "larger", "broken", "mended", "gone", "new"
    older: str = ""  # "old", "new" or both: which of the two is of other sources than those of now

    @property
    def regressed(self) -> bool:
        """Something that a change must not do unnoticed."""
        return self.verdict in {"slower", "larger", "broken", "gone"}


def compare(old: Mapping[str, Any], new: Mapping[str, Any], threshold: float) -> list[Change]:
    """Every candidate of the two runs; peers are compared too, as a check on the machine, and never regress.

    Compute-bound workloads are compared by their ratio to the ruler, since the card's clock is not the code's.

    Args:
        old: results.
        new: results on the same device.
        threshold: share above which a difference counts, if the quartiles do not overlap either.

    Raises:
        ConfigError: the runs are of different devices.
    """
    names = [content["environment"].get("device_name") for content in (old, new)]
    kinds = [content["device"].partition(":")[0] for content in (old, new)]
    if names[0] != names[1] or kinds[0] != kinds[1]:
        raise ConfigError(
            f"the runs are of different devices, {names[0]!r} and {names[1]!r}: times say nothing; "
            "compare runs of one machine"
        )
    before, after = dict(_backends(old)), dict(_backends(new))
    present = Present(new["device"])
    changes: list[Change] = []
    for key in sorted({*before, *after}):
        where = f"{key[0]} {key[1]} {key[2]}: {key[3]}"
        sides = {"old": before.get(key), "new": after.get(key)}
        older = " and ".join(side for side, c in sides.items() if c is not None and present.older({"op": key[1]}, c))
        if key not in after or key not in before:
            verdict = "gone" if key not in after else "new"
            one = before.get(key) or after[key]
            changes.append(Change(where, "status", *_sides(verdict, str(one["status"])), None, verdict, older))
        else:
            changes += [replace(c, older=older) for c in _changes(where, before[key], after[key], threshold)]
    return changes


def _sides(verdict: str, status: str) -> tuple[str, str]:
    return (status, "absent") if verdict == "gone" else ("absent", status)


def _backends(content: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, str, str], Mapping[str, Any]]]:
    for result in content["results"]:
        for c in result["candidates"]:
            if c["kind"] == "backend":
                yield (result["suite"], result["op"], result["work"], c["name"]), c


def _changes(where: str, old: Mapping[str, Any], new: Mapping[str, Any], threshold: float) -> Iterator[Change]:
    was, now = old["status"], new["status"]
    if was != now:
        verdict = "broken" if now not in _TIMED else "mended" if was not in _TIMED else "same"
        yield Change(where, "status", was, now, None, verdict)
    if was not in _TIMED or now not in _TIMED:
        return
    pair = _comparable(old, new)
    if pair is not None:
        what, a, b = pair
        ratio = b["median"] / a["median"] if a["median"] else 1.0
        apart = a["high"] < b["low"] if ratio > 1 else b["high"] < a["low"]
        verdict = "same"
        if apart and abs(ratio - 1) > threshold:
            verdict = "slower" if ratio > 1 else "faster"
        yield Change(where, what, f"{a['median']:.4g}", f"{b['median']:.4g}", ratio, verdict)
    sizes = [c.get("memory", {}).get("extra_bytes") for c in (old, new)]
    if None not in sizes and sizes[1] > sizes[0] * (1 + threshold) + (1 << 20):
        yield Change(where, "memory", f"{sizes[0]} B", f"{sizes[1]} B", sizes[1] / max(1, sizes[0]), "larger")


def _comparable(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[str, Mapping[str, float], Mapping[str, float]] | None:
    """The same figure of both: the ratio to the ruler, else the figure that both are known by."""
    if _numbered("times_ruler", old, new):
        return "times_ruler", old["times_ruler"], new["times_ruler"]
    a, b = best(old), best(new)
    if a is None or b is None:
        return None
    if a[0] == b[0]:
        return a[0], a[1], b[1]
    return ("eager", old["eager"], new["eager"]) if _numbered("eager", old, new) else None


def _numbered(how: str, *both: Mapping[str, Any]) -> bool:
    """Whether a figure is a number in both; it may be a message, or absent."""
    return all("median" in (c.get(how) or {}) for c in both)
