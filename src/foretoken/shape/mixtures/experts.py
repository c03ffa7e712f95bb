"""How the MLP of a layer is shared out among experts: one record, whatever the family.

Shazeer et al. 2017 (arXiv 1701.06538). Plain data and its checks, no torch: what
`layers/mixture.py` computes, and how many experts the rows of a step read.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar, final

from foretoken.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Rows = TypeVar("Rows", float, "NDArray[np.float64]")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a row is given its experts, and with which weights."""

    score: Literal["softmax", "sigmoid", "none"] = "softmax"
    """Of the router's products, over all experts, in float32."""
    choice_bias: bool = False
    """Whether a bias is added to the scores for the choice alone."""
    groups: int = 1
    """Groups of equally many neighbours; a group is worth its two best scores."""
    groups_used: int = 1
    weights: Literal["kept", "normalized", "softmax", "sigmoid"] = "kept"
    """Of the chosen: their scores, these over their sum, or the softmax or sigmoid of them."""
    eps: float = 0.0
    """Added to the sum that weights are divided by."""
    floor: float = 0.0
    """The least that they are divided by."""
    scale: float = 1.0
    """What weights are multiplied by at last."""
    wide: bool = False
    """Whether the product of the router is float32; else it has the model's type."""
    bias: bool = False
    """Added to the product."""
    expert_scales: bool = False
    """Whether each expert's weight is multiplied by a number of its own at last."""
    softcap: float | None = None
    """c * tanh(x / c) of the product; None: it stays."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a model's layers; field names of config.json differ between families."""

    count: int
    used: int
    """Experts of a row."""
    width: int
    """Inner width of an expert."""
    layers: tuple[bool, ...]
    """Per layer: whether it has experts; else it has a plain MLP."""
    routing: Routing = Routing()
    activation: Literal["silu", "gelu_pytorch_tanh", "clamped", "relu2"] = "silu"
    """`clamped`: (u + 1) g sigmoid(1.702 g) of clamped halves (gpt-oss). `relu2` has no gate."""
    limit: float = 7.0
    """What `clamped` clamps to."""
    biases: bool = False
    """On the matrices of the experts."""
    shared: Literal["none", "always", "gated", "beside"] = "none"
    """An MLP of all rows beside them; `gated`: times the sigmoid of a product of its own; `beside`:
    the plain MLP of the layer, both with norms of their own, as the router has one."""
    shared_width: int = 0
    """Of `always` and `gated`."""

    @property
    def is_gated(self) -> bool:
        """Whether an expert has a gate beside its up projection."""
        return self.activation != "relu2"

    @property
    def results(self) -> int:
        """Rows that are added up for a row: its experts', and the shared one's."""
        return self.used + (self.shared_width > 0)

    @property
    def num_layers(self) -> int:
        """Layers that have experts."""
        return sum(self.layers)

    def expert_parameters(self, hidden: int) -> int:
        """Numbers of one expert."""
        inner = (2 if self.is_gated else 1) * self.width
        return hidden * (inner + self.width) + self.biases * (inner + hidden)

    def router_parameters(self, hidden: int) -> int:
        """Numbers of a layer's router, of the gate of its shared expert, and of norms beside."""
        routing = self.routing
        each = hidden + routing.bias + routing.choice_bias + routing.expert_scales
        beside = {"gated": hidden, "beside": 4 * hidden}.get(self.shared, 0)
        return self.count * each + beside

    def touched(self, rows: float) -> float:
        """Experts of a layer that so many rows read, if they choose independently and evenly: an
        upper limit of what trained routers do."""
        return self.count * share_read(self.used / self.count, rows)

    def check(self, used: str) -> None:
        """Raise CheckpointError for numbers that do not fit each other; `used`: what config.json
        calls the number of experts of a row."""
        count, groups, chosen = self.count, self.routing.groups, self.routing.groups_used
        reached = count // groups * min(chosen, groups)
        within = f"1 to {reached}, the experts of " + (
            "a layer" if groups == 1 else f"{chosen} groups"
        )
        apart = count % groups == 0 and (groups == 1 or count >= 2 * groups)
        for fits, name, given, allowed in (
            (apart, "n_group", groups, f"a divisor of {count} experts, with two in each group"),
            (chosen <= groups, "topk_group", chosen, f"1 to {groups}, the groups"),
            (self.used <= reached, used, self.used, within),
        ):
            if not fits:
                raise CheckpointError(f"config.json {name}", given, allowed)


def share_read(share: float, rows: Rows) -> Rows:
    """V: the share of its experts that a layer reads for so many rows, each of which chooses the
    share `share` of them evenly and apart from the others."""
    left: Rows = (1.0 - share) ** rows
    return 1.0 - left
