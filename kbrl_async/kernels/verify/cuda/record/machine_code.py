"""Whose kernel a launch is: from a function of the driver to the built artifact that holds its code."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import struct
from pathlib import Path

from kbrl_async.kernels.backends.launch import bundle, elf
from kbrl_async.kernels.cuda_driver import CudaError, Driver
from kbrl_async.kernels.verify.cuda.record.graph import NotRecordable


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class MachineCode:
    """What was built from one candidate. `paths`: where its artifacts lie."""

    def __init__(self, driver: Driver, paths: list[str]) -> None:
        self._driver = driver
        self._cubins: set[str] = set()
        self._objects: dict[str, bytes] = {}
        self._found: dict[str, str] = {}
        for path in paths:
            self._add(Path(path).read_bytes())

    def _add(self, content: bytes) -> None:
        try:
            self._cubins |= {digest(file) for file in bundle.unpack(content).values()}
        except ValueError:
            self._objects[digest(content)] = content

    def owner(self, module: int, name: str) -> str:
        """The digest of what holds kernel `name`, which the driver has loaded as `module`.

        :raises Refused: none of what was built does.
        """
        image = self._driver.images.get(module)
        if image is not None:
            found = digest(image)
            if found not in self._cubins:
                raise NotRecordable(f"{name[:80]} was compiled when it was called, not before")
            return found
        return self._by_name(name)

    def _by_name(self, name: str) -> str:
        if name not in self._found:
            self._found[name] = self._look_up(name)
        return self._found[name]

    def _look_up(self, name: str) -> str:
        owners = [key for key, modules in self._modules.items() if any(self._has(module, name) for module in modules)]
        if len(owners) > 1:
            raise NotRecordable(f"two extensions have a kernel {name[:80]}")
        if not owners:
            raise NotRecordable(f"{name[:80]} is no kernel that was built from the candidate's source")
        return owners[0]

    @functools.cached_property
    def _modules(self) -> dict[str, list[int]]:
        """Of each shared object, its code loaded once more as the replayer loads it."""
        found: dict[str, list[int]] = {}
        for key, content in self._objects.items():
            with contextlib.suppress(ValueError, struct.error, CudaError):
                found[key] = [self._driver.load_module(container) for container in elf.fatbins(content)]
        return found

    def _has(self, module: int, name: str) -> bool:
        try:
            return bool(self._driver.function(module, name))
        except CudaError:
            return False
