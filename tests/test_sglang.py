"""SGLang's own batches, hooks and sampler on a CPU, its compiled part a stub: our draw, and seeds that reach it."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

import rlkernel as rlk

if find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

from tests.sglang_stub import stub  # noqa: E402

stub()
from rlkernel.integrations import sglang  # noqa: E402

VOCABULARY = 40


@pytest.fixture(scope="module")
def theirs():
    """Our plugin as SGLang loads it, with its hooks applied."""
    batches, sampler = pytest.importorskip(sglang._BATCHES), pytest.importorskip(sglang.SAMPLER)
    hooks = pytest.importorskip(sglang._HOOKS)
    entry = sglang.register()
    hooks.HookRegistry.apply_hooks()
    return SimpleNamespace(batches=batches, sampler=sampler, entry=entry)


@pytest.fixture
def backend(theirs, monkeypatch):
    """Which sampling backend an engine was started with."""

    def chosen(name: str, asked: str | None = None) -> None:
        features = SimpleNamespace(enable_custom_logit_processor=False, enable_watermark=False)
        context = SimpleNamespace(
            kernel=SimpleNamespace(sampling_backend=name),
            deterministic=SimpleNamespace(enable_deterministic_inference=False),
            features=features,
        )
        monkeypatch.setattr(theirs.batches, "get_exec", lambda: context)
        monkeypatch.setattr("sglang.srt.runtime_context.get_exec", lambda: context)
        settings = SimpleNamespace(sampling_backend=asked or name)
        monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: settings)

    return chosen


def request(rid: str, seed: int | None):
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(sampling_seed=seed, top_k=20, top_p=0.9)
    return SimpleNamespace(
        rid=rid, sampling_params=params, custom_logit_processor=None, return_sampling_mask=False,
        sampling_logprobs_mode=None, origin_input_ids=[1, 2, 3], output_ids=[],
    )  # fmt: skip


class Scheduled:
    """What SGLang reads of a scheduled batch."""

    device = "cpu"

    def __init__(self, requests) -> None:
        self.reqs = list(requests)


def batch(theirs, *requests):
    scheduled = Scheduled(requests)
    made = theirs.batches.SamplingBatchInfo.from_schedule_batch(scheduled, VOCABULARY)
    made.kept = scheduled  # SGLang has a weak reference to it
    return made


def test_a_batch_of_the_default_backend_is_as_it_was(theirs, backend) -> None:
    backend("pytorch")
    assert batch(theirs, request("a", 7)).sampling_seed is None


def test_a_batch_for_which_sglang_took_another_backend_than_ours_is_an_error(theirs, backend) -> None:
    backend("pytorch", asked="rlkernel")
    with pytest.raises(rlk.HostError, match="rlkernel was asked for, and SGLang took 'pytorch'"):
        batch(theirs, request("a", 7))


def test_a_batch_of_our_backend_has_the_seeds_of_its_requests(theirs, backend) -> None:
    backend("rlkernel")
    seeds = batch(theirs, request("a", 7), request("b", None), request("c", 9)).sampling_seed.tolist()
    assert seeds[::2] == [7, 9]
    assert seeds == batch(theirs, request("a", 7), request("b", None), request("c", 9)).sampling_seed.tolist()


def test_a_request_draws_the_same_in_a_batch_that_was_merged_and_filtered(theirs, backend) -> None:
    backend("rlkernel")
    probs = torch.rand(3, VOCABULARY, generator=torch.Generator().manual_seed(0)).softmax(-1)
    made = object.__new__(sglang.sampler(theirs.sampler.Sampler, theirs.entry))
    at = torch.tensor([5, 9, 3])
    merged = batch(theirs, request("a", 7), request("b", 8))
    merged.merge_batch(batch(theirs, request("c", 9)))
    whole, _ = made._sample_from_probs(probs, merged, at, False)
    kept = [2, 0]
    merged.filter_batch(kept, torch.tensor(kept))
    some, _ = made._sample_from_probs(probs[kept], merged, at[kept], False)
    assert torch.equal(some, whole[kept])
    rules = {"top_k": 20, "top_p": 0.9, "min_p": 0.0, "filter_order": "joint"}
    alone = rlk.sample(probs[1:2].log(), seed=8, step=10, **rules).token
    assert alone == whole[1]
