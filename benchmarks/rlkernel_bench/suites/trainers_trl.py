"""TRL's head and loss around a random Qwen2; the row `trl` of the suite `trainers`.

TRL names classes of datasets and pandas when it is imported, and what runs here uses none: empty modules stand for them
where they are not installed.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import cached_property, partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel_bench.suites.common import Draw
from rlkernel_bench.work import Call, Inputs, Outputs, Work

HEADS: Final = {1536: 12}  # of attention, by width; 4 unless named
_NAMED: Final = {
    "datasets": ("Dataset", "IterableDataset", "IterableDatasetDict", "DatasetDict"),
    "pandas": ("DataFrame",),
}


class Host:
    """A model, a batch, and TRL's step on it."""

    def __init__(self, work: Work, device: str) -> None:
        self.work, self.device = work, device
        self.ways: dict[str, Call] = {way: partial(self.step, way) for way in ("trl", "", "fused")}

    @cached_property
    def model(self) -> Any:
        """Qwen2 of random weights, which scores tokens as TRL has its models do."""
        for name, names in _NAMED.items():
            if find_spec(name) is None:
                empty = ModuleType(name)
                empty.__spec__ = ModuleSpec(name, None)
                vars(empty).update({inside: type(inside, (), {}) for inside in names})
                sys.modules[name] = empty
        from transformers import Qwen2Config, Qwen2ForCausalLM
        from trl.trainer.utils import add_fused_lm_head

        sizes = self.work.sizes
        torch.manual_seed(0)
        config = Qwen2Config(
            hidden_size=sizes["D"],
            intermediate_size=sizes["F"],
            num_hidden_layers=sizes["L"],
            num_attention_heads=HEADS.get(sizes["D"], 4),
            num_key_value_heads=2,
            vocab_size=sizes["V"],
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
        with torch.device(self.device):
            made = Qwen2ForCausalLM(config).to(getattr(torch, self.work.dtype))
        add_fused_lm_head(made, temperature=0.9, outputs=("log_probs", "entropy"))
        return made

    def make(self, seed: int) -> Inputs:
        """Prompts with answers of any length, and old log-probabilities near those of now."""
        b, p, t, v = (self.work.sizes[k] for k in "BPTV")
        draw = Draw(self.device, seed)
        ids = draw.ids(v, b, p + t)
        mask = torch.arange(t, device=self.device)[None] < t // 2 + draw.ids(t // 2 + 1, b, 1)
        labels = ids.clone()
        labels[:, :p] = -100
        labels[:, p:][~mask] = -100
        given = {"ids": ids, "labels": labels, "mask": mask, "advantages": draw.normal(b)}
        with torch.no_grad():
            now = self.scored(given).log_probs[:, -t:]
        weights = list(self.model.parameters())  # one set of them is enough to pass through the cache
        return given | {"old_logprob": now + 0.1 * draw.normal(b, t), "weights": weights}

    def scored(self, given: Inputs) -> Any:
        """The model's output as TRL's trainers ask for it."""
        return self.model(input_ids=given["ids"], labels=given["labels"], fused_lm_head=True)

    def stock(self, given: Inputs) -> Outputs:
        """What TRL makes by itself."""
        return self.step("trl", given)

    def step(self, way: str, given: Inputs) -> Outputs:
        """Loss, and gradient of the head; every other weight has its gradient too."""
        from rlkernel.integrations import trl

        self.model.zero_grad(set_to_none=True)
        with torch.enable_grad(), nullcontext() if way == "trl" else trl.enabled():
            loss = self.fused(given) if way == "fused" else self.loss(way, given)
            loss.backward()
        grad = self.model.lm_head.weight.grad.clone()
        self.model.zero_grad(set_to_none=True)
        return {"loss": loss.detach(), "grad_weight": grad}

    def loss(self, way: str, given: Inputs) -> Tensor:
        """`loss_type="dapo"`: as it stands in TRL, or by `policy_loss`."""
        mask, advantages, old = given["mask"], given["advantages"], given["old_logprob"]
        logprob = self.scored(given).log_probs[:, -mask.shape[1] :]
        if way != "trl":
            found: Tensor = rlk.policy_loss(
                logprob, old, advantages, mask=mask, **rlk.policy_loss_preset("trl_dapo")
            ).loss
            return found
        ratio = torch.exp(logprob - old)
        clipped = torch.clamp(ratio, 0.8, 1.2)
        each = -torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
        return (each * mask).sum() / mask.sum()

    def fused(self, given: Inputs) -> Tensor:
        """Head and loss in one, beside the model's output."""
        from rlkernel.integrations.trl_head import HEAD, Wanted

        mask = given["mask"]
        named = {name: given[name] for name in ("old_logprob", "advantages")}
        preset = rlk.policy_loss_preset("trl_dapo")
        wanted = Wanted(mask, mask, named, preset, packed=self.device.startswith("cuda"))
        with HEAD.find().fusing(wanted):
            self.scored(given)
        loss: Tensor = wanted.result.loss
        return loss
