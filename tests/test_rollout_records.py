"""Records of rollouts: what they hold, the file that holds them, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlkernel import rollouts
from rlkernel.rollouts import Params, Record, Rollout, record_file
from rlkernel_core import tensor_file
from rlkernel_core.errors import ArgumentError, FileError
from tests.drawn_rollouts import changed, rollout

FILTERED = Params(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, tie="keep_all", stop_ids=(3, 2**32 - 1))


def some() -> Record:
    """Sequences of every shape: two laws, two versions within one, none drawn in another, the largest keys."""
    drawn = rollout(FILTERED, tokens=4, sequences=3).rollouts
    empty = Rollout((1,), 2**64 - 1, 2**64 - 1)
    mixed = replace(drawn[1], params=Params(), weights=(("step 1", 1), ("step 2", 3)), seed=0)
    return Record((drawn[0], mixed, empty, drawn[2]), "tempered", "0123456789ab")


def test_a_record_comes_back_from_its_file_as_it_was(tmp_path) -> None:
    record = some()
    rollouts.write(tmp_path / "r", record)
    assert rollouts.read(tmp_path / "r") == record
    assert [p.name for p in tmp_path.iterdir()] == ["r"]


def test_a_record_without_sequences_or_numbers_comes_back(tmp_path) -> None:
    bare = Record(tuple(replace(r, logprob=None, log_kept_mass=None) for r in some().rollouts))
    for record in (Record(()), bare, bare.asked()):
        rollouts.write(tmp_path / "r", record)
        assert rollouts.read(tmp_path / "r") == record


def test_what_a_record_was_asked_for_are_its_requests_and_nothing_drawn() -> None:
    asked = some().asked().rollouts
    assert [(r.prompt, r.seed, r.step, r.params) for r in asked] == [
        (r.prompt, r.seed, r.step, r.params) for r in some().rollouts
    ]
    assert {(r.ids, r.logprob, r.log_kept_mass, r.weights) for r in asked} == {((), None, None, ())}


@pytest.mark.parametrize(
    ("dropped", "expected"), [((), 12), (("log_kept_mass",), 8), (("logprob", "log_kept_mass"), 4)]
)
def test_a_token_takes_twelve_bytes_at_the_most_and_prompts_are_stored_once(tmp_path, dropped, expected) -> None:
    def size(sequences: int, tokens: int) -> int:
        one = rollout(tokens=1, sequences=1).rollouts[0]
        long = {"ids": one.ids * tokens, "weights": (("step 1", tokens),)}
        long |= {
            name: None if name in dropped else getattr(one, name) * tokens for name in ("logprob", "log_kept_mass")
        }
        rollouts.write(tmp_path / "r", Record((replace(one, **long),) * sequences))
        return (tmp_path / "r").stat().st_size

    assert (size(1, 9000) - size(1, 8000)) / 1000 == pytest.approx(expected, abs=0.01)
    each = (size(9000, 1) - size(8000, 1)) / 1000
    assert each == pytest.approx(expected + 36, abs=0.05)  # sequence, keys, run of weights; the prompt once


def test_damage_is_found_wherever_it_is(tmp_path) -> None:
    rollouts.write(tmp_path / "r", some())
    data = (tmp_path / "r").read_bytes()
    accepted = []
    for i in range(0, len(data), 7):
        (tmp_path / "r").write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        try:
            if rollouts.read(tmp_path / "r") != some():
                accepted.append(i)
        except FileError:
            continue
    assert accepted == []
    (tmp_path / "r").write_bytes(data[:-1])
    with pytest.raises(FileError, match="cut off"):
        rollouts.read(tmp_path / "r")


def remade(path, change) -> None:
    """The file with its content changed, and a digest that fits."""
    stored, metadata = tensor_file.read_header(path)
    data = path.read_bytes()
    said = json.loads(metadata["rollouts"])
    kinds = record_file._TENSORS
    arrays = {
        n: np.frombuffer(data[s.first : s.first + s.nbytes], kinds[n][1]).reshape(s.shape) for n, s in stored.items()
    }
    arrays = {name: x.copy() for name, x in arrays.items()}
    change(said, arrays)
    text = json.dumps(said)
    parts = [(n, kinds[n][0] if n in kinds else "uint32", x.shape, x.tobytes()) for n, x in arrays.items()]
    digest = record_file._digest(text, {n: raw for n, _, _, raw in parts})
    tensor_file.write(path, parts, {"rollouts": text, "sha256": digest})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s, a: s.update(version=2), "version: must be 1; got 2"),
        (lambda s, a: s.update(law="pure"), "law: must be"),
        (lambda s, a: s["params"][0].update(temperature=-1.0), "contradicts itself: temperature"),
        (lambda s, a: s["params"].pop(), "contradicts itself"),
        (lambda s, a: s["weights"].pop(), "contradicts itself"),
        (lambda s, a: a.pop("keys"), "has no tensor keys"),
        (lambda s, a: a.update(more=a["ids"]), "more: is no tensor of a record"),
        (lambda s, a: a.update(ids=a["ids"][:-1]), "ids has 11 entries, and lengths of 12"),
        (lambda s, a: a.update(runs=a["runs"][:-1]), "runs of weights are fewer"),
        (lambda s, a: a.update(runs=np.concatenate([a["runs"], a["runs"][:1]])), "runs of weights are more"),
        (lambda s, a: a["runs"].__setitem__((0, 1), 5), "crosses sequences"),
        (lambda s, a: a.update(keys=a["keys"][1:]), "4 sequences, keys of 3"),
        (lambda s, a: a["sequences"].__setitem__((0, 0), 99), "contradicts itself"),
        (lambda s, a: a.update(keys=a["keys"].reshape(-1)), "keys: is no tensor of a record"),
    ],
)  # fmt: skip
def test_a_file_that_contradicts_itself_is_refused(tmp_path, change, said) -> None:
    rollouts.write(tmp_path / "r", some())
    remade(tmp_path / "r", change)
    with pytest.raises(FileError, match=said):
        rollouts.read(tmp_path / "r")


def test_other_files_are_refused(tmp_path) -> None:
    tensor_file.write(tmp_path / "x", [("a", "uint32", (1,), bytes(4))], {})
    with pytest.raises(FileError, match="is no record of a rollout"):
        rollouts.read(tmp_path / "x")
    with pytest.raises(FileError, match="does not exist"):
        rollouts.read(tmp_path / "absent")


def test_what_is_too_large_for_a_file_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(record_file, "MOST", 1000)
    with pytest.raises(ArgumentError, match="is more than the 1000 of a file"):
        rollouts.write(tmp_path / "r", rollout())
    monkeypatch.setattr(record_file, "SEQUENCES", 3)
    with pytest.raises(ArgumentError, match="4 sequences"):
        rollouts.write(tmp_path / "r", some().asked())
    monkeypatch.setattr(record_file, "PROMPTS", 10)
    with pytest.raises(ArgumentError, match="is more than the 10 of a file; got 11 ids of prompts"):
        rollouts.write(tmp_path / "r", Record(some().asked().rollouts[1:]))
    assert list(tmp_path.iterdir()) == []


def test_a_small_file_cannot_ask_for_a_long_prompt_very_often(tmp_path, monkeypatch) -> None:
    rollouts.write(tmp_path / "r", some())
    monkeypatch.setattr(record_file, "PROMPTS", 15)
    with pytest.raises(FileError, match="16 ids of prompts, and at most 15 may be"):
        rollouts.read(tmp_path / "r")


def test_lists_are_taken_where_a_record_holds_tuples(tmp_path) -> None:
    listed = Rollout([1, 2], 0, 2, Params(stop_ids=[5]), [4, 5], [-1.0, -2.0], weights=(("w", 2),))
    rollouts.write(tmp_path / "r", Record((listed,)))
    assert rollouts.read(tmp_path / "r").rollouts == (listed,)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Params(temperature=-0.1), "temperature"), (lambda: Params(top_p=1.5), "top_p"),
        (lambda: Params(min_p=float("nan")), "min_p"), (lambda: Params(top_k=-1), "top_k"),
        (lambda: Params(filter_order="x"), "filter_order"), (lambda: Params(tie="x"), "tie"),
        (lambda: Params(stop_ids=(-1,)), "stop_ids"), (lambda: Params(max_new_tokens=0), "max_new_tokens"),
        (lambda: Params(vocab_size=0), "vocab_size"), (lambda: Params(stream=2**32), "stream"),
        (lambda: Rollout((), 0, 0), "prompt"), (lambda: Rollout((-1,), 0, 0), "prompt"),
        (lambda: Rollout((1,), -1, 0), "seed"), (lambda: Rollout((1,), 0, 2**64), "step"),
        (lambda: Rollout((1,), 0, 0, ids=(1,)), "weights"),
        (lambda: Rollout((1,), 0, 0, ids=(1,), weights=(("a", 0), ("b", 1))), "weights"),
        (lambda: Rollout((1,), 0, 0, ids=(1,), weights=(("a", 1),), logprob=()), "logprob"),
        (lambda: Record((), law="pure"), "law"),
        (lambda: changed(rollout(tokens=2), 0, logprob=None), "logprob: must be stated of all"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(make, said) -> None:
    with pytest.raises(ArgumentError, match=f"^{said}"):
        make()


# Engines


def vllm_output(ids=((4, 5), (6, 3)), logprobs=True):
    def row(drawn, index):
        said = [{i: SimpleNamespace(logprob=-0.5 * i), 0: SimpleNamespace(logprob=0.0)} for i in drawn]
        return SimpleNamespace(token_ids=list(drawn), index=index, logprobs=said if logprobs else None)

    return SimpleNamespace(prompt_token_ids=[1, 2, 9], outputs=[row(drawn, i) for i, drawn in enumerate(ids)])


def vllm_params(**more):
    plain = {"temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.0, "seed": 40, "stop": [], "ignore_eos": False}
    return SimpleNamespace(**{**plain, "stop_token_ids": [8], "max_tokens": 2, "repetition_penalty": 1.0, **more})


def test_what_vllm_returned_is_recorded_with_a_seed_a_sample() -> None:
    record = rollouts.from_vllm([vllm_output()], vllm_params(), weights="step 3", stop_ids=[3])
    params = Params(0.5, top_p=0.9, tie="keep_all", stop_ids=(8, 3), max_new_tokens=2)
    expected = [
        Rollout((1, 2, 9), 40, 3, params, (4, 5), (-2.0, -2.5), None, (("step 3", 2),)),
        Rollout((1, 2, 9), 41, 3, params, (6, 3), (-3.0, -1.5), None, (("step 3", 2),)),
    ]
    assert record == Record(tuple(expected), "raw")


def test_of_vllm_stop_texts_leave_the_end_unchecked_and_absent_numbers_are_not_stated() -> None:
    record = rollouts.from_vllm([vllm_output(logprobs=False)], [vllm_params(stop=["\n"])], weights="w")
    assert {(r.params.stop_ids, r.params.max_new_tokens, r.logprob) for r in record.rollouts} == {((), None, None)}


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (vllm_params(seed=None), "names no seed"), (vllm_params(repetition_penalty=1.1), "edits logits"),
        (vllm_params(logit_bias={3: 1.0}), "edits logits"), ([vllm_params()] * 2, "one for each of 1 outputs"),
    ],
)  # fmt: skip
def test_what_of_vllm_cannot_be_drawn_again_is_refused(params, said) -> None:
    with pytest.raises(ArgumentError, match=said):
        rollouts.from_vllm([vllm_output()], params, weights="w")


def sglang_output(ids=(4, 5), logprobs=True):
    rows = {"output_token_logprobs": [(-0.5 * i, i, None) for i in ids]} if logprobs else {}
    return {"output_ids": list(ids), "meta_info": rows}


def sglang_params(**more):
    return {"temperature": 0.5, "top_p": 0.9, "sampling_seed": 40, "stop_token_ids": [8], "max_new_tokens": 2, **more}


def test_what_sglang_returned_is_recorded_with_filters_that_are_intersected() -> None:
    record = rollouts.from_sglang([[1, 2, 9]], [sglang_output()], sglang_params(), weights="step 3", stop_ids=[3])
    params = Params(0.5, top_p=0.9, filter_order="joint", stop_ids=(8, 3), max_new_tokens=2)
    expected = Rollout((1, 2, 9), 40, 3, params, (4, 5), (-2.0, -2.5), None, (("step 3", 2),))
    assert record == Record((expected,), "tempered")


@pytest.mark.parametrize(
    ("more", "params"),
    [
        ({"temperature": 0}, {"temperature": 1.0, "top_k": 1}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": None, "min_p": 0.1}, {"top_k": 0, "min_p": 0.1}),
        ({"ignore_eos": True}, {"stop_ids": (), "max_new_tokens": 2}),
        ({"stop": "\n"}, {"stop_ids": (), "max_new_tokens": None}),
    ],
)
def test_of_sglang_its_own_rules_make_the_law_and_the_end(more, params) -> None:
    asked = [sglang_params(**more)]
    record = rollouts.from_sglang([[1]], [sglang_output(logprobs=False)], asked, weights="w", stop_ids=[3])
    (one,) = record.rollouts
    assert {name: getattr(one.params, name) for name in params} == params
    assert one.logprob is None


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (sglang_params(sampling_seed=None), "names no seed"), (sglang_params(repetition_penalty=1.1), "edits logits"),
        (sglang_params(n=2), "several sequences"), ([sglang_params()] * 2, "must be of the same requests"),
    ],
)  # fmt: skip
def test_what_of_sglang_cannot_be_drawn_again_is_refused(params, said) -> None:
    with pytest.raises(ArgumentError, match=said):
        rollouts.from_sglang([[1]], [sglang_output()], params, weights="w")


def test_what_exact_generate_returned_is_recorded() -> None:
    from rlkernel import Generated

    drawn = Generated(
        torch.tensor([[4, 5], [6, 0]]), torch.tensor([2, 1]), torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]),
        torch.tensor([[0.0, -0.5], [-0.25, 0.0]]),
    )  # fmt: skip
    params = Params(0.7, top_p=0.9, stop_ids=(6,), max_new_tokens=2)
    record = rollouts.from_generated([[1, 2], [3]], drawn, seed=3, params=params, weights="w")
    expected = [
        Rollout((1, 2), 3 << 32, 2, params, (4, 5), (-1.0, -2.0), (0.0, -0.5), (("w", 2),)),
        Rollout((3,), (3 << 32) + 1, 1, params, (6,), (-3.0,), (-0.25,), (("w", 1),)),
    ]
    assert (record.rollouts, record.law) == (tuple(expected), "tempered")
    with pytest.raises(ArgumentError, match="must be those of 2 rows"):
        rollouts.from_generated([[1]], drawn, seed=3, params=params, weights="w")
