"""The cases of `never_slower.py`: with the pair's own draft model, and with a steered drafter."""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import Ratio, ratio_of_medians
from never_slower_arms import Arm, plain_ask
from never_slower_bench import (
    CACHED,
    CHOOSING,
    LONG,
    MEASURED,
    SPEEDS,
    TAUGHT,
    Bench,
    compare,
    show_arms,
    single,
)
from never_slower_drafter import Stream
from never_slower_load import Ask, Crowd, Reply, Round

from foretoken.lab.stats.repeats import in_turn

GOOD, POOR = "accepting", "creative"
CHANCES = {GOOD: 0.95, POOR: 0.2}
KEPT = 0.9
"""Share of the guarded optimum that the accepting class keeps."""
PROPERTIES = {
    "name": {"type": "string", "maxLength": 12},
    "description": {"type": "string", "maxLength": 24},
    "size": {"type": "integer", "minimum": 0, "maximum": 9999},
    "kind": {"enum": ["function", "class", "module"]},
    "is_public": {"type": "boolean"},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES),
          "additionalProperties": False}  # fmt: skip


def steady(bench: Bench) -> dict[str, Any]:
    """One class of requests at a constant number in flight."""
    results = {}
    fixed, control = bench.fixed(), bench.control()
    off, again = bench.off()
    bench.servers.start([arm.spec for arm in (off, again, fixed, control)])
    for load in bench.given.loads:
        count = bench.size(off, load, bench.asks)

        choosing = bench.crowds(CHOOSING, count, load)
        cold = bench.cold(off, control, choosing)
        bench.warm_up([control, again] if again.spec != off.spec else [control], choosing)
        best, speeds = bench.best_length(fixed, choosing, SPEEDS["throughput"])
        rounds = bench.in_turns([off, again, best, control], bench.crowds(MEASURED, count, load))
        bench.forget()
        where = f"{load} in flight"
        row: dict[str, Any] = {
            "requests a round": count,
            "best fixed length": best.name,
            "tokens/s by length, other prompts": speeds,
            "first round over off": cold,
            "arms": show_arms(f"steady, {where}, {count} requests a round; control's first round "
                              f"{cold:.2f} of off", rounds),
        }  # fmt: skip
        row["ratios"] = _steady_bars(bench, load, rounds, best.name)
        results[where] = row
    return results


def _steady_bars(
    bench: Bench, load: int, rounds: dict[str, list[Round]], best: str
) -> dict[str, Ratio]:
    """Control over the better of off and the best length; the first token over off."""
    where = f"{load} in flight"
    throughput = SPEEDS["throughput"]
    better = max(("off", best), key=lambda name: throughput(rounds[name]))
    found = {}
    wanted = {"throughput": (0.98, 0.95), "TPOT P50": (0.98, 0.95), "TPOT P99": (0.97, 0.0)}
    for name, (least, low) in wanted.items():
        apart = compare(name, rounds["off again"], rounds["off"])
        for other in ("off", best):
            found[f"{name} over {other}"] = compare(name, rounds["control"], rounds[other])
        over = found[f"{name} over {better}"]
        bench.bar("steady", f"{where}, {name} over {better}, the better", over, least, apart, low)
        found[f"off/off {name}"] = apart
    first = {"TTFT P50": 0.98, "TTFT P99": 0.98}
    found |= bench.against_off("steady", where, rounds, first)
    if load == 1:
        over = found[f"throughput over {best}"]
        apart = found["off/off throughput"]
        bench.bar("steady", f"one client, throughput over {best}", over, 0.97, apart)
    return found


def retrieval(bench: Bench) -> dict[str, Any]:
    """Long prompts, short answers: is catching up worth it?"""
    length = min(bench.given.retrieval_tokens, bench.pair.context - 34)

    def asks(first: int, count: int) -> list[Ask]:
        listed = [plain_ask(bench.pair, first + i, length=length) for i in range(count)]
        return [Ask(key=a.key, body={**a.body, "max_tokens": 32}) for a in listed]

    wanted, loads = {"end to end": 0.98, "throughput": 0.98}, bench.given.retrieval_loads
    found = bench.over_off("retrieval", bench.control(), loads, wanted, asks)
    return {"prompt tokens": length, **found}


def all_json(bench: Bench) -> dict[str, Any]:
    """Every request has a schema."""
    more = {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False, "max_tokens": 120}

    def asks(first: int, count: int) -> list[Ask]:
        listed = bench.asks(first, count)
        return [Ask(key=f"JSON {a.key}", body={**a.body, **more}) for a in listed]

    wanted = {"throughput": 0.98, "TPOT P50": 0.98}
    return bench.over_off("json", bench.control(), bench.given.json_loads, wanted, asks)


def ramp(bench: Bench) -> dict[str, Any]:
    """One client, many at once, and one again: a round each, one right after the other."""
    arms = [*bench.off(), bench.control()]
    loads = (1, bench.given.ramp_clients, 1)
    counts = {load: bench.size(arms[0], load, bench.asks) for load in loads}
    rates: dict[str, list[list[float]]] = {arm.name: [] for arm in arms}
    for turn in range(-1, bench.given.repeats):
        for arm in in_turn(arms, turn + 1):
            found = []
            for window, load in enumerate(loads):
                first = MEASURED + ((turn + 1) * len(loads) + window) * 10_000
                crowd = Crowd(bench.asks(first, counts[load]), load)
                found.append(bench.ask(arm, [crowd]).tokens_per_s)
            if turn >= 0:
                rates[arm.name].append(found)
        bench.forget()
    results = {}
    print(f"\nramp: rounds of {', '.join(map(str, loads))} clients, tokens/s")
    for index, load in enumerate(loads):
        where = f"{index + 1}. window, {load} clients"
        own = {name: [one[index] for one in listed] for name, listed in rates.items()}
        apart = ratio_of_medians(own["off again"], own["off"])
        over = ratio_of_medians(own["control"], own["off"])
        bench.bar("ramp", f"{where}, tokens/s over off", over, 0.97, apart)
        results[where] = {"tokens/s": own, "over off": over, "off/off": apart}
    return results


def contexts(bench: Bench) -> dict[str, Any]:
    """Long contexts that are read once and then found in the prefix cache."""
    length = min(bench.given.context_tokens, bench.pair.context - 260)
    control, (off, again) = bench.control(CACHED), bench.off(CACHED)
    arms = [off, control] if again.spec == off.spec else [off, again, control]
    results: dict[str, Any] = {"context tokens": length}

    def crowd(clients: int, tokens: int) -> list[Crowd]:
        body = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip
        asks = [
            Ask(key=f"{c} {tokens}", body={**body, "prompt": bench.pair.prompt(LONG + c, length)})
            for c in range(clients)
        ]
        return [Crowd(asks, clients)]

    bench.servers.start([arm.spec for arm in arms])
    for load in bench.given.context_loads:
        for arm in arms:
            bench.ask(arm, crowd(load, 16))
        trial = bench.ask(off, crowd(load, 16))
        tokens = int(trial.together_per_s / load * bench.given.window_s)
        tokens = max(16, min(tokens, bench.pair.context - length - 8))
        bench.ask(control, crowd(load, tokens))
        rounds = bench.in_turns(
            [off, again, control],
            lambda _, load=load, tokens=tokens: crowd(load, tokens),
            bench.given.repeats,
        )
        bench.forget()
        where = f"{load} in flight"
        shown = show_arms(f"contexts of {length}, {where}, {tokens} tokens each", rounds)
        ratios = bench.against_off("contexts", where, rounds, {"decoding": 0.97, "TPOT P50": 0.97})
        results[where] = {"arms": shown, "ratios": ratios}
    return results


def resting(bench: Bench) -> dict[str, Any]:
    """All drafters off by the operator's word: what do they still cost?"""
    control, (off, _) = bench.control(), bench.off()
    bench.servers.set_speculation(control.spec, {"enabled": False})
    wanted = {"throughput": 0.99, "TPOT P50": 0.99}
    results = bench.over_off("resting", control, bench.given.resting_loads, wanted)
    bench.servers.set_speculation(control.spec, {})
    tokens = {arm.name: bench.servers.kv_tokens(arm.spec) for arm in (off, control)}
    share = tokens["control"] / tokens["off"]
    bench.bar("resting", "tokens of KV over off, equal memory", single(share), 0.99)
    results["KV tokens"] = tokens
    return results


def useless(bench: Bench) -> dict[str, Any]:
    """A drafter that is never right. The rounds of the warm-up are its first steps."""
    control, _ = bench.steered("useless", [])
    wanted = {"throughput": 0.98, "TPOT P50": 0.98}
    return bench.over_off("useless", control, bench.given.useless_loads, wanted)


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
    over = found[f"{GOOD}, over off"]["TPOT P50"]
    kept = replace(over, value=over.value / best[GOOD], low=over.low / best[GOOD],
                   high=over.high / best[GOOD])  # fmt: skip
    found["kept of the guarded optimum"] = kept
    apart = compare("TPOT P50", rounds["off again"], rounds["off"])
    what = f"accepting class, of the guarded optimum ({best['drafts']}, {best[GOOD]:.2f})"
    bench.bar("mix", what, kept, KEPT, apart)
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
        choosing = bench.crowds(0, most, load, lambda first, _, load=load: asks(first, load))
        measured = bench.crowds(
            given.choosing_rounds * most, most, load, lambda first, _, load=load: asks(first, load)
        )
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
        bench.bar("drift", what, over, 0.98, apart)
        found[name] = {"tokens/s": rates, "over the better": over, "off/off": apart}
    over = compare("TPOT P50", rounds["control"], rounds[best[1]])
    apart = compare("TPOT P50", rounds["off again"], rounds["off"])
    bench.bar("drift", f"{where}, whole answers over {best[1]}", over, 1.0, apart)
    found["whole answers"] = {"over the best fixed length": over, "off/off": apart}
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
    starts = [place for place in reply.starts if begin <= place < end]
    assert len(starts) > 1, (phase, len(reply.ids))
    first, last = starts[min(steps, len(starts) - 2)], starts[-1]
    return (last - first) / (reply.at_s[last] - reply.at_s[first])


def deciding(bench: Bench) -> dict[str, Any]:
    """What deciding takes of a step of 64 sequences."""
    script = Path(__file__).with_name("never_slower_deciding.py")
    quick = ["--quick"] if bench.given.quick else []
    done = subprocess.run([sys.executable, str(script), *quick], capture_output=True, text=True,
                          check=True)  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"\ndeciding, 64 sequences: {100 * found['share']:.2f} % of a step of "
          f"{found['step_us_p50']:.0f} us; median {found['deciding_us_p50']:.1f} us, "
          f"P99 {found['deciding_us_p99']:.1f} us", flush=True)  # fmt: skip
    return found
