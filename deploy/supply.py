"""What the project is made of and made into: pinned versions, licences, known holes, reproducible archives.

    python deploy/supply.py constraints | licences        from what is installed beside this interpreter
    python deploy/supply.py audit PATH/TO/pip-audit [--unreachable-ok]     known vulnerabilities of the pinned versions
    python deploy/supply.py dist OUTPUT                   sdist and wheel, built twice: the bytes must agree

`make constraints licences sbom audit dist` runs them. Nothing of the project is imported; only `audit` needs a network.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints-cpu.txt"
LICENCES = ROOT / "docs" / "licences.md"
PINNED_EXTRAS = ("cuda-build", "dev", "triton")
"""Extras that are installed and tested on processors; the others (otel, retrieval, vllm) bring their own pins."""
ZIP_BEGINS = 315532800
"""1980-01-01: a wheel is a zip file, which knows no earlier time."""
CONSTRAINTS_HEAD = """\
# Every package that `pip install -e '.[dev]'` brings on Linux without a GPU, at the version that the tests ran with.
# Made by `make constraints`; licences of the same packages: docs/licences.md.
"""
LICENCES_HEAD = """\
# Licences

Every package that a host without a GPU installs, development tools included, with the licence that its own metadata
state. Made by `make licences` for the versions in [constraints-cpu.txt](../constraints-cpu.txt); nothing of these
packages is part of this repository. `nvidia-cuda-*` and `nvidia-nvvm` are proprietary, and needed only to build CUDA
candidates. `make sbom` writes the same as CycloneDX.

| package | version | licence |
|---|---|---|
"""


def project() -> dict[str, list[str]]:
    """Requirements of the project by extra; "" is what everybody gets."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": table["dependencies"], **table["optional-dependencies"]}


def closure() -> dict[str, metadata.Distribution]:
    """Direct and transitive requirements as they are installed here, by canonical name.

    :raises SystemExit: a direct one is not installed.
    """
    wanted = [Requirement(text) for extra in ("", *PINNED_EXTRAS) for text in project()[extra]]
    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        extras = ["", *sorted(requirement.extras)]
        if not _applies(requirement, [""]) or all((name, extra) in seen for extra in extras):
            continue
        seen |= {(name, extra) for extra in extras}
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise SystemExit(f"error: {name} is not installed. Run: make test") from None
        wanted += [r for r in map(Requirement, found[name].requires or []) if _applies(r, extras)]
    return dict(sorted(found.items()))


def _applies(requirement: Requirement, extras: Sequence[str]) -> bool:
    """Whether its marker holds here, for any of the extras that were asked for."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({**default_environment(), "extra": extra}) for extra in extras)


def pins() -> dict[str, str]:
    """Version by canonical name, as pinned."""
    lines = [line.partition("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines()]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def constraints() -> str:
    """The file's content. A local version (`2.13.0+cpu`) is left out: it names a build, which the index chooses."""
    return CONSTRAINTS_HEAD + "".join(f"{name}=={d.version.partition('+')[0]}\n" for name, d in closure().items())


def licences() -> str:
    rows = (f"| {name} | {d.version.partition('+')[0]} | {licence(d)} |\n" for name, d in closure().items())
    return LICENCES_HEAD + "".join(rows)


def licence(distribution: metadata.Distribution) -> str:
    """As the package says it: an SPDX expression, else its classifiers, else the first line of its licence field."""
    data = distribution.metadata
    if expression := data.get("License-Expression"):
        return expression
    classified = [c.rpartition(" :: ")[2] for c in data.get_all("Classifier", []) if c.startswith("License :: ")]
    named = [name for name in classified if name != "OSI Approved"]
    first = next(iter((data.get("License") or "").strip().splitlines()), "")
    return (", ".join(named) or first or "not stated").replace("|", "/")[:80]


# ── known vulnerabilities ─────────────────────────────────────────────────────────────────────────────────────────


SERVICES = ("pypi", "osv")
"""Asked in turn, until one knows the packages."""
NOT_AUDITED = 3


def audit(tool: str, *, unreachable_ok: bool = False) -> int:
    """0: no hole is known; 1: there are some; `NOT_AUDITED`: nobody could be asked, which only a flag makes a 0."""
    reasons = []
    for service in SERVICES:
        packages, reason = _asked(tool, service)
        if packages:
            return judged(packages)
        reasons.append(f"{service}: {reason}")
    print(
        f"NOT AUDITED: no advisory service could be asked ({'; '.join(reasons)}). Nothing is known of these versions."
    )
    return 0 if unreachable_ok else NOT_AUDITED


def _asked(tool: str, service: str) -> tuple[list[dict[str, Any]], str]:
    """What a service says of each package; nothing, and why, where it knows none."""
    command = [tool, "--requirement", str(CONSTRAINTS), "--no-deps", "--disable-pip", "--format", "json"]
    command += ["--vulnerability-service", service, "--timeout", "15"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (json.JSONDecodeError, KeyError):
        return [], next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}")
    if all("skip_reason" in package for package in packages):
        return [], "knows none of these packages: is it a mirror without advisories?"
    return packages, ""


def judged(packages: Sequence[dict[str, Any]]) -> int:
    """Print what the service said; a package that it does not know is no audited one."""
    skipped = [p["name"] for p in packages if "skip_reason" in p]
    holes = [(p["name"], p["version"], hole) for p in packages for hole in p.get("vulns", [])]
    for name, version, hole in holes:
        fixed = ", ".join(hole.get("fix_versions", [])) or "none yet"
        print(f"{name} {version}: {hole['id']}, fixed in {fixed}")
    unknown = f"; not known there: {', '.join(skipped)}" if skipped else ""
    print(f"{len(packages) - len(skipped)} packages audited, {len(holes)} known vulnerabilities{unknown}")
    return 1 if holes else 0


# ── reproducible archives ─────────────────────────────────────────────────────────────────────────────────────────


def dist(output: Path) -> int:
    """Build twice, in two folders; copy the archives to `output` where both came out the same."""
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or _commit_time())
    hashes: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("one", "two"):
            source, built = Path(scratch, name, "source"), Path(scratch, name, "dist")
            _copy_sources(source)
            _build(source, built, max(epoch, ZIP_BEGINS))
            hashes.append({p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(built.iterdir())})
        for name, digest in hashes[0].items():
            print(f"{digest}  {name}")
        if hashes[0] != hashes[1]:
            print("error: the second build came out different", file=sys.stderr)
            return 1
        output.mkdir(parents=True, exist_ok=True)
        for path in built.iterdir():
            shutil.copy2(path, output)
    print(f"built twice with SOURCE_DATE_EPOCH={epoch}, the same bytes; they are in {output}")
    return 0


def _commit_time() -> int:
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else ZIP_BEGINS


def _copy_sources(target: Path) -> None:
    """What git knows of and does not ignore, so that what lies about does not get in."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def _build(source: Path, built: Path, epoch: int) -> None:
    built.mkdir()
    # setuptools puts words of its own into sys.argv
    code = "import sys; to = sys.argv[1]; from setuptools import build_meta as b; b.build_sdist(to); b.build_wheel(to)"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"}
    subprocess.run(
        [sys.executable, "-c", code, str(built)], cwd=source, env=environment, check=True, capture_output=True
    )
    for archive in built.glob("*.tar.gz"):
        archive.write_bytes(normalised(archive.read_bytes(), epoch))


def normalised(archive: bytes, epoch: int) -> bytes:
    """A tar.gz with its members in order, and without owners, times and modes of this machine."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(archive)) as before, tarfile.open(fileobj=plain, mode="w") as after:
        for member in sorted(before.getmembers(), key=lambda member: member.name):
            content = before.extractfile(member) if member.isfile() else None
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            after.addfile(member, content)
    return gzip.compress(plain.getvalue(), mtime=epoch)


def main(words: Sequence[str]) -> int:
    match list(words):
        case ["constraints"]:
            CONSTRAINTS.write_text(constraints())
        case ["licences"]:
            LICENCES.write_text(licences())
        case ["audit", tool, *flags] if flags in ([], ["--unreachable-ok"]):
            return audit(tool, unreachable_ok=bool(flags))
        case ["dist", output]:
            return dist(Path(output).resolve())
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
