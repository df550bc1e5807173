"""verl's own head, advantages and policy loss beside verl with rlkernel inside: time, peak memory, loss curves.

    PYTHONPATH=.:registry:benchmarks:backends/triton:backends/cuda OUT=/tmp/out python benchmarks/gpu_verl.py
    DEVICE=cpu SIZE=toy OUT=/tmp/out python benchmarks/gpu_verl.py
    python benchmarks/gpu_verl.py plot benchmarks/results/verl_cpu/verl.json       # the curves beside the file

Runs verl's files as they are. Of the packages that they only name (Ray, tensordict, transformers, configuration), empty
ones stand for those that are not installed; `verl`, its packages' `__init__` too, since those import all of verl.

`update`: what an actor does with the last hidden states of a batch, forward and backward: GRPO advantages, the head
(log-probability and entropy), the clipped loss with its metrics. Stock is verl's Triton kernel (`use_fused_kernels`,
`impl_backend: triton`; on a CPU its torch one), `stock_torch` its torch one; ours is `rlkernel_grpo`, `linear_logprob`
as engine kernel and `rlkernel_vanilla`. Log-probabilities are held against float64 on some rows first.
`curves`: a small policy trained by both from one seed, step by step.
Sections run in processes of their own; what has ended stands in $OUT/verl.json.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from gpu_trl import measured, prepare, sections

OUT = Path(os.environ.get("OUT", "."))
DEVICE = os.environ.get("DEVICE", "cuda")
TOY = os.environ.get("SIZE") == "toy"
SIZES = [(4, 16, 64, 301)] if TOY else [(16, 512, 1536, 151936), (16, 512, 4096, 128256)]  # B, T, D, V
GROUP = 4
HEAT = 0.9
STEPS = 60
VARIANTS = ("stock", "stock_torch", "ours", "ours_portable") if DEVICE == "cuda" else ("stock_torch", "ours")


class Config:
    """What the losses read of verl's ActorConfig."""

    clip_ratio, clip_ratio_low, clip_ratio_high = 0.2, 0.2, 0.28
    global_batch_info: dict[str, Any] = {}  # noqa: RUF012  verl's name

    def get(self, name: str, default: Any = None) -> Any:
        """As a dictionary."""
        return getattr(self, name, default)


def package(name: str, **inside: Any) -> ModuleType:
    """A package in the place of one whose `__init__` needs more than its files do; those files are the real ones."""
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None, is_package=True)
    top = find_spec("verl") if "verl" not in sys.modules else sys.modules["verl"].__spec__
    home = next(iter(top.submodule_search_locations or [])) if top else ""
    made.__path__ = [str(Path(home, *name.split(".")[1:]))] if name.startswith("verl") else []
    if name == "verl":
        made.__spec__.submodule_search_locations = made.__path__
    vars(made).update(inside)
    sys.modules[name] = made
    return made


def load() -> Any:
    """The core_algos of verl, with the names of rlkernel in its registries."""
    prepare()
    for name, inside in (
        ("omegaconf", "DictConfig"),
        ("tensordict", "TensorDict"),
        ("transformers", "PreTrainedTokenizer"),
    ):
        if find_spec(name) is None:
            package(name, **{inside: type(inside, (), {})})
    package("verl")
    utils = package("verl.utils")
    for name in ("verl.trainer", "verl.trainer.ppo", "verl.utils.kernel", "verl.utils.experimental", "verl.workers"):
        package(name)
    package("verl.trainer.config", AlgoConfig=type("AlgoConfig", (), {}))
    package("verl.workers.config", ActorConfig=Config)
    package("verl.utils.import_utils", deprecated=lambda _: lambda wrapped: wrapped)
    answers = {"get_device_name": lambda: DEVICE, "is_cuda_available": DEVICE == "cuda"}
    if DEVICE == "cuda":
        import torch

        answers |= {"get_torch_device": lambda: torch.cuda, "get_device_capability": torch.cuda.get_device_capability}
    else:
        answers |= {"get_torch_device": lambda: None, "get_device_capability": lambda: (0, 0)}
    package("verl.utils.device", **answers)
    from verl.utils import groupwise

    utils.as_torch_index, utils.group_mean_std = groupwise.as_torch_index, groupwise.group_mean_std
    from rlkernel.integrations import verl

    verl.register()
    from verl.trainer.ppo import core_algos

    return core_algos


@contextmanager
def inside(which: str) -> Iterator[None]:
    """Stock, or ours by the fastest backend, or by the portable one."""
    import rlkernel as rlk
    from rlkernel.integrations import verl_engine

    order = None if which.startswith("stock") else ("triton", "reference") if which == "ours_portable" else ("auto",)
    with verl_engine.enabled() if order else nullcontext(), rlk.use(*order) if order else nullcontext():
        yield


def head(which: str, hidden: Any, weight: Any, ids: Any) -> tuple[Any, Any]:
    """Log-probability and entropy of each row, as verl's models ask for them."""
    if which == "stock_torch":
        from verl.utils.experimental.torch_functional import FusedLinearForPPO

        logprob, entropy = FusedLinearForPPO()(hidden, weight, ids, HEAT)
        return logprob, entropy
    from verl.utils.kernel import linear_cross_entropy as module

    logprob, entropy = module.linear_cross_entropy(hidden, weight, ids, HEAT, "none", None)
    return logprob, entropy


def step(core: Any, which: str, given: dict[str, Any], hidden: Any, weight: Any) -> tuple[Any, dict[str, Any]]:
    """The loss of a batch, and verl's metrics of it."""
    name = "" if which.startswith("stock") else "rlkernel_"
    B, T = given["mask"].shape
    estimate = core.get_adv_estimator_fn("grpo" if not name else "rlkernel_grpo")
    adv, _ = estimate(token_level_rewards=given["rewards"].clone(), response_mask=given["mask"], index=given["index"])
    with inside(which):
        logprob, entropy = head(which, hidden, weight, given["ids"])
        loss = core.get_policy_loss_fn(f"{name}vanilla")
        pg, metrics = loss(given["old"], logprob.view(B, T), adv, given["mask"], "token-mean", Config())
    bonus = core.agg_loss(loss_mat=entropy.view(B, T), loss_mask=given["mask"], loss_agg_mode="token-mean")
    return pg - 0.001 * bonus, metrics


def update() -> dict[str, Any]:
    """An actor's update from its last hidden states, size by size."""
    core = load()
    return {f"{B}x{T}x{D}x{V}": update_of(core, B, T, D, V) for B, T, D, V in SIZES}


def update_of(core: Any, B: int, T: int, D: int, V: int) -> dict[str, Any]:
    """B sequences of T tokens."""
    import torch

    import rlkernel as rlk

    torch.manual_seed(0)
    kind = {"device": DEVICE, "dtype": torch.float32 if TOY else torch.bfloat16}
    hidden, weight = torch.randn(B * T, D, **kind), torch.randn(V, D, **kind) * (2 / D**0.5)
    ids = torch.randint(0, V, (B * T,), device=DEVICE)
    z = hidden[:64].double() @ weight.double().T / HEAT
    true = z.log_softmax(-1).gather(-1, ids[:64, None])[:, 0]
    del z
    mask = (torch.arange(T, device=DEVICE) < torch.randint(T // 2, T + 1, (B, 1), device=DEVICE)).float()
    rewards = torch.zeros(B, T, device=DEVICE)
    rewards[:, T // 2 - 1] = torch.rand(B, device=DEVICE)
    given = {"ids": ids, "mask": mask, "rewards": rewards, "index": [f"prompt-{i // GROUP}" for i in range(B)]}
    first: dict[str, Any] = {"error": {}, "kernel": {}, "loss": {}, "metrics": {}}
    with torch.no_grad(), inside("ours"):
        given["old"] = head("ours", hidden, weight, ids)[0].view(B, T) + 0.1 * torch.randn(B, T, device=DEVICE)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def run(which: str) -> list[Any]:
        loss, metrics = step(core, which, given, *leaves)
        first["loss"][which], first["metrics"][which] = loss.item(), metrics
        return list(torch.autograd.grad(loss, leaves))

    norms: dict[str, list[float]] = {}
    stock = run(VARIANTS[0])
    for which in VARIANTS:
        with torch.no_grad(), inside(which):
            first["error"][which] = (head(which, hidden, weight, ids)[0][:64].double() - true).abs().max().item()
        ran = rlk.last_decision("linear_logprob")
        first["kernel"][which] = "verl" if which.startswith("stock") or ran is None else ran.target
        grads = run(which)
        norms[which] = [
            ((g.float() - s.float()).norm() / s.float().norm()).item() for g, s in zip(grads, stock, strict=True)
        ]
        del grads
    del stock
    return first | {"gradients_apart_from_stock": norms, "step": measured({w: lambda w=w: run(w) for w in VARIANTS})}


def curves() -> dict[str, Any]:
    """A policy of one hidden layer that learns to answer with the prompt's own token, twice from one seed."""
    core = load()
    stock = VARIANTS[0]
    runs = {which: learnt(core, which) for which in (stock, "ours")}
    apart = [abs(a - b) for a, b in zip(runs[stock]["loss"], runs["ours"]["loss"], strict=True)]
    return {"runs": runs, "largest_difference_of_loss": max(apart)}


def learnt(core: Any, which: str) -> dict[str, list[float]]:
    """Loss, reward, KL and share of clipped tokens at each step."""
    import torch

    torch.manual_seed(0)
    B, T, D, V = 64, 8, 128, 256
    kind = torch.float32 if DEVICE == "cpu" else torch.bfloat16  # of what verl's kernels multiply
    made = torch.Generator().manual_seed(1)
    body = torch.nn.Sequential(torch.nn.Embedding(V, D), torch.nn.Linear(D, D), torch.nn.Tanh()).to(DEVICE)
    weight = torch.nn.Parameter((torch.randn(V, D) / D**0.5).to(DEVICE))
    optimizer = torch.optim.AdamW([*body.parameters(), weight], lr=3e-3, weight_decay=0.0)
    found: dict[str, list[float]] = {"loss": [], "reward": [], "kl": [], "clipped": []}
    for _ in range(STEPS // 2):
        asked = torch.randint(0, 8, (B // GROUP,), generator=made).repeat_interleave(GROUP)
        prompts = asked[:, None].expand(B, T).to(DEVICE)
        with torch.no_grad():
            law = (body(prompts).flatten(0, 1) @ weight.T / HEAT).log_softmax(-1)
            ids = torch.multinomial(law.exp().cpu(), 1, generator=made).to(DEVICE)
            old = law.gather(-1, ids).view(B, T)
        right = (ids.view(B, T) % 8 == prompts).float()
        given = {
            "ids": ids[:, 0], "old": old, "mask": torch.ones(B, T, device=DEVICE), "rewards": right / T,
            "index": [str(i // GROUP) for i in range(B)],
        }  # fmt: skip
        for _ in range(2):  # a batch is used twice, so that ratios leave 1
            loss, metrics = step(core, which, given, body(prompts).flatten(0, 1).to(kind), weight.to(kind))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found["loss"].append(loss.item())
            found["reward"].append(right.mean().item())
            found["kl"].append(metrics["actor/ppo_kl"])
            found["clipped"].append(metrics["actor/pg_clipfrac"])
    return found


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {"update": update, "curves": curves}


def draw(path: Path) -> None:
    """Loss and reward, and of a GPU time and peak memory of the largest update: a panel each, beside the file."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    told = json.loads(path.read_text(encoding="utf-8"))
    stock, ours = told["curves"]["runs"].values()
    rows = list(told["update"].values())[-1]["step"]
    bars = ("ms", "peak_gib") if all(row["peak_gib"] for row in rows.values()) else ()
    figure, panels = plt.subplots(1, 2 + len(bars), figsize=(9 if not bars else 14, 3.2), layout="constrained")
    for panel, name in zip(panels[2:], bars, strict=True):
        colours = ["0.75" if which.startswith("stock") else "tab:blue" for which in rows]
        panel.barh(list(rows), [row[name] for row in rows.values()], color=colours)
        panel.set(title={"ms": "update, ms", "peak_gib": "peak memory, GiB"}[name])
        panel.invert_yaxis()
    for panel, name in zip(panels[:2], ("loss", "reward"), strict=True):
        panel.plot(stock[name], label="verl", linewidth=3, color="0.75")
        panel.plot(ours[name], label="verl with rlkernel", linewidth=1, color="tab:blue")
        panel.set(xlabel="step", title=name)
        panel.legend(frameon=False)
    figure.savefig(path.with_name("curves.png"), dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    if sys.argv[1:2] == ["plot"]:
        draw(Path(sys.argv[2]))
    elif len(sys.argv) > 1:
        print(json.dumps(SECTIONS[sys.argv[1]]()))
    else:
        made = {"machine": platform.machine(), "verl": version("verl"), "torch": version("torch")}
        sections(__file__, SECTIONS, OUT / "verl.json", made)
