"""What pictures call things: names that a reader knows, instead of the short ones of result files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

# candidate before its colon -> its name
_CANDIDATES: Final = {
    "torch": "plain torch",
    "reference": "rlkernel-torch",
    "triton": "rlkernel-triton",
    "cuda": "rlkernel-cuda",
    "triton,cuda": "rlkernel-triton and -cuda",
    "stub": "rlkernel without a kernel",
    "direct": "calling the function itself",
    "cublas": "cuBLAS (the logits alone)",
    "cublas fp32": "cuBLAS (logits in fp32)",
    "liger": "Liger",
    "trl": "TRL",
    "flashinfer": "FlashInfer",
    "flashinfer's draw": "FlashInfer draws in a CUDA graph",
    "reduce-overhead in place": "torch.compile (reduce-overhead)",
    "reduce-overhead": "torch.compile (reduce-overhead)",
    "liger sm90": "Liger (kernels for Hopper)",
    "flashinfer fp8": "FlashInfer (fp8)",
    "grouped_mm": "torch's grouped product",
    "int4pack": "torch's int4 product",
    "scaled_mm": "torch's fp8 product",
    "launches": "launching as many kernels",
    "cce": "Cut Cross-Entropy",
    "quack": "QuACK",
    "humming": "Humming",
    "marlin": "Marlin",
    "tritonllm": "TritonLLM",
    "rl-kernel": "RL-Kernel",
}
_CANDIDATES_OF: Final[Mapping[str, Mapping[str, str]]] = {"qmatmul": {"cublas": "cuBLAS on a bf16 weight"}}
# our variant behind the colon -> what it does
_VARIANTS: Final = {
    "save": "keeping the logits",
    "recompute": "recomputing the logits",
    "graph": "in a CUDA graph",
    "graph, cuda's draw": "in a CUDA graph, rlkernel-cuda draws",
    "eager": "through the public function",
    "bound": "bound once",
    "captured": "captured",
    "looped": "one adapter after the other",
}
_VARIANTS_OF: Final[Mapping[str, Mapping[str, str]]] = {"rollout": {"eager": "launched one by one"}}
# size -> how it is said; a suite may say it otherwise
_SIZES: Final = {
    "B": "{} sequences", "T": "{} tokens", "N": "{} tokens", "D": "hidden size {}", "V": "vocabulary {}",
    "G": "{} answers per prompt", "M": "{} tokens", "K": "{} inputs", "Nout": "{} outputs", "E": "{} experts",
}  # fmt: skip
_SIZES_OF: Final[Mapping[str, Mapping[str, str]]] = {
    "sample": {"B": "{} rows"},
    "rollout": {"B": "{} rows", "T": "{} tokens each"},
    "attention": {"S": "{} keys", "Hq": "{} query heads", "Hk": "{} key heads", "D": "heads of {}"},
}
# sizes of a decode step -> the model that has them; they are said by its name
_MODELS: Final = {
    (28, 1024, 2048, 1024, 3072, 151936): "Qwen3-0.6B",
    (36, 4096, 4096, 1024, 12288, 151936): "Qwen3-8B",
}
_MODEL_SIZES: Final = "LDQKFV"
_OPTIONS: Final = {"top_k": "top-k", "top_p": "top-p", "kl_coef": "KL coefficient", "lam": "lambda"}
_UNSAID: Final = ("batch", "chain", "of", "processes")
_DTYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def candidate(name: str, suite: str = "") -> str:
    """The name of a candidate with its variant: `triton:save` is `rlkernel-triton, keeping the logits`."""
    base, _, variant = name.partition(":")
    known = _CANDIDATES_OF.get(suite, {}).get(base) or _CANDIDATES.get(base, base)
    said = _VARIANTS_OF.get(suite, {}).get(variant) or _VARIANTS.get(variant, variant)
    return f"{known}, {said}" if variant else known


def size(suite: str, letter: str, number: int | None = None) -> str:
    """A size of a suite: `8 192 tokens`; without a number what it counts, `tokens`."""
    said = _SIZES_OF.get(suite, {}).get(letter) or _SIZES.get(letter, letter + " {}")
    told = said.format("" if number is None else f"{number:,}".replace(",", " ")).strip()
    return told.removesuffix("s") if number == 1 else told


def dtype(name: str) -> str:
    """`bf16` for bfloat16."""
    return _DTYPES.get(name, name)


def parts(result: Mapping[str, Any]) -> dict[str, str]:
    """What tells a workload from others, each as text: sizes or model, dtype, task, options."""
    sizes = dict(result["sizes"])
    model = _MODELS.get(tuple(sizes.get(k) for k in _MODEL_SIZES))
    if model is not None:
        sizes = {k: n for k, n in sizes.items() if k not in _MODEL_SIZES}
    op = result["op"] if result["op"] != result["suite"] and model is None else ""
    found = {"op": op} if op else {}
    found |= {k: size(result["suite"], k, n) for k, n in sizes.items()}
    found |= {"model": model} if model is not None else {}
    found["dtype"] = dtype(result["dtype"])
    found["task"] = result["task"].replace("+", " and ")
    for option, value in result["options"].items():
        if option not in _UNSAID and value not in {False, "False"}:
            known = _OPTIONS.get(option, option.replace("_", " "))
            found[option] = known if value in {True, "True"} else f"{known} {dtype(str(value))}"
    return found


def shared(results: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The parts that are the same for all workloads."""
    every = [parts(r) for r in results]
    return {k: text for k, text in every[0].items() if all(p.get(k) == text for p in every)} if every else {}


def workload(result: Mapping[str, Any], unsaid: Mapping[str, str]) -> str:
    """A workload by what the others of its picture do not share with it."""
    told = [text for k, text in parts(result).items() if k not in unsaid]
    return ", ".join(told) or ", ".join(unsaid.values())


def duration(us: float) -> str:
    """Microseconds with three digits, in the unit that suits: `8.63 us`, `1.42 ms`."""
    number, unit = (us / 1e6, "s") if us >= 1e6 else (us / 1e3, "ms") if us >= 1e3 else (us, "\u00b5s")
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
