"""What a call of an operator gives, as digests: the SHA-256 of every output's and gradient's dtype, shape and bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any, Final

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel.discover import guarded
from rlkernel_bench.bits.inputs import Given, draw, ids, logprobs

DIFFERENTIABLE: Final = {
    "logprob": ("logits",),
    "linear_logprob": ("hidden", "weight", "bias"),
    "policy_loss": ("logprob", "entropy"),
    "linear_policy_loss": ("hidden", "weight", "bias"),
    "qmatmul": ("x", "bias", "lora", "residual"),
    "affine_suffix_scan": ("b", "a", "init"),
}
EMPTY: Final = "no tensor"
Parts = dict[str, dict[str, str]]  # forward, with gradients or gradients -> path of a leaf -> its digest


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A nested argument with every tensor changed; one object for one tensor is not kept."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, rlk.QuantTensor):
        return dataclasses.replace(value, parts={k: change(x) for k, x in value.parts.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        held = {k: x for k, x in fields.items() if isinstance(x, Tensor)}
        return dataclasses.replace(value, **{k: change(x) for k, x in held.items()}) if held else value
    if isinstance(value, dict):
        return {k: mapped(x, change) for k, x in value.items()}
    return type(value)(mapped(x, change) for x in value) if type(value) in {list, tuple} else value


def moved(x: Tensor, device: torch.device | str, *, copy: bool = False) -> Tensor:
    """The same tensor elsewhere, with its strides and its wish for a gradient."""
    base = x.detach()
    if x.is_contiguous():
        return base.to(device, copy=copy).requires_grad_(x.requires_grad)
    whole = base.as_strided((base.untyped_storage().nbytes() // base.element_size(),), (1,), 0)
    there = whole.to(device, copy=copy).as_strided(x.shape, x.stride(), x.storage_offset())
    return there.requires_grad_(x.requires_grad)


def named(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a result under its path."""
    if isinstance(value, rlk.QuantTensor):
        yield f"{path}.about", f"{value.spec} {tuple(value.shape)} {value.dtype} {value.layout}"
        value = value.parts
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict | list | tuple):
        for key, x in value.items() if isinstance(value, dict) else enumerate(value):
            yield from named(x, f"{path}.{key}" if path else str(key))
    elif value is not None:
        yield path or "result", value


def digest(value: Any) -> str:
    """SHA-256 of a tensor's dtype, shape and bytes; of another leaf's text."""
    if not isinstance(value, Tensor):
        return sha256(repr(value).encode()).hexdigest()
    x = value.detach().cpu().contiguous().reshape(-1)
    data = x.view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return sha256(f"{value.dtype} {tuple(value.shape)}\n".encode() + data).hexdigest()


def digests(value: Any) -> dict[str, str]:
    """The digest of every leaf."""
    return {path: digest(leaf) for path, leaf in named(value)} or {EMPTY: digest(None)}


def called(op: str, given: Given) -> Parts:
    """Digests of a call without gradients."""
    with torch.no_grad():
        return {"forward": digests(getattr(rlk, op)(**given))}


def differentiated(op: str, given: Given) -> Parts:
    """Digests of a call with gradients wanted, and of the gradients, each output weighed by noise of its own."""
    leaves: dict[str, Tensor] = {}

    def leaf(name: str) -> Callable[[Tensor], Tensor]:
        def change(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x
            made = leaves[f"{name}{len(leaves)}"] = moved(x.detach(), x.device, copy=True).requires_grad_()
            return made

        return change

    wanted = {name: mapped(given[name], leaf(name)) for name in DIFFERENTIABLE[op] if name in given}
    out = dict(named(getattr(rlk, op)(**(given | wanted))))
    used = {path: x for path, x in out.items() if isinstance(x, Tensor) and x.requires_grad}
    if not used:
        return {"with gradients": digests(out)}
    ups = [draw(*x.shape, seed=100 + i).to(x) for i, x in enumerate(used.values())]
    found = torch.autograd.grad(list(used.values()), list(leaves.values()), ups, allow_unused=True)
    return {"with gradients": digests(out), "gradients": digests(dict(zip(leaves, found, strict=True)))}


def replayed(given: Given) -> Parts:
    """Digests of a graph's life: calls of two sizes, and gradients where it has them."""
    device = given["example"][0].device
    torch.manual_seed(0)
    graphed = rlk.capture(**given)
    found: dict[str, Any] = {}
    for i, x in enumerate((draw(4, 3, seed=1), draw(4, 3, seed=2), draw(3, 3, seed=3))):
        x = x.to(device).requires_grad_(bool(given.get("autograd")))  # noqa: PLW2901
        y = graphed(x)
        found[f"call {i}"] = y.detach().clone()
        if y.requires_grad:
            y.backward(draw(*y.shape, seed=4).to(y))
            found[f"gradient {i}"] = x.grad
    graphed.close()
    return {"forward": digests(found)}


def filled(given: Given) -> Parts:
    """Digests of a buffer's life: two groups go in, one batch comes out."""
    buffer = rlk.rollout_buffer(**given)
    slots = buffer.reserve(9, [0, 0, 1, 1] if given.get("group_size") != 1 else [0, 1, 2, 3])
    device = slots.ids.device
    for i in range(3):
        buffer.append(
            slots,
            {"token": ids(4, below=99, seed=i).to(device, torch.int32), "logprob": logprobs(4, seed=i).to(device)},
            alive=(torch.arange(4) != i).to(device),
        )
    rewards = draw(4, *((given["rewards"],) if "rewards" in given else ()))
    buffer.finish(slots, rewards.to(device))
    batch = buffer.pop(groups=2)
    found: dict[str, Any] = {"popped": batch is not None}
    if batch is not None:
        fields = ("cu_seqlens", "group", "group_ids", "reward", "valid", "weight", "status", "version")
        found |= {name: batch[name].clone() for name in ("token", "logprob")}
        found |= {name: getattr(batch, name).clone() for name in fields}
        batch.release()
    stats = buffer.stats
    found |= {name: getattr(stats, name) for name in ("appended", "popped", "stored", "reserved_seqs", "popped_seqs")}
    return {"forward": digests(found)}


def ways(op: str) -> list[Callable[[Given], Parts]]:
    """How an operator is called."""
    lives: dict[str, Callable[[Given], Parts]] = {"capture": replayed, "rollout_buffer": filled}
    if op in lives:
        return [lives[op]]
    both = [lambda given: called(op, given)]
    return [*both, lambda given: differentiated(op, given)] if op in DIFFERENTIABLE else both


def seen(op: str, make: Callable[[], Given], device: str) -> dict[str, Any]:
    """All there is to say of one call: made twice, with and without gradients."""
    record: dict[str, Any] = {}
    for way in ways(op):
        both, error = guarded(lambda way=way: [way(_on(make(), op, device)) for _ in range(2)])
        if both is None:
            part = "error" if not record else "error with gradients"
            record |= {part: type(error).__name__, f"{part} says": str(error)[:300]}
            continue
        first, again = both
        record |= first
        unstable = [
            f"{part} {path}" for part in first for path, found in first[part].items() if again[part].get(path) != found
        ]
        if unstable:
            record["unstable"] = record.get("unstable", []) + unstable
    decision = rlk.last_decision(op)
    if "error" not in record and decision is not None:
        record["backend"] = str(decision.backend)
    return record


def _on(given: Given, op: str, device: str) -> Given:
    if op == "rollout_buffer":
        return {**given, "device": device}
    return {k: mapped(x, lambda t: moved(t, device)) for k, x in given.items()}
