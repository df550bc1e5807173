"""Calls of a run of post-training, whose launches go into the table of configurations beside those of conformance.

Sizes do not matter beyond what is known of them to a compiler: whether they are multiples of 16, and the power of two
above the number of tiles of a vocabulary. Imports torch when a call is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import product
from typing import Any, Final

VOCABULARIES: Final = (32000, 50304, 128256, 151936, 262144)  # Llama 2, GPT-2 padded, Llama 3, Qwen 2 and 3, Gemma 3
KINDS: Final = ("ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo")
DTYPES: Final = ("bfloat16", "float16", "float32")
TOP: Final = (1, 2, 4, 8, 16, 32)  # ids asked for, up to these
# Formats, as every rollout and every adapter that is trained on one needs them: with and without what may follow.
FORMATS: Final = (
    "int4_g128",
    "int4_g64",
    "int4_g32",
    "int4_g128_asym",
    "nf4",
    "int8_channel",
    "int8_w8a8",
    "fp8_channel",
)
ADAPTED: Final = ("int4_g128", "int4_g64", "nf4")  # of which adapters and fused layers are, too
TOKENS: Final = (1, 4, 16, 32, 64, 128)


def calls(run: Callable[[str], Callable[..., Any]], ops: Collection[str]) -> Iterator[str]:
    """Make every call of some operators; `run` gives the implementation of one. Yields a line about each."""
    parts = {
        "logprob": _logprob, "sample": _sample, "linear_logprob": _linear, "advantage": _advantage,
        "policy_loss": _loss, "qmatmul": _weights,
    }  # fmt: skip
    for op, part in parts.items():
        if op in ops:
            yield from part(run)


def _logprob(run: Callable[[str], Callable[..., Any]]) -> Iterator[str]:
    import torch

    from rlkernel_core.spec.logprob import Support

    flags = (False, True)
    sizes = [(dtype, 4, 512) for dtype in DTYPES] + [("bfloat16", 256, 512)]
    sizes += [("bfloat16", 2, V) for V in VOCABULARIES[1:]]  # one for each number of parts, to a power of two
    for (dtype, N, V), entropy, rows, masked, capped, kept in product(sizes, flags, flags, flags, flags, flags):
        if V > VOCABULARIES[0] and (capped or (V, kept) == (VOCABULARIES[3], True)):
            continue  # the cap concerns the sweep alone, which knows no vocabulary
        given: dict[str, Any] = {
            "temperature": torch.full((N,), 0.8) if rows else 0.8,
            "mask": torch.ones(N, dtype=torch.bool) if masked else None,
            "softcap": 30.0 if capped else None,
            "support": Support(ids=torch.arange(N), offsets=torch.arange(N + 1)) if kept else None,
        }
        logits = torch.randn(N, V).to(getattr(torch, dtype)).requires_grad_()
        run("logprob")(logits, torch.arange(N), entropy=entropy, **given)
        yield f"logprob {dtype} [{N}, {V}] entropy={entropy} {[n for n, v in given.items() if v is not None]}"
    for n, dtype, (rows, masked, capped) in product(
        TOP, DTYPES, ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1))
    ):
        logits = torch.randn(4, 512).to(getattr(torch, dtype))
        given = {"temperature": torch.full((4,), 0.8) if rows else 0.8, "softcap": 30.0 if capped else None}
        given["mask"] = torch.ones(4, dtype=torch.bool) if masked else None
        run("logprob")(logits, torch.arange(4), top_logprobs=n, **given)
        yield f"logprob {dtype} top {n}"


def _sample(run: Callable[[str], Callable[..., Any]]) -> Iterator[str]:
    import torch

    filters: tuple[dict[str, Any], ...] = (
        {}, {"top_p": 0.95}, {"top_k": 50}, {"top_k": 50, "top_p": 0.95}, {"min_p": 0.05},
    )  # fmt: skip
    # A batch of requests with parameters of their own, and one request with numbers.
    for V, N, dtype, chosen in product(VOCABULARIES[2:4], (1, 8), DTYPES[::2], filters):
        if N == 1 and (V, dtype) != (VOCABULARIES[3], "bfloat16"):
            continue
        law: dict[str, Any] = {"temperature": 0.8, **chosen}
        if N > 1:
            law = {n: torch.full((N,), v, dtype=torch.int64 if n == "top_k" else torch.float32) for n, v in law.items()}
        logits = torch.randn(N, V).to(getattr(torch, dtype))
        rows = torch.arange(N)
        run("sample")(logits, **law, seed=rows if N > 1 else 7, step=rows if N > 1 else 3)
        yield f"sample V={V} N={N} {dtype} {sorted(chosen)}"


def _linear(run: Callable[[str], Callable[..., Any]]) -> Iterator[str]:
    import torch

    flags = (False, True)
    for V, dtype, entropy, masked, rows in product(VOCABULARIES, DTYPES, flags, flags, flags):
        if V not in VOCABULARIES[::3] and (masked or rows or dtype != "bfloat16"):
            continue  # a vocabulary decides how the parts of a row are joined, and nothing else
        kind = getattr(torch, dtype)
        given: dict[str, Any] = {
            "entropy": entropy,
            "mask": torch.ones(8, dtype=torch.bool) if masked else None,
            "temperature": torch.full((8,), 0.8) if rows else 0.8,
        }
        for of_hidden, of_weight in ((True, True), (True, False)):
            hidden = torch.zeros(8, 64, dtype=kind).requires_grad_(of_hidden)
            weight = torch.zeros(V, 64, dtype=kind).requires_grad_(of_weight)
            run("linear_logprob")(hidden, weight, torch.arange(8), **given)
        yield f"linear_logprob V={V} {dtype} {[n for n, v in given.items() if v is not None]}"


def _advantage(run: Callable[[str], Callable[..., Any]]) -> Iterator[str]:
    import torch

    mask = torch.ones(8, 1024, dtype=torch.bool)
    rewards, values = torch.randn(8, 1024), torch.randn(8, 1024)
    run("advantage")(rewards, kind="gae", mask=mask, values=values, gamma=0.99, lam=0.95)
    run("advantage")(rewards, kind="reinforce_pp", mask=mask)
    run("advantage")(torch.randn(8), kind="grpo", group=4)
    for dtype in DTYPES:
        run("advantage")(rewards.to(getattr(torch, dtype)), kind="returns", gamma=0.5)
    yield "advantage gae, reinforce_pp, grpo, returns"


def _loss(run: Callable[[str], Callable[..., Any]]) -> Iterator[str]:
    import torch

    mask = torch.ones(8, 1024, dtype=torch.bool)
    for kind, ref, entropy, per_row in product(KINDS, (False, True), (False, True), (False, True)):
        logprob = torch.randn(8, 1024, requires_grad=True)
        old = logprob.detach() + 0.1
        more: dict[str, Any] = {"ref_logprob": old, "kl_coef": 0.01} if ref else {}
        if entropy:
            more |= {"entropy": torch.rand(8, 1024), "entropy_coef": 0.01}
        advantages = torch.randn(8) if per_row else torch.randn(8, 1024)
        run("policy_loss")(logprob, old, advantages, kind=kind, mask=mask, **more)
        yield f"policy_loss {kind} {sorted(more)}"


def _weights(run: Callable[[str], Callable[..., Any]]) -> Iterator[str]:
    import torch

    from rlkernel_core.spec.qmatmul import LoRA

    for name, dtype in product(FORMATS, DTYPES[:2]):
        kind = getattr(torch, dtype)
        w = run("quantize")(torch.zeros(1024, 1024, dtype=kind), name)
        packed = run("prepack")(w)
        run("dequantize")(packed)
        adapter = LoRA(torch.zeros(16, 1024, dtype=kind), torch.zeros(1024, 16, dtype=kind))
        after: list[dict[str, Any]] = [{}, {"bias": torch.zeros(1024, dtype=kind)}]
        if name in ADAPTED:
            after += [{"lora": adapter}, {"activation": "swiglu"}, {"activation": "swiglu", "lora": adapter}]
        for M, more in product(TOKENS, after):
            x = torch.zeros(M, 1024, dtype=kind)
            run("qmatmul")(x, packed, **more)
            if "lora" in more:
                run("qmatmul")(x.clone().requires_grad_(), packed, **more)
        for M in TOKENS if name in ADAPTED else ():
            run("qmatmul")(torch.zeros(M, 1024, dtype=kind), packed, residual=torch.zeros(M, 1024, dtype=kind))
        yield f"weights {name} {dtype}"
