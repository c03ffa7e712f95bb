"""A launch in the names that its engine has today, and with its plain mistakes put right.

Judges nothing and writes nothing: checks say what is wrong, `write` how a launch stands in text.
What became of a name is in the configuration's table of other engines.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from foretoken.config.methods import DraftingMethod, known_methods
from foretoken.config.other_engines import OtherName, find_other
from foretoken.lab.launch.drafting import MOST_RUNNING
from foretoken.lab.launch.launch import (
    ELSEWHERE,
    METHOD_OPTIONS,
    SHORT,
    Launch,
    LaunchPart,
    flag_name,
    gone_value,
    in_json,
    number,
    typed,
)
from foretoken.lab.launch.variables import part_of
from foretoken.lab.launch.values import is_unsaid, one_more

_NO_WEIGHTS = {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 2}
_NAMED_SO = (
    ("eagle3", "eagle3"),
    ("eagle-3", "eagle3"),
    ("eagle-", "eagle"),
    ("dflash", "dflash"),
    ("dspark", "dspark"),
    ("medusa", "medusa"),
    ("mlp-speculator", "mlp_speculator"),
    ("accelerator", "mlp_speculator"),
)
"""Words in the names of drafters, and the method that vLLM concludes from them."""
_FIRST = ("method", "model", "num_speculative_tokens")
_LOSSY_KEYS = ("posterior_threshold", "posterior_alpha")


def translated(launch: Launch) -> Launch:
    """The launch with names that are gone replaced by what stands for them today."""
    if launch.broken:
        return launch
    moved: dict[str, Any] = {}
    parts: list[LaunchPart] = []
    kept: list[LaunchPart] = []
    place: int | None = None
    late: list[LaunchPart] = []
    for part in launch.parts:
        row = flag_name(launch.engine, part.name) if part.name else None
        if part.place is not None:
            now = _todays_variable(launch, part)
            if now is not None:
                (late if now.place is None else parts).append(now)
        elif in_json(part.name) or (launch.engine == "vllm" and part.name in SHORT):
            place = len(parts) if place is None else place
            kept.append(part)
        elif row is None or not row.gone:
            parts.append(_with_today_s_method(launch, part))
        elif row.successor.startswith("flag:"):
            parts.append(_renamed(launch, part, row.successor.removeprefix("flag:")))
        elif row.successor.startswith("key:"):
            place = len(parts) if place is None else place
            moved[row.name] = typed(part.value)
    if moved and launch.unread:
        return launch
    parts += late
    spoken = launch.speculation or {}
    config = _config(launch, {**spoken, **moved})
    if place is not None and config == spoken and not moved and not launch.given_twice:
        parts[place:place] = kept
    elif place is not None and config:
        if launch.engine == "vllm" and _names_a_model(config):
            config.setdefault("method", method_by_name(config["model"]))
        parts.insert(place, _json_part(launch, config))
    return replace(launch, parts=tuple(part for part in parts if not _is_gone_value(launch, part)))


def repaired(launch: Launch) -> Launch:
    """A translated launch with mistakes put right that have one obvious answer."""
    config = launch.speculation
    if launch.engine == "vllm" and config:
        mended = dict(_mended(launch, config))
        if mended != config:
            launch = _with_config(launch, mended)
    if launch.engine == "llama.cpp":
        launch = launch.without("spec-draft-n-min") if _discards(launch) else launch
    if launch.engine == "sglang":
        launch = _with_rows(launch)
    return replace(launch, parts=tuple(_with_today_s_value(launch, p) for p in launch.parts))


def method_of(name: object) -> DraftingMethod | None:
    """What is known of a method by a word of vLLM."""
    return next((m for m in known_methods() if name in (m.name, *m.aliases)), None)


def method_in(config: Mapping[str, Any]) -> DraftingMethod | None:
    """What is known of the method of a speculative config: by its word, or by what vLLM concludes
    from the name of a drafter."""
    named = config.get("method")
    if named is None and _names_a_model(config):
        named = method_by_name(config["model"])
    return method_of(named)


def schedule_of(switched_off_above: Any, drafts: Any) -> list[list[Any]]:
    """The old switch-off above a batch size as ranges of batch sizes, numbers or unsaid."""
    k: Any = drafts if is_unsaid(drafts) else number(drafts) or 5
    if is_unsaid(switched_off_above):
        first = one_more(switched_off_above)
        return [[1, switched_off_above, k], [first, MOST_RUNNING, 0]]
    most = number(switched_off_above) or 32
    return [[1, most, k], [most + 1, max(MOST_RUNNING, most + 1), 0]]


def _json_part(launch: Launch, config: dict[str, Any]) -> LaunchPart:
    old = next((p for p in launch.parts if in_json(p.name) and "." not in p.name), None)
    kind = launch.form.kind
    written = "speculative_config" if kind == "python" else "--speculative-config"
    if kind == "settings":
        dashes = any("-" in part.written for part in launch.parts)
        written = "speculative-config" if dashes else "speculative_config"
    ordered = {key: config[key] for key in _FIRST if key in config} | config
    name = old.written if old else written
    return LaunchPart(name="speculative-config", written=name, value=ordered)


def _with_config(launch: Launch, config: dict[str, Any]) -> Launch:
    parts = tuple(replace(p, value=config, raw="") if in_json(p.name) else p for p in launch.parts)
    return replace(launch, parts=parts)


def _config(launch: Launch, given: dict[str, Any]) -> dict[str, Any]:
    """A speculative config under the keys, methods and values of today."""
    found: dict[str, Any] = {}
    switched_off = None
    for name, value in given.items():
        row = _key(launch.engine, name)
        key = name
        if row is not None and row.gone:
            if not row.successor.startswith("key:"):
                continue
            key = row.successor.removeprefix("key:")
        if key == "num_speculative_tokens_per_batch_size" and key != name:
            switched_off = value
        elif key == "synthetic_acceptance_length" and key != name:
            drafts = given.get("num_speculative_tokens")
            found[key] = value if is_unsaid(value) else _length_of(value, drafts)
        else:
            found.setdefault(key, value)
    if launch.engine == "vllm":
        _use_todays_words(found)
        if switched_off is not None:
            ranges = schedule_of(switched_off, found.get("num_speculative_tokens"))
            found["num_speculative_tokens_per_batch_size"] = ranges
    elif "decoding_type" in found:
        row = find_other("methods", found["decoding_type"], launch.engine)
        found["decoding_type"] = row.now if row and row.gone and row.now else found["decoding_type"]
    return found


def _key(engine: str, name: str) -> OtherName | None:
    return find_other("keys", name, engine) or find_other("flags", name, engine)


def _length_of(rate: object, drafts: object) -> float:
    """Mean tokens per step where every draft is accepted at this rate while all before were."""
    share, k = float(str(rate)), number(drafts) or 5
    return round(sum(share**i for i in range(k + 1)), 2)


def _use_todays_words(config: dict[str, Any]) -> None:
    """Replace methods and values of vLLM that are gone."""
    model, method = config.get("model"), config.get("method")
    if isinstance(model, str) and model.strip("[]") == "ngram":
        config.pop("model")
        method = config["method"] = "ngram"
    elif method is None and isinstance(model, str) and _names_a_model(config):
        method = method_by_name(model)
    row = find_other("methods", method, "vllm")
    if row is not None and row.gone and row.method:
        config["method"] = row.method
    elif row is not None and row.gone:
        for key in ("model", "draft_tensor_parallel_size", "quantization"):
            config.pop(key, None)
        config |= _NO_WEIGHTS
    rule = config.get("rejection_sample_method")
    if gone_value("vllm", "rejection_sample_method", rule) is not None:
        config.pop("rejection_sample_method")
        if rule == "probabilistic":
            config["draft_sample_method"] = "probabilistic"
        for key in _LOSSY_KEYS:
            config.pop(key, None)


def _names_a_model(config: Mapping[str, Any]) -> bool:
    model = config.get("model")
    return isinstance(model, str) and not is_unsaid(model)


def method_by_name(model: str) -> str:
    """The method that vLLM concludes from the name of a drafter."""
    name = model.lower()
    for word, method in _NAMED_SO:
        if word in name:
            return method
    return "draft_model"


def _with_today_s_method(launch: Launch, part: LaunchPart) -> LaunchPart:
    """An option that names methods, with the words of today."""
    if part.name not in METHOD_OPTIONS or not isinstance(part.value, str):
        return part
    words = [_today_s_word(launch.engine, word.strip()) for word in part.value.split(",")]
    value = ",".join(words)
    return part if value == part.value else replace(part, value=value, raw="")


def _todays_variable(launch: Launch, part: LaunchPart) -> LaunchPart | None:
    """A variable under its name of today, or the option in its place; None where nothing is."""
    row = find_other("variables", part.written, launch.engine)
    if row is None or not row.gone or not row.now:
        return None if row is not None and row.gone else _with_today_s_method(launch, part)
    if row.now.startswith("flag:"):
        return _renamed(launch, replace(part, place=None), row.now.removeprefix("flag:"))
    place = ELSEWHERE if part.place is None else part.place
    return _with_today_s_method(launch, part_of(row.now, part.raw, launch.engine, place))


def _today_s_word(engine: str, word: str) -> str:
    row = find_other("methods", word, engine)
    return row.now if row is not None and row.gone and row.now else word


def _renamed(launch: Launch, part: LaunchPart, name: str) -> LaunchPart:
    written = name.replace("_", "-")
    if launch.form.kind == "python" or (launch.form.kind == "settings" and "_" in part.written):
        return replace(part, name=written, written=name)
    dashes = "--" if launch.form.kind != "settings" else ""
    return replace(part, name=written, written=dashes + written)


def _is_gone_value(launch: Launch, part: LaunchPart) -> bool:
    """Whether an option says nothing but a value for which nothing stands today."""
    gone = gone_value(launch.engine, part.name, part.value)
    return gone is not None and not gone.now


def _with_today_s_value(launch: Launch, part: LaunchPart) -> LaunchPart:
    gone = gone_value(launch.engine, part.name, part.value)
    return part if gone is None or not gone.now else replace(part, value=gone.now, raw="")


def _mended(launch: Launch, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The keys of a speculative config, with what vLLM refuses put right."""
    target, method = launch.ranks, method_in(config)
    for key, value in config.items():
        if key == "draft_tensor_parallel_size":
            one = number(value) == 1 and config.get("method") != "draft_model"
            said = launch.ranks_are_said and not is_unsaid(value)
            value = value if one or not said or number(value) == target else target
        elif (gone := gone_value("vllm", key, value)) is not None:
            value = gone.now
        elif key == "disable_padded_drafter_batch" and value is True:
            if method is None or method.drafts_with != "head" or not method.own_kv:
                continue
        yield key, value
    if "num_speculative_tokens" not in config and (method is None or method.vllm_needs_length):
        yield "num_speculative_tokens", method.default_drafts if method else 5


def _discards(launch: Launch) -> bool:
    return bool(number(launch.options.get("spec-draft-n-min")))


def drafts_blocks(launch: Launch) -> bool:
    """Whether SGLang drafts whole blocks in one pass, for which it has no steps."""
    row = find_other("methods", launch.options.get("speculative-algorithm"), "sglang")
    method = None if row is None else method_of(row.method)
    return method is not None and method.in_one_pass


def _with_rows(launch: Launch) -> Launch:
    """SGLang's launch with the number of rows that a chain has, and without steps of blocks."""
    options = launch.options
    steps = number(options.get("speculative-num-steps"))
    if drafts_blocks(launch):
        return launch if steps in (None, 1) else launch.without("speculative-num-steps")
    rows = number(options.get("speculative-num-draft-tokens"))
    chain = number(options.get("speculative-eagle-topk")) == 1
    if not chain or steps is None or rows in (None, steps + 1):
        return launch
    parts = tuple(
        replace(p, value=str(steps + 1), raw="") if p.name == "speculative-num-draft-tokens" else p
        for p in launch.parts
    )
    return replace(launch, parts=parts)
