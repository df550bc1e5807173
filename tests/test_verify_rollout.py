"""Rollouts drawn again: an honest one passes, with or without the same numerics, and each attack is seen or named."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import rlkernel as rlk
from rlkernel import rollouts
from rlkernel.rollouts import Params, Record, Rollout
from rlkernel.rollouts.redraw import judge
from rlkernel_core.definitions.sampling import gumbel, words
from rlkernel_core.errors import ArgumentError
from tests.command_line import answer
from tests.drawn_rollouts import STOP, TABLES, P, Tables, V, changed, draws, noisy, rollout

ERROR = 0.02  # standard deviation of a logit, as of bf16's rounding of logits of size 4
X = 5 * ERROR
LAWS = [
    Params(),
    Params(temperature=0.7, top_p=0.9),
    Params(top_k=12, top_p=0.95, min_p=0.02),
    Params(1.3, 20, 0.9, 0.01, "joint"),
    Params(1.0, 20, 0.9, 0.01, "topp_topk", "keep_all"),
    Params(0.6, stream=1, vocab_size=50),
    Params(temperature=0.0),
]


def verify(record, model=TABLES, tolerance=X, **more):
    return rollouts.verify(record, model, tolerance=tolerance, **more)


def texts(found) -> str:
    return "\n".join(found.complaints())


# Honest rollouts


@pytest.mark.parametrize("params", LAWS)
def test_with_the_same_bits_every_token_is_drawn_again_and_the_tolerance_is_zero(params) -> None:
    found = verify(rollout(params), tolerance=0.0)
    assert (found.ok, found.tokens, found.same, found.open, found.needed < 1e-5) == (True, 256, 256, 0, True)
    assert found.drift.max < 1e-5


@pytest.mark.parametrize("params", LAWS)
def test_with_other_numerics_the_tokens_that_differ_are_explained(params) -> None:
    found = verify(rollout(params, through=noisy(ERROR), tokens=64))
    assert found.ok, texts(found)
    assert 0 < found.explained < 40
    assert found.needed < X


@pytest.mark.parametrize("params", [Params(), Params(temperature=0.6), Params(temperature=0.0)])
def test_errors_of_typical_size_give_as_many_other_tokens_as_are_expected(params) -> None:
    found = verify(rollout(params, through=noisy(4 * ERROR), sequences=300, tokens=6), tolerance=4 * X)
    assert found.counted == found.explained
    assert found.counted == pytest.approx(found.expected, rel=0.3)
    assert found.expected > 50


def law_of(g) -> tuple[Params, float]:
    """A law and a tolerance that are drawn anew."""
    u = torch.rand(6, generator=g).tolist()
    order = ("topk_topp", "joint", "topp_topk")[int(3 * u[0])]
    params = Params(
        0.3 + u[1], int(8 * u[2]), 0.3 + 0.7 * u[3] if u[3] < 0.8 else 1.0, max(0.0, 0.4 * u[4] - 0.1), order,
        "keep_all" if u[5] < 0.3 else "lowest_id",
    )  # fmt: skip
    return params, (0.003, 0.05, 0.4, 2.0)[int(4 * u[5])]


def test_a_draw_from_any_logits_within_the_tolerance_is_never_refused() -> None:
    g = torch.Generator().manual_seed(0)
    kinds = {"same": 0, "explained": 0}
    for trial in range(600):
        params, tolerance = law_of(g)
        here = 1.5 * torch.randn(1, 12, generator=g)
        if trial % 3 == 0:
            here = (2 * here).round() / 2  # ties
        error = (2 * torch.rand(here.shape, generator=g) - 1) * tolerance
        there = here + (error if trial % 2 else tolerance * error.sign()) + torch.randn(1, generator=g)
        drawn = rlk.sample(there, **draws(params), seed=trial, step=3, raw_logprob=True)
        said = {"processed": drawn.logprob, "raw": drawn.raw_logprob, "tempered": drawn.logprob + drawn.log_kept_mass}
        law = tuple(said)[trial // 4 % 3]
        v = judge(
            here[0].numpy(), int(drawn.token), params, trial, 3, tolerance=1.001 * tolerance, law=law,
            logprob=said[law].item(), mass=drawn.log_kept_mass.item() if trial % 5 else None,
        )  # fmt: skip
        assert (v.kind != "other", v.logprob, v.mass) == (True, True, True), (trial, params, tolerance, law)
        kinds[v.kind] += 1
    assert min(kinds.values()) > 100  # both are common here


def test_an_explained_token_of_an_unfiltered_law_is_drawn_from_logits_that_favor_it_by_the_tolerance() -> None:
    g = torch.Generator().manual_seed(1)
    kinds = []
    for seed in range(200):
        here, stated = torch.randn(1, 10, generator=g), int(torch.randint(10, (), generator=g))
        v = judge(here[0].numpy(), stated, Params(), seed, 0, tolerance=0.5, law="processed", logprob=None, mass=None)
        favored = here - 0.5
        favored[0, stated] += 1.0
        drawn = int(rlk.sample(favored, seed=seed, step=0).token)
        kinds.append(v.kind)
        assert (v.kind != "other") == (drawn == stated)
    assert {kinds.count(kind) > 10 for kind in ("same", "explained", "other")} == {True}


# Attacks


def test_a_replaced_token_is_named_with_what_is_drawn_there() -> None:
    record = rollout(tokens=8)
    ids = record.rollouts[2].ids
    other = (ids[7] + 9) % V
    found = verify(changed(record, 2, ids=(*ids[:7], other)))
    assert (found.ok, found.same) == (False, 63)
    assert [(c.sequence, c.token, c.kind) for c in found.wrong] == [(2, 7, "token"), (2, 7, "logprob")]
    assert f"sequence 2 token 7: {ids[7]} is drawn here, not {other}, " in texts(found)


def test_choosing_at_every_token_that_the_tolerance_leaves_open_is_seen_by_their_number() -> None:
    """Each token alone is explained: who takes the second best wherever it is near takes it too often."""

    def second(scores: torch.Tensor) -> torch.Tensor:
        two = scores.topk(2).values
        return torch.where((two[:, 0] - two[:, 1] < 2 * X)[:, None] & (scores == two[:, :1]), -torch.inf, scores)

    record = rollout(tokens=1, sequences=200)
    ids = torch.tensor([r.prompt for r in record.rollouts])
    x = TABLES.behind(ids).double().numpy()
    noise = np.stack([gumbel(words(r.seed, P, V)) for r in record.rollouts])
    chosen = second(torch.tensor(x + noise)).argmax(1).tolist()
    rows = [
        replace(r, ids=(i,), logprob=None, log_kept_mass=None) for r, i in zip(record.rollouts, chosen, strict=True)
    ]
    found = verify(replace(record, rollouts=tuple(rows)))
    assert (found.wrong, found.ok, found.explained == found.open) == ((), False, True)
    assert found.chance < 1e-6
    assert "each within the tolerance, where typical errors give" in texts(found)


@pytest.mark.parametrize(
    ("lie", "kinds"),
    [
        ({"params": Params(temperature=0.0), "said": Params()}, {"token", "logprob"}),
        ({"params": Params(temperature=0.8), "said": Params()}, {"token", "logprob"}),
        ({"params": Params(top_p=0.7), "said": Params()}, {"token", "kept mass"}),
        ({"params": Params(), "said": Params(top_k=5)}, {"token", "kept mass"}),
        ({"params": Params(stream=1), "said": Params()}, {"token"}),
        ({"model": TABLES.quantized(4)}, {"token", "logprob"}),
        ({"model": Tables(1)}, {"token", "logprob"}),
    ],
    ids=["greedy", "temperature", "top_p", "top_k", "stream", "4 bits", "model"],
)
def test_another_law_and_another_model_are_seen(lie, kinds) -> None:
    record = rollout(**lie)
    assert {c.kind for c in verify(record).wrong} == kinds
    silent = replace(record, rollouts=tuple(replace(r, logprob=None, log_kept_mass=None) for r in record.rollouts))
    found = verify(silent)
    assert ({c.kind for c in found.wrong}, found.drift) == ({"token"}, None)


def test_errors_within_the_tolerance_that_are_larger_than_typical_are_seen_by_the_number_of_other_tokens() -> None:
    g = torch.Generator().manual_seed(5)
    record = rollout(through=lambda x: x + X * (2 * torch.rand(x.shape, generator=g) - 1), tokens=200)
    found = verify(record)
    assert (found.wrong, found.ok, found.chance < 1e-6) == ((), False, True)


def test_log_probabilities_and_kept_mass_that_are_made_up_are_seen() -> None:
    record = rollout(Params(top_p=0.9), tokens=8)
    first = record.rollouts[0]
    for name, kinds in (("logprob", {"logprob"}), ("log_kept_mass", {"logprob", "kept mass"})):
        said = getattr(first, name)
        for lie in (said[3] - 1.0, math.nan, -math.inf):
            found = verify(changed(record, 0, **{name: (*said[:3], lie, *said[4:])}))
            assert {(c.sequence, c.token) for c in found.wrong} == {(0, 3)}
            assert {c.kind for c in found.wrong} <= kinds


def test_a_processed_log_probability_that_leaves_the_kept_mass_out_is_seen() -> None:
    record = rollout(Params(top_k=3), tokens=8)
    rows = [
        replace(r, logprob=tuple(a + b for a, b in zip(r.logprob, r.log_kept_mass, strict=True)), log_kept_mass=None)
        for r in record.rollouts
    ]
    found = verify(replace(record, rollouts=tuple(rows)), tolerance=0.01)
    assert len([c for c in found.wrong if c.kind == "logprob"]) > 50
    assert verify(replace(record, rollouts=tuple(rows), law="tempered"), tolerance=0.01).ok


def test_a_prompt_that_was_changed_is_seen_in_the_tokens_or_beside_what_was_asked_for() -> None:
    record = rollout(tokens=8)
    first = record.rollouts[0]
    swapped = changed(record, 0, prompt=((first.prompt[0] + 1) % V, *first.prompt[1:]))
    assert {c.kind for c in verify(swapped).wrong} >= {"token"}  # drawn from the one, stated as from the other
    found = verify(swapped, asked=record.asked())
    assert "sequence 0: prompt: not as asked for" in texts(found)
    assert verify(record, asked=record.asked()).ok


def test_a_seed_found_by_trying_is_seen_beside_what_was_asked_for_alone() -> None:
    """A record drawn with the best of several seeds is an honest record of that seed: nothing in it tells."""
    best = max((rollout(tokens=4, sequences=1, seed=s) for s in range(5)), key=lambda r: r.rollouts[0].ids)
    asked = rollout(tokens=4, sequences=1, seed=99).asked()
    assert verify(best).ok
    assert texts(verify(best, asked=asked)) == "sequence 0: seed: not as asked for"
    moved = changed(best, 0, step=best.rollouts[0].step + 2**40)
    assert "step: not as asked for" in texts(verify(moved, asked=best.asked()))


def test_dropped_tokens_and_sequences_are_seen() -> None:
    record = rollout(tokens=8, sequences=3)
    first = record.rollouts[0]
    short = {name: getattr(first, name)[:5] for name in ("ids", "logprob", "log_kept_mass")}
    found = verify(changed(record, 0, **short, weights=(("step 1", 5),)))
    assert texts(found) == "sequence 0: ends after 5 tokens without a stop id, and 8 were asked for"
    fewer = replace(record, rollouts=record.rollouts[:2])
    assert texts(verify(fewer, asked=record.asked())) == "sequence 2: 2 sequences, and 3 were asked for"


@pytest.mark.parametrize(
    ("ids", "params", "said"),
    [
        ((1, STOP), Params(stop_ids=(STOP,)), None),
        ((1, 2), Params(stop_ids=(STOP,)), "ends after 2 tokens without a stop id"),
        ((STOP, 2), Params(stop_ids=(STOP,)), "goes on behind the stop id at token 0"),
        ((1, 2), Params(max_new_tokens=1), "has 2 tokens, and 1 were asked for"),
        ((1, 2), Params(stop_ids=(STOP,), max_new_tokens=2), None),
        ((1, 2), Params(), None),
    ],
)
def test_a_sequence_ends_where_its_request_says(ids, params, said) -> None:
    record = Record((Rollout((3,), 0, 1, params, ids, weights=(("w", 2),)),))
    assert [c.text for c in verify(record).wrong if c.kind == "end"] == ([said] if said else [])


def test_ids_beyond_the_vocabulary_cannot_be_drawn() -> None:
    record = rollout(tokens=1, sequences=1)
    (drawn,) = record.rollouts[0].ids
    for i in (V, 2**32 - 1):
        found = verify(changed(record, 0, ids=(i,)))
        assert f"token 0: {drawn} is drawn here, not {i}, which the law cannot draw" in texts(found)
    assert "which the law cannot draw" in texts(verify(changed(record, 0, params=Params(vocab_size=1))))


def test_a_sequence_with_ids_that_the_model_has_not_is_not_handed_to_it() -> None:
    record = rollout(tokens=2, sequences=2)
    model = Tables()
    model.vocab = V
    for fields in ({"prompt": (V,)}, {"ids": (V, 1)}):
        found = verify(changed(record, 1, **fields), model)
        assert (found.tokens, texts(found)) == (2, f"sequence 1: has id {V}, which the model has not")


def test_of_two_equal_logits_a_greedy_draw_takes_the_lowest_id_without_a_tolerance() -> None:
    row = torch.zeros(1, V)
    record = Record((Rollout((1,), 0, 1, Params(temperature=0.0), (1,), weights=(("w", 1),)),))
    kinds = [len(verify(record, lambda ids, first: [row], tolerance=x).wrong) for x in (0.0, 0.01)]
    assert kinds == [1, 0]


def test_the_tolerance_that_is_needed_is_the_smallest_that_explains_every_token() -> None:
    record = rollout(through=noisy(ERROR), tokens=64)
    silent = replace(record, rollouts=tuple(replace(r, logprob=None, log_kept_mass=None) for r in record.rollouts))
    for each in (record, silent):
        needed = verify(each, tolerance=0.0).needed
        assert needed > 0
        assert [len(verify(each, tolerance=x * needed).wrong) for x in (0.99, 1.01)] == [1, 0]


def test_log_probabilities_that_are_right_do_not_hide_a_margin() -> None:
    record = rollout(through=noisy(ERROR), tokens=64)

    def right(r: Rollout) -> Rollout:
        law = torch.cat(TABLES(torch.tensor((*r.prompt, *r.ids[:-1])), P - 1)).log_softmax(-1)
        return replace(r, logprob=tuple(law[range(len(r.ids)), r.ids].tolist()))

    silent = replace(record, rollouts=tuple(replace(r, logprob=None) for r in record.rollouts))
    told = replace(record, rollouts=tuple(right(r) for r in record.rollouts), law="raw")
    assert verify(told).needed == verify(silent).needed > 0


# Weights, and what a caller may get wrong


def test_tokens_of_other_weights_are_left_out() -> None:
    old, new = rollout(tokens=4, sequences=1), rollout(tokens=4, sequences=1, model=Tables(2))
    mixed = Record((
        replace(old.rollouts[0], weights=(("step 1", 4),)),
        replace(new.rollouts[0], weights=(("step 2", 4),)),
    ))  # fmt: skip
    found = verify(mixed, weights="step 1")
    assert (found.ok, found.tokens, found.unchecked) == (True, 4, 4)
    assert not verify(mixed, weights="step 2").ok
    changing = changed(old, 0, weights=(("step 0", 3), ("step 1", 1)))
    assert (verify(changing, weights="step 1").same, verify(changing, weights="step 0").same) == (1, 3)
    with pytest.raises(ArgumentError, match=r"weights: must be named; got 2 versions. Pass one of step 1, step 2"):
        verify(mixed)
    with pytest.raises(ArgumentError, match="drew no token"):
        verify(old, weights="step 9")


def test_an_empty_record_is_not_ok() -> None:
    found = verify(Record(()))
    assert (found.ok, found.complaints()) == (False, ["no token was checked"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tolerance": -1.0}, "tolerance"),
        ({"model": lambda ids, first: []}, "logits: must be 8 from that row on"),
        ({"model": lambda ids, first: [torch.zeros(3)]}, "logits"),
    ],
)
def test_what_a_caller_gets_wrong_is_named(more, said) -> None:
    with pytest.raises(ArgumentError, match=said):
        verify(rollout(tokens=4, sequences=1), **more)


def test_of_logits_that_hold_nan_the_others_are_drawn_as_sample_does() -> None:
    record = rollout(tokens=1, sequences=1)
    (drawn,) = record.rollouts[0].ids
    holed = TABLES.behind(torch.tensor([record.rollouts[0].prompt]))
    holed[0, (drawn + 1) % V] = torch.nan
    assert verify(record, lambda ids, first: [holed], tolerance=10.0).same == 1


def test_logits_without_meaning_draw_nothing() -> None:
    for row in (torch.full((1, V), torch.nan), torch.full((1, V), -torch.inf), torch.full((1, V), torch.inf)):
        found = verify(rollout(tokens=1, sequences=1), lambda ids, first, row=row: [row])
        assert not found.ok


# The command


@pytest.fixture(scope="module")
def made():
    """A record of the built-in decoder whose logits were rounded to bf16."""
    model, params, rows = rollouts.Builtin(), Params(0.8, top_p=0.95, max_new_tokens=6), []
    for seed in range(3):
        ids = [1, 2, 3 + seed]
        for _ in range(6):
            (row,) = model(torch.tensor(ids), len(ids) - 1)
            ids.append(int(rlk.sample(row.bfloat16(), **draws(params), seed=seed, step=len(ids)).token))
        rows.append(Rollout(tuple(ids[:3]), seed, 3, params, tuple(ids[3:]), weights=(("step 1", 6),)))
    return Record(tuple(rows), decisions=rlk.decisions_hash())


@pytest.fixture
def files(made, tmp_path):
    """The same in a file, and what was asked for in another."""
    rollouts.write(tmp_path / "record", made)
    rollouts.write(tmp_path / "asked", made.asked())
    return tmp_path


def test_the_command_says_that_every_token_was_drawn(cli, files) -> None:
    arguments = ["verify-rollout", str(files / "record"), "--model", "builtin", "--asked", str(files / "asked")]
    result = cli(*arguments)
    assert result.exit_code == 0, result.output
    for text in ("3 sequences, 18 tokens drawn by weights step 1", "temperature=0.8 top_p=0.95 max_new_tokens=6",
                 "0 not explained", "every token that was checked was drawn as it claims"):  # fmt: skip
        assert text in result.stdout
    said = answer(cli(*arguments, "--json"))
    assert (said["ok"], said["tokens"], said["same"] + said["explained"], said["wrong"]) == (True, 18, 18, [])


def test_the_command_exits_with_1_and_names_each_token(cli, files) -> None:
    record = rollouts.read(files / "record")
    ids = record.rollouts[1].ids
    rollouts.write(files / "record", changed(record, 1, ids=((ids[0] + 1) % 4096, *ids[1:])))
    result = cli("verify-rollout", str(files / "record"), "--model", "builtin")
    assert (result.exit_code, "NOT drawn as it claims" in result.stdout) == (1, True)
    assert f"sequence 1 token 0: {ids[0]} is drawn here, not {(ids[0] + 1) % 4096}" in result.stderr
    result = cli("verify-rollout", str(files / "record"), "--model", "builtin", "--json")
    assert (result.exit_code, json.loads(result.stdout)["wrong"][0]["kind"]) == (1, "token")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent", "--model", "builtin"], "does not exist"),
        (["record", "--model", "absent"], "does not exist"),
        (["record", "--model", "."], "no weights there"),
        (["record", "--model", "builtin", "--exact"], "--exact is of a model of transformers"),
        (["record", "--model", "builtin", "--dtype", "int8"], "is no floating type"),
        (["record", "--model", "builtin", "--weights", "step 9"], "drew no token"),
        (["record"], "Missing option '--model'"),
    ],
)
def test_what_the_command_cannot_answer_is_one_line(cli, files, monkeypatch, arguments, said) -> None:
    monkeypatch.chdir(files)
    result = cli("verify-rollout", *arguments)
    assert (result.exit_code, said in result.stderr) == (2, True), result.stderr
