"""What the planner assumes of drafting methods until somebody has measured them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from foretoken.config.method_registry import DraftingMethod, known_methods
from foretoken.lab.plain import read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodPlan:
    """What is assumed of one method. That of a method of your own is one of its `extras`."""

    usual_drafts: int
    """Draft tokens per verification to start with."""
    needs: str
    """What it takes to have it."""
    acceptance: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Of a method of your own: workload -> range of the chance that a draft is accepted given that
    all before it were. The workload "" stands for all that are not named."""
    hits: Mapping[str, float] = field(default_factory=dict)
    """Workload -> share of steps that find anything to draft; 1 where not named."""
    features: int = 0
    """Layers of the target whose hidden states a head reads."""
    layers: int = 1
    """Layers of a head, each about as large as one of the target's."""
    block: int = 0
    """Most drafts of a usual head that drafts whole blocks; 0: it has no such bound."""
    head_vocabulary: int = 0
    """Words that a head usually drafts from; 0: all of the target's."""
    own_file: bool = True
    """Of drafters with weights: False where they are part of the target's checkpoint."""
    vllm_package: str = ""
    """A package that vLLM imports for it and does not install."""

    def package(self, engine: str) -> str:
        """What has to be installed beside an engine for it; empty: nothing."""
        return self.vllm_package if engine == "vllm" else ""


@cache
def _table() -> dict[str, MethodPlan]:
    rows = read_table("foretoken.lab.plan", "methods.toml")
    return {name: MethodPlan(**row) for name, row in rows.items()}


def find_plan(method: DraftingMethod) -> MethodPlan | None:
    """What is assumed of a method; None: it is not planned."""
    own = (one for one in method.extras if isinstance(one, MethodPlan))
    return next(own, _table().get(method.name))


def plan_of(method: DraftingMethod) -> MethodPlan:
    """What is assumed of a method that is planned."""
    found = find_plan(method)
    assert found is not None, method.name
    return found


def planned_methods() -> dict[str, DraftingMethod]:
    """The methods that can be planned, by their words."""
    return {one.name: one for one in known_methods() if find_plan(one) is not None}
