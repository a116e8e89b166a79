"""The chunked vocabulary loss against the plain one: temporary memory, and time where both fit.

Memory is the compiler's report for the gradient at the vocabulary of Qwen3 and 32,768 tokens, and
needs no such memory here; time is measured at fewer tokens, both in turns in one run. Prints a
table and JSON; not a test.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hsql_jax.losses import token_logprobs

VOCAB = 151_936
MIB = 2**20


def chunked(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean loss, chunk by chunk."""
    logprobs, _ = token_logprobs(hidden, head, targets, jnp.ones(targets.shape))
    return -jnp.mean(logprobs)


def plain(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean loss through all logits at once."""
    logits = jnp.matmul(hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


LOSSES: dict[str, Callable[..., jax.Array]] = {"chunked": chunked, "plain": plain}


def gradient(loss: Callable[..., jax.Array]) -> Any:
    """Loss and its gradients with respect to hidden states and head."""
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def measure_memory(tokens: int, width: int) -> dict[str, int]:
    """Return temporary bytes of each."""
    shapes = (
        jax.ShapeDtypeStruct((1, tokens, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((width, VOCAB), jnp.float32),
        jax.ShapeDtypeStruct((1, tokens), jnp.int32),
    )
    return {
        name: gradient(loss).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
        for name, loss in LOSSES.items()
    }


def measure_time(tokens: int, width: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of each."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (1, tokens, width))
    head = jax.random.normal(keys[1], (width, VOCAB)) * width**-0.5
    targets = jax.random.randint(keys[2], (1, tokens), 0, VOCAB)
    runs = {name: gradient(loss) for name, loss in LOSSES.items()}
    results = {name: run(hidden, head, targets) for name, run in runs.items()}
    assert jnp.allclose(results["chunked"][0], results["plain"][0], rtol=1e-5)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(hidden, head, targets))
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_768, help="of the memory report")
    parser.add_argument("--width", type=int, default=4096, help="of the memory report")
    parser.add_argument("--timed-tokens", type=int, default=2048)
    parser.add_argument("--timed-width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    memory = measure_memory(args.tokens, args.width)
    seconds = measure_time(args.timed_tokens, args.timed_width, args.rounds)
    print(f"{'':<10}{'temporary MiB':>16}{'s':>8}")
    for name in LOSSES:
        print(f"{name:<10}{memory[name] / MIB:>16.0f}{seconds[name]:>8.2f}")
    ratios = {
        "memory": memory["plain"] / memory["chunked"],
        "time": seconds["chunked"] / seconds["plain"],
    }
    print(f"\nplain / chunked: memory {ratios['memory']:.1f}, time {1 / ratios['time']:.2f}")
    print(json.dumps({"arguments": vars(args), "bytes": memory, "s": seconds, "ratios": ratios}))


if __name__ == "__main__":
    main()
