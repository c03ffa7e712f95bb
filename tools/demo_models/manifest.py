"""The pinned digests of the corpus: a file for each Python version that a packaged model came from,
and one for the packages.

Owns writing and comparing them. Invariant: a pinned manifest is what a published model saw.
"""

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.demo_models.packages import Package
from tools.python_text.stdlib import Corpus, load_corpus

MANIFESTS = Path(__file__).parent / "manifests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Names that differ from a pinned manifest: `missing` here, `added` here, or `changed`."""

    missing: tuple[str, ...]
    added: tuple[str, ...]
    changed: tuple[str, ...]

    def __str__(self) -> str:
        """One line for a log."""
        counts = (
            f"{len(self.missing)} missing, {len(self.added)} added, {len(self.changed)} changed"
        )
        return f"corpus against the pinned manifest: {counts}"


def digests(corpus: Corpus) -> dict[str, str]:
    """Path to digest of every file of both parts."""
    return {file.path: file.digest for file in (*corpus.training, *corpus.held_out)}


def package_records(packages: Iterable[Package]) -> dict[str, dict[str, Any]]:
    """Of each package its version, its licence, and what is read of it."""
    return {
        package.name: {
            "version": package.version,
            "licence": package.licence,
            "files": len(package.files),
            "characters": sum(len(file.text) for file in package.files),
            "digest": package.digest,
        }
        for package in packages
    }


def corpus_digest(packages: Iterable[Package] = ()) -> str:
    """SHA-256 of the digests of the training files, the first 16 hexadecimal digits."""
    parts = [f"{file.path}={file.digest}" for file in load_corpus().training]
    parts += [f"{package.name}={package.digest}" for package in packages]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def manifest_path(version: str | None = None) -> Path:
    """Where the manifest of a Python version (this interpreter's by default) is."""
    return MANIFESTS / f"python-{version or platform.python_version()}.json"


def packages_path() -> Path:
    """Where the manifest of the packages is."""
    return MANIFESTS / "packages.json"


def write_manifest(corpus: Corpus) -> Path:
    """Pin `corpus` for this interpreter's version."""
    return _write(manifest_path(), digests(corpus))


def write_packages(packages: Iterable[Package]) -> Path:
    """Pin `packages`."""
    return _write(packages_path(), package_records(packages))


def difference(corpus: Corpus, version: str | None = None) -> Difference | None:
    """How `corpus` differs from the manifest of `version`; None where none is pinned."""
    return _difference(manifest_path(version), digests(corpus))


def package_difference(packages: Iterable[Package]) -> Difference | None:
    """How `packages` differ from their manifest; None where none is pinned."""
    return _difference(packages_path(), package_records(packages))


def _write(path: Path, found: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
    return path


def _difference(path: Path, here: Mapping[str, Any]) -> Difference | None:
    if not path.exists():
        return None
    pinned = json.loads(path.read_text())
    return Difference(
        missing=tuple(sorted(pinned.keys() - here.keys())),
        added=tuple(sorted(here.keys() - pinned.keys())),
        changed=tuple(sorted(k for k in pinned.keys() & here.keys() if pinned[k] != here[k])),
    )
