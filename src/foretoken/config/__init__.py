"""Everything a user may set, as frozen values.

Settings pass once: given, translated into our words (`translate`), split by drafter
(`speculative`), read by annotations (`reader`), checked (each class itself). `method_registry` is
the table of drafting methods; `resolve` decides each `auto` that needs the model and the machine,
`auto` who drafts where nobody is named. Knows no torch and no model code. Unknown keys are errors
that list the known ones; keys of vLLM whose part is not built are accepted at their neutral value.
"""

from foretoken.config.drafter import DrafterConfig
from foretoken.config.engine import EngineConfig
from foretoken.config.resolve import ResolvedConfig, resolve
from foretoken.config.speculative import SpeculativeConfig

__all__ = ["DrafterConfig", "EngineConfig", "ResolvedConfig", "SpeculativeConfig", "resolve"]
