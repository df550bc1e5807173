"""`rlkernel config`, `lock`, `status` and `schema`: what is in force, what is pinned, what ran."""

from __future__ import annotations

import json

import pytest
import torch

import rlkernel as rlk
from rlkernel import config, lock, provenance, record
from rlkernel.cli.config import EXAMPLE
from rlkernel_core import __version__
from rlkernel_core.errors import FileError
from rlkernel_core.spec import OPERATORS
from tests.command_line import answer
from tests.plugins import good

NOW = f"rlkernel {__version__}"
FILE = """
[rlkernel]
order = ["torch"]
[rlkernel.ops.logprob]
need = ["deterministic"]
"""


def test_every_value_is_shown_with_its_source(cli, tmp_path, monkeypatch) -> None:
    file = tmp_path / "here" / "rlkernel.toml"
    file.write_text(FILE)
    monkeypatch.setenv("RLKERNEL_FALLBACK", "error")
    found = answer(cli("config", "--json"))
    assert found["file"] == str(file)
    assert found["values"]["order"] == {"value": ["torch"], "source": str(file)}
    assert found["values"]["fallback"] == {"value": "error", "source": "RLKERNEL_FALLBACK"}
    assert found["values"]["probe"] == {"value": "subprocess", "source": "default"}
    assert found["values"]["ops.logprob.need"] == {"value": ["deterministic"], "source": str(file)}
    assert found["environment"]["RLKERNEL_FALLBACK"]["value"] == "error"
    said = cli("config").stdout
    assert all(text in said for text in (str(file), "RLKERNEL_FALLBACK", "ops.logprob.need", "[deterministic]"))


def test_the_example_is_valid_and_says_what_the_default_is(cli, tmp_path) -> None:
    assert cli("config", "--example").stdout == EXAMPLE
    path = tmp_path / "rlkernel.toml"
    path.write_text(EXAMPLE)
    found = config.merge([("file", config.read_file(path, ("torch",)))])
    assert (found.default, found.probe) == (config.merge([]).default, "subprocess")
    assert found.of("logprob").fallback == "error"


@pytest.mark.parametrize("form", ["config", "manifest", "decision"])
def test_schemas_are_json_schema(cli, form) -> None:
    found = answer(cli("schema", form))
    assert (found["type"], "properties" in found) == ("object", True)
    assert answer(cli("schema"))[form] == found


def test_the_schema_of_decisions_describes_what_explain_prints(cli) -> None:
    properties = answer(cli("schema", "decision"))["properties"]
    assert set(properties) == set(answer(cli("explain", "logprob", "--json")))


def test_status_says_what_serves_every_operator_here(cli) -> None:
    found = answer(cli("status", "--json"))
    plain = [d for d in found["decisions"] if not d["call"]["grad"]]
    training = [d for d in found["decisions"] if d["call"]["grad"]]
    assert [d["call"]["op"] for d in plain] == [s.id for s in OPERATORS.values()]
    assert [d["call"]["op"] for d in training] == [s.id for s in OPERATORS.values() if "grad" in s.feature_names]
    assert {d["backend"] for d in found["decisions"]} == {"torch"}
    assert "with gradients" in cli("status").stdout


def test_status_of_a_run_says_what_served_it_and_how_often(cli, tmp_path) -> None:
    rlk.refresh()
    for _ in range(3):
        rlk.logprob(torch.zeros(2, 3), torch.tensor([0, 1]))
    digest = rlk.decisions_hash()
    path = record.write(tmp_path / "run")
    found = answer(cli("status", str(tmp_path / "run"), "--json"))
    assert (found["hash"], [(d["call"]["op"], d["calls"]) for d in found["decisions"]]) == (digest, [("logprob@1", 3)])
    assert digest in cli("status", str(path)).stdout


def test_status_of_a_run_says_how_many_plans_it_held(cli, tmp_path) -> None:
    rlk.refresh()
    for rows in (2, 3, 2):
        rlk.logprob(torch.zeros(rows, 3), torch.zeros(rows, dtype=torch.int64))
    held = {"op": "logprob", "plans": 2, "made": 2, "evicted": 0}
    assert [p.as_dict() for p in provenance.plans()] == [held]
    record.write(tmp_path)
    assert answer(cli("status", str(tmp_path), "--json"))["plans"] == [held]
    assert "plans logprob: 2 held, 2 made\n" in cli("status", str(tmp_path)).stdout


def test_a_record_of_before_there_were_plans_is_read(cli, tmp_path) -> None:
    content = record.content()
    del content["plans"]
    (tmp_path / "decisions.json").write_text(json.dumps(content))
    assert record.planned(tmp_path) == []
    assert answer(cli("status", str(tmp_path), "--json"))["plans"] == []


def test_a_record_survives_the_way_to_disk_and_back(tmp_path) -> None:
    rlk.refresh()
    with rlk.use("jetson", "auto"), pytest.warns(match="jetson"):
        rlk.logprob(torch.zeros(2, 3), torch.tensor([0, 1]), entropy=True)
    ran = rlk.status()
    assert record.read(record.write(tmp_path)) == (rlk.decisions_hash(), ran)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 2}', '{"version": 1, "hash": "", "decisions": [{}]}'])
def test_a_file_that_is_no_record_is_an_error_that_names_it(tmp_path, text) -> None:
    (tmp_path / "decisions.json").write_text(text)
    with pytest.raises(FileError, match=r"decisions\.json"):
        record.read(tmp_path)


def test_a_run_that_is_not_there_is_a_clean_error(cli) -> None:
    result = cli("status", "nowhere")
    assert (result.exit_code, "nowhere: does not exist" in result.stderr) == (2, True)


def test_a_lock_pins_every_operator_and_holds(cli, tmp_path) -> None:
    assert cli("lock").exit_code == 0
    pins = lock.read(str(tmp_path / "here" / "rlkernel.lock"))
    assert set(pins) == {spec.id for spec in OPERATORS.values()}
    assert cli("lock", "--check").exit_code == 0


def test_a_lock_that_no_longer_holds_is_shown_as_a_difference(cli, tmp_path) -> None:
    path = tmp_path / "here" / "rlkernel.lock"
    cli("lock")
    path.write_text(path.read_text().replace(NOW, "rlkernel 0.0.9"))
    before = path.read_text()
    result = cli("lock", "--check")
    assert (result.exit_code, path.read_text()) == (1, before)
    assert "  - rlkernel_torch.logprob:logprob [rlkernel 0.0.9]" in result.stdout
    assert "  + rlkernel_torch.logprob:logprob [" + NOW + "]" in result.stdout
    found = answer(cli("lock", "--check", "--json"))
    assert (found["holds"], set(found["differences"])) == (False, {spec.id for spec in OPERATORS.values()})


def test_the_lock_in_force_does_not_keep_a_new_one_from_being_written(cli, tmp_path) -> None:
    path = tmp_path / "here" / "rlkernel.lock"
    cli("lock")
    good = path.read_text()
    path.write_text(good.replace(NOW, "rlkernel 0.0.9"))
    before = path.read_bytes()
    refused = cli("lock")
    assert (refused.exit_code, refused.stdout, path.read_bytes()) == (2, "", before)
    assert "exists and is not overwritten" in refused.stderr
    assert cli("lock", "--force").exit_code == 0
    assert cli("lock").exit_code == 0  # it is this very lock
    assert path.read_text() == good


def test_a_lock_can_pin_exactly_what_ran(cli, tmp_path) -> None:
    rlk.refresh()
    rlk.logprob(torch.zeros(2, 3), torch.tensor([0, 1]))
    record.write(tmp_path / "run")
    assert cli("lock", "--from", str(tmp_path / "run"), "-o", "run.lock").exit_code == 0
    assert set(lock.read(str(tmp_path / "here" / "run.lock"))) == {"logprob@1"}


def test_what_nothing_may_take_is_named_and_not_pinned(cli, plug, tmp_path) -> None:
    plug("acme", good("acme"))
    result = cli("lock", "--device", "cuda", "--arch", "sm90", "--no-grad", "--order", "acme")
    assert "not pinned, because nothing in the order takes them: " in result.stdout
    assert set(lock.read(str(tmp_path / "here" / "rlkernel.lock"))) == {"logprob@1"}


def test_a_lock_that_would_pin_nothing_is_not_written(cli, tmp_path) -> None:
    result = cli("lock", "--device", "cuda", "--arch", "sm90", "--order", "cuda")
    assert (result.exit_code, (tmp_path / "here" / "rlkernel.lock").exists()) == (1, False)


def test_checking_against_a_lock_that_is_not_there_is_a_clean_error(cli) -> None:
    result = cli("lock", "--check")
    assert (result.exit_code, "rlkernel.lock: does not exist" in result.stderr) == (2, True)
