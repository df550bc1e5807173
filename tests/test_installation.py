"""Lines that install more of rlkernel are right where the user stands: in a clone its folders, else the extras."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from rlkernel import installation
from rlkernel.discover import FIRST_PARTY

CLONE = installation.clone  # the suite's own fixture puts another in its place


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Install rlkernel as pip does: with this direct_url.json, or none."""

    def told(content: object, *, clone: bool = True) -> Path:
        folder = tmp_path / "my clone"
        if clone:
            (folder / "backends" / "triton").mkdir(parents=True)
            (folder / "backends" / "triton" / "pyproject.toml").touch()
        info = tmp_path / "site" / "rlkernel-0.1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlkernel\nVersion: 0.1.0\n")
        if content is not None:
            (info / "direct_url.json").write_text(json.dumps(content) if not isinstance(content, str) else content)
        monkeypatch.setattr(installation, "distribution", lambda _: metadata.PathDistribution(info))
        monkeypatch.setattr(installation, "clone", CLONE)
        CLONE.cache_clear()
        installation._seen_from_here.cache_clear()
        return folder

    yield told
    CLONE.cache_clear()
    installation._seen_from_here.cache_clear()


def url(tmp_path: Path) -> str:
    return (tmp_path / "my clone").as_uri()


def test_a_released_version_has_extras(told) -> None:
    told(None)
    assert installation.clone() is None
    assert FIRST_PARTY["triton"].install == "pip install 'rlkernel[triton]'"
    assert installation.extras("cpu", "demo") == "pip install 'rlkernel[cpu,demo]'"


@pytest.mark.parametrize("editable", [{"editable": True}, {}])
def test_in_a_clone_the_lines_are_of_its_folders(told, tmp_path, monkeypatch, editable) -> None:
    folder = told({"url": url(tmp_path), "dir_info": editable})
    monkeypatch.chdir(folder)
    assert installation.clone() == folder
    assert FIRST_PARTY["triton"].install == "pip install -e backends/triton"
    assert FIRST_PARTY["cuda"].install == "pip install -e backends/triton -e backends/cuda"
    assert FIRST_PARTY["rocm"].install == "pip install -e backends/triton -e backends/rocm"
    assert installation.extras("cpu", "demo") == "pip install -e '.[cpu,demo]'"


def test_from_elsewhere_they_name_the_clone(told, tmp_path) -> None:
    folder = told({"url": url(tmp_path), "dir_info": {"editable": True}})
    assert FIRST_PARTY["triton"].install == f"pip install -e '{folder}/backends/triton'"


@pytest.mark.parametrize(
    "content",
    [
        {"url": "https://example.org/rlkernel-0.1.0.whl", "archive_info": {}},
        {"url": "https://example.org/rlkernel.git", "vcs_info": {"vcs": "git", "commit_id": "0"}},
        "no json",
    ],
)
def test_what_came_from_elsewhere_is_no_clone(told, content) -> None:
    told(content)
    assert installation.clone() is None


def test_a_folder_without_the_backends_is_no_clone(told, tmp_path) -> None:
    told({"url": url(tmp_path), "dir_info": {"editable": True}}, clone=False)
    assert installation.clone() is None


def test_without_a_distribution_there_is_no_clone(told, monkeypatch) -> None:
    told(None)

    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(installation, "distribution", absent)
    assert installation.clone() is None
