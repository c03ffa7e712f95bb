"""Started by torchrun: a tiny run of several ranks, cut in two and resumed; see test_loop.py."""

import sys
from pathlib import Path

from foretoken.training.loop import Trainer
from foretoken.training.ranks import joined
from tests.unit.training import tiny

CLIP_NORM = 0.05


def main(folder: Path, batch_tokens: int) -> None:
    """Four steps, then from the checkpoint to eight."""
    with joined() as ranks:
        for steps in (4, 8):
            settings = tiny.tiny_settings(
                max_steps=steps, batch_tokens=batch_tokens, clip_norm=CLIP_NORM, schedule="cosine"
            )
            trainer = Trainer(tiny.tiny_job(), settings, folder, ranks=ranks)
            done = trainer.run(lambda line: print(line, flush=True))
            print(f"rank {ranks.rank} of {ranks.size}: {done.step} {done.tokens}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
