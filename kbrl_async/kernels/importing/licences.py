"""The licence of a checkout, for rows that say none themselves."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

_NAMES = ("LICENSE*", "LICENCE*", "COPYING*")
_READ = 4096
_KNOWN = (
    (r"Apache License\s+Version 2\.0", "Apache-2.0"),
    (r"MIT License|Permission is hereby granted, free of charge", "MIT"),
    (r"Redistribution and use(?s:.*)Neither the name", "BSD-3-Clause"),
    (r"Redistribution and use", "BSD-2-Clause"),
    (r"GNU AFFERO GENERAL PUBLIC LICENSE", "AGPL"),
    (r"GNU LESSER GENERAL PUBLIC LICENSE", "LGPL"),
    (r"GNU GENERAL PUBLIC LICENSE", "GPL"),
    (r"Mozilla Public License", "MPL"),
)


def license_of(place: Path) -> str:
    """By its own licence file, or one above it within the same git checkout; else empty. What is not known by its
    words is named by its first line.
    """
    place = place.resolve() if place.is_dir() else place.resolve().parent
    root = next((folder for folder in (place, *place.parents) if (folder / ".git").exists()), place)
    for folder in (place, *place.parents):
        for path in sorted(chain.from_iterable(folder.glob(name) for name in _NAMES)):
            if path.is_file():
                return _named(path.read_text(encoding="utf-8", errors="replace")[:_READ])
        if folder == root:
            break
    return ""


def _named(text: str) -> str:
    known = (name for words, name in _KNOWN if re.search(words, text))
    return next(known, next((line.strip()[:60] for line in text.splitlines() if line.strip()), ""))
