"""Doors: how a part is found by the name that a setting gives it. Ours and a user's own come in the same way.

A name is one of three things, asked for in this order:

* `package.module:object`: that object, imported now;
* a name of the door's own table, which says `package.module:object` for each of ours;
* the name of an entry point of the group `kbrl_async.KIND` that an installed package brings.

A door's table is text, so that reading a configuration imports none of the parts it can name. A setting that takes a
name says so in its type, `Annotated[str, Meta(extra={"door": LOSSES})]`: it is then checked with the configuration, and
the reference lists the door's names.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

import msgspec

from kbrl_async.errors import UserError


class Door(msgspec.Struct, frozen=True):
    """The parts of one kind, such as losses: `kind` is the last word of its entry-point group."""

    kind: str
    ours: Mapping[str, str]
    """`package.module:object` by name."""

    @property
    def group(self) -> str:
        return f"kbrl_async.{self.kind}"

    def names(self) -> list[str]:
        """Ours, then those that installed packages bring."""
        return [*self.ours, *(point.name for point in entry_points(group=self.group) if point.name not in self.ours)]

    def load(self, name: str) -> Any:
        """The part itself.

        :raises UserError: nothing has that name, or what it names can't be imported.
        """
        return _imported(self._place(name), self.kind)

    def knows(self, name: str) -> bool:
        """Whether it is a name of this door; `package.module:object` is one, and is imported when it is used."""
        return ":" in name or name in self.names()

    def _place(self, name: str) -> str:
        if ":" in name:
            return name
        if name in self.ours:
            return self.ours[name]
        for point in entry_points(group=self.group):
            if point.name == name:
                return point.value
        known = self.names()
        near = difflib.get_close_matches(name, known, 1)
        cure = f"Did you mean {near[0]}?" if near else f"Choose among {', '.join(known)}, or package.module:object"
        raise UserError(f"none of the {self.kind.replace('_', ' ')} is called {name!r}", cure)


def _imported(place: str, kind: str) -> Any:
    module, _, name = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        cure = "Give package.module:object, importable from where this runs (PYTHONPATH)"
        raise UserError(f"{kind}: {place} can't be imported: {error}", cure) from error
    return found
