"""The trusted side of a folder that a confined process wrote into: whatever lies there may be a trap.

A result may be a link to a file of the host, a FIFO that blocks its reader, a device, sparse gigabytes, or a thousand
folders deep. So nothing is opened through a link, nothing is waited for, every read has a size, and a folder that grows
too large ends its writer.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
from pathlib import Path


class BadOutput(ValueError):  # noqa: N818 - reads as what it is: the child's fault, not an error of ours
    """What lies there is not an ordinary file of an acceptable size."""


def read_output(folder: Path, name: str, max_bytes: int) -> bytes:
    """The file `name` directly in `folder`. `BadOutput` where it is missing, no ordinary file, or too large."""
    if os.sep in name or name in ("", ".", ".."):
        raise BadOutput(f"{name!r} is no plain file name")
    try:
        fd = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BadOutput(f"{name} can't be opened: {error.strerror}") from None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise BadOutput(f"{name} is no ordinary file")
        data = b"" if status.st_size > max_bytes else file.read(max_bytes + 1)
    if status.st_size > max_bytes or len(data) > max_bytes:
        raise BadOutput(f"{name} is larger than {max_bytes} bytes")
    return data


def is_over(folder: Path, max_bytes: int, max_entries: int) -> bool:
    """Whether a folder holds more than it may. Looks at no more entries than it needs to know."""
    pending, entries, size = [str(folder)], 0, 0
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as found:
            for entry in found:
                entries += 1
                with contextlib.suppress(OSError):
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                if entries > max_entries or size > max_bytes:
                    return True
    return False


def remove_tree(folder: Path) -> None:
    """Remove all of it, links as links, however deep; what can't be removed is left."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", "--one-file-system", "--", str(folder)], check=False, timeout=60)
