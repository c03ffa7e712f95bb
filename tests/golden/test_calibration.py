"""What calibration sees, against transformers' own modules.

The guarded bugs: inputs of the output projection in attention's order of heads instead of the
file's; layers of another window; a layer that is fed what the one before it was fed.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.shape import ModelShape
from foretoken.training.quantize.layers import Calibration
from tests.golden import families

CASES = (
    "olmo2",
    "smollm3 some layers with a window",
    "llama grouped tied",
    "mistral window",
    "qwen3 biases and window",
    "phi3 window",
    "gemma2",
    "gemma3 two kinds of positions",
)


def expected_moments(model: Any, rows_ST: Tensor) -> dict[str, Tensor]:
    """Mean x x^T of the inputs of every linear layer, by its name."""
    seen: dict[str, list[Tensor]] = {}

    def watch(name: str) -> Any:
        def note(module: Any, given: tuple[Tensor, ...], result: Any) -> None:
            seen.setdefault(name, []).append(given[0].detach().flatten(0, -2))

        return note

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_hook(watch(name))
    with torch.no_grad():
        for row in rows_ST:
            model(row[None])
    joined = {name: torch.cat(parts) for name, parts in seen.items()}
    return {name: x_TK.T @ x_TK / x_TK.shape[0] for name, x_TK in joined.items()}


@pytest.mark.parametrize("case", CASES)
def test_moments_are_those_of_the_inputs(tmp_path: Path, case: str) -> None:
    kind, changes = families.OWN[case]
    model = families.write_checkpoint(tmp_path, kind, changes)
    rows_ST = torch.randint(families.VOCAB, (3, 30), generator=torch.Generator().manual_seed(0))
    expected = expected_moments(model, rows_ST)
    shape = ModelShape.from_config(tmp_path)
    calibration = Calibration(tmp_path, shape, rows_ST)
    for index in range(shape.num_hidden_layers):
        found = calibration.moments(index)
        prefix = f"model.layers.{index}."
        names = [name for name in expected if name.startswith(prefix)]
        assert names, (prefix, list(expected))
        for name in names:
            moments = found[name.rpartition(".")[2]]
            torch.testing.assert_close(moments, expected[name], rtol=2e-3, atol=2e-3)
        calibration.advance(index, {})
