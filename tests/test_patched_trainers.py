"""OpenRLHF's actor and DeepSpeed-Chat's PPO trainer, their own files, stock and patched: the same numbers.

    unzip -d openrlhf openrlhf-0.11.2-*.whl      # and DeepSpeed-Chat's folder dschat beside its setup.py
    PYTHONPATH=openrlhf/openrlhf-0.11.2.data/purelib:openrlhf:dschat pytest tests/test_patched_trainers.py

Needs transformers, numpy and pylatexenc. DeepSpeed, PEFT and FlashAttention, which these files import and a CPU has no
use for, are empty modules where they are not installed; what DeepSpeed would wrap models in is a few lines here.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rlkernel.integrations import active, deepspeed_chat, openrlhf

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
NAMED = {
    "deepspeed": (),
    "deepspeed.accelerator": ("get_accelerator",),
    "deepspeed.runtime": (),
    "deepspeed.runtime.zero": (),
    "deepspeed.runtime.zero.partition_parameters": ("ZeroParamStatus",),
    "peft": ("LoraConfig", "TaskType", "get_peft_model"),
    "peft.tuners": (),
    "peft.tuners.lora": ("LoraLayer",),
    "flash_attn": (),
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    "flash_attn.utils": (),
    "flash_attn.utils.distributed": ("all_gather",),
}
V, PAD = 31, 0


def module_of(ours) -> ModuleType:
    """The host's module, with empty ones in the place of what is not installed."""
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    if ours.HOST.installed is None:
        pytest.skip(f"{ours.HOST.name} is not installed")
    for name in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "BitsAndBytesConfig", "set_seed"):
        getattr(transformers, name)  # loaded while what is absent is absent
    import_module("transformers.integrations.deepspeed")
    absent = {name.partition(".")[0] for name in NAMED if "." not in name and find_spec(name) is None}
    with pytest.MonkeyPatch.context() as patch:
        for name, inside in NAMED.items():
            if name.partition(".")[0] in absent:
                empty = ModuleType(name)
                empty.__path__, empty.__spec__ = [], ModuleSpec(name, None)
                vars(empty).update({part: type(part, (), {}) for part in inside})
                patch.setitem(sys.modules, name, empty)
        return import_module(ours.SCORE.module)


class Policy(torch.nn.Module):
    """Logits from the token before, as transformers returns them; `backward` and `step` are DeepSpeed's."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        table = torch.randn(V, V, generator=torch.Generator().manual_seed(seed))
        self.table = torch.nn.Parameter(table)
        self.config = SimpleNamespace(model_type="acme")

    @property
    def module(self):
        return self

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None):
        return Output(logits=self.table[input_ids])

    def generate(self, prompts, max_length, **_):
        made = torch.Generator().manual_seed(7)
        answers = torch.randint(1, V, (len(prompts), max_length - prompts.shape[1]), generator=made)
        return torch.cat([prompts, answers], 1)

    def forward_value(self, tokens=None, attention_mask=None, input_ids=None, return_value_only=False, **_):
        values = self.table[input_ids if tokens is None else tokens].mean(-1)
        return values if return_value_only else {"chosen_end_scores": values[:, -1]}

    def backward(self, loss) -> None:
        loss.backward()

    def step(self) -> None:
        with torch.no_grad():
            self.table -= 0.1 * self.table.grad
        self.table.grad = None


class Output(dict):
    """What transformers' models return: by name, and as attributes."""

    __getattr__ = dict.__getitem__


def test_an_actor_of_openrlhf_scores_what_it_scores_by_itself() -> None:
    host = module_of(openrlhf)
    sequences = torch.randint(1, V, (3, 9), generator=torch.Generator().manual_seed(0))
    found = []
    for patched in (False, True):
        actor = host.Actor(Policy(1), temperature=0.7)
        actor.packing_samples = False  # which it sets for models that it loads itself
        asked = {"action_mask": torch.ones(3, 4), "attention_mask": torch.ones(3, 9)}
        if patched:
            with openrlhf.enabled() as entry:
                scored, out = actor(sequences, return_output=True, return_entropy=True, **asked)
            assert entry.calls["logprob"] == 1
        else:
            scored, out = actor(sequences, return_output=True, return_entropy=True, **asked)
        (scored.sum() + 0.1 * out.entropy.sum()).backward()
        found.append((scored.detach(), actor.model.table.grad))
    for stock, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, stock, rtol=2e-6, atol=2e-6)
    assert "openrlhf" not in {entry.host for entry in active()}


def test_deepspeed_chats_trainer_learns_what_it_learns_by_itself() -> None:
    host = module_of(deepspeed_chat)
    found = []
    for patched in (False, True):
        engine = SimpleNamespace(actor=Policy(1), ref=Policy(2), critic=Policy(3), reward=Policy(4))
        engine.tokenizer = type("Tokens", (), {"pad_token_id": PAD, "__call__": lambda self, _: {"input_ids": [2]}})()
        args = SimpleNamespace(
            max_answer_seq_len=5,
            end_of_conversation_token="</s>",  # a token of a vocabulary
            actor_zero_stage=0,
            compute_fp32_loss=False,
            print_answers=False,
            align_overflow=False,
            local_rank=0,
        )
        trainer = host.DeepSpeedPPOTrainer(engine, args)
        prompts = torch.randint(1, V, (3, 4), generator=torch.Generator().manual_seed(0))
        losses = []
        for step in range(3):
            if patched:
                with deepspeed_chat.enabled() as entry:
                    losses.append(trainer.train_rlhf(trainer.generate_experience(prompts, torch.ones(3, 4), step)))
                assert entry.calls["logprob"] == 3 * (step + 1)  # policy, reference, update
            else:
                losses.append(trainer.train_rlhf(trainer.generate_experience(prompts, torch.ones(3, 4), step)))
        found.append((torch.tensor(losses), engine.actor.table.detach(), engine.critic.table.detach()))
    for stock, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found[0][1], Policy(1).table)
    assert "deepspeed-chat" not in {entry.host for entry in active()}
