"""Which policy versions an engine holds, who still writes by each, and which adapters may go. Pure.

::

    serve(v17) ─▶ newest ─ acquire ─▶ a rollout holds v17 ─ release ─▶ v16, held by nobody and not the newest: removed

Invariants
* A rollout keeps the version that it acquired, and its adapter stays as long as it is held.
* Every adapter of every version has an id of its own, never used again: nothing of an old one can be found by it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kbrl_async.sampling.transformers.versions import adapter_name


class Served(msgspec.Struct, frozen=True):
    """One adapter of one version, as the engine knows it. `lora_id` 0: the weights themselves."""

    version: int
    role: str = ""
    lora_id: int = 0
    folder: str = ""

    @property
    def name(self) -> str:
        return adapter_name(self.version, self.role)


class LiveVersions:
    """The versions in the engine, oldest first."""

    def __init__(self) -> None:
        self._last_id = 0
        self._served: dict[int, dict[str, Served]] = {}
        self._holders: dict[int, int] = {}

    @property
    def newest(self) -> int:
        """The version that new rollouts get; −1 before the first."""
        return max(self._served, default=-1)

    @property
    def live(self) -> list[int]:
        return sorted(self._served)

    def name_adapters(self, version: int, folders: Sequence[tuple[str, str]]) -> list[Served]:
        """Names and ids for (role, folder) of a version that is about to be loaded."""
        made = []
        for role, folder in folders:
            self._last_id += 1
            made.append(Served(version, role, self._last_id, folder))
        return made

    def serve(self, adapters: Sequence[Served]) -> None:
        """New rollouts get these from now on: proven, and all of one version."""
        version = adapters[0].version
        assert version > self.newest, "versions only rise"
        self._served[version] = {one.role: one for one in adapters}
        self._holders[version] = 0

    def acquire(self, role: str = "") -> Served:
        """The newest version's adapter for `role`, its main one where it has none of that name."""
        found = self._served[self.newest]
        self._holders[self.newest] += 1
        return found.get(role) or found[""]

    def release(self, served: Served) -> None:
        self._holders[served.version] -= 1
        assert self._holders[served.version] >= 0, "released once for each time it was acquired"

    def holders(self, version: int) -> int:
        return self._holders.get(version, 0)

    def retire(self) -> list[Served]:
        """Forgets versions that nobody writes by and that are not the newest; the adapters to remove."""
        ended = [v for v, count in self._holders.items() if count == 0 and v != self.newest]
        gone: list[Served] = []
        for version in ended:
            gone += self._served.pop(version).values()
            del self._holders[version]
        return gone
