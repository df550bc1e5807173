"""What one writes without a library: plain torch, operator by operator. The base of every speed-up."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from rlkernel_bench.peers import Peer
from rlkernel_bench.peers.decode_chain import chain, dense
from rlkernel_bench.suites.adapters import add_each
from rlkernel_bench.suites.host_advantage import BY_GROUP
from rlkernel_bench.suites.rollout import LAW
from rlkernel_bench.work import Call, Inputs, Outputs, Work

LONGEST_LOOP = 16384  # steps of a Python loop over time; beyond, a call takes seconds


def logprob(work: Work) -> Call:
    """log_softmax in fp32, then gather."""
    entropy, temperature = work.options.get("entropy", False), work.options.get("temperature", 1.0)

    def run(given: Inputs) -> Outputs:
        x = given["logits"].float()
        law = torch.log_softmax(x if temperature == 1.0 else x / temperature, -1)
        ids = given["ids"]
        out = {"logprob": law.gather(-1, ids if ids.dim() == law.dim() else ids[:, None]).view(ids.shape)}
        return out | ({"entropy": -(law.exp() * law).sum(-1)} if entropy else {})

    return run


def linear_logprob(work: Work) -> Call:
    """The logits in the dtype of the model, with those of a low-rank addition, then the above."""
    law = logprob(work)

    def run(given: Inputs) -> Outputs:
        logits = given["hidden"] @ given["weight"].t()
        if "A" in given:
            logits = logits + 2.0 * (given["hidden"] @ given["A"].t()) @ given["B"].t()  # the scale of the suite
        return law({"logits": logits, "ids": given["ids"]})

    return run


def divergence(work: Work) -> Call:
    """log_softmax of both in fp32, then kl_div; with a list its K ids and a tail from 1 less their mass."""
    kind, K = str(work.options["kind"]), int(work.options.get("K", 0))

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return functional.kl_div(log_b, log_a, reduction="none", log_target=True).sum(-1)

    def run(given: Inputs) -> Outputs:
        log_s = torch.log_softmax(given["logits"].float(), -1)
        if K:
            log_s, log_t = log_s.gather(-1, given["teacher_ids"]), given["teacher"].float()
            log_s, log_t = (torch.cat([x, (1 - x.exp().sum(-1, keepdim=True)).log()], -1) for x in (log_s, log_t))
        else:
            log_t = torch.log_softmax(given["teacher"].float(), -1)
        if kind == "jsd":
            log_m = torch.logaddexp(log_s, log_t) - math.log(2)
            return {"divergence": (kl(log_t, log_m) + kl(log_s, log_m)) / 2}
        return {"divergence": kl(log_t, log_s) if kind == "forward_kl" else kl(log_s, log_t)}

    return run


def linear_divergence(work: Work) -> Call:
    """The logits of both in the dtype of the models, then the above."""
    law = divergence(work)
    sides = {"logits": ("hidden", "weight"), "teacher": ("teacher", "teacher_weight")}
    return lambda given: law({name: given[x] @ given[w].t() for name, (x, w) in sides.items()})


def grpo(logprob: Any, old: Any, advantages: Any, mask: Any, low: float = 0.2, high: float = 0.2) -> Any:
    """Clipped surrogate, mean over tokens; [B, T]."""
    ratio = (logprob - old).exp()
    gain = advantages[:, None]
    loss = -torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)
    return torch.where(mask, loss, 0.0).sum() / mask.sum()


def policy_loss(work: Work) -> Call:
    """Clipped surrogate, with k3 against a reference where the work has one."""
    beta = float(work.options.get("kl_coef", 0.0))

    def run(given: Inputs) -> Outputs:
        loss = grpo(given["logprob"], given["old_logprob"], given["advantages"], given["mask"])
        if beta:
            q = given["ref_logprob"] - given["logprob"]
            loss = loss + beta * torch.where(given["mask"], q.exp() - 1 - q, 0.0).sum() / given["mask"].sum()
        return {"loss": loss}

    return run


def linear_policy_loss(work: Work) -> Call:
    """Logits, log_softmax, gather, loss."""

    def run(given: Inputs) -> Outputs:
        logits = given["hidden"] @ given["weight"].t()
        found = torch.log_softmax(logits.float(), -1).gather(-1, given["ids"][..., None]).squeeze(-1)
        return {"loss": grpo(found, given["old_logprob"], given["advantages"], given["mask"])}

    return run


def advantage(work: Work) -> Call:
    """GAE as trainers write it, a loop over time; statistics of groups by reshaping."""
    kind = str(work.options["kind"])
    if kind in BY_GROUP:
        plain = _grpo_by_ids if work.options["ids"] else BY_GROUP[kind][0]
        return lambda given: {"advantages": plain(given).flatten()}
    if work.sizes["T"] > LONGEST_LOOP:
        raise NotImplementedError(f"a Python loop over {work.sizes['T']} steps takes seconds a call")
    gamma, lam = float(work.options["gamma"]), float(work.options["lam"])

    def run(given: Inputs) -> Outputs:
        rewards, values, mask = given["rewards"], given["values"], given["mask"]
        after, running, found = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0]), []
        for t in reversed(range(rewards.shape[1])):
            step = rewards[:, t] + gamma * after - values[:, t]
            running = torch.where(mask[:, t], step + gamma * lam * running, running)
            after = torch.where(mask[:, t], values[:, t], after)
            found.append(running)
        advantages = torch.where(mask, torch.stack(found[::-1], 1), 0.0)
        return {"advantages": advantages, "returns": torch.where(mask, advantages + values, 0.0)}

    return run


def _grpo_by_ids(given: Inputs) -> Any:
    """Sums of as many groups as there are at most, added up by id."""
    x, ids = given["rewards"], given["group"]
    zeros = x.new_zeros(len(x) // 8)
    counts = zeros.index_add(0, ids, torch.ones_like(x))
    centered = x - (zeros.index_add(0, ids, x) / counts)[ids]
    std = (zeros.index_add(0, ids, centered.square()) / (counts - 1)).sqrt()
    return centered / (std[ids] + 1e-6)


def ratio_kl(_work: Work) -> Call:
    """Two log-softmaxes, then the ratio and k3."""

    def run(given: Inputs) -> Outputs:
        laws = (torch.log_softmax(given[k].float(), -1) for k in ("logits", "ref"))
        policy, ref = (x.gather(-1, given["ids"][:, None]).squeeze(-1) for x in laws)
        q = ref - policy
        return {"ratio": (-q).exp(), "k3": q.exp() - 1 - q}

    return run


def sample(work: Work) -> Call:
    """Sort, cut, softmax, inverse of the cumulative sum by exponential noise."""
    k, p = int(work.options.get("top_k", 0)), float(work.options.get("top_p", 1.0))

    def run(given: Inputs) -> Outputs:
        x = given["logits"].float()
        if not k and p >= 1:
            return {"token": _race(torch.softmax(x, -1))}
        ordered, ids = x.sort(-1, descending=True)
        if k:
            ordered[:, k:] = -torch.inf
        law = torch.softmax(ordered, -1)
        law = torch.where(law.cumsum(-1) - law >= p, 0.0, law)
        return {"token": ids.gather(-1, _race(law)[:, None]).squeeze(-1)}

    return run


def _race(law: Any) -> Any:
    """An index of each row with its probability, without a host synchronization."""
    return (law / torch.empty_like(law).exponential_()).argmax(-1)


def lm_head_sample(work: Work) -> Call:
    """Logits, then the above."""
    draw = sample(work)
    return lambda given: draw({"logits": given["hidden"] @ given["weight"].t()})


def rms_norm(_work: Work) -> Call:
    """Sum, then torch's own norm."""

    def run(given: Inputs) -> Outputs:
        total = given["x"] + given["residual"]
        return {"y": functional.rms_norm(total, total.shape[-1:], given["weight"], 1e-6), "total": total}

    return run


def glu(_work: Work) -> Call:
    """SwiGLU of two halves."""

    def run(given: Inputs) -> Outputs:
        gate, up = given["x"].chunk(2, -1)
        return {"y": functional.silu(gate) * up}

    return run


def fake_quantize(work: Work) -> Call:
    """Fake quantization by torch, which takes a scale per row of fp32 weights and multiplies with its inverse."""
    if work.options["format"] != "int8_channel" or work.dtype != "float32":
        raise NotImplementedError("takes int8_channel in fp32 only")

    def run(given: Inputs) -> Outputs:
        scale = given["weight"].abs().amax(1) / 127
        none = torch.zeros(len(scale), dtype=torch.int32, device=scale.device)
        return {"y": torch.fake_quantize_per_channel_affine(given["weight"], scale, none, 0, -127, 127)}

    return run


def attention(work: Work) -> Call:
    """Torch's own, over keys in rows: it knows no pages."""
    B, M, S = (work.sizes[s] for s in "BMS")
    last = causal_lower_right(M, S) if 1 < M < S else None

    def run(given: Inputs) -> Outputs:
        q, k, v = (given[n].unflatten(0, (B, -1)).transpose(1, 2) for n in "qkv")
        out = functional.scaled_dot_product_attention(q, k, v, last, is_causal=M == S, enable_gqa=True)
        return {"out": out.transpose(1, 2).flatten(0, 1)}

    return run


def adapters(work: Work) -> Call:
    """The product with the weight before it was quantized, then one adapter after the other."""
    del work

    def run(given: Inputs) -> Outputs:
        y = given["x"] @ given["weight"].t()
        add_each(given, y)
        return {"y_full": y}

    return run


def rollout(work: Work) -> Call:
    """Products of torch, with quantized weights unpacked before, and the draw above, launched one by one."""
    draw = sample(Work("", "sample", {"B": work.sizes["B"], "V": work.sizes["V"]}, options=LAW))
    return chain(work, lambda x, _seed, _at: (draw({"logits": x})["token"],), lambda step, _: step, dense)


PEERS = (
    Peer(
        "torch",
        "torch",
        ("torch",),
        {
            "logprob": logprob,
            "divergence": divergence,
            "linear_divergence": linear_divergence,
            "linear_logprob": linear_logprob,
            "policy_loss": policy_loss,
            "linear_policy_loss": linear_policy_loss,
            "advantage": advantage,
            "sample": sample,
            "lm_head_sample": lm_head_sample,
            "rms_norm": rms_norm,
            "glu": glu,
            "fake_quantize": fake_quantize,
            "attention": attention,
            "adapters": adapters,
            "ratio_kl": ratio_kl,
            "rollout": rollout,
        },
        "written here",
        ("cpu", "cuda"),
        ran="H200, torch 2.11; CPU, torch 2.13",
    ),
)
