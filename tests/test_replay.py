"""A recorded rollout that a trainer scores: its drift under the stated law, and what a mixture of laws makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel import lock, record, rollouts
from rlkernel.rollouts import Params, Record, Rollout
from tests.command_line import answer

V, D, P, N = 50, 8, 3, 12
FILTERED = Params(temperature=0.7, top_p=0.8)


class Tables:
    """A decoder without attention: a hidden state is of the last id and of the number of ids."""

    name, vocab, bias = "tables", V, None

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.rows, self.places, self.head = (torch.randn(n, D, generator=g) for n in (V, 2 * N, V))

    def full(self, ids: Tensor) -> Tensor:
        return self.rows[ids] + self.places[: ids.shape[1]]


def drawn(params: Params, law: str, *, sequences: int = 4, weights: str = "one") -> Record:
    """A rollout of `Tables` with log-probabilities of a law."""
    model, told = Tables(), []
    for seed in range(sequences):
        ids, said = [1, 2, seed], []
        for step in range(P, P + N):
            logits = model.full(torch.tensor([ids]))[0, -1:] @ model.head.T
            asked = {"temperature": params.temperature, "top_p": params.top_p}
            draw = rlk.sample(logits, seed=seed, step=step, raw_logprob=True, **asked)
            numbers = {
                "raw": draw.raw_logprob,
                "processed": draw.logprob,
                "tempered": draw.logprob + draw.log_kept_mass,
            }
            ids.append(int(draw.token))
            said.append(float(numbers[law]))
        told.append(Rollout(tuple(ids[:P]), seed, P, params, tuple(ids[P:]), tuple(said), weights=((weights, N),)))
    return Record(tuple(told), law)


@pytest.mark.parametrize("law", ["raw", "tempered", "processed"])
def test_nothing_drifts_under_the_law_that_the_rollout_states(law) -> None:
    found = rollouts.replay(drawn(FILTERED, law), Tables())
    assert (found.drift.tokens, found.left_out, found.drift.max < 1e-5) == (4 * N, 0, True)
    assert [d.backend for d in found.trainer] == ["torch"]


@pytest.mark.parametrize(
    ("law", "params", "mixed"),
    [
        ("raw", FILTERED, True),
        ("raw", Params(top_p=0.8), False),
        ("tempered", FILTERED, False),
        ("processed", FILTERED, True),
        ("processed", Params(temperature=0.7), False),
    ],
)
def test_numbers_of_another_law_than_the_trainers_are_told_apart(law, params, mixed) -> None:
    found = rollouts.replay(drawn(params, law), Tables())
    assert (found.mixed is not None and found.mixed.max > 0.05) == mixed


def test_against_the_processed_law_a_trainer_is_off_by_the_kept_mass() -> None:
    processed, tempered = drawn(FILTERED, "processed"), drawn(FILTERED, "tempered")
    pairs = zip(processed.rollouts, tempered.rollouts, strict=True)
    mass = [b - a for x, y in pairs for a, b in zip(x.logprob, y.logprob, strict=True)]
    found = rollouts.replay(processed, Tables())
    assert found.mixed.mean == pytest.approx(-sum(mass) / len(mass), abs=1e-5)


def test_the_worst_token_is_named_and_its_part_of_the_sequence() -> None:
    honest = drawn(FILTERED, "raw")
    first, second, *others = honest.rollouts
    wrong = replace(second, logprob=(*second.logprob[:10], second.logprob[10] - 0.5, *second.logprob[11:]))
    found = rollouts.replay(Record((first, wrong, *others), "raw"), Tables())
    worst = found.worst[0]
    assert (worst.sequence, worst.token, worst.id) == (1, 10, second.ids[10])
    assert worst.trainer - worst.rollout == pytest.approx(0.5, abs=1e-4)
    assert [(at, drift.max > 0.1) for at, drift in found.places] == [(0, False), (3, False), (6, False), (9, True)]


def test_greedy_requests_have_no_law_to_compare_but_the_raw_one() -> None:
    greedy = Params(temperature=0.0)
    both = Record((*drawn(greedy, "processed").rollouts, *drawn(FILTERED, "processed").rollouts), "processed")
    found = rollouts.replay(both, Tables())
    assert (found.drift.tokens, found.left_out) == (4 * N, 4 * N)
    assert rollouts.replay(drawn(greedy, "raw"), Tables()).drift.max < 1e-5
    with pytest.raises(rlk.ArgumentError, match="none to compare"):
        rollouts.replay(drawn(greedy, "processed"), Tables())


def test_tokens_of_other_weights_are_left_out() -> None:
    old, new = drawn(FILTERED, "raw", weights="old"), drawn(FILTERED, "raw", sequences=1, weights="new")
    both = Record((*old.rollouts, *new.rollouts), "raw")
    found = rollouts.replay(both, Tables(), weights="new")
    assert (found.drift.tokens, found.left_out) == (N, 4 * N)
    with pytest.raises(rlk.ArgumentError, match="2 versions"):
        rollouts.replay(both, Tables())
    with pytest.raises(rlk.ArgumentError, match="drew no token"):
        rollouts.replay(both, Tables(), weights="newer")


def test_what_cannot_be_compared_is_refused() -> None:
    bare = Record((replace(drawn(FILTERED, "raw").rollouts[0], logprob=None),), "raw")
    with pytest.raises(rlk.ArgumentError, match="no log-probabilities"):
        rollouts.replay(bare, Tables())
    other = Record((replace(drawn(FILTERED, "raw").rollouts[0], prompt=(1, 2, V)),), "raw")
    with pytest.raises(rlk.ArgumentError, match="not of a model with 50 ids; got id 50"):
        rollouts.replay(other, Tables())


@pytest.fixture
def engine(tmp_path) -> tuple[Path, Path]:
    """A record of the built-in decoder, and decisions.json of the process that drew."""
    model, ids = rollouts.Builtin(), [1, 2, 3]
    (row,) = model(torch.tensor(ids), 2)
    draw = rlk.sample(row, temperature=0.7, seed=0, step=3, raw_logprob=True)
    params, told = Params(temperature=0.7), ((int(draw.token),), (float(draw.raw_logprob),))
    one = Rollout((1, 2, 3), 0, 3, params, *told, weights=(("one", 1),))
    file = tmp_path / "rollout.safetensors"
    rollouts.write(file, Record((one,), "raw", rlk.decisions_hash()))
    return file, record.write(tmp_path / "engine")


def test_the_command_pins_what_ran_on_both_sides(cli, engine, tmp_path) -> None:
    file, ran = engine
    pins = tmp_path / "rlkernel.lock"
    found = answer(cli("agree", "--record", str(file), "--ran", str(ran), "--output", str(pins), "--json"))
    assert (found["drift"]["tokens"], found["drift"]["max"] < 1e-5, found["mixed"] is not None) == (1, True, True)
    assert {"sample@1", "linear_logprob@1"} <= set(lock.read(str(pins)))


def test_the_command_says_drift_by_law_and_is_a_gate(cli, engine) -> None:
    said = cli("agree", "--record", str(engine[0]), "--limit", "1e-3")
    assert said.exit_code == 0
    assert "raw law on both sides" in said.stdout
    assert "tempered trainer, raw rollout" in said.stdout
    assert cli("agree", "--record", str(engine[0]), "--limit", "0").exit_code == 1


def test_options_that_a_recorded_rollout_leaves_no_meaning_are_refused(cli, engine) -> None:
    file, ran = engine
    assert "--tokens is about drawing" in cli("agree", "--record", str(file), "--tokens", "3").stderr
    assert "--exact is of a model" in cli("agree", "--record", str(file), "--exact").stderr
    assert "--weights is of a recorded rollout" in cli("agree", "--weights", "one").stderr
    other = ran.with_name("other.json")
    other.write_text(json.dumps(json.loads(ran.read_text()) | {"hash": "0" * 12}))
    assert f"its decisions are {'0' * 12}" in cli("agree", "--record", str(file), "--ran", str(other)).stderr
