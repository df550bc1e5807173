"""ranks: operators that several GPUs of one host take part in, through NCCL; on a CPU through gloo.

A world is W ranks, each a process (`rlkernel_bench.rank`), launched once for all of its rows. A rank checks before it
times: the median over rounds of the slowest rank, with what its call takes in memory. A world that has no GPU for each
rank is refused; a world of one says what a group costs beside none.

    collective    all-reduce of so many numbers: what the model of docs/scale.md is made of
    split head    linear_logprob with the vocabulary split over the ranks, beside plain torch as Megatron-style trainers
                  write it, and beside the same kernel on a rank's part without a group
    split loss    that, and policy_loss, forward and backward
    update        data parallel: group statistics over all ranks, each rank's loss, the sum of the head's gradients
    draw          sampling from a split vocabulary, by candidates and by gathered logits
    graph         that draw in a captured function, and an all-reduce in one

Legend: W ranks · N tokens · D hidden · V vocabulary · B rows.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

import torch

from rlkernel_bench.candidates import Candidate, named
from rlkernel_bench.work import Inputs, Judgment, Outputs, Problem, Work

LIMIT_S: Final = 180  # of a world
WAYS: Final[Mapping[str, Mapping[str, str]]] = {  # task -> way -> whether a backend or a peer does it
    "collective": {"torch": "peer"},
    "split head forward": {"ours": "backend", "torch": "peer", "without a group": "backend"},
    "split head forward+backward": {"ours": "backend", "torch": "peer", "without a group": "backend"},
    "split loss": {"ours": "backend"},
    "update": {"ours": "backend", "without the sum of gradients": "backend"},
    "draw": {"gathered": "backend", "candidates": "backend"},
    "graph": {"ours": "backend"},
}
LAWS: Final[Mapping[str, Mapping[str, Any]]] = {
    "no filter": {"raw_logprob": True},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "min-p 0.05, kept ids": {"min_p": 0.05, "kept_capacity": 64},
    "top-p 0.999, flat": {"top_p": 0.999, "temperature": 3.0},  # more than is sent as candidates
}


def _work(task: str, op: str, sizes: Mapping[str, int], dtype: str, why: str = "", **options: str) -> Work:
    said = {"processes": 1, **options}
    return Work("ranks", op, sizes, dtype, task, said, clock="process", why=why)


def _world(W: int, N: int, D: int, V: int, B: int, width: int, dtype: str) -> tuple[Work, ...]:
    head = {"W": W, "N": N, "D": D, "V": V}
    reduced = {"gradient of hidden states": N * D, "gradient of a head": V * D, "8 numbers": 8}
    return (
        *(_work("collective", "", {"W": W, "n": n}, "float32", why) for why, n in reduced.items()),
        *(_work(f"split head {t}", "linear_logprob", head, dtype) for t in ("forward", "forward+backward")),
        _work("split loss", "linear_logprob,policy_loss", head, dtype),
        _work("update", "advantage,linear_policy_loss", head, dtype, "8 completions a prompt"),
        *(_work("draw", "sample", {"W": W, "B": B, "V": width}, "float32", law=law) for law in LAWS),
        _work("graph", "sample,capture", {"W": W, "B": B, "V": width}, "float32", law="top-k 50, top-p 0.95"),
    )


WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": _world(2, 48, 32, 1000, 8, 4000, "float32"),
    "full": tuple(w for W in (1, 2, 4, 8) for w in _world(W, 8192, 4096, 128256, 64, 151936, "bfloat16")),
}


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""

    def judge(_given: Inputs, _want: None, found: Outputs) -> dict[str, Judgment]:
        return {"result": Judgment(found["error"], found["over"], found["over"])}

    return Problem(work, lambda _: {}, {}, lambda _: None, judge)


def candidates(problem: Problem, device: str, use: Sequence[str], against: Sequence[str] | None) -> list[Candidate]:
    """The ways that a world knows, all of them timed in one world."""
    work = problem.work
    there = torch.cuda.device_count() if device.startswith("cuda") else work.sizes["W"]
    refused = {"status": "refused", "message": f"needs {work.sizes['W']} GPUs, there are {there}"}
    lacking = refused if there < work.sizes["W"] else {}
    name, found = ",".join(named(use)) if use else "auto", []

    def run(way: str, _given: Inputs) -> Outputs:
        return said_of(work, world(_size_of(work), work.sizes["W"], device.partition(":")[0], tuple(use)))[way]

    for way, kind in WAYS[work.task].items():
        if kind == "backend" or against is None or way in against:
            said = way if kind == "peer" else name if way == "ours" else f"{name}:{way}"
            call = None if lacking else partial(run, way)
            found.append(Candidate(said, kind, torch.__version__, call, **lacking, ran="H200, torch 2.11"))
    return found


def _size_of(work: Work) -> str:
    return next(size for size, rows in WORKS.items() if any(row.name == work.name for row in rows))


def said_of(work: Work, lines: Mapping[str, dict[str, Any]]) -> dict[str, Outputs]:
    """What a world said of a row: of each way milliseconds, peak_bytes, error, and that over what is allowed.

    Raises:
        RuntimeError: the row failed, or the world ended before it.
    """
    found = lines.get(work.name, {"failed": lines["ended"]["failed"]})
    if "failed" in found:
        raise RuntimeError(f"a world of {work.sizes['W']} ranks: {found['failed']}")
    return found


@cache
def world(size: str, W: int, device: str, order: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Every row of a world of W ranks, in one launch: name of the row -> what was said; under `ended`, how it ended."""
    rows = [
        {"name": w.name, "task": w.task, "sizes": dict(w.sizes), "dtype": w.dtype, "law": w.options.get("law")}
        for w in WORKS[size]
        if w.sizes["W"] == W
    ]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(W)]
    command = [sys.executable, *launch, "-m", "rlkernel_bench.rank", device, ",".join(order), json.dumps(rows)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)  # noqa: S603
        said, ended = done.stdout, done.stderr[-600:]
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        ended = f"out of time after {LIMIT_S} s"
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return {**{line["name"]: line["said"] for line in found}, "ended": {"failed": ended}}
