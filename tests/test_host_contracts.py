"""Every integration against what its host's source says, recorded by tests/host_contracts.py; and thin ones alone."""

from __future__ import annotations

import json
import re
import sys
from inspect import Parameter, Signature
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet

import rlkernel as rlk
from rlkernel.integrations import (
    Active,
    active,
    deepspeed_chat,
    nemo_rl,
    openrlhf,
    prime_rl,
    sglang,
    skyrl,
    slime,
    torchao,
    torchtitan,
    transformers,
    veomni,
    vime,
    vllm,
)
from rlkernel.integrations.host import KEPT
from rlkernel.integrations.transformers_pages import cache_argument
from tests.host_contracts import FILE, Wheel, absolute, known, parameters

RECORDED = json.loads(FILE.read_text())
HOSTS = known()


@pytest.mark.parametrize("host", HOSTS, ids=lambda h: f"{h.name}-{len(h.symbols)}")
def test_the_symbols_are_those_of_the_hosts_source(host) -> None:
    assert RECORDED[host.distribution]["version"] == host.tested
    sources = [
        found for name, found in RECORDED.items() if name.partition("==")[0] in {host.distribution, *host.builds}
    ]
    assert len(sources) > len(host.builds)
    for source in sources:
        assert source["version"] in SpecifierSet(host.versions)
        for symbol in host.symbols:
            said = source["symbols"][str(symbol)]
            assert said != "gone", symbol
            if symbol.takes is not None:
                assert said == ([*filter(None, symbol.takes.split(", "))]), symbol


@pytest.mark.parametrize("host", HOSTS, ids=lambda h: f"{h.name}-{len(h.symbols)}")
def test_the_symbols_are_those_of_the_installed_host(host) -> None:
    if host.installed is None or not host.ran:
        pytest.skip(f"{host.name} is not installed, or needs a GPU build")
    if not host.supported:
        pytest.skip(f"{host.name} {host.installed} is not one of {host.versions}")
    assert [symbol.problem() for symbol in host.symbols if symbol.problem()] == []


def test_a_moved_symbol_would_be_seen(tmp_path) -> None:
    import zipfile

    path = tmp_path / "acme-2.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("acme/__init__.py", "from .deep import score as points\n")
        archive.writestr("acme/deep.py", "class score:\n    def forward(self, x, *rest, y=1, **more): pass\n")
    wheel = Wheel(path)
    assert parameters(wheel.find("acme", "points.forward")) == ["self", "x", "rest", "y", "more"]
    assert wheel.find("acme", "score") is None
    assert wheel.find("acme.gone", "x") is None
    assert absolute("a.b.c", SimpleNamespace(level=2, module="d"), package=False) == "a.d"


def batch(**more):
    info = {"sampling_mask_batch_indices": None, "sampling_seed": torch.tensor([5, 6, 7]), **more}
    filters = {
        "top_ks": torch.tensor([1 << 30, 2, 5]),
        "top_ps": torch.tensor([1.0, 1.0, 0.5]),
        "min_ps": torch.zeros(3),
    }
    return SimpleNamespace(**info, **filters)


def test_the_draw_for_sglang_is_keyed_by_request_and_position() -> None:
    torch.manual_seed(0)
    probs, at = torch.rand(3, 40).softmax(-1), torch.tensor([3, 4, 5])
    token = sglang.draw(probs.log(), batch(), at, filtered=True).token
    alone = [
        rlk.sample(probs[i : i + 1].log(), seed=s, step=p + 1, **f).token
        for i, (s, p, f) in enumerate(
            [(5, 3, {}), (6, 4, {"top_k": 2}), (7, 5, {"top_k": 5, "top_p": 0.5, "filter_order": "joint"})]
        )
    ]
    assert torch.equal(token, torch.cat(alone))
    base = type("Base", (), {})
    entry = Active("sglang", "0.5.23", ())
    made = sglang.sampler(base, entry)()
    assert torch.equal(made._sample_from_probs(probs, batch(), at, False)[0], token)
    assert entry.calls == {"sample": 1}


def test_a_batch_of_sglang_without_seeds_is_refused() -> None:
    with pytest.raises(rlk.HostError, match="no seeds in this batch"):
        sglang.draw(torch.rand(3, 4), batch(sampling_seed=None), torch.zeros(3), filtered=False)


def test_sglangs_batches_get_their_seeds_where_the_backend_is_asked_for() -> None:
    requests = [
        SimpleNamespace(rid=rid, sampling_params=SimpleNamespace(sampling_seed=seed))
        for rid, seed in (("a", 7), ("b", None), ("c", None))
    ]
    seeds = sglang.seeds_of(requests)
    assert seeds[0] == 7
    assert len({*seeds}) == 3
    assert seeds == sglang.seeds_of(requests)  # of the request alone: ranks agree, and a batch made anew
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_draw_for_vllm_is_greedy_at_temperature_zero_and_keyed_by_slot() -> None:
    torch.manual_seed(0)
    logits, slots = torch.randn(3, 40), torch.tensor([2, 0, 2], dtype=torch.int32)
    heat, seed, pos = torch.tensor([0.0, 9.0, 0.7]), torch.tensor([1, 2, 3]), torch.tensor([8, 9, 10])
    token = vllm.draw(logits, slots, heat, seed, pos, apply_temperature=False, is_drafting=False)
    assert token[1] == logits[1].argmax()
    assert token[0] == rlk.sample(logits[:1], seed=3, step=9).token[0]
    warm = vllm.draw(logits, slots, heat, seed, pos, apply_temperature=True, is_drafting=False)
    assert warm[2] == rlk.sample(logits[2:], temperature=0.7, seed=3, step=11).token[0]
    with pytest.raises(rlk.HostError, match="drafting"):
        vllm.draw(logits, slots, heat, seed, pos, apply_temperature=False, is_drafting=True)


ENTERED = {
    "sglang": sglang.register,
    "vllm": lambda: vllm.enabled().__enter__(),
    "openrlhf": openrlhf.worker,
    "deepspeed-chat": lambda: deepspeed_chat.enabled().__enter__(),
    "skyrl": skyrl.worker,
    "prime-rl": lambda: prime_rl.enabled().__enter__(),
    "slime": lambda: slime.init(None),
    "nemo-rl": nemo_rl.worker,
    "torchtitan": lambda: torchtitan.enabled().__enter__(),
    "veomni": veomni.worker,
    "vime": lambda: vime.provider(None),
    "torchao": torchao.config,
}


@pytest.mark.parametrize("name", ENTERED)
def test_an_absent_host_is_refused_with_the_line_that_installs_it(name) -> None:
    (host,) = {h for h in HOSTS if h.name == name}
    if host.installed is not None:
        pytest.skip("it is here")
    line = host.source or f"'{name}>="
    with pytest.raises(rlk.HostError, match=re.escape(f"{name} is not installed; pip install {line}")):
        ENTERED[name]()


def stand_in(ours, monkeypatch) -> ModuleType:
    """A module in the place of the host's, whose functions tell that they are theirs."""
    modules = {symbol.module: ModuleType(symbol.module) for symbol in ours.HOST.symbols}
    for symbol in ours.HOST.symbols:
        outer, _, name = symbol.name.rpartition(".")
        made = {}
        exec(f"def made({symbol.takes or ''}): return 'theirs'", made)
        held = vars(modules[symbol.module])
        setattr(held.setdefault(outer, SimpleNamespace()) if outer else modules[symbol.module], name, made["made"])
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("rlkernel.integrations.host.version", lambda _: ours.HOST.tested)
    return modules[ours.HOST.symbols[0].module]


@pytest.mark.parametrize("ours", [openrlhf, deepspeed_chat, skyrl, prime_rl, torchtitan], ids=lambda m: m.HOST.name)
def test_tokens_are_scored_by_logprob_inside_the_block(ours, monkeypatch) -> None:
    host = stand_in(ours, monkeypatch)
    logits = torch.randn(2, 5, 31, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.arange(10).view(2, 5)
    theirs = [0.7] if ours is openrlhf else []
    before = logits.detach().clone()
    with ours.enabled() as entry:
        out = getattr(host, ours.SCORE.name)(logits, labels, *theirs)
        assert ours.HOST.name in {a.host for a in active()}
    assert entry.calls == {"logprob": 1}
    heat = theirs[0] if theirs else 1.0
    law = torch.log_softmax(before / heat, -1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(out.detach(), law, rtol=1e-5, atol=1e-6)
    assert torch.equal(logits.detach(), before)
    out.sum().backward()
    assert logits.grad is not None
    assert getattr(host, ours.SCORE.name)(*ours.SCORE.takes.split(", ")) == "theirs"


@pytest.mark.parametrize("kept", [False, True], ids=["all", "kept"])
def test_slime_scores_a_split_vocabulary_by_logprob(kept, monkeypatch) -> None:
    host = stand_in(slime, monkeypatch)
    made = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 31, generator=made, dtype=torch.float64)
    tokens = torch.arange(5)
    keep = torch.rand(5, 31, generator=made) < 0.3 if kept else None
    given, asked = logits.float().requires_grad_(), {"with_entropy": True, "log_prob_keep_mask": keep}
    with slime.enabled():
        scored, entropy = host.calculate_log_probs_and_entropy(given, tokens, None, chunk_size=2, **asked)
        _, quiet = host.calculate_log_probs_and_entropy(given, tokens, None, with_entropy_grad=False, **asked)
    law = logits.log_softmax(-1)
    mine = keep | torch.nn.functional.one_hot(tokens, 31).bool() if kept else torch.ones(5, 31, dtype=torch.bool)
    want = logits.masked_fill(~mine, -torch.inf).log_softmax(-1)[torch.arange(5), tokens][:, None]
    torch.testing.assert_close(scored.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy.double(), -(law.exp() * law).sum(-1), rtol=1e-5, atol=1e-6)
    assert (scored.requires_grad, entropy.requires_grad, quiet.requires_grad) == (True, True, False)


def test_nemo_rl_scores_a_split_vocabulary_by_logprob(alone, monkeypatch) -> None:
    host = stand_in(nemo_rl, monkeypatch)
    logits = torch.randn(2, 5, 31, generator=torch.Generator().manual_seed(0)).requires_grad_()
    target = torch.arange(10).view(2, 5)
    with nemo_rl.enabled() as entry:
        whole = host.DistributedLogprob.apply(logits, target, 0, 31, dist.group.WORLD)
        chunked = host.ChunkedDistributedLogprob.apply(logits, target, 0, 31, 2, dist.group.WORLD, True)
        with pytest.raises(rlk.HostError, match="vocab_start_index is 31, not 0"):
            host.DistributedLogprob.apply(logits, target, 31, 62, dist.group.WORLD, False)
    assert entry.calls == {"logprob": 3}
    assert entry.symbols == (str(nemo_rl.WHOLE), str(nemo_rl.CHUNKED))
    law = logits.detach().log_softmax(-1).gather(-1, target[..., None])[..., 0]
    torch.testing.assert_close(whole.detach(), law, rtol=1e-5, atol=1e-6)
    assert torch.equal(whole, chunked)
    assert (whole.requires_grad, chunked.requires_grad) == (True, False)
    assert (host.DistributedLogprob(), host.ChunkedDistributedLogprob()) == ("theirs", "theirs")


def test_labels_of_torchtitan_that_are_no_tokens_have_no_gradient(monkeypatch) -> None:
    host = stand_in(torchtitan, monkeypatch)
    logits = torch.randn(1, 3, 31, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with torchtitan.enabled():
        scored, entropy = host.compute_logprobs(logits, torch.tensor([[4, -100, 5]]), return_entropy=True)
    scored.sum().backward()
    assert scored[0, 1] == 0
    assert not logits.grad[0, 1].any()
    assert logits.grad[0, [0, 2]].any(-1).all()
    law = logits.detach().log_softmax(-1)
    torch.testing.assert_close(entropy, -(law.exp() * law).sum(-1), rtol=1e-5, atol=1e-6)
    assert not entropy.requires_grad


def test_veomni_scores_the_tokens_that_follow_by_linear_logprob(monkeypatch) -> None:
    host = stand_in(veomni, monkeypatch)
    state = SimpleNamespace(sp_enabled=False)
    monkeypatch.setattr(sys.modules[veomni.STATE.module], "get_parallel_state", lambda: state)
    made = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 4, 8, generator=made).requires_grad_(), torch.randn(31, 8, generator=made)
    labels = torch.tensor([[1, 2, -100, 4], [5, 6, 7, 8]])
    moved = torch.tensor([[2, -100, 4, -100], [6, 7, 8, -100]])
    with veomni.enabled() as entry:
        found, entropy = host.chunk_logprobs_function(hidden, weight, labels, temperature=0.7)
        same = host.chunk_logprobs_function(hidden, weight, labels, shift_labels=moved, temperature=0.7)
        state.sp_enabled = True
        of_a_context = host.chunk_logprobs_function(hidden, weight, moved, 1024, -100, None, 0.7)
    assert entry.calls == {"linear_logprob": 3}
    law = (hidden.detach() @ weight.T / 0.7).log_softmax(-1)
    want = law.gather(-1, moved.clamp(min=0)[..., None])[..., 0].masked_fill(moved < 0, 0)
    torch.testing.assert_close(found.detach(), want, rtol=1e-5, atol=1e-5)
    spread = -(law.exp() * law).sum(-1).masked_fill(moved < 0, 0)
    torch.testing.assert_close(entropy.detach(), spread, rtol=1e-5, atol=1e-5)
    for again in (same, of_a_context):
        assert torch.equal(again[0], found)
        assert torch.equal(again[1], entropy)


@pytest.mark.parametrize("divided", [False, True], ids=["temperature", "divided"])
def test_vime_is_given_what_logprob_scores_and_what_ran(divided, monkeypatch) -> None:
    stand_in(vime, monkeypatch)
    monkeypatch.setattr("rlkernel.integrations.host._ACTIVE", {})
    logits = torch.randn(5, 31, generator=torch.Generator().manual_seed(0))
    asked = dict.fromkeys(vime.HOST.symbols[1].takes.split(", "))
    asked |= {"logits": logits, "target_ids": torch.arange(5), "temperature": 0.7, "metadata": {}}
    asked |= {"with_entropy": divided, "with_entropy_grad": False}
    if divided:
        asked["metadata"] = {"logits_are_temperature_scaled": True}
    found = vime.provider(SimpleNamespace(**asked))
    law = (logits if divided else logits / 0.7).log_softmax(-1)
    torch.testing.assert_close(found.logp, law.gather(-1, torch.arange(5)[:, None]), rtol=1e-5, atol=1e-6)
    assert (found.entropy is None) is not divided
    assert (found.backend_id, found.contract_id) == ("rlkernel_torch.logprob:logprob", "rlkernel logprob@1")
    assert found.provenance["backend"] == "torch"
    (entry,) = active()
    assert (entry.host, entry.symbols) == ("vime", ("--linear-logp-provider",))
    asked["metadata"] = {"top_p_sparse_token_ids": torch.zeros(5, 2)}
    with pytest.raises(rlk.HostError, match="top_p_sparse_token_ids"):
        vime.provider(SimpleNamespace(**asked))


def test_a_worker_of_openrlhf_keeps_the_replacement(monkeypatch) -> None:
    host = stand_in(openrlhf, monkeypatch)
    openrlhf.worker()
    assert host.log_probs_from_logits(torch.zeros(1, 2), torch.tensor([0])).item() == pytest.approx(-0.6931472)
    KEPT.close()
    assert host.log_probs_from_logits(1, 2, 3) == "theirs"


@pytest.mark.parametrize(
    ("source", "argument"), [("transformers", "cache"), ("transformers==5.15.0", "past_key_values")]
)
def test_transformers_is_handed_a_cache_by_the_name_in_its_source(source, argument, monkeypatch) -> None:
    name = "GenerationMixin.prepare_inputs_for_generation"
    said = RECORDED[source]["symbols"][f"transformers.generation.utils.{name}"]
    mixin = type("GenerationMixin", (), {"prepare_inputs_for_generation": lambda: None})
    takes = Signature([Parameter(n, Parameter.KEYWORD_ONLY) for n in said])
    monkeypatch.setattr(mixin.prepare_inputs_for_generation, "__signature__", takes, raising=False)
    module = SimpleNamespace(GenerationMixin=mixin)
    monkeypatch.setitem(sys.modules, "transformers.generation.utils", module)
    assert cache_argument() == argument


@pytest.mark.filterwarnings("ignore")
def test_generate_draws_with_our_sampler_and_a_request_does_not_depend_on_its_batch(tmp_path) -> None:
    pytest.importorskip("transformers", exc_type=ImportError)
    from tests.trl_runs import model

    tiny = model(tmp_path).eval()
    asked = torch.tensor([[5, 6, 7], [9, 8, 7], [5, 6, 7]])
    rules = {
        "do_sample": True,
        "top_k": 20,
        "temperature": 0.9,
        "max_new_tokens": 6,
        "attention_mask": torch.ones(3, 3),
    }
    drawing = transformers.drawing([11, 12, 13])
    out = tiny.generate(asked, custom_generate=drawing, **rules)
    assert torch.equal(out[:, 3:], drawing.tokens)
    swapped = tiny.generate(asked[[1, 0, 2]], custom_generate=transformers.drawing([12, 11, 13]), **rules)
    assert torch.equal(swapped, out[[1, 0, 2]])
    assert not torch.equal(out[0], out[2])  # one prompt, two seeds
    law = torch.log_softmax(tiny(out[:, :-1]).logits[:, 2:].float() / 0.9, -1)
    kept = law.topk(20).values.logsumexp(-1)
    ended = (drawing.tokens == 1).cumsum(-1) > (drawing.tokens == 1)
    mine = law.gather(-1, drawing.tokens[..., None])[..., 0] - kept
    torch.testing.assert_close(drawing.logprob, mine.masked_fill(ended, 0.0).detach(), rtol=1e-4, atol=1e-4)
    stock = tiny.generate(asked, **{**rules, "do_sample": False})
    greedy = tiny.generate(asked, custom_generate=transformers.drawing([1, 2, 3]), **{**rules, "do_sample": False})
    assert torch.equal(greedy, stock)
    with pytest.raises(rlk.ArgumentError, match="seeds"):
        tiny.generate(asked, custom_generate=transformers.drawing([1]), **rules)
