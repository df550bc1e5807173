"""What a draw states and what the trainer computes are one number: no bit differs, under any law."""

import pytest
import torch

import rlkernel as rlk


@pytest.mark.parametrize(
    "law",
    [
        {},
        {"temperature": 0.7, "top_p": 0.95},
        {"temperature": 1.3, "top_k": 50},
        {"temperature": 0.7, "min_p": 0.05},
        {"top_k": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draw_states_the_trainers_number(law, dtype) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(256, 3000)).to(dtype)
    with rlk.use("torch"):
        drawn = rlk.sample(logits, seed=torch.arange(256), step=3, raw_logprob=True, **law)
        trainer = rlk.logprob(logits, drawn.token, temperature=law.get("temperature", 1.0)).logprob
        raw = rlk.logprob(logits, drawn.token).logprob

    assert int((drawn.logprob + drawn.log_kept_mass != trainer).sum()) == 0
    assert torch.equal(drawn.raw_logprob, raw)


def test_a_share_is_never_above_zero() -> None:
    torch.manual_seed(0)
    logits = 30 * torch.randn(256, 1000)
    with rlk.use("torch"):
        drawn = rlk.sample(logits, seed=torch.arange(256), step=0, temperature=0.7, top_p=0.95)

    assert float(drawn.logprob.max()) == 0.0
    assert float(drawn.log_kept_mass.max()) <= 0.0


def test_a_token_that_alone_was_kept_has_a_log_probability_of_0() -> None:
    logits = torch.tensor([[0.0, -43.0, -44.0]])
    with rlk.use("torch"):
        drawn = rlk.sample(logits, seed=0, step=0, top_k=1)

    assert drawn.logprob.item() == 0.0
    assert drawn.log_kept_mass.item() == rlk.logprob(logits, drawn.token).logprob.item() < 0.0


def test_a_confident_draw_keeps_the_digits_of_its_log_probability() -> None:
    logits = torch.tensor([[0.0, -20.0, -21.0]])
    with rlk.use("torch"):
        drawn = rlk.sample(logits, seed=0, step=0)

    assert drawn.logprob.item() == pytest.approx(-2.81941e-9, rel=1e-5)


LAWS_OF_A_HEAD = (
    {"temperature": 0.7},
    {"temperature": torch.linspace(0.5, 2.0, 70)},
    {"temperature": 0.7, "top_p": 0.9},
)
HEADS = {
    "plain": lambda V: {},
    "bias, scale and cap": lambda V: {"bias": torch.linspace(-1, 1, V), "logit_scale": 0.7, "softcap": 4.0},
    "lora": lambda V: {"lora": rlk.LoRA(torch.ones(2, 16), torch.linspace(-1, 1, 2 * V).view(V, 2), 0.1)},
    "quantized": lambda V: {"weight": rlk.quantize(torch.randn(V, 16), "nf4")},
}


@pytest.mark.parametrize("V", [70, 2500, 9000])  # less than a tile, pieces of one tile, pieces of two
@pytest.mark.parametrize("law", LAWS_OF_A_HEAD, ids=("number", "per row", "top-p"))
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_draw_from_a_head_states_the_trainers_number(head, law, V) -> None:
    torch.manual_seed(0)
    hidden, given = torch.randn(70, 16), {"weight": torch.randn(V, 16)} | head(V)
    with rlk.use("torch", need=["trainer_bits"]):
        drawn = rlk.lm_head_sample(hidden, **given, seed=torch.arange(70), step=3, raw_logprob=True, **law)
    with rlk.use("torch"):
        trainer = rlk.linear_logprob(hidden, ids=drawn.token, **given, temperature=law["temperature"]).logprob
        raw = rlk.linear_logprob(hidden, ids=drawn.token, **given).logprob

    assert int((drawn.logprob + drawn.log_kept_mass != trainer).sum()) == 0
    assert torch.equal(drawn.raw_logprob, raw)
    assert float(drawn.logprob.max()) <= 0.0 >= float(drawn.log_kept_mass.max())


def test_a_greedy_draw_from_a_head_states_the_raw_law_of_the_trainer() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 16), torch.randn(2500, 16)
    with rlk.use("torch"):
        drawn = rlk.lm_head_sample(hidden, weight, temperature=0.0, seed=torch.arange(5), step=0, raw_logprob=True)
        raw = rlk.linear_logprob(hidden, weight, drawn.token).logprob

    assert not drawn.logprob.any()
    assert torch.equal(drawn.raw_logprob, raw)


def test_a_draw_with_edits_states_finite_shares_and_the_raw_law_of_the_trainer() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 16), torch.randn(2500, 16)
    allowed = torch.full((5, 79), 0x0F0F0F0F, dtype=torch.int32)
    with rlk.use("torch"):
        drawn = rlk.lm_head_sample(hidden, weight, allowed=allowed, seed=torch.arange(5), step=0, raw_logprob=True)
        raw = rlk.linear_logprob(hidden, weight, drawn.token).logprob

    assert torch.equal(drawn.raw_logprob, raw)
    assert bool((drawn.logprob > drawn.raw_logprob).all())
