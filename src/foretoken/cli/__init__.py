"""The `foretoken` command: one file per subcommand, built on the public API.

Nothing here imports torch before a subcommand needs it, so that help is instant.
"""

import gc

STARTING = 50_000
"""New objects after which Python's collector looks at them: a start makes many and drops few."""


def main() -> None:
    """Run the command line; the entry point of the installed script."""
    gc.set_threshold(STARTING)
    from foretoken.cli.app import app
    from foretoken.cli.output import checked_stdout

    with checked_stdout():
        app()
