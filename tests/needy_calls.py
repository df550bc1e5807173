"""Calls that need each feature, for every operator: those of the other tables, and what those leave out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

import rlkernel as rlk
from rlkernel_conformance.example_calls import B, D, N, T, V, base, draw, ids, logprobs
from rlkernel_core.quant.spec import FORMATS
from rlkernel_core.spec.advantage_kinds import EPS_MODES
from rlkernel_core.spec.advantage_kinds import KINDS as ADVANTAGES
from rlkernel_core.spec.divergence import KINDS as DIVERGENCES
from rlkernel_core.spec.glu import ACTIVATIONS as GATES
from rlkernel_core.spec.policy_kinds import KINDS, KLS
from rlkernel_core.spec.qmatmul import ACTIVATIONS
from tests.argument_changes import CHANGES

Call = dict[str, Any]

# No call needs these: a policy asks for them (`need = ["deterministic"]`), `grad` the caller's tensors, and `pause` is
# about a method of what capture returns.
BY_POLICY = {
    "grad",
    "deterministic",
    "batch_invariant",
    "rank_invariant",
    "capturable",
    "pause",
    "noise:philox4x32-10",
    "trainer_bits",
    "isolated",
}
PER_ROW = torch.linspace(0.5, 2.0, N)
GROUP_IDS = torch.tensor([7, 7, 3, 3, 3, 7])


LISTS = rlk.TokenLists(ids(9), torch.arange(N + 1))
QUANTIZED_HEAD = {"weight": rlk.quantize(draw(V, D), "int4_g32")}


def losses() -> list[Call]:
    """Every kind, every KL estimator, on policy."""
    required = {"dppo_kl": {"clip": (0.2, 0.2)}, "dppo_tv": {"clip": (0.2, 0.2)}, "dro": {"dro_beta": 0.1}}
    return [
        *({"kind": kind, **required.get(kind, {})} for kind in KINDS),
        *({"ref_logprob": logprobs(B, T, seed=6), "kl": kl} for kl in KLS),
        {"old_logprob": None},
    ]


def formats() -> Iterator[rlk.QuantSpec]:
    """Every format with every value of every option."""
    for name, row in FORMATS.items():
        yield rlk.QuantSpec.named(name)
        yield from (rlk.QuantSpec.named(name, **{o: v}) for o, values in row.options.items() for v in values)


def weights() -> list[Call]:
    return [{"w": rlk.quantize(draw(V, D), spec)} for spec in formats()]


CODED: Call = {"logits": draw(N, V).to(torch.float8_e5m2), "logits_scale": PER_ROW}


def more(group: Any) -> Mapping[str, list[Call]]:
    """Changes of the base call; `group` is a process group."""
    head = [
        {"temperature": PER_ROW},
        {"weight": draw(V, D).bfloat16()},
        {"group": group},
        {"group": group, "partial_grad": True},
        {"max_workspace_bytes": 2**30},
    ]
    joint = {"filter_order": "joint", "top_k": 3, "top_p": 0.5}
    lengths = torch.tensor([5, 3, 1, 5, 4, 2])
    by_token = {"kind": "returns", "rewards": draw(B, T), "group": None}
    kl = {"logprob": logprobs(B, T, seed=1), "ref_logprob": logprobs(B, T, seed=2), "kl_coef": 0.1}
    grouped = [kind for kind, row in ADVANTAGES.items() if set(row.requires) == {"group"}]
    divergences = [{"temperature": PER_ROW}, *({"kind": kind} for kind in DIVERGENCES)]
    return {
        "logprob": [
            {"temperature": PER_ROW},
            {"validate": True},
            {"ids": ids(N, 3)},
            {"ids": LISTS},
            {"group": group},
            CODED,
        ],
        "linear_logprob": [*head, {"backward": "recompute"}, {"ids": ids(N, 3)}, {"ids": LISTS}, QUANTIZED_HEAD],
        "policy_loss": [*losses(), {"process_group": group}],
        "divergence": divergences,
        "linear_divergence": [*divergences, {"backward": "save"}],
        "linear_policy_loss": [
            *losses(),
            {"process_group": group},
            *head[1:],
            {"temperature": PER_ROW[:, None].expand(B, T)},
        ],
        "sample": [joint],
        "lm_head_sample": [joint, head[1], QUANTIZED_HEAD],
        "verify": [joint, {"top_k": torch.tensor([3, 5])}],
        "quantize": [{"format": spec} for spec in formats()],
        "fake_quantize": [{"format": spec} for spec in formats()],
        "dequantize": weights(),
        "prepack": weights(),
        "glu": [{"activation": a} for a in GATES],
        "qmatmul": [*weights(), *({"activation": a} for a in ACTIVATIONS), {"weight_rounding": "none"}],
        "capture": [{"on_guard_fail": "eager"}, {"rng": "forbid"}],
        "advantage": [
            *({"kind": kind, **({"lengths": lengths} if kind == "opo" else {})} for kind in grouped if kind != "gdpo"),
            {**by_token, "kind": "reinforce_pp", "process_group": group},
            {**by_token, "kind": "gae", "values": draw(B, T), "lam": torch.linspace(0, 1, B)},
            {"singleton": "error"},
            *({"eps_mode": mode} for mode in EPS_MODES),
            *({"whiten": "global", "whiten_eps_mode": mode} for mode in EPS_MODES),
        ],
        "whiten": [{"process_group": group}, *({"eps_mode": mode} for mode in EPS_MODES)],
        "group_filter": [{"group": GROUP_IDS}, {"rule": "distinct"}],
        "shape_rewards": [*({**kl, "kl": k} for k in ("abs", "k2")), {"normalize": "batch", "process_group": group}],
    }


def calls(operator: str, group: Any) -> Iterator[Call]:
    """All calls of an operator in the tables."""
    start = base(operator)
    yield start
    for name, change in CHANGES[operator]().items():
        yield {**start, **change.given}
        yield {**start, **change.given, name: change.value}
    for change in more(group).get(operator, []):
        yield {**start, **change}
