"""The cases of `never_slower.py` in which drafts come from the pair's own draft model."""

from functools import partial
from typing import Any

from common import Ratio, ratio_of_medians
from never_slower_arms import counters, plain_ask
from never_slower_bars import SPEEDS, compare, show_arms, single
from never_slower_bench import CACHED, CHOOSING, LONG, MEASURED, Bench
from never_slower_load import Ask, Crowd, Round, run_ramp

from foretoken.lab.stats.repeats import in_turn

JSON_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "description": {"type": "string", "maxLength": 24},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["function", "class", "module"]},
        "is_public": {"type": "boolean"},
    },
    "required": ["name", "description", "size", "kind", "is_public"],
    "additionalProperties": False,
}


def steady(bench: Bench) -> dict[str, Any]:
    """One class of requests at a constant number in flight."""
    results = {}
    fixed, control = bench.fixed(), bench.control()
    off, again = bench.off()
    bench.servers.start([arm.spec for arm in (off, again, fixed, control)])
    for load in bench.given.loads:
        count = bench.size(off, load, bench.asks)

        def choosing(turn: int, count: int = count, load: int = load) -> list[Crowd]:
            return [Crowd(bench.asks(CHOOSING + turn * count, count), load)]

        def measured(turn: int, count: int = count, load: int = load) -> list[Crowd]:
            return [Crowd(bench.asks(MEASURED + turn * count, count), load)]

        first = bench.in_turns([off, control], choosing, 1)
        cold = first["control"][0].tokens_per_s / first["off"][0].tokens_per_s
        bench.warm_up([control, again] if again.spec != off.spec else [control], choosing)
        best, speeds = bench.best_length(fixed, choosing, SPEEDS["throughput"])
        rounds = bench.in_turns([off, again, best, control], measured)
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
    wanted = {"throughput": (0.98, 0.95), "TPOT P50": (0.98, 0.95), "TPOT P99": (0.97, None)}
    for name, least in wanted.items():
        apart = compare(name, rounds["off again"], rounds["off"])
        for other in ("off", best):
            found[f"{name} over {other}"] = compare(name, rounds["control"], rounds[other])
        over = found[f"{name} over {better}"]
        bench.bar("steady", f"{where}, {name} over {better}, the better", over, least, apart)
        found[f"off/off {name}"] = apart
    first = {"TTFT P50": 0.98, "TTFT P99": 0.98}
    found |= bench.against_off("steady", where, rounds, first)
    if load == 1:
        over = found[f"throughput over {best}"]
        apart = found["off/off throughput"]
        bench.bar("steady", f"one client, throughput over {best}", over, (0.97, None), apart)
    return found


def retrieval(bench: Bench) -> dict[str, Any]:
    """Long prompts, short answers: is catching up worth it?"""
    length = min(bench.given.retrieval_tokens, bench.pair.context - 34)

    def asks(first: int, count: int) -> list[Ask]:
        listed = [plain_ask(bench.pair, first + i, length=length) for i in range(count)]
        return [Ask(key=a.key, body={**a.body, "max_tokens": 32}) for a in listed]

    wanted = {"end to end": 0.98, "throughput": 0.98}
    loads = bench.given.retrieval_loads
    found = {n: bench.over_off("retrieval", bench.control(), n, asks, wanted) for n in loads}
    return {"prompt tokens": length, **_named(found)}


def all_json(bench: Bench) -> dict[str, Any]:
    """Every request has a schema."""
    more = {"structured_outputs": {"json": JSON_SCHEMA}, "ignore_eos": False, "max_tokens": 120}

    def asks(first: int, count: int) -> list[Ask]:
        listed = bench.asks(first, count)
        return [Ask(key=f"JSON {a.key}", body={**a.body, **more}) for a in listed]

    wanted = {"throughput": 0.98, "TPOT P50": 0.98}
    loads = bench.given.json_loads
    return _named({n: bench.over_off("json", bench.control(), n, asks, wanted) for n in loads})


def _named(by_load: dict[int, dict[str, Any]]) -> dict[str, Any]:
    return {f"{load} in flight": found for load, found in by_load.items()}


def ramp(bench: Bench) -> dict[str, Any]:
    """One client, many at once, and one again, each for a window."""
    many, window_s = bench.given.ramp_clients, bench.given.window_s
    phases = [(1, window_s), (many, window_s), (1, window_s)]
    short = [(clients, window_s / 5) for clients, _ in phases]
    arms = [*bench.off(), bench.control()]
    bench.servers.start([arm.spec for arm in arms])
    rates: dict[str, list[list[float]]] = {arm.name: [] for arm in arms}
    for turn in range(-1, bench.given.window_repeats):

        def ask(client: int, number: int, turn: int = turn) -> Ask:
            return plain_ask(bench.pair, MEASURED + (turn + 1) * 100_000 + number * many + client)

        for arm in in_turn(arms, turn + 1):
            url = bench.servers.url(arm.spec)
            found, replies = run_ramp(url, ask, phases if turn >= 0 else short)
            bench.check(arm.name, replies)
            if turn >= 0:
                rates[arm.name].append(found)
        bench.forget()
    results = {}
    print(f"\nramp: 1, {many}, 1 clients for {window_s:g} s each, tokens/s")
    for index, (clients, _) in enumerate(phases):
        where = f"{index + 1}. window, {clients} clients"
        own = {name: [one[index] for one in listed] for name, listed in rates.items()}
        apart = ratio_of_medians(own["off again"], own["off"])
        over = ratio_of_medians(own["control"], own["off"])
        bench.bar("ramp", f"{where}, tokens/s over off", over, (0.97, None), apart)
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
        asked = crowd(load, tokens)
        rounds = bench.in_turns(
            [off, again, control], partial(_always, asked), bench.given.window_repeats
        )
        bench.forget()
        where = f"{load} in flight"
        shown = show_arms(f"contexts of {length}, {where}, {tokens} tokens each", rounds)
        ratios = bench.against_off("contexts", where, rounds, {"decoding": 0.97, "TPOT P50": 0.97})
        results[where] = {"arms": shown, "ratios": ratios}
    return results


def _always(crowds: list[Crowd], _: int) -> list[Crowd]:
    return crowds


def resting(bench: Bench) -> dict[str, Any]:
    """All drafters off by the operator's word: what do they still cost?"""
    control, (off, _) = bench.control(), bench.off()
    bench.servers.set_speculation(control.spec, {"enabled": False})
    wanted = {"throughput": 0.99, "TPOT P50": 0.99}
    loads = bench.given.resting_loads
    results = _named({n: bench.over_off("resting", control, n, bench.asks, wanted) for n in loads})
    bench.servers.set_speculation(control.spec, {})
    tokens = {arm.name: bench.servers.kv_tokens(arm.spec) for arm in (off, control)}
    share = tokens["control"] / tokens["off"]
    bench.bar("resting", "tokens of KV over off, equal memory", single(share), (0.99, None), None)
    results["KV tokens"] = tokens
    results["prefix hits"] = _prefix_hits(bench)
    return results


def _prefix_hits(bench: Bench) -> dict[str, dict[str, float]]:
    """Counters of the prefix cache after a prompt that was asked twice; of drafters apart."""
    found = {}
    length = min(512, bench.pair.context // 2)
    for arm in (bench.off(CACHED)[0], bench.control(CACHED)):
        [ask] = [plain_ask(bench.pair, LONG + 99, length=length)]
        for _ in range(2):
            bench.ask(arm, [Crowd([ask], 1)])
        found[arm.name] = counters(bench.servers.metrics(arm.spec), "prefix_cache")
        print(f"  prefix cache, {arm.name}: {found[arm.name]}", flush=True)
    apart = any("draft" in name for name in found["control"])
    bench.bar("resting", "prefix hits of drafters counted apart (1: yes)",
              single(float(apart)), (1.0, None), None)  # fmt: skip
    bench.forget()
    return found
