"""What a run shows while it goes on: a bar on a terminal, lines elsewhere.

Owns the wording. It knows neither models nor data. Invariant: what was measured last stays in
sight, so that a head's accuracy by position is beside its loss.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO

from tqdm import tqdm

LINE_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a run is after a step."""

    step: int
    share: float
    """How much of the budget is used up, 0..1."""
    tokens: int
    seconds: float
    """Time of work, all starts of the run together."""
    loss: float
    """A running mean, in nats."""
    speed: float
    """Tokens a second."""
    scale: float
    """The schedule's factor on the peak rates."""


class Display:
    """A bar on `terminal`, or a line to `report` after the first step and every LINE_STEPS."""

    def __init__(
        self, report: Callable[[str], None], name: str, terminal: IO[str] | None = None
    ) -> None:
        self._report = report
        self._bar = None
        if terminal is not None:
            form = "{l_bar}{bar}| step {n_fmt} [{elapsed}<{remaining}{postfix}]"
            self._bar = tqdm(total=1, desc=name, file=terminal, bar_format=form, dynamic_ncols=True)
        self._measured = ""

    def step(self, now: Standing) -> None:
        """Show where the run is."""
        if self._bar is None:
            if now.step % LINE_STEPS == 0 or now.step == 1:
                self._report(_line(now))
            return
        if self._bar.n == 0:
            self._bar.initial = now.step - 1
        self._bar.total = max(now.step, round(now.step / max(now.share, 1e-9)))
        self._bar.n = now.step
        found = f"loss {now.loss:.3f}{self._measured}, {now.speed:.0f} tokens/s"
        self._bar.set_postfix_str(found, refresh=False)
        self._bar.refresh()

    def measured(self, found: Mapping[str, float]) -> None:
        """Show held-out measurements, and keep them beside the bar."""
        self._measured = f", {brief(found)}"
        self.note(f"  held out: {' '.join(f'{name} {value:.4f}' for name, value in found.items())}")

    def note(self, text: str) -> None:
        """A line of its own, above the bar if there is one."""
        if self._bar is None:
            self._report(text)
            return
        with tqdm.external_write_mode(file=sys.stdout):
            self._report(text)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def terminal_of(stream: IO[str]) -> IO[str] | None:
    """`stream` if a person reads it: a terminal that knows its size, as a bar needs it."""
    if not stream.isatty():
        return None
    size = os.get_terminal_size(stream.fileno())
    return stream if size.columns > 0 and size.lines > 0 else None


def brief(found: Mapping[str, float]) -> str:
    """Measurements in a few words: for a head, accuracy by position and the length it gives."""
    depths = [value for name, value in found.items() if name.startswith("depth_")]
    if not depths:
        return ", ".join(f"{name} {value:.3f}" for name, value in found.items())
    shares = " ".join(f"{100 * value:.0f}" for value in depths)
    return f"right by position {shares}%, accepts {found['tokens_a_step']:.2f} a step"


def _line(now: Standing) -> str:
    left = now.seconds * (1 - now.share) / max(now.share, 1e-9) / 60
    return (
        f"step {now.step} loss {now.loss:.3f} tokens {now.tokens / 1e6:.2f}M "
        f"{now.speed:.0f} tokens/s rate x{now.scale:.2f} left {left:.0f} min"
    )
