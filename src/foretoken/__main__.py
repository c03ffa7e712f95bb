"""`python -m foretoken` is the `foretoken` command."""

from foretoken.cli import main

if __name__ == "__main__":
    main()
