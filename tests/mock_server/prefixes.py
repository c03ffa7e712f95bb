"""Which beginnings of prompts the mock has seen: the number of cached tokens that usage names.

A token is a word here, a block a few of them. Knows no texts, only hashes of them.
"""

from tests.mock_server.faults import hash_of

BLOCK = 8
"""Words of a block; only whole blocks are found again."""


class SeenPrefixes:
    """Blocks of prompts that were computed."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self.num_queries = self.num_hits = 0

    def enter(self, prompt: str, *, lost: bool = False) -> int:
        """How many words of the prompt were there; all of it is from now on. `lost`: none."""
        words = prompt.split()
        found, hits, block = 0, True, 0
        for end in range(BLOCK, len(words) + 1, BLOCK):
            block = hash_of(block, *words[end - BLOCK : end])
            hits = hits and block in self._known
            found += BLOCK * hits
            self._known.add(block)
        found = 0 if lost else min(found, len(words) - 1)
        self.num_queries += len(words)
        self.num_hits += found
        return found
