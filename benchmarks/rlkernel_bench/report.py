"""Results for people: Markdown tables, a summary by backend, and the same rows as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rlkernel_bench.evidence import Present
from rlkernel_bench.results import STATUSES, best

FAST_P: Final = (1.0, 1.5, 2.0)  # speed-ups over plain torch of which the share is given
COLUMNS: Final = (
    "suite", "op", "work", "candidate", "kind", "version", "status", "us", "low", "high", "n", "how", "eager_us",
    "hot_us", "rested_us", "times_ruler", "speedup_over_torch", "percent_of_floor", "gb_s", "tflop_s", "tokens_s",
    "extra_bytes",
    "worst_error_over_tolerance", "message", "older",
)  # fmt: skip
_HOW_TO_READ: Final = """Times are medians in microseconds with quartiles; `how` says whether a graph was replayed or
calls were made one by one. A result outside its tolerances has no time. `coarse` marks peers whose results miss the
spec's tolerances and keep within those of rounded logits, or whose draws are not the contract's. `older`: a backend's
sources of this operator were others then than now."""


def rows(contents: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row a candidate, flat, under COLUMNS."""
    for content in contents:
        present = Present(content["device"])
        for result in content["results"]:
            for c in result["candidates"]:
                how, spread = best(c) or ("", {})
                overs = [e["over"] for e in c.get("errors", {}).values()]
                yield {
                    **{k: result[k] for k in ("suite", "op", "work")},
                    "candidate": c["name"],
                    **{k: c[k] for k in ("kind", "version", "status", "message")},
                    "us": spread.get("median"),
                    **{k: spread.get(k) for k in ("low", "high", "n")},
                    "how": how,
                    **{f"{k}_us": (c.get(k) or {}).get("median") for k in ("eager", "hot", "rested")},
                    "times_ruler": (c.get("times_ruler") or {}).get("median"),
                    **{k: c.get(k) for k in ("speedup_over_torch", "percent_of_floor", "gb_s", "tflop_s", "tokens_s")},
                    "extra_bytes": c.get("memory", {}).get("extra_bytes"),
                    "worst_error_over_tolerance": max(overs) if overs else None,
                    "older": " ".join(present.older(result, c)),
                }


def as_csv(contents: Iterable[Mapping[str, Any]]) -> str:
    """The rows for spreadsheets."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(contents))
    return out.getvalue()


def summary(contents: list[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By backend and peer: workloads, share that is right, geometric mean and fast_p of the speed-up over plain torch.

    fast_p is the share of all workloads tried that are right and more than p times as fast; one that is wrong, or
    refused, counts as tried.
    """
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in rows(contents):
        if row["kind"] != "ruler" and row["status"] != "absent":
            by_name.setdefault(row["candidate"], []).append(row)
    out = {}
    for name, tried in by_name.items():
        compared = [
            r for r in tried if r["speedup_over_torch"] is not None or r["status"] not in {"measured", "coarse"}
        ]
        speeds = [r["speedup_over_torch"] for r in compared if r["speedup_over_torch"] is not None]
        right = sum(r["status"] == "measured" for r in tried)
        found: dict[str, float] = {"workloads": len(tried), "right": right, "compared": len(compared)}
        if speeds:
            found["geometric_mean"] = math.exp(sum(map(math.log, speeds)) / len(speeds))
            found |= {f"fast_{p:g}": sum(s > p for s in speeds) / len(compared) for p in FAST_P}
        out[name] = found
    return out


def markdown(contents: list[Mapping[str, Any]], plots: Iterable[str] = ()) -> str:
    """The report."""
    lines = [
        "# Benchmark",
        "",
        *(line for content in contents for line in _about(content)),
        "",
        _HOW_TO_READ,
        "",
        "| | workloads | right | compared | geometric mean | " + " | ".join(f"fast_{p:g}" for p in FAST_P) + " |",
        "|---" * (5 + len(FAST_P)) + "|",
    ]
    for name, found in summary(contents).items():
        cells = [_number(found.get(k)) for k in ("geometric_mean", *(f"fast_{p:g}" for p in FAST_P))]
        counts = [str(int(found[k])) for k in ("workloads", "right", "compared")]
        lines.append(f"| {name} | " + " | ".join([*counts, *cells]) + " |")
    lines += ["", *(f"![{Path(p).stem}]({p})" for p in plots)]
    for content in contents:
        present = Present(content["device"])
        for result in content["results"]:
            lines += _section(result, present)
    absent = sorted({(r["candidate"], r["message"]) for r in rows(contents) if r["status"] == "absent"})
    lines += ["", "## Not here", ""] if absent else []
    lines += [f"- {name}: {why}" for name, why in absent]
    return "\n".join(lines) + "\n"


def _about(content: Mapping[str, Any]) -> Iterator[str]:
    """Where and when a run was made, and what each of its devices could do then."""
    when = f"{', '.join(content['suites'])}: {content.get('measured', content['created'])}"
    for place in content.get("devices") or [content]:
        env, limits = place["environment"], place["ceilings"]
        driver = next((str(x) for x in (env.get("device_driver") or [])[1:] if x), "none")
        flops = ", ".join(f"{dtype} {rate / 1e12:.4g} TFLOP/s" for dtype, rate in limits["flops"].items())
        copy, read = (f"{limits[k] / 1e9:.4g} GB/s" for k in ("copy", "read"))
        yield f"- {when} on {env['device_name']}, driver {driver}, torch {env['torch']}, triton {env.get('triton')},"
        yield f"  Python {env['python']}, rlkernel {env['rlkernel']}, commit {env.get('commit') or 'unknown'}, source"
        yield f"  {env.get('source', 'unknown')}. Ceilings then: copy {copy}, read {read}, {flops}."


def _section(result: Mapping[str, Any], present: Present) -> list[str]:
    lines = ["", f"## {result['suite']}: {result['op']} {result['work']}", ""]
    if result.get("message"):
        return [*lines, f"{result.get('status', '')}: {result['message']}"]
    floor = result["floor"]
    about = [f"{result['why'][0].upper()}{result['why'][1:]}."] if result["why"] else []
    about += (
        [f"Floor {floor['us']:.4g} us: {floor['bytes']} bytes, {floor['flops']} operations."] if floor["us"] else []
    )
    state = result.get("gpu")
    about += [f"Card: {state['sm_mhz']} MHz, {state['watts']} W, {state['throttled_by']}."] if state else []
    lines += [" ".join(about), ""] if about else []
    ruler = result["ruler"] or "ruler"
    lines += [
        f"| | status | us | quartiles | how | eager | hot | rested | x {ruler} | % of floor | extra MiB | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for c in result["candidates"]:
        if c["status"] != "absent":
            lines.append(_line(c, older=bool(present.older(result, c))))
    speeds = [f"{c['name']} {c['tokens_s']:,.0f}" for c in result["candidates"] if c.get("tokens_s")]
    lines += ["", f"Tokens a second: {'; '.join(speeds)}."] if speeds else []
    for c in result["candidates"]:
        for goal in c.get("goals") or ():
            word = "met" if goal["met"] else "missed"
            lines.append(f"\nGoal {goal['number']:g} {goal['unit']}: {c['name']} {goal['have']:g}, {word}.")
    return lines


def _line(c: Mapping[str, Any], *, older: bool) -> str:
    how, spread = best(c) or ("", {})
    extra = c.get("memory", {}).get("extra_bytes")
    overs = [e["over"] for e in c.get("errors", {}).values()]
    cells = [
        (c["status"] if c["status"] in {"measured", "coarse"} else f"{c['status']}: {c['message']}")
        + ", older" * older,
        _number(spread.get("median")),
        f"{_number(spread['low'])}-{_number(spread['high'])}" if spread else "",
        how,
        *(_number((c.get(k) or {}).get("median")) for k in ("eager", "hot", "rested", "times_ruler")),
        _number(c.get("percent_of_floor")),
        _number(None if extra is None else extra / 2**20),
        _number(max(overs) if overs else None),
    ]
    seen = " (adapter never seen working before)" if c.get("adapter_ran") == "never" else ""
    return f"| {c['name']}{seen} | " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.4g}"


def legend() -> str:
    """What the statuses mean, a line each."""
    return "\n".join(f"{name:12} {text}" for name, text in STATUSES.items())
