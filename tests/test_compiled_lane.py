"""torch.compile around every operator: no graph break, the bits of eager mode, a decision that follows the policy."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel_core.errors import (
    ArgumentError,
    FallbackError,
    FallbackWarning,
    ResolutionError,
    RLKernelError,
)
from rlkernel_core.spec import OPERATORS
from tests.compiled_calls import EXAMPLES, HIDDEN, IDS, LOGITS, WEIGHT, Graphs, arguments, tensors_of
from tests.implementations import acme

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*recompile.*:UserWarning"),
    pytest.mark.usefixtures("untraced"),
]
NAMES = [f"{e.name}-{at}" for at, e in enumerate(EXAMPLES)]


def gradients(result: object, inputs: list, wanted: tuple[int, ...]) -> list[Tensor]:
    weighed = [(at + 1) * t.double().sum() for at, t in enumerate(tensors_of(result)) if t.requires_grad]
    return list(torch.autograd.grad(sum(weighed), [inputs[at] for at in wanted]))


def assert_same_bits(expected: list[Tensor], actual: list[Tensor]) -> None:
    assert len(expected) == len(actual)
    for a, b in zip(expected, actual, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)


def test_every_operator_on_tensors_has_an_example() -> None:
    """capture records functions, and a rollout buffer is an object with a state: neither is a node of a graph."""
    assert {e.name for e in EXAMPLES} == set(OPERATORS) - {"capture", "rollout_buffer"}


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_an_operator_compiles_whole_and_gives_the_bits_of_eager_mode(example) -> None:
    inputs, plain = arguments(example), arguments(example)
    graphs = Graphs("aot_eager")
    actual, expected = graphs.compiled(example.run)(*inputs), example.run(*plain)
    assert type(expected) is type(actual)
    assert_same_bits(tensors_of(expected), tensors_of(actual))
    assert [t.requires_grad for t in tensors_of(expected)] == [t.requires_grad for t in tensors_of(actual)]
    if example.wanted:
        assert_same_bits(gradients(expected, plain, example.wanted), gradients(actual, inputs, example.wanted))
    (node,) = graphs.operator_nodes()
    assert node.args[3].startswith("torch rlkernel_torch.")


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.rows], ids=lambda e: e.name)
def test_one_graph_serves_every_number_of_rows(example) -> None:
    graphs = Graphs("aot_eager")
    run = graphs.compiled(example.run)
    for rows in (6, 3):
        inputs = arguments(example, rows)
        for at in example.rows:
            torch._dynamo.mark_dynamic(inputs[at], 0)
        actual = run(*inputs)
        assert_same_bits(tensors_of(example.run(*arguments(example, rows))), tensors_of(actual))
    assert graphs.count == 1


def test_the_node_names_the_implementation_and_the_call() -> None:
    graphs = Graphs("eager")
    graphs.compiled(lambda x, ids: rlk.logprob(x, ids, temperature=0.5).logprob)(LOGITS, IDS)
    (node,) = graphs.operator_nodes()
    decision = rlk.last_decision("logprob")
    assert node.args[3] == f"torch {decision.target} [{decision.version}] {decision.hash}"
    text = (
        '{"logits": {"t": 0}, "ids": {"t": 1}, "temperature": {"f": 0}, "softcap": null, "mask": null, "entropy": false'
    )
    assert node.args[4].startswith(text)


def test_inductor_runs_forward_and_backward() -> None:
    def loss(x: Tensor, ids: Tensor) -> Tensor:
        out = rlk.logprob(x * 2, ids, temperature=0.7, entropy=True)
        return (out.logprob - 0.01 * out.entropy).mean()

    x, y = LOGITS.clone().requires_grad_(), LOGITS.clone().requires_grad_()
    actual, expected = torch.compile(loss, fullgraph=True)(x, IDS), loss(y, IDS)
    actual.backward()
    expected.backward()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(x.grad, y.grad)


def test_a_chain_of_operators_is_one_graph() -> None:
    def step(hidden: Tensor, weight: Tensor, ids: Tensor, rewards: Tensor) -> Tensor:
        packed = rlk.quantize(weight, "int8_channel")
        draft = rlk.sample(rlk.qmatmul(hidden, packed).detach(), seed=ids, step=0)
        advantage = rlk.advantage(rewards, kind="grpo", group=3).advantages
        new = rlk.linear_logprob(hidden, weight, draft.token).logprob
        return rlk.policy_loss(new[:, None], draft.logprob[:, None], advantage, kind="grpo").loss

    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    graphs = Graphs("aot_eager")
    x, y = HIDDEN.clone().requires_grad_(), HIDDEN.clone().requires_grad_()
    actual, expected = graphs.compiled(step)(x, WEIGHT, IDS, rewards), step(y, WEIGHT, IDS, rewards)
    assert_same_bits([expected], [actual])
    assert_same_bits([torch.autograd.grad(expected, y)[0]], [torch.autograd.grad(actual, x)[0]])
    assert graphs.count == 1


# --- the policy


def test_a_policy_change_traces_once_and_the_first_graph_is_found_again() -> None:
    graphs = Graphs("eager")
    run = graphs.compiled(lambda x, ids: rlk.logprob(x, ids).logprob)
    with rlk.registered(acme()):
        run(LOGITS, IDS)
        assert graphs.count == 1
        for _ in range(2):
            with rlk.use("acme"):
                assert (run(LOGITS, IDS) == 1).all()
            assert graphs.count == 2
            assert (run(LOGITS, IDS) < 0).all()
        rlk.configure("acme")
        assert (run(LOGITS, IDS) == 1).all()
        counted = graphs.count
        rlk.configure()
        assert (run(LOGITS, IDS) < 0).all()
        rlk.configure("acme")
        assert (run(LOGITS, IDS) == 1).all()
        assert graphs.count == counted == 3


def test_the_policy_of_another_operator_traces_nothing_anew() -> None:
    graphs = Graphs("eager")
    run = graphs.compiled(lambda x, ids: rlk.logprob(x, ids).logprob)
    with rlk.use(fallback="error"):
        run(LOGITS, IDS)
        with rlk.use(sample={"order": ["torch"]}):
            run(LOGITS, IDS)
    assert graphs.count == 1


def test_threads_and_tasks_keep_their_own_policy() -> None:
    run = torch.compile(lambda x, ids: rlk.logprob(x, ids).logprob, backend="eager", fullgraph=True)
    found = {}

    def elsewhere() -> None:
        found["thread"] = run(LOGITS, IDS)

    async def task(name: str, backend: str) -> None:
        with rlk.use(backend):
            await asyncio.sleep(0)
            found[name] = run(LOGITS, IDS)
            await asyncio.sleep(0)
            found[name + " again"] = run(LOGITS, IDS)

    async def both() -> None:
        await asyncio.gather(task("one", "acme"), task("two", "torch"))

    with rlk.registered(acme()), rlk.use("acme"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        asyncio.run(both())
    ones = {name for name, result in found.items() if (result == 1).all()}
    assert ones == {"one", "one again"}


def test_a_removed_backend_does_not_run_again() -> None:
    run = torch.compile(lambda x, ids: rlk.logprob(x, ids).logprob, backend="eager", fullgraph=True)
    rlk.configure("torch")
    with rlk.registered(acme()), rlk.use("acme"):
        assert (run(LOGITS, IDS) == 1).all()
    with rlk.registered(acme("raises")), rlk.use("acme"), pytest.raises(RuntimeError, match="the kernel failed"):
        run(LOGITS, IDS)
    assert (run(LOGITS, IDS) < 0).all()


def test_the_kernel_that_needs_gradients_is_chosen_by_the_gradient() -> None:
    run = torch.compile(lambda x, ids: rlk.logprob(x, ids).logprob, backend="aot_eager", fullgraph=True)
    with rlk.registered(acme(supports=frozenset())), rlk.use("acme", "torch"):
        assert (run(LOGITS, IDS) == 1).all()
        with torch.no_grad():
            assert (run(LOGITS.clone().requires_grad_(), IDS) == 1).all()
        with pytest.warns(FallbackWarning, match="grad"):
            result = run(LOGITS.clone().requires_grad_(), IDS)
        assert (result < 0).all()
        assert result.requires_grad


# --- errors and warnings


def test_a_fallback_warns_while_tracing_and_once() -> None:
    run = torch.compile(lambda x, ids: rlk.logprob(x, ids, entropy=True).logprob, backend="eager", fullgraph=True)
    with rlk.registered(acme()), rlk.use("acme", "torch"):
        with pytest.warns(FallbackWarning, match="acme"):
            run(LOGITS, IDS)
        run(LOGITS, IDS)


def test_refusals_keep_their_type() -> None:
    def entropy(x: Tensor, ids: Tensor) -> Tensor:
        return rlk.logprob(x, ids, entropy=True).entropy

    for backend in ("eager", "aot_eager"):
        for whole in (True, False):
            torch._dynamo.reset()
            rlk.refresh()
            run = torch.compile(entropy, backend=backend, fullgraph=whole)
            with rlk.registered(acme()):
                with rlk.use("acme"), pytest.raises(ResolutionError, match="acme"):
                    run(LOGITS, IDS)
                with rlk.use("acme", "torch", fallback="error"), pytest.raises(FallbackError) as caught:
                    run(LOGITS, IDS)
                assert caught.value.decision.fell_back_from == "acme"
            run(LOGITS, IDS)


def test_a_fallback_that_was_made_an_error_is_one_here() -> None:
    run = torch.compile(lambda x, ids: rlk.logprob(x, ids, entropy=True).logprob, backend="eager", fullgraph=True)
    with rlk.registered(acme()), rlk.use("acme", "torch"), warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        with pytest.raises(FallbackWarning):
            run(LOGITS, IDS)


def test_a_bad_argument_is_named() -> None:
    run = torch.compile(lambda x, ids: rlk.logprob(x, ids).logprob, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="ids: must have the shape of logits without its last dimension"):
        run(LOGITS, IDS[:3])


def test_what_is_written_to_is_refused() -> None:
    run = torch.compile(lambda w, out: rlk.quantize(w, "nf4", out=out), backend="eager", fullgraph=True)
    with pytest.raises(ArgumentError, match="out"):
        run(WEIGHT, rlk.quantize(WEIGHT, "nf4"))


def test_an_implementation_that_returns_something_else_is_found_out() -> None:
    run = torch.compile(lambda x, ids: rlk.logprob(x, ids, entropy=True).entropy, backend="eager", fullgraph=True)
    lying = acme(supports=frozenset({"grad", "entropy"}))
    with rlk.registered(lying), rlk.use("acme"), pytest.raises(RLKernelError, match="the contract says"):
        run(LOGITS, IDS)


# --- choice by size


def test_an_implementation_that_looks_at_sizes_is_chosen_when_the_graph_runs() -> None:
    graphs = Graphs("eager")
    run = graphs.compiled(lambda x, ids: rlk.logprob(x, ids).logprob)
    with rlk.registered(acme(check="even_rows")), rlk.use("acme", "torch"):
        x, ids = LOGITS.clone(), IDS.clone()
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(ids, 0)
        assert (run(x, ids) == 1).all()
        with pytest.warns(FallbackWarning, match="odd"):
            assert (run(LOGITS[:5], IDS[:5]) < 0).all()
        assert graphs.count == 1
        assert {r.backend for r in rlk.status()} == {"acme", "torch"}
        assert rlk.last_decision("logprob").backend == "torch"


# --- provenance, binding, imports


def test_status_lists_what_compiled_graphs_decided_and_counts_their_calls() -> None:
    run = torch.compile(lambda x, ids: rlk.logprob(x, ids).logprob, backend="eager", fullgraph=True)
    for _ in range(3):
        run(LOGITS, IDS)
    (ran,) = rlk.status()
    assert (ran.op, ran.backend, ran.calls) == ("logprob@1", "torch", 3)


def test_a_bound_operator_compiles_as_the_raw_implementation() -> None:
    bound = rlk.logprob.bind(LOGITS, IDS)
    run = torch.compile(lambda x, ids: bound(x, ids).logprob, backend="eager")
    torch.testing.assert_close(run(LOGITS, IDS), rlk.logprob(LOGITS, IDS).logprob)


def test_integers_that_shape_nothing_may_change_without_tracing() -> None:
    graphs = Graphs("aot_eager")
    run = graphs.compiled(lambda x, seed, step: rlk.sample(x, seed=seed, step=step).token)
    for step in range(5):
        assert torch.equal(run(LOGITS, IDS, step), rlk.sample(LOGITS, seed=IDS, step=step).token)
    assert graphs.count <= 2


def test_eager_calls_do_not_import_the_compiled_lane() -> None:
    code = (
        "import sys, torch, rlkernel as rlk\n"
        "rlk.logprob(torch.zeros(2, 3), torch.tensor([0, 1]))\n"
        "print([m for m in sys.modules if m.startswith('rlkernel.torchlib') or m == 'torch._dynamo'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
