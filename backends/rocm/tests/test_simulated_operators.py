"""Every operator with Triton kernels as machine code of CDNA at toy sizes, against its definition.

All of them as gfx942 code, and as gfx90a and gfx950 code those that their matrix instructions and formats matter to:
compiling takes most of the time. `SIMULATE=all` in the environment runs everything on all three.
"""

import importlib
import os
from dataclasses import fields, is_dataclass

import pytest
import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel_core.quant import QuantSpec
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_torch import direct
from rlkernel_triton.claims import CLAIMS

ARCHS = ("gfx90a", "gfx942", "gfx950")
ELSEWHERE = {"gfx90a": {"linear_logprob"}, "gfx942": set(), "gfx950": {"linear_logprob", "quantize", "qmatmul"}}
BF16 = torch.bfloat16


def drawn(*shape, dtype=torch.float32, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=g)).to(dtype)


MASK = torch.arange(40) < torch.tensor([[40], [7], [1], [33]])
HIDDEN, HEAD = drawn(8, 64, dtype=BF16), drawn(300, 64, dtype=BF16, seed=1, scale=0.3)
IDS, OLD = torch.arange(8) * 37, -drawn(2, 4, seed=2).abs() - 5
DRAW = {"seed": torch.tensor([1, 2, 3]), "step": 5}
WEIGHT, INPUTS = drawn(64, 256, dtype=BF16), drawn(5, 256, dtype=BF16, seed=3)
DRAFTS = {"cu_draft": torch.tensor([0, 2, 2]), "seed": torch.tensor([7, 8]), "step": torch.tensor([0, 5])}


def weights(name, **options):
    return direct.quantize(WEIGHT, QuantSpec.named(name, **options))


# operator -> (name, arguments as a function, options, rtol, atol of the largest magnitude); bf16 results have 8 bits
CASES = {
    "logprob": [
        (
            "bf16",
            lambda: (drawn(3, 900, dtype=BF16, scale=3), torch.tensor([1, 500, 899])),
            {"entropy": True},
            1e-5,
            2e-5,
        ),
        # Of the second row 250 has the largest logit, which is no id of the first row's list.
        (
            "lists of unsigned ids",
            lambda: (drawn(2, 300) + 20 * (torch.arange(300) == 250), torch.tensor([[1, 7], [9, 250]]).to(torch.uint8)),
            {},
            1e-5,
            2e-5,
        ),
    ],
    "divergence": [
        ("jsd", lambda: (drawn(3, 900, dtype=BF16), drawn(3, 900, dtype=BF16)), {"kind": "jsd"}, 1e-5, 2e-5),
        (
            "list",
            lambda: (drawn(2, 300, dtype=BF16), drawn(2, 4).log_softmax(-1) - 1),
            {"teacher_ids": torch.tensor([[1, 7, 299, 0]] * 2)},
            1e-5,
            2e-5,
        ),
    ],
    "linear_divergence": [
        ("bf16", lambda: (HIDDEN, HEAD, drawn(8, HEAD.shape[0], dtype=BF16)), {"kind": "reverse_kl"}, 1e-3, 2e-3)
    ],
    "linear_logprob": [("bf16", lambda: (HIDDEN, HEAD, IDS), {"entropy": True}, 1e-4, 2e-3)],
    "linear_policy_loss": [
        ("grpo", lambda: (HIDDEN.view(2, 4, 64), HEAD, IDS.view(2, 4), OLD, drawn(2)), {"kind": "grpo"}, 1e-3, 2e-3)
    ],
    "policy_loss": [
        (
            kind,
            lambda: (-drawn(4, 40).abs(), -drawn(4, 40, seed=1).abs(), drawn(4)),
            {"kind": kind, "mask": MASK},
            1e-5,
            2e-5,
        )
        for kind in ("grpo", "gspo")
    ],
    "advantage": [
        (
            "gae",
            lambda: (drawn(4, 40),),
            {"kind": "gae", "values": drawn(4, 40, seed=1), "gamma": 0.99, "lam": 0.95, "mask": MASK},
            2e-5,
            2e-5,
        ),
    ],
    "affine_suffix_scan": [("fp32", lambda: (drawn(3, 90), drawn(3, 90, seed=1, scale=0.5)), {}, 1e-5, 2e-5)],
    "linear": [
        ("fp32", lambda: (drawn(3, 90), drawn(20, 90, seed=1)), {"bias": drawn(20, seed=2)}, 1e-5, 2e-5),
        ("bf16", lambda: (drawn(70, 300, dtype=BF16), drawn(20, 300, seed=1, dtype=BF16)), {}, 1e-2, 1e-2),
    ],
    "grouped_linear": [
        (
            "bf16",
            lambda: (
                drawn(40, 90, dtype=BF16),
                drawn(3, 20, 90, seed=1, dtype=BF16),
                torch.tensor([30, 30, 38], dtype=torch.int32),
            ),
            {"bias": drawn(3, 20, seed=2, dtype=BF16)},
            1e-2,
            1e-2,
        ),
    ],
    "rms_norm": [("fp32", lambda: (drawn(3, 90), drawn(90, seed=1)), {"eps": 1e-5}, 1e-5, 2e-5)],
    "rope": [
        (
            "norm",
            lambda: (drawn(3, 2, 40), drawn(3, 1, 40, seed=1), torch.tensor([0, 8, 3]), drawn(9, 32, seed=2)),
            {"q_weight": drawn(40, seed=3), "k_weight": drawn(40, seed=4), "eps": 1e-5, "interleaved": True},
            1e-5,
            2e-5,
        )
    ],
    "attention": [
        (
            "bf16",
            lambda: (drawn(35, 4, 20, dtype=BF16), *(drawn(75, 2, 20, dtype=BF16, seed=s) for s in (1, 2))),
            {"cu_q": torch.tensor([0, 30, 33]), "cu_k": torch.tensor([0, 70, 74]), "sinks": drawn(4, seed=3)},
            1e-2,
            1e-2,
        ),
        (
            "split, pages, window",
            lambda: (drawn(2, 2, 16, dtype=BF16), *(drawn(3, 400, 1, 16, dtype=BF16, seed=s) for s in (1, 2))),
            {
                "cu_q": torch.tensor([0, 2]),
                "page_table": torch.tensor([[2, 0, 1]]),
                "window": 150,
                "softcap": 3.0,
                "seqused_k": torch.tensor([1100]),
            },
            1e-2,
            1e-2,
        ),
    ],
    "glu": [("fp32", lambda: (drawn(3, 90, scale=3),), {"activation": "gelu"}, 1e-5, 2e-5)],
    "whiten": [("mask", lambda: (drawn(4, 40, scale=5) + 3,), {"mask": MASK}, 1e-5, 2e-5)],
    "sample": [
        ("filters", lambda: (drawn(3, 500, scale=2),), {"top_k": 20, "top_p": 0.9, **DRAW}, 1e-5, 2e-5),
        ("searched", lambda: (drawn(3, 3000, dtype=BF16),), {"top_p": 0.999, "entropy": True, **DRAW}, 1e-5, 2e-5),
    ],
    "lm_head_sample": [("plain", lambda: (HIDDEN[:3], HEAD), {"temperature": 0.7, **DRAW}, 1e-3, 2e-3)],
    "verify": [
        (
            "drafts",
            lambda: (drawn(4, 300, scale=2), torch.tensor([5, 250])),
            {"draft_logits": drawn(2, 300, seed=1, scale=2), **DRAFTS},
            1e-5,
            2e-5,
        ),
        (
            "no drafts, of unsigned ids",
            lambda: (drawn(1, 300, scale=2), torch.empty(0, dtype=torch.uint8)),
            {"draft_logits": torch.empty(0, 300), "cu_draft": torch.tensor([0, 0]), "seed": 7, "step": 0},
            1e-5,
            2e-5,
        ),
    ],
    "quantize": [
        (str(spec), lambda spec=spec: (WEIGHT, spec), {}, 0, 0)
        for spec in (
            QuantSpec.named("int4_g128_asym"),
            QuantSpec.named("nf4"),
            QuantSpec.named("int8_channel"),
            QuantSpec.named("fp8_block128"),
            QuantSpec.named("fp8_channel", element="e4m3fnuz"),
        )
    ],
    "fake_quantize": [
        (str(spec), lambda spec=spec: (WEIGHT, spec), {"clipped": True}, 0, 0)
        for spec in (
            QuantSpec.named("int4_g128"),
            QuantSpec.named("nf4"),
            QuantSpec.named("nvfp4"),
            QuantSpec.named("gguf_q4_k"),
            QuantSpec.named("fp8_channel", element="e4m3fnuz"),
        )
    ],
    "dequantize": [
        (name, lambda name=name, options=options: (weights(name, **options),), {"dtype": BF16}, 0, 0)
        for name, options in (
            ("int4_g128", {}),
            ("nf4", {"double_quant": True}),
            ("fp8_channel", {"element": "e4m3fnuz"}),
        )
    ],
    "prepack": [("tiles", lambda: (weights("int4_g128"),), {}, 0, 0)],
    "qmatmul": [
        (name, lambda name=name, options=options: (INPUTS, weights(name, **options)), {}, 2**-7, 2**-8)
        for name, options in (("int4_g128", {}), ("nf4", {}), ("int8_w8a8", {}), ("fp8_channel", {"act": "token_fp8"}))
    ]
    + [
        (
            "everything",
            lambda: (INPUTS, weights("int4_g128")),
            {
                "bias": drawn(64, dtype=BF16),
                "lora": LoRA(drawn(8, 256, dtype=BF16, seed=4, scale=0.1), drawn(64, 8, dtype=BF16, seed=5), 0.5),
                "activation": "swiglu",
                "residual": drawn(5, 32, dtype=BF16, seed=6),
            },
            2**-7,
            2**-8,
        ),
        (
            "fp32 inputs, LoRAs in bf16",
            lambda: (INPUTS.float(), weights("int4_g128")),
            {
                "lora": LoRA(drawn(2, 4, 256, dtype=BF16, seed=4, scale=0.1), drawn(2, 64, 4, dtype=BF16, seed=5), 0.5),
                "lora_ends": torch.tensor([2, 4], dtype=torch.int32),
            },
            1e-5,
            1e-5,
        ),
        (
            "LoRAs in fp64 at an odd address",
            lambda: (INPUTS, weights("int4_g128")),
            {
                "lora": LoRA(
                    drawn(2, 1, 256, dtype=torch.float64, seed=4, scale=0.1),
                    drawn(1 + 2 * 64, dtype=torch.float64, seed=5)[1:].view(2, 64, 1),
                    0.5,
                ),
                "lora_ends": torch.tensor([2, 4], dtype=torch.int32),
            },
            2**-7,
            2**-8,
        ),
    ],
}
ROWS = [(op, *case) for op, cases in CASES.items() for case in cases]
EVERYTHING = os.environ.get("SIMULATE") == "all"
RUNS = [(a, *row) for a in ARCHS for row in ROWS if EVERYTHING or a == "gfx942" or row[0] in ELSEWHERE[a]]


def tensors(result, name=""):
    """Name -> tensor, of all that a result holds."""
    if isinstance(result, Tensor):
        return {name: result}
    if isinstance(result, dict):
        return {k: v for n, x in result.items() for k, v in tensors(x, f"{name}.{n}").items()}
    if is_dataclass(result):
        named = {f.name: getattr(result, f.name) for f in fields(result)}
        return {k: v for n, x in named.items() for k, v in tensors(x, f"{name}.{n}").items()}
    return {}


def test_every_operator_with_kernels_has_a_case() -> None:
    assert set(CASES) == {op for op, claim in CLAIMS.items() if claim.kernels}


@pytest.mark.parametrize(
    ("arch", "op", "name", "arguments", "options", "rtol", "atol"), RUNS, ids=["-".join(run[:3]) for run in RUNS]
)
def test_machine_code_computes_the_definition(arch, op, name, arguments, options, rtol, atol) -> None:
    given = arguments()
    want = tensors(getattr(direct, op)(*given, **options))
    backend = importlib.import_module(f"rlkernel_rocm.simulated.{arch}").backend
    with rlk.registered(backend), rlk.use(backend.name, fallback="error"):
        found = tensors(getattr(rlk, op)(*given, **options))
    assert set(want) <= set(found)
    for part, x in want.items():
        if op == "prepack":  # its own layout, by design
            continue
        if not x.is_floating_point() and not part.endswith("status"):
            assert torch.equal(found[part], x), part
        elif x.dtype.itemsize == 1:
            assert torch.equal(found[part].view(torch.uint8), x.view(torch.uint8)), part
        elif not part.endswith("status"):
            largest = max(1.0, x.float().abs().nan_to_num(posinf=0.0).max().item())
            torch.testing.assert_close(found[part].float(), x.float(), rtol=rtol, atol=atol * largest, equal_nan=True)
