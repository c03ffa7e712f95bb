"""The cases of `never_slower.py` whose acceptance is steered: drift, two classes, uselessness."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from common import ratio_of_medians
from never_slower_arms import Arm, plain_ask
from never_slower_bars import SPEEDS, compare, scaled, show_arms
from never_slower_bench import CHOOSING, MEASURED, TAUGHT, Bench
from never_slower_drafter import Stream
from never_slower_load import Ask, Crowd, Reply, Round
from never_slower_return import coming_back

GOOD, POOR = "accepting", "creative"
CHANCES = {GOOD: 0.95, POOR: 0.2}
KEPT = 0.9
"""Share of the guarded optimum that the accepting class keeps."""


def useless(bench: Bench) -> dict[str, Any]:
    """A drafter that is never right. The rounds of the warm-up are its first steps."""
    control, _ = bench.steered("useless", [])
    wanted = {"throughput": 0.98, "TPOT P50": 0.98}
    return {
        f"{load} in flight": bench.over_off("useless", control, load, bench.asks, wanted)
        for load in bench.given.useless_loads
    }


def teach(
    bench: Bench, asks: Sequence[Ask], chances: Callable[[Ask], list[tuple[int, float]]]
) -> list[Stream]:
    """The answers to all asks, from the server without drafts."""
    off, _ = bench.off()
    found = bench.ask(off, [Crowd(asks, min(16, len(asks)))])
    return [
        Stream(
            prompt=reply.ask.body["prompt"],
            seed=reply.ask.body.get("seed"),
            tokens=reply.ids,
            chances=chances(reply.ask),
        )
        for reply in found.replies
    ]


def mix(bench: Bench) -> dict[str, Any]:
    """Two classes in one batch: drafts of one are nearly always right, of the other seldom."""
    half = max(1, bench.given.mix_load // 2)
    off, again = bench.off()
    count = bench.size(off, 2 * half, bench.asks)
    each = max(2 * half, count // 2)

    def asks(first: int) -> list[Ask]:
        numbered = [(GOOD, first + i) for i in range(each)]
        numbered += [(POOR, first + each + i) for i in range(each)]
        return [plain_ask(bench.pair, number, group=group) for group, number in numbered]

    def crowds(first: int) -> Callable[[int], list[Crowd]]:
        def turn(number: int) -> list[Crowd]:
            listed = asks(first + 2 * each * number)
            own = [[ask for ask in listed if ask.group == group] for group in CHANCES]
            return [Crowd(one, half, goes_on=True) for one in own]

        return turn

    repeats = range(bench.given.repeats)
    known = [a for t in repeats for a in asks(MEASURED + 2 * each * t)]
    known += [a for t in range(bench.given.choosing_rounds) for a in asks(CHOOSING + 2 * each * t)]
    bench.forget()
    control, fixed = bench.steered("mix", teach(bench, known, lambda a: [(0, CHANCES[a.group])]))
    best = _guarded_optimum(bench, off, fixed, crowds(CHOOSING))
    bench.warm_up([control], crowds(CHOOSING))
    rounds = bench.in_turns([off, again, control], crowds(MEASURED))
    bench.forget()
    show_arms(f"mix, {half} + {half} in flight, {2 * each} requests a round", rounds)
    found: dict[str, Any] = {"guarded optimum": best}
    for group in CHANCES:
        own = {name: [one.of_group(group) for one in listed] for name, listed in rounds.items()}
        found[group] = show_arms(f"mix, {group} class", own)
        ratios = bench.against_off("mix", f"{group} class", own, {"TPOT P99": 0.98})
        ratios["TPOT P50"] = compare("TPOT P50", own["control"], own["off"])
        found[f"{group}, over off"] = ratios
    kept = scaled(found[f"{GOOD}, over off"]["TPOT P50"], 1 / best[GOOD])
    found["kept of the guarded optimum"] = kept
    apart = compare("TPOT P50", rounds["off again"], rounds["off"])
    what = f"accepting class, of the guarded optimum ({best['drafts']}, {best[GOOD]:.2f})"
    bench.bar("mix", what, kept, (KEPT, None), apart)
    return found


def _guarded_optimum(
    bench: Bench, off: Arm, fixed: Arm, make: Callable[[int], list[Crowd]]
) -> dict[str, Any]:
    """The length of the accepting class that is fastest for it without slowing the other.

    The other class drafts nothing then; off is always a choice.
    """
    arms = [off, *(Arm(name=f"{k} drafts", spec=fixed.spec) for k in bench.given.lengths)]
    limits = {f"{k} drafts": k for k in bench.given.lengths}
    found: dict[str, list[Round]] = {arm.name: [] for arm in arms}
    bench.servers.start([off.spec, fixed.spec])
    for turn in range(bench.given.choosing_rounds):
        for arm in arms:
            crowds = [_limited(crowd, limits.get(arm.name)) for crowd in make(turn)]
            found[arm.name].append(bench.ask(arm, crowds))
    best: dict[str, Any] = {"drafts": "off", GOOD: 1.0, POOR: 1.0, "tried": {}}
    for name in limits:
        over = {
            group: compare(
                "TPOT P50",
                [one.of_group(group) for one in found[name]],
                [one.of_group(group) for one in found["off"]],
            ).value
            for group in CHANCES
        }
        best["tried"][name] = over
        if over[POOR] >= 0.98 and over[GOOD] > best[GOOD]:
            best |= {"drafts": name, **over}
    print("\nmix: TPOT P50 over off where only the accepting class drafts, a fixed length")
    for name, over in best["tried"].items():
        print(f"  {name:12}" + "".join(f"{group} {over[group]:.3f}  " for group in CHANCES))
    return best


def _limited(crowd: Crowd, length: int | None) -> Crowd:
    """The accepting class limited to so many drafts, the other to none; None leaves all as is."""
    if length is None:
        return crowd
    asks = []
    for ask in crowd.asks:
        most = length if ask.group == GOOD else 0
        body = {**ask.body, "speculation": {"num_speculative_tokens": most}}
        asks.append(Ask(key=ask.key, body=body, group=ask.group))
    return replace(crowd, asks=asks)


def drift(bench: Bench) -> dict[str, Any]:
    """Acceptance 0.9, then 0, then 0.9 again within each answer."""
    given = bench.given
    third = min(given.drift_tokens, (bench.pair.context - bench.pair.prompt_tokens - 8) // 3)
    phases = {"falls": (third, 2 * third), "returns": (2 * third, 3 * third)}
    chances = [(0, 0.9), (third, 0.0), (2 * third, 0.9)]
    loads = given.drift_loads

    def asks(first: int, count: int) -> list[Ask]:
        more = {"max_tokens": 3 * third, "token_sources": True, "return_token_ids": False}
        listed = [plain_ask(bench.pair, TAUGHT + first + i) for i in range(count)]
        return [Ask(key=f"drift {a.key}", body={**a.body, **more}) for a in listed]

    most, (off, again) = max(loads), bench.off()
    turns = given.choosing_rounds + given.repeats
    known = teach(bench, asks(0, most * turns), lambda _: chances)
    control, fixed = bench.steered("drift", known)
    results: dict[str, Any] = {"tokens": 3 * third}
    for load in loads:
        firsts = given.choosing_rounds

        def choosing(turn: int, load: int = load) -> list[Crowd]:
            return [Crowd(asks(turn * most, load), load)]

        def measured(turn: int, load: int = load, firsts: int = firsts) -> list[Crowd]:
            return [Crowd(asks((firsts + turn) * most, load), load)]

        bench.servers.start([off.spec, again.spec, control.spec, fixed.spec])
        bench.warm_up([control], choosing)
        right, _ = bench.best_length(
            fixed, choosing, lambda rounds: _rates(rounds, phases["returns"], given.drift_steps)[0]
        )
        whole, _ = bench.best_length(fixed, choosing, SPEEDS["TPOT P50"])
        arms = {arm.name: arm for arm in (off, again, right, whole, control)}
        rounds = bench.in_turns(list(arms.values()), measured)
        where = f"{load} in flight"
        show_arms(f"drift, {where}, {3 * third} tokens", rounds)
        results[where] = _drift_bars(bench, where, rounds, phases, (right.name, whole.name))
    bench.forget()
    if bench.pair.name == "demo":
        results["back from a rest"] = coming_back(bench)
    return results


def _drift_bars(
    bench: Bench,
    where: str,
    rounds: Mapping[str, list[Round]],
    phases: Mapping[str, tuple[int, int]],
    best: tuple[str, str],
) -> dict[str, Any]:
    """Speeds some steps after each change, and of whole answers."""
    found: dict[str, Any] = {}
    steps = bench.given.drift_steps
    for name, phase in phases.items():
        rates = {arm: _rates(listed, phase, steps, each=True) for arm, listed in rounds.items()}
        better = max(("off", best[0]), key=lambda arm: statistics.median(rates[arm]))
        over = ratio_of_medians(rates["control"], rates[better])
        apart = ratio_of_medians(rates["off again"], rates["off"])
        what = f"{where}, acceptance {name}, {steps} steps later over {better}"
        bench.bar("drift", what, over, (0.98, None), apart)
        found[name] = {"tokens/s": rates, "over the better": over, "off/off": apart}
    over = compare("TPOT P50", rounds["control"], rounds[best[1]])
    apart = compare("TPOT P50", rounds["off again"], rounds["off"])
    bench.bar("drift", f"{where}, whole answers over {best[1]}", over, (1.0, None), apart)
    found["whole answers"] = {"over the best fixed length": over, "off/off": apart}
    begin = phases["returns"][0]
    back = [_steps_to_drafts(reply, begin) for one in rounds["control"] for reply in one.replies]
    found["steps until a draft is accepted again"] = statistics.median(back)
    print(f"  steps until a draft is accepted again: median {statistics.median(back):g}, "
          f"most {max(back)}", flush=True)  # fmt: skip
    return found


def _rates(
    rounds: Sequence[Round], phase: tuple[int, int], steps: int, *, each: bool = False
) -> list[float]:
    """Tokens per second of a stream in a phase, its first `steps` left out; a median per round."""
    rates = [
        statistics.median(_rate(reply, phase, steps) for reply in one.replies) for one in rounds
    ]
    return rates if each else [statistics.median(rates)]


def _rate(reply: Reply, phase: tuple[int, int], steps: int) -> float:
    begin, end = phase
    starts = [i for i, position in enumerate(reply.positions) if position == 0]
    starts = [i for i in starts if begin <= i < end]
    assert len(starts) > 1, (phase, len(reply.ids))
    first, last = starts[min(steps, len(starts) - 2)], starts[-1]
    return (last - first) / (reply.at_s[last] - reply.at_s[first])


def _steps_to_drafts(reply: Reply, begin: int) -> int:
    """Steps from a place of the answer on until one had more than one token."""
    starts = [i for i, position in enumerate(reply.positions) if position == 0 and i >= begin]
    sizes = [b - a for a, b in pairwise(starts)]
    return next((i for i, size in enumerate(sizes) if size > 1), len(sizes))
