"""What a caller can see of a call: its results, its gradients, or how it was refused, as text that can be compared.

Operators that return an object with a life (capture, rollout_buffer) are seen through a short life of it.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel_core.spec import OPERATORS


def observed(operator: str, given: dict[str, Any]) -> str:
    """All of it, as text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rlk.FallbackWarning)  # on_capture_error="eager" says so
        try:
            return LIVES.get(operator, results)(operator, given)
        except rlk.RLKernelError as error:
            return f"{type(error).__name__}: {error}"


def results(operator: str, given: dict[str, Any]) -> str:
    """Results, and gradients of their sum where there are any."""
    wanted = {}
    for name in OPERATORS[operator].differentiable:
        if isinstance(given.get(name), Tensor) and name not in refused_with_gradient(operator, given):
            wanted[name] = given[name].clone().requires_grad_()
    result = getattr(rlk, operator)(**(given | wanted))
    total = sum(t.nan_to_num().sum() for t in tensors(result) if t.requires_grad)
    gradients: tuple[Any, ...] = ()
    if isinstance(total, Tensor):
        gradients = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    return text(result) + text(gradients)


def refused_with_gradient(operator: str, given: dict[str, Any]) -> tuple[str, ...]:
    """Arguments that are refused where they ask for a gradient."""
    if operator == "attention" and given.get("page_table") is not None:
        return "k", "v"
    if operator == "logprob" and given["logits"].element_size() == 1:
        return ("logits",)
    return ("weight",) if operator == "quantize" else ()


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in a nested value."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [t for f in dataclasses.fields(value) for t in tensors(getattr(value, f.name))]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors(v)]
    return [t for v in value for t in tensors(v)] if isinstance(value, tuple | list) else []


def text(value: Any) -> str:
    """A nested value in words; tensors by device, dtype and every value."""
    if isinstance(value, Tensor):
        return f"{value.device} {value.dtype} {value.tolist() if value.device.type != 'meta' else list(value.shape)}"
    if isinstance(value, rlk.QuantTensor):
        return f"{value!r} {value.dtype} {text({n: x.view(torch.uint8) for n, x in value.parts.items()})}"
    if dataclasses.is_dataclass(value):
        return text({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, dict):
        return str({name: text(x) for name, x in value.items()})
    return str([text(x) for x in value]) if isinstance(value, tuple | list) else repr(value)


# What functions under capture read, draw from and write to.
WEIGHT, COUNTER, NOISE = torch.ones(3), torch.zeros(1), torch.Generator()


def life_of_a_graph(operator: str, given: dict[str, Any]) -> str:
    """Calls of two sizes, a weight that moves between them, and the counters."""
    WEIGHT.data = torch.full((3,), 2.0)
    COUNTER.zero_()
    NOISE.manual_seed(0)
    torch.manual_seed(0)
    graphed = rlk.capture(**given)
    first = graphed(torch.ones(4, 3))
    second, third = graphed(torch.ones(4, 3) * 2), graphed(torch.ones(3, 3) * 5)
    seen = [text(x.detach()) for x in (first, second, third)]  # a view holds what came later
    WEIGHT.data = torch.full((3,), 7.0)
    last = graphed(torch.ones(4, 3))
    seen += [text(last.detach()), text(graphed.check_static()), text(COUNTER)]
    stats = dataclasses.replace(graphed.stats, capture_ms=0.0, guard_ns=0)
    graphed.close()
    return str(seen) + text(stats)


def life_of_a_buffer(operator: str, given: dict[str, Any]) -> str:
    """Two groups go in, one comes out, and the counters."""
    buffer = rlk.rollout_buffer(**given)
    slots = buffer.reserve(9, [0, 1])
    device = buffer.tensors()
    if next(iter(device.values())).device.type == "meta":
        return text(device)
    buffer.append(slots, {"token": torch.tensor([3, 4], dtype=torch.int32), "logprob": torch.tensor([-1.0, -2.0])})
    buffer.append(slots, {"token": torch.tensor([5, 6], dtype=torch.int32), "logprob": torch.tensor([-3.0, -4.0])})
    buffer.finish(slots)
    batch = buffer.pop(groups=2)
    seen = [text(buffer.stats)]
    if batch is not None:
        seen += [text(batch["token"]), text(batch.reward)]
        batch.release()
    try:
        for group in range(2, 12):
            buffer.finish(buffer.reserve(9, [group]))
    except rlk.BufferFullError as error:
        seen.append(str(error))
    return str(seen) + text(buffer.stats)


LIVES = {"capture": life_of_a_graph, "rollout_buffer": life_of_a_buffer}
