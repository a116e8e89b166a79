"""The train state, one jitted step for every objective, and the one training loop.

SFT and RL differ in where batches come from and in the objective, nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from hsql_jax.data import Batch
from hsql_jax.errors import UserError
from hsql_jax.losses import token_logprobs
from hsql_jax.model import ModelConfig, forward, head_matrix, init_params, param_shardings
from hsql_jax.objectives import LossSum, Tokens
from hsql_jax.sharding import batch_sharding, replicated

Loss = Callable[[Tokens], LossSum]
Metrics = dict[str, float]


@flax.struct.dataclass
class TrainState:
    """Everything that training changes: parameters, optimizer state, and updates made so far."""

    step: Any
    params: Any
    opt_state: Any


StepFn = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


def state_shardings(mesh: Mesh, model: ModelConfig, tx: optax.GradientTransformation) -> TrainState:
    """A tree of shardings for `TrainState`: optimizer moments are split as their parameters.

    A moment is recognised by its path, which ends in its parameter's, and by its shape. This holds
    for every optax transformation, masked and partitioned ones included.
    """
    params = param_shardings(mesh, model)
    shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    like = {
        (_dict_keys(path), leaf.shape): sharding
        for (path, leaf), sharding in zip(
            jax.tree.leaves_with_path(shapes), jax.tree.leaves(params), strict=True
        )
    }
    opt_state = jax.tree.map_with_path(
        lambda path, leaf: like.get((_dict_keys(path), leaf.shape), replicated(mesh)),
        jax.eval_shape(tx.init, shapes),
    )
    return TrainState(step=replicated(mesh), params=params, opt_state=opt_state)


def _dict_keys(path: Any) -> tuple[str, ...]:
    """The dictionary keys at the end of a tree path, such as ("layers", "down")."""
    is_key = [isinstance(part, jax.tree_util.DictKey) for part in path]
    start = len(path) - is_key[::-1].index(False) if False in is_key else 0
    return tuple(part.key for part in path[start:])


def create_state(
    params: Any, model: ModelConfig, tx: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """A fresh state around `params`, laid out over the mesh."""
    shardings = state_shardings(mesh, model, tx)
    params = jax.device_put(params, shardings.params)
    opt_state = jax.jit(tx.init, out_shardings=shardings.opt_state)(params)
    step = jax.device_put(jnp.zeros((), jnp.int32), shardings.step)
    # A copy: the step donates its state, and the caller may still own the arrays it gave.
    return TrainState(step=step, params=jax.tree.map(jnp.copy, params), opt_state=opt_state)


def batch_logprobs(
    params: Any,
    model: ModelConfig,
    batch: Batch,
    temperature: float,
    mesh: Mesh | None = None,
    keep: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of the targets [B, T] at `temperature`, and the policy's entropy there.

    With a `mesh`, the batch is split over it; `keep` holds what the backward pass needs.
    """
    hidden = forward(params, model, batch.tokens, batch.segment_ids, batch.positions, mesh)
    return token_logprobs(
        hidden,
        head_matrix(params),
        batch.targets,
        batch.loss_mask,
        temperature=temperature,
        keep=keep,
        mesh=mesh,
    )


def batch_loss(
    params: Any,
    model: ModelConfig,
    loss: Loss,
    batch: Batch,
    temperature: float,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, LossSum]:
    """The objective's sum over one [B, T] micro-batch, and its parts with the entropy added."""
    keep = model.remat == "none"
    logprobs, entropy = batch_logprobs(params, model, batch, temperature, mesh, keep)
    mask = batch.loss_mask
    parts = loss(
        Tokens(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            mask,
            batch.segment_ids,
            batch.sampler_logprobs,
            batch.ref_logprobs,
        )
    )
    stats = {"entropy": jnp.sum(entropy * mask), "tokens": jnp.sum(mask)}
    return parts.total, parts._replace(stats=parts.stats | stats)


def make_scorer(
    model: ModelConfig, mesh: Mesh, temperature: float = 1.0
) -> Callable[[Any, Batch], np.ndarray]:
    """A jitted `(params, batch) -> [A, B, T]`: log-probabilities as the train step computes them.

    Batch leaves are [A, B, T]; tokens without a loss get 0.
    """

    def score(params: Any, batch: Batch) -> jax.Array:
        def one(micro: Batch) -> jax.Array:
            return batch_logprobs(params, model, micro, temperature, mesh)[0] * micro.loss_mask

        return jax.lax.map(one, batch)

    places = param_shardings(mesh, model), batch_sharding(mesh)
    compiled = jax.jit(score, in_shardings=places, out_shardings=replicated(mesh))
    return lambda params, batch: np.asarray(compiled(params, batch))


def make_train_step(
    model: ModelConfig,
    loss: Loss,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    temperature: float = 1.0,
) -> StepFn:
    """A jitted `(state, batch) -> (state, metrics)`; batch leaves are [A, B, T], A micro-batches.

    Gradients of sums are accumulated over A in the parameters' dtype and divided once by the
    summed weight, so the split into micro-batches does not change the update. The state is donated.

    A step whose loss or gradient norm is not finite leaves all of the state but `step` as it was;
    the metric `skipped` is then 1, else 0.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        grads, parts = accumulate(state.params, batch)
        grads = jax.tree.map(lambda g: g / jnp.maximum(parts.weight, 1e-9), grads)
        mean = parts.total / jnp.maximum(parts.weight, 1e-9)
        norm = optax.tree_utils.tree_norm(grads)
        finite = jnp.isfinite(mean) & jnp.isfinite(norm)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # Selected leaf by leaf, within the updates' own loops: a branch would hold both states.
        params, opt_state = jax.tree.map(
            functools.partial(jnp.where, finite),
            (params, opt_state),
            (state.params, state.opt_state),
        )
        count = jnp.maximum(parts.stats["tokens"], 1.0)
        metrics = {name: value / count for name, value in parts.stats.items() if name != "tokens"}
        metrics |= parts.peaks | {
            "loss": mean,
            "loss_tokens": parts.stats["tokens"],
            "grad_norm": norm,
            "update_norm": jnp.where(finite, optax.tree_utils.tree_norm(updates), 0.0),
            "skipped": 1.0 - finite,
        }
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics

    def accumulate(params: Any, batch: Batch) -> tuple[Any, LossSum]:
        def one(index: jax.Array | int) -> tuple[Any, LossSum]:
            micro = jax.tree.map(lambda leaf: leaf[index], batch)
            gradient = jax.grad(batch_loss, has_aux=True)
            return gradient(params, model, loss, micro, temperature, mesh)

        def add(index: jax.Array, carry: tuple[Any, LossSum]) -> tuple[Any, LossSum]:
            grads, parts = one(index)
            sums = jax.tree.map(jnp.add, (carry[0], carry[1][:3]), (grads, parts[:3]))
            peaks = jax.tree.map(jnp.maximum, carry[1].peaks, parts.peaks)
            total, weight, stats = sums[1]
            return sums[0], LossSum(total, weight, stats, peaks)

        if batch.tokens.shape[0] == 1:  # no second tree of gradients to add to
            return one(0)
        # Micro-batches that are all padding stand at the end and are not computed.
        used = jnp.sum(jnp.any(batch.segment_ids > 0, axis=(1, 2)))
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(lambda: one(0))
        )
        return jax.lax.fori_loop(0, used, add, zeros)

    states = state_shardings(mesh, model, tx)
    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(states, batch_sharding(mesh)),
        out_shardings=(states, replicated(mesh)),
    )


def train(
    state: TrainState,
    step_fn: StepFn,
    next_batch: Callable[[TrainState], Batch],
    steps: int,
    on_step: Callable[[TrainState, Metrics], None],
    *,
    max_skipped: int = 5,
    should_stop: Callable[[], bool] = lambda: False,
) -> TrainState:
    """Run until `state.step == steps`, or until `should_stop`, asked before each step, says so.

    `next_batch` sees the state, so that RL can sample from the policy as it is; `on_step` logs and
    saves. A step that is not finite is counted and reported (the metric `skipped`) and changes no
    parameter; raises `UserError` after `max_skipped` of them in a row.
    """
    skipped = 0
    for _ in range(int(state.step), steps):
        if should_stop():
            break
        state, raw = step_fn(state, next_batch(state))
        metrics = {name: float(value) for name, value in raw.items()}
        on_step(state, metrics)
        skipped = skipped + 1 if metrics["skipped"] else 0
        if skipped == max_skipped:
            raise UserError(
                f"{skip_line(state, metrics)}, the last of {skipped} in a row; "
                "start again with a lower learning rate"
            )
    return state


def skip_line(state: TrainState, metrics: Metrics) -> str:
    """What to tell of a step that was skipped."""
    loss, norm = metrics["loss"], metrics["grad_norm"]
    return f"step {int(state.step)} skipped: loss {loss}, gradient norm {norm}"
