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
