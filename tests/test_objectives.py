"""One contract for every objective, a user's own included, and each equation in numpy.

Shapes: B rows, T time, N tokens of a trajectory.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from hsql_jax.cli import main
from hsql_jax.errors import UserError
from hsql_jax.objectives import (
    OBJECTIVES,
    LossSum,
    Objective,
    Tokens,
    any_group,
    dapo,
    group_advantage,
    resolve,
    token_weights,
    with_kl,
)
from hsql_jax.objectives.contract import (
    CHECKS,
    LAYOUTS,
    ONE_A_ROW,
    PACKED,
    TRAJECTORIES,
    Broken,
    Trajectory,
    by_trajectory,
    evaluator,
    lay_out,
    trajectory,
)

FIXTURES = Path(__file__).parent / "fixtures"
USERS = f"{FIXTURES / 'reinforce.py'}:reinforce"
TANH = f"{FIXTURES / 'soft_clip.py'}:soft_clip"
EVERY = [*OBJECTIVES, USERS, TANH]
RL = [name for name in EVERY if name != "sft"]
PER_TRAJECTORY = ["grpo", "gspo"]  # mean over trajectories; the others, over loss tokens
WITH_KL = ["grpo_kl"]  # have a gradient beside the advantage's


@functools.cache
def objective(name: str) -> Objective:
    return resolve(name)


def evaluate(name: str, tokens: Tokens) -> tuple[LossSum, np.ndarray]:
    return evaluator(objective(name))(tokens)


# --- the contract ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(name: str, check: Callable[[Objective], None]) -> None:
    check(objective(name))


def _wrong(loss: Callable[[Tokens], LossSum], **changes: object) -> Objective:
    return Objective(any_group, group_advantage, loss)._replace(**changes)


def _sum(values: object, weight: object) -> LossSum:
    return LossSum(jnp.sum(values), jnp.sum(weight))


WRONG: dict[str, Objective] = {
    "groups": _wrong(dapo().loss, keep=lambda correct: correct.sum()),
    "masked_tokens": _wrong(lambda t: _sum(-t.logprobs * t.advantages, t.mask)),
    "zero_advantage": _wrong(lambda t: _sum((0.1 - t.advantages) * t.logprobs * t.mask, t.mask)),
    "layouts": _wrong(
        lambda t: _sum(-t.logprobs * t.advantages * t.mask / t.mask.shape[1], t.mask)
    ),
    "micro_batches": _wrong(
        lambda t: LossSum(jnp.mean(-t.logprobs * t.advantages * t.mask), jnp.float32(1.0))
    ),
    "padding": _wrong(
        lambda t: _sum(-t.logprobs * t.advantages * t.mask, jnp.ones(t.mask.shape[0]))
    ),
    "finite": _wrong(
        lambda t: _sum(t.advantages * jnp.exp((t.logprobs - t.old_logprobs) * 2) * t.mask, t.mask)
    ),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract_finds_what_is_wrong(check: Callable[[Objective], None]) -> None:
    with pytest.raises(Broken):
        check(WRONG[check.__name__])


@pytest.mark.parametrize("name", [name for name in EVERY if name not in WITH_KL])
def test_on_policy_gradient_is_that_of_reinforce(name: str) -> None:
    """d(-sum_t w A log pi)/d log pi = -w A: w is 1 for a mean of tokens, 1/N_i of trajectories."""
    on_policy = [dataclasses.replace(t, old=t.logprobs, sampler=t.logprobs) for t in TRAJECTORIES]
    _, gradient = evaluate(name, lay_out(PACKED, trajectories=on_policy))
    for i, found in by_trajectory(gradient, PACKED).items():
        mask = TRAJECTORIES[i].mask[1:]
        weight = 1 / mask.sum() if name in PER_TRAJECTORY else 1.0
        advantage = 1.0 if name == "sft" else TRAJECTORIES[i].advantage
        np.testing.assert_allclose(found, -weight * advantage * mask, rtol=1e-5)


# --- the equations, in float64 -----------------------------------------------------------------


def log_ratios(t: Trajectory) -> np.ndarray:
    """Of the loss tokens T_i."""
    ratio = t.logprobs.astype(np.float64) - t.old
    return ratio[t.mask == 1]


def kept(t: Trajectory) -> np.ndarray:
    """Log-probabilities of the loss tokens."""
    return t.logprobs[t.mask == 1].astype(np.float64)


def clip_term(ratio: np.ndarray, advantage: float, low: float, high: float) -> np.ndarray:
    return np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


def equation_6(trajectories: Sequence[Trajectory]) -> float:
    return -float(np.concatenate([kept(t) for t in trajectories]).mean())


def equation_8(trajectories: Sequence[Trajectory]) -> float:
    means = [clip_term(np.exp(log_ratios(t)), t.advantage, 0.2, 0.2).mean() for t in trajectories]
    return -float(np.mean(means))


def equation_10(trajectories: Sequence[Trajectory]) -> float:
    terms = [clip_term(np.exp(log_ratios(t).mean()), t.advantage, 3e-4, 3e-4) for t in trajectories]
    return -float(np.mean(terms))


def equation_12(trajectories: Sequence[Trajectory]) -> float:
    terms = [clip_term(np.exp(log_ratios(t)), t.advantage, 0.20, 0.28) for t in trajectories]
    return -float(np.concatenate(terms).mean())


def users_own(trajectories: Sequence[Trajectory]) -> float:
    return -float(np.concatenate([t.advantage * kept(t) for t in trajectories]).mean())


def equation_cispo(trajectories: Sequence[Trajectory]) -> float:
    """Its gradient's constant, the bounded ratio, is of the trajectories as they are."""
    terms = [
        np.minimum(np.exp(log_ratios(now)), 5.0) * t.advantage * kept(t)
        for t, now in zip(trajectories, TRAJECTORIES, strict=True)
    ]
    return -float(np.concatenate(terms).mean())


def equation_dr_grpo(trajectories: Sequence[Trajectory]) -> float:
    terms = [clip_term(np.exp(log_ratios(t)), t.advantage, 0.2, 0.2).sum() for t in trajectories]
    return -float(np.mean(terms)) / 4096


def equation_rloo(trajectories: Sequence[Trajectory]) -> float:
    return -float(np.mean([t.advantage * kept(t).sum() for t in trajectories]))


def equation_grpo_kl(trajectories: Sequence[Trajectory]) -> float:
    gaps = [(t.logprobs.astype(np.float64) - t.reference)[t.mask == 1] for t in trajectories]
    return equation_8(trajectories) + 1e-3 * np.mean([(np.exp(-d) - 1 + d).mean() for d in gaps])


def equation_dapo_tis(trajectories: Sequence[Trajectory]) -> float:
    terms = []
    for t in trajectories:
        weights = np.minimum(np.exp(t.old.astype(np.float64) - t.sampler), 2.0)[t.mask == 1]
        terms.append(weights * clip_term(np.exp(log_ratios(t)), t.advantage, 0.20, 0.28))
    return -float(np.concatenate(terms).mean())


def soft_clip(trajectories: Sequence[Trajectory]) -> float:
    terms = [np.tanh(log_ratios(t)) * t.advantage for t in trajectories]
    return -float(np.concatenate(terms).mean())


EQUATIONS: dict[str, Callable[[Sequence[Trajectory]], float]] = {
    "sft": equation_6,
    "grpo": equation_8,
    "gspo": equation_10,
    "dapo": equation_12,
    "dr_grpo": equation_dr_grpo,
    "cispo": equation_cispo,
    "rloo": equation_rloo,
    "grpo_kl": equation_grpo_kl,
    "dapo_tis": equation_dapo_tis,
    USERS: users_own,
    TANH: soft_clip,
}


@pytest.mark.parametrize("name", EVERY)
def test_loss_is_the_equation(name: str) -> None:
    parts, _ = evaluate(name, lay_out(PACKED))
    value = float(parts.total) / float(parts.weight)
    assert value == pytest.approx(EQUATIONS[name](TRAJECTORIES), rel=1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_gradient_is_the_derivative_of_the_equation(name: str) -> None:
    parts, gradient = evaluate(name, lay_out(*LAYOUTS["tight"]))
    step = 1e-7
    for i, found in by_trajectory(gradient / float(parts.weight), ONE_A_ROW).items():
        for place in range(1, len(TRAJECTORIES[i].mask)):
            values = []
            for sign in (1, -1):
                moved = TRAJECTORIES[i].logprobs.astype(np.float64)
                moved[place] += sign * step
                others = [*TRAJECTORIES]
                others[i] = dataclasses.replace(others[i], logprobs=moved)
                values.append(EQUATIONS[name](others))
            expected = (values[0] - values[1]) / (2 * step)
            assert found[place - 1] == pytest.approx(expected, rel=1e-3, abs=1e-7)


@pytest.mark.parametrize(
    ("name", "low", "high"), [("grpo", 0.2, 0.2), ("dapo", 0.20, 0.28), ("gspo", 3e-4, 3e-4)]
)
def test_statistics_count_clipped_tokens(name: str, low: float, high: float) -> None:
    parts, _ = evaluate(name, lay_out(PACKED))
    below = above = 0
    for t in TRAJECTORIES:
        logs = log_ratios(t)
        ratio = np.exp(np.full_like(logs, logs.mean()) if name == "gspo" else logs)
        below += int(np.sum((ratio < 1 - low) & (t.advantage < 0)))
        above += int(np.sum((ratio > 1 + high) & (t.advantage > 0)))
    assert below > 0
    assert above > 0
    assert float(parts.stats["clip_low"]) == below
    assert float(parts.stats["clip_high"]) == above
    every = np.concatenate([log_ratios(t) for t in TRAJECTORIES])
    assert float(parts.stats["kl"]) == pytest.approx(np.sum(np.expm1(every) - every), rel=1e-4)
    assert float(parts.peaks["logprob_gap"]) == pytest.approx(np.abs(every).max(), rel=1e-5)


def test_dapo_bounds_are_asymmetric() -> None:
    """A ratio of 1.25 still learns under 0.28, and not under GRPO's 0.2."""
    t = trajectory(0, "01", 1.0, 0.0)
    off = dataclasses.replace(t, old=t.logprobs - np.float32(np.log(1.25)))
    tokens = lay_out([[0]], trajectories=[off])
    assert evaluate("dapo", tokens)[1][0, 0] == pytest.approx(-1.25, rel=1e-5)
    assert evaluate("grpo", tokens)[1][0, 0] == 0


# --- groups ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo"])
@pytest.mark.parametrize("rewards", [[1, 0, 0, 0], [1, 1, 0, 1], [0.5, 0.25, 1, 0]])
def test_advantage_is_equation_7(name: str, rewards: list[float]) -> None:
    r = np.array(rewards, np.float64)
    expected = (r - r.mean()) / (r.std() + 1e-6)
    found = resolve(name).advantage(r)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.sum() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("rewards", [[1, 0, 0, 0], [0.5, 0.25, 1, 0]])
def test_advantages_of_the_others(rewards: list[float]) -> None:
    r = np.array(rewards, np.float64)
    np.testing.assert_allclose(resolve("dr_grpo").advantage(r), r - r.mean(), rtol=1e-6)
    others = [r[i] - np.delete(r, i).mean() for i in range(4)]
    np.testing.assert_allclose(resolve("rloo").advantage(r), others, rtol=1e-6)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_equal_rewards_give_no_advantage(reward: float) -> None:
    for name in RL:
        found = resolve(name).advantage(np.full(7, reward))
        np.testing.assert_allclose(found, 0.0, atol=1e-8)


def test_supervised_advantages_are_one() -> None:
    assert resolve("sft").advantage(np.array([0.0, 1.0])).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("correct", [[0, 0, 0], [1, 1, 1], [1, 0, 1]])
def test_dapo_drops_groups_without_contrast(correct: list[int]) -> None:
    group = np.array(correct, np.float32)
    assert resolve("dapo").keep(group) == (0 < sum(correct) < 3)
    assert all(resolve(name).keep(group) for name in ("sft", "grpo", "gspo"))


# --- a divergence from the start -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("k1", lambda d: d),
        ("k2", lambda d: d**2 / 2),
        ("k3", lambda d: np.exp(-d) - 1 + d),
    ],
)
def test_divergence_estimates(kind: str, value: Callable[[np.ndarray], np.ndarray]) -> None:
    plain, both = dapo(), with_kl(dapo(), token_weights, 0.5, kind)  # type: ignore[arg-type]
    assert (plain.reference, both.reference) == (False, True)
    tokens = lay_out(PACKED)
    without, parts = plain.loss(tokens), both.loss(tokens)
    gaps = [(t.logprobs.astype(np.float64) - t.reference)[t.mask == 1] for t in TRAJECTORIES]
    expected = np.sum(value(np.concatenate(gaps)))
    assert float(parts.total - without.total) == pytest.approx(0.5 * expected, rel=1e-4)
    assert float(parts.stats["kl_start"]) == pytest.approx(expected, rel=1e-4)


# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ppo", "'ppo' is none of cispo, dapo, dapo_tis, dr_grpo, grpo, grpo_kl, gspo, rloo, sft"),
        ("missing.py:loss", "cannot load 'missing.py'"),
        ("no.such.module:loss", "cannot load 'no.such.module'"),
        (USERS.replace(":reinforce", ":other"), "has no 'other'"),
        (USERS.replace(":reinforce", ":NOT_AN_OBJECTIVE"), "returned int, not an Objective"),
    ],
)
def test_unknown_objective_is_one_clear_line(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        resolve(name)
    assert "\n" not in str(caught.value)


def test_a_file_that_does_not_parse_is_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("x = 1\ny == = 2\n")
    with pytest.raises(UserError, match=r"broken.py, line 2: invalid syntax$"):
        resolve(f"{file}:y")


# --- the command -------------------------------------------------------------------------------


def test_the_command_names_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-objective", TANH, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["check"] for one in found] == [c.__name__.replace("_", "-") for c in CHECKS]
    assert all(one["broken"] == "" for one in found)


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from hsql_jax.objectives import LossSum, Objective, any_group, group_advantage\n"
        "def mine():\n"
        "    return Objective(any_group, group_advantage, lambda t: LossSum(\n"
        "        -(t.logprobs * t.advantages * t.mask).sum() / t.mask.sum(), t.mask.any() * 1.0))\n"
        "def fails():\n"
        "    return Objective(any_group, group_advantage, lambda t: t.no_such_field)\n"
    )
    assert main(["check-objective", f"{file}:mine"]) == 2
    shown = capsys.readouterr()
    assert "ok      masked-tokens   Tokens outside the mask change nothing" in shown.out
    assert "BROKEN  micro-batches   Sums over micro-batches add up" in shown.out
    assert "return sums, not means" in shown.out
    assert f"hsql: error: {file}:mine: fails " in shown.err
    assert "micro-batches" in shown.err
    assert "zero-advantage" not in shown.err
    assert main(["check-objective", f"{file}:fails", "--json"]) == 2
    reasons = {one["check"]: one["broken"] for one in json.loads(capsys.readouterr().out)}
    assert reasons["groups"] == ""
    assert "no_such_field" in reasons["padding"]
