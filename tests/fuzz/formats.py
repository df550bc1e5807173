"""Every format that rlkernel reads from outside: a valid document in parts, how files are made of them, and its reader.

A hash or a length that the format has is made anew of the changed parts, so that what stands behind it is read.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import struct
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.damage import Parts

ROOT = Path(__file__).parents[2]
BACKENDS = ("torch", "acme", "triton")


def as_they_are(parts: Parts) -> Parts:
    return parts


@dataclass(frozen=True)
class Format:
    """One kind of file."""

    name: str
    parts: Callable[[], Parts]
    read: Callable[[Path], object]  # the folder that holds the files
    join: Callable[[Parts], Parts] = as_they_are


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


# Configuration, locks, records


def config() -> Parts:
    text = """
[rlkernel]
order = ["acme", "auto"]
fallback = "warn"
need = ["entropy"]
profile = true
audit = 100
max_workspace_bytes = 1000000
probe = "subprocess"
lock = "rlkernel.lock"
reports = "conformance/reports"

[rlkernel.ops.logprob]
order = "torch"
need = ["conformant"]
"""
    return {"rlkernel.toml": text.encode()}


def read_config(folder: Path) -> object:
    from rlkernel.config import merge, read_file

    return merge([("file", read_file(folder / "rlkernel.toml", BACKENDS))]).of("logprob")


def environment() -> Parts:
    said = {
        "RLKERNEL_ORDER": "acme,auto", "RLKERNEL_FALLBACK": "error", "RLKERNEL_CONFIG": "rlkernel.toml",
        "RLKERNEL_ACME_LIMIT": "3", "XDG_CACHE_HOME": "/tmp/x", "AOT_MISSING": "missing.jsonl",
        "AOT_RECORDING": "launches.jsonl:sm_87",
    }  # fmt: skip
    return {"environment": _json(said), **config()}


def read_environment(folder: Path) -> object:
    from rlkernel.config import ambient
    from rlkernel_core.environment import path_in, variable

    data = (folder / "environment").read_bytes()
    try:
        found = json.loads(data)
        environ = {str(k): str(v) for k, v in found.items()}
    except (ValueError, AttributeError, RecursionError):  # what a shell could not set either: one variable of it all
        environ = {"RLKERNEL_ORDER": data.decode("utf-8", "surrogateescape")}
    if environ.get("RLKERNEL_CONFIG") == "rlkernel.toml":
        environ["RLKERNEL_CONFIG"] = str(folder / "rlkernel.toml")
    for name in ("XDG_CACHE_HOME", "AOT_MISSING"):
        path_in(name, environ)
    variable("AOT_RECORDING", environ)
    return ambient(BACKENDS, environ)


def lock() -> Parts:
    pins = [{"backend": "torch", "target": "rlkernel_torch.logprob:logprob", "provider": "rlkernel 0.1.0"}]
    return {"rlkernel.lock": _json({"version": 1, "operators": {"logprob@1": pins, "sample@1": pins * 2}})}


def read_lock(folder: Path) -> object:
    from rlkernel import lock as locks

    path = str(folder / "rlkernel.lock")
    return locks.differences(locks.read(path), ()), locks.is_of(path, ())


def decisions() -> Parts:
    call = {"op": "logprob@1", "device": "cpu", "dtype": "float32", "grad": True, "features": ["entropy"], "arch": None}
    policy = {"order": ["auto"], "fallback": "warn", "need": [], "profile": False, "audit": 2, "max_workspace_bytes": 9}
    rejected = {
        "backend": "acme",
        "target": None,
        "reason": {"stage": "shape", "code": "unsupported", "text": "no", "fix": ""},
    }
    decision = {
        "calls": 3, "audit": {"calls": 1, "differing": 0, "failed": 0, "worst": None}, "call": call, "policy": policy,
        "backend": "torch", "target": "a:b", "version": "rlkernel 0.1.0", "rejected": [rejected, rejected],
        "fell_back_from": None, "ambiguous": ["x"], "source": "default",
    }  # fmt: skip
    content = {
        "version": 1, "rlkernel": "0.1.0", "hash": "ab", "decisions": [decision, decision],
        "hosts": [{"host": "trl", "version": "1", "symbols": ["a"], "calls": {"logprob": 2}}],
        "plans": [{"op": "logprob", "plans": 1, "made": 1, "evicted": 0}],
    }  # fmt: skip
    return {"decisions.json": _json(content)}


def read_decisions(folder: Path) -> object:
    from rlkernel import record

    _, found = record.read(folder)
    return (
        [(str(r.decision.call), r.as_dict(), str(r.audit)) for r in found],
        record.through(folder),
        record.planned(folder),
    )


# Conformance


def report() -> Parts:
    from rlkernel_conformance.documents import read

    content = read(ROOT / "conformance" / "reports" / "cuda")
    ops = dict(list(content["operators"].items())[:2])
    for found in ops.values():
        found["clauses"] = found["clauses"][:3]
        found["orders"] = found.get("orders", [])[:2]
    clause = {**next(iter(ops.values()))["clauses"][0], "status": "waived", "fault": "wrong_result"}
    clause |= {"waiver": {"issue": "#7", "expires": "2027-01-01", "reason": "slow"}}
    next(iter(ops.values()))["clauses"].append(clause)
    return {"report.json": _json({**content, "operators": ops})}


def sealed(name: str, content_hash: Callable[[Any], str], parts: Parts) -> Parts:
    """With the hash of what it says."""
    try:
        content = json.loads(parts[name])
        content["hash"] = content_hash(content)
        return {**parts, name: _json(content)}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return parts


def seal_report(parts: Parts) -> Parts:
    from rlkernel_conformance.report import content_hash

    return sealed("report.json", content_hash, parts)


def read_report(folder: Path) -> object:
    from rlkernel_conformance import documents
    from rlkernel_conformance.evidence import architectures
    from rlkernel_conformance.hardware import _known
    from rlkernel_conformance.report import compare, merged, standing

    content = documents.read(folder)
    documents.markdown(content), documents.junit(content), documents.badge(content)
    clauses = [c for found in content["operators"].values() for c in found["clauses"]]
    known = {op: found for op, found in content["operators"].items() if op in {"linear_logprob@1", "sample@1"}}
    merged({**content, "operators": known}, {**content, "operators": known})
    return compare(content, content), standing(content["verdict"], clauses), architectures(content), _known(content)


def waivers() -> Parts:
    table = '[[waiver]]\nclause = "LP-13"\nbackend = "acme"\nissue = "#7"\nexpires = 2027-01-31\nreason = "NaN"\n'
    return {"waivers.toml": (table + table.replace("LP-13", "LP-08")).encode()}


def read_waivers(folder: Path) -> object:
    from rlkernel_conformance.waivers import read

    return read(folder / "waivers.toml", "acme", {"acme", "torch"}, date(2026, 1, 1))


def certificates() -> Parts:
    content = json.loads((ROOT / "backends/triton/rlkernel_triton/orders/certificates.json").read_bytes())
    return {"certificates.json": _json({**content, "certificates": content["certificates"][:3]})}


def read_certificates(folder: Path) -> object:
    from rlkernel_conformance.orders.shipped import read

    return read(folder / "certificates.json")


def pyproject() -> Parts:
    return {
        "pyproject.toml": b'[project]\nname = "x"\n[project.entry-points."rlkernel.backends"]\nacme = "acme:backend"\n'
    }


def read_pyproject(folder: Path) -> object:
    from rlkernel_conformance.manifests import entry_points

    return entry_points(folder / "pyproject.toml")


def page() -> Parts:
    from rlkernel_conformance.table import TABLES, markers

    return {"page.md": "\n\n".join("\n\nold\n\n".join(markers(name)) for name in TABLES).encode()}


def read_page(folder: Path) -> object:
    from rlkernel_conformance.table import placed

    return placed(folder / "page.md", lambda name: name)


# Benchmarks


def results() -> Parts:
    spread = {"median": 100.0, "low": 99.0, "high": 101.0, "n": 9, "best": 98.0}
    goal = {"number": 1.5, "unit": "x", "device": "H200", "variant": "", "have": 1.7, "met": True}
    candidate = {
        "name": "triton", "kind": "backend", "version": "1", "status": "measured", "message": "", "eager": spread,
        "graph": {"message": "not capturable"}, "times_ruler": spread, "speedup_over_torch": 2.0, "tokens_s": 9.0,
        "percent_of_floor": 50.0, "gb_s": 100.0, "tflop_s": 2.0, "memory": {"extra_bytes": 3},
        "errors": {"y": {"error": 0.1, "over": 0.2}}, "goals": [goal], "sources": {"logprob": "abc"},
    }  # fmt: skip
    other = {**candidate, "name": "torch", "kind": "peer", "eager": {**spread, "median": 200.0}}
    result = {
        "suite": "logprob", "op": "logprob", "work": "w", "sizes": {"N": 8}, "dtype": "bfloat16", "task": "forward",
        "options": {}, "why": "a test", "clock": "device", "ruler": "cublas",
        "floor": {"bytes": "N", "flops": "0", "us": 50.0}, "goals": [], "input_sets": 2,
        "gpu": {"sm_mhz": "1", "watts": "2", "throttled_by": []}, "candidates": [candidate, other],
    }  # fmt: skip
    env = {"device_name": "H200", "device_arch": "sm90", "torch": "2", "triton": "3", "python": "3", "rlkernel": "0"}
    limits = {"copy": 4e12, "read": 4e12, "cached": 4e12, "flops": {"bfloat16": 8e14, "float32": 1e14}}
    content = {
        "schema": 2, "created": "2026-01-01", "size": "full", "device": "cuda", "suites": ["logprob"],
        "environment": env, "ceilings": limits, "gpu": None, "results": [result, {**result, "work": "v"}], "hash": "",
        "devices": [{"device": "cuda", "environment": env, "ceilings": limits, "gpu": None}],
    }  # fmt: skip
    return {"results.json": _json(content)}


def seal_results(parts: Parts) -> Parts:
    from rlkernel_bench.results import content_hash

    return sealed("results.json", content_hash, parts)


def read_results(folder: Path) -> object:
    from rlkernel_bench import plots
    from rlkernel_bench.compare import compare
    from rlkernel_bench.evidence import renewal
    from rlkernel_bench.report import as_csv, markdown, summary
    from rlkernel_bench.results import read

    content = read(folder)
    drawn = [r for r in content["results"] if any(t.whole for t in plots.timed(r))]
    said = [plots.left_out(content["results"]), plots.finding("x", drawn) if drawn else ""]
    plots._points([content]), plots._nearest([content]), plots._roofs(content["ceilings"]["flops"])
    return (
        markdown([content]),
        as_csv([content]),
        summary([content]),
        compare(content, content, 0.05),
        renewal(content, folder),
        said,
    )


def bits() -> Parts:
    entry = {"bits": {"logprob": "ab", "lse": "cd"}, "unstable": ["lse"]}
    failed = {"error": "ArgumentError", "error says": "no"}
    content = {
        "about": {"device_name": "cpu", "torch": "2"},
        "workloads": {"logprob: w": {"torch": entry, "acme": failed}},
    }
    return {"old.json": _json(content), "new.json": _json(content)}


def read_bits(folder: Path) -> object:
    from rlkernel_bench.bits import compare

    return compare(folder / "old.json", folder / "new.json")


def demo() -> Parts:
    step = {"step": 0, "reward": 0.5, "drift_mean": 1e-3, "drift_kl": 1e-4, "drift_max": 0.1}
    served = [{"side": side, "op": "logprob@1", "backend": "torch", "target": "a:b"} for side in ("rollout", "trainer")]
    summary = {
        "reward_first": 0.1, "reward_last": 0.9, "reward_rise": 0.8, "drift_mean": 1e-3, "steps": 2, "device": "cpu",
        "served": served,
    }  # fmt: skip
    return {"summary.json": _json(summary), "metrics.jsonl": _json(step) + b"\n" + _json({**step, "step": 1}) + b"\n"}


def read_demo(folder: Path) -> object:
    from rlkernel.demo.picture import read, title

    summary, steps = read(folder)
    return title(summary), max(s["drift_max"] for s in steps)


# Bundles of kernels


def bundle() -> Parts:
    from rlkernel_triton.aot.bundle import write_bundle
    from rlkernel_triton.aot.configurations import Code, Configuration

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.zip"
        made = []
        for kernel in ("m:first", "m:second"):
            build = Configuration(kernel, (("x", "*bf16"), ("n", "i32")), (("BLOCK", 128), ("mask", None)), ("x",))
            code = Code(build, "sm_87", "k", 0, 2, 32, 0, "abc", ("n",), {"cubin": "", "ptx": ""})
            made.append((code, {"cubin": kernel.encode() * 50, "ptx": b"// ptx"}))
        write_bundle(path, made, {"triton": "3.6", "torch": "2.9"})
        with zipfile.ZipFile(path) as file:
            return {name: file.read(name) for name in file.namelist()} | {
                "sm_87/bomb.xz": lzma.compress(bytes(1 << 20))
            }


def zipped(parts: Parts) -> Parts:
    """A zip, whose description has the hashes of what is in it."""
    try:
        description = json.loads(parts["bundle.json"])
        sums = {name: hashlib.sha256(data).hexdigest() for name, data in parts.items() if name != "bundle.json"}
        description["entries"] = {name: sums.get(name, x) for name, x in description["entries"].items()}
        parts = {**parts, "bundle.json": _json(description)}
    except (ValueError, TypeError, AttributeError, RecursionError, KeyError):
        pass
    out = BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in parts.items():
            file.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)
    return {"x.zip": out.getvalue()}


def read_bundle(folder: Path) -> object:
    from rlkernel_triton.aot.bundle import Bundle

    found = Bundle(folder / "x.zip")
    for code in found.codes[:20]:
        code.serves({})
        for place in list(code.files.values())[:20]:
            found.read(place)
    return found.compiler, found.version


def recordings() -> Parts:
    from rlkernel_triton.aot.configurations import Configuration
    from rlkernel_triton.aot.recordings import append

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        for kernel in ("m:first", "m:second"):
            append(path, "logprob", Configuration(kernel, (("x", "*bf16"),), (("BLOCK", 128),), ("x",)), "sm_87")
        return {"run.jsonl": path.read_bytes()}


def read_recordings(folder: Path) -> object:
    from rlkernel_triton.aot.recordings import chosen, read

    return chosen(read(folder / "run.jsonl"), "sm_87")


# Checkpoints

SCHEMES = {
    "gptq": "int4_g64", "awq": "int4_g64_asym", "compressed-tensors": "int4_g64", "bitsandbytes": "nf4",
    "hqq": "hqq4_g128", "modelopt": "nvfp4", "scaled": "fp8_channel", "deepseek": "fp8_block128",
    "compressed-mx": "mxfp4", "rlkernel": "gguf_q4_k",
}  # fmt: skip


def _converted(target: str, scheme: str, form: str, **more: Any) -> Parts:
    """A small checkpoint of a scheme, by file."""
    from safetensors.torch import save_file

    from rlkernel import checkpoints

    g = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        weights = {"a.weight": torch.randn(16, 256, generator=g), "norm.weight": torch.ones(16)}
        save_file({name: x.bfloat16() for name, x in weights.items()}, folder / "dense.safetensors")
        checkpoints.convert(folder / "dense.safetensors", folder / target, scheme=scheme, format=form, **more)
        made = folder / target
        files = sorted(made.iterdir()) if made.is_dir() else [made]
        return {file.name: file.read_bytes() for file in files}


def split_header(data: bytes) -> tuple[bytes, bytes]:
    """A safetensors file as its header and its bytes."""
    length = struct.unpack_from("<Q", data)[0]
    return data[8 : 8 + length].rstrip(), data[8 + length :]


def safetensors(scheme: str) -> Parts:
    header, data = split_header(_converted("x.safetensors", scheme, SCHEMES[scheme])["x.safetensors"])
    return {"header": header, "data": data}


def joined(parts: Parts) -> Parts:
    length = struct.pack("<Q", len(parts["header"]))
    return {"x.safetensors": length + parts["header"] + parts["data"]}


def read_checkpoint(name: str, folder: Path) -> object:
    from rlkernel import checkpoints
    from rlkernel_core.quant import QuantTensor, dequantize

    with checkpoints.opened(folder / name if name else folder) as source:
        for item in checkpoints.items(source):
            found = item.read(source)
            for weight in found if isinstance(found, list) else ():
                if isinstance(weight, QuantTensor):
                    dequantize(weight, dtype=torch.float32)
    return None


def index() -> Parts:
    return _converted("folder", "gptq", "int4_g64", shard_bytes=2000)


def gguf() -> Parts:
    return _converted("x.gguf", "gguf", "gguf_q4_k")


def gguf_fields() -> Parts:
    """The numbers of a GGUF header, as JSON, from which the file is made again."""
    fields = {
        "magic": "GGUF", "version": 3,
        "pairs": [["general.architecture", 8, "llama"], ["general.alignment", 4, 32], ["tokens", 9, [8, ["a", "bc"]]],
                  ["scores", 9, [6, [0.5, 1.5]]], ["flag", 7, 1], ["nested", 9, [9, [[4, [1, 2]], [4, [3]]]]]],
        "tensors": [["a.weight", [256, 4], 12, 0], ["b", [8, 4], 0, 576], ["c", [32, 2], 8, 704]],
        "counts": [3, 6], "bytes": 1024,
    }  # fmt: skip
    return {"fields": _json(fields)}


_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}


def _packed(form: str, value: Any) -> bytes:
    """A number in so many bytes, whatever it is."""
    size = struct.calcsize(form)
    try:
        return struct.pack(form, value)
    except (struct.error, OverflowError, TypeError):
        number = int(value) if isinstance(value, int) else len(str(value))
        return (number % 256**size).to_bytes(size, "little")


def _text(value: Any) -> bytes:
    data = str(value).encode("utf-8", "replace")
    return struct.pack("<Q", len(data)) + data


def _value(kind: Any, value: Any) -> bytes:
    if kind == 8:
        return _text(value)
    if kind == 9 and isinstance(value, list) and len(value) == 2 and isinstance(value[1], list):
        inner, items = value
        return _packed("<I", inner) + struct.pack("<Q", len(items)) + b"".join(_value(inner, x) for x in items)
    return _packed(_SCALARS.get(kind, "<I") if isinstance(kind, int) else "<I", value)


def gguf_made(parts: Parts) -> Parts:
    try:
        f = json.loads(parts["fields"])
        out = str(f["magic"]).encode()[:4] + _packed("<I", f["version"])
        out += b"".join(_packed("<Q", n) for n in f["counts"])
        out += b"".join(_text(key) + _packed("<I", kind) + _value(kind, value) for key, kind, value in f["pairs"])
        for name, dims, kind, offset in f["tensors"]:
            out += _text(name) + struct.pack("<I", len(dims)) + b"".join(_packed("<Q", n) for n in dims)
            out += _packed("<I", kind) + _packed("<Q", offset)
        size = f["bytes"] if isinstance(f["bytes"], int) and 0 <= f["bytes"] < 1 << 20 else 0
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return {"x.gguf": b"GGUF" + parts["fields"]}
    return {"x.gguf": out + bytes(-len(out) % 32) + bytes(size)}


# Rollout buffers


def _buffer() -> Any:
    from rlkernel_torch.direct import rollout_buffer

    return rollout_buffer(max_tokens=64, max_seqs=8, max_seq_tokens=8, page_tokens=4, device="cpu")


def rollouts() -> Parts:
    buffer = _buffer()
    made = buffer.reserve(4, [1, 1, 2], version=3)
    values = {"token": torch.arange(3, dtype=torch.int32), "logprob": torch.zeros(3)}
    buffer.append(made, values)
    buffer.finish(type(made)(made.ids[:1], made.stamps[:1]), reward=[1.0])
    with tempfile.TemporaryDirectory() as folder:
        buffer.save(f"{folder}/rollouts")
        header, data = split_header((Path(folder) / "rollouts").read_bytes())
    said = json.loads(header)
    inner = said["__metadata__"].pop("rollout_buffer")
    return {"header": _json(said), "inner": inner.encode(), "data": data}


def rollouts_joined(parts: Parts) -> Parts:
    try:
        said = json.loads(parts["header"])
        said["__metadata__"]["rollout_buffer"] = parts["inner"].decode("utf-8", "replace")
        header = _json(said)
    except (ValueError, TypeError, KeyError, RecursionError):
        header = parts["header"]
    return joined({"header": header, "data": parts["data"]})


def read_rollouts(folder: Path) -> object:
    from rlkernel_core.spec.rollouts import GroupRules, Slots

    buffer = _buffer()
    buffer.load(str(folder / "x.safetensors"))
    ids = torch.arange(8)
    held = buffer.stats, buffer.groups()
    buffer.append(Slots(ids, buffer.tensors()["stamp"].clone()), {"token": ids.int(), "logprob": ids.float()})
    rules = GroupRules(complete=False, min_valid=0)
    while (batch := buffer.pop(groups=1, rules=rules)) is not None:
        batch["token"].sum().item()
        batch.release()
    buffer.discard([g.id for g in buffer.groups()])
    buffer.reserve(4, [1])
    return held


# Records of rollouts


def rollout_record() -> Parts:
    from rlkernel.rollouts import Params, Record, Rollout, write

    law = Params(0.7, 20, 0.9, 0.1, vocab_size=100, stop_ids=(3,), max_new_tokens=4)
    runs = (("step 1", 1), ("step 2", 2))
    one = Rollout((1, 2), 2**64 - 1, 2, law, (4, 5, 3), (-1.0, -2.0, -0.5), (0.0, -0.1, 0.0), runs)
    with tempfile.TemporaryDirectory() as folder:
        write(f"{folder}/r", Record((one, Rollout((1, 2), 3, 2), one), "raw", "0123456789ab"))
        header, data = split_header((Path(folder) / "r").read_bytes())
    said = json.loads(header)
    inner = said["__metadata__"].pop("rollouts")
    return {"header": _json(said), "inner": inner.encode(), "data": data}


def rollout_record_joined(parts: Parts) -> Parts:
    """With the digest of what it says."""
    from rlkernel.rollouts.record_file import _digest

    try:
        said = json.loads(parts["header"])
        text = parts["inner"].decode("utf-8", "replace")
        ends = {name: said[name]["data_offsets"] for name in said if name != "__metadata__"}
        tensors = {name: parts["data"][a:b] for name, (a, b) in ends.items()}
        said["__metadata__"] = {"rollouts": text, "sha256": _digest(text, tensors)}
        header = _json(said)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        header = parts["header"]
    return joined({"header": header, "data": parts["data"]})


def read_rollout_record(folder: Path) -> object:
    from rlkernel.rollouts import read, verify

    record = read(folder / "x.safetensors")
    few = sum(len(r.prompt) + len(r.ids) for r in record.rollouts) < 1000
    if few and len(record.versions) == 1:
        verify(record, lambda ids, first: [torch.zeros(len(ids) - first, 8)], asked=record.asked())
    return record.tokens, record.versions


# Caches, tokens, requests


def probe_cache() -> Parts:
    return {"probe.json": _json({"ok": False, "code": "failed", "error": "no", "device": "cuda", "arch": "sm90"})}


def read_probe_cache(folder: Path) -> object:
    from rlkernel.probe import _recall

    return _recall(folder / "probe.json")


def trial_cache() -> Parts:
    verdicts = {"": None, "acme:logprob": ["load", "target-missing", "no", "pip install acme"]}
    return {"plugin.json": _json({"plugin": ["acme", "1"], "verdicts": verdicts})}


def read_trial_cache(folder: Path) -> object:
    from rlkernel.trial import _recall

    return _recall(folder / "plugin.json")


def token() -> Parts:
    return {"token": b"0123456789abcdef0123\nnote\n"}


def read_token(folder: Path) -> object:
    from rlkernel_judge.serve import token_of

    return token_of("0.0.0.0", folder / "token")


def request() -> Parts:
    asked = {
        "op": "logprob", "source": "def logprob(call): ...", "file": "x.py", "wait": True, "device": "cpu",
        "baseline": "torch", "profile": "quick", "timing": False, "strict": True, "limit_s": 30.0,
    }  # fmt: skip
    return {"request.json": _json(asked)}


def read_request(folder: Path) -> object:
    """As the server takes a body: what it does not take is answered with 422."""
    from pydantic import ValidationError

    from rlkernel_core.errors import ConfigError
    from rlkernel_judge.server import Asked
    from rlkernel_judge.verdict import complaints

    try:
        return Asked.model_validate_json((folder / "request.json").read_bytes())
    except ValidationError as error:
        raise ConfigError(complaints(error)[:2000]) from error


FORMATS: tuple[Format, ...] = (
    Format("config", config, read_config),
    Format("environment", environment, read_environment),
    Format("lock", lock, read_lock),
    Format("decisions", decisions, read_decisions),
    Format("report", report, read_report, seal_report),
    Format("waivers", waivers, read_waivers),
    Format("certificates", certificates, read_certificates),
    Format("pyproject", pyproject, read_pyproject),
    Format("page", page, read_page),
    Format("bench results", results, read_results, seal_results),
    Format("bench bits", bits, read_bits),
    Format("demo run", demo, read_demo),
    Format("bundle", bundle, read_bundle, zipped),
    Format("recordings", recordings, read_recordings),
    *(
        Format(f"safetensors {name}", partial(safetensors, name), partial(read_checkpoint, "x.safetensors"), joined)
        for name in SCHEMES
    ),
    Format("checkpoint folder", index, partial(read_checkpoint, "")),
    Format("gguf", gguf, partial(read_checkpoint, "x.gguf")),
    Format("gguf header", gguf_fields, partial(read_checkpoint, "x.gguf"), gguf_made),
    Format("rollout buffer", rollouts, read_rollouts, rollouts_joined),
    Format("rollout record", rollout_record, read_rollout_record, rollout_record_joined),
    Format("probe cache", probe_cache, read_probe_cache),
    Format("trial cache", trial_cache, read_trial_cache),
    Format("token file", token, read_token),
    Format("judge request", request, read_request),
)
