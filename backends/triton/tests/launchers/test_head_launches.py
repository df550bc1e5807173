"""What the operators over an output head launch, for calls on a device that has no kernels."""

import pytest
import torch

from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.linear_policy_loss import LinearPolicyLossCall
from rlkernel_core.spec.lm_head_sample import LmHeadSampleCall
from rlkernel_core.spec.logprob import Support
from rlkernel_core.spec.sampling import TokenLists
from rlkernel_core.spec.verify import VerifyCall
from rlkernel_triton.common import matmul_tiles
from rlkernel_triton.launchers import Recorder, planning_for, using
from rlkernel_triton.linear_logprob import launch as linear_logprob
from rlkernel_triton.linear_logprob import workspace
from rlkernel_triton.linear_policy_loss import launch as linear_policy_loss
from rlkernel_triton.lm_head_sample import head
from rlkernel_triton.lm_head_sample import launch as lm_head_sample
from rlkernel_triton.verify import launch as verify

N, D, V = 64, 256, 1024


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(matmul_tiles, "arch_of", lambda _: "sm90")
    recorder = Recorder()
    with using(recorder):
        yield recorder


def meta(*shape, dtype=torch.bfloat16, grad=False):
    return torch.empty(shape, dtype=dtype, device="meta").requires_grad_(grad)


def ids(*shape):
    return meta(*shape, dtype=torch.int64)


def flag(*shape):
    return meta(*shape, dtype=torch.bool)


def names(recorder):
    return [launch.build.kernel.partition(":")[2] for launch in recorder.launches]


def law(*shape, grad=False, **options):
    shape = shape or (N,)
    return LinearLogprobCall(meta(*shape, D, grad=grad), meta(V, D, grad=grad), ids(*shape), **options)


OPTIONS = {
    "plain": {},
    "entropy": {"entropy": True},
    "masked": {"mask": flag(N)},
    "temperatures": {"temperature": meta(N, dtype=torch.float32), "softcap": 30.0, "bias": meta(V)},
    "cut": {"max_workspace_bytes": 500_000},
}


def test_log_probabilities_are_three_launches(recorder):
    given = law(entropy=True)
    out = linear_logprob.prepare(given)(given)
    assert names(recorder) == ["head_partial_softmax", "merge_tiles", "merge_softmax"]
    assert [launch.grid for launch in recorder.launches] == [(4, 1, 1), (2, 1, 1), (2, 1, 1)]
    assert dict(recorder.launches[0].build.constants)["MOMENT"] is True
    assert (out.logprob.shape, out.entropy.shape, out.invalid.dtype) == ((N,), (N,), torch.bool)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_plan_of_log_probabilities_launches_the_same_at_every_call(recorder, name):
    run = linear_logprob.prepare(law(**OPTIONS[name]))
    run(law(**OPTIONS[name]))
    first = list(recorder.launches)
    run(law(**OPTIONS[name]))
    assert first
    assert recorder.launches == [*first, *first]


def test_rows_that_lie_apart_are_copied_and_contiguous_ones_of_any_shape_are_not(recorder):
    for given, stride in ((law(4, 16), D), (LinearLogprobCall(meta(N, 2 * D)[:, :D], meta(V, D), ids(N)), 2 * D)):
        linear_logprob.prepare(given)(given)
        assert linear_logprob._Host(given, keep=False).head._fixed["x_stride"] == stride
    apart = LinearLogprobCall(meta(8, 10, D)[:, 1:9], meta(V, D), ids(8, 8))
    assert linear_logprob.prepare(apart)(apart).logprob.shape == (8, 8)


@pytest.mark.parametrize("grad", [False, True])
def test_log_probabilities_have_a_node_where_a_gradient_is_wanted_and_nowhere_else(recorder, grad):
    given = law(grad=grad, backward="save")
    out = linear_logprob.prepare(given)(given)
    assert (out.logprob.grad_fn is not None) == grad
    assert out.invalid.grad_fn is None
    assert dict(recorder.launches[0].build.constants)["SAVE"] is grad


def test_gradients_are_three_launches_for_each_block_of_columns(recorder, monkeypatch):
    monkeypatch.setattr(workspace, "BLOCKS", ((16384, 64),))
    given = law(grad=True, entropy=True)
    out = linear_logprob.prepare(given)(given)
    (out.logprob.sum() + out.entropy.sum()).backward()
    assert names(recorder)[3:] == ["head_dlogits", "head_matmul", "head_matmul"] * (V // 64)
    constants = dict(recorder.launches[3].build.constants)
    assert [constants[n] for n in ("G", "G_LSE", "G_ENTROPY", "G_MASS")] == [True, False, True, False]
    assert (given.hidden.grad.shape, given.weight.grad.shape) == ((N, D), (V, D))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_plan_of_gradients_launches_the_same_at_every_call(recorder, name):
    run = linear_logprob.prepare(law(grad=True, **OPTIONS[name]))
    for _ in range(2):
        given = law(grad=True, **OPTIONS[name])
        run(given).logprob.sum().backward()
    half = len(recorder.launches) // 2
    assert half > 3
    assert recorder.launches[:half] == recorder.launches[half:]


@pytest.mark.parametrize(("free", "blocks"), [(0, 16), (workspace.FREE, 1)])
def test_a_small_head_is_one_block_of_columns_and_a_frozen_one_saves_a_product(recorder, monkeypatch, free, blocks):
    monkeypatch.setattr(workspace, "FREE", free)
    given = law(backward="recompute")
    given.hidden.requires_grad_()
    linear_logprob.prepare(given)(given).logprob.sum().backward()
    assert names(recorder)[3:] == ["head_dlogits", "head_matmul"] * blocks
    assert given.weight.grad is None


def test_the_bits_of_a_support_are_set_before_the_head_is_read(recorder):
    support = Support(meta(400, dtype=torch.int64), meta(N + 1, dtype=torch.int64))
    given = law(support=support, mask=flag(N))
    assert linear_logprob.prepare(given)(given).log_kept_mass.shape == (N,)
    assert names(recorder) == ["set_bits", "head_partial_softmax", "merge_tiles", "merge_softmax"]


def test_no_rows_of_hidden_states_are_no_launches(recorder):
    given = law(0, grad=True)
    out = linear_logprob.prepare(given)(given)
    out.logprob.sum().backward()
    assert (recorder.launches, out.logprob.shape) == ([], (0,))
    assert given.weight.grad.shape == (V, D)


def draws(rows=8, *, device="meta", **options):
    hidden, weight = (torch.empty(n, D, dtype=torch.bfloat16, device=device) for n in (rows, V))
    seeds = torch.empty(rows, dtype=torch.int64, device=device)
    return LmHeadSampleCall(hidden, weight, **{"seed": seeds, "step": 3, **options})


def test_a_draw_from_one_slab_is_three_launches(recorder, monkeypatch):
    monkeypatch.setattr(head, "at_a_time", lambda *_: 2000)
    given = draws(softcap=20.0, raw_logprob=True)
    out = lm_head_sample.prepare(given)(given)
    assert names(recorder) == ["head_logits", "slab_stats", "sample_row"]
    assert dict(recorder.launches[1].build.constants)["RAW"] is True
    assert (out.token.shape, out.raw_logprob.shape, out.status.dtype) == ((8,), (8,), torch.int32)


@pytest.mark.parametrize(
    ("target", "rows", "kernel"),
    [
        ("sm_90", 64, "head_logits_tma"),
        ("sm_90", 4, "head_logits"),  # few rows wait for the head alone
        ("sm_80", 64, "head_logits"),
        ("gfx942", 64, "head_logits"),
    ],
)
def test_the_copy_engine_brings_many_rows_on_hopper_alone(target, rows, kernel):
    recorder, given = Recorder(), draws(rows)
    with planning_for(target), using(recorder):
        lm_head_sample.prepare(given)(given)
    assert names(recorder)[0] == kernel
    kind = "tensordesc<bf16[64, 64]>" if kernel == "head_logits_tma" else "*bf16"
    assert dict(recorder.launches[0].build.types)["x"] == kind


def test_slabs_are_as_wide_as_the_planned_gpu_multiplies_at_a_time():
    widths = {}
    for target in ("sm_87", "sm_90"):
        given = draws(100)
        with planning_for(target), using(Recorder()):
            made = head.Head(lm_head_sample.launcher_for(given.hidden.device), given, 1 << 20)
            widths[target] = made.cuts(100)[0][1]
    assert widths == {"sm_87": 2048, "sm_90": 32768}


def test_slabs_are_drawn_from_one_after_the_other(recorder):
    given = draws()
    lm_head_sample.prepare(given)(given)
    assert names(recorder) == ["head_logits", "slab_stats"] * 8 + ["sample_row"]


STATING = ["drawn_tile_sums", "merge_tiles", "merge_softmax"]


def test_a_draw_with_the_trainers_bits_reads_the_head_once_and_one_tile_a_row_again(recorder):
    given = draws(100)
    lm_head_sample.prepare_trainer_bits(given)(given)
    slabs = ["head_logits_and_sums", "slab_stats"] * 4
    assert names(recorder) == [*slabs, "sample_row", *STATING, "state_trainer_bits"]
    assert [launch.grid[0] for launch in recorder.launches[:8:2]] == [1] * 4
    assert recorder.launches[9].grid == (100, 1, 1)


def test_both_laws_of_a_draw_are_merged_and_of_an_edited_one_the_raw_one_alone(recorder):
    for options in ({}, {"allowed": ids(8, V // 32).int()}):
        given = draws(raw_logprob=True, **options)
        lm_head_sample.prepare_trainer_bits(given)(given)
    merged = [launch for launch in recorder.launches if launch.build.kernel.endswith(":merge_softmax")]
    assert len(merged) == 3


def test_an_edited_draw_that_states_no_raw_law_has_nothing_of_the_trainer(recorder):
    given = draws(allowed=ids(8, V // 32).int())
    lm_head_sample.prepare_trainer_bits(given)(given)
    assert "head_logits_and_sums" not in names(recorder)


def test_a_filter_sends_the_logits_to_the_sampler(recorder):
    given = draws(top_k=20)
    lm_head_sample.prepare(given)(given)
    assert names(recorder) == ["head_logits", "tile_stats", "select_and_sample"]


def test_no_rows_draw_nothing_and_launch_nothing(recorder):
    given = draws(0)
    assert lm_head_sample.prepare(given)(given).token.shape == (0,)
    assert recorder.launches == []


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "seed": 7}, {"vocab_size": 1000}])
def test_a_plan_of_draws_launches_the_same_at_every_call_but_for_its_numbers(recorder, options):
    rows = 1 if "seed" in options else 8
    run = lm_head_sample.prepare(draws(rows, **options))
    for step in (3, 4):
        run(draws(rows, **options, step=step))
    half = len(recorder.launches) // 2
    assert half > 0
    assert recorder.launches[:half] == recorder.launches[half:]


def test_an_edited_draw_counts_what_edits_spoil(recorder):
    lists = TokenLists(torch.zeros(2, dtype=torch.int64), torch.tensor([0, *[2] * 8]))
    given = draws(device="cpu", banned=lists)
    lm_head_sample.prepare(given)(given)
    assert set(names(recorder)) == {"head_logits", "slab_stats", "sample_row"}
    assert dict(recorder.launches[-1].build.constants)["HAS_SPOILED"] is True


def drafts(form, **options):
    laws = {
        "strict": {},
        "logits": {"draft_logits": meta(6, V, dtype=torch.float32)},
        "probabilities": {"draft_probs": meta(6, V, dtype=torch.float32)},
    }[form]
    return VerifyCall(meta(8, V), ids(6), **{"cu_draft": ids(3), "seed": ids(2), "step": 3, **laws, **options})


ACCEPTING = ["accept_drafts", "count_accepted", "residual_argmax", "write_replacements"]
LAUNCHED = {
    "strict": ["count_accepted"],
    "logits": ["partial_draft_softmax", "merge_draft_softmax", *ACCEPTING],
    "probabilities": ACCEPTING,
}


@pytest.mark.parametrize("form", LAUNCHED)
def test_what_a_round_of_drafts_launches(recorder, form):
    given = drafts(form, raw_logprob=True)
    out = verify.prepare(given)(given)
    assert names(recorder) == ["row_requests", "tile_stats", "tile_stats", "select_and_sample", *LAUNCHED[form]]
    assert (out.accepted.shape, out.token.shape, out.raw_logprob.shape) == ((2,), (8,), (8,))


@pytest.mark.parametrize("form", LAUNCHED)
def test_a_plan_of_drafts_launches_the_same_at_every_call(recorder, form):
    run = verify.prepare(drafts(form, temperature=meta(2, dtype=torch.float32), top_k=20))
    for step in (3, 4):
        run(drafts(form, temperature=meta(2, dtype=torch.float32), top_k=20, step=step))
    half = len(recorder.launches) // 2
    assert half > 0
    assert recorder.launches[:half] == recorder.launches[half:]


def test_the_results_of_a_draw_lie_in_the_blocks_that_verify_writes_to(recorder):
    given = VerifyCall(
        torch.zeros(8, V), torch.zeros(6, dtype=torch.int64), cu_draft=torch.tensor([0, 3, 6]),
        seed=torch.arange(2), step=3, raw_logprob=True,
    )  # fmt: skip
    out = verify.prepare(given)(given)
    first, own = out.logprob.data_ptr(), out.kept_count.data_ptr()
    assert [out.log_kept_mass.data_ptr() - first, out.raw_logprob.data_ptr() - first] == [4 * 8, 4 * 8 * 3]
    assert out.status.data_ptr() - own == 4 * 8


def loss(rows=N, *, grad=False, **options):
    operands = (meta(n, D, grad=grad) for n in (rows, V))
    tokens = [meta(rows, dtype=torch.float32) for _ in range(2)]
    return LinearPolicyLossCall(*operands, ids(rows), *tokens, **{"aggregate": "token_mean", **options})


BATCH, TOTAL = ["tokens_kernel"], ["loss_kernel", "total_kernel"]


def test_a_loss_without_gradients_reads_logits_once_and_has_no_node(recorder):
    given = loss(entropy=True)
    out = linear_policy_loss.prepare(given)(given)
    assert names(recorder) == ["partial_softmax", "merge_softmax", *BATCH, *TOTAL]
    assert (out.loss.grad_fn, out.logprob.shape, out.entropy.shape) == (None, (N,), (N,))


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_one_block_is_read_once_whatever_the_loss_needs_of_other_tokens(recorder, kind):
    packed = {"cu_seqlens": ids(3)} if kind == "gspo" else {}
    given = loss(grad=True, kind=kind, **packed)
    linear_policy_loss.prepare(given)(given).loss.backward()
    assert names(recorder) == [
        *["partial_softmax", "merge_softmax", *BATCH, "loss_kernel", "softmax_backward", "total_kernel"],
        *["scale_kernel"] * 2,
    ]
    sizes = [launch.grid[0] for launch in recorder.launches[-2:]]
    assert sizes == [N * D // 1024, V * D // 1024]


def test_blocks_of_a_loss_are_worked_on_one_after_the_other(recorder):
    given = loss(1100, grad=True)
    linear_policy_loss.prepare(given)(given)
    of_block = ["partial_softmax", "merge_softmax", "loss_kernel", "softmax_backward"]
    assert names(recorder) == [*BATCH, *of_block * 3, "total_kernel"]
    programs = [launch.grid[0] for launch in recorder.launches if launch.build.kernel.endswith("loss_kernel")]
    assert programs == [3, 3, 3]


@pytest.mark.parametrize("rows", [N, 1100])
def test_a_plan_of_losses_launches_the_same_at_every_call(recorder, rows):
    run = linear_policy_loss.prepare(loss(rows, grad=True, mask=flag(rows)))
    for _ in range(2):
        run(loss(rows, grad=True, mask=flag(rows)))
    half = len(recorder.launches) // 2
    assert half > 0
    assert recorder.launches[:half] == recorder.launches[half:]
