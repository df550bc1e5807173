"""`rlkernel explain` and `rlkernel backends`: a golden text, broken plugins, third parties, hardware not at hand."""

from __future__ import annotations

import importlib.util
import sys

import pytest

import rlkernel as rlk
from rlkernel.cli import backends
from rlkernel.doctor.hardware import Gpu, Hardware
from rlkernel_core import __version__
from rlkernel_core.decision import Decision
from rlkernel_core.spec import OPERATORS
from tests.command_line import answer
from tests.plugins import good, module_of

CUDA = """
from rlkernel_core import Backend, Impl, Requires

requires = Requires(device="cuda", dtypes=("bfloat16",), packages=("no-such-vendor-library>=0.7",))
backend = Backend(
    name="cuda",
    api=(2, 0),
    impls=(Impl(op="logprob@1", target="rlkernel_cuda_plugin:logprob", requires=requires, supports={"grad"}),),
)
"""
GOLDEN = """\
logprob@1 device=cuda sm90 dtype=bfloat16 grad=True
policy   order=['auto'] fallback=warn  (from default)
  no   cuda    environment/missing-package: needs no-such-vendor-library>=0.7, which is not installed
               fix: pip install 'rlkernel[cuda]'
  no   triton  load/not-installed: no installed distribution provides 'triton'
               fix: pip install 'rlkernel[triton]'
  YES  torch   rlkernel_torch.logprob:logprob  [rlkernel {version}]
fallback plain torch runs on cuda sm90, for which cuda has kernels
decision {hash}
"""
ON_H100 = ("logprob", "--device", "cuda", "--arch", "sm90", "--dtype", "bfloat16", "--grad")
MANIFEST = "from rlkernel_core import Backend, Impl, Requires\n"
BROKEN = {
    "load/import-error": "raise RuntimeError('driver too old')",
    "load/not-a-manifest": "backend = {'name': 'acme'}",
    "load/invalid-manifest": MANIFEST + "backend = Backend(name='other', api=(2, 0), impls=())",
    "api/too-new": MANIFEST + "backend = Backend(name='acme', api=(9, 9), impls=(), future=True)",
    "api/too-old": MANIFEST + "backend = Backend(name='acme', api=(0, 3), impls=())",
}


def test_the_explanation_for_hardware_that_is_not_here(cli, plug) -> None:
    plug("cuda", CUDA, dist="rlkernel-cuda", version="0.1.0")
    result = cli("explain", *ON_H100)
    digest = answer(cli("explain", *ON_H100, "--json"))["hash"]
    assert (result.stdout, result.exit_code) == (GOLDEN.format(version=__version__, hash=digest), 0)


def test_the_text_is_that_of_the_library(cli) -> None:
    assert cli("explain", "logprob").stdout == rlk.explain("logprob") + "\n"


def test_a_forbidden_fallback_is_a_no(cli, plug, monkeypatch) -> None:
    plug("cuda", CUDA, dist="rlkernel-cuda", version="0.1.0")
    monkeypatch.setenv("RLKERNEL_FALLBACK", "error")
    result = cli("explain", *ON_H100)
    assert (result.exit_code, 'fallback = "error" forbids torch' in result.stdout) == (1, True)


def test_json_is_the_decision(cli) -> None:
    found = answer(cli("explain", *ON_H100, "--json"))
    assert set(found) == {*Decision.__dataclass_fields__, "hash"}
    assert found["call"]["features"] == []
    assert [(r["backend"], r["reason"]["stage"], r["reason"]["code"]) for r in found["rejected"]] == [
        ("triton", "load", "not-installed"),
    ]
    assert found["fell_back_from"] == "triton"


def test_without_an_operator_every_operator_has_a_line(cli) -> None:
    assert [d["call"]["op"] for d in answer(cli("explain", "--json"))] == [s.id for s in OPERATORS.values()]
    said = cli("explain", "--device", "cuda", "--arch", "sm90").stdout
    assert all(f" {spec.id} " in said for spec in OPERATORS.values())
    assert "not installed: cuda, triton" in said


def test_an_order_can_be_tried_without_configuring_it(cli) -> None:
    found = answer(cli("explain", "logprob", "--order", "jetson, reference", "--json"))
    assert (found["policy"]["order"], found["source"], found["fell_back_from"]) == (
        ["jetson", "torch"],
        "--order",
        "jetson",
    )


def test_where_nothing_may_run_the_answer_is_no(cli) -> None:
    result = cli("explain", "logprob", "--order", "jetson")
    assert (result.exit_code, "nothing in the order can take this call" in result.stdout) == (1, True)


def test_needed_features_are_features_of_the_operator(cli) -> None:
    assert answer(cli("explain", "logprob", "--need", "entropy", "--json"))["call"]["features"] == ["entropy"]
    assert cli("explain", "logprob", "--need", "kind:grpo").exit_code == 2
    needs = {d["call"]["op"]: d["call"]["features"] for d in answer(cli("explain", "--need", "entropy", "--json"))}
    assert (needs["logprob@1"], needs["quantize@1"]) == (["entropy"], [])


def test_all_judges_what_the_order_does_not_name(cli, plug) -> None:
    plug("acme", good("acme"))
    assert "policy/third-party" in cli("explain", "logprob", "--grad").stdout
    assert "acme" in cli("explain", "logprob", "--grad", "--all").stdout
    assert "grad/unsupported" in cli("explain", "logprob", "--grad", "--all", "--order", "acme").stdout


@pytest.mark.parametrize("slug", BROKEN)
def test_a_broken_plugin_is_a_line_with_its_reason(cli, plug, slug) -> None:
    plug("acme", BROKEN[slug])
    found = answer(cli("explain", "logprob", "--order", "acme,auto", "--json"))
    assert (found["backend"], found["rejected"][0]["backend"]) == ("torch", "acme")
    assert "{stage}/{code}".format(**found["rejected"][0]["reason"]) == slug


@pytest.mark.parametrize("slug", BROKEN)
def test_backends_lists_a_broken_plugin_with_its_reason(cli, plug, slug) -> None:
    plug("acme", BROKEN[slug])
    (row,) = [r for r in answer(cli("backends", "--load", "--json")) if r["name"] == "acme"]
    assert (row["state"], row["loaded"], row["installed"], bool(row["fix"])) == (slug, False, True, True)
    assert slug in cli("backends", "--load").stdout


def test_a_plugin_that_exits_is_listed(cli, plug) -> None:
    plug("acme", "raise SystemExit(3)")
    (row,) = [r for r in answer(cli("backends", "--load", "--json")) if r["name"] == "acme"]
    assert (row["state"], row["text"]) == ("load/import-error", "acme_plugin:backend raised SystemExit: 3")


def test_listing_imports_no_third_party_that_is_not_asked_for(cli, plug, monkeypatch) -> None:
    plug("acme", good("acme"))
    (row,) = [r for r in answer(cli("backends", "--json")) if r["name"] == "acme"]
    assert (row["state"], row["operators"], module_of("acme") in sys.modules) == ("not loaded", [], False)
    monkeypatch.setenv("RLKERNEL_ORDER", "acme,auto")
    (row,) = [r for r in answer(cli("backends", "--json")) if r["name"] == "acme"]
    assert (row["state"], row["operators"], row["devices"]) == ("ready", ["logprob@1"], ["*"])


def test_a_backend_of_ours_that_auto_leaves_out_is_listed_as_ours(cli, plug) -> None:
    plug("flashinfer", good("flashinfer", "rlkernel-cuda"), dist="rlkernel-cuda")
    (row,) = [r for r in answer(cli("backends", "--json")) if r["name"] == "flashinfer"]
    assert (row["kind"], row["state"]) == ("ours, if named", "ready")


def test_backends_shows_our_own_that_are_not_installed_with_their_line(cli) -> None:
    rows = {r["name"]: r for r in answer(cli("backends", "--json"))}
    assert (rows["torch"]["state"], rows["torch"]["kind"]) == ("ready", "plain torch")
    assert (rows["triton"]["state"], rows["triton"]["fix"]) == ("not installed", "pip install 'rlkernel[triton]'")
    assert "pip install 'rlkernel[cuda]'" in cli("backends").stdout


@pytest.mark.parametrize(
    ("gpus", "arch", "state", "text"),
    [
        ((), ("sm90",), "no device", "no GPU is in this machine"),
        (("sm75",), ("sm90", "sm80+"), "no device", "it claims sm90, sm80+; here is sm75"),
        (("sm75", "sm90"), ("sm90",), "ready", ""),
        ((None,), ("sm90",), "ready", ""),
        (("gfx942",), (), "ready", ""),
    ],
)
def test_a_backend_is_ready_only_where_its_hardware_is(cli, plug, monkeypatch, gpus, arch, state, text) -> None:
    plug("cuda", CUDA.replace(', packages=("no-such-vendor-library>=0.7",)', f", arch={arch}"), dist="rlkernel-cuda")
    monkeypatch.setattr(backends, "machine", lambda: Hardware(nvidia=tuple(Gpu("a card", a) for a in gpus)))
    rows = answer(cli("backends", "--json"))
    assert [(r["state"], r["text"]) for r in rows if r["name"] == "cuda"] == [(state, text)]
    assert len({r["name"] for r in rows}) == len(rows)


def test_a_backend_that_lacks_a_package_is_not_ready(cli, plug) -> None:
    plug("cuda", CUDA, dist="rlkernel-cuda")
    (row,) = [r for r in answer(cli("backends", "--json")) if r["name"] == "cuda"]
    assert (row["state"], row["fix"]) == ("environment/missing-package", "pip install 'rlkernel[cuda]'")


def test_without_torch_no_backend_is_ready(cli, plug, monkeypatch) -> None:
    plug("acme", good("acme"))
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else there(name))
    found = {r["name"]: r for r in answer(cli("backends", "--load", "--json"))}
    assert {found[n]["state"] for n in ("torch", "acme")} == {"environment/missing-package"}
    assert "pip install torch" in found["torch"]["fix"]


def test_whether_a_device_of_another_kind_is_here_is_left_to_status(cli, plug) -> None:
    plug("acme", good("acme").replace('"*"', '"acme"'))
    (row,) = [r for r in answer(cli("backends", "--load", "--json")) if r["name"] == "acme"]
    assert (row["state"], row["fix"]) == ("loaded", "rlkernel status --device acme")
