"""How each optional argument of the operators on rewards shows: part of `argument_changes`."""

from __future__ import annotations

import torch

import rlkernel as rlk
from rlkernel_conformance.example_calls import B, T, draw, ids, logprobs, rewards, tokens
from tests.changes import Change, Changes, packed, starts


def advantage() -> Changes:
    dense, mask, values = draw(B, T), tokens(), draw(B, T, seed=1)
    steps = {"group": None, "kind": "gae", "rewards": dense, "values": values, "gamma": 0.9, "lam": 0.8}
    returns = {"group": None, "kind": "returns", "rewards": dense, "gamma": 0.9}
    vtrace = {**steps, "kind": "vtrace", "ratio": draw(B, T, seed=2).exp()}
    retrace = {**vtrace, "kind": "retrace"}
    gigpo = {"kind": "gigpo", "step_rewards": draw(B), "anchor": torch.tensor([0, 1, 0, 1, 1, 1])}
    otb = {"kind": "otb", "rewards": dense, "logprob": values, "sum_pi_squared": draw(B, T, seed=4).abs()}
    white = {**returns, "mask": mask, "whiten": "global"}
    constant = torch.tensor([0.9, 0.9, 0.9, 1.0, 0.0, 2.0])
    done = torch.arange(T).expand(B, T) == 1
    some = torch.tensor([True, True, False, True, True, True])
    square = {"group": None, "kind": "returns", "rewards": dense[0, :2], "cu_seqlens": torch.tensor([0, 1, 2])}
    return {
        "kind": Change("rloo"),
        "group": Change(2),
        "mask": Change(mask, returns),
        "lengths": Change(torch.tensor([5, 3, 1, 5, 4, 2]), returns),
        "cu_seqlens": Change(starts(*[T] * B), {**returns, "rewards": dense.flatten()}),
        "values": Change(draw(B, T, seed=8), steps),
        "gamma": Change(0.5, returns),
        "lam": Change(0.5, steps),
        "lam_value": Change(0.5, steps),
        "length_adaptive": Change(0.5, {**steps, "lam": 1.0}),
        "bootstrap": Change(draw(B, seed=9), returns),
        "dones": Change(done, returns),
        "done_index": Change("before", {**returns, "dones": done}),
        "turns": Change(torch.tensor([0, 0, 1, 1, 2]).expand(B, T), returns),
        "ratio": Change(draw(B, T, seed=6).exp(), vtrace),
        "ratio_clip": Change(0.3, vtrace),
        "trace_clip": Change(0.3, vtrace),
        "q_values": Change(draw(B, T, seed=6), retrace),
        "baseline": Change(draw(B), {"group": None, "kind": "remax", "baseline": draw(B, seed=1), "rewards": dense}),
        "in_stats": Change(some),
        "in_loss": Change(some),
        "valid_range": Change((0.1, 2.0)),
        "weights": Change(torch.arange(float(B))),
        "reward_weights": Change(torch.tensor([1.0, 5.0]), {"kind": "gdpo", "rewards": draw(B, 2)}),
        "step_rewards": Change(draw(B, seed=3), gigpo),
        "anchor": Change(torch.tensor([0, 0, 0, 1, 1, 1]), gigpo),
        "step_weight": Change(2.0, gigpo),
        "logprob": Change(draw(B, T, seed=5), otb),
        "sum_pi_squared": Change(draw(B, T, seed=6).abs(), otb),
        "leave_one_out": Change(True),
        "scale": Change("batch"),
        "ddof": Change(0),
        "eps": Change(0.5),
        "eps_mode": Change("var_add", {"eps": 0.1}),
        "min_std": Change(10.0),
        "low_std": Change("center", {"min_std": 10.0}),
        "singleton": Change("raw", {"group": torch.tensor([0, 0, 1, 1, 1, 2])}),
        "constant": Change("peer", {"rewards": constant}),
        "invalid": Change("raw", {"valid_range": (0.1, 2.0), "rewards": rewards() + 0.05}),
        "masked_time": Change("step", {**returns, "mask": mask}),
        "masked_out": Change("carry", {**returns, "mask": mask}),
        "whiten": Change("global"),
        "whiten_level": Change("sequence", {"mask": mask, "whiten": "global"}),
        "whiten_ddof": Change(0, white),
        "whiten_eps": Change(0.5, white),
        "whiten_eps_mode": Change("std_add", {**white, "whiten_eps": 0.5}),
        "process_group": Change(None, white),
        "reward_level": Change("token", square),
        "output": Change("token", {"mask": mask}),
    }


def affine_suffix_scan() -> Changes:
    return {
        "mask": Change(tokens()),
        "lengths": Change(torch.tensor([5, 3, 1, 5, 4, 2])),
        "cu_seqlens": Change(starts(*[T] * B), {"b": draw(B * T), "a": draw(B * T, seed=1)}),
        "init": Change(draw(B)),
        "exclusive": Change(True),
        "masked_out": Change("carry", {"mask": tokens()}),
    }


def whiten() -> Changes:
    return {
        "mask": Change(tokens()),
        "lengths": Change(torch.tensor([5, 3, 1, 5, 4, 2])),
        "counts": Change(ids(B, T, below=4)),
        "ddof": Change(0),
        "eps": Change(0.5),
        "eps_mode": Change("threshold", {"eps": 0.5}),
        "shift_mean": Change(False),
        "masked_out": Change("carry", {"mask": tokens()}),
        "apply": Change(False),
        "process_group": Change(None),
    }


def group_filter() -> Changes:
    mean = {"rule": "mean", "low": 0.1, "high": 0.9}
    return {
        "group": Change(2, {"threshold": 0.45}),
        "rule": Change("mean", {"rewards": torch.full((B,), 0.5)}),
        "threshold": Change(0.45),
        "low": Change(0.59, mean),
        "high": Change(0.5, mean),
        "ddof": Change(0, {"threshold": 0.45}),
        "valid": Change(torch.tensor([True, True, False, True, True, True])),
        "min_members": Change(4),
        "combine": Change("all", {"rewards": torch.stack([rewards(), torch.ones(B)], 1)}),
    }


def shape_rewards() -> Changes:
    length = {"lengths": torch.tensor([5, 3, 1, 5, 4, 2]), "max_length": 4, "overlong_buffer": 2}
    kl = {"kl": "k3", "kl_coef": 0.1, "logprob": logprobs(B, T, seed=1), "ref_logprob": logprobs(B, T, seed=2)}
    state = rlk.RunningMoments(torch.tensor(3.0), torch.tensor(0.5), torch.tensor(1.0))
    flat = packed({"logprob": kl["logprob"], "ref_logprob": kl["ref_logprob"]})
    return {
        "mask": Change(tokens(), kl),
        "lengths": Change(torch.tensor([1, 1, 1, 1, 1, 1]), length),
        "cu_seqlens": Change(starts(*[T] * B), {**kl, **flat, "cu_seqlens": starts(1, 2, 3, 4, 5, 6)}),
        "clip": Change((0.2, 0.6)),
        "normalize": Change("batch"),
        "running": Change(state, {"normalize": "running"}),
        "center": Change(False, {"normalize": "batch"}),
        "ddof": Change(0, {"normalize": "batch"}),
        "eps": Change(0.5, {"normalize": "batch"}),
        "max_length": Change(5, length),
        "overlong_buffer": Change(1, length),
        "overlong_factor": Change(2.0, length),
        "overlong_cap": Change(False, length),
        "kl": Change("k1", kl),
        "kl_coef": Change(0.5, kl),
        "logprob": Change(logprobs(B, T, seed=3), kl),
        "ref_logprob": Change(logprobs(B, T, seed=3), kl),
        "kl_input_clamp": Change(0.1, kl),
        "kl_clamp": Change(0.1, kl),
        "process_group": Change(None, {"normalize": "batch"}),
        "output": Change("token", {"mask": tokens()}),
    }
