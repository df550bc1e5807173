"""trainers: a step as TRL and verl make it, by their own code and with rlkernel inside; time and memory.

    trl     a GRPO step of a random Qwen2 through `add_fused_lm_head`, as TRL's trainers call it, forward and backward.
            Ours takes the log-probabilities inside TRL and the loss from `policy_loss`; `fused` is head and loss in
            one, as in `grpo_trainer(fused=True)`.
    verl    what an actor does with the last hidden states of a batch, forward and backward: GRPO advantages, head with
            entropy, clipped loss with its metrics. `verl` is its Triton kernel on a GPU, `verl torch` its other one.

Their code runs as it is, in the versions that the adapters name; `trainers_trl` and `trainers_verl` are those. Loss and
gradients are held against stock's, log-probabilities against float64 on some rows.

Legend: B sequences · P tokens of a prompt · T tokens that are scored · L layers · D hidden · F feed-forward ·
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Final

import torch

from rlkernel import policy
from rlkernel.discover import PackageVersions
from rlkernel_bench.candidates import Candidate, claims, named, scope_of
from rlkernel_bench.gates import COARSE_ABSOLUTE, COARSE_RELATIVE, elementwise, frobenius
from rlkernel_bench.work import Inputs, Judgment, Outputs, Problem, Work

NEEDS: Final = {"trl": ("trl", "transformers", "accelerate"), "verl": ("verl",)}
ROWS: Final = 64  # held against float64
_LOSS: Final = 1e-2  # between losses of two ways to round


def _trl(B: int, P: int, T: int, L: int, D: int, F: int, V: int, dtype: str, why: str = "") -> Work:
    sizes = {"B": B, "P": P, "T": T, "L": L, "D": D, "F": F, "V": V}
    weights = "(L*(2*D*D + D*D//3 + 3*D*F))"  # a sixth of the heads for keys and values
    return Work(
        "trainers", "linear_logprob,policy_loss", sizes, dtype, "trl step", {"chain": "trl"},
        f"3*2*({weights} + V*D)", f"6*B*((P + T)*{weights} + T*V*D)", dtype, ruler="trl", why=why,
    )  # fmt: skip


def _verl(B: int, T: int, D: int, V: int, dtype: str, why: str = "") -> Work:
    return Work(
        "trainers", "linear_logprob,policy_loss,advantage", {"B": B, "T": T, "D": D, "V": V}, dtype, "verl update",
        {"chain": "verl"}, "2*(2*V*D + 2*B*T*D)", "3*2*B*T*D*V", dtype, ruler="verl", why=why,
    )  # fmt: skip


WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (_trl(4, 5, 11, 2, 32, 64, 301, "float32"), _verl(4, 16, 64, 301, "float32")),
    "full": (
        _trl(8, 256, 1024, 28, 1536, 8960, 151936, "bfloat16", "Qwen2.5-1.5B"),
        _verl(16, 512, 1536, 151936, "bfloat16", "Qwen2.5-1.5B's head"),
        _verl(16, 512, 4096, 128256, "bfloat16", "Llama-3 8B's head"),
    ),
}


def lacking(work: Work) -> str:
    """What has to be installed for a row; empty where nothing."""
    missing = [name for name in NEEDS[work.options["chain"]] if find_spec(name) is None]
    return f"not installed: {', '.join(missing)} (pip install {' '.join(missing)})" if missing else ""


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    if lacking(work):
        return Problem(work, lambda _: {}, {}, lambda _: {}, lambda *_: {})
    host = import_module(f"{__package__}.trainers_{work.options['chain']}").Host(work, device)

    def expected(given: Inputs) -> Outputs:
        """What stock makes, and log-probabilities of some rows in float64 where there is a head to see."""
        out = {name: x.float() for name, x in host.stock(given).items()}
        return out | ({"logprob": host.defined(given)} if "logprob" in out else {})

    def judge(_given: Inputs, want: Outputs, found: Outputs) -> dict[str, Judgment]:
        judged = {}
        for name in want.keys() & found.keys():
            if name == "logprob":
                judged[name] = elementwise("linear_logprob", name, work.dtype, found[name][:ROWS], want[name])
            elif name == "loss":
                error = float((found[name].detach() - want[name]).abs().nan_to_num(nan=torch.inf))
                judged[name] = Judgment(error, error / _LOSS, error / COARSE_ABSOLUTE)
            else:
                judged[name] = frobenius(found[name], want[name], COARSE_RELATIVE)
        return judged

    return Problem(work, host.make, host.ways, expected, judge)


def candidates(problem: Problem, device: str, use: Sequence[str], against: Sequence[str] | None) -> list[Candidate]:
    """Stock's ways, and ours by every backend that has the head: what it lacks, the policy chooses."""
    work = problem.work
    missing, host = lacking(work), str(work.options["chain"])
    if missing:
        return [Candidate(host, "ruler", status="absent", message=missing)]
    version, found = PackageVersions().get(host), []
    for way, call in problem.ours.items():
        if way.startswith(host):
            kind = "ruler" if way == work.ruler else "peer"
            if kind == "ruler" or against is None or way in against:
                found.append(Candidate(way, kind, version or "", call, ran="H200, torch 2.11"))
    installed = policy.installed()
    for name in named(use):
        reason, provider = installed[name].reason, installed[name].provider
        if reason is not None:
            found.append(Candidate(name, "backend", provider, None, "absent", str(reason)))
        elif claims(name, "linear_logprob", device):
            for way, call in problem.ours.items():
                if not way.startswith(host):
                    scope = scope_of(name, "auto")
                    said = f"{name}:{way}" if way else name
                    run = lambda given, s=scope, c=call: s.run(c, given)  # noqa: E731
                    found.append(Candidate(said, "backend", provider, run))
    return found
