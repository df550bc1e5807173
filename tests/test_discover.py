"""Installed plugins: broken, lying, too new and too old ones become reasons, and disturb nobody."""

from __future__ import annotations

import sys

import pytest
import torch

import rlkernel as rlk
from rlkernel import discover, policy
from rlkernel_core.errors import ConfigError, FallbackWarning, PluginWarning, UnknownNameError
from tests.plugins import good, module_of

pytestmark = pytest.mark.usefixtures("untried")  # about what manifests say
LOGITS, IDS = torch.zeros(2, 3), torch.tensor([0, 1])

MANIFEST = "from rlkernel_core import Backend, Impl, Requires\n"
BROKEN = {
    "load/import-error": "raise RuntimeError('driver too old')",
    "load/not-a-manifest": "backend = {'name': 'acme'}",
    "load/invalid-manifest": MANIFEST + "backend = Backend(name='other', api=(2, 0), impls=())",
    "api/too-new": MANIFEST + "backend = Backend(name='acme', api=(9, 9), impls=(), future=True)",
    "api/too-old": MANIFEST + "backend = Backend(name='acme', api=(0, 3), impls=())",
}


def test_the_reference_is_installed_like_any_other() -> None:
    found = policy.installed()["torch"]
    assert (found.provider, found.tier, found.reason) == ("rlkernel 0.1.0", 2, None)


@pytest.mark.parametrize("slug", BROKEN)
def test_a_broken_plugin_is_a_reason(plug, slug) -> None:
    plug("acme", BROKEN[slug])
    found = policy.installed()["acme"]
    assert (found.manifest, found.reason.slug) == (None, slug)


@pytest.mark.parametrize("slug", BROKEN)
def test_a_broken_plugin_that_is_not_named_is_not_even_imported(plug, slug) -> None:
    plug("acme", BROKEN[slug])
    rlk.logprob(LOGITS, IDS)
    assert module_of("acme") not in sys.modules
    assert rlk.last_decision("logprob").rejected[-1].reason.slug == "policy/third-party"


@pytest.mark.parametrize("slug", BROKEN)
def test_a_broken_plugin_that_is_named_warns_and_the_next_one_answers(plug, slug) -> None:
    plug("acme", BROKEN[slug])
    with rlk.use("acme", "auto"), pytest.warns(PluginWarning, match=slug), pytest.warns(FallbackWarning, match="acme"):
        out = rlk.logprob(LOGITS, IDS)
    assert out.logprob.tolist() == pytest.approx([-1.0986123] * 2)


def test_a_plugin_that_exits_is_a_reason(plug) -> None:
    plug("acme", "raise SystemExit(3)")
    assert policy.installed()["acme"].reason.text == "acme_plugin:backend raised SystemExit: 3"


def test_the_version_message_names_both_numbers_and_the_pip_line(plug) -> None:
    plug("acme", BROKEN["api/too-new"], dist="rlkernel-acme")
    reason = policy.installed()["acme"].reason
    assert "9.9" in reason.text
    assert "2.0" in reason.text
    assert reason.fix == "pip install -U rlkernel"
    plug("older", BROKEN["api/too-old"].replace("acme", "older"), dist="rlkernel-older")
    assert policy.installed()["older"].reason.fix == "pip install -U rlkernel-older"


@pytest.mark.parametrize(
    "impl, said",
    [
        ("Impl(op='logprb@1', target='a:b', requires=Requires(device='cpu'))", "did you mean 'logprob'"),
        ("Impl(op='logprob', target='a:b', requires=Requires(device='cpu'))", "logprob@1"),
        ("Impl(op='logprob@1', target='a.b', requires=Requires(device='cpu'))", "package.module:function"),
        (
            "Impl(op='logprob@1', target='a:b', requires=Requires(device='cpu'), supports={'entropi'})",
            "did you mean 'entropy'",
        ),
        ("Impl(op='logprob@1', target='a:b', requires=Requires(device='cpu'), fast=True)", "fast"),
    ],
)
def test_a_manifest_that_claims_what_does_not_exist_says_what(plug, impl, said) -> None:
    plug("acme", f"{MANIFEST}backend = Backend(name='acme', api=(2, 0), impls=({impl},))")
    reason = policy.installed()["acme"].reason
    assert reason.slug == "load/invalid-manifest"
    assert said in reason.text


def test_two_distributions_with_one_backend_name_are_both_refused(plug) -> None:
    plug("acme", good("acme", "acme-one"), dist="acme-one")
    plug("acme", good("acme", "acme-two"), dist="acme-two")
    reason = policy.installed()["acme"].reason
    assert reason.slug == "load/duplicate-name"
    assert "acme-one and acme-two" in reason.text


def test_a_rival_for_a_first_party_name_does_not_replace_it(plug) -> None:
    plug("torch", good("torch", "fake-reference"), dist="fake-reference")
    assert policy.installed()["torch"].dist == "rlkernel"


def test_listing_names_imports_nothing(plug) -> None:
    plug("acme", "raise RuntimeError")
    found = policy.installed()
    assert "acme" in list(found)
    assert found.listed("acme").provider == "acme 1.0"
    assert module_of("acme") not in sys.modules


def test_an_unknown_backend_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'torch'"):
        policy.installed()["toch"]


def test_one_of_our_own_that_is_not_installed_is_told_apart_from_a_misspelt_one(monkeypatch) -> None:
    monkeypatch.setattr(discover, "entries", lambda _: ((), ()))
    with pytest.raises(UnknownNameError) as caught:
        discover.Installed()["cuda"]
    assert str(caught.value) == "backend 'cuda' is not installed: pip install 'rlkernel[cuda]'"


def test_a_name_that_is_taken_cannot_be_registered() -> None:
    from tests.implementations import acme

    with pytest.raises(ConfigError, match="'torch' is installed"), rlk.registered(acme(name="torch")):
        pass
