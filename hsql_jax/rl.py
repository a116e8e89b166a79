"""Reinforcement learning: rollouts in the environment service become batches for the one loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hsql_env.records import PublicTask
from hsql_jax.checkpoint import Checkpoints
from hsql_jax.config import fingerprint
from hsql_jax.data import Batch, pack
from hsql_jax.errors import UserError
from hsql_jax.metrics import RunLog
from hsql_jax.model import ModelConfig
from hsql_jax.objectives import Objective, resolve
from hsql_jax.optim import OptimConfig, eval_params, make_optimizer
from hsql_jax.rollout.player import Played, Player
from hsql_jax.sft import stack
from hsql_jax.train import (
    Metrics,
    TrainState,
    create_state,
    make_scorer,
    make_train_step,
    skip_line,
    train,
)

FIRST_ZERO_ITERATIONS = 5  # all rewards zero from the start: the harness or the parser is broken
LATER_ZERO_ITERATIONS = 2  # all rewards zero after a success: the policy collapsed
MOST_ROLLOUTS = 10  # of one iteration, while too few groups have anything to teach


@dataclass(frozen=True)
class RlConfig:
    """An RL stage. An iteration samples `questions` groups of `group` episodes."""

    optim: OptimConfig
    objective: str = "dapo"
    iterations: int = 10
    questions: int = 16
    group: int = 8  # G of equation (7)
    updates: int = 2  # optimizer steps an iteration, each on its share of the groups
    temperature: float = 1.0
    rows: int = 8  # packed rows of a micro-batch, of a session's tokens each
    recompute: bool = False  # old log-probabilities by the trainer, instead of the sampler's own
    eval_every: int = 0  # iterations between two greedy evaluations on held-out tasks; 0: none
    save_every: int = 4  # iterations between two checkpoints

    def __post_init__(self) -> None:
        least = {n: getattr(self, n) for n in ("iterations", "group", "rows", "save_every")}
        if small := [f"rl.{name} = {size}" for name, size in least.items() if size < 1]:
            raise ValueError(f"{small[0]}: give at least 1")
        if self.eval_every < 0:
            raise ValueError(f"rl.eval_every = {self.eval_every}: give at least 0")
        if self.temperature <= 0:
            raise ValueError(f"rl.temperature = {self.temperature}: sampling needs more than 0")
        if not 1 <= self.updates <= self.questions:
            raise ValueError(
                f"rl.updates = {self.updates}: each update needs a group, so give 1 to "
                f"{self.questions} (rl.questions)"
            )


Group = list[Played]  # G episodes of one question


class NothingToLearn(UserError):
    """A guard stopped RL: going on would burn hours."""


Score = Callable[[Any, Batch], np.ndarray]  # of `make_scorer`


class Rollouts:
    """The source of RL batches: samples from the policy as it is when its queue is empty.

    `score` computes log-probabilities for an objective, or a config, that wants them of the
    trainer; `reference` are the parameters at the start, for an objective with a divergence.
    """

    def __init__(
        self,
        player: Player,
        tasks: Sequence[PublicTask],
        objective: Objective,
        config: RlConfig,
        row_tokens: int,
        packed: bool,
        seed: int,
        sink: Path,
        score: Score,
        reference: Any,
    ) -> None:
        self._player, self._objective, self._config = player, objective, config
        self._score, self._reference = score, reference
        self._row_tokens, self._packed, self._sink = row_tokens, packed, sink
        order = np.random.default_rng(seed).permutation(len(tasks))
        self._tasks = [tasks[i] for i in order]
        self.cursor = 0  # questions drawn so far
        self.zero_iterations, self.succeeded = 0, False
        self.metrics: Metrics = {}
        self._queue: list[Batch] = []

    def state(self) -> dict[str, Any]:
        """The position between two iterations, as JSON."""
        return {
            "cursor": self.cursor,
            "zero_iterations": self.zero_iterations,
            "succeeded": self.succeeded,
            "sink_bytes": self._sink.stat().st_size,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a position."""
        self.cursor = state["cursor"]
        self.zero_iterations, self.succeeded = state["zero_iterations"], state["succeeded"]
        os.truncate(self._sink, state["sink_bytes"])  # what came later is played again

    def next_batch(self, state: TrainState) -> Batch:
        """The next update's batch [A, B, T]; plays an iteration of episodes when none is left.

        Raises `NothingToLearn` when a guard trips.
        """
        if not self._queue:
            self._queue = self._batches(self._effective_groups(state), state.params)
        return self._queue.pop(0)

    def _effective_groups(self, state: TrainState) -> list[Group]:
        """Groups that train, of as many rollouts as it takes: DAPO's dynamic sampling, bounded."""
        begin = time.monotonic()
        sampled: list[Group] = []
        for _ in range(MOST_ROLLOUTS):
            groups = self._sample(state.params, int(state.step))
            self._guard(groups)
            sampled += groups
            kept = [group for group in sampled if self._objective.keep(correctness(group))]
            self.metrics = group_metrics(sampled, kept) | {"rollout_s": time.monotonic() - begin}
            if len(kept) >= self._config.updates:  # at least one for each update
                return kept
        raise NothingToLearn(
            f"rl: {MOST_ROLLOUTS} rollouts in a row without enough groups to train on; "
            "the tasks are too hard or too easy for this policy"
        )

    def _sample(self, params: Any, step: int) -> list[Group]:
        """Play the next questions; groups in which the harness failed are left out whole."""
        config = self._config
        picks = range(self.cursor, self.cursor + config.questions)
        drawn = [(pick, self._tasks[pick % len(self._tasks)]) for pick in picks]
        self.cursor += config.questions
        jobs = [
            (task, pick * config.group + g) for pick, task in drawn for g in range(config.group)
        ]
        played = self._player.play(params, jobs, config.temperature, f"rl@{step}")
        with self._sink.open("a", encoding="utf-8") as file:
            file.writelines(one.rollout.trajectory.model_dump_json() + "\n" for one in played)
        groups = [played[i : i + config.group] for i in range(0, len(played), config.group)]
        whole = [group for group in groups if not any(map(spoiled, group))]
        if not whole:
            reason = next(filter(None, map(spoiled, played)))
            raise UserError(f"rl: the environment failed in every group: {reason}; use --resume")
        return whole

    def _guard(self, groups: list[Group]) -> None:
        """Raises `NothingToLearn` when too many iterations had no reward at all."""
        if any(rewards(group).any() for group in groups):
            self.zero_iterations, self.succeeded = 0, True
            return
        self.zero_iterations += 1
        if not self.succeeded and self.zero_iterations >= FIRST_ZERO_ITERATIONS:
            raise NothingToLearn(
                f"rl: no reward in the first {self.zero_iterations} iterations; train the SFT "
                "policy further or check the environment's verdicts before RL"
            )
        if self.succeeded and self.zero_iterations >= LATER_ZERO_ITERATIONS:
            raise NothingToLearn(
                f"rl: no reward in {self.zero_iterations} iterations in a row, the policy "
                "collapsed; start again with a lower learning rate"
            )

    def _batches(self, kept: list[Group], params: Any) -> list[Batch]:
        """One batch an update: each on its share of the groups, all of one shape."""
        config = self._config
        most = -(-config.questions * config.group // (config.updates * config.rows)) + config.group
        batches, gaps = [], []
        for share in (kept[update :: config.updates] for update in range(config.updates)):
            examples = []
            for group in share:
                advantages = self._objective.advantage(rewards(group))
                for one, advantage in zip(group, advantages, strict=True):
                    if one.session is not None and any(one.session.mask):
                        examples.append(one.session.example(float(advantage)))
            micro = pack(examples, self._row_tokens, config.rows, self._packed)
            if not micro:
                raise UserError("rl: no prompt leaves room for a turn; raise --engine.lengths")
            micro = [self._scored(one, params) for one in micro]
            gaps += [sampler_gap(one) for one in micro if one.sampler_logprobs is not None]
            padding = jax.tree.map(np.zeros_like, micro[0])
            batches.append(stack(micro + [padding] * (most - len(micro))))
        if gaps:
            self.metrics["sampler_gap"] = max(gaps)
        return batches

    def _scored(self, batch: Batch, params: Any) -> Batch:
        """The micro-batch [B, T] with the log-probabilities that the objective reads."""
        if self._config.recompute or self._objective.recompute:
            old = self._score(params, stack([batch]))[0]
            batch = replace(batch, old_logprobs=old, sampler_logprobs=batch.old_logprobs)
        if self._objective.reference:
            reference = self._score(self._reference, stack([batch]))[0]
            batch = replace(batch, ref_logprobs=reference)
        return batch


def sampler_gap(batch: Batch) -> float:
    """How far the sampler's log-probabilities are from the trainer's, at the worst loss token."""
    gap = (batch.old_logprobs - batch.sampler_logprobs) * batch.loss_mask
    return float(np.max(np.abs(gap)))


def spoiled(one: Played) -> str:
    """Why the harness failed in the episode, "" when it did not."""
    return one.rollout.trajectory.verdict.infrastructure


def rewards(group: Group) -> np.ndarray:
    """The rewards [G] of a group, equation (2)."""
    return np.array([one.rollout.trajectory.verdict.reward for one in group], np.float32)


def correctness(group: Group) -> np.ndarray:
    """1 where the episode earned its reward [G], the count of equation (11)."""
    return (rewards(group) > 0).astype(np.int32)


def group_metrics(groups: list[Group], kept: list[Group]) -> Metrics:
    """What an iteration's episodes were like."""
    episodes = [one for group in groups for one in group]
    trajectories = [one.rollout.trajectory for one in episodes]
    sampled = [sum(one.session.mask) for one in episodes if one.session]
    count = max(len(episodes), 1)
    return {
        "reward": sum(t.verdict.reward for t in trajectories) / count,
        "accuracy": sum(t.verdict.result_ok for t in trajectories) / count,
        "protocol_ok": sum(t.verdict.protocol_ok for t in trajectories) / count,
        "effective_groups": len(kept) / max(len(groups), 1),
        "turns": sum(t.turns for t in trajectories) / count,
        "sampled_tokens": sum(sampled) / count,
    }


def run_rl(
    config: RlConfig,
    model: ModelConfig,
    params: Any,
    player: Player,
    tasks: Sequence[PublicTask],
    mesh: Mesh,
    folder: Path,
    sink: Path,
    row_tokens: int,
    log: RunLog,
    seed: int,
    measure: Callable[[Any, int], Metrics] | None = None,
) -> Any:
    """Train `config.iterations` iterations from `params`; return the parameters to evaluate.

    Continues from the newest checkpoint in `folder`; one is saved after every few iterations.
    `measure(params, iteration)` gives what is logged of the policy every `config.eval_every`.
    """
    steps = config.iterations * config.updates
    objective = resolve(config.objective)
    tx = make_optimizer(config.optim, steps)
    score = make_scorer(model, mesh, config.temperature)
    source = Rollouts(
        player, tasks, objective, config, row_tokens, model.packed, seed, sink, score, params
    )
    with Checkpoints(folder, config=fingerprint(config), say=log.print) as checkpoints:
        if checkpoints.latest() is None:
            state = create_state(params, model, tx, mesh)
            sink.unlink(missing_ok=True)
        else:
            state, extra = checkpoints.restore(model, tx, mesh)
            source.restore(extra["rollouts"])
        done = int(state.step) // config.updates
        with log.stage("rl", config.iterations, "iterations", done) as stage:

            def on_step(state: TrainState, metrics: Metrics) -> None:
                step = int(state.step)
                iteration, rest = divmod(step, config.updates)
                if measure and config.eval_every and not rest and not iteration % config.eval_every:
                    metrics |= measure(eval_params(state.opt_state, state.params), iteration)
                log.write("rl", step, metrics | source.metrics)
                if metrics["skipped"]:
                    log.print(f"rl: {skip_line(state, metrics)}")
                if not rest:
                    shown = {"kl": metrics["kl"]} if "kl" in metrics else {}
                    stage.advance(1, reward=source.metrics["reward"], **shown)
                    if step == steps or iteration % config.save_every == 0:
                        checkpoints.save(state, {"rollouts": source.state()})

            step_fn = make_train_step(model, objective.loss, tx, mesh, config.temperature)
            state = train(state, step_fn, source.next_batch, steps, on_step)
    return eval_params(state.opt_state, state.params)
