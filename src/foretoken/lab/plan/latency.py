"""What a request waits for: the first token, each further one, the whole answer, with and without.

From the same models of step time as the speed-up. Waiting for a free place is not in it: where more
requests are in flight than fit, the rest queues before all of this.
"""

from dataclasses import dataclass

from foretoken.control.cost import StepShape
from foretoken.lab.plan.predict import LoadPrediction, step_models
from foretoken.lab.plan.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLatency:
    """Seconds at one load."""

    requests: int
    k: int
    """Drafts per verification with speculation; 0: none at this load."""
    ttft_plain_s: float
    ttft_s: float
    """To the first token."""
    tpot_plain_s: float
    tpot_s: float
    """Per further token."""
    end_to_end_plain_s: float
    end_to_end_s: float
    end_to_end_slow_s: float
    """The whole answer at the low end of the speed-up."""

    @property
    def end_to_end_gain(self) -> float:
        """How much sooner the whole answer is there."""
        return self.end_to_end_plain_s / self.end_to_end_s

    @property
    def end_to_end_low(self) -> float:
        """The same at the low end of the speed-up."""
        return self.end_to_end_plain_s / self.end_to_end_slow_s


def latency(setup: Setup, load: LoadPrediction, k: int) -> PlannedLatency:
    """What a typical request of `setup` waits for at a load, with k drafts or, if 0, none."""
    settings = setup.settings
    prompt = max(1, settings.context - settings.output_tokens)
    target, drafter = step_models(setup)
    shape = StepShape(prompt, context=prompt / 2, prompt_rows=prompt)
    read_s = target.seconds(shape).seconds
    # A request that comes while others are decoded waits for half a step of theirs on average.
    wait_s = load.plain_step_s / 2 if load.requests > 1 else 0.0
    plain_s = read_s + wait_s
    tpot_plain_s = load.plain_step_s
    if k == 0:
        first_s, tpot_s, slow_s = plain_s, tpot_plain_s, tpot_plain_s
    else:
        # A drafter that keeps keys and values reads the prompt too, but for heads of blocks.
        own_s = drafter.seconds(shape).seconds if drafter and _reads_prompts(setup) else 0.0
        cost, gain = load.cost(k), load.gain(k)
        first_s = read_s + own_s + wait_s * cost
        tpot_s, slow_s = tpot_plain_s / gain.middle, tpot_plain_s / gain.low
    more = settings.output_tokens - 1
    return PlannedLatency(
        requests=load.requests,
        k=k,
        ttft_plain_s=plain_s,
        ttft_s=first_s,
        tpot_plain_s=tpot_plain_s,
        tpot_s=tpot_s,
        end_to_end_plain_s=plain_s + more * tpot_plain_s,
        end_to_end_s=first_s + more * tpot_s,
        end_to_end_slow_s=first_s + more * slow_s,
    )


def show_seconds(seconds: float) -> str:
    """`1.25 s`, `43.1 ms`."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _reads_prompts(setup: Setup) -> bool:
    """Whether a prompt passes through all of a drafter's layers: with keys and values of its own
    it does, but for heads of whole blocks, which make theirs of the target's states directly."""
    drafting = setup.drafting
    return drafting is not None and drafting.own_kv and not setup.drafts_in_one_pass
