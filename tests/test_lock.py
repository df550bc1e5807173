"""rlkernel.lock pins what may run, for every process of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import rlkernel as rlk
from rlkernel import lock
from rlkernel_core.decision import Pin
from rlkernel_core.errors import FileError, LockError
from tests.implementations import acme

pytestmark = pytest.mark.usefixtures("fresh")

LOGITS, IDS = torch.zeros(2, 3), torch.tensor([0, 1])


def test_a_lock_of_what_ran_lets_it_run_again(tmp_path) -> None:
    rlk.logprob(LOGITS, IDS)
    path = tmp_path / "rlkernel.lock"
    lock.write(path, [r.decision for r in rlk.status()])
    with rlk.use(lock=str(path)):
        rlk.logprob(LOGITS, IDS)
    assert lock.read(str(path)) == {"logprob@1": frozenset({Pin("rlkernel_torch.logprob:logprob", "rlkernel 0.1.0")})}


def test_what_is_not_pinned_is_an_error_that_says_what_is(tmp_path) -> None:
    rlk.logprob(LOGITS, IDS)
    path = tmp_path / "rlkernel.lock"
    lock.write(path, [r.decision for r in rlk.status()])
    with rlk.registered(acme()), rlk.use("acme", lock=str(path)):
        with pytest.raises(LockError, match="pins rlkernel_torch.logprob:logprob"):
            rlk.logprob(LOGITS, IDS)


def test_another_version_is_not_what_was_pinned(tmp_path) -> None:
    path = tmp_path / "rlkernel.lock"
    pins = {"backend": "torch", "target": "rlkernel_torch.logprob:logprob", "provider": "rlkernel 0.0.9"}
    path.write_text(json.dumps({"version": 1, "operators": {"logprob@1": [pins]}}))
    with rlk.use(lock=str(path)), pytest.raises(LockError, match=r"rlkernel 0\.0\.9"):
        rlk.logprob(LOGITS, IDS)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"version": 2, "operators": {}}', '{"version": 1, "operators": {"a": [{}]}}']
)
def test_a_file_that_is_no_lock_is_an_error_that_names_it(tmp_path, text) -> None:
    path = tmp_path / "odd.lock"
    path.write_text(text)
    with pytest.raises(FileError, match=r"odd\.lock"):
        lock.read(str(path))


def test_a_lock_that_is_not_there_is_an_error() -> None:
    with rlk.use(lock="/nowhere/rlkernel.lock"), pytest.raises(FileError, match="does not exist"):
        rlk.logprob(LOGITS, IDS)


def test_a_lock_that_was_written_again_is_read_again(tmp_path) -> None:
    path = tmp_path / "rlkernel.lock"
    for provider in ("rlkernel 1.0.0", "rlkernel 2.0.0"):
        pins = [{"backend": "torch", "target": "a:b", "provider": provider}]
        path.write_text(json.dumps({"version": 1, "operators": {"logprob@1": pins}}))
        os.utime(path, (1, 1))  # as quickly as the clock of the file system ticks
        assert lock.read(str(path)) == {"logprob@1": frozenset({Pin("a:b", provider)})}


def test_a_lock_that_may_not_be_read_is_an_error_that_names_it(tmp_path, monkeypatch) -> None:
    path = tmp_path / "closed.lock"
    path.write_text("{}")

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(FileError, match=r"closed\.lock.*Permission denied"):
        lock.read(str(path))


def test_a_folder_is_no_lock(tmp_path) -> None:
    with pytest.raises(FileError, match="is no file"):
        lock.read(str(tmp_path))


def test_a_lock_is_found_from_where_it_was_said(tmp_path, monkeypatch) -> None:
    rlk.logprob(LOGITS, IDS)
    lock.write(tmp_path / "run.lock", [r.decision for r in rlk.status()])
    monkeypatch.chdir(tmp_path)
    chosen = rlk.use(lock="run.lock")
    monkeypatch.chdir("/")
    with chosen:
        rlk.logprob(LOGITS, IDS)
