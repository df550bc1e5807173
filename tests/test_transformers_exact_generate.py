"""Exact.generate: pages and a captured step draw with the bits of the trainer's forward, and refuse what cannot."""

from __future__ import annotations

import json
import runpy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import rlkernel as rlk
import rlkernel_torch
from rlkernel.integrations import transformers
from rlkernel.nn.page_plan import page_plan

pytest.importorskip("transformers", exc_type=ImportError)

from tests.plugins import good
from tests.test_docs import FENCE
from tests.test_transformers_exact import CLASSES, IDS, decoder

PROMPTS = [IDS[0, :5].tolist(), IDS[1, :9].tolist(), IDS[0, :5].tolist(), IDS[2, :1].tolist()]
NEW = 6
DRAW: dict[str, Any] = {"max_new_tokens": NEW, "seed": 3, "temperature": 0.7, "stop_ids": (), "page": 4}
ROOT = Path(__file__).parents[1]
AGREE = ROOT / "docs" / "agree.md"


def packed(prompts: list[list[int]], drawn: rlk.Generated) -> dict[str, Any]:
    """What a trainer packs: whole sequences one after another."""
    rows = [[*p, *ids[:n].tolist()] for p, ids, n in zip(prompts, drawn.ids, drawn.lengths, strict=True)]
    cu = torch.tensor([0, *map(len, rows)]).cumsum(0).int()
    return {
        "input_ids": torch.tensor([[i for row in rows for i in row]]),
        "position_ids": torch.tensor([[i for row in rows for i in range(len(row))]]),
        "cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 99, "max_length_k": 99, "use_cache": False,
    }  # fmt: skip


def trained(model: Any, prompts: list[list[int]], drawn: rlk.Generated, score: str = "linear_logprob") -> Tensor:
    """Log-probabilities [B, M] of what was drawn, by a forward with gradients over the packed sequences."""
    batch = packed(prompts, drawn)
    next_ids = batch["input_ids"][0].roll(-1)
    if score == "logprob":
        found = rlk.logprob(model(**batch).logits[0], next_ids, temperature=0.7).logprob
    else:
        hidden = model.base_model(**batch).last_hidden_state[0]
        head, cap = model.lm_head.weight, getattr(model.config, "final_logit_softcapping", None)
        found = rlk.linear_logprob(hidden, head, next_ids, temperature=0.7, softcap=cap).logprob
    assert found.requires_grad
    result = torch.zeros_like(drawn.logprob)
    for b, (prompt, begin) in enumerate(zip(prompts, batch["cu_seq_lens_q"].tolist(), strict=False)):
        n = int(drawn.lengths[b])
        result[b, :n] = found[begin + len(prompt) - 1 :][:n].detach()
    return result


@pytest.mark.parametrize("name", CLASSES)
def test_log_probabilities_have_the_bits_of_the_trainers_packed_forward(name) -> None:
    model = decoder(name, torch.bfloat16)
    with rlk.exact(model) as exact:
        drawn = exact.generate(PROMPTS, **DRAW)
        assert torch.equal(drawn.logprob, trained(model, PROMPTS, drawn))


def test_tokens_are_those_that_transformers_draws_by_the_same_seeds_padded_or_not() -> None:
    model, seeds = decoder("qwen3", torch.float32), torch.arange(len(PROMPTS)) + 5
    with rlk.exact(model) as exact:
        drawn = exact.generate(PROMPTS, **{**DRAW, "seed": seeds}).ids
    width = max(map(len, PROMPTS))
    padded = torch.tensor([[0] * (width - len(ids)) + ids for ids in PROMPTS])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in PROMPTS])
    rules = {"do_sample": True, "temperature": 0.7, "top_k": None, "max_new_tokens": NEW, "eos_token_id": None}
    loop = transformers.drawing(seeds.tolist())
    made = model.generate(padded, attention_mask=mask, pad_token_id=0, custom_generate=loop, **rules)
    assert made[:, width:].tolist() == drawn.tolist()


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_so_have_those_of_the_models_own_logits(name) -> None:
    model = decoder(name)
    with rlk.exact(model) as exact:
        drawn = exact.generate(PROMPTS, **DRAW, top_p=0.9, score="logprob")
        assert torch.equal(drawn.logprob, trained(model, PROMPTS, drawn, "logprob"))


def test_so_have_those_of_int4_weights() -> None:
    model = decoder("qwen3")
    rlk.nn.quantize_model(model, rlk.nn.QuantPolicy("int4_g32"))
    with rlk.exact(model) as exact:
        drawn = exact.generate(PROMPTS, **DRAW)
        assert torch.equal(drawn.logprob, trained(model, PROMPTS, drawn))


def test_so_have_those_of_lora_beside_int4_weights_that_comes_and_learns() -> None:
    """LoRA added, and its scale changed, after the step was recorded: no graph of before is replayed."""
    model = decoder("qwen3")
    rlk.nn.quantize_model(model, rlk.nn.QuantPolicy("int4_g32"))
    layer = model.model.layers[0].mlp.down_proj
    with rlk.exact(model) as exact:
        exact.generate(PROMPTS, **DRAW)
        layer.add_lora(2, 4.0, torch.float32)
        torch.nn.init.normal_(layer.lora_B, generator=torch.Generator().manual_seed(2))
        for _ in range(2):
            drawn = exact.generate(PROMPTS, **DRAW)
            assert torch.equal(drawn.logprob, trained(model, PROMPTS, drawn))
            layer.lora_scale *= 3
            layer.lora_B.data.mul_(0.5)


def test_lora_on_the_head_is_refused() -> None:
    model = decoder("qwen3")
    model.lm_head = rlk.nn.QuantLinear.from_linear(model.lm_head, "int4_g32")
    model.lm_head.add_lora(2, 4.0)
    with rlk.exact(model) as exact, pytest.raises(rlk.HostError, match="the head has LoRA"):
        exact.generate(PROMPTS, **DRAW)


def test_so_have_those_of_an_int4_head() -> None:
    model = decoder("qwen3")
    model.lm_head = rlk.nn.QuantLinear.from_linear(model.lm_head, "int4_g32")
    with rlk.exact(model) as exact:
        drawn = exact.generate(PROMPTS[:1], **DRAW)
        batch = packed(PROMPTS[:1], drawn)
        head = rlk.dequantize(model.lm_head.weight, dtype=torch.float32)
        hidden = model.base_model(**batch).last_hidden_state[0, len(PROMPTS[0]) - 1 : -1]
        want = rlk.linear_logprob(hidden, head, drawn.ids[0], temperature=0.7).logprob
        assert torch.equal(drawn.logprob[0], want)


def test_a_row_draws_the_same_alone_in_another_order_and_in_pages_of_another_size() -> None:
    model = decoder("mistral")
    with rlk.exact(model) as exact:
        seeds = torch.tensor([11, 12, 13, 14])
        want = exact.generate(PROMPTS, **DRAW | {"seed": seeds})
        alone = exact.generate(PROMPTS[1:2], **DRAW | {"seed": seeds[1:2], "page": 7})
        assert torch.equal(alone.ids, want.ids[1:2])
        assert torch.equal(alone.logprob, want.logprob[1:2])
        turned = exact.generate(PROMPTS[::-1], **DRAW | {"seed": seeds.flip(0), "page": 64})
        assert torch.equal(turned.ids.flip(0), want.ids)
        assert torch.equal(turned.logprob.flip(0), want.logprob)


@settings(max_examples=6, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 9)), min_size=1, max_size=4),
    page=st.integers(1, 20),
    new=st.integers(1, 4),
)
def test_whatever_the_batch_and_the_pages_log_probabilities_are_those_of_the_trainer(rows, page, new) -> None:
    prompts = [IDS[row, :length].tolist() for row, length in rows]
    model = decoder("qwen3")
    with rlk.exact(model) as exact:
        drawn = exact.generate(prompts, **DRAW | {"page": page, "max_new_tokens": new})
        assert torch.equal(drawn.logprob, trained(model, prompts, drawn))


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple), min_size=1, max_size=6),
    st.integers(0, 9),
    st.integers(1, 5),
)
def test_every_key_has_a_place_of_its_own_but_in_pages_that_equal_prompts_fill(prompts, more, page) -> None:
    plan = page_plan(prompts, more, page)
    taken: dict[tuple[int, int], tuple[int, ...]] = {}  # place -> the tokens up to the key there, and whose they are
    for row, ids in enumerate(prompts):
        for at in range(len(ids) + more):
            place = plan.table[row][at // page], at % page
            whose = ids if at < len(ids) // page * page else (*ids, 2, row)
            assert taken.setdefault(place, (*whose, at)) == (*whose, at)
    assert {place[0] for place in taken} | {target for _, target in plan.copies} == set(range(plan.pages))
    for row, ids in enumerate(prompts):
        first = plan.first[plan.prompt[row]]
        assert prompts[first] == ids
        if row != first and len(ids) % page:
            assert (plan.table[first][len(ids) // page], plan.table[row][len(ids) // page]) in plan.copies


def test_greedy_draws_what_the_stock_model_draws() -> None:
    for name in ("llama", "gemma3"):
        model = decoder(name)
        mask = torch.ones_like(IDS)
        want = model.generate(IDS, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        with rlk.exact(model) as exact:
            drawn = exact.generate(IDS, **DRAW | {"temperature": 0})
        assert torch.equal(drawn.ids, want[:, IDS.shape[1] :])


def test_a_row_ends_with_a_stop_id_and_others_go_on_as_if_it_had_not() -> None:
    model = decoder("llama")
    with rlk.exact(model) as exact:
        free = exact.generate(PROMPTS, **DRAW)
        stop = int(free.ids[1, 2])
        ended = exact.generate(PROMPTS, **DRAW | {"stop_ids": [stop], "pad_id": 96, "check_every": 1})
    want = [next((n + 1 for n, i in enumerate(row) if i == stop), NEW) for row in free.ids.tolist()]
    assert ended.lengths.tolist() == want
    assert torch.equal(ended.ids, torch.where(ended.mask, free.ids, 96)[:, : max(want)])
    assert torch.equal(ended.logprob, torch.where(ended.mask, free.logprob, 0)[:, : max(want)])


def test_nothing_is_drawn_after_all_rows_have_stopped() -> None:
    model = decoder("llama")
    with rlk.exact(model) as exact:
        every = list(range(97))
        drawn = exact.generate(PROMPTS, **DRAW | {"stop_ids": every, "max_new_tokens": 40, "check_every": 3})
        assert drawn.ids.shape == (4, 1)
        assert exact.decoder.step.stats.replays == 2


def test_stop_ids_and_padding_are_those_of_the_generation_config_unless_given() -> None:
    model = decoder("llama")
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = list(range(97)), 95
    with rlk.exact(model) as exact:
        drawn = exact.generate(PROMPTS, max_new_tokens=2, seed=3)
        assert (drawn.lengths.tolist(), exact.decoder.draws.pad_id) == ([1] * 4, 95)


def test_with_filters_the_law_of_the_draw_is_the_trainers_less_the_mass_kept() -> None:
    model = decoder("qwen3")
    with rlk.exact(model) as exact:
        drawn = exact.generate(PROMPTS, **DRAW, top_k=2)
        free = exact.generate(PROMPTS, **DRAW)
    assert free.log_kept_mass is None
    assert (drawn.log_kept_mass < 0).all()
    chance = (drawn.logprob - drawn.log_kept_mass).exp()
    assert ((chance > 0) & (chance < 1)).all()


@pytest.mark.parametrize(
    ("change", "scored"), [({}, False), ({"top_k": 2}, False), ({"temperature": 0}, True)], ids=str
)
def test_nothing_is_scored_where_a_draw_states_the_trainers_number(change, scored) -> None:
    def scores() -> int:
        return sum(ran.calls for ran in rlk.status() if ran.op == "linear_logprob@1")

    with rlk.exact(decoder("llama")) as exact:
        before = scores()
        exact.generate(PROMPTS, **DRAW | {"max_new_tokens": 2} | change)
    assert (scores() > before) == scored


def test_a_draw_is_asked_for_the_trainers_number_where_the_first_implementation_does_not_state_it() -> None:
    (own,) = rlkernel_torch.backend.of("lm_head_sample@1")
    other = {"target": "rlkernel_torch.sample:sample", "supports": own.supports - {"trainer_bits"}}  # it would raise
    two = {"name": "two", "impls": (own.model_copy(update=other), *rlkernel_torch.backend.impls)}
    with rlk.registered(rlkernel_torch.backend.model_copy(update=two)), rlk.use("two", probe="off"):
        with rlk.exact(decoder("llama")) as exact:
            drawn = exact.generate(PROMPTS, **DRAW)
            ran = rlk.last_decision("lm_head_sample").target
    with rlk.exact(decoder("llama")) as exact:
        assert torch.equal(drawn.logprob, exact.generate(PROMPTS, **DRAW).logprob)
    assert ran == own.target


def test_parameters_may_differ_by_row() -> None:
    model = decoder("qwen3")
    with rlk.exact(model) as exact:
        top_k = torch.tensor([1, 0, 0, 3])
        temperature = torch.tensor([0.7, 0.7, 0.0, 0.7])
        drawn = exact.generate(PROMPTS, **DRAW | {"temperature": temperature}, top_k=top_k)
        greedy = exact.generate(PROMPTS, **DRAW | {"temperature": 0})
        free = exact.generate(PROMPTS, **DRAW)
    assert torch.equal(drawn.ids[[0, 2]], greedy.ids[[0, 2]])
    assert torch.equal(drawn.ids[1], free.ids[1])
    assert torch.equal(drawn.logprob[2], greedy.logprob[2])


def test_padded_prompts_draw_what_lists_draw() -> None:
    model = decoder("llama")
    longest = max(map(len, PROMPTS))
    with rlk.exact(model) as exact:
        want = exact.generate(PROMPTS, **DRAW)
        for left in (True, False):
            pads = [[96] * (longest - len(p)) for p in PROMPTS]
            ids = torch.tensor([pad + p if left else p + pad for p, pad in zip(PROMPTS, pads, strict=True)])
            drawn = exact.generate(ids, attention_mask=(ids != 96).long(), **DRAW)
            assert torch.equal(drawn.ids, want.ids)


def test_keys_are_made_once_and_weights_read_as_they_are() -> None:
    model = decoder("llama")
    with rlk.exact(model) as exact:
        exact.generate(PROMPTS, **DRAW, max_length=20)
        layers = exact.decoder.cache.layers
        places = [(x.keys.data_ptr(), x.values.data_ptr()) for x in layers]
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.01)
        model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(model.model.layers[0].mlp.up_proj.weight * 2)
        others = [IDS[2, :11].tolist(), *PROMPTS[:3]]
        drawn = exact.generate(others, **DRAW | {"seed": 4}, max_length=20)
        assert [(x.keys.data_ptr(), x.values.data_ptr()) for x in exact.decoder.cache.layers] == places
        assert exact.decoder.step.stats.recaptures == {"static tensors moved": 1}
        assert torch.equal(drawn.logprob, trained(model, others, drawn))


def test_pages_are_freed_by_release_and_undo_at_once() -> None:
    model = decoder("llama")
    exact = rlk.exact(model)
    for free in (exact.release, exact.undo):
        exact.generate(PROMPTS, **DRAW)
        pages = weakref.ref(exact.decoder.cache.layers[0].keys)
        free()
        assert exact.decoder is None
        assert pages() is None


def test_a_model_in_training_is_put_back_into_training() -> None:
    model = decoder("llama").train()
    with rlk.exact(model) as exact:
        exact.generate(PROMPTS, **DRAW)
    assert model.training


@pytest.mark.parametrize(
    ("more", "argument", "message"),
    [
        ({"num_beams": 4}, "num_beams", "no part of an exact rollout"),
        ({"cache": object()}, "cache", "pages are the cache"),
        ({"past_key_values": object()}, "past_key_values", "pages are the cache"),
        ({"generation_config": object()}, "generation_config", "Pass max_new_tokens"),
        ({"frequency": 1}, "frequency", "is no argument of generate"),
        ({"max_new_tokens": 0}, "max_new_tokens", "at least 1"),
        ({"page": 0}, "page", "at least 1"),
        ({"max_length": 14}, "max_length", "longest prompt"),
        ({"temperature": -1.0}, "temperature", "greedy"),
        ({"top_k": torch.ones(3, dtype=torch.int64)}, "top_k", "must"),
        ({"score": "sampler"}, "score", "linear_logprob"),
        ({"seed": -1}, "seed", "at least 0"),
        ({"seed": torch.arange(3)}, "seed", "the prompts"),
        ({"seed": torch.tensor([5, 6, 5, 7])}, "seed", r"the same tokens from equal prompts; got 5 for rows 0 and 2"),
        ({"prompts": []}, "prompts", "needs a row"),
        ({"prompts": [[1], []]}, r"prompts[1]", "needs an id"),
        ({"prompts": [[1, 97]]}, r"prompts[0]", r"\[0, 97\)"),
        ({"prompts": ["hello"]}, r"prompts[0]", "no list of ids"),
        ({"prompts": "hello"}, "prompts", "no token ids"),
        ({"prompts": IDS, "attention_mask": (IDS[0, 3] != IDS).long()}, "attention_mask", "no padding"),
        ({"prompts": IDS, "attention_mask": IDS[:2]}, "attention_mask", "prompts"),
        ({"attention_mask": IDS}, "attention_mask", "belongs to padded prompts"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_what_cannot_be_done_is_refused_by_name_before_anything_is_made(shared, more, argument, message) -> None:
    asked = {"prompts": PROMPTS, **DRAW, **more}
    with pytest.raises(rlk.ArgumentError, match=message) as error:
        shared.generate(asked.pop("prompts"), **asked)
    assert error.value.argument == argument
    assert shared.decoder is None


@pytest.fixture(scope="module")
def shared() -> Any:
    with rlk.exact(decoder("llama")) as exact:
        yield exact


def test_a_model_that_is_exact_no_more_is_refused() -> None:
    exact = rlk.exact(decoder("llama"))
    exact.undo()
    with pytest.raises(rlk.HostError, match="not exact any more"):
        exact.generate(PROMPTS, **DRAW)


def test_a_model_on_several_devices_is_refused() -> None:
    model = decoder("llama")
    with rlk.exact(model) as exact:
        model.model.layers[1].mlp.down_proj.to("meta")
        with pytest.raises(rlk.HostError, match="the model is on cpu, meta"):
            exact.generate(PROMPTS, **DRAW)


def test_another_policy_than_that_of_exact_is_refused() -> None:
    with rlk.exact(decoder("llama")) as exact:
        exact.ran["attention"] = "elsewhere:attention"
        with pytest.raises(rlk.HostError, match="attention runs .* in this rollout, and elsewhere:attention ran"):
            exact.generate(PROMPTS, **DRAW)
        assert exact.decoder is None


@pytest.mark.usefixtures("untried")
def test_a_draw_whose_bits_may_depend_on_the_batch_is_refused_before_anything_is_made(shared, plug) -> None:
    plug("acme", good("acme").replace("logprob@1", "lm_head_sample@1").replace('{"entropy"}', "()"))
    shared.release()
    with (
        rlk.use("acme", "torch"),
        pytest.raises(rlk.HostError, match="lm_head_sample runs acme, whose bits may depend on the batch"),
    ):
        shared.generate(PROMPTS, **DRAW)
    assert shared.decoder is None


def test_rotary_angles_that_depend_on_the_batch_are_refused() -> None:
    model = decoder("llama")
    model.model.rotary_emb.rope_type = "dynamic"
    with pytest.raises(rlk.HostError, match="depend on the longest sequence of a batch"):
        rlk.exact(model)


def test_the_snippet_of_the_page_draws_and_trains_with_equal_bits() -> None:
    blocks = [code for info, code in FENCE.findall(AGREE.read_text()) if info == "text" and "drawn =" in code]
    assert len(blocks) == 1
    exec(blocks[0], {"model": decoder("qwen3")})  # its last line asserts


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("options", [[], ["--weights", "int4_g32", "--lora", "4"], ["--experts", "5"]], ids=str)
def test_the_benchmark_of_a_gpu_runs_as_a_toy_and_finds_no_bit_that_differs(options, tmp_path, capsys) -> None:
    main = runpy.run_path(str(ROOT / "benchmarks" / "gpu_exact_rollout.py"))["main"]
    main(["--toy", "--updates", "1", "--device", "cpu", "--output", str(tmp_path / "exact.json"), *options])
    found = json.loads((tmp_path / "exact.json").read_text())
    assert json.loads(capsys.readouterr().out) == found
    assert (found["exact"]["tokens"], found["exact"]["differ"], found["stock"]["tokens"]) == (48, 0, 48)
    assert found["exact"]["updates"][0]["weights_changed"] > 0
