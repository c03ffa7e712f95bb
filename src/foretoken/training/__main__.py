"""`python -m foretoken.training CONFIG [OUT]`: a run without the command line's dependencies."""

import sys
from pathlib import Path

from foretoken.training.lm import train_language_model
from foretoken.training.settings import read_settings

settings = read_settings(sys.argv[1])
out = Path(sys.argv[2]) if len(sys.argv) > 2 else None
train_language_model(settings, out, lambda line: print(line, flush=True))
