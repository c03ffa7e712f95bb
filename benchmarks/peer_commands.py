"""Commands that prepare peers: pip, compilers and converters, heard only when they fail."""

import subprocess
from collections.abc import Sequence
from pathlib import Path


class PreparationError(Exception):
    """A command that prepares a peer failed; the message has the end of what it said."""


def run_quietly(command: Sequence[str]) -> None:
    """Run a command whose words matter only if it fails.

    Raises:
        PreparationError: it failed, or there is no such program.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise PreparationError(f"{Path(command[0]).name}: {error.strerror}") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        name = " ".join(Path(word).name for word in command[:4])
        raise PreparationError(f"`{name} ...` failed: {' / '.join(said)}"[:400])
