"""lm_head_sample on Triton: where the head is cut changes no bit; what it draws: test_clauses.py."""

import pytest
import torch

import rlkernel as rlk
from rlkernel_core.spec import OPERATORS
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.linear_logprob import launch as head_scores
from rlkernel_triton.lm_head_sample import head as head_logits
from rlkernel_triton.lm_head_sample import launch as head_sampling
from rlkernel_triton.lm_head_sample.launch import ROOM, TILE, slabs

lm_head_sample = OPERATORS["lm_head_sample"].taking_arguments(head_sampling.lm_head_sample)
with_trainer_bits = OPERATORS["lm_head_sample"].taking_arguments(
    lambda call: head_sampling.prepare_trainer_bits(call)(call)
)
linear_logprob = OPERATORS["linear_logprob"].taking_arguments(head_scores.linear_logprob)

N, V, D = 6, 2500, 16


def operands(seed: int):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(N, D, generator=g), torch.randn(V, D, generator=g), g


def law(seed: int):
    return {
        "seed": torch.arange(N) + seed,
        "step": seed,
        "temperature": torch.where(torch.arange(N) % 4 == 3, 0.0, 0.8),
    }


def bits(result) -> list[torch.Tensor]:
    found = [x for x in vars(result).values() if x is not None]
    return [x.view(torch.int32) if x.dtype == torch.float32 else x for x in found]


def test_no_cut_changes_a_bit(device, monkeypatch) -> None:
    hidden, weight, _ = operands(4)
    hidden[0] = 0.0  # a flat row
    given = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in law(4).items()}
    want = lm_head_sample(hidden.to(device), weight.to(device), **given)
    monkeypatch.setattr(head_logits, "at_a_time", lambda *_: 3)
    got = lm_head_sample(hidden.to(device), weight.to(device), **given)
    assert all(torch.equal(a, b) for a, b in zip(bits(want), bits(got), strict=True))


def test_a_piece_that_wants_care_gives_the_bits_of_one_that_does_not(device) -> None:
    hidden, weight, _ = operands(5)
    far, never = (torch.zeros(V).index_fill(0, torch.tensor([7, 1100, V - 1]), x) for x in (-1e30, -torch.inf))
    given = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in (law(5) | {"temperature": 0.8}).items()}
    plain, careful = (
        lm_head_sample(hidden.to(device), weight.to(device), bias=b.to(device), **given) for b in (far, never)
    )
    assert torch.equal(careful.kept_count, plain.kept_count - 3)
    for name in ("token", "logprob"):
        assert torch.equal(getattr(plain, name), getattr(careful, name))


HEADS = {
    "plain": lambda V, D: {},
    "bias, scale, cap": lambda V, D: {"bias": torch.linspace(-1, 1, V), "logit_scale": 0.7, "softcap": 4.0},
    "lora": lambda V, D: {"lora": rlk.LoRA(torch.ones(2, D), torch.linspace(-1, 1, 2 * V).view(V, 2), 0.1)},
}
LAWS = {
    "number": lambda rows: {"temperature": 0.7},
    "rows": lambda rows: {"temperature": torch.linspace(0.5, 2.0, rows)},
    "top-p": lambda rows: {"temperature": 0.7, "top_p": 0.9},
}
PAIRS = list(zip(HEADS, LAWS, strict=True))
# (rows, V, D, dtype, (head, law)): slabs that cut tiles, less than a piece, less than a tile; rows that share a tile
IN_INTERPRETER = [(6, size, D, "float32", pair) for size, pair in zip((9000, 1100, 70), PAIRS, strict=True)]
ON_GPU = [
    (rows, size, 1024, dtype, pair)
    for rows, size in ((1, 128256), (6, 70), (70, 9000), (300, 20011), (1000, 152064))
    for dtype in ("float32", "bfloat16", "float16")
    for pair in PAIRS
]


def on(device, x):
    if isinstance(x, rlk.LoRA):
        return rlk.LoRA(x.A.to(device), x.B.to(device), x.scale)
    return x.to(device) if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize(("rows", "V", "D", "dtype", "of"), IN_INTERPRETER if INTERPRETED else ON_GPU, ids=str)
def test_a_draw_states_the_bits_of_linear_logprob(device, rows, V, D, dtype, of, monkeypatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(head_logits, "at_a_time", lambda *_: 1)  # a slab a tile
    g = torch.Generator().manual_seed(rows)
    hidden, weight = (torch.randn(n, D, generator=g).to(device, getattr(torch, dtype)) for n in (rows, V))
    of_head = {n: on(device, x) for n, x in HEADS[of[0]](V, D).items()}
    given = {n: on(device, x) for n, x in LAWS[of[1]](rows).items()}
    drawn = with_trainer_bits(
        hidden, weight, **of_head, **given, seed=torch.arange(rows, device=device), step=3, raw_logprob=True
    )
    trained = linear_logprob(hidden, weight, drawn.token, **of_head, temperature=given["temperature"]).logprob
    raw = linear_logprob(hidden, weight, drawn.token, **of_head).logprob

    assert int((drawn.logprob + drawn.log_kept_mass != trained).sum()) == 0
    assert torch.equal(drawn.raw_logprob, raw)


def test_the_token_is_that_of_the_draw_without_trainer_bits_and_its_raw_law_that_of_the_trainer(device) -> None:
    hidden, weight, _ = operands(6)
    hidden, weight = hidden.to(device), weight[:1100].to(device)
    allowed = torch.full((N, 35), 0x0F0F0F0F, dtype=torch.int32, device=device)
    given = {n: on(device, x) for n, x in law(6).items()} | {"allowed": allowed, "raw_logprob": True}
    drawn, plain = with_trainer_bits(hidden, weight, **given), lm_head_sample(hidden, weight, **given)

    assert drawn.token.tolist() == plain.token.tolist()
    assert torch.equal(drawn.logprob, plain.logprob)
    assert torch.equal(drawn.raw_logprob, linear_logprob(hidden, weight, drawn.token).logprob)


def test_rows_without_a_token_and_rows_of_slots_state_what_they_stated(device) -> None:
    hidden, weight, _ = operands(7)
    hidden[1] = torch.nan
    slot = torch.tensor([2, 0, -1, 1, 1, 0], device=device)
    given = {"temperature": torch.tensor([0.7, 0.0, 1.3]), "seed": torch.arange(3), "step": torch.arange(3)}
    given = {n: x.to(device) for n, x in given.items()} | {"slot": slot}
    hidden, weight = hidden.to(device), weight[:1100].to(device)
    drawn, plain = with_trainer_bits(hidden, weight, **given), lm_head_sample(hidden, weight, **given)
    trained = linear_logprob(hidden, weight, drawn.token, temperature=given["temperature"][slot.clamp(0)]).logprob

    for name in ("token", "status", "kept_count"):
        assert getattr(drawn, name).tolist() == getattr(plain, name).tolist()
    first, _, _, _, _, last = trained.tolist()
    assert drawn.logprob.tolist() == [first, plain.logprob[1].item(), 0.0, 0.0, 0.0, last]


@pytest.mark.parametrize("rows", [1, 64, 4096, 1 << 20])
def test_slabs_are_whole_tiles_that_cover_the_vocabulary(rows) -> None:
    for size in (1, 1024, 128256):
        cut = list(slabs(rows, size))
        assert [first for first, _ in cut] == [sum(width for _, width in cut[:i]) for i in range(len(cut))]
        assert sum(width for _, width in cut) == size
        assert all(width % TILE == 0 for _, width in cut[:-1])
        assert all(width <= TILE or (rows * width <= ROOM and width < size / 4) for _, width in cut)


def test_no_rows_of_hidden_states_that_are_copied_and_a_lora_have_no_tokens(device) -> None:
    hidden, weight, _ = operands(7)
    lora = rlk.LoRA(torch.zeros(3, D, device=device), torch.zeros(V, 3, device=device))
    none = hidden.to(device).t()[:, :0].t()
    assert lm_head_sample(none, weight.to(device), lora=lora, temperature=1.0, seed=1, step=0).token.shape == (0,)
