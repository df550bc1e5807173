"""Pairs of forward and backward: each runs once a step, eager and compiled, and what they save is known in advance."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel_core.errors import PluginWarning, RLKernelError
from rlkernel_torch import PAIRS
from tests.compiled_calls import EXAMPLES, IDS, LOGITS, Example, arguments, tensors_of
from tests.implementations import COUNTED, acme

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
LANES = {"eager": lambda run: run, "compiled": lambda run: torch.compile(run, backend="aot_eager", fullgraph=True)}
# Plain torch keeps none of the scan's steps: its backward pass makes them again, and has autograd differentiate them.
AGAIN = {"affine_suffix_scan"}
SCORED = [example for example in EXAMPLES if example.name in PAIRS and example.wanted]


@pytest.fixture(autouse=True)
def nothing_counted(untraced: None) -> None:
    COUNTED.clear()


def stepped(run: Any, inputs: list[Any], wanted: tuple[int, ...]) -> list[Tensor]:
    """The gradients of the sum of all results."""
    total = sum((at + 1) * t.double().sum() for at, t in enumerate(tensors_of(run(*inputs))) if t.requires_grad)
    return list(torch.autograd.grad(total, [inputs[at] for at in wanted]))


def loss(x: Tensor) -> Tensor:
    return rlk.logprob(x * 2, IDS[: x.shape[0]]).logprob.mean()


def gradient_of(run: Any, rows: int = 6) -> Tensor:
    x = LOGITS[:rows].clone().requires_grad_()
    return torch.autograd.grad(run(x), x)[0]


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("example", SCORED, ids=[f"{e.name}-{at}" for at, e in enumerate(SCORED)])
def test_a_step_runs_forward_once_and_backward_once(example: Example, lane, monkeypatch) -> None:
    counted: Counter[str] = Counter()
    module, _, name = PAIRS[example.name].partition(":")
    pair = getattr(import_module(module), name)
    formula_of = {"policy_loss": "evaluated", "linear_policy_loss": "_one_pass"}.get(example.name, "_forward")
    inner = getattr(import_module(module), formula_of)
    for way in ("forward", "backward"):
        before = getattr(pair, way)

        def counting(self, *given, _before=before, _way=way):
            counted[_way] += 1
            return _before(self, *given)

        monkeypatch.setattr(pair, way, counting)

    def formula(*given, **options):
        counted["formula"] += 1
        return inner(*given, **options)

    monkeypatch.setattr(import_module(module), formula_of, formula)
    assert len(stepped(LANES[lane](example.run), arguments(example), example.wanted)) == len(example.wanted)
    again = example.name in AGAIN
    assert counted == {"forward": 1, "backward": 1, "formula": 1 + again}


@pytest.mark.parametrize("lane", LANES)
def test_a_backend_brings_its_own_pair(lane) -> None:
    expected = gradient_of(loss)
    with rlk.registered(acme("counting", gradient="CountingPair")), rlk.use("acme"):
        actual = gradient_of(LANES[lane](loss))
        assert torch.equal(expected, actual)
        assert COUNTED == {"forward": 1, "backward": 1}
        LANES[lane](loss)(LOGITS)
        assert COUNTED == {"forward": 1, "backward": 1, "plain": 1}  # no pair where no gradient is wanted


def test_a_bound_operator_keeps_its_pair_for_calls_that_want_gradients() -> None:
    with rlk.registered(acme("counting", gradient="CountingPair")):
        with rlk.use("acme"):
            bound = rlk.logprob.bind(LOGITS, IDS)
        gradient_of(lambda x: bound(x, IDS).logprob.sum())
    assert COUNTED == {"forward": 1, "backward": 1}


@pytest.mark.filterwarnings("ignore::rlkernel.FallbackWarning")
def test_a_size_that_another_implementation_takes_has_the_same_gradients() -> None:
    run = LANES["compiled"](loss)
    expected = {rows: gradient_of(loss, rows) for rows in (4, 6)}
    plugin = acme("counting", gradient="CountingPair", check="few_rows")
    with rlk.registered(plugin), rlk.use("acme", "torch"):
        assert torch.equal(expected[4], gradient_of(run, 4))
        assert COUNTED == {"forward": 1, "backward": 1}
        assert torch.equal(expected[6], gradient_of(run, 6))
        assert COUNTED == {"forward": 1, "backward": 1}


def test_a_graph_names_what_was_not_saved() -> None:
    with rlk.registered(acme("counting", gradient="ForgetfulPair")), rlk.use("acme"):
        with pytest.raises(RLKernelError, match="saved nothing, its saved_like said call 0"):
            gradient_of(LANES["compiled"](loss))


@pytest.mark.parametrize("gradient", ["counting", "absent"])
def test_what_is_no_pair_is_refused_by_name(gradient) -> None:
    with rlk.registered(acme("counting", gradient=gradient)), rlk.use("acme"):
        with pytest.warns(PluginWarning, match=f"tests.implementations:{gradient}"):
            with pytest.raises(rlk.ResolutionError, match=f"tests.implementations:{gradient}"):
                rlk.logprob(LOGITS, IDS)


def test_arguments_that_change_before_backward_are_noticed() -> None:
    x = LOGITS.clone().requires_grad_()
    scaled = x * 1.0
    out = rlk.logprob(scaled, IDS).logprob.sum()
    scaled.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
def test_results_may_be_changed_in_place(shape) -> None:
    x = LOGITS[: max(1, torch.Size(shape).numel())].reshape(*shape, -1).clone().requires_grad_()
    ids = IDS[: torch.Size(shape).numel()].reshape(shape)
    out = rlk.logprob(x, ids).logprob
    expected = torch.autograd.grad(out.sum(), x, retain_graph=True)[0] * 2
    out.mul_(2.0)
    assert torch.equal(expected, torch.autograd.grad(out.sum(), x)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_of_a_linear_layer_may_be_changed_in_place(dtype) -> None:
    x, weight = torch.ones(2, 3, 4, dtype=dtype, requires_grad=True), torch.eye(4, dtype=dtype)
    rlk.linear(x, weight).mul_(3).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


@pytest.mark.parametrize("example", SCORED, ids=[f"{e.name}-{at}" for at, e in enumerate(SCORED)])
def test_second_derivatives_are_refused(example: Example) -> None:
    inputs = arguments(example)
    total = sum(t.sum() for t in tensors_of(example.run(*inputs)) if t.requires_grad)
    with pytest.raises(RLKernelError, match=f"{example.name} has no second derivative"):
        torch.autograd.grad(total, [inputs[at] for at in example.wanted], create_graph=True)


@pytest.mark.parametrize("example", SCORED, ids=[f"{e.name}-{at}" for at, e in enumerate(SCORED)])
def test_a_second_backward_pass_gives_the_same_bits(example: Example) -> None:
    inputs = arguments(example)
    wanted = [inputs[at] for at in example.wanted]
    total = sum(t.sum() for t in tensors_of(example.run(*inputs)) if t.requires_grad)
    first, second = (torch.autograd.grad(total, wanted, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("example", SCORED, ids=[f"{e.name}-{at}" for at, e in enumerate(SCORED)])
def test_calls_without_gradients_record_nothing(example: Example) -> None:
    with torch.no_grad():
        assert {t.grad_fn for t in tensors_of(example.run(*arguments(example)))} == {None}
    plain = [t.detach() if isinstance(t, Tensor) else t for t in arguments(example)]
    assert {t.grad_fn for t in tensors_of(example.run(*plain))} == {None}
