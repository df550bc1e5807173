"""The drawings of the Concepts pages are what docs/drawings.py makes, and each concept has one, with words for it."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from docs.drawings import FOLDER, drawn

ROOT = Path(__file__).parents[1]
CONCEPTS = re.search(r"- Concepts:\n((?: {6}.*\n)+)", (ROOT / "mkdocs.yml").read_text())[1]
PAGES = re.findall(r": (\S+\.md)", CONCEPTS)


def test_the_files_are_what_the_script_makes() -> None:
    assert {file.name: file.read_text() for file in FOLDER.glob("*.svg")} == drawn()


@pytest.mark.parametrize("name", drawn())
def test_a_drawing_is_text_in_fonts_of_the_reader(name) -> None:
    root = ET.fromstring(drawn()[name])  # our own
    kinds = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert {"text", "title"} <= kinds
    assert kinds & {"image", "use", "script", "foreignObject"} == set()
    assert re.findall(r"url\(|@import|@font-face|href", drawn()[name]) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_concept_has_a_drawing_and_words_for_who_does_not_see_it(page) -> None:
    found = re.findall(r"!\[(.*)\]\(assets/drawings/(\w+\.svg)\)", (ROOT / "docs" / page).read_text())
    assert [name for words, name in found if len(words.split()) >= 10 and name in drawn()]


def test_every_drawing_stands_on_a_page() -> None:
    shown = {name for page in PAGES for name in re.findall(r"drawings/(\w+\.svg)", (ROOT / "docs" / page).read_text())}
    assert shown == set(drawn())
