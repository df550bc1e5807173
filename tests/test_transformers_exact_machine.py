"""Drawn decoders lead drawn lives: whatever happened before, rollout and trainer share every bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import rlkernel as rlk

pytest.importorskip("transformers", exc_type=ImportError)

from tests.test_transformers_exact import CLASSES, transformers
from tests.test_transformers_exact_generate import packed, trained

V = 97
SEEDS = st.integers(0, 2**31 - 1)
WEIGHTS = ("dense", "dense", "int4_g32", "int8_channel", "fp8_channel")
PROMPT = st.lists(st.integers(0, V - 2), min_size=1, max_size=11)


def drawn_decoder(name: str, heads: tuple[int, int], width: int, layers: int, seed: int, **more: Any) -> Any:
    """A decoder with random weights."""
    kind, own = CLASSES[name]
    sizes = {
        "vocab_size": V, "hidden_size": 16 * heads[0], "intermediate_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "max_position_embeddings": 96,
        "pad_token_id": V - 1,
    }  # fmt: skip
    dtype = more.pop("dtype")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = getattr(transformers, kind)(**sizes, **own, **more)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


class Lives(RuleBasedStateMachine):
    """One decoder, from its first rollout on; `texts` are prompts and what was drawn behind them."""

    @initialize(
        name=st.sampled_from(sorted(CLASSES)),
        heads=st.sampled_from(((4, 4), (4, 2), (4, 1), (6, 3))),
        width=st.sampled_from((33, 64, 96, 130)),
        layers=st.integers(1, 2),
        tied=st.booleans(),
        dtype=st.sampled_from((torch.float32, torch.bfloat16)),
        weights=st.sampled_from(WEIGHTS),
        seed=SEEDS,
    )
    def born(self, name, heads, width, layers, tied, dtype, weights, seed) -> None:
        width = width if weights == "dense" and name != "mixtral" else 96  # groups, and torch's product of experts
        self.model = drawn_decoder(name, heads, width, layers, seed, tie_word_embeddings=tied, dtype=dtype)
        self.weights, self.texts, self.last = weights, [], None
        if weights != "dense":
            rlk.nn.quantize_model(self.model, rlk.nn.QuantPolicy(weights))
        self.exact = rlk.exact(self.model)

    @rule(
        prompts=st.lists(PROMPT, min_size=1, max_size=4),
        copies=st.lists(st.integers(0, 9), max_size=3),
        again=st.lists(st.integers(0, 99), max_size=2),
        new=st.integers(1, 5),
        page=st.integers(1, 20),
        seed=SEEDS,
        top_p=st.sampled_from((1.0, 0.9)),
        stop=st.booleans(),
    )
    def roll_out(self, prompts, copies, again, new, page, seed, top_p, stop) -> None:
        """New prompts, some of them more than once, and texts of before that go on; a stop id ends rows early."""
        rows = [*prompts, *(prompts[i % len(prompts)] for i in copies)]
        rows += [self.texts[i % len(self.texts)][:20] for i in again if self.texts]
        stops = tuple(range(0, V, 5)) if stop else ()
        options = {"temperature": 0.7, "top_p": top_p, "stop_ids": stops, "page": page}
        drawn = self.exact.generate(rows, max_new_tokens=new, seed=seed, **options)
        self.texts = [[*row, *ids[:n].tolist()] for row, ids, n in zip(rows, drawn.ids, drawn.lengths, strict=True)]
        self.last = rows, drawn
        self.holds(rows, drawn)

    def holds(self, rows: list[list[int]], drawn: rlk.Generated) -> None:
        """All in one batch of the trainer, and the last row by itself."""
        scored = trained(self.model, rows, drawn)
        assert torch.equal(drawn.logprob, scored), f"{(drawn.logprob != scored).sum()} of {scored.numel()} differ"
        one = rlk.Generated(drawn.ids[-1:], drawn.lengths[-1:], drawn.logprob[-1:], None)
        assert torch.equal(one.logprob, trained(self.model, rows[-1:], one))

    @precondition(lambda self: self.last is not None)
    @rule(rate=st.sampled_from((0.01, 0.5)))
    def learn(self, rate) -> None:
        """A step of the optimizer on what was drawn last, through the trainer's forward."""
        rows, drawn = self.last
        loss = self.model(**packed(rows, drawn)).logits.float().square().mean()
        leaf = [p for p in self.model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss, leaf, allow_unused=True)
        with torch.no_grad():
            for parameter, grad in zip(leaf, grads, strict=True):
                if grad is not None:
                    parameter.sub_(rate * grad)

    @precondition(lambda self: self.weights != "dense")
    @rule(at=st.integers(0, 99), alpha=st.sampled_from((1.0, 8.0)), seed=SEEDS)
    def adapt(self, at, alpha, seed) -> None:
        """LoRA beside a quantized weight, or another one in its place."""
        layers = [m for m in self.model.modules() if isinstance(m, rlk.nn.QuantLinear)]
        layer = layers[at % len(layers)]
        layer.add_lora(2, alpha, torch.float32)
        torch.nn.init.normal_(layer.lora_B, std=0.1, generator=torch.Generator().manual_seed(seed))

    @precondition(lambda self: self.last is not None)
    @rule()
    def score_again(self) -> None:
        """What was drawn before an update is scored by the weights of now, in a batch and alone: the same bits."""
        rows, drawn = self.last
        whole = trained(self.model, rows, drawn)
        for at, row in enumerate(rows):
            one = rlk.Generated(drawn.ids[at : at + 1], drawn.lengths[at : at + 1], whole[at : at + 1], None)
            assert torch.equal(one.logprob, trained(self.model, [row], one))

    @rule()
    def leave_and_come_back(self) -> None:
        """Undone and made exact again."""
        self.exact.undo()
        self.exact = rlk.exact(self.model)

    @rule()
    def free_pages(self) -> None:
        """The pages are given back; the next rollout makes its own."""
        self.exact.release()

    def teardown(self) -> None:
        if hasattr(self, "exact"):
            self.exact.undo()


Lives.TestCase.settings = settings(max_examples=30, stateful_step_count=8, deadline=None, derandomize=True)
test_a_drawn_decoder_shares_every_bit_with_its_trainer_all_its_life = Lives.TestCase
