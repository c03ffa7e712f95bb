"""Installed packages under permissive licences: further Python to learn from.

Owns which packages and which of their files are read; `tools.python_text.stdlib` has
the first text and what is held out. Invariants: no file shares a tenth of a held-out module's
distinctive lines, or has a tenth of its own from there; none has half of its lines from files
before it, so that what was copied from one package to another is read once.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from foretoken.errors import ConfigError
from tools.python_text.stdlib import (
    MOST_SHARED_LINES,
    Corpus,
    SourceFile,
    distinctive_lines,
    is_table,
    load_corpus,
)

PACKAGES = (
    "accelerate", "aiohttp", "aiosmtpd", "alembic", "annotated-types", "anyio", "apscheduler",
    "astropy", "asyncpg", "attrs", "babel", "beautifulsoup4", "black", "bokeh", "bottle",
    "cattrs", "celery", "charset-normalizer", "cherrypy", "click", "compressed-tensors",
    "construct", "contourpy", "coverage", "cryptography", "dask", "datasets", "distributed",
    "django", "djangorestframework", "docker", "einops", "execnet", "falcon", "fastapi",
    "filelock", "flake8", "flask", "flax", "fonttools", "fsspec", "geopandas",
    "google-api-core", "gradio", "graphql-core", "grimp", "gunicorn", "h11", "hatch",
    "hatchling", "httpcore", "httpie", "httpx", "huggingface-hub", "import-linter", "invoke",
    "ipython", "isort", "jax", "jedi", "jinja2", "jsonschema", "jupyter-client",
    "jupyter-server", "keras", "kombu", "lark", "llvmlite", "loguru", "luigi", "mako",
    "markdown-it-py", "marshmallow", "matplotlib", "mitmproxy", "mpmath", "msgspec", "mypy",
    "nbconvert", "nbformat", "networkx", "nltk", "nox", "numba", "numpy", "opentelemetry-sdk",
    "optuna", "packaging", "pandas", "parso", "peft", "pip", "pluggy", "poetry", "poetry-core",
    "pre-commit", "prometheus-client", "prompt-toolkit", "protobuf", "psutil", "pydantic",
    "pyflakes", "pymodbus", "pymongo", "pyparsing", "pyrate-limiter", "pytest", "pytest-cov",
    "pytest-xdist", "python-dateutil", "pytorch-lightning", "pyvista", "pyyaml", "pyzmq",
    "redis", "requests", "rich", "safetensors", "sanic", "schemathesis", "scikit-image",
    "scikit-learn", "scipy", "scrapy", "seaborn", "setuptools", "shapely", "sortedcontainers",
    "sphinx", "sqlalchemy", "starlette", "statsmodels", "streamlit", "sympy", "textual",
    "tomlkit", "torch", "tornado", "tox", "traitlets", "transformers", "trimesh", "trio",
    "truststore", "twisted", "typer", "typing-extensions", "typing-inspection", "urllib3",
    "uvicorn", "virtualenv", "websockets", "werkzeug", "xarray", "yapf",
)  # fmt: skip
PERMISSIVE = (
    "0BSD", "3-Clause BSD", "Apache", "BSD", "BSL-1.0", "CC0-1.0", "LLVM-exception", "MIT", "PSF",
    "Python Software Foundation", "Zlib",
)  # fmt: skip
"""How the names of the licences begin under which text is read."""
SKIPPED_FOLDERS = frozenset(
    "test tests testing test_utils _vendor _vendored vendored vendor extern externals".split()
)
MOST_CHARACTERS = 5_000_000
"""Of one package, so that the large ones are no more than a tenth of the text each."""
SHORTEST_TEXT = 400
MOST_SEEN_LINES = 0.5
GENERATED = re.compile(
    r"generated (?:by|from|using)|auto-?generated|automatically generated|do not edit|@generated",
    re.IGNORECASE,
)
GENERATED_WITHIN = 600
COMMENTS = re.compile(r"\A(?:#[^\n]*\n|\s*\n)+")
NOTICE = re.compile(r"licen[cs]e|copyright", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """What is read of one package."""

    name: str
    version: str
    licence: str
    files: tuple[SourceFile, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the paths and digests of its files, the first 16 hexadecimal digits."""
        joined = " ".join(f"{file.path}={file.digest}" for file in self.files)
        return hashlib.sha256(joined.encode()).hexdigest()[:16]


def licence_of(package: Distribution) -> str:
    """What its metadata says: the expression, else the classifiers, else the field's first line."""
    about = package.metadata.json
    kinds = [line.split(" :: ") for line in about.get("classifier", ())]
    named = [kind[-1] for kind in kinds if kind[0] == "License" and len(kind) > 2]
    field = str(about.get("license", "")).strip().partition("\n")[0]
    return str(about.get("license_expression") or " OR ".join(named) or field)


def is_permissive(licence: str) -> bool:
    """Whether each licence of an expression is one of PERMISSIVE."""
    parts = re.split(r"\s+(?:AND|OR|WITH)\s+", licence)
    return all(part.strip("() ").startswith(PERMISSIVE) for part in parts)


def without_notice(text: str) -> str:
    """`text` without the comments at its head, if those are about copyright or licence."""
    head = COMMENTS.match(text)
    return text[head.end() :] if head and NOTICE.search(head[0]) else text


def _sources(package: Distribution) -> Iterator[SourceFile]:
    """Its Python files that people wrote, in an order that is random but always the same."""
    paths = [path for path in package.files or () if path.suffix == ".py"]
    for path in sorted(paths, key=lambda path: hashlib.sha256(str(path).encode()).digest()):
        if ".." in path.parts or SKIPPED_FOLDERS.intersection(path.parts):
            continue
        try:
            text = path.read_text("utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        written = not GENERATED.search(text, 0, GENERATED_WITHIN)
        text = without_notice(text)
        if written and len(text) >= SHORTEST_TEXT and not is_table(text):
            yield SourceFile(path=path.as_posix(), text=text, is_test=False)


class _Filter:
    """What has been seen by now, and what must never be."""

    def __init__(self, corpus: Corpus) -> None:
        self._held = [distinctive_lines(file.text) for file in corpus.held_out]
        self._seen: set[str] = set()
        for file in corpus.training:
            self._seen |= distinctive_lines(file.text)
        self._secret = frozenset[str]().union(*self._held) - self._seen

    def passes(self, file: SourceFile) -> bool:
        """Whether the file is new and shares no text with a held-out one; it counts as seen."""
        lines = distinctive_lines(file.text)
        if len(lines & self._secret) > MOST_SHARED_LINES * len(lines):
            return False
        if any(len(lines & held) > MOST_SHARED_LINES * len(held) for held in self._held if held):
            return False
        if len(lines & self._seen) > MOST_SEEN_LINES * len(lines):
            return False
        self._seen |= lines
        return True


def _read_package(name: str, new: _Filter) -> Package | None:
    """What is read of a package; None: it is not installed."""
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return None
    licence = licence_of(package)
    if not is_permissive(licence):
        raise ConfigError(f"licence of {name}", licence, ", ".join(PERMISSIVE))
    files, room = [], MOST_CHARACTERS
    for file in _sources(package):
        if len(file.text) <= room and new.passes(file):
            files.append(file)
            room -= len(file.text)
    return Package(name=name, version=package.version, licence=licence, files=tuple(files))


@cache
def load_packages() -> tuple[Package, ...]:
    """Those of PACKAGES that are installed.

    Raises:
        ConfigError: the metadata of one names a licence that is not permissive.
    """
    new = _Filter(load_corpus())
    found = (_read_package(name, new) for name in PACKAGES)
    return tuple(package for package in found if package is not None)
