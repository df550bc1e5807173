"""Bad arguments of the operators of a model's layers, that depend on another argument or on a limit of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from rlkernel_conformance.example_calls import D, N, V, draw


def _pages(**changes: Any) -> dict[str, Any]:
    """Two sequences of keys in pages, but for what is bad."""
    places = {"page_table": torch.zeros(2, 2, dtype=torch.int32), "seqused_k": torch.zeros(2, dtype=torch.int32)}
    given = {"k": draw(3, 4, 2, D), "v": draw(3, 4, 2, D), **places, **changes}
    return {n: x for n, x in given.items() if x is not None}


def _of_divergences() -> list[tuple[str, dict[str, Any]]]:
    """What both operators of divergences refuse."""
    ids, log_t = torch.zeros(N, 1, dtype=torch.int64), -torch.ones(N, 1)
    listed = {"teacher_ids": ids, "teacher": log_t}
    return [
        ("teacher_ids", {**listed, "teacher_ids": torch.zeros(N, 0, dtype=torch.int64), "teacher": torch.zeros(N, 0)}),
        ("teacher_ids", {**listed, "teacher_ids": torch.zeros(N + 1, 1, dtype=torch.int64)}),
        ("teacher_ids", {**listed, "teacher_ids": torch.zeros(N, dtype=torch.int64)}),
        ("teacher_ids", {**listed, "teacher_ids": torch.zeros(N, 1)}),
        ("teacher", {**listed, "teacher": -torch.ones(N, 2)}),
        ("teacher_temperature", {**listed, "teacher_temperature": 1.0}),
        ("teacher_temperature", {"teacher_temperature": 0.0}),
        ("teacher_temperature", {"teacher_temperature": torch.ones(N + 1)}),
        ("teacher_temperature", {"teacher_temperature": torch.ones(N).requires_grad_()}),
        ("temperature", {"temperature": 0.0}),
        ("temperature", {"temperature": torch.ones(N).requires_grad_()}),
        ("kind", {"kind": "kl"}),
        ("beta", {"beta": 0.5}),
        ("beta", {"kind": "jsd", "beta": 0.0}),
        ("beta", {"kind": "jsd", "beta": 1.0}),
        ("mask", {"mask": torch.ones(N + 1, dtype=torch.bool)}),
        ("mask", {"mask": torch.ones(N)}),
    ]


# As `rlkernel_conformance.bad_arguments.REFUSED`, of which these are a part.
OF_LAYERS: Final[Mapping[str, Callable[[], list[tuple[str, dict[str, Any]]]]]] = {
    "attention": lambda: [
        ("q", {"q": torch.zeros(N, D)}),
        ("q", {"q": torch.zeros(N, 0, D)}),
        ("k", {"k": torch.zeros(N, 2, D + 1)}),
        ("k", {"k": torch.zeros(N, 3, D), "v": torch.zeros(N, 3, D)}),
        ("k", {"k": torch.zeros(N, 0, D), "v": torch.zeros(N, 0, D)}),
        ("k", {"k": draw(N, 2, D).bfloat16()}),
        ("k", {"k": torch.zeros(N + 1, 2, D), "v": torch.zeros(N + 1, 2, D)}),
        ("k", {"k": draw(3, 4, 2, D), "v": draw(3, 4, 2, D)}),
        ("v", {"v": torch.zeros(N, 1, D)}),
        ("v", {"v": draw(N, 2, D).bfloat16()}),
        ("cu_q", {"cu_q": torch.zeros(0, dtype=torch.int32)}),
        ("cu_q", {"cu_q": torch.zeros(2)}),
        ("cu_q", {"cu_q": torch.zeros(2, dtype=torch.int16)}),
        ("cu_q", {"cu_q": torch.zeros(1, 2, dtype=torch.int32)}),
        ("cu_k", {"cu_k": torch.zeros(2, dtype=torch.int32)}),
        ("cu_k", {"cu_k": torch.zeros(3, dtype=torch.int8)}),
        ("cu_k", _pages(cu_k=torch.zeros(3, dtype=torch.int32))),
        ("page_table", {"seqused_k": torch.zeros(2, dtype=torch.int32)}),
        ("page_table", _pages(page_table=torch.zeros(3, 2, dtype=torch.int32))),
        ("page_table", _pages(page_table=torch.zeros(2, 0, dtype=torch.int32))),
        ("page_table", _pages(page_table=torch.zeros(2, dtype=torch.int32))),
        ("seqused_k", _pages(seqused_k=None)),
        ("seqused_k", _pages(seqused_k=torch.zeros(3, dtype=torch.int32))),
        ("seqused_k", _pages(seqused_k=torch.zeros(2))),
        ("k", _pages(k=draw(0, 4, 2, D), v=draw(0, 4, 2, D))),
        ("k", _pages(k=draw(8, 2, D))),
        ("k", _pages(k=draw(3, 4, 2, D).requires_grad_())),
        ("max_k", {"max_k": 0}),
        ("causal", {"causal": 1}),
        ("window", {"window": 0}),
        ("window", {"window": 2.0}),
        ("window", {"window": 4, "causal": False}),
        ("softcap", {"softcap": 0.0}),
        ("scale", {"scale": -1.0}),
        ("scale", {"scale": float("inf")}),
        ("sinks", {"sinks": torch.zeros(3)}),
        ("sinks", {"sinks": draw(4).bfloat16()}),
    ],
    "glu": lambda: [
        ("x", {"x": torch.tensor(1.0)}),
        ("x", {"x": torch.zeros(N, 7)}),
        ("x", {"x": torch.zeros(N, 0)}),
        ("activation", {"activation": "relu"}),
        ("activation", {"activation": "swiglu"}),
    ],
    "linear": lambda: [
        ("x", {"x": torch.tensor(1.0)}),
        ("x", {"x": torch.zeros(N, 0), "weight": torch.zeros(V, 0)}),
        ("weight", {"weight": torch.zeros(0, D)}),
        ("weight", {"weight": torch.zeros(V, D + 1)}),
        ("weight", {"weight": torch.zeros(D)}),
        ("weight", {"weight": draw(V, D).bfloat16()}),
        ("bias", {"bias": torch.zeros(V + 1)}),
        ("bias", {"bias": torch.zeros(V).bfloat16()}),
        ("residual", {"residual": torch.zeros(N + 1, V)}),
        ("residual", {"residual": torch.zeros(N, D)}),
        ("residual", {"residual": torch.zeros(N, V).bfloat16()}),
        ("split", {"split": "both"}),
        ("group", {"group": 2, "split": "row"}),
        ("weight", {"split": "row"}),
        ("weight", {"split": "column"}),
    ],
    "grouped_linear": lambda: [
        ("x", {"x": torch.zeros(D)}),
        ("x", {"x": torch.zeros(N, 1, D)}),
        ("x", {"x": torch.zeros(N, 0), "weight": torch.zeros(3, V, 0)}),
        ("weight", {"weight": torch.zeros(3, 0, D)}),
        ("weight", {"weight": torch.zeros(0, V, D), "ends": torch.zeros(0, dtype=torch.int32)}),
        ("weight", {"weight": torch.zeros(3, V, D + 1)}),
        ("weight", {"weight": torch.zeros(V, D)}),
        ("weight", {"weight": draw(3, V, D).bfloat16()}),
        ("ends", {"ends": torch.tensor([1, 2, N])}),
        ("ends", {"ends": torch.tensor([1, N], dtype=torch.int32)}),
        ("ends", {"ends": torch.tensor([[1, 2, N]], dtype=torch.int32)}),
        ("bias", {"bias": torch.zeros(3, V + 1)}),
        ("bias", {"bias": torch.zeros(V)}),
        ("bias", {"bias": torch.zeros(3, V).bfloat16()}),
    ],
    "route": lambda: [
        ("logits", {"logits": torch.zeros(V)}),
        ("logits", {"logits": torch.zeros(N, 0)}),
        ("top_k", {"top_k": 0}),
        ("top_k", {"top_k": V + 1}),
        ("top_k", {"top_k": 2.0}),
        ("replay", {"replay": torch.zeros(N, 2, dtype=torch.int64)}),
        ("replay", {"replay": torch.zeros(N + 1, 3, dtype=torch.int64)}),
        ("replay", {"replay": torch.zeros(N, 3)}),
        ("replay", {"replay": torch.zeros(3 * N, dtype=torch.int64)}),
        ("renormalize", {"renormalize": 1}),
    ],
    "divergence": lambda: [
        ("logits", {"logits": torch.tensor(1.0), "teacher": torch.tensor(1.0)}),
        ("logits", {"logits": torch.zeros(N, 0), "teacher": torch.zeros(N, 0)}),
        ("teacher", {"teacher": draw(N, V + 1)}),
        ("teacher", {"teacher": draw(N, V).requires_grad_()}),
        ("teacher", {"teacher_ids": torch.zeros(N, 3, dtype=torch.int64)}),
        *_of_divergences(),
    ],
    "linear_divergence": lambda: [
        ("hidden", {"hidden": torch.zeros(N, 0), "weight": torch.zeros(V, 0)}),
        ("weight", {"weight": draw(V, D + 1)}),
        ("weight", {"weight": torch.zeros(0, D)}),
        ("weight", {"weight": draw(V, D).bfloat16()}),
        ("teacher", {"teacher": draw(N, V + 1)}),
        ("teacher", {"teacher": draw(N, V).requires_grad_()}),
        ("teacher", {"teacher": draw(N + 1, 7), "teacher_weight": draw(V, 7)}),
        ("teacher_weight", {"teacher": draw(N, 7), "teacher_weight": draw(V, 8)}),
        ("teacher_weight", {"teacher": draw(N, 7), "teacher_weight": draw(V + 1, 7)}),
        ("teacher_weight", {"teacher": draw(N, 7), "teacher_weight": draw(V, 7).bfloat16()}),
        ("teacher_weight", {"teacher": draw(N, 7), "teacher_weight": draw(V, 7).requires_grad_()}),
        ("teacher_weight", {"teacher_weight": draw(V, 7), "teacher_ids": torch.zeros(N, 7, dtype=torch.int64)}),
        *_of_divergences(),
    ],
    "rms_norm": lambda: [
        ("x", {"x": torch.tensor(1.0)}),
        ("x", {"x": torch.zeros(N, 0), "weight": torch.zeros(0)}),
        ("weight", {"weight": torch.zeros(D + 1)}),
        ("weight", {"weight": draw(D).bfloat16()}),
        ("weight", {"weight": torch.zeros(1, D)}),
        ("eps", {"eps": -1e-6}),
        ("residual", {"residual": torch.zeros(N + 1, D)}),
        ("residual", {"residual": torch.zeros(N, D, dtype=torch.bfloat16)}),
    ],
    "rope": lambda: [
        ("q", {"q": torch.zeros(D)}),
        ("q", {"q": torch.zeros(N, 0, D)}),
        ("k", {"k": torch.zeros(N, 1, 0)}),
        ("k", {"k": torch.zeros(N, 1, D, dtype=torch.bfloat16)}),
        ("k", {"k": torch.zeros(N, 1, D - 2)}),
        ("positions", {"positions": torch.zeros(1, dtype=torch.int64)}),
        ("table", {"table": torch.zeros(9, D + 2)}),
        ("table", {"table": torch.zeros(9, 7)}),
        ("table", {"table": torch.zeros(0, D)}),
        ("table", {"table": torch.zeros(9, D, dtype=torch.float64)}),
        ("table", {"table": draw(9, D).requires_grad_()}),
        ("q_weight", {"q_weight": torch.zeros(D + 1), "eps": 1e-6}),
        ("k_weight", {"k_weight": draw(D).bfloat16(), "eps": 1e-6}),
        ("k_weight", {"k_weight": torch.zeros(1, D), "eps": 1e-6}),
        ("eps", {"q_weight": draw(D)}),
        ("eps", {"eps": 1e-6}),
        ("eps", {"k_weight": draw(D), "eps": -1e-6}),
        ("offset", {"offset": 1.0}),
    ],
}
