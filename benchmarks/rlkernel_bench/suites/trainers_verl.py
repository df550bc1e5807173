"""verl's files as they are, without the engine around them; the rows `verl` of the suite `trainers`.

Of the packages that they only name (Ray, tensordict, transformers, configuration), empty ones stand for those that are
not installed; `verl`, its packages' `__init__` too, since those import all of verl.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import cached_property, partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel_bench.suites.common import Draw
from rlkernel_bench.suites.trainers import ROWS
from rlkernel_bench.work import Call, Inputs, Outputs, Work

GROUP: Final = 4  # answers a prompt
HEAT: Final = 0.9
BONUS: Final = 0.001  # of the entropy


class Config:
    """What the losses read of verl's ActorConfig."""

    clip_ratio, clip_ratio_low, clip_ratio_high = 0.2, 0.2, 0.28
    global_batch_info: dict[str, Any] = {}  # noqa: RUF012 verl's name

    def get(self, name: str, default: Any = None) -> Any:
        """As a dictionary."""
        return getattr(self, name, default)


class Host:
    """A batch, and verl's step on it."""

    def __init__(self, work: Work, device: str) -> None:
        self.work, self.device = work, device
        names = ("verl", "verl torch") if device.startswith("cuda") else ("verl",)
        self.ways: dict[str, Call] = {way: partial(self.step, way) for way in (*names, "")}

    @cached_property
    def core(self) -> Any:
        """Verl's algorithms, with the names of rlkernel in their registries."""
        return loaded(self.device.partition(":")[0])

    def make(self, seed: int) -> Inputs:
        """Hidden states and a head; rows of any length with a reward each; log-probabilities near those of now."""
        b, t, d, v = (self.work.sizes[k] for k in "BTDV")
        draw = Draw(self.device, seed)
        hidden = draw.normal(b * t, d, dtype=self.work.dtype)
        weight = draw.normal(v, d, std=2 / d**0.5, dtype=self.work.dtype)
        ids = draw.ids(v, b * t)
        lengths = t // 2 + draw.ids(t // 2 + 1, b, 1)
        rewards = torch.zeros(b, t, device=self.device)
        rewards[:, t // 2 - 1] = draw.uniform(b)
        now = rlk.linear_logprob(hidden, weight, ids, temperature=HEAT).logprob.view(b, t)
        return {
            "hidden": hidden,
            "weight": weight,
            "ids": ids,
            "mask": (torch.arange(t, device=self.device) < lengths).float(),
            "rewards": rewards,
            "index": [f"prompt-{i // GROUP}" for i in range(b)],
            "old": now + 0.1 * draw.normal(b, t),
        }

    def stock(self, given: Inputs) -> Outputs:
        """What verl makes by itself."""
        return self.step("verl", given)

    def defined(self, given: Inputs) -> Tensor:
        """Log-probabilities of some rows in float64."""
        z = given["hidden"][:ROWS].double() @ given["weight"].double().T / HEAT
        return z.log_softmax(-1).gather(-1, given["ids"][:ROWS, None])[:, 0]

    def step(self, way: str, given: Inputs) -> Outputs:
        """Loss, gradients and log-probabilities of a batch; by verl, or under the names of rlkernel."""
        ours, mask = not way, given["mask"]
        leaves = [given[name].detach().requires_grad_() for name in ("hidden", "weight")]
        estimate = self.core.get_adv_estimator_fn("rlkernel_grpo" if ours else "grpo")
        with torch.enable_grad(), _engine() if ours else nullcontext():
            adv, _ = estimate(token_level_rewards=given["rewards"].clone(), response_mask=mask, index=given["index"])
            logprob, entropy = self.head(way, *leaves, given["ids"])
            loss = self.core.get_policy_loss_fn("rlkernel_vanilla" if ours else "vanilla")
            pg, _ = loss(given["old"], logprob.view(mask.shape), adv, mask, "token-mean", Config())
            bonus = self.core.agg_loss(loss_mat=entropy.view(mask.shape), loss_mask=mask, loss_agg_mode="token-mean")
            total = pg - BONUS * bonus
        grads = torch.autograd.grad(total, leaves)
        return {
            "loss": total.detach(),
            "grad_hidden": grads[0],
            "grad_weight": grads[1],
            "logprob": logprob.detach(),
        }

    def head(self, way: str, hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each row, as verl's models ask for them; on a CPU verl has its torch way."""
        if way == "verl torch" or (way == "verl" and not self.device.startswith("cuda")):
            from verl.utils.experimental.torch_functional import FusedLinearForPPO

            logprob, entropy = FusedLinearForPPO()(hidden, weight, ids, HEAT)
            return logprob, entropy
        from verl.utils.kernel import linear_cross_entropy as module

        logprob, entropy = module.linear_cross_entropy(hidden, weight, ids, HEAT, "none", None)
        return logprob, entropy


def _engine() -> Any:
    from rlkernel.integrations import verl_engine

    return verl_engine.enabled()


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


def loaded(kind: str) -> Any:
    """The core_algos of verl, with the names of rlkernel in its registries."""
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
    gpu = kind == "cuda"
    package(
        "verl.utils.device",
        get_device_name=lambda: kind,
        is_cuda_available=gpu,
        get_torch_device=lambda: torch.cuda if gpu else None,
        get_device_capability=torch.cuda.get_device_capability if gpu else lambda: (0, 0),
    )
    from verl.utils import groupwise

    utils.as_torch_index, utils.group_mean_std = groupwise.as_torch_index, groupwise.group_mean_std
    from rlkernel.integrations import verl

    verl.register()
    from verl.trainer.ppo import core_algos

    return core_algos
