"""From settings to an engine: finds the models, builds the parts and whoever decides about drafts.

The only place that knows all the constructors.
"""

import logging
import os
import random
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foretoken.backend import backend_for, packing_devices, plan_search
from foretoken.checkpoint import find_model
from foretoken.config import EngineConfig, SpeculativeConfig, resolve
from foretoken.config.auto import AUTO
from foretoken.config.memory import Drafting, show
from foretoken.config.quantization import PrecisionConfig
from foretoken.config.resolve import resolve_device, resolve_dtype, resolve_invariance
from foretoken.control.adaptive.controller import AdaptiveControl
from foretoken.control.adaptive.drafter import DrafterFacts
from foretoken.control.adaptive.planner import Planner
from foretoken.control.budget import LivePolicy, LoadLimit, RequestBudget
from foretoken.control.failsafe import Failsafe
from foretoken.control.learned.acceptance import LearnedAcceptance
from foretoken.control.learned.cost_file import CostKeeper
from foretoken.control.report.explain import by_plan, by_settings, with_floors
from foretoken.control.report.journal import ControlJournal
from foretoken.distributed.on_device import group_on
from foretoken.distributed.processes import Followers, Others, meet
from foretoken.engine.engine import Engine, EngineParts, SpeculationController, StepObserver
from foretoken.engine.metrics import EngineMetrics
from foretoken.engine.requests import Intake
from foretoken.engine.timing import EngineCosts, Timed, find_costs, seconds_for_timing
from foretoken.errors import ConfigError
from foretoken.hardware import Gpus, Hardware, check_temporary_folder
from foretoken.kernels.threads import StepThreads
from foretoken.kv.features import FINAL
from foretoken.kv.lazy_zeros import gives_back
from foretoken.kv.pool import PagePool
from foretoken.kv.shared_pages import SharedPages
from foretoken.models import LoadOptions
from foretoken.ops.quantize_kv import kv_store_dtype
from foretoken.proposers.base import Proposer
from foretoken.proposers.choose.drafters import Drafters, draft_outcomes
from foretoken.proposers.choose.offers import Member
from foretoken.proposers.choose.policy import FirstPolicy, PlannedPolicy, Policy
from foretoken.proposers.custom import DraftCheck
from foretoken.proposers.drafter_factory import create_drafters, feature_points, find_drafters
from foretoken.proposers.method import BuildContext, DrafterSpec, Target
from foretoken.runtime.ahead import StepAhead
from foretoken.runtime.batch import Batch, Verification
from foretoken.runtime.grammar import Grammars
from foretoken.runtime.rank0_driver import Leader, LoadShare
from foretoken.runtime.rank_worker import follow
from foretoken.runtime.rules import RuleSettings
from foretoken.runtime.rules.base import INVALID, LOSSY
from foretoken.runtime.runner import Runner
from foretoken.runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from foretoken.runtime.verifier import Verifier
from foretoken.shape import ModelShape
from foretoken.shape.memory_formula import most_pages
from foretoken.text.streams import TextStreams
from foretoken.text.tokenizer import Tokenizer
from foretoken.types import StepStats

logger = logging.getLogger("foretoken")

_DEFAULT_DRAFTS = 5
_USUAL_CHANCE = 0.6
"""Of a first draft, where the method table knows nothing of its drafter."""
_NO_LIMIT = 1 << 30
_RANK_WAIT_S = 30.0
"""A rank that is so much later than others outside of steps is taken for lost."""


def build_engine(
    config: EngineConfig, proposer: Proposer | None = None, others: Others | None = None
) -> Engine:
    """Load everything that `config` names and put it together.

    Args:
        config: what the user set.
        proposer: drafts instead of what `config.speculative_config` names; it is asked for
            num_speculative_tokens drafts, 5 if there is no speculative_config.
        others: where the other processes come from that share the model; None: they are started.

    Raises:
        ConfigError: settings that contradict each other or the model, or no temporary folder.
        ModelError: a model is missing, not supported, or broken on disk.
    """
    check_temporary_folder()
    return _Assembly(config, others).engine(proposer)


def default_speculation(config: EngineConfig) -> dict[str, Any] | None:
    """The speculative_config where the user gives none: `auto` where it never changes a token.

    Elsewhere None, and a warning says why and what to type. For the command line: `LLM` without a
    speculative_config decodes plainly.

    Raises:
        ConfigError: a CUDA device is wanted, and there is none.
        ModelError: the model is missing or not supported.
    """
    shape = ModelShape.from_config(find_model(config.model, revision=config.revision))
    gpus = _gpus(config.num_processes)
    device = resolve_device(config.device, gpus)
    packs = packing_devices()
    dtype = resolve_dtype(config.dtype, device, Hardware.detect(), shape, packs)
    if resolve_invariance(config, device, dtype, shape, packs, gpus):
        return {"method": AUTO}
    logger.warning(
        "no speculation: with %s on %s and batch_invariant off, a draft may decide between two "
        "tokens that are equally likely up to rounding. --speculative-config auto speculates "
        "all the same, --batch-invariant on keeps every token",
        dtype,
        device,
    )
    return None


class _Assembly:
    """What the parts are built from."""

    def __init__(self, config: EngineConfig, others: Others | None) -> None:
        self.others = others
        self.folder = find_model(config.model, revision=config.revision)
        self.shape = ModelShape.from_config(self.folder)
        self.speculative = config.speculative_config
        self.tokenizer = _tokenizer(config, self.folder)
        ids = set(self.shape.eos_token_ids)
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            ids.add(self.tokenizer.eos_token_id)
        self.eos_ids = frozenset(token for token in ids if token < self.shape.vocab_size)
        target = Target(shape=self.shape, tokenizer=self.tokenizer)
        self.found = find_drafters(self.speculative, target)
        self.points = feature_points(self.found)
        self.config = resolve(
            config,
            Hardware.detect(),
            self.shape,
            drafting=self._drafting(),
            packs=packing_devices(),
            gpus=_gpus(config.num_processes),
        )
        logger.info(self.config.describe())
        for line in self.config.describe_memory():
            logger.info(line)
        if self.config.budget.mapped:
            told = "memory: %s of experts have no room and stay on the disk, in a mapped file: "
            told += "steps wait for those that are read again"
            logger.warning(told, show(self.config.budget.mapped))
        self.pool = PagePool(self.config.num_pages, self.config.page_size)

    def _drafting(self) -> Drafting:
        """What the drafters will keep in memory."""
        max_drafts = self.speculative.num_speculative_tokens if self.speculative else 0
        found = self.found.values()
        return Drafting(
            models=tuple(one.model for one in found if one.model is not None),
            heads=tuple(one.head for one in found if one.head is not None),
            features_per_token=len(self.points) * self.shape.hidden_size,
            lookahead=max_drafts,
        )

    def engine(self, proposer: Proposer | None) -> Engine:
        """The engine, and the processes that share its model."""
        followers = self._followers()
        try:
            return self._engine(proposer, followers)
        except BaseException:
            if followers is not None:
                followers.close()
            raise

    def _engine(self, proposer: Proposer | None, followers: Followers | None) -> Engine:
        config, shape = self.config, self.shape
        rule = self.speculative.rule.rejection_sample_method if self.speculative else "auto"
        grammars = self._grammars()
        settings = _rule_settings(self.speculative)
        verifier = Verifier(shape.vocab_size, config.device, rule, settings, grammars)
        texts = TextStreams(self.tokenizer)
        runner = self._target(None if followers is None else Leader(followers.joined))
        shared = self._shared_pages(runner)
        given = None if proposer is None else self._given(proposer, grammars)
        drafters = given or self._drafters(verifier, runner, shared)
        threads = self._threads()
        timed = Timed(
            config=config, runner=runner, members=drafters.members, pool=self.pool, threads=threads
        )
        controller = build_controller(timed, drafters, self.found)
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=config.max_model_len,
                enable_prefix_caching=config.user.enable_prefix_caching,
            ),
            self.pool,
            plan_drafts=controller.plan,
            find_stop_string=texts.find_stop_string,
            shared=shared,
        )
        return Engine(
            EngineParts(
                config=config,
                tokenizer=self.tokenizer,
                intake=self._intake(drafters, scheduler, grammars),
                scheduler=scheduler,
                proposer=drafters,
                block_drafters=drafters.block_drafters,
                controller=controller,
                observers=(controller.observe,),
                metrics=EngineMetrics(
                    config.user.model, log_stats=not config.user.disable_log_stats
                ),
                runner=runner,
                verifier=verifier,
                ahead=StepAhead(scheduler, verifier, runner, controller.most_drafts),
                texts=texts,
                grammars=grammars,
                threads=threads,
                shared=shared,
                followers=followers,
            )
        )

    def _target(self, leader: Leader | None) -> Runner:
        """The model that is served, loaded."""
        config = self.config
        options = replace(
            self._options(config.user.precision, batch_invariant=config.batch_invariant),
            keeps_head=any(one.borrows_head for one in self._drafting().heads),
            by_layers=config.user.pipeline_parallel_size > 1,
            points=tuple(point for point in self.points if point != FINAL),
            maps_experts=config.budget.mapped > 0,
        )
        return self._runner(self.folder, options, leader, self.points)

    def _intake(self, drafters: Drafters, scheduler: Scheduler, grammars: Grammars) -> Intake:
        return Intake(
            config=self.config,
            tokenizer=self.tokenizer,
            drafters=drafters.max_drafts,
            scheduler=scheduler,
            grammars=grammars,
            vocab_size=self.shape.vocab_size,
            eos_token_ids=self.eos_ids,
            placeholders={token: name for name, token in reversed(self.shape.placeholders)},
            seeds=random.Random(self.config.user.seed),
        )

    def _threads(self) -> StepThreads:
        """As many as PyTorch has now; its own are kept where it does the heavy work."""
        backend = backend_for(torch.device(self.config.device))
        return backend.step_threads(getattr(torch, self.config.dtype), self._threads_of_a_rank)

    @property
    def _threads_of_a_rank(self) -> int:
        """Processes that share a model share the cores too; a launcher may have shared them out."""
        threads = torch.get_num_threads()
        if self.others is not None and os.environ.get("OMP_NUM_THREADS"):
            return threads
        return max(1, threads // self.config.user.num_processes)

    def _followers(self) -> Followers | None:
        """The processes of the other ranks, which wait for models; None: this one does it all."""
        size = self.config.user.num_processes
        if size == 1:
            return None
        rendezvous, device = meet(size, _RANK_WAIT_S), self.config.device
        threads = self._threads_of_a_rank
        followers = Followers(rendezvous, follow, threads, device, others=self.others)
        try:
            followers.group = group_on(device, followers.joined)
        except BaseException:
            followers.close()
            raise
        return followers

    def _grammars(self) -> Grammars:
        text = None if self.tokenizer is None else self.tokenizer.to_json
        ids = sorted(self.eos_ids)
        return Grammars(text, self.shape.vocab_size, ids, self.config.device)

    def _options(self, precision: PrecisionConfig, *, batch_invariant: bool) -> LoadOptions:
        return LoadOptions(
            dtype=getattr(torch, self.config.dtype),
            device=torch.device(self.config.device),
            batch_invariant=batch_invariant,
            quantization=precision.quantization,
            x_bits=precision.x_bits,
            x_bits_asked_by=precision.x_bits_asked_by,
            page_size=self.config.page_size,
            kv_store_dtype=kv_store_dtype(precision.kv_cache_dtype),
            max_model_len=self.config.max_model_len,
        )

    def _draft_runner(self, folder: Path, precision: PrecisionConfig) -> Runner:
        return self._runner(folder, self._options(precision, batch_invariant=False))

    def _runner(
        self,
        folder: Path,
        options: LoadOptions,
        leader: Leader | None = None,
        points: tuple[int, ...] = (),
    ) -> Runner:
        num_pages = self.config.num_pages
        if leader is not None:
            leader.load(LoadShare(folder, replace(options, keeps_head=False), num_pages))
            options = replace(options, group=leader.group)
        runner = Runner.load(
            folder,
            options,
            num_pages=num_pages,
            points=points,
            readers={name: one.points for name, one in self.found.items()} if points else None,
            generations=self.pool.generation,
        )
        if leader is not None:
            runner.lead(leader)
        return runner

    def _shared_pages(self, target: Runner) -> SharedPages | None:
        """One budget for all pages, where drafters keep any or layers have a window, and the device
        gives memory back."""
        budget, window = self.config.budget, self.config.window
        gives = gives_back(torch.device(self.config.device))
        if not gives or not (budget.is_shared or window is not None):
            return None
        rest_bytes, num_bytes = target.page_bytes, budget.kv_bytes
        if window is None:
            num_bytes = max(num_bytes, self.pool.num_pages * rest_bytes)
            shared = SharedPages(self.pool, num_bytes, rest_bytes, target.give_back)
        else:
            # Where all layers have a window, a page of the others takes next to nothing.
            rest_bytes = max(1, rest_bytes - target.window_bytes)
            rest, windowed = (partial(target.give_back, windowed=has) for has in (False, True))
            step, pages = self.config.max_num_batched_tokens, self.pool.num_pages
            most = min(pages, most_pages(window, step, self.pool.page_size))
            num_bytes = max(num_bytes, pages * rest_bytes + most * target.window_bytes)
            shared = SharedPages(self.pool, num_bytes, rest_bytes, rest)
            shared.add_windows(window, step, target.window_bytes, windowed)
        if budget.is_shared and target.features is not None:
            target.share_features(shared)
        return shared

    def _drafters(self, verifier: Verifier, target: Runner, shared: SharedPages | None) -> Drafters:
        context = BuildContext(
            target=target,
            verifier=verifier,
            pool=self.pool,
            load_model=self._draft_runner,
            device=self.config.device,
            max_model_len=self.config.max_model_len,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            shared=shared,
        )
        return create_drafters(self.speculative, self.found, context, self._policy())

    def _policy(self) -> Policy:
        """Who drafts: as the plans of steps say, or in the order of the settings."""
        return PlannedPolicy() if self.config.user.control == "adaptive" else FirstPolicy()

    def _given(self, proposer: Proposer, grammars: Grammars) -> Drafters:
        """A drafter of the caller's own, under the name that it has."""
        if not isinstance(proposer, Proposer) or not getattr(proposer, "name", ""):
            raise ConfigError("proposer", proposer, "a foretoken Proposer with a name")
        given = self.speculative
        max_drafts = given.num_speculative_tokens if given else _DEFAULT_DRAFTS
        check = DraftCheck(proposer.name, self.shape.vocab_size)
        member = Member(proposer=proposer, max_drafts=max_drafts, check=check)
        return Drafters({proposer.name: member}, self._policy(), grammars)


def _rule_settings(speculative: SpeculativeConfig | None) -> RuleSettings:
    """What the rules need; says so where the output will not be the model's own."""
    if speculative is None:
        return RuleSettings()
    rule = speculative.rule.rejection_sample_method
    if rule in LOSSY:
        logger.warning("rejection_sample_method %r is LOSSY: it changes what the model says", rule)
    if rule in INVALID:
        logger.warning("rejection_sample_method %r: all output is INVALID, for timing only", rule)
    return RuleSettings(
        posterior_threshold=speculative.rule.posterior_threshold,
        posterior_alpha=speculative.rule.posterior_alpha,
        synthetic_rates=speculative.synthetic_rates,
    )


def _tokenizer(config: EngineConfig, folder: Path) -> Tokenizer | None:
    """The named tokenizer; the model's own if it has one, else none: ids in, ids out."""
    if config.tokenizer is not None:
        return Tokenizer(find_model(config.tokenizer, revision=config.revision))
    return Tokenizer.of_folder(folder)


def _gpus(used: int) -> Gpus | None:
    """The CUDA devices, if there are any: process r of `used` ones computes on device r."""
    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    places = range(min(used, count)) if used > 1 else (torch.cuda.current_device(),)
    free = min(int(torch.cuda.mem_get_info(place)[0]) for place in places)
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    major, minor = torch.cuda.get_device_capability(places[0])
    why_not = _why_not(major, minor)
    return Gpus(
        count=count,
        free_memory=free,
        has_nccl=has_nccl,
        name=f"{torch.cuda.get_device_name(places[0])}, compute capability {major}.{minor}",
        keeps_bits=why_not is None and backend_for(torch.device("cuda")).keeps_bits,
        why_not=why_not,
    )


def _why_not(major: int, minor: int) -> str | None:
    """Why this PyTorch cannot compute on a device of this capability; None: it can."""
    built = torch.cuda.get_arch_list()
    numbers = [int(name.partition("_")[2].rstrip("af")) for name in built]
    fits = any(number // 10 == major and number % 10 <= minor for number in numbers)
    newer = any(
        name.startswith("compute") and number <= 10 * major + minor
        for name, number in zip(built, numbers, strict=True)
    )
    if fits or newer or not built:
        return None
    return f"compute capability {major}.{minor}; this PyTorch is built for {', '.join(built)}"


def build_controller(
    parts: Timed, drafters: Drafters, found: Mapping[str, DrafterSpec]
) -> SpeculationController:
    """Who decides: adaptive control, or the settings of the engine alone.

    Args:
        parts: what can be timed, where no earlier process learnt what steps cost.
        drafters: those of the engine.
        found: how its settings describe them, by label.
    """
    user = parts.config.user
    max_drafts = drafters.max_drafts
    live = LivePolicy()
    way = user.control if max_drafts else "fixed"
    budget = RequestBudget(max_drafts, _load_limit(user.speculative_config), live)
    costs = control = keeper = None
    if way == "adaptive":
        costs = find_costs(parts, most_seconds=seconds_for_timing())
        control, keeper = _control(parts, found, budget, costs), costs.keeper()
    journal = _journal(way, drafters, control) if max_drafts else None
    if keeper is not None:
        # Nobody closes an engine; it is collected, or the process ends.
        weakref.finalize(control, keeper.close)
    learn = _learner(drafters, control, journal, keeper)
    failsafe = Failsafe(
        budget.plan if control is None else control.plan,
        tuple(max_drafts),
        say=_nobody if journal is None else journal.fail,
    )
    return SpeculationController(
        plan=failsafe.plan,
        observe=failsafe.guarded(learn),
        live=live,
        most_drafts=budget.budget,
        release=_nobody if control is None else failsafe.guarded(control.release),
        control=control,
        costs=costs,
        journal=journal,
    )


def _nobody(_: str) -> None:
    """There is nobody to tell."""


def _control(
    parts: Timed, found: Mapping[str, DrafterSpec], budget: RequestBudget, costs: EngineCosts
) -> AdaptiveControl:
    """Adaptive control, which learns from what is known of costs on."""
    members = parts.members
    facts = [
        DrafterFacts(
            name=name,
            max_drafts=member.max_drafts,
            looks_up=member.proposer.looks_up,
            missing=member.num_missing,
            max_window=member.proposer.max_window,
            reads_features=name in found and bool(found[name].points),
            floor=member.floor,
        )
        for name, member in members.items()
    ]
    speculative = parts.config.user.speculative_config
    given = () if speculative is None else speculative.drafters
    usual = {one.label: one.usual_acceptance for one in given}
    acceptance = LearnedAcceptance({name: usual.get(name, _USUAL_CHANCE) for name in members})
    search = plan_search()
    return AdaptiveControl(Planner(budget, facts, costs.target, costs.drafters, acceptance, search))


def _load_limit(speculative: SpeculativeConfig | None) -> LoadLimit | None:
    if speculative is None:
        return None
    load = speculative.load
    if load.num_speculative_tokens_per_batch_size is not None:
        return LoadLimit(load.num_speculative_tokens_per_batch_size)
    if load.disable_by_batch_size is not None:
        return LoadLimit.off_from(load.disable_by_batch_size, _NO_LIMIT)
    return None


def _learner(
    drafters: Drafters,
    control: AdaptiveControl | None,
    journal: ControlJournal | None,
    keeper: CostKeeper | None,
) -> StepObserver:
    """Whoever learns from a step, one after another: they are given its plan, its outcome and its
    times."""

    def observe(batch: Batch, verification: Verification, stats: StepStats) -> None:
        outcomes = draft_outcomes(batch, verification) if stats.num_drafts else ()
        drafters.observe(outcomes)
        if journal is not None:
            journal.observe(batch.plan, outcomes, stats)
        if control is not None:
            control.observe(batch.plan, outcomes, stats)
        if keeper is not None:
            keeper.passed(stats.total_s)

    return observe


def _journal(mode: str, drafters: Drafters, control: AdaptiveControl | None) -> ControlJournal:
    """Writes down what control does, and can say why."""
    max_drafts = drafters.max_drafts
    why = by_settings(max_drafts)
    if control is not None:
        looks_up = {name for name, one in drafters.members.items() if one.proposer.looks_up}
        why = by_plan(control.outlook, looks_up)
    floors = {name: member.floor for name, member in drafters.members.items()}
    there = {name: floor for name, floor in floors.items() if floor is not None}
    why = with_floors(why, there)
    if control is None:
        return ControlJournal(mode, max_drafts, why)
    return ControlJournal(
        mode, max_drafts, why, facts=control.facts, step_by_rows=control.step_by_rows
    )
