"""Pairs of forward and backward in Triton: each runs once a step, eager and compiled, and saves what it says."""

from collections import Counter
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import rlkernel as rlk
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.logprob import Support
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_triton.claims import CLAIMS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch 2.11 warns of itself

N, D, V = 6, 64, 128
LENGTHS = torch.tensor([40, 7, 0])
PAIRED = sorted(op for op, claim in CLAIMS.items() if claim.gradient)
LANES = {"eager": lambda run: run, "compiled": lambda run: torch.compile(run, backend="aot_eager", fullgraph=True)}


@pytest.fixture(autouse=True)
def traced_anew():
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def draw(device, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def head(device):
    ids = torch.arange(N, device=device) * 7
    return {"hidden": draw(device, N, D), "weight": draw(device, V, D, seed=1) / 8, "ids": ids}


def tokens(device):
    mask = torch.tensor([True, True, False, True, True, True], device=device)
    return {"old_logprob": -draw(device, N, seed=2).abs(), "advantages": draw(device, N, seed=3), "mask": mask}


def support(device):
    return Support(torch.arange(2 * N, device=device), torch.arange(0, 2 * N + 1, 2, device=device))


def scan(device, **options):
    return {"b": draw(device, 3, 40), **options}


def product(device, **options):
    w = rlk.quantize(draw(device, V, D, seed=1), "int4_g32")
    return {"x": draw(device, N, D), "w": rlk.prepack(w) if options.pop("packed", False) else w, **options}


# Operator -> calls; tensors of `differentiable` arguments become leaves, those of a LoRA too.
CALLS = {
    "logprob": {"entropy": lambda d: {"logits": draw(d, N, V), "ids": head(d)["ids"], "entropy": True}},
    "linear_logprob": {
        "entropy": lambda d: {**head(d), "entropy": True},
        "biased, cut": lambda d: {**head(d), "bias": draw(d, V, seed=4), "max_workspace_bytes": 1 << 18},
        "masked, saved": lambda d: {**head(d), "mask": tokens(d)["mask"], "backward": "save", "softcap": 20.0},
        "support": lambda d: {**head(d), "support": support(d), "temperature": draw(d, N, seed=5).exp()},
        "lora": lambda d: {**head(d), "lora": LoRA(draw(d, 3, D, seed=6), draw(d, V, 3, seed=7), 0.5)},
        "lora, masked, cut": lambda d: {
            **CALLS["linear_logprob"]["lora"](d), "mask": tokens(d)["mask"], "max_workspace_bytes": 1 << 18,
        },
    },
    "divergence": {
        "logits": lambda d: {"logits": draw(d, N, V), "teacher": draw(d, N, V, seed=1), "kind": "jsd"},
        "everything": lambda d: {
            **CALLS["divergence"]["logits"](d), "temperature": draw(d, N, seed=5).exp(), "beta": 0.3,
            "teacher_temperature": draw(d, N, seed=6).exp(), "mask": tokens(d)["mask"],
        },
        "a number beside a tensor": lambda d: {
            **CALLS["divergence"]["logits"](d), "temperature": draw(d, N, seed=5).exp(), "teacher_temperature": 1.7,
        },
        "list": lambda d: {
            "logits": draw(d, N, V), "teacher": draw(d, N, 5, seed=1).log_softmax(-1), "kind": "reverse_kl",
            "teacher_ids": torch.arange(5 * N, device=d).view(N, 5),
        },
    },
    "linear_divergence": {
        "head": lambda d: {
            "hidden": draw(d, N, D), "weight": draw(d, V, D, seed=1) / 8, "teacher": draw(d, N, 7, seed=2),
            "teacher_weight": draw(d, V, 7, seed=3), "mask": tokens(d)["mask"], "temperature": draw(d, N, seed=5).exp(),
        },
        "list": lambda d: {
            **{n: x for n, x in head(d).items() if n != "ids"}, "teacher": draw(d, N, 5, seed=1).log_softmax(-1),
            "teacher_ids": torch.arange(5 * N, device=d).view(N, 5), "kind": "jsd",
        },
        "saved": lambda d: {**CALLS["linear_divergence"]["head"](d), "backward": "save"},
    },
    "policy_loss": {"grpo": lambda d: {"logprob": -draw(d, N).abs(), **tokens(d), "aggregate": "token_mean"}},
    "linear_policy_loss": {
        "token": lambda d: {**head(d), **tokens(d), "aggregate": "token_mean", "entropy": True, "entropy_coef": 0.1},
        "lora": lambda d: {
            **CALLS["linear_policy_loss"]["token"](d), "lora": LoRA(draw(d, 3, D, seed=6), draw(d, V, 3, seed=7), 0.5),
        },
    },
    "qmatmul": {
        "bytes": lambda d: product(d, residual=draw(d, N, V, seed=5), bias=draw(d, V, seed=6)),
        "words": lambda d: product(d, packed=True),
        "swiglu": lambda d: product(d, activation="swiglu"),
        "lora": lambda d: product(d, lora=LoRA(draw(d, 2, D, seed=7), draw(d, V, 2, seed=8), 0.5), activation="gelu"),
    },
    "affine_suffix_scan": {
        "tensors": lambda d: scan(d, a=draw(d, 3, 40, seed=1).sigmoid(), init=draw(d, 3, seed=2)),
        "exclusive": lambda d: scan(d, a=0.5, exclusive=True, masked_out="carry", lengths=LENGTHS.to(d)),
    },
    "linear": {
        "plain": lambda d: {"x": draw(d, N, D), "weight": draw(d, V, D, seed=1)},
        "everything": lambda d: {
            **CALLS["linear"]["plain"](d), "bias": draw(d, V, seed=4), "residual": draw(d, N, V, seed=5),
        },
    },
    "grouped_linear": {
        "plain": lambda d: {
            "x": draw(d, N, D), "weight": draw(d, 3, V, D, seed=1),
            "ends": torch.tensor([2, 2, N - 1], device=d, dtype=torch.int32),
        },
        "bias": lambda d: {**CALLS["grouped_linear"]["plain"](d), "bias": draw(d, 3, V, seed=4)},
    },
    "attention": {
        "plain": lambda d: {
            "q": draw(d, N, 4, 16), "k": draw(d, N, 2, 16, seed=1), "v": draw(d, N, 2, 16, seed=2),
            "cu_q": torch.tensor([0, 4, N], device=d),
        },
        "everything": lambda d: {
            **CALLS["attention"]["plain"](d), "sinks": draw(d, 4, seed=3), "window": 2, "softcap": 5.0,
            "cu_k": torch.tensor([0, 4, N], device=d),
        },
    },
    "fake_quantize": {
        "straight": lambda d: {"weight": draw(d, N, D), "format": "int4_g32"},
        "clipped": lambda d: {"weight": draw(d, N, D), "format": "nvfp4", "dtype": torch.bfloat16, "clipped": True},
    },
    "glu": {"silu": lambda d: {"x": draw(d, N, 2 * D), "activation": "silu"}},
    "rms_norm": {
        "plain": lambda d: {"x": draw(d, N, D), "weight": draw(d, D, seed=1), "eps": 1e-6},
        "residual": lambda d: {**CALLS["rms_norm"]["plain"](d), "residual": draw(d, N, D, seed=2), "offset": 1.0},
    },
    "rope": {
        "plain": lambda d: {
            "q": draw(d, N, 2, D), "k": draw(d, N, 1, D, seed=1), "table": draw(d, 9, D, seed=2),
            "positions": torch.arange(N, device=d),
        },
        "norm": lambda d: {
            **CALLS["rope"]["plain"](d), "q_weight": draw(d, D, seed=3), "k_weight": draw(d, D, seed=4), "eps": 1e-6,
        },
    },
}  # fmt: skip
EVERY = [(op, name) for op, calls in CALLS.items() for name in calls]


def call_of(op, name, device):
    """The arguments of a call, and its leaves."""
    given, leaves = CALLS[op][name](device), []

    def leaf(x):
        leaves.append(x.detach().clone().requires_grad_())
        return leaves[-1]

    for name in OPERATORS[op].differentiable:
        x = given.get(name)
        if isinstance(x, Tensor):
            given[name] = leaf(x)
        elif isinstance(x, LoRA):
            given[name] = LoRA(leaf(x.A), leaf(x.B), x.scale)
    return given, leaves


def carrying(op, result):
    fields = [result if not name else getattr(result, name) for name in OPERATORS[op].carrying]
    return [x for x in fields if x is not None]


def gradients(op, name, device, lane):
    given, leaves = call_of(op, name, device)
    result = LANES[lane](lambda given: getattr(rlk, op)(**given))(given)
    total = sum((x * (i + 1)).sum() for i, x in enumerate(carrying(op, result)))
    return torch.autograd.grad(total, leaves)


def pair_of(op):
    module, _, name = CLAIMS[op].gradient.partition(":")
    return getattr(import_module(module), name)


def test_every_operator_with_gradients_has_a_pair():
    assert sorted(op for op in CLAIMS if OPERATORS[op].carrying) == PAIRED == sorted(CALLS)


@pytest.mark.parametrize(("op", "name"), EVERY)
def test_a_compiled_step_has_the_bits_of_an_eager_one_and_runs_each_way_once(op, name, device, monkeypatch):
    counted: Counter[str] = Counter()
    for way in ("forward", "backward"):
        before = getattr(pair_of(op), way)

        def counting(self, *given, _before=before, _way=way):
            counted[_way] += 1
            return _before(self, *given)

        monkeypatch.setattr(pair_of(op), way, counting)
    expected = gradients(op, name, device, "eager")
    assert counted == {"forward": 1, "backward": 1}
    actual = gradients(op, name, device, "compiled")
    assert counted == {"forward": 2, "backward": 2}
    assert [True] * len(expected) == [torch.equal(e, a) for e, a in zip(expected, actual, strict=True)]


def described(x, known):
    """Where a saved tensor is found: among the call's and the result's, or a new one of this size and dtype."""
    at = next((at for at, t in enumerate(known) if t is x), None)
    return at if x is None or at is not None else (tuple(x.shape), x.dtype, x.device)


def tensors(value):
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict | list | tuple):
        return [t for x in (value.values() if isinstance(value, dict) else value) for t in tensors(x)]
    names = getattr(value, "__dataclass_fields__", ())
    return [t for name in names for t in tensors(getattr(value, name))]


def held(op, given):
    call, kind = OPERATORS[op].call(**given), pair_of(op)
    pair = kind(call)
    with torch.no_grad():
        result, saved = pair.forward(call)
    known = [*tensors(call), *tensors(result)]
    said = kind.saved_like(call, result, pair.wanted)
    return [described(x, known) for x in said], [described(x, known) for x in saved]


@pytest.mark.parametrize(("op", "name"), EVERY)
def test_a_pair_saves_what_it_says(op, name, device):
    expected, actual = held(op, call_of(op, name, device)[0])
    assert expected == actual


@pytest.mark.parametrize("op", ["linear_logprob", "linear_policy_loss"])
def test_a_pair_of_a_split_vocabulary_saves_what_it_says(op, device, group):
    given, _ = call_of(op, next(iter(CALLS[op])), device)
    expected, actual = held(op, {**given, "group": group})
    assert expected == actual


@pytest.mark.parametrize(("op", "name"), EVERY)
def test_two_pairs_of_one_shape_may_serve_one_call(op, name, device):
    given, leaves = call_of(op, name, device)
    call = OPERATORS[op].call(**given)
    first, second = pair_of(op)(call), pair_of(op)(call)
    with torch.no_grad():
        result, saved = first.forward(call)
        fields = [result if not n else getattr(result, n) for n in OPERATORS[op].carrying]
        up = tuple(None if x is None else torch.ones_like(x) for x in fields)
        expected, actual = first.backward(saved, up), second.backward(saved, up)
    assert len(leaves) == sum(x is not None for x in actual)
    assert [True] * len(leaves) == [
        torch.equal(e, a) for e, a in zip(expected, actual, strict=True) if e is not None and a is not None
    ]
