"""An extension of griffe: the comments beside the fields of a class, where shapes are written, become its attributes.

A class then has one list of attributes in place of a heading for each.
"""

from __future__ import annotations

import ast
from typing import Any

import griffe
from public_names import described


class FieldComments(griffe.Extension):
    """Gives attributes what `public_names.described` finds, and lists them in the docstring of their class."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **_: Any) -> None:
        """Read the comment of one attribute; griffe calls this."""
        if attr.docstring is None and isinstance(node, ast.AnnAssign | ast.Assign):
            text = described(node, attr.lines_collection[attr.filepath])
            if text:
                attr.docstring = griffe.Docstring(text, parent=attr)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """List the attributes of every class of a package, once it is read whole; griffe calls this."""
        _list_attributes(pkg, set())


def _list_attributes(scope: griffe.Module | griffe.Class, seen: set[str]) -> None:
    seen.add(scope.path)
    for member in [m for m in scope.members.values() if not m.is_alias and m.path not in seen]:
        if member.is_class or member.is_module:
            _list_attributes(member, seen)
    if not isinstance(scope, griffe.Class) or scope.docstring is None:
        return
    fields = [m for m in scope.members.values() if m.is_attribute and not m.is_alias and "property" not in m.labels]
    listed = [
        griffe.DocstringAttribute(m.name, annotation=m.annotation, value=m.value, description=m.docstring.value)
        for m in fields
        if m.docstring is not None and not m.name.startswith("_")
    ]
    if listed:
        scope.docstring.parser = griffe.Parser.google
        scope.docstring.parsed.append(griffe.DocstringSectionAttributes(listed))
    for field in fields:
        del scope.members[field.name]
