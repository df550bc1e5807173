"""The workloads of the systems rlkernel builds on, at their sizes; chains of operators where theirs are chains.

RL-Kernel, Triebwerk, TritonLLM, TritonForge and RL.cu published figures for these; what they published, on which
hardware, stands in `why` where there is a figure. TritonForge's own measure (fast_p, geometric mean over operators and
backends) is in every report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

import rlkernel as rlk
from rlkernel_bench import suites
from rlkernel_bench.gates import elementwise
from rlkernel_bench.suites.capture import work_of as replay
from rlkernel_bench.suites.common import Draw, double
from rlkernel_bench.suites.qmatmul import work_of as product
from rlkernel_bench.work import Inputs, Judgment, Outputs, Problem, Work

_NUMBERS = {"gamma": 0.99, "lam": 0.95}


def _of(suite: str, work: Work, why: str) -> Work:
    """A row of another suite's making, listed here."""
    return replace(work, suite="seeds", options={**work.options, "of": suite}, goals=(), why=why)


def _logprob(N: int, V: int, why: str) -> Work:
    floor = "2*N*V + 16*N"
    at = ("N", (N // 4, N // 2, N))
    work = Work("seeds", "logprob", {"N": N, "V": V}, "bfloat16", "forward", {"entropy": False}, floor, memory_at=at)
    return _of("logprob", work, why)


def _linear(N: int, D: int, V: int, why: str, task: str = "forward") -> Work:
    times = 1 if task == "forward" else 3
    head = "2*V*D + 2*N*D + 16*N"
    work = Work(
        "seeds", "linear_logprob", {"N": N, "D": D, "V": V}, "bfloat16", task, {"entropy": False}, head,
        f"{times}*2*N*D*V", "bfloat16", ruler="cublas", memory_at=("N", (N // 4, N // 2, N)),
    )  # fmt: skip
    return _of("linear_logprob", work, why)


def _sample(B: int, V: int, why: str, **options: Any) -> Work:
    work = Work("seeds", "sample", {"B": B, "V": V}, "float32", "forward", options, "4*B*V + 48*B")
    return _of("sample", work, why)


def _ratio_kl(B: int, T: int, V: int) -> Work:
    return Work(
        "seeds", "logprob", {"B": B, "T": T, "V": V}, "float16", "ratio and KL", {"chain": "ratio_kl"},
        "2*2*B*T*V + 20*B*T", why="RL-Kernel: 6.8 to 10 times its own torch version, H100",
    )  # fmt: skip


def _ppo(B: int, T: int) -> Work:
    return Work(
        "seeds", "advantage,policy_loss", {"B": B, "T": T}, "float32", "PPO update", {"chain": "ppo", **_NUMBERS},
        # rewards, values, mask in, advantages out and in, four log-probabilities and an entropy in, a gradient out
        "(4 + 4 + 1 + 4 + 4 + 4 + 4 + 4 + 4 + 4)*B*T", why="RL.cu: claims 72 ms against 340",
    )  # fmt: skip


def _decode(G: int, K: int, layers: int) -> Work:
    return Work(
        "seeds", "qmatmul,capture", {"G": G, "K": K, "layers": layers}, "bfloat16", "decode chain",
        {"chain": "decode", "format": "int4_g64"}, "layers*(K*K*(4 + 16/64)/8 + 4*G*K)", "2*layers*G*K*K",
        why="Triebwerk: a chain of 4-bit products for a group of completions, under a graph",
    )  # fmt: skip


_TRIEBWERK = ((3072, 1024), (1024, 3072), (2048, 1024), (151936, 1024))  # (N, K)
_SEEDS_SAMPLING = {32: 1.08, 64: 1.31, 128: 1.86, 256: 2.94}  # ms, A100

WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (
        _logprob(16, 500, "RL-Kernel"),
        _linear(32, 16, 300, "RL-Kernel"),
        _sample(4, 500, "RL-Kernel", top_k=50, top_p=0.9),
        _ratio_kl(2, 8, 300),
        _of("qmatmul", product(2, 64, 96, "int4_g64"), "Triebwerk"),
        _of("qmatmul", product(2, 64, 96, "mxfp4"), "TritonLLM"),
        _decode(4, 64, 3),
        _ppo(4, 16),
        _of("capture", replay(10, 2, "seeds"), "RL.cu"),
    ),
    "full": (
        *(
            _logprob(G * 512, 128256, f"RL-Kernel: {gb} GB at the peak for G={G}, A100")
            for G, gb in ((64, 16.15), (128, 31.80), (256, 63.12))
        ),
        *(_sample(B, 128256, f"RL-Kernel: {ms} ms, A100", top_k=50, top_p=0.9) for B, ms in _SEEDS_SAMPLING.items()),
        *(
            _linear(4096, 2048, V, f"RL-Kernel: {forward} / {both} ms, H100", task)
            for V, forward, both in ((32768, 3.41, 12.69), (50257, 4.88, 42.20), (131072, 12.88, 104.97))
            for task in ("forward", "forward+backward")
        ),
        _ratio_kl(16, 512, 32768),
        _ratio_kl(16, 512, 131072),
        *(
            _of("qmatmul", product(M, K, N, "int4_g64"), "Triebwerk: GEMV of a Qwen-3 0.6B")
            for N, K in _TRIEBWERK
            for M in (1, 4, 8, 16)
        ),
        _decode(4, 1024, 28),
        *(_of("qmatmul", product(M, 2880, 5760, "mxfp4"), "TritonLLM: gpt-oss") for M in (1, 8, 64)),
        _of("qmatmul", product(32, 2880, 5760, "mxfp4"), "TritonLLM: 32 experts, 4 a token, as one expert's share"),
        _of("qmatmul", product(1, 2880, 201088, "mxfp4"), "TritonLLM: unembedding"),
        *(_sample(B, 151936, "RL.cu: Gumbel, a Qwen vocabulary") for B in (1, 64)),
        _ppo(64, 2048),
        _of("capture", replay(100, 8, "seeds"), "RL.cu: claims 30 % less overhead"),
    ),
}


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    if "of" in work.options:
        rest = {k: v for k, v in work.options.items() if k != "of"}
        made: Problem = suites.module(work.options["of"]).problem(replace(work, options=rest), device)
        return replace(made, work=work)
    chain: Callable[[Work, str], Problem] = _CHAINS[work.options["chain"]]
    return chain(work, device)


def _ratio_kl_problem(work: Work, device: str) -> Problem:
    """From the logits of two policies: the ratio and the k3 estimate of their divergence, token by token."""
    b, t, v = (work.sizes[k] for k in "BTV")

    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        logits = draw.normal(b * t, v, dtype=work.dtype)
        other = logits + draw.normal(b * t, v, std=0.05, dtype=work.dtype)
        return {"logits": logits, "ref": other, "ids": draw.ids(v, b * t)}

    def call(given: Inputs) -> Outputs:
        with torch.no_grad():
            policy, ref = (rlk.logprob(given[k], given["ids"]).logprob for k in ("logits", "ref"))
        return _ratio_and_k3(policy, ref)

    def expected(given: Inputs) -> Outputs:
        with rlk.use("reference"):
            return call({k: double(x) for k, x in given.items()})

    def judge(_given: Inputs, want: Outputs, found: Outputs) -> dict[str, Judgment]:
        # An error of log p in the exponent: the same, times the ratio, which stays near 1.
        return {k: elementwise("logprob", "logprob", "float32", found[k], want[k], 4.0) for k in want}

    return Problem(work, make, {"": call}, expected, judge)


def _ratio_and_k3(policy: torch.Tensor, ref: torch.Tensor) -> Outputs:
    q = ref - policy
    return {"ratio": (policy - ref).exp(), "k3": q.exp() - 1 - q}


def _ppo_problem(work: Work, device: str) -> Problem:
    """GAE, then ratio, clip, entropy bonus and KL with their gradient."""
    base = suites.module("policy_loss")

    def make(seed: int) -> Inputs:
        given: Inputs = base.make(work, device, seed)
        draw = Draw(device, seed + 1)
        shape = given["mask"].shape
        entropy = draw.uniform(*shape)
        return given | {"rewards": 0.1 * draw.normal(*shape), "values": draw.normal(*shape), "entropy": entropy}

    def call(given: Inputs) -> Outputs:
        mask = given["mask"]
        gains = rlk.advantage(given["rewards"], kind="gae", values=given["values"], mask=mask, **_NUMBERS).advantages
        logprob, entropy = (given[k].detach().requires_grad_() for k in ("logprob", "entropy"))
        with torch.enable_grad():
            loss = rlk.policy_loss(
                logprob, given["old_logprob"], gains.to(logprob.dtype), mask=mask, kind="ppo", clip=(0.2, 0.2),
                aggregate="token_mean", ref_logprob=given["ref_logprob"], kl="k3", kl_coef=0.05,
                entropy=entropy, entropy_coef=0.01,
            ).loss  # fmt: skip
        grads = torch.autograd.grad(loss, (logprob, entropy))
        return {"loss": loss.detach(), "grad_logprob": grads[0], "grad_entropy": grads[1]}

    def expected(given: Inputs) -> Outputs:
        with rlk.use("reference"):
            return call({k: double(x) for k, x in given.items()})

    def judge(_given: Inputs, want: Outputs, found: Outputs) -> dict[str, Judgment]:
        # Advantages of up to tens enter the loss as a factor, with their own error of 1e-5.
        return {
            k: elementwise("policy_loss", k, "float32", found[k], want[k], 40.0 if k == "loss" else 1e3) for k in want
        }

    return Problem(work, make, {"": call}, expected, judge)


def _decode_problem(work: Work, device: str) -> Problem:
    """Layers of one product and one nonlinearity each, captured once and replayed."""
    g, k, layers = (work.sizes[s] for s in ("G", "K", "layers"))
    draw = Draw(device, 0)
    with rlk.use("reference"):
        stack = [rlk.quantize(draw.normal(k, k, std=k**-0.5, dtype=work.dtype), "int4_g64") for _ in range(layers)]
    held: dict[str, Any] = {}

    def step(x: torch.Tensor) -> torch.Tensor:
        for w in stack:
            x = torch.tanh(rlk.qmatmul(x, w))
        return x

    def call(given: Inputs) -> Outputs:
        scope = str(rlk.policy.current().policy.default.order)
        if scope not in held:
            held[scope] = rlk.capture(step, (given["x"],), outputs="view"), step(given["x"]).clone()
        return {"x": held[scope][0](given["x"])}

    def judge(given: Inputs, _want: None, found: Outputs) -> dict[str, Judgment]:
        x = given["x"].double()
        from rlkernel_core.quant import dequantize

        for w in stack:
            x = torch.tanh(x @ dequantize(w, dtype=torch.float32).double().t())
        error = float((found["x"].double() - x).abs().max())
        allowed = layers * 2.0**-7  # each layer rounds its inputs and its result to bf16, and tanh shrinks errors
        return {"x": Judgment(error, error / allowed, error / allowed)}

    def make(seed: int) -> Inputs:
        return {"x": Draw(device, 1 + seed).normal(g, k, dtype=work.dtype)}

    return Problem(work, make, {"": call}, lambda _: None, judge)


_CHAINS: Mapping[str, Callable[[Work, str], Problem]] = {
    "ratio_kl": _ratio_kl_problem,
    "ppo": _ppo_problem,
    "decode": _decode_problem,
}
