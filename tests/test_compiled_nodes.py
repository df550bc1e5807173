"""The nodes of the compiled lane by themselves: torch's own check, shapes of any size, texts that are data alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import rlkernel as rlk
from rlkernel.torchlib import nodes
from rlkernel_core.errors import ArgumentTypeError, ResolutionError
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.quant import quantize
from rlkernel_core.spec.logprob import Support
from tests.compiled_calls import EXAMPLES, IDS, LOGITS, Graphs, arguments, tensors_of
from tests.implementations import acme

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.usefixtures("untraced")]


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{e.name}-{at}" for at, e in enumerate(EXAMPLES)])
def test_nodes_pass_torchs_own_check(example) -> None:
    graphs = Graphs("eager")
    result = graphs.compiled(example.run)(*arguments(example))
    ((op, args),) = graphs.calls
    if any(t.is_floating_point() and t.element_size() == 1 for t in args[0]):
        # Nothing is saved for a gradient, and torch's check of schemas multiplies, which no 8-bit floats do on a CPU.
        torch.library.opcheck(op.default, args, test_utils=("test_faketensor", "test_aot_dispatch_dynamic"))
        return
    torch.library.opcheck(op.default, args)
    grads = [torch.ones_like(t.detach()) if t.requires_grad else None for t in tensors_of(result)]
    forward, backward = (
        getattr(torch.ops.rlkernel, f"{example.name}_{way}").default for way in ("forward", "backward")
    )
    constants = [[t.detach() for t in args[0]], *args[1:]]
    torch.library.opcheck(forward, constants)
    saved = nodes.kept(nodes.Node(example.name, *constants), forward(*constants))
    torch.library.opcheck(backward, (grads, saved, *constants))


def mark(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)


def test_sizes_that_are_one_apart_move_together() -> None:
    graphs = Graphs("aot_eager")
    run = graphs.compiled(lambda x, ids, kept, bounds: rlk.logprob(x, ids, support=Support(kept, bounds)).log_kept_mass)
    for rows in (6, 4, 3):
        inputs = (LOGITS[:rows].clone(), IDS[:rows].clone(), torch.arange(2 * rows) % 12, torch.arange(rows + 1) * 2)
        mark(*inputs)
        expected = rlk.logprob(*inputs[:2], support=Support(*inputs[2:])).log_kept_mass
        assert torch.equal(expected, run(*inputs))
    assert graphs.count == 1


def test_a_sum_of_sizes_is_told_from_its_parts() -> None:
    """Drafts per request: 3 drafts for 3 requests at first, so that one size stands for two things."""
    graphs = Graphs("aot_eager")
    run = graphs.compiled(lambda x, ids, bounds, seed: rlk.verify(x, ids, cu_draft=bounds, seed=seed, step=1))
    for drafts in ((1, 1, 1), (2, 0, 3), (4, 1)):
        requests, count = len(drafts), sum(drafts)
        bounds = torch.tensor([0, *drafts]).cumsum(0)
        logits = torch.randn(count + requests, 12, generator=torch.Generator().manual_seed(count))
        inputs = (logits, torch.arange(count), bounds, torch.arange(requests))
        mark(*inputs)
        expected, actual = rlk.verify(*inputs[:2], cu_draft=bounds, seed=inputs[3], step=1), run(*inputs)
        for a, b in zip(tensors_of(expected), tensors_of(actual), strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)
    assert graphs.count == 1


def test_results_share_no_storage_with_arguments_or_each_other() -> None:
    run = torch.compile(rlk.logprob, backend="aot_eager", fullgraph=True)
    claims = frozenset({"grad", "lse"})
    with rlk.registered(acme("first_column", supports=claims)), rlk.use("acme"):
        result = run(LOGITS, IDS)
    assert torch.equal(result.logprob, LOGITS[:, 0])
    storages = {t.untyped_storage().data_ptr() for t in (LOGITS, result.logprob, result.lse)}
    assert len(storages) == 3


PLUGIN = """
import torch
from rlkernel_core.spec.logprob import LogprobResult

ONE = torch.ones(())


def logprob(call):
    one = ONE.expand(call.ids.shape)
    return LogprobResult(one, one, invalid=torch.zeros(call.ids.shape).bool())


def self_test(device):
    assert type(ONE + 1) is torch.Tensor and float(torch.zeros((), device=device)) == 0
"""


def test_a_plugin_that_tracing_imports_is_imported_as_in_eager_mode(tmp_path, monkeypatch) -> None:
    """Its module-level tensors are real ones, and its self-test sees values."""
    (tmp_path / "plugin_met_while_tracing.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    requires = Requires(device="cpu")
    impl = Impl(op="logprob@1", target="plugin_met_while_tracing:logprob", requires=requires)
    plugin = Backend(name="met", api=API_VERSION, impls=(impl,), self_test="plugin_met_while_tracing:self_test")
    run = torch.compile(lambda x, ids: rlk.logprob(x, ids).logprob, backend="eager", fullgraph=True)
    with rlk.registered(plugin), rlk.use("met", probe="inprocess"):
        assert run(LOGITS, IDS).tolist() == [1.0] * 6
        assert rlk.logprob(LOGITS, IDS).logprob.tolist() == [1.0] * 6


def test_a_weight_that_a_backend_packed_goes_through_a_graph() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    w = quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(2)), "int4_g32")
    packed = replace(w, parts={**w.parts, "codes": w.parts["codes"][None]}, layout="acme_tiles")
    requires = Requires(device="cpu")
    features = frozenset({"format:int4_g32", "activation:swiglu"})
    target = "tests.implementations:tiled_product"
    impl = Impl(op="qmatmul@1", target=target, requires=requires, supports=features)
    run = torch.compile(lambda x: rlk.qmatmul(x, packed, activation="swiglu"), backend="aot_eager", fullgraph=True)
    with rlk.registered(Backend(name="acme", api=API_VERSION, impls=(impl,))), rlk.use("acme", probe="inprocess"):
        assert torch.equal(run(x), rlk.qmatmul(x, packed, activation="swiglu"))


def test_a_text_is_data_and_never_code() -> None:
    from rlkernel.torchlib.call_codec import arguments, same

    for text in ("x=__import__('os')", "[1]", "", '{"x": '):
        with pytest.raises(ArgumentTypeError, match="no text of a call"):
            arguments(text, [], [], [], same)
    with pytest.raises(ArgumentTypeError, match="stands for nothing"):
        arguments('{"x": {"eval": "1"}}', [], [], [], same)
    with pytest.raises(TypeError, match="is no dataclass"):
        arguments('{"x": {"new": "os:PathLike"}}', [], [], [], same)


def test_a_node_from_another_process_says_so() -> None:
    graphs = Graphs("eager")
    graphs.compiled(lambda x, ids: rlk.logprob(x, ids).logprob)(LOGITS, IDS)
    ((op, args),) = graphs.calls
    with pytest.raises(ResolutionError, match="traced in another process"):
        op(*args[:3], "acme acme:logprob [acme 1.0] 0123456789ab", args[4])
