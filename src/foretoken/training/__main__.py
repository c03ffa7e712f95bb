"""`python -m foretoken.training CONFIG [OUT [TARGET]]`: a run without the command line's needs."""

import sys
from functools import partial
from pathlib import Path

from foretoken.training.runs import train

if __name__ == "__main__":
    folders = [Path(name) for name in sys.argv[2:4]]
    out, target = (*folders, None, None)[:2]
    train(sys.argv[1], out, target, partial(print, flush=True))
