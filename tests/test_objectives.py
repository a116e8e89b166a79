"""One contract for every objective, a user's own included, and each equation in numpy.

Shapes: B rows, T time, N tokens of a trajectory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from hsql_jax.data import Batch, Example, assemble
from hsql_jax.errors import UserError
from hsql_jax.objectives import OBJECTIVES, LossSum, Tokens, resolve

USERS = f"{Path(__file__).parent / 'fixtures' / 'reinforce.py'}:reinforce"
EVERY = [*OBJECTIVES, USERS]
RL = [name for name in EVERY if name != "sft"]
PER_TRAJECTORY = ["grpo", "gspo"]  # mean over trajectories; the others, over loss tokens


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """Per token [N]: the policy's log-probabilities, the sampler's, and the mask; one advantage."""

    logprobs: np.ndarray
    old: np.ndarray
    mask: np.ndarray
    advantage: float


def trajectory(seed: int, mask: str, advantage: float, off_policy: float) -> Trajectory:
    """Random log-probabilities that differ by about `off_policy`; the first token has no target."""
    rng = np.random.default_rng(seed)
    logprobs = -rng.uniform(0.1, 3.0, len(mask)).astype(np.float32)
    old = logprobs + off_policy * rng.normal(size=len(mask)).astype(np.float32)
    return Trajectory(logprobs, old.astype(np.float32), np.array([*map(int, mask)]), advantage)


# Ratios on both sides of every bound, for either sign of the advantage.
TRAJECTORIES = [
    trajectory(0, "0011101", 1.2, off_policy=0.5),
    trajectory(1, "01101", -0.8, off_policy=0.5),
    trajectory(2, "00111111", 0.5, off_policy=1e-4),
    trajectory(3, "0111", -1.5, off_policy=2e-3),
    trajectory(4, "011", 0.7, off_policy=2e-3),
    trajectory(5, "0001", -0.4, off_policy=1.0),
]
ONE_A_ROW = [[0], [1], [2], [3], [4], [5]]
PACKED = [[0, 1], [2, 3], [4, 5]]
TIGHT, WIDE = (6, 8), (7, 33)  # shapes [B, T]: the trajectories alone, and with room
LAYOUTS = {
    "wide": (ONE_A_ROW, WIDE),
    "packed": (PACKED, WIDE),
    "packed in another order": ([[5, 3, 4], [2], [1, 0]], WIDE),
    "one row": ([[3, 0, 5, 1, 4, 2]], WIDE),
    "tight": (ONE_A_ROW, TIGHT),
}


def lay_out(
    rows: list[list[int]],
    shape: tuple[int, int] = WIDE,
    trajectories: Sequence[Trajectory] = TRAJECTORIES,
) -> Tokens:
    """The trajectories of each row as tokens [B, T], packed by the same code as in training."""

    def batch(field: str) -> Batch:
        members = [
            Example(np.zeros(len(t.mask), int), t.mask, getattr(t, field), t.advantage)
            for t in trajectories
        ]
        return assemble([[members[i] for i in row] for row in rows], shape[1], shape[0])

    now, old = batch("logprobs"), batch("old")
    return Tokens(
        now.old_logprobs, old.old_logprobs, now.advantages, now.loss_mask, now.segment_ids
    )


@functools.cache
def compiled(name: str) -> Callable[[Tokens], tuple[jax.Array, LossSum]]:
    loss = resolve(name).loss

    def gradient(tokens: Tokens) -> tuple[jax.Array, LossSum]:
        def total(logprobs: jax.Array) -> tuple[jax.Array, LossSum]:
            parts = loss(tokens._replace(logprobs=logprobs))
            return parts.total, parts

        return jax.grad(total, has_aux=True)(tokens.logprobs)

    return jax.jit(gradient)


def evaluate(name: str, tokens: Tokens) -> tuple[LossSum, np.ndarray]:
    """The sums and the gradient [B, T] of the total with respect to the log-probabilities."""
    gradient, parts = compiled(name)(tokens)
    return jax.tree.map(float, parts), np.asarray(gradient)


def by_trajectory(gradient: np.ndarray, rows: list[list[int]]) -> dict[int, np.ndarray]:
    """Each trajectory's gradient at the tokens that are targets, [N - 1]."""
    found = {}
    for row, members in enumerate(rows):
        start = 0
        for i in members:
            size = len(TRAJECTORIES[i].mask)
            found[i] = gradient[row, start : start + size - 1]
            start += size
    return found


def on_policy(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [dataclasses.replace(t, old=t.logprobs) for t in trajectories]


# --- the contract ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_masked_tokens_change_nothing_and_get_no_gradient(name: str) -> None:
    tokens = lay_out(PACKED)
    parts, gradient = evaluate(name, tokens)
    masked = tokens.mask == 0
    assert np.all(gradient[masked] == 0)
    noise = (50 * np.random.default_rng(0).normal(size=masked.shape) * masked).astype(np.float32)
    noisy = tokens._replace(
        logprobs=tokens.logprobs + noise, old_logprobs=tokens.old_logprobs - noise
    )
    changed, changed_gradient = evaluate(name, noisy)
    assert changed == parts
    np.testing.assert_array_equal(changed_gradient, gradient)


@pytest.mark.parametrize("name", RL)
def test_zero_advantage_gives_zero_gradient(name: str) -> None:
    equal = [dataclasses.replace(t, advantage=0.0) for t in TRAJECTORIES]
    parts, gradient = evaluate(name, lay_out(PACKED, trajectories=equal))
    assert parts.total == 0.0
    assert np.all(gradient == 0)
    assert parts.weight == evaluate(name, lay_out(PACKED))[0].weight  # they count in the mean


@pytest.mark.parametrize("name", EVERY)
def test_on_policy_gradient_is_that_of_reinforce(name: str) -> None:
    """d(-sum_t w A log pi)/d log pi = -w A: w is 1 for a mean of tokens, 1/N_i of trajectories."""
    on_policy = [dataclasses.replace(t, old=t.logprobs) for t in TRAJECTORIES]
    _, gradient = evaluate(name, lay_out(PACKED, trajectories=on_policy))
    for i, found in by_trajectory(gradient, PACKED).items():
        mask = TRAJECTORIES[i].mask[1:]
        weight = 1 / mask.sum() if name in PER_TRAJECTORY else 1.0
        advantage = 1.0 if name == "sft" else TRAJECTORIES[i].advantage
        np.testing.assert_allclose(found, -weight * advantage * mask, rtol=1e-5)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("layout", [key for key in LAYOUTS if key != "wide"])
def test_padding_and_packing_change_nothing(name: str, layout: str) -> None:
    reference, expected = evaluate(name, lay_out(*LAYOUTS["wide"]))
    parts, gradient = evaluate(name, lay_out(*LAYOUTS[layout]))
    assert (parts.total, parts.weight) == pytest.approx(
        (reference.total, reference.weight), rel=1e-5
    )
    assert parts.stats == pytest.approx(reference.stats, rel=1e-5)
    assert parts.peaks == pytest.approx(reference.peaks, rel=1e-5)
    wanted = by_trajectory(expected, ONE_A_ROW)
    for i, found in by_trajectory(gradient, LAYOUTS[layout][0]).items():
        np.testing.assert_allclose(found, wanted[i], rtol=1e-5)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("cut", [1, 2])
def test_sums_of_micro_batches_add_up(name: str, cut: int) -> None:
    parts, gradient = evaluate(name, lay_out(PACKED))
    split = [(rows, *evaluate(name, lay_out(rows))) for rows in (PACKED[:cut], PACKED[cut:])]
    found = np.concatenate([one[: len(rows)] for rows, _, one in split])
    np.testing.assert_allclose(found, gradient[: len(PACKED)], rtol=1e-5)
    for read in (lambda p: p.total, lambda p: p.weight, *map(_reader, parts.stats)):
        assert sum(read(part) for _, part, _ in split) == pytest.approx(read(parts), rel=1e-5)


def _reader(key: str) -> Callable[[LossSum], float]:
    return lambda parts: float(parts.stats[key])


@pytest.mark.parametrize("name", EVERY)
def test_a_batch_of_padding_weighs_nothing(name: str) -> None:
    parts, gradient = evaluate(name, lay_out([]))
    assert parts.total == parts.weight == 0.0
    assert np.all(gradient == 0)


# --- the equations, in float64 -----------------------------------------------------------------


def log_ratios(t: Trajectory) -> np.ndarray:
    """Of the loss tokens T_i."""
    ratio = t.logprobs.astype(np.float64) - t.old
    return ratio[t.mask == 1]


def clip_term(ratio: np.ndarray, advantage: float, low: float, high: float) -> np.ndarray:
    return np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


def equation_6(trajectories: Sequence[Trajectory]) -> float:
    kept = [t.logprobs[t.mask == 1] for t in trajectories]
    return -sum(float(np.sum(k, dtype=np.float64)) for k in kept) / sum(map(len, kept))


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
    kept = [t.advantage * t.logprobs[t.mask == 1].astype(np.float64) for t in trajectories]
    return -float(np.concatenate(kept).mean())


EQUATIONS: dict[str, Callable[[Sequence[Trajectory]], float]] = {
    "sft": equation_6,
    "grpo": equation_8,
    "gspo": equation_10,
    "dapo": equation_12,
    USERS: users_own,
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


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_equal_rewards_give_no_advantage(reward: float) -> None:
    for name in RL:
        found = resolve(name).advantage(np.full(7, reward))
        np.testing.assert_allclose(found, 0.0, atol=1e-8)


def test_supervised_advantages_are_one() -> None:
    assert resolve("sft").advantage(np.array([0.0, 1.0])).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("correct", [[0, 0, 0], [1, 1, 1], [1, 0, 1]])
def test_only_dapo_drops_groups_without_contrast(correct: list[int]) -> None:
    group = np.array(correct, np.float32)
    assert resolve("dapo").keep(group) == (0 < sum(correct) < 3)
    assert all(resolve(name).keep(group) for name in ("sft", "grpo", "gspo"))


# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ppo", "'ppo' is none of dapo, grpo, gspo, sft"),
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
