"""Attacks on qmatmul@1: what may change a result, what may not, and how a call behaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import rlkernel
from rlkernel_conformance import draw, graphs
from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.compare import require, same_bits, within
from rlkernel_conformance.qmatmul_calls import Product, activations, cases, expected, judged, small
from rlkernel_conformance.quantized_weights import of_other_layout, packed, refuses_layout
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import quant
from rlkernel_core.quant import update_
from rlkernel_core.spec.qmatmul import LoRA


def everything(subject: Subject, case: Product) -> dict[str, Any]:
    """A call with every claimed addition."""
    activation = next(iter(activations(subject, pairs=False)), None)
    found: dict[str, Any] = {"x": case.input(subject), "w": case.w(subject)}
    wanted = {
        "bias": case.bias(subject),
        "lora": case.lora(subject),
        "residual": case.residual(subject),
    }
    found |= {name: value for name, value in wanted.items() if name in subject.claims}
    return found | ({"activation": activation} if activation else {})


@attack("QM-10", small, scale=0.5)
def lora_written_in_place_is_seen(subject: Subject, case: Product) -> None:
    """B filled, then A scaled, then both rebound: each call uses what it is given."""
    x, w, lora = case.input(subject), case.w(subject), case.lora(subject)
    judged(subject, case, x, w, lora=lora)
    lora.B.copy_(lora.B.flip(0) + 1)
    judged(subject, case, x, w, lora=lora)
    lora.A.mul_(-2)
    judged(subject, case, x, w, lora=lora)
    judged(subject, case, x, w, lora=LoRA(lora.A, lora.B, 3.0))


@attack("QM-15", small, scale=0.5)
def an_updated_weight_is_used(subject: Subject, case: Product) -> None:
    """Written into by quantize(out=w), canonical and packed."""
    x, second = case.input(subject), 3 * replace(case, seed=case.seed + 1).full(subject)
    first = case.w(subject)
    own = bool(Subject(subject.backend, "quantize", subject.device).impls)
    for w in (first, *(packed(subject, first) if own else ())):
        subject(x, w)
        if own:
            rlkernel.quantize(second, case.spec, out=w)
        else:
            update_(w, second)
        fresh = case.w(subject)
        update_(fresh, second)
        want = expected(case, x, fresh)
        within(subject, "y", subject(x, w), want.y.numpy(), want.bound().numpy())


@attack("QM-18", small, scale=0.5)
def a_packed_weight_gives_the_same_product(subject: Subject, case: Product) -> None:
    """In the layout of the backend's own prepack."""
    x, w = case.input(subject), case.w(subject)
    want = expected(case, x, w)
    for other in packed(subject, w):
        within(subject, "y", subject(x, other), want.y.numpy(), want.bound().numpy())


@attack("QM-19", small, scale=0.2)
def a_layout_of_another_backend_is_refused(subject: Subject, case: Product) -> None:
    """A layout id of nobody."""
    refuses_layout(subject, case.input(subject), of_other_layout(case.w(subject)))


@attack("QM-20", small, scale=0.5)
def strides_change_no_bit(subject: Subject, case: Product) -> None:
    """Padded and transposed x, residual, A, B, and every second element of a bias."""
    given = everything(subject, case)
    want = subject(**given)
    views = dict(given)
    for name in given.keys() & {"x", "residual"}:
        views[name] = draw.strided(given[name])
    if "bias" in given:
        views["bias"] = given["bias"].repeat_interleave(2)[::2]
    if "lora" in given:
        lora = given["lora"]
        views["lora"] = LoRA(lora.A.t().contiguous().t(), draw.strided(lora.B), lora.scale)
    same_bits("y", subject(**views), want, "on strided views")
    views["x"] = given["x"].t().contiguous().t()
    same_bits("y", subject(**views), want, "on a transposed x")


@attack("QM-21", small, scale=0.3)
def no_rows_give_empty_results(subject: Subject, case: Product) -> None:
    """M = 0, with and without a leading dimension; gradients are zeros."""
    given = everything(subject, case)
    given |= {name: given[name][:0] for name in given.keys() & {"x", "residual"}}
    grad = "grad" in subject.claims
    x = given["x"].clone().requires_grad_(grad)
    bias = given["bias"].requires_grad_(grad) if "bias" in given else x
    y = subject(**{**given, "x": x})
    require(tuple(y.shape) == (0, case.N), f"no rows give {tuple(y.shape)}")
    wide = subject(x.detach().view(2, 0, case.K), given["w"])
    require(tuple(wide.shape) == (2, 0, case.N), f"no rows in two give {tuple(wide.shape)}")
    if grad:
        of_x, of_bias = torch.autograd.grad(y.sum(), [x, bias])
        require(tuple(of_x.shape) == (0, case.K), f"no rows have a gradient of {tuple(of_x.shape)}")
        require(bool((of_bias == 0).all()), f"the gradient of a bias over no rows is {of_bias.tolist()}")


@attack("QM-22", lambda s: small(s, rows=5), scale=0.5)
def what_is_not_finite_reaches_what_depends_on_it(subject: Subject, case: Product) -> None:
    """NaN and inf in a row of x, a group of w, a row of B."""
    poison = (torch.nan, torch.inf, -torch.inf)[case.seed % 3]
    x, weight = case.input(subject), case.full(subject)
    x[case.seed % case.M, case.seed % case.K] = poison
    weight[case.seed % case.N, 0] = poison
    w = case.w(subject)
    update_(w, weight)
    bad = torch.zeros(case.M, case.N, dtype=torch.bool)
    bad[case.seed % case.M] = True
    bad[:, quant.decode(w).isnan().any(1)] = True
    more = {}
    if "lora" in subject.claims:
        lora = case.lora(subject)
        lora.B[-1, 0] = poison
        bad[:, -1] = True
        more["lora"] = lora
    found = subject(x, w, **more).isfinite().cpu()
    require(torch.equal(found, ~bad), f"finite results at {found.tolist()}, expected {(~bad).tolist()}")


@attack("QM-24", cases)
def a_row_is_the_same_in_any_batch(subject: Subject, case: Product) -> None:
    """Alone, reversed, repeated: the bits of a row do not move."""
    x, w = case.input(subject), case.w(subject)
    want = subject(x, w)
    same_bits("y", subject(x.flip(0), w).flip(0), want, "in a reversed batch")
    same_bits("y", torch.cat([subject(x[i : i + 1], w) for i in range(case.M)]), want, "one row at a time")
    same_bits("y", subject(x.repeat(40, 1), w)[-case.M :], want, "at the end of a large batch")


@attack("QM-26", small, scale=0.25)
def replays_see_new_inputs_lora_and_weights(subject: Subject, case: Product) -> None:
    """A recording that writes to LoRA and weight in place, then multiplies."""
    w, lora = case.w(subject), case.lora(subject) if "lora" in subject.claims else None

    def step(x: Tensor, A: Tensor, B: Tensor, **parts: Tensor) -> Tensor:
        for name, part in parts.items():
            w.parts[name].copy_(part)
        if lora is None:
            return subject(x, w)  # type: ignore[no-any-return]
        lora.A.copy_(A)
        lora.B.copy_(B)
        return subject(x, w, lora=lora)  # type: ignore[no-any-return]

    def inputs(case: Product) -> dict[str, Tensor]:
        lora = case.lora(subject)
        return {"x": case.input(subject), "A": lora.A, "B": lora.B, **case.w(subject).parts}

    graphs.replays(subject, inputs(case), inputs(replace(case, seed=case.seed + 1)), step)


derive("qmatmul", everything, inputs_untouched=small, determinism=small, scale=0.5)
