"""Every argument of every method of a rollout buffer, given what it is not: refused by name, and nothing is lost."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rlkernel_conformance.bad_arguments import NEVER, of_tensor, of_type
from rlkernel_core.errors import ArgumentError, FileError, RLKernelError, UnknownNameError
from rlkernel_core.spec.rollouts import Field, GroupRules, Slots
from rlkernel_torch.direct import rollout_buffer
from tests.full_disk import full_disk
from tests.rollouts import balanced, buffer, fill, tokens

INTEGERS = {
    "None": None,
    "a string": "1",
    "int": 3,
    "float": [1.0],
    "True": [True],
    "negative": [-1],
    "beyond 64 bits": [2**63],
    "None inside": [None],
    "nested": [[0]],
    "mapping": {0: 1},
    "tensor": torch.zeros(2, dtype=torch.int64),
    "object": object(),
}
NAMES = {"None": None, "int": 3, "empty": "", "list": ["a"], "bytes": b"a", "object": object()}
RULES = {
    "a string": "complete",
    "mapping": {"complete": True},
    "complete": GroupRules(complete=1),
    "min_valid": GroupRules(min_valid=0.5),
    "min_valid < 0": GroupRules(min_valid=-1),
    "max_age": GroupRules(max_age="old"),
    "distinct_rewards": GroupRules(distinct_rewards=None),
}
VERSION = {k: v for k, v in of_type("int | None").items() if k != "list"}


def slots_of(slots: Slots) -> dict[str, Any]:
    bad = {**NEVER, "None": None, "tuple": (slots.ids, slots.stamps), "ids": slots.ids}
    bad |= {f"ids: {what}": Slots(x, slots.stamps) for what, x in of_tensor(slots.ids).items()}
    bad |= {f"stamps: {what}": Slots(slots.ids, x) for what, x in of_tensor(slots.stamps).items()}
    return bad | {"ids: a list": Slots(slots.ids.tolist(), slots.stamps), "stamps: None": Slots(slots.ids, None)}


def values_of(x: torch.Tensor) -> dict[str, Any]:
    bad = {**NEVER, "None": None, "tensor": x, "list": [("token", x)], "no field": {}}
    return bad | {
        f"token: {what}": {"token": y}
        for what, y in {**of_tensor(x), "list": x.tolist()}.items()
        if what != "bool tensor"
    }


def calls(buf: Any, slots: Slots, path: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Argument -> a call that takes it, and bad values of it."""
    one = {"token": torch.tensor([1, 2])}
    cu, alive = torch.tensor([0, 1, 2]), torch.tensor([True, True])
    numbers = {k: v for k, v in of_type("int | None").items() if k != "None"}
    rewards = {
        **{k: v for k, v in NEVER.items() if k != "array"},
        "a string": "good",
        "strings": ["a", "b"],
        "ragged": [[1.0], [1.0, 2.0]],
        "complex": torch.ones(2, dtype=torch.complex64),
        "sparse": torch.ones(2).to_sparse(),
        "complex array": np.ones(2, dtype=complex),
        "None inside": [None, 1.0],
        "10**400": [10**400, 1],
        "one number": 1.0,
        "three": [1.0, 2.0, 3.0],
        "mapping": {0: 1.0},
    }
    status = {**NEVER, "None": None, "int": 1, "unknown": "done", "filler": "filler", "one": ["stop"], "ints": [1, 2]}
    found = {
        "reserve.limits": (lambda x: buf.reserve(x, [7, 7]), INTEGERS | {"zero": 0, "too large": 99, "int": 0.5}),
        "reserve.groups": (lambda x: buf.reserve(2, x), INTEGERS | {"empty": []}),
        "reserve.version": (lambda x: buf.reserve(2, [7], version=x), {**VERSION, "None": None}),
        "append.slots": (lambda x: buf.append(x, one), slots_of(slots)),
        "append.values": (lambda x: buf.append(slots, x), values_of(one["token"])),
        "append.cu_seqlens": (lambda x: buf.append(slots, one, cu_seqlens=x), {**NEVER, **of_tensor(cu)}),
        "append.alive": (lambda x: buf.append(slots, one, alive=x), {**NEVER, **of_tensor(alive)}),
        "finish.slots": (buf.finish, slots_of(slots)),
        "finish.reward": (lambda x: buf.finish(slots, x), rewards),
        "finish.status": (lambda x: buf.finish(slots, status=x), status),
        "pop.groups": (lambda x: buf.pop(groups=x), numbers | {"0": 0}),
        "pop.tokens": (lambda x: buf.pop(tokens=x), numbers | {"0": 0}),
        "pop.order": (lambda x: buf.pop(groups=1, order=x), {**NAMES, "unknown": "lifo"}),
        "pop.weighting": (lambda x: buf.pop(groups=1, weighting=x), {**NAMES, "unknown": "all"}),
        "pop.rows_multiple_of": (lambda x: buf.pop(groups=1, rows_multiple_of=x), numbers | {"0": 0, "None": None}),
        "discard.groups": (buf.discard, INTEGERS | {"unknown": [99], "one unknown": [5, 99]}),
        "discard.reason": (lambda x: buf.discard([5], x), NAMES),
        "save.path": (buf.save, NAMES | {"no folder": f"{path}/none/there", "a folder": path}),
        "load.path": (buf.load, NAMES | {"no file": f"{path}/none", "a folder": path}),
    }
    for method in ("groups", "pop", "prune"):
        more = {"groups": 1} if method == "pop" else {}
        call = getattr(buf, method)
        found[f"{method}.rules"] = (lambda x, call=call, more=more: call(rules=x, **more), {**NEVER, **RULES})
        found[f"{method}.version"] = (lambda x, call=call, more=more: call(version=x, **more), VERSION)
    return found


def held(path: str) -> tuple[Any, Slots]:
    """A buffer with a finished group 5 and an open group 6 of two sequences."""
    buf = buffer(tokens=64, seqs=8, max_seq_tokens=8)
    fill(buf, [5], [3])
    slots = buf.reserve(4, [6, 6])
    buf.append(slots, tokens(1, 2))
    return buf, slots


ARGUMENTS = sorted(calls(*held(""), ""))


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_bad_value_is_refused_by_name_and_loses_nothing(tmp_path, argument) -> None:
    buf, slots = held(str(tmp_path))
    call, bad = calls(buf, slots, str(tmp_path))[argument]
    before, wrong = buf.stats, []
    name = argument.partition(".")[2]
    for what, value in bad.items():
        try:
            call(value)
        except UnknownNameError as error:
            wrong += [] if name in {"groups", "values"} else [(what, str(error))]
        except ArgumentError as error:
            wrong += [] if name in error.argument and len(error.remedy) > 3 else [(what, str(error))]
        except FileError as error:
            wrong += [] if name == "path" and error.file == value and len(error.remedy) > 3 else [(what, str(error))]
        else:
            wrong.append((what, "accepted"))
        assert buf.stats == before, what
    assert wrong == []


def test_a_refused_call_leaves_a_buffer_that_works(tmp_path) -> None:
    buf, slots = held(str(tmp_path))
    for call, bad in calls(buf, slots, str(tmp_path)).values():
        for value in bad.values():
            with pytest.raises(RLKernelError):
                call(value)
    buf.append(slots, tokens(3, 4))
    buf.finish(slots, [1.0, 0.0])
    with buf.pop(groups=2) as batch:
        assert batch["token"].tolist() == [0, 1, 2, 1, 3, 2, 4]
    balanced(buf.stats)


@pytest.mark.parametrize("name", ["tok", 3, None, ["token"], object()])
def test_a_field_that_a_batch_does_not_have_is_named(name) -> None:
    buf, _ = held("")
    with buf.pop(groups=1) as batch, pytest.raises(UnknownNameError, match="field"):
        batch[name]


def test_numbers_are_not_cut_off_to_fit_a_field_of_integers() -> None:
    buf = rollout_buffer(8, 2, page_tokens=4, fields={"token": Field("int32")})
    slots = buf.reserve(4, [0])
    with pytest.raises(ArgumentError, match="would cut it off"):
        buf.append(slots, {"token": torch.tensor([1.5])})


@pytest.mark.parametrize("reason", ["stale", "over the limit"])
def test_a_reason_with_the_name_of_a_counter_hides_nothing(reason) -> None:
    buf = buffer(tokens=16, seqs=4)
    slots = buf.reserve(4, [0])
    for t in range(6):  # two over the limit
        buf.append(slots, tokens(t))
    buf.finish(slots)
    buf.append(slots, tokens(9))  # stale
    buf.discard([0], reason)
    assert sum(buf.stats.dropped.values()) == 7
    balanced(buf.stats)


def test_a_failed_save_leaves_the_earlier_file(tmp_path) -> None:
    buf, _ = held("")
    path = tmp_path / "rollouts"
    buf.save(str(path))
    earlier = path.read_bytes()
    with full_disk(len(earlier) // 2), pytest.raises(FileError, match="rollouts: cannot be written: File too large"):
        buf.save(str(path))
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (earlier, [path])


def damaged(tensors: dict[str, Any], said: dict[str, Any]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Tensors and metadata that `save` did not write, by what is wrong with them."""

    def other(name: str, change: Any) -> dict[str, Any]:
        x = tensors[name].clone()
        return tensors | {name: y if isinstance(y := change(x), torch.Tensor) else x}

    def put(name: str, at: Any, value: int) -> tuple[dict[str, Any], dict[str, Any]]:
        return other(name, lambda x: x.__setitem__(at, value)), said

    return {
        "another schema": (tensors, said | {"schema": 1}),
        "another shape": (tensors, said | {"shape": said["shape"] | {"rewards": 2}}),
        "no shape": (tensors, {k: v for k, v in said.items() if k != "shape"}),
        "no tensors": ({}, said),
        "a tensor less wide": (other("table", lambda x: x[..., :1].contiguous()), said),
        "another dtype": (other("field.token", lambda x: x.double()), said),
        "a page too many": (other("pages", lambda x: torch.cat((x, x.new_tensor([10**6])))), said),
        "a page twice": (other("pages", lambda x: x[torch.arange(len(x)) // 2]), said),
        "a page in words": (other("pages", lambda x: x.to(torch.int32)), said),
        "a slot twice": (other("free_slots", lambda x: torch.cat((x, tensors["sequences"][:1, 0]))), said),
        "a page lost": (other("free_pages", lambda x: x[1:].clone()), said),
        "a group lost": (other("group_slots", lambda x: x[1:].clone()), said),
        "a group twice": put("group_ids", 1, int(tensors["group_ids"][0])),
        "a group of another name": put("group_ids", 0, 77),
        "a count below nothing": put("group_counts", 0, -1),
        "a page of the table beyond the storage": put("table", (0, 0), 10**6),
        "a length beyond the limit": put("length", 0, 10**9),
        "a limit beyond the table": put("limit", 0, 10**9),
        "a slot open on the device alone": put("stamp", -1, 1),
        "a status that is none": put("sequences", (0, 6), 9),
        "a sequence neither open nor ended": put("sequences", (0, 7), 2),
        "a stamp that was never given out": put("sequences", (0, 1), 10**9),
        "a count in words": (tensors, said | {"counts": dict.fromkeys(said["counts"], "many")}),
        "an age in words": (tensors, said | {"counters": said["counters"] | {"staleness": {"old": 1}}}),
    }


def test_a_damaged_file_is_refused_and_changes_nothing(tmp_path) -> None:
    path = str(tmp_path / "rollouts")
    held("")[0].save(path)
    with safe_open(path, framework="pt") as file:
        tensors, said = {n: file.get_tensor(n) for n in file.keys()}, json.loads(file.metadata()["rollout_buffer"])  # noqa: SIM118
    buf, slots = held("")
    buf.append(slots, tokens(5, 6))
    before, stored = buf.stats, {n: x.clone() for n, x in buf.tensors().items()}
    for what, (content, metadata) in damaged(tensors, said).items():
        save_file(content, path, {"rollout_buffer": json.dumps(metadata)})
        with pytest.raises(ArgumentError if what == "another shape" else FileError, match="rollouts"):
            buf.load(path)
        assert buf.stats == before, what
        assert all(torch.equal(x, stored[n]) for n, x in buf.tensors().items()), what
    save_file(tensors, path)
    with pytest.raises(FileError, match="is no rollout buffer"):
        buf.load(path)
    for text in (b"", b"no torch", math.pi.hex().encode() * 1000):
        (tmp_path / "rollouts").write_bytes(text)
        with pytest.raises(FileError, match="is no whole safetensors file"):
            buf.load(path)
    assert buf.stats == before
