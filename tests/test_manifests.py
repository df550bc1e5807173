"""Manifests that cannot be meant, and installations that are broken around them: reasons, never crashes."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch

import rlkernel as rlk
from rlkernel import policy
from rlkernel.discover import Installed
from rlkernel_core.errors import ConfigError, PluginWarning
from tests.plugins import good, module_of

pytestmark = pytest.mark.usefixtures("untried")  # about what manifests say
LOGITS, IDS = torch.zeros(2, 3), torch.tensor([0, 1])
MANIFEST = "from rlkernel_core import Backend, Impl, Requires\n"
CLAIM = "backend = Backend(name='acme', api=(2, 0), impls=(Impl(op='logprob@1', target='a:b', requires=Requires({})),))"


@pytest.mark.parametrize(
    ("requires", "said"),
    [
        ("device='cpu', packages=('torch >> 2',)", "'torch >> 2'"),
        ("device='cpu', packages=('',)", "packages"),
        ("device='cpu', packages=('torch>=2; sys_platform == \"win32\"',)", "marker"),
        ("device='cpu', packages=('torch @ https://example.org/t.whl',)", "URL"),
        ("device='cuda:0'", "'cuda:0' should look like 'cuda'"),
        ("device=('cpu', 'CUDA')", "'CUDA' should look like 'cuda'"),
        ("device=()", "at least 1 item"),
        ("device='cpu', dtypes=('torch.bfloat16',)", "'torch.bfloat16' should look like 'bfloat16'"),
        ("device='cuda', arch=('sm_90', '90')", "'90' should look like"),
        ("device='cuda', arch=('gfx90a+',)", "'gfx90a+' should look like"),
        ("device='cuda', arch_excluded=('sm80-sm90+',)", "'sm80-sm90+' should look like"),
    ],
)
def test_a_requirement_that_nothing_can_meet_is_an_invalid_manifest(plug, requires, said) -> None:
    plug("acme", MANIFEST + CLAIM.format(requires))
    reason = policy.installed()["acme"].reason
    assert (reason.slug, said in reason.text) == ("load/invalid-manifest", True), reason.text
    with rlk.use("acme", "auto"), pytest.warns(match="load/invalid-manifest"):
        rlk.logprob(LOGITS, IDS)


@pytest.mark.parametrize(
    "requires",
    [
        "device=('cuda', 'xpu'), dtypes=('float8_e4m3fn',), arch=('sm80+', 'sm90a', 'gfx9*', 'x86_64', '*')",
        "device='*', packages=('torch[extra]>=2', 'packaging>=23,!=24.0', 'a.b-c')",
        "device='privateuseone'",
    ],
)
def test_requirements_of_every_form_are_taken(plug, requires) -> None:
    plug("acme", MANIFEST + CLAIM.format(requires))
    assert policy.installed()["acme"].reason is None


def test_auto_is_no_name_for_a_backend(plug) -> None:
    plug("auto", MANIFEST + "backend = Backend(name='auto', api=(2, 0), impls=())")
    reason = policy.installed()["auto"].reason
    assert (reason.slug, "'auto'" in reason.text) == ("load/malformed-entry-point", True)


@pytest.mark.parametrize(
    ("source", "slug"),
    [
        (
            MANIFEST + "class Mine(Backend):\n    def of(self, op): raise RuntimeError(op)\n"
            "backend = Mine(name='acme', api=(2, 0), impls=())",
            "load/not-a-manifest",
        ),
        (MANIFEST + "backend = Backend.model_construct(name='acme', api=(2, 0), impls=None)", "load/invalid-manifest"),
        (MANIFEST + "backend = Backend", "load/not-a-manifest"),
        ("class ValidationError(Exception): pass\nraise ValidationError('of another library')", "load/import-error"),
        ("class Mute(Exception):\n    def __str__(self): raise RuntimeError\nraise Mute", "load/import-error"),
        ("raise Exception('')", "load/import-error"),
        ("backend = property(lambda self: 1 / 0)", "load/not-a-manifest"),
        ("def __getattr__(name): raise AttributeError(name)", "load/import-error"),
    ],
)
def test_a_lying_plugin_is_a_reason(plug, source, slug) -> None:
    plug("acme", source)
    found = policy.installed()["acme"]
    assert (found.manifest, found.reason.slug) == (None, slug)
    rlk.explain("logprob", LOGITS, IDS)
    rlk.logprob(LOGITS, IDS)


def test_an_interrupt_goes_through_and_is_not_remembered(plug, monkeypatch) -> None:
    source = "import builtins\nif getattr(builtins, 'STOP', True): raise KeyboardInterrupt\n"
    plug("flashinfer", source + good("flashinfer", "rlkernel-cuda"), dist="rlkernel-cuda")  # ours: no process tries it
    with rlk.use("flashinfer", "auto"), pytest.raises(KeyboardInterrupt):
        rlk.logprob(LOGITS, IDS)
    monkeypatch.setattr("builtins.STOP", False, raising=False)
    assert policy.installed()["flashinfer"].reason is None


def test_a_plugin_that_calls_an_operator_while_it_is_imported_works(plug) -> None:
    call = "import torch, rlkernel\nrlkernel.logprob(torch.zeros(1, 2), torch.tensor([0]))\n"
    plug("acme", call + good("acme"))
    with rlk.use("acme", "auto"), pytest.warns(match="acme"):
        rlk.logprob(LOGITS, IDS)
    assert policy.installed()["acme"].reason is None


def entry_points(site: Path, dist: str, text: str, metadata: str | None = "") -> None:
    info = site / f"{dist}-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "entry_points.txt").write_text(text)
    if metadata is not None:
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n{metadata}")


@pytest.mark.parametrize(
    ("value", "slug"),
    [
        ("acme_plugin:backend [fast,other]", None),
        ("acme_plugin", "load/malformed-entry-point"),
        ("acme_plugin:", "load/malformed-entry-point"),
        ("acme plugin:backend", "load/malformed-entry-point"),
        ("acme_plugin:backend:backend", "load/malformed-entry-point"),
        ("../acme_plugin:backend", "load/malformed-entry-point"),
        ("", "load/malformed-entry-point"),
        ("no_such_plugin:backend", "load/import-error"),
        ("acme_plugin:no_such", "load/import-error"),
        ("acme_plugin:backend.name", "load/not-a-manifest"),
        (":", "load/malformed-entry-point"),
    ],
)
def test_an_entry_point_that_leads_nowhere_is_a_reason(plug, value, slug) -> None:
    site = plug("acme", good("acme"))
    entry_points(site, "acme", f"[rlkernel.backends]\nacme = {value}\n")
    policy.refresh()
    reason = policy.installed()["acme"].reason
    assert (reason and reason.slug) == slug


def test_metadata_that_cannot_be_read_hides_its_own_distribution_only(plug) -> None:
    site = plug("acme", good("acme"))
    entry_points(site, "broken", "[rlkernel.backends]\nthis line has no equals sign\n")
    entry_points(site, "nameless", "[rlkernel.backends]\nnameless = acme_plugin:backend\n", metadata=None)
    policy.refresh()
    with pytest.warns(PluginWarning, match="the entry points of broken cannot be read"):
        found = policy.installed()
    assert {"acme", "torch"} <= set(found)
    assert found["acme"].reason is None
    assert "nameless" not in found or found["nameless"].reason is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error", PluginWarning)  # looking for observers does not tell it a second time
        rlk.logprob(LOGITS, IDS)


@pytest.mark.parametrize("dist", ["rlkernel-triton", "rlkernel_triton", "RLKernel.Triton"])
def test_our_distributions_are_known_however_their_name_is_spelt(plug, dist) -> None:
    plug("triton", good("triton", dist), dist=dist)
    assert policy.installed()["triton"].tier == 1


def test_two_spellings_of_one_distribution_are_one(plug, tmp_path, monkeypatch) -> None:
    plug("acme", good("acme", "rlkernel-acme"), dist="rlkernel-acme")
    other = tmp_path / "other"
    other.mkdir()
    entry_points(other, "rlkernel_acme", "[rlkernel.backends]\nacme = rlkernel_acme_plugin:backend\n")
    monkeypatch.syspath_prepend(str(other))
    policy.refresh()
    assert policy.installed()["acme"].reason is None


def test_listing_is_quick_and_imports_nothing(plug) -> None:
    plug("acme", "raise RuntimeError")
    assert "acme" in Installed()
    assert module_of("acme") not in sys.modules


def test_a_manifest_that_cannot_be_meant_cannot_be_registered() -> None:
    from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires

    impl = Impl(op="logprob@1", target="a:b", requires=Requires(device="cpu"), supports={"entropi"})
    with pytest.raises(ConfigError, match="did you mean 'entropy'"):
        with rlk.registered(Backend(name="acme", api=API_VERSION, impls=(impl,))):
            pass
    assert "acme" not in policy.installed()


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ("op='logprob', target='a:b', requires=Requires(device='cpu')", "Impl.op: 'logprob' should look like"),
        (
            "op='logprob@1', target='a:b', requires=Requires(device='cpu'), suports=()",
            "Impl.suports: there is no such field; did you mean 'supports'?; the fields are check, gradient,",
        ),
        ("op='logprob@1', target='a:b'", "Impl.requires: is missing; write requires=..., devices, dtypes,"),
        (
            "op='logprob@1', target='a:b', requires=Requires(device='cuda:0')",
            "Requires.device: 'cuda:0' should look like 'cuda'",
        ),
        (
            "op='policy_loss@1', target='a:b', requires=Requires(device='cpu')",
            "policy_loss@1.supports: a:b claims no kind:..., and every call needs one; add one of kind:ppo, kind:grpo,",
        ),
    ],
)
def test_a_bad_manifest_says_which_field_breaks_which_rule_and_what_to_write(plug, claim, said) -> None:
    plug("acme", MANIFEST + f"backend = Backend(name='acme', api=(2, 0), impls=(Impl({claim}),))")
    text = policy.installed()["acme"].reason.text
    assert said in text, text
    assert "Input should be" not in text
    assert "function-after" not in text
