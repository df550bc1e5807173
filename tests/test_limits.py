"""Limits of an implementation: refused by reason before it runs, and printed by `explain`."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from pydantic import ValidationError

import rlkernel as rlk
from rlkernel_core.errors import ConfigError, FallbackError, FallbackWarning, ResolutionError
from rlkernel_core.manifest import Limits
from rlkernel_core.spec import OPERATORS
from tests.command_line import answer
from tests.limited import backend

pytestmark = pytest.mark.usefixtures("fresh")

LOGITS = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([0, 3, 6, 2])
SMALL = Limits(max_rows=4, max_vocab=7, layouts=("contiguous_last_dim",))


def refused(logits: torch.Tensor, ids: torch.Tensor = IDS, manifest=None, **options) -> str | None:
    """The reason against acme for a call, as `explain` and the call itself give it; None where acme takes it."""
    with rlk.registered(manifest or backend(SMALL)), rlk.use("acme", **options):
        said = next(
            (r.reason for r in rlk.explain("logprob", logits, ids).decision.rejected if r.backend == "acme"), None
        )
        if said is None:
            rlk.logprob(logits, ids)
            return None
        with pytest.raises(ResolutionError) as raised:
            rlk.logprob(logits, ids)
    assert raised.value.decision.rejected[0].reason == said
    return f"{said.slug}: {said.text}"


def test_a_call_at_the_limits_is_taken() -> None:
    assert refused(LOGITS) is None


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((5, 7), "shape/too-large: it takes at most 4 rows (max_rows), the call has 5"),
        ((4, 8), "shape/too-large: it takes at most 7 ids (max_vocab), the call has 8"),
        ((2, 3, 7), "shape/too-large: it takes at most 4 rows (max_rows), the call has 6"),
    ],
)
def test_a_call_beyond_a_limit_is_refused_with_limit_and_size(shape, said) -> None:
    assert refused(torch.zeros(shape), torch.zeros(shape[:-1], dtype=torch.long)) == said


def test_a_layout_that_is_not_read_is_refused_with_its_strides() -> None:
    said = refused(torch.zeros(7, 4).t())
    assert said == "shape/layout: it reads contiguous_last_dim, logits has strides [1, 4]"
    assert refused(torch.zeros(4, 14)[:, :7]) is None
    assert refused(torch.zeros(4, 14)[:, :7], manifest=backend(Limits(layouts=("contiguous",)))) is not None


def test_sizes_decide_call_by_call_and_a_fallback_is_said_once() -> None:
    with rlk.registered(backend(SMALL)), rlk.use("acme", "auto"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        served = []
        for rows in (4, 5, 6, 3, 5):
            rlk.logprob(torch.zeros(rows, 7), torch.zeros(rows, dtype=torch.long))
            served.append(rlk.last_decision("logprob").backend)
    assert served == ["acme", "torch", "torch", "acme", "torch"]
    assert [w.category for w in said] == [FallbackWarning]


def test_a_limit_makes_a_fallback_an_error_where_the_policy_says_so() -> None:
    with rlk.registered(backend(SMALL)), rlk.use("acme", "auto", fallback="error"):
        rlk.logprob(LOGITS, IDS)
        with pytest.raises(FallbackError, match="shape/too-large"):
            rlk.logprob(torch.zeros(5, 7), torch.zeros(5, dtype=torch.long))


def test_what_bind_hands_out_keeps_to_the_limits() -> None:
    with rlk.registered(backend(SMALL)), rlk.use("acme"):
        bound = rlk.logprob.bind(LOGITS, IDS)
        with pytest.raises(ResolutionError, match="shape/too-large"):
            bound(torch.zeros(5, 7), torch.zeros(5, dtype=torch.long))


def test_a_compiled_call_beyond_a_limit_falls_back_too() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, ids: rlk.logprob(x, ids).logprob * 2, backend="aot_eager", fullgraph=True)
    with rlk.registered(backend(SMALL)), rlk.use("acme", "auto"):
        compiled(LOGITS, IDS)
        assert rlk.last_decision("logprob").backend == "acme"
        with pytest.warns(FallbackWarning, match="shape/too-large"):
            compiled(torch.zeros(5, 7), torch.zeros(5, dtype=torch.long))
        assert rlk.last_decision("logprob").backend == "torch"


MEMORY = backend(workspace="four_bytes_a_logit")


def test_a_call_that_needs_more_memory_than_the_policy_allows_is_refused() -> None:
    assert refused(LOGITS, manifest=MEMORY, max_workspace_bytes=112) is None
    said = refused(LOGITS, manifest=MEMORY, max_workspace_bytes=111)
    assert said == (
        "memory/insufficient: the call needs 112 bytes beyond its results, and 111 is max_workspace_bytes of the policy"
    )


def test_the_memory_may_be_limited_for_one_operator() -> None:
    with rlk.registered(MEMORY):
        with rlk.use("acme", whiten={"max_workspace_bytes": 0}):
            rlk.logprob(LOGITS, IDS)
        with rlk.use("acme", logprob={"max_workspace_bytes": 0}), pytest.raises(ResolutionError, match="insufficient"):
            rlk.logprob(LOGITS, IDS)


def test_without_a_budget_no_call_is_refused_for_its_memory() -> None:
    """Free memory differs between the ranks of a run: what they choose must not."""
    with rlk.registered(MEMORY), rlk.use("acme"):
        rlk.logprob(LOGITS, IDS)
        assert rlk.last_decision("logprob").backend == "acme"


@pytest.mark.parametrize(
    ("workspace", "said"), [("raises", "ZeroDivisionError: in the workspace"), ("text", "it returned 'much'")]
)
def test_a_workspace_that_cannot_be_told_is_refused(workspace, said) -> None:
    assert refused(LOGITS, manifest=backend(workspace=workspace), max_workspace_bytes=1 << 30) == (
        f"memory/workspace-failed: tests.limited:{workspace}: {said}"
    )


def test_an_argument_that_the_workspace_refuses_is_left_to_the_call() -> None:
    assert refused(LOGITS, manifest=backend(workspace="refuses_an_argument"), max_workspace_bytes=0) is None


def test_an_explanation_prints_limits_and_the_memory_of_this_call() -> None:
    with rlk.registered(backend(SMALL, "four_bytes_a_logit")), rlk.use("acme"):
        said = rlk.explain("logprob", LOGITS, IDS)
        without = rlk.explain("logprob")
    assert "limits: at most 4 rows, at most 7 ids, contiguous_last_dim, workspace 0.0001068 MiB" in said
    assert (said.decision.room.workspace, without.decision.room.workspace) == (112, None)
    assert said.decision.as_dict()["room"]["max_vocab"] == 7


def test_sizes_may_be_explained_without_a_call() -> None:
    with rlk.registered(backend(SMALL)), rlk.use("acme"):
        assert rlk.explain("logprob", rows=4, vocab=7).decision.backend == "acme"
        found = rlk.explain("logprob", rows=4, vocab=8).decision
    assert [r.reason.slug for r in found.rejected if r.backend == "acme"] == ["shape/too-large"]


def test_an_implementation_without_limits_prints_none() -> None:
    said = rlk.explain("logprob", LOGITS, IDS)
    assert "limits" not in said
    assert said.decision.room is None


PLUGIN = """
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Limits, Requires

backend = Backend(
    name="acme", api=API_VERSION,
    impls=(Impl(op="logprob@1", target="tests.limited:logprob", requires=Requires(device="*"),
                limits=Limits(max_vocab=1000)),),
)
"""


def test_the_command_line_explains_sizes(cli, plug) -> None:
    plug("acme", PLUGIN)
    done = cli("explain", "logprob", "--order", "acme", "--rows", "8", "--vocab", "1000")
    assert "limits: at most 1000 ids" in done.stdout
    found = answer(cli("explain", "logprob", "--order", "acme", "--vocab", "1000", "--json"))
    assert found["room"] == {"max_rows": None, "max_vocab": 1000, "layouts": [], "workspace": None}
    done = cli("explain", "logprob", "--order", "acme", "--vocab", "1001")
    assert (done.exit_code, "shape/too-large" in done.stdout) == (1, True)


@pytest.mark.parametrize("changes", [{"max_rows": 0}, {"max_vocab": -1}, {"layouts": ("tiled",)}, {"max_row": 3}])
def test_limits_that_mean_nothing_are_refused_in_the_manifest(changes) -> None:
    with pytest.raises(ValidationError):
        Limits(**changes)


def test_a_budget_that_is_no_size_is_an_error() -> None:
    with pytest.raises(ConfigError, match="max_workspace_bytes"):
        rlk.use(max_workspace_bytes="4 GiB")


N, D, V = 6, 8, 11
HIDDEN, WEIGHT, ROW_IDS = torch.zeros(2, 3, D), torch.zeros(V, D), torch.zeros(2, 3, dtype=torch.long)
CALLS = {
    "logprob": ((torch.zeros(2, 3, V), ROW_IDS), {}, {"rows": N, "vocab": V}),
    "sample": ((torch.zeros(N, V),), {"seed": 0, "step": 0, "vocab_size": 9}, {"rows": N, "vocab": 9}),
    "linear_logprob": ((HIDDEN, WEIGHT, ROW_IDS), {}, {"rows": N, "vocab": V}),
    "lm_head_sample": ((torch.zeros(N, D), WEIGHT), {"seed": 0, "step": 0}, {"rows": N, "vocab": V}),
    "qmatmul": ((torch.zeros(2, 3, D), None), {}, {"rows": N}),
    "whiten": ((torch.zeros(N),), {}, {}),
}


@pytest.mark.parametrize("op", CALLS)
def test_the_sizes_of_a_call_are_rows_and_vocabulary(op) -> None:
    args, kwargs, expected = CALLS[op]
    assert OPERATORS[op].sizes(OPERATORS[op].call(*args, **kwargs)) == expected
    assert all(math.isfinite(n) for n in expected.values())
