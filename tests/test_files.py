"""Files are written whole or not at all, whatever ends the writing, and read within bounds."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlkernel_core import files
from rlkernel_core.documents import DEPTH, TOML_MOST, json_of, read_json, read_lines, read_toml
from rlkernel_core.environment import path_in, variable
from rlkernel_core.errors import ConfigError, FileError
from tests.full_disk import full_disk

OLD = "what was there before\n"
REMEDY = "Write it anew."


@pytest.fixture
def old(tmp_path) -> Path:
    path = tmp_path / "file.json"
    path.write_text(OLD)
    return path


def alone(path: Path) -> bool:
    """The folder holds this file and nothing else: no draft."""
    return list(path.parent.iterdir()) == [path]


def test_a_file_is_written_whole(old) -> None:
    files.write_json(old, {"a": [1]})
    assert (json.loads(old.read_text()), alone(old)) == ({"a": [1]}, True)


@pytest.mark.parametrize("size", [100, 1 << 20])
def test_a_full_disk_leaves_the_old_file(old, size) -> None:
    with full_disk(50), pytest.raises(FileError, match=r"file\.json: cannot be written: File too large"):
        files.write_bytes(old, bytes(size))
    assert (old.read_text(), alone(old)) == (OLD, True)


def test_a_disk_without_room_for_the_end_leaves_the_old_file(old) -> None:
    with pytest.raises(FileError, match="No space left on device") as caught, files.whole(old) as draft:
        draft.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert (old.read_text(), alone(old)) == (OLD, True)
    assert "that has room" in caught.value.remedy


def test_what_fails_while_writing_is_what_is_raised(old) -> None:
    with pytest.raises(KeyError, match="slip"), files.whole(old) as draft:
        draft.write_text("half")
        raise KeyError("slip")
    assert (old.read_text(), alone(old)) == (OLD, True)


@pytest.mark.parametrize("name", ["absent/file", "file.json/file", "n" * 300, "a\0b"])
def test_a_place_where_no_file_can_be_is_named(old, name) -> None:
    with pytest.raises(FileError, match="cannot be written"):
        files.write_text(old.parent / name, "x")
    assert alone(old)


def test_a_folder_in_place_of_the_file_is_named_and_kept(tmp_path) -> None:
    (tmp_path / "here").mkdir()
    with pytest.raises(FileError, match="here: is a folder"):
        files.write_text(tmp_path / "here", "x")
    assert alone(tmp_path / "here")


def test_the_mode_of_a_file_is_kept_and_that_of_a_new_one_is_as_usual(old) -> None:
    old.chmod(0o640)
    files.write_text(old, "new")
    usual, new = old.parent / "usual", old.parent / "new"
    usual.touch()
    files.write_text(new, "new")
    assert (old.stat().st_mode & 0o777, new.stat().st_mode) == (0o640, usual.stat().st_mode)


def test_of_a_link_the_target_is_replaced(old) -> None:
    link = old.parent / "link"
    link.symlink_to(old)
    files.write_text(link, "new")
    assert (link.is_symlink(), old.read_text()) == (True, "new")


def test_what_is_no_file_is_written_to_as_it_is() -> None:
    files.write_text("/dev/null", "x")
    assert Path("/dev/null").is_char_device()


def test_a_name_of_the_longest_kind_can_be_written(tmp_path) -> None:
    path = tmp_path / ("n" * 255)
    files.write_text(path, "x")
    assert (path.read_text(), alone(path)) == ("x", True)


def killed(code: str, folder: Path) -> None:
    """Run code that says when it is in the middle, and end it there without notice."""
    source = (
        f"import sys, time\nfrom pathlib import Path\nfrom rlkernel_core import files\nfolder = Path({str(folder)!r})\n"
    )
    with subprocess.Popen([sys.executable, "-c", source + code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"half\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL


def test_a_process_that_is_killed_leaves_the_old_file(old) -> None:
    killed(
        "with files.whole(folder / 'file.json') as draft, draft.open('w') as file:\n"
        "    file.write('x' * 9999); file.flush(); print('half', flush=True); time.sleep(60)\n",
        old.parent,
    )
    assert old.read_text() == OLD
    assert [p.suffix for p in old.parent.iterdir() if p != old] == [".part"]  # nobody takes it for the file


def test_a_process_that_is_killed_leaves_no_folder(tmp_path) -> None:
    killed(
        "with files.whole_folder(folder / 'made') as draft:\n"
        "    (draft / 'a').write_text('x'); print('half', flush=True); time.sleep(60)\n",
        tmp_path,
    )
    assert not (tmp_path / "made").exists()
    with files.whole_folder(tmp_path / "made") as draft:
        (draft / "a").write_text("y")
    assert (tmp_path / "made" / "a").read_text() == "y"


def test_a_folder_appears_whole_or_not_at_all(tmp_path) -> None:
    with pytest.raises(FileError, match="cannot be written: File too large"):
        with files.whole_folder(tmp_path / "made") as draft:
            (draft / "a").write_text("x")
            with full_disk(10):
                (draft / "b").write_text("x" * 1000)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "made").mkdir()
    with files.whole_folder(tmp_path / "made") as draft:
        (draft / "a").write_text("x")
    assert [p.name for p in (tmp_path / "made").iterdir()] == ["a"]
    with pytest.raises(FileError, match="made: exists already"), files.whole_folder(tmp_path / "made"):
        pass


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/../../x", "/etc/passwd", "link/x", "out", "loop", "a\0b"])
def test_a_name_that_leads_out_of_its_folder_is_refused(tmp_path, name) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    (folder / "out").symlink_to("/etc/passwd")
    (folder / "loop").symlink_to(folder / "loop")
    with pytest.raises(FileError, match=r"index\.json: names .*, which is no file in"):
        files.inside(folder, name, "index.json", REMEDY)


def test_a_name_within_its_folder_is_taken_links_of_a_named_other_too(tmp_path) -> None:
    folder, blobs = tmp_path / "folder", tmp_path / "blobs"
    folder.mkdir()
    blobs.mkdir()
    (folder / "linked").symlink_to(blobs / "x")
    assert files.inside(folder, "a/b", "i", REMEDY) == folder / "a" / "b"
    assert files.inside(folder, "linked", "i", REMEDY, also=blobs) == folder / "linked"


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("{", "line 1 column 2", "is no JSON"),
        ('{"a": 1,\n "b": }', "line 2 column 7", "is no JSON"),
        ("[" * 100_000, "", f"nests more than {DEPTH}"),
        ('{"a":' * 100_000, "", f"nests more than {DEPTH}"),
        ("9" * 5000, "", "is no JSON"),
        ('"\\ud800"', "", "is no JSON"),
        ('{"a": [{"b": 1}, {"b": "x"}]}', "a[1].b", "must be an integer of 64 bits; got 'x'"),
        ('{"a": [{"b": 1}, {}]}', "a[1]", "has no 'b'"),
        ('{"a": [{"b": 1}, 3]}', "a[1]", "must be an object; got 3"),
        ('{"a": [{"b": true}]}', "a[0].b", "must be an integer of 64 bits; got True"),
        ('{"a": [{"b": 99999999999999999999}]}', "a[0].b", "must be an integer of 64 bits"),
        ("[]", "", "must be an object; got []"),
    ],
)
def test_a_document_that_is_damaged_is_named_with_the_place(tmp_path, text, place, problem) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(FileError) as caught:
        read_json(tmp_path / "x.json", {"a": [{"b": int}]}, REMEDY)
    error = caught.value
    assert (error.file, error.place, error.remedy) == (str(tmp_path / "x.json"), place, REMEDY)
    assert problem in error.problem


def test_brackets_in_texts_nest_nothing() -> None:
    assert json_of(json.dumps("[" * 1000 + '\\"{'), str, "x", REMEDY) == "[" * 1000 + '\\"{'


def test_a_damaged_line_is_named_with_its_number(tmp_path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n\n{"a": \n')
    with pytest.raises(FileError, match="line 3 column"):
        read_lines(tmp_path / "x.jsonl", {"a": int}, REMEDY)


def test_what_is_too_large_is_not_read(tmp_path) -> None:
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(FileError, match=f"larger than the {files.MOST} bytes"):
        read_json(tmp_path / "x.json", object, REMEDY)
    with pytest.raises(FileError, match=f"larger than the {TOML_MOST} bytes"):
        read_toml(tmp_path / "x.json", object, REMEDY)


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 5000, ".".join("a" * 500) + " = 1", "a = 1\na = 2", "a = " + "9" * 5000]
)
def test_a_toml_that_is_damaged_or_too_deep_is_named(tmp_path, text) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(FileError, match=r"x\.toml"):
        read_toml(tmp_path / "x.toml", {str: object}, REMEDY)


@pytest.mark.parametrize(
    ("name", "said"), [("none", "does not exist"), (".", "is no file"), ("a\0b", "null"), ("n" * 300, "too long")]
)
def test_a_path_that_leads_to_no_file_is_named(tmp_path, name, said) -> None:
    with pytest.raises(FileError, match=said):
        files.read_bytes(tmp_path / name, REMEDY)


def test_a_variable_that_is_no_text_is_named() -> None:
    with pytest.raises(ConfigError, match="RLKERNEL_ORDER: .*is not UTF-8"):
        variable("RLKERNEL_ORDER", {"RLKERNEL_ORDER": "\udcff"})
    assert (variable("A", {"A": ""}), variable("A", {}), path_in("A", {"A": "/x\udcff"})) == (
        None,
        None,
        Path("/x\udcff"),
    )
