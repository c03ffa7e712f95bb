"""The `foretoken` command: one file per subcommand, built on the public API.

Nothing here imports torch before a subcommand needs it, so that help is instant.
"""


def main() -> None:
    """Run the command line; the entry point of the installed script."""
    from foretoken.cli.app import app
    from foretoken.cli.output import checked_stdout

    with checked_stdout():
        app()
