"""The types of the settings, which each wing's sections are made of: each holds its range."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

AtLeastOne = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
