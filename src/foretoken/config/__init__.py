"""Everything a user may set, as frozen values, and the one place where every "auto" is decided.

Knows no torch and no model code. `reader` turns dictionaries into settings and says what is wrong
with them; `method_registry` is the table of drafting methods, which everyone else asks. Unknown keys are
errors that list the known ones; keys of vLLM that Foretoken understands but has not built are
accepted at their neutral value.
"""

from foretoken.config.drafter import DrafterConfig
from foretoken.config.engine import EngineConfig
from foretoken.config.resolve import ResolvedConfig, resolve
from foretoken.config.speculative import SpeculativeConfig

__all__ = ["DrafterConfig", "EngineConfig", "ResolvedConfig", "SpeculativeConfig", "resolve"]
