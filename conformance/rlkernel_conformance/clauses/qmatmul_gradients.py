"""Attacks on the gradients of qmatmul@1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlkernel_conformance.attack import attack
from rlkernel_conformance.compare import require, within
from rlkernel_conformance.qmatmul_calls import Product, activations, small
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import qmatmul as oracle
from rlkernel_core.quant import QuantTensor, quantize, update_
from rlkernel_core.spec.qmatmul import LoRA

_ROWS = {"x": "grad_x", "bias": "grad_bias", "A": "grad_lora", "B": "grad_lora"}


def leaves_of(subject: Subject, case: Product, activation: str | None) -> dict[str, Tensor]:
    """X and everything claimed that a gradient reaches."""
    found = {"x": case.input(subject)}
    if "bias" in subject.claims:
        found["bias"] = case.bias(subject)
    if "lora" in subject.claims:
        lora = case.lora(subject)
        found |= {"A": lora.A, "B": lora.B}
    if "residual" in subject.claims:
        found["residual"] = case.residual(subject, activation)
    return {name: t.requires_grad_() for name, t in found.items()}


def call(subject: Subject, w: QuantTensor, leaves: dict[str, Tensor], activation: str | None) -> Tensor:
    """The subject on these leaves."""
    given: dict[str, Any] = {k: v for k, v in leaves.items() if k in {"bias", "residual"}}
    if "A" in leaves:
        given["lora"] = LoRA(leaves["A"], leaves["B"], 0.5)
    if activation:
        given["activation"] = activation
    y: Tensor = subject(leaves["x"], w, **given)
    return y


def gradients(
    leaves: dict[str, Tensor], w: QuantTensor, dy: Tensor, activation: str | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Name -> float64 gradient and how far another may be from it."""
    mine = {name: t.detach().cpu().double().requires_grad_() for name, t in leaves.items()}
    kept = {name: t.detach().cpu() for name, t in leaves.items()}
    more = {k: kept[k] for k in ("bias", "residual") if k in kept}
    lora = (kept["A"], kept["B"], 0.5) if "A" in kept else None
    size = oracle.exact(kept["x"], w, lora=lora, activation=activation, **more)
    bounds = oracle.bounds_of_gradients(size, dy.cpu())
    # The same, with the leaves in float64: x as the format quantizes it is a constant away.
    left = mine["x"] + (size.left - size.x).detach()
    h = left @ size.w.t()
    if lora is not None:
        h = h + 0.5 * (mine["x"] @ mine["A"].t()) @ mine["B"].t()
    if "bias" in mine:
        h = h + mine["bias"]
    y = oracle.activated(h, activation)
    if "residual" in mine:
        y = y + mine["residual"]
    exact = torch.autograd.grad(y, list(mine.values()), dy.cpu().double())
    bounds["residual"] = torch.zeros_like(dy.cpu(), dtype=torch.float64)
    return {name: (g, bounds[name] + size.unit * g.abs()) for name, g in zip(mine, exact, strict=True)}


@attack("QM-16", small, scale=0.5)
def gradients_match_float64(subject: Subject, case: Product) -> None:
    """Of x, bias, A, B and residual, without an activation and with one; the weight gets none."""
    claimed = [a for a in (*activations(subject, pairs=False), *activations(subject, pairs=True)) if a != "relu"]
    w = case.w(subject)
    for activation in {None, claimed[case.seed % len(claimed)] if claimed else None}:
        leaves = leaves_of(subject, case, activation)
        y = call(subject, w, leaves, activation)
        dy = case.normal(subject, *y.shape, salt=5)
        found = torch.autograd.grad(y, list(leaves.values()), dy)
        for (name, leaf), grad in zip(leaves.items(), found, strict=True):
            require(grad.dtype == leaf.dtype, f"the gradient of {name} is {grad.dtype}")
        for (name, (want, allowed)), grad in zip(gradients(leaves, w, dy, activation).items(), found, strict=True):
            within(subject, _ROWS.get(name, "grad_residual"), grad, want.numpy(), allowed.numpy())
    require(all(p.grad is None and not p.requires_grad for p in w.parts.values()), "the weight got a gradient")


@attack("QM-17", lambda s: small(s, inputs=60), scale=0.5)
def an_update_before_backward_gives_no_mixture(subject: Subject, case: Product) -> None:
    """w, A or B written between forward and backward: an error, or the gradient of the forward pass."""
    changes = ["w", *(["A", "B"] if "lora" in subject.claims else [])]
    for change in changes:
        w, leaves = case.w(subject), leaves_of(subject, case, None)
        kept = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
        y = call(subject, w, leaves, None)
        dy = case.normal(subject, *y.shape, salt=5)
        want = gradients(kept, quantize(case.full(subject), case.spec), dy, None)
        with torch.no_grad():
            if change == "w":
                update_(w, 5 * replace(case, seed=case.seed + 1).full(subject))
            else:
                leaves[change].mul_(-3)
        try:
            found = torch.autograd.grad(y, list(leaves.values()), dy)
        except RuntimeError:
            continue
        for (name, (exact, allowed)), grad in zip(want.items(), found, strict=True):
            within(subject, _ROWS.get(name, "grad_residual"), grad, exact.numpy(), allowed.numpy())
