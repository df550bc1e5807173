"""Operators of prepared calls: what they launch, and that a plan launches the same for every call of its shape."""

import itertools
from dataclasses import fields, replace

import pytest
import torch

from rlkernel_core.spec.advantage import AdvantageCall
from rlkernel_core.spec.affine_suffix_scan import AffineSuffixScanCall
from rlkernel_core.spec.policy_loss import PolicyLossCall
from rlkernel_core.spec.sample import SampleCall
from rlkernel_core.spec.sampling import TokenLists
from rlkernel_core.spec.whiten import WhitenCall
from rlkernel_triton.advantage import launch as advantage
from rlkernel_triton.affine_suffix_scan import launch as suffix_scan
from rlkernel_triton.launchers import Recorder, using
from rlkernel_triton.policy_loss import launch as policy_loss
from rlkernel_triton.sample.launch import prepare as prepare_sample
from rlkernel_triton.sample.launch import sample
from rlkernel_triton.whiten import launch as whitening

B, T = 4, 300


def meta(*shape, dtype=torch.float32, grad=False):
    return torch.empty(shape, dtype=dtype, device="meta").requires_grad_(grad)


def mask():
    return meta(B, T, dtype=torch.bool)


CALLS = {
    "gae": (advantage.prepare, lambda: AdvantageCall(meta(B, T), kind="gae", values=meta(B, T), gamma=0.9, lam=0.8)),
    "masked gae, carried": (
        advantage.prepare,
        lambda: AdvantageCall(meta(B, T), kind="gae", values=meta(B, T), mask=mask(), masked_out="carry"),
    ),
    "reinforce_pp": (advantage.prepare, lambda: AdvantageCall(meta(B, T), kind="reinforce_pp", mask=mask())),
    "outcome rewards": (
        advantage.prepare,
        lambda: AdvantageCall(meta(B), kind="gae", values=meta(B, T), mask=mask()),
    ),
    "sample": (prepare_sample, lambda: SampleCall(meta(2, 1000), temperature=meta(2), top_k=20, seed=7, step=3)),
    "sample with edits": (
        prepare_sample,
        lambda: SampleCall(
            torch.zeros(2, 1000),
            seed=torch.arange(2),
            step=3,
            top_p=0.9,
            top_n=2,
            banned=TokenLists(torch.tensor([1, 2]), torch.tensor([0, 1, 2])),
        ),
    ),
    "whiten": (whitening.prepare, lambda: WhitenCall(meta(B, T))),
    "suffix scan": (suffix_scan.prepare, lambda: AffineSuffixScanCall(meta(B, T), meta(B, T))),
    "long suffix scan": (suffix_scan.prepare, lambda: AffineSuffixScanCall(meta(2, 40_000), 0.5)),
    "grpo": (
        policy_loss.prepare,
        lambda: PolicyLossCall(meta(B, T, grad=True), meta(B, T), meta(B), kind="grpo", mask=mask()),
    ),
}
KERNELS = {
    "gae": ["scan_kernel"],
    "masked gae, carried": ["scan_kernel"] * 3,
    "reinforce_pp": ["scan_kernel", "moments_kernel", "summary_kernel", "whiten_kernel"],
    "outcome rewards": ["last_token_kernel", "scan_kernel"],
    "sample": ["tile_stats", "select_and_sample"],
    "sample with edits": ["tile_stats", "tile_stats", "select_and_sample", "exact_sample"],
    "whiten": ["moments_kernel", "summary_kernel", "whiten_kernel"],
    "suffix scan": ["scan_kernel"],
    "long suffix scan": ["scan_kernel", "chain_kernel", "scan_kernel"],
    "grpo": ["count_kernel", "tokens_kernel", "loss_kernel", "total_kernel"],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_plan_launches_the_same_builds_at_every_call(name):
    prepare, call = CALLS[name]
    recorder = Recorder()
    with using(recorder):
        run = prepare(call())
        run(call())
        first = list(recorder.launches)
        run(call())
    assert recorder.launches == [*first, *first]


@pytest.mark.parametrize("name", CALLS)
def test_what_an_operator_launches(name):
    prepare, call = CALLS[name]
    recorder = Recorder()
    with using(recorder):
        prepare(call())(call())
    kernels = [launch.build.kernel.partition(":")[2] for launch in recorder.launches]
    assert kernels == KERNELS[name]


def test_the_gradient_of_a_loss_is_one_launch():
    prepare, call = CALLS["grpo"]
    recorder = Recorder()
    with using(recorder):
        given = call()
        prepare(given)(given).loss.backward()
    assert recorder.launches[-1].build.kernel == "rlkernel_triton.policy_loss.kernels:scale_kernel"
    assert len(recorder.launches) == 5


def test_a_loss_whose_inputs_want_no_gradient_has_no_node():
    prepare, _ = CALLS["grpo"]
    call = PolicyLossCall(meta(B, T), meta(B, T), meta(B), kind="grpo", mask=mask())
    with using(Recorder()):
        assert prepare(call)(call).loss.grad_fn is None


def test_a_draw_is_two_launches():
    recorder = Recorder()
    with using(recorder):
        sample(SampleCall(meta(2, 1000), top_k=20, seed=7, step=3))
    kernels = [launch.build.kernel.partition(":")[2] for launch in recorder.launches]
    assert kernels == ["tile_stats", "select_and_sample"]


@pytest.mark.parametrize("sequences", [6, 64])
def test_results_by_group_begin_where_a_vector_may_and_none_is_a_view_of_another(sequences):
    call = AdvantageCall(torch.zeros(sequences), kind="grpo", group=2)
    with using(Recorder()):
        result = advantage.prepare(call)(call)
    stats = result.stats
    made = [result.advantages, stats.group_mean, stats.group_std, stats.invalid, stats.constant, stats.group_count]
    assert [(x.data_ptr() % 16, x.shape, x.is_contiguous(), x._is_view()) for x in made] == [
        (0, (sequences,), True, False)
    ] * 6
    places = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in made)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    assert {f.name: getattr(stats, f.name) for f in fields(stats)} | {"count": None} == vars(replace(stats))
