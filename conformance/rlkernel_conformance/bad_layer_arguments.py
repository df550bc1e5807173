"""Bad arguments of the operators of a model's layers, that depend on another argument or on a limit of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from rlkernel_conformance.example_calls import D, N, V, draw

# As `rlkernel_conformance.bad_arguments.REFUSED`, of which these are a part.
OF_LAYERS: Final[Mapping[str, Callable[[], list[tuple[str, dict[str, Any]]]]]] = {
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
