"""Pairs of the cuda backend in eager and compiled training, and plans that serve every call of a shape."""

from collections import Counter

import pytest
import torch

import rlkernel as rlk
from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.linear_policy_loss import LinearPolicyLossCall
from rlkernel_cuda import backend
from rlkernel_cuda.linear_logprob import launch as linear_logprob
from rlkernel_cuda.linear_policy_loss import launch as linear_policy_loss

# The interpreter computes both branches of a select with numpy, which warns of log(0) in the one that is not taken.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
LANES = {"eager": lambda run: run, "compiled": lambda run: torch.compile(run, backend="aot_eager", fullgraph=True)}
N, D, V = 70, 16, 300


def on_a_cpu():
    """The backend as if it claimed the CPU."""
    impls = [
        impl.model_copy(update={"requires": impl.requires.model_copy(update={"device": "cpu", "arch": ()})})
        for impl in backend.impls
        if impl.op.startswith("linear")
    ]
    return backend.model_copy(update={"name": "emulated", "impls": tuple(impls)})


def counting(found, name, method):
    def run(self, *given):
        found[name] += 1
        return method(self, *given)

    return run


@pytest.fixture
def counted(monkeypatch):
    found = Counter()
    for pair in (linear_logprob.LinearLogprobPair, linear_policy_loss.LinearPolicyLossPair):
        for way in ("forward", "backward"):
            monkeypatch.setattr(pair, way, counting(found, (pair.op, way), getattr(pair, way)))
    torch._dynamo.reset()
    rlk.refresh()
    return found


def tensors(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(N, D, generator=g).bfloat16(),
        "weight": (torch.randn(V, D, generator=g) * 3 / D**0.5).bfloat16(),
        "ids": torch.randint(0, V, (N,), generator=g),
        "bias": torch.randn(V, generator=g),
        "mask": torch.rand(N, generator=g) > 0.4,
    }


def of_loss(seed=0):
    g = torch.Generator().manual_seed(seed + 100)
    rest = {"old_logprob": -6 + torch.randn(N, generator=g), "advantages": torch.randn(N, generator=g)}
    return {**tensors(seed), **rest, "entropy": True, "entropy_coef": 0.01, "aggregate": "token_mean"}


def step(run, given):
    leaves = [given[n].clone().requires_grad_() for n in ("hidden", "weight", "bias")]
    value = run(*leaves)
    return value.detach(), *torch.autograd.grad(value, leaves)


OPTIONS = {"recompute": {"backward": "recompute"}, "save": {"backward": "save"}, "no mask": {"mask": None}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lane", LANES)
def test_a_step_of_linear_logprob_runs_forward_once_and_backward_once(counted, lane, options) -> None:
    given = {**tensors(), **options}
    rest = {n: x for n, x in given.items() if n not in {"hidden", "weight", "bias"}}

    def run(hidden, weight, bias):
        out = rlk.linear_logprob(hidden, weight, bias=bias, entropy=True, **rest)
        return out.logprob.mean() + 0.1 * out.entropy.sum()

    with rlk.registered(on_a_cpu()), rlk.use("emulated"):
        expected = step(run, given)
        counted.clear()
        actual = step(LANES[lane](run), given)
    assert counted == {("linear_logprob", "forward"): 1, ("linear_logprob", "backward"): 1}
    assert [torch.equal(a, b) for a, b in zip(actual, expected, strict=True)] == [True] * 4


@pytest.mark.parametrize("blocks", [False, True], ids=["at once", "block by block"])
@pytest.mark.parametrize("lane", LANES)
def test_a_step_of_linear_policy_loss_runs_forward_once_and_backward_once(counted, lane, blocks, monkeypatch) -> None:
    if blocks:
        monkeypatch.setattr(linear_policy_loss, "SAVED_LOGITS", 2 * 304 * 65)
    given = of_loss()
    rest = {n: x for n, x in given.items() if n not in {"hidden", "weight", "bias"}}

    def run(hidden, weight, bias):
        return rlk.linear_policy_loss(hidden, weight, bias=bias, **rest).loss

    with rlk.registered(on_a_cpu()), rlk.use("emulated"):
        expected = step(run, given)
        counted.clear()
        actual = step(LANES[lane](run), given)
    assert counted == {("linear_policy_loss", "forward"): 1, ("linear_policy_loss", "backward"): 1}
    assert [torch.equal(a, b) for a, b in zip(actual, expected, strict=True)] == [True] * 4


@pytest.mark.parametrize("wants", [False, True], ids=["no gradient", "gradient"])
@pytest.mark.parametrize("op", ["linear_logprob", "linear_policy_loss"])
def test_a_plan_serves_every_call_of_its_shape(op, wants) -> None:
    module, record, make = {
        "linear_logprob": (linear_logprob, LinearLogprobCall, tensors),
        "linear_policy_loss": (linear_policy_loss, LinearPolicyLossCall, of_loss),
    }[op]

    def asked(seed):
        given = make(seed)
        for name in ("hidden", "weight", "bias"):
            given[name].requires_grad_(wants)
        return record(**given)

    def answered(run, call):
        out = run(call)
        found = [out.logprob.detach()]
        if wants:
            value = out.logprob.sum() if op == "linear_logprob" else out.loss
            found += torch.autograd.grad(value, (call.hidden, call.weight, call.bias))
        return found

    plan = module.prepare(asked(0))
    for seed in (1, 2):
        fresh = asked(seed)
        pairs = zip(answered(plan, fresh), answered(module.prepare(fresh), fresh), strict=True)
        assert [torch.equal(a, b) for a, b in pairs] == [True] * (4 if wants else 1)


def test_without_gradients_neither_operator_makes_a_node() -> None:
    out = linear_logprob.linear_logprob(LinearLogprobCall(**tensors()))
    assert out.logprob.grad_fn is None
    assert linear_policy_loss.linear_policy_loss(LinearPolicyLossCall(**of_loss())).loss.grad_fn is None


@pytest.mark.parametrize("lane", LANES)
def test_a_second_backward_pass_makes_again_the_logits_that_the_first_wrote_over(counted, lane) -> None:
    given = tensors()
    leaves = {n: given.pop(n).requires_grad_() for n in ("hidden", "weight", "bias")}

    run = LANES[lane](lambda **of: rlk.linear_logprob(**of, **given, backward="save").logprob.mean())
    with rlk.registered(on_a_cpu()), rlk.use("emulated"):
        value = run(**leaves)
        first, second = (torch.autograd.grad(value, list(leaves.values()), retain_graph=True) for _ in range(2))
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True] * 3
