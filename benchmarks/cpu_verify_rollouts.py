"""How often the check of a rollout refuses an honest one, and how often it misses an attack, and what it costs.

    python benchmarks/cpu_verify_rollouts.py                                   # a few minutes on a CPU core
    python benchmarks/cpu_verify_rollouts.py --records 64 --output verify.json

A transformers model of random weights draws in bf16 with a KV cache, and is checked in fp32 over whole sequences: two
programs whose logits differ by what rounding to bf16 does. The tolerance is 5 standard deviations of that difference,
measured on sequences of their own. Log-probabilities are left out, since a worker that lies may leave them out too.

Printed per case: the share of records that are refused, whether all of them as one are, and per record the tokens that
are not explained, those that are (where scores decide, not the edge of a filter), and the number of the latter that
errors of typical size give. Then seconds and bytes a token. Needs transformers.
"""

from __future__ import annotations

import argparse
import copy
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

import rlkernel as rlk
from rlkernel import nn, rollouts
from rlkernel.integrations import transformers as host
from rlkernel.rollouts.verify import chernoff
from rlkernel_core.files import write_json

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}
ENDS = {"eos_token_id": None, "pad_token_id": 0, "bos_token_id": None}
PROMPT = 16


def made(args: argparse.Namespace) -> Any:
    """A decoder whose logits have a standard deviation of about 3, as a trained one's."""
    torch.manual_seed(0)
    sizes = {"vocab_size": args.vocab, "hidden_size": args.hidden, "intermediate_size": 3 * args.hidden}
    config = transformers.Qwen2Config(**sizes, num_hidden_layers=args.layers, initializer_range=0.06, **HEADS, **ENDS)
    model = transformers.Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(3 / (0.06 * args.hidden**0.5))
    return model


def drawn(model: Any, args: argparse.Namespace, count: int, **law: Any) -> list[rollouts.Record]:
    """Records of some sequences each, drawn by a model; their log-probabilities are left out."""
    g = torch.Generator().manual_seed(1)
    found = []
    for i in range(count):
        ids = torch.randint(1, args.vocab, (args.sequences, PROMPT), generator=g)
        drawing = host.drawing(seeds=[i * args.sequences + j for j in range(args.sequences)])
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": args.tokens, **law}
        model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=drawing, **options)
        record = rollouts.from_drawing(drawing, weights="w")
        found.append(replace(record, rollouts=tuple(replace(r, logprob=None) for r in record.rollouts)))
    return found


@torch.no_grad()
def spread(reference: Any, model: Any, args: argparse.Namespace) -> float:
    """Standard deviation of a logit's difference between two models, after a shift of each row."""
    ids = torch.randint(1, args.vocab, (4, 64), generator=torch.Generator().manual_seed(2))
    apart = model(ids).logits.float() - reference(ids).logits
    return float((apart - apart.mean(-1, keepdim=True)).std())


def replaced(record: rollouts.Record, vocab: int, i: int) -> rollouts.Record:
    """With the last token of a sequence replaced by another, behind which nothing tells of it."""
    first = record.rollouts[0]
    ids = (*first.ids[:-1], (first.ids[-1] + 1 + 17 * i) % vocab)
    return replace(record, rollouts=(replace(first, ids=ids), *record.rollouts[1:]))


def stated(params: rollouts.Params) -> Callable[[rollouts.Record, int], rollouts.Record]:
    """Says another law than was drawn from."""
    return lambda record, _: replace(record, rollouts=tuple(replace(r, params=params) for r in record.rollouts))


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 8), ("hidden", 256), ("vocab", 16384), ("sequences", 4), ("tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--records", type=int, default=32, help="of each case; twice as many honest ones")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    reference = made(args)
    bf16 = copy.deepcopy(reference).bfloat16()
    models = {"bf16": bf16}
    for kind in ("int8_channel", "fp8_channel", "int4_g128"):
        models[kind] = copy.deepcopy(bf16)
        nn.quantize_model(models[kind], kind)
    errors = {name: spread(reference, model, args) for name, model in models.items()}
    tolerance = 5 * errors["bf16"]
    print(f"logits differ by {', '.join(f'{name} {x:.3g}' for name, x in errors.items())}; tolerance {tolerance:.3g}")
    logits = rollouts.ModelLogits(reference)
    plain = stated(rollouts.Params(tie="keep_all", max_new_tokens=args.tokens))
    as_drawn: Callable[[rollouts.Record, int], rollouts.Record] = lambda record, _: record  # noqa: E731
    n = args.records
    cases: list[tuple[str, str, int, dict[str, Any], Callable[..., rollouts.Record]]] = [
        ("honest", "bf16", 2 * n, {}, as_drawn),
        ("honest, temperature 0.8, top-p 0.95", "bf16", 2 * n, {"temperature": 0.8, "top_p": 0.95}, as_drawn),
        ("one token replaced", "bf16", n, {}, lambda record, i: replaced(record, args.vocab, i)),
        ("greedy for temperature 1", "bf16", n, {"do_sample": False}, plain),
        ("temperature 0.95 for 1", "bf16", n, {"temperature": 0.95}, plain),
        ("top-p 0.95 for 1", "bf16", n, {"top_p": 0.95}, plain),
        *((f"weights in {kind}", kind, n, {}, as_drawn) for kind in models if kind != "bf16"),
    ]
    rows, took = [], 0.0
    for name, model, count, law, change in cases:
        found = []
        for i, record in enumerate(drawn(models[model], args, count, **law)):
            began = time.perf_counter()
            found.append(rollouts.verify(change(record, i), logits, tolerance=tolerance))
            took += time.perf_counter() - began
        tokens = sum(f.tokens for f in found)
        row = {
            "case": name, "records": count, "tokens": tokens, "refused": sum(not f.ok for f in found) / count,
            "not_explained": sum(sum(c.kind == "token" for c in f.wrong) for f in found) / count,
            "explained": sum(f.counted for f in found) / count,
            "expected": sum(f.expected for f in found) / count,
            "open": sum(f.open for f in found) / tokens,
        }  # fmt: skip
        counts = sum(f.counted for f in found), sum(f.expected for f in found)
        row["refused_as_one"] = row["not_explained"] > 0 or chernoff(*counts) < rollouts.ALPHA
        rows.append(row)
        print(
            f"{name:<38} {row['refused']:>7.1%} of {count} refused, as one {'yes' if row['refused_as_one'] else 'no'}; "
            f"a record: {row['not_explained']:.2f} not explained, {row['explained']:.2f} explained, "
            f"{row['expected']:.2f} expected; {row['open']:.1%} open",
            flush=True,
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record"
        rollouts.write(path, record)
        size = path.stat().st_size / record.tokens
    each = took / sum(row["tokens"] for row in rows)
    print(
        f"{each * 1e3:.2f} ms a token to check, forward and draws; {size:.1f} bytes a token without log-probabilities"
    )
    if args.output is not None:
        about = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        sizes = {name: getattr(args, name) for name in ("layers", "hidden", "vocab", "sequences", "tokens")}
        told = {"errors": errors, "tolerance": tolerance, "seconds_a_token": each, "bytes_a_token": size}
        write_json(args.output, {"rlkernel": rlk.__version__, **about, **sizes, **told, "cases": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
