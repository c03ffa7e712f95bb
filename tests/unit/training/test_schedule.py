"""The schedule warms up, stays and decays, in steps or in minutes."""

import pytest
import torch

from foretoken.errors import ConfigError
from foretoken.hardware import Hardware
from foretoken.training import precision
from foretoken.training.schedule import Cosine, RunLength, Stage, Wsd, current_stage
from tests.unit.training.tiny import tiny_settings


def test_wsd() -> None:
    wsd, budget = Wsd(warmup_steps=10, decay_share=0.25), RunLength(max_steps=100)
    scales = [wsd.scale(step, budget.progress(step, 0.0)) for step in range(101)]
    assert scales[0] == pytest.approx(0.1)
    assert scales[9:76] == [1.0] * 67
    assert scales[88] == pytest.approx(0.48)
    assert scales[100] == 0.0
    assert all(later <= earlier for earlier, later in zip(scales[75:], scales[76:], strict=False))


def test_cosine() -> None:
    """Warm-up, then the peak, half of it in the middle, zero at the end."""
    cosine = Cosine(warmup_steps=4)
    assert cosine.scale(0, 0.0) == 0.25
    assert cosine.scale(10, 0.0) == 1.0
    assert cosine.scale(50, 0.5) == pytest.approx(0.5)
    assert cosine.scale(99, 1.0) == pytest.approx(0.0)


def test_the_schedule_is_a_setting() -> None:
    assert isinstance(tiny_settings().rates, Wsd)
    assert tiny_settings(schedule="cosine").rates == Cosine(warmup_steps=2)
    for wrong in ({"schedule": "flat"}, {"clip_norm": 0.0}, {"precision": "int8"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            tiny_settings(**wrong)


def test_whichever_budget_ends_first() -> None:
    budget = RunLength(max_steps=100, max_minutes=10)
    assert budget.progress(10, 300) == 0.5
    assert budget.progress(60, 300) == 0.6
    assert budget.progress(10, 9999) == 1.0


def test_a_longer_budget_leaves_the_decay() -> None:
    wsd = Wsd(warmup_steps=1, decay_share=0.25)
    assert wsd.scale(90, RunLength(max_steps=100).progress(90, 0)) < 1
    assert wsd.scale(90, RunLength(max_steps=200).progress(90, 0)) == 1


def test_stages() -> None:
    stages = (Stage(until=0.5, length=256), Stage(until=0.9, length=512))
    assert [current_stage(stages, share).length for share in (0.0, 0.5, 0.95)] == [256, 512, 512]


@pytest.mark.parametrize("flags", [frozenset({"avx2"}), frozenset({"avx512_bf16"})])
def test_products_are_narrow_where_the_processor_multiplies_them(
    flags: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the instruction they would take many times as long."""
    machine = Hardware(cpu_name="", num_cores=2, free_memory=1, cpu_flags=flags)
    monkeypatch.setattr("foretoken.training.precision.Hardware.detect", lambda: machine)
    precision._cpu_multiplies_bfloat16.cache_clear()
    try:
        found = {}
        for asked in ("auto", "bfloat16", "float32"):
            with precision.autocast(torch.device("cpu"), asked):
                found[asked] = torch.is_autocast_enabled("cpu")
    finally:
        precision._cpu_multiplies_bfloat16.cache_clear()
    assert found == {"auto": "avx512_bf16" in flags, "bfloat16": True, "float32": False}
