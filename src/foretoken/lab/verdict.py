"""The one verdict of everything that judges: use it, leave it off, or measure more.

A word, one reason and the next command; the word is the exit code. Where the numbers cannot be true
the word is MEASURE MORE, and the reason says why. Bad input is no verdict: it ends with 2.
"""

from dataclasses import dataclass

USE_IT, LEAVE_IT_OFF, MEASURE_MORE = "USE IT", "LEAVE IT OFF", "MEASURE MORE"
EXIT_CODES = {USE_IT: 0, LEAVE_IT_OFF: 1, MEASURE_MORE: 4}
WORD_STYLES = {USE_IT: "bold green", LEAVE_IT_OFF: "bold red", MEASURE_MORE: "bold yellow"}
"""Of words on a terminal."""
EXITS = f"Exit code: 0: {USE_IT}; 1: {LEAVE_IT_OFF}; 4: {MEASURE_MORE}"
"""How the help of a command that judges begins to tell its exit codes."""
WORTH_IT = 1.3
"""Times as fast as without speculation; less is not worth a second model to run."""
FASTER = 1.0
"""What has to be exceeded where settings compete that are all there already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    word: str
    """USE_IT, LEAVE_IT_OFF or MEASURE_MORE."""
    reason: str
    command: str = ""
    """What to type next; empty where nothing is to be done."""
    scope: str = ""
    """Such as `for part of the traffic`."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.word]

    @property
    def style(self) -> str:
        return WORD_STYLES[self.word]

    @property
    def sentence(self) -> str:
        """`USE IT: 1.60x [1.57, 1.64] against 1.30x. Next: vllm serve ...`, on one line."""
        word = f"{self.word} {self.scope}" if self.scope else self.word
        said = f"{word}: {self.reason.rstrip('.')}."
        return f"{said} Next: {self.command}" if self.command else said


def judge_gain(low: float, high: float, limit: float = WORTH_IT) -> str:
    """The word for a gain by its whole interval: above the limit, below it, or neither."""
    if low >= limit and low > FASTER:
        return USE_IT
    return LEAVE_IT_OFF if high < limit else MEASURE_MORE
