"""Calls of advantages, scans, rewards, captured functions and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel_bench.bits.inputs import Given, Size, Table, changed, draw, ids, larger, logprobs, starts

GROUP_KINDS: Final = ("grpo", "dr_grpo", "rloo", "opo", "maxrl", "passk", "gpg", "reinforce_pp_baseline")


def advantage(s: Size) -> Table:
    """Every kind and option: groups of sequences, and steps over tokens."""
    B, T = s.B, s.T
    mask, done = s.tokens(), torch.arange(T).expand(B, T) == 1
    rewards = torch.tensor([1.0, 0.0, 0.75, 1.0, 0.5, 0.25])
    some = torch.tensor([True, True, False, True, True, True])
    constant = torch.tensor([0.9, 0.9, 0.9, 1.0, 0.0, 2.0])

    def group(**more: Any) -> Callable[[], Given]:
        return lambda: {"rewards": rewards, "kind": "grpo", "group": 3, **more}

    def steps(**more: Any) -> Callable[[], Given]:
        values = draw(B, T, seed=1)
        return lambda: {"rewards": draw(B, T), "kind": "gae", "values": values, "gamma": 0.9, "lam": 0.8, **more}

    def returns(**more: Any) -> Callable[[], Given]:
        return lambda: {"rewards": draw(B, T), "kind": "returns", "gamma": 0.9, **more}

    def ratio(kind: str, **more: Any) -> Callable[[], Given]:
        return steps(kind=kind, ratio=draw(B, T, seed=2).exp(), **more)

    gigpo = {"kind": "gigpo", "step_rewards": draw(B), "anchor": torch.tensor([0, 1, 0, 1, 1, 1])}
    otb = {"kind": "otb", "logprob": draw(B, T, seed=1), "sum_pi_squared": draw(B, T, seed=4).abs()}
    found: Table = {
        **{f"kind {k}": group(kind=k, **({"lengths": s.lengths()} if k == "opo" else {})) for k in GROUP_KINDS},
        "kind gdpo": group(kind="gdpo", rewards=draw(B, 2), reward_weights=torch.tensor([1.0, 5.0])),
        "kind gigpo": group(**gigpo),
        "gigpo, weight of steps": group(**gigpo, step_weight=2.0),
        "kind otb": group(**otb, rewards=draw(B, T)),
        "ids of groups": group(group=torch.tensor([7, 7, 3, 3, 3, 7])),
        "group of two": group(group=2),
        "left out": group(leave_one_out=True),
        "scale of the batch": group(scale="batch"),
        "no scale": group(scale="none"),
        "ddof 0": group(ddof=0),
        "eps": group(eps=0.5),
        "eps on the variance": group(eps=0.1, eps_mode="var_add"),
        "least deviation": group(min_std=10.0),
        "least deviation, centred": group(min_std=10.0, low_std="center"),
        "a group of one": group(group=torch.tensor([0, 0, 1, 1, 1, 2]), singleton="raw"),
        "refused: a group of one": group(group=torch.tensor([0, 0, 1, 1, 1, 2]), singleton="error"),
        "constant groups": group(rewards=constant, constant="peer"),
        "range": group(valid_range=(0.1, 2.0)),
        "range, raw": group(valid_range=(0.1, 2.0), rewards=rewards + 0.05, invalid="raw"),
        "not in statistics": group(in_stats=some),
        "not in the loss": group(in_loss=some),
        "weights": group(weights=torch.arange(float(B))),
        "whitened": group(whiten="global"),
        "whitened by sequence": group(mask=mask, whiten="global", whiten_level="sequence"),
        "by token": group(mask=mask, output="token"),
        "kind gae": steps(),
        "gae, mask": steps(mask=mask),
        "gae, lambda of values": steps(lam_value=0.5),
        "gae, lambda by length": steps(lam=1.0, length_adaptive=0.5),
        "gae, lambda per row": steps(lam=torch.linspace(0, 1, B)),
        "kind returns": returns(),
        "returns, bootstrap": returns(bootstrap=draw(B, seed=9)),
        "returns, lengths": returns(lengths=s.lengths()),
        "returns, packed": returns(rewards=draw(B, T).flatten(), cu_seqlens=starts(*[T] * B)),
        "returns, dones": returns(dones=done),
        "returns, dones before": returns(dones=done, done_index="before"),
        "returns, turns": returns(turns=(torch.arange(T) * 3 // T).expand(B, T)),
        "returns, masked time": returns(mask=mask, masked_time="step"),
        "returns, carried": returns(mask=mask, masked_out="carry"),
        "returns, whitened": returns(mask=mask, whiten="global"),
        "returns, whitened, options": returns(
            mask=mask, whiten="global", whiten_ddof=0, whiten_eps=0.5, whiten_eps_mode="std_add"
        ),
        "kind reinforce_pp": returns(kind="reinforce_pp", mask=mask),
        "kind remax": lambda: {"rewards": draw(B, T), "kind": "remax", "baseline": draw(B)},
        "kind vtrace": ratio("vtrace"),
        "vtrace, clips": ratio("vtrace", ratio_clip=0.3, trace_clip=0.3),
        "kind retrace": ratio("retrace"),
        "retrace, q": ratio("retrace", q_values=draw(B, T, seed=6)),
        **{f"preset {f} {e}": group(**rlk.advantage_preset(f, e)) for f, e in (("trl", "grpo"), ("verl", "grpo"))},
    }
    b, t = 64, 2048
    lengths = 1 + ids(b, below=t, seed=3)
    found |= larger(
        s,
        "64 x 2048 gae",
        lambda: {
            "kind": "gae",
            "rewards": draw(b, t, std=0.1),
            "values": draw(b, t, seed=1),
            "gamma": 0.99,
            "lam": 0.95,
            "mask": torch.arange(t)[None] < lengths[:, None],
        },
    )
    for kind in ("grpo", "rloo", "dr_grpo"):
        found |= larger(
            s, f"4096 {kind}", lambda k=kind: {"kind": k, "rewards": draw(4096).abs().round(decimals=1), "group": 8}
        )
    return found


def affine_suffix_scan(s: Size) -> Table:
    """Every option, short and long rows."""
    B, T = s.B, s.T
    found = changed(
        lambda: {"b": draw(B, T), "a": draw(B, T, seed=1)},
        {
            "mask": lambda: {"mask": s.tokens()},
            "lengths": lambda: {"lengths": s.lengths()},
            "packed": lambda: {"b": draw(B * T), "a": draw(B * T, seed=1), "cu_seqlens": starts(*[T] * B)},
            "init": lambda: {"init": draw(B)},
            "exclusive": lambda: {"exclusive": True},
            "carried": lambda: {"mask": s.tokens(), "masked_out": "carry"},
        },
    )
    for b, t in ((64, 2048), (2, 65536)):
        found |= larger(s, f"{b} x {t}", lambda b=b, t=t: {"b": draw(b, t), "a": draw(b, t, seed=1).tanh()})
    return found


def whiten(s: Size) -> Table:
    """Every option."""
    B, T = s.B, s.T
    found = changed(
        lambda: {"x": draw(B, T)},
        {
            "mask": lambda: {"mask": s.tokens()},
            "lengths": lambda: {"lengths": s.lengths()},
            "counts": lambda: {"counts": ids(B, T, below=4)},
            "ddof 0": lambda: {"ddof": 0},
            "eps": lambda: {"eps": 0.5},
            "eps as threshold": lambda: {"eps": 0.5, "eps_mode": "threshold"},
            "no shift": lambda: {"shift_mean": False},
            "carried": lambda: {"mask": s.tokens(), "masked_out": "carry"},
            "moments alone": lambda: {"apply": False},
        },
    )
    return found | larger(s, "64 x 2048", lambda: {"x": draw(64, 2048), "mask": ids(64, 2048, below=3) > 0})


def group_filter(s: Size) -> Table:
    """Every rule."""
    rewards = torch.tensor([1.0, 0.0, 0.75, 1.0, 0.5, 0.25])
    found = changed(
        lambda: {"rewards": rewards, "group": 3},
        {
            "ids of groups": lambda: {"group": torch.tensor([7, 7, 3, 3, 3, 7])},
            "distinct": lambda: {"rule": "distinct"},
            "mean": lambda: {"rule": "mean", "low": 0.59, "high": 0.9},
            "threshold": lambda: {"threshold": 0.45, "ddof": 0},
            "valid": lambda: {"valid": torch.tensor([True, True, False, True, True, True])},
            "members": lambda: {"min_members": 4},
            "two rewards": lambda: {"rewards": torch.stack([rewards, torch.ones(6)], 1), "combine": "all"},
        },
    )
    return found | larger(s, "4096", lambda: {"rewards": draw(4096).round(), "group": 8})


def shape_rewards(s: Size) -> Table:
    """Every option."""
    B, T = s.B, s.T
    kl = {"kl": "k3", "kl_coef": 0.1, "logprob": logprobs(B, T, seed=1), "ref_logprob": logprobs(B, T, seed=2)}
    length = {"lengths": s.lengths(), "max_length": 4, "overlong_buffer": 2}
    flat = {k: kl[k].flatten() for k in ("logprob", "ref_logprob")}
    state = rlk.RunningMoments(torch.tensor(3.0), torch.tensor(0.5), torch.tensor(1.0))
    return changed(
        lambda: {"rewards": torch.tensor([1.0, 0.0, 0.75, 1.0, 0.5, 0.25])},
        {
            "clip": lambda: {"clip": (0.2, 0.6)},
            "batch": lambda: {"normalise": "batch"},
            "batch, options": lambda: {"normalise": "batch", "center": False, "ddof": 0, "eps": 0.5},
            "running": lambda: {"normalise": "running", "running": state},
            "overlong": lambda: length,
            "overlong, options": lambda: {**length, "overlong_factor": 2.0, "overlong_cap": False},
            **{f"kl {k}": lambda k=k: {**kl, "kl": k} for k in ("k1", "abs", "k2", "k3")},
            "kl, mask": lambda: {**kl, "mask": s.tokens()},
            "kl, packed": lambda: {**kl, **flat, "cu_seqlens": starts(*[T] * B)},
            "kl, clamps": lambda: {**kl, "kl_input_clamp": 0.1, "kl_clamp": 0.1},
            "by token": lambda: {"mask": s.tokens(), "output": "token"},
        },
    )


def capture(_: Size) -> Table:
    """Functions of torch alone: what a replay gives, with buckets, noise and gradients."""
    base = {"fn": lambda x: x * 2 + 1, "example": (draw(4, 3),)}
    return changed(
        lambda: dict(base),
        {
            "bucket": lambda: {"fn": step, "buckets": (rlk.Bucket({"x": 0}, (2, 4, 8)),)},
            "view": lambda: {"outputs": "view"},
            "noise": lambda: {"fn": lambda x: x + torch.rand(x.shape, device=x.device)},
            "refused: noise": lambda: {"fn": lambda x: x + torch.rand(x.shape, device=x.device), "rng": "forbid"},
            "verified": lambda: {"verify": "always"},
            "guarded": lambda: {"guard": "call"},
            "log-probability": lambda: {
                "fn": lambda x: rlk.logprob(x, torch.zeros(len(x), dtype=torch.int64, device=x.device)).logprob
            },
            "gradient": lambda: {"autograd": True, "example": (draw(4, 3).requires_grad_(),)},
        },
    )


def step(x: Tensor) -> Tensor:
    """A function whose argument has a name that a bucket can speak of."""
    return x * 2 + 1


def rollout_buffer(_: Size) -> Table:
    """Pages, groups, rewards."""
    return changed(
        lambda: {"max_tokens": 64, "max_seqs": 8, "page_tokens": 4},
        {
            "group size": lambda: {"group_size": 1},
            "two rewards": lambda: {"rewards": 2},
            "fields": lambda: {"fields": {"token": rlk.Field("int32"), "logprob": rlk.Field("bfloat16")}},
            "larger pages": lambda: {"page_tokens": 16},
            "drop oldest": lambda: {"on_full": "drop_oldest"},
            "batch": lambda: {"max_batch_tokens": 32},
        },
    )
