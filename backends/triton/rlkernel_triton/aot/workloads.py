"""Calls of a run of post-training, whose launches bundles hold.

What host code decides by sizes is gone through: the power of two above the number of parts of a vocabulary, how many
rows or tokens a program takes, into how many parts K is split. Alignments are no matter of a recording. What a bundle
always serves (docs/aot.md) is what these calls go through. Imports torch when a call is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import product
from typing import Any, Final

from rlkernel_triton.aot.backend import WITH

VOCABULARIES: Final = (32000, 50304, 128256, 151936, 262144)  # Llama 2, GPT-2 padded, Llama 3, Qwen 2 and 3, Gemma 3
KINDS: Final = ("ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo")
DTYPES: Final = ("bfloat16", "float16", "float32")
DRAWN: Final = (32000, 50257, 50304, 128256, 262144)
SAMPLING: Final = {"top_k": 50, "top_p": 0.95, "min_p": 0.05}
FILTERS: Final = ((), ("top_p",), ("top_k",), ("top_k", "top_p"), ("min_p",), ("top_k", "top_p", "min_p"))
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
TOKENS: Final = (1, 17, 33, 65, 129, 257, 513)  # the fewest of each class of M anywhere
# [N, K] of a weight whose product is split into 1, 2, 4 and 8 parts, on GPUs of few multiprocessors and of many.
SHAPES: Final = (
    (1024, 1024), (1024, 512), (1024, 256), (1024, 128), (768, 1024), (384, 1024), (192, 1024), (16896, 256),
    (16896, 128), (4096, 256),
)  # fmt: skip
LARGE: Final = frozenset({(1024, 1024), (4096, 256)})  # of those, weights that have adapters and are fused in pairs
BOARD: Final = {128: 96, 512: 512}  # sequences and width of the two sizes of examples/edge_grpo
# [B, T] of a batch: tokens of a program and whether a row has as many (the loss), one program a row or several and how
# many chunks it has in flight (the scan).
BATCHES: Final = ((8, 1024), (8, 100), (512, 1024), (64, 8192))
SCANS: Final = ((8, 1024), (200, 8192), (8, 32768))
GROUPS: Final = (2, 4, 8, 16, 32, 64)  # sizes, to a power of two
COMPARED: Final = ("grpo", "dr_grpo", "rloo")  # kinds over groups that are served at each of them, and by ids
# Decoders of the Llama and Qwen class: queries to a key (heads over key-value heads), and widths of a head.
SHARED: Final = (1, 2, 3, 4, 5, 6, 7, 8)
HEADS: Final = (64, 128)
WIDTHS: Final = (64, 128, 256, 512, 1024, 2048, 4096, 8192)  # of hidden states, to a power of two
PAGE: Final = 64  # keys of a page, as `rlkernel.exact` has them


def calls(run: Callable[[str], Callable[[Any], Any]], ops: Collection[str]) -> Iterator[str]:
    """Make every call of some operators; `run` gives the implementation of one. Yields a line about each.

    Weights are quantized, prepacked, dequantized and multiplied in one go, whichever of these is asked for.
    """
    from rlkernel_core.spec import OPERATORS

    def by_arguments(op: str) -> Callable[..., Any]:
        return OPERATORS[op].taking_arguments(run(op))

    parts = {
        "logprob": _logprob, "sample": _sample, "linear_logprob": _linear, "advantage": _advantage,
        "policy_loss": _loss, "qmatmul": _weights, "linear": _products, "rms_norm": _norms, "rope": _positions,
        "attention": _attention, "glu": _gates,
    }  # fmt: skip
    asked = {*ops, *(op for op, others in WITH.items() if set(others) & set(ops))}
    for op, part in parts.items():
        if op in asked:
            yield from part(by_arguments)


def _logprob(run: Callable[[str], Callable[..., Any]]) -> Iterator[str]:
    import torch

    from rlkernel_core.spec.logprob import Support

    flags = (False, True)
    sizes = [(dtype, N, 512) for dtype in DTYPES for N in (4, 256)]
    sizes += [("bfloat16", 2, V) for V in VOCABULARIES[1:]]  # one for each number of parts, to a power of two
    for (dtype, N, V), entropy, rows, masked, capped, kept in product(sizes, flags, flags, flags, flags, flags):
        if V > VOCABULARIES[0] and (capped or (V, kept) == (VOCABULARIES[3], True)):
            continue  # a softcap concerns the partial softmax alone, which does not know the vocabulary
        given: dict[str, Any] = {
            "temperature": torch.full((N,), 0.8) if rows else 0.8,
            "mask": torch.ones(N, dtype=torch.bool) if masked else None,
            "softcap": 30.0 if capped else None,
            "support": Support(ids=torch.arange(N), offsets=torch.arange(N + 1)) if kept else None,
        }
        logits = torch.zeros(N, V).to(getattr(torch, dtype)).requires_grad_()
        run("logprob")(logits, torch.arange(N), entropy=entropy, **given)
        yield f"logprob {dtype} [{N}, {V}] entropy={entropy} {[n for n, v in given.items() if v is not None]}"
    for n, dtype, rows, masked, capped in product(TOP, DTYPES, flags, flags, flags):
        logits = torch.zeros(4, 512).to(getattr(torch, dtype))
        given = {"temperature": torch.full((4,), 0.8) if rows else 0.8, "softcap": 30.0 if capped else None}
        given["mask"] = torch.ones(4, dtype=torch.bool) if masked else None
        run("logprob")(logits, torch.arange(4), top_logprobs=n, **given)
        yield f"logprob {dtype} top {n}"


def _sample(run: Callable[[str], Callable[..., Any]]) -> Iterator[str]:
    import torch

    # Vocabularies with 32, 64, 128 and 256 tiles, and one that is no multiple of 16; few rows and many, and more than
    # a large GPU has processors; numbers, and requests with parameters of their own.
    for V, N, dtype, names, each in product(DRAWN, (1, 4, 8, 256), DTYPES[::2], FILTERS, (False, True)):
        sampling: dict[str, Any] = {"temperature": 0.8, **{n: v for n, v in SAMPLING.items() if n in names}}
        if each:
            sampling = {
                n: torch.full((N,), v, dtype=torch.int64 if n == "top_k" else torch.float32)
                for n, v in sampling.items()
            }
        rows = torch.zeros(N, dtype=torch.int64)  # rows of a batch have seeds of their own
        noise = {"seed": rows if each or N > 1 else 7, "step": rows if each else 3}
        run("sample")(torch.zeros(N, V, dtype=getattr(torch, dtype)), **sampling, **noise)
        yield f"sample V={V} N={N} {dtype} {names} each={each}"
    for N in BOARD:
        rows = torch.zeros(N, dtype=torch.int64)
        run("sample")(torch.zeros(N, 13), seed=rows, step=rows)
        yield f"sample V=13 N={N}, on a board"


def _linear(run: Callable[[str], Callable[..., Any]]) -> Iterator[str]:
    import torch

    flags = (False, True)
    for V, dtype, entropy, masked, rows in product(VOCABULARIES[::3], DTYPES, flags, flags, flags):
        kind = getattr(torch, dtype)
        given: dict[str, Any] = {
            "entropy": entropy,
            "mask": torch.ones(8, dtype=torch.bool) if masked else None,
            "temperature": torch.full((8,), 0.8) if rows else 0.8,
        }
        for of_weight in flags:
            hidden = torch.zeros(8, 64, dtype=kind).requires_grad_()
            weight = torch.zeros(V, 64, dtype=kind).requires_grad_(of_weight)
            run("linear_logprob")(hidden, weight, torch.arange(8), **given)
        yield f"linear_logprob V={V} {dtype} {[n for n, v in given.items() if v is not None]}"
    # More rows than one block holds.
    for dtype, masked in product(DTYPES, flags):
        kind, N = getattr(torch, dtype), 16400
        hidden, weight = (torch.zeros(n, 16, dtype=kind).requires_grad_() for n in (N, 1000))
        mask = torch.ones(N, dtype=torch.bool) if masked else None
        run("linear_logprob")(hidden, weight, torch.zeros(N, dtype=torch.int64), mask=mask)
        yield f"linear_logprob {N} rows {dtype}"
    # As many tiles as a vocabulary may have, to a power of two.
    for k, dtype, entropy, masked in product(range(13), DTYPES[::2], flags, flags):
        hidden, weight = (torch.zeros(n, 16, dtype=getattr(torch, dtype)) for n in (8, 64 << k))
        mask = torch.ones(8, dtype=torch.bool) if masked else None
        run("linear_logprob")(hidden, weight, torch.arange(8), entropy=entropy, mask=mask)
        yield f"linear_logprob V={64 << k} {dtype}"


def _advantage(run: Callable[[str], Callable[..., Any]]) -> Iterator[str]:
    import torch

    for shape, masked in product(SCANS, (False, True)):
        mask = torch.ones(shape, dtype=torch.bool) if masked else None
        rewards, values = torch.zeros(shape), torch.zeros(shape)
        run("advantage")(rewards, kind="gae", mask=mask, values=values, gamma=0.99, lam=0.95)
        run("advantage")(rewards, kind="reinforce_pp", mask=mask)
        for dtype in DTYPES:
            run("advantage")(rewards.to(getattr(torch, dtype)), kind="returns", gamma=0.5, mask=mask)
        yield f"advantage gae, reinforce_pp, returns {shape}"
    for size in GROUPS:
        for kind in COMPARED:
            run("advantage")(torch.zeros(2 * size), kind=kind, group=size)
        yield f"advantage {' '.join(COMPARED)}, groups of {size}"
    for kind in COMPARED:  # in pairs, and by a table
        for B in (8, 4096):
            run("advantage")(torch.zeros(B), kind=kind, group=torch.zeros(B, dtype=torch.int64))
        yield f"advantage {kind}, ids"
    for kind in ("maxrl", "passk", "gpg", "reinforce_pp_baseline"):
        run("advantage")(torch.zeros(16), kind=kind, group=8)
        yield f"advantage {kind}"
    run("advantage")(torch.zeros(16, 2), kind="gdpo", group=8)
    run("advantage")(torch.zeros(16), kind="opo", group=8, lengths=torch.zeros(16, dtype=torch.int64))
    yield "advantage gdpo, opo"


def _loss(run: Callable[[str], Callable[..., Any]]) -> Iterator[str]:
    import torch

    both = (False, True)
    for shape, kind, ref, entropy, per_row in product(BATCHES, KINDS, both, both, both):
        mask = torch.ones(shape, dtype=torch.bool)
        logprob, old = torch.zeros(shape, requires_grad=True), torch.zeros(shape)
        more: dict[str, Any] = {"ref_logprob": old, "kl_coef": 0.01} if ref else {}
        if entropy:
            more |= {"entropy": torch.zeros(shape), "entropy_coef": 0.01}
        advantages = torch.zeros(shape[:1]) if per_row else torch.zeros(shape)
        run("policy_loss")(logprob, old, advantages, kind=kind, mask=mask, **more)
        yield f"policy_loss {shape} {kind} {sorted(more)}"


def _weights(run: Callable[[str], Callable[..., Any]]) -> Iterator[str]:
    import torch

    from rlkernel_core.spec.qmatmul import LoRA

    for name, dtype, (N, K) in product(FORMATS, DTYPES[:2], SHAPES):
        kind = getattr(torch, dtype)
        w = run("quantize")(torch.zeros(N, K, dtype=kind), name)
        packed = run("prepack")(w)
        run("dequantize")(packed)
        after: list[dict[str, Any]] = [{}, {"bias": torch.zeros(N, dtype=kind)}]
        if name in ADAPTED and (N, K) in LARGE:
            adapter = LoRA(torch.zeros(16, K, dtype=kind), torch.zeros(N, 16, dtype=kind))
            after += [
                {"lora": adapter},
                {"activation": "swiglu"},
                {"activation": "swiglu", "lora": adapter},
                {"residual": 0},
            ]
        for M, more in product(TOKENS, after):
            x = torch.zeros(M, K, dtype=kind).requires_grad_("lora" in more)
            given = {**more, "residual": torch.zeros(M, N, dtype=kind)} if "residual" in more else more
            run("qmatmul")(x, packed, **given)
        yield f"weights {name} {dtype} [{N}, {K}]"
    yield from _on_a_board(run)


def _on_a_board(run: Callable[[str], Callable[..., Any]]) -> Iterator[str]:
    """Weights as they are stored, activations and adapters in fp32: the layers of examples/edge_grpo."""
    import torch

    from rlkernel_core.spec.qmatmul import LoRA

    for (M, D), (n, k) in product(BOARD.items(), ((3, 1), (1, 1), (4, 1), (1, 4))):
        N, K = n * D, k * D
        w = run("quantize")(torch.zeros(N, K), "int4_g32")
        adapter = LoRA(torch.zeros(8, K), torch.zeros(N, 8))
        for tokens in (M, 8 * M):  # a step of the rollout, an update
            run("qmatmul")(torch.zeros(tokens, K).requires_grad_(), w, lora=adapter)
        yield f"weights int4_g32 float32 [{N}, {K}], on a board"


def _products(run: Callable[[str], Callable[..., Any]]) -> Iterator[str]:
    import torch

    # Chunks of K that are whole steps, half steps, and no whole ones.
    shapes = [*product((4096, 256), (1024, 512, 256, 128))]
    for M, (N, K), dtype, grad in product(TOKENS, shapes, DTYPES[:2], (False, True)):
        kind = getattr(torch, dtype)
        x, weight = (torch.zeros(n, K, dtype=kind).requires_grad_(grad) for n in (M, N))
        for given in ({}, {"bias": torch.zeros(N, dtype=kind)}, {"residual": torch.zeros(M, N, dtype=kind)}):
            run("linear")(x, weight, **given)
        yield f"linear {dtype} [{M}, {K}] times [{N}, {K}]"
    for M, dtype in product(range(16, 128, 16), DTYPES[:2]):  # gradients of weights, which sum 1 to 8 chunks of rows
        x, weight = (torch.zeros(n, 128, dtype=getattr(torch, dtype)).requires_grad_() for n in (M, 128))
        run("linear")(x, weight)
        yield f"linear {dtype}, {M} rows"


def _norms(run: Callable[[str], Callable[..., Any]]) -> Iterator[str]:
    import torch

    for D, M, dtype, added, grad in product(WIDTHS, (1, 4096), DTYPES[:2], (False, True), (False, True)):
        x, weight, residual = (
            torch.zeros(shape, dtype=getattr(torch, dtype)).requires_grad_(grad) for shape in ((M, D), (D,), (M, D))
        )
        run("rms_norm")(x, weight, eps=1e-6, residual=residual if added else None)
        yield f"rms_norm {dtype} [{M}, {D}]"


def _positions(run: Callable[[str], Callable[..., Any]]) -> Iterator[str]:
    import torch

    for D, shared, dtype, normed in product(HEADS, SHARED, DTYPES[:2], (False, True)):
        kind = getattr(torch, dtype)
        for M, grad in ((1, False), (4096, False), (4096, True)):
            q, k = (torch.zeros(M, n, D, dtype=kind).requires_grad_(grad) for n in (2 * shared, 2))
            weights = [torch.zeros(D, dtype=kind).requires_grad_(grad) for _ in range(2)]
            more = {"q_weight": weights[0], "k_weight": weights[1], "eps": 1e-6} if normed else {}
            run("rope")(q, k, torch.zeros(M, dtype=torch.int64), torch.zeros(8192, D), **more)
        yield f"rope {dtype} heads of {D}, normed={normed}"


def _attention(run: Callable[[str], Callable[..., Any]]) -> Iterator[str]:
    import torch

    for D, shared, dtype in product(HEADS, SHARED, DTYPES[:2]):
        kind = getattr(torch, dtype)
        for M, B in ((1, 1), (64, 64), (4096, 8)):
            cu = torch.zeros(B + 1, dtype=torch.int32)
            q = torch.zeros(M, 2 * shared, D, dtype=kind)
            k, v = (torch.zeros(M, 2, D, dtype=kind).requires_grad_() for _ in range(2))
            run("attention")(q.requires_grad_(), k, v, cu_q=cu)
            pages = [torch.zeros(1024, PAGE, 2, D, dtype=kind) for _ in range(2)]
            table, used = torch.zeros(B, 128, dtype=torch.int32), torch.zeros(B, dtype=torch.int32)
            run("attention")(q.detach(), *pages, cu_q=cu, page_table=table, seqused_k=used, max_k=128 * PAGE)
        yield f"attention {dtype} heads of {D}, {shared} to a key"


def _gates(run: Callable[[str], Callable[..., Any]]) -> Iterator[str]:
    import torch

    for D, M, dtype, grad in product(WIDTHS, (1, 4096), DTYPES[:2], (False, True)):
        run("glu")(torch.zeros(M, 2 * D, dtype=getattr(torch, dtype)).requires_grad_(grad), activation="silu")
        yield f"glu {dtype} [{M}, {2 * D}]"
