"""verify: tokens of the reference for every form of draft law, under edits, and in a graph-like replay."""

import pytest
import torch

from rlkernel_core.spec.sampling import Penalties, Status, TokenLists
from rlkernel_core.spec.verify import VerifyCall
from rlkernel_torch.direct import sample
from rlkernel_torch.direct import verify as reference
from rlkernel_triton.verify.launch import verify

B = 3
COUNTS = torch.tensor([3, 0, 2])
SIZES = {"strict": 300, "logits": 1100, "probs": 300}  # one of them more than a tile
CU = torch.cat((torch.zeros(1, dtype=torch.int64), COUNTS.cumsum(0)))
K = int(CU[-1])
OWNER = torch.repeat_interleave(torch.arange(B), COUNTS)
PLACE = torch.arange(K) - CU[OWNER]
SEED, STEP = torch.arange(B) + 7, torch.arange(B) * 5


def round_of(form: str, seed: int):
    g, V = torch.Generator().manual_seed(seed), SIZES[form]
    target = 2 * torch.randn(K + B, V, generator=g)
    own = target[torch.arange(K) + OWNER]
    draft = own + 0.5 * torch.randn(K, V, generator=g)
    source = own if form == "strict" else draft
    ids = sample(source, seed=SEED[OWNER], step=STEP[OWNER] + PLACE, stream=int(form != "strict")).token
    law = {"strict": {}, "logits": {"draft_logits": draft}, "probs": {"draft_probs": torch.softmax(draft, 1)}}[form]
    law |= {"cu_draft": CU, "seed": SEED, "step": STEP, "raw_logprob": True}
    return target, ids, law


def moved(value, device):
    return value.to(device) if isinstance(value, torch.Tensor) else value


def assert_as_reference(target, ids, given, device) -> None:
    want = reference(target, ids, **given)
    have = verify(VerifyCall(target.to(device), ids.to(device), **{n: moved(x, device) for n, x in given.items()}))
    assert torch.equal(want.token, have.token.cpu())
    assert torch.equal(want.accepted, have.accepted.cpu())
    assert torch.equal(want.kept_count, have.kept_count.cpu())
    assert torch.equal(want.status, have.status.cpu() & ~Status.FALLBACK.value)
    for name in ("logprob", "log_kept_mass", "raw_logprob"):
        torch.testing.assert_close(getattr(have, name).cpu(), getattr(want, name), atol=2e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("form", ["strict", "logits"])
def test_outcomes_are_the_references(form, device) -> None:
    law = {"top_p": 0.95, "temperature": torch.tensor([1.0, 0.7, 0.0])}
    target, ids, given = round_of(form, 1)
    assert_as_reference(target, ids, given | law, device)


def test_edits_and_foreign_rows(device) -> None:
    if device != "cpu":
        pytest.skip("lists of the reference stay on the CPU")
    target, ids, given = round_of("probs", 2)
    target[4], ids[0] = torch.nan, 303
    banned = TokenLists(target.nan_to_num().argmax(1), torch.arange(K + B + 1))
    assert_as_reference(target, ids, given | {"banned": banned, "penalties": Penalties(presence=0.5)}, device)


def test_a_bitmask_is_read_row_by_row(device) -> None:
    target, ids, given = round_of("probs", 3)
    g = torch.Generator().manual_seed(0)
    allowed = torch.randint(-(2**31), 2**31 - 1, (K + B, 10), dtype=torch.int32, generator=g)
    assert_as_reference(target, ids, given | {"allowed": allowed}, device)


def test_a_draft_that_alone_is_allowed_has_a_log_probability_of_0(device) -> None:
    g = torch.Generator().manual_seed(5)
    N, V = 64, 12
    target, ids = torch.randn(2 * N, V, generator=g), torch.randint(0, V, (N,), generator=g)
    allowed = torch.bitwise_left_shift(torch.tensor(1), torch.stack((ids, ids), 1).flatten()[:, None]).to(torch.int32)
    draft = torch.softmax(torch.randn(N, V, generator=g), 1)
    given = {"cu_draft": torch.arange(N + 1), "seed": torch.arange(N), "step": torch.zeros(N, dtype=torch.int64)}
    given |= {"allowed": allowed, "draft_probs": draft}
    have = verify(VerifyCall(target.to(device), ids.to(device), **{n: moved(x, device) for n, x in given.items()}))
    assert have.accepted.tolist() == [1] * N
    assert have.logprob.tolist() == [0.0] * (2 * N)
