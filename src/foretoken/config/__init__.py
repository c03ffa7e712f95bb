"""Everything a user may set, as frozen values, and the one place where every "auto" is decided.

Knows no torch and no model code. Unknown keys are errors that list the known ones; keys of vLLM
that Foretoken understands but has not built are accepted at their neutral value.
"""

from foretoken.config.engine import EngineConfig
from foretoken.config.resolve import ResolvedConfig, resolve
from foretoken.config.speculative import SpeculativeConfig

__all__ = ["EngineConfig", "ResolvedConfig", "SpeculativeConfig", "resolve"]
