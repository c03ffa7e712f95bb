"""The pinned digests of the corpus, a file for each Python version a packaged model came from.

Owns writing and comparing them. Invariant: a pinned manifest is what a published model saw.
"""

import hashlib
import json
import platform
from dataclasses import dataclass
from pathlib import Path

from foretoken.training.python_text.stdlib import Corpus, load_corpus

MANIFESTS = Path(__file__).parent / "manifests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Paths that differ from the pinned manifest: `missing` here, `added` here, or `changed`."""

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


def corpus_digest() -> str:
    """SHA-256 of the digests of the training files, the first 16 hexadecimal digits."""
    joined = " ".join(f"{file.path}={file.digest}" for file in load_corpus().training)
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


def manifest_path(version: str | None = None) -> Path:
    """Where the manifest of a Python version (this interpreter's by default) is."""
    return MANIFESTS / f"python-{version or platform.python_version()}.json"


def write_manifest(corpus: Corpus) -> Path:
    """Pin `corpus` for this interpreter's version."""
    path = manifest_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(digests(corpus), indent=0, sort_keys=True) + "\n")
    return path


def difference(corpus: Corpus, version: str | None = None) -> Difference | None:
    """How `corpus` differs from the manifest of `version`; None where none is pinned."""
    path = manifest_path(version)
    if not path.exists():
        return None
    pinned, here = json.loads(path.read_text()), digests(corpus)
    return Difference(
        missing=tuple(sorted(pinned.keys() - here.keys())),
        added=tuple(sorted(here.keys() - pinned.keys())),
        changed=tuple(sorted(k for k in pinned.keys() & here.keys() if pinned[k] != here[k])),
    )
