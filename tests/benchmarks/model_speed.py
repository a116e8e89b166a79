"""Training and generation on a CPU beside transformers with torch and tunix, at the same sizes.

Every contender is a process of its own that loads the same weights, stays alive, and is asked round
by round, one at a time; nothing else may run meanwhile. torch with transformers, and google-tunix,
live in environments of their own:

    python -m venv /tmp/torch && /tmp/torch/bin/pip install torch transformers
    python -m venv /tmp/tunix && /tmp/tunix/bin/pip install google-tunix
    python tests/benchmarks/model_speed.py --torch-python /tmp/torch/bin/python \\
        --tunix-python /tmp/tunix/bin/python

Training is one step of forward, backward, clipping and AdamW; "2 devices" splits its rows over two
virtual CPU devices, JAX's way to have both cores at work in small operations too. Generation
samples a fixed number of tokens without a stop, greedily and from the whole distribution. Before
any timing the losses of three training steps must agree to 1e-3, relative, and the beginnings of
the greedy tokens must be the same. Memory is what a call needs for a while: the peak of the
process's anonymous memory above its level before the call, and where there is one the compiler's
own figure. Prints a table of medians, ratios and JSON; not a test.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from contenders import (
    MIB,
    Child,
    ModelSizes,
    anonymous_bytes,
    answers,
    child,
    cpu_seconds,
    give_back_memory,
    peak_of,
    tunix_model,
    write_model,
)

LEARNING_RATE = 1e-3
CLIP = 1.0
TASKS = ("training", "greedy", "sampled")
LOSSES = 3  # training steps that are compared
ALIKE = 16  # greedy tokens of a row that are compared
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Sizes(ModelSizes):
    """The model, a training batch and a generation batch; the last five in tokens or rows."""

    rows: int = 8
    length: int = 1024
    sequences: int = 16
    prompt: int = 64
    new: int = 256


# --- contenders: each of these classes runs in its own process -----------------------------------


class Contender(Protocol):
    """What a process does when asked; `variant` is one of its ways to do it."""

    held_bytes: int  # kept between two calls of `generate`, though it serves only them

    def __init__(self, folder: Path, sizes: Sizes, variant: Any) -> None:
        """Load the weights of `folder`."""

    def train(self) -> float:
        """Update once on the batch; the loss before it."""

    def generate(self, sampled: bool) -> list[list[int]]:
        """The new tokens of every prompt."""

    def compiled_bytes(self, task: str) -> int | None:
        """Temporary memory by the compiler's account."""


class Ours:
    """This repository; the variant is the rematerialisation policy and the number of devices."""

    def __init__(self, folder: Path, sizes: Sizes, variant: Any) -> None:
        import jax
        import jax.numpy as jnp

        from hsql_jax.data import Example, assemble
        from hsql_jax.objectives import sft
        from hsql_jax.optim import OptimConfig, make_optimizer
        from hsql_jax.sft import stack
        from hsql_jax.sharding import MeshConfig, make_mesh
        from hsql_jax.train import create_state, make_train_step
        from hsql_jax.weights import load_hf

        remat, devices = variant.split(":")
        jax.config.update("jax_num_cpu_devices", int(devices))
        config, params = load_hf(folder)
        config = replace(config, remat=remat)
        optim = OptimConfig(
            learning_rate=LEARNING_RATE, schedule="constant", warmup=0.0, clip_norm=CLIP
        )
        tx, mesh = make_optimizer(optim, 1), make_mesh(MeshConfig(data=int(devices)))
        self._state = create_state(jax.tree.map(jnp.array, params), config, tx, mesh)
        rows = [[Example(row, np.ones_like(row))] for row in np.load(folder / "tokens.npy")]
        self._batch = stack([assemble(rows, sizes.length, sizes.rows)])
        self._step: Any = make_train_step(config, sft().loss, tx, mesh)
        self._config, self._params, self._sizes = config, jax.device_put(params), sizes
        self._prompts = np.load(folder / "prompts.npy").tolist()
        self._loop, self._engine = asyncio.Runner(), cast(Any, None)
        self.held_bytes = 0

    def train(self) -> float:
        self._state, metrics = self._step(self._state, self._batch)
        return float(metrics["loss"])

    def generate(self, sampled: bool) -> list[list[int]]:
        return self._loop.run(self._generate(1.0 if sampled else 0.0))

    async def _generate(self, temperature: float) -> list[list[int]]:
        engine = self._engine or self._make_engine()

        async def one(seed: int) -> list[int]:
            slot = await engine.acquire(seed)
            made = await engine.generate(slot, self._prompts[seed], self._sizes.new)
            engine.release(slot)
            return made.ids

        async with engine.running(self._params, temperature):
            return await asyncio.gather(*map(one, range(self._sizes.sequences)))

    def _make_engine(self) -> Any:
        import jax

        from hsql_jax.rollout.engine import Engine, EngineConfig

        sizes, most = self._sizes, self._sizes.prompt + self._sizes.new
        config = EngineConfig(
            slots=sizes.sequences,
            rows=sizes.sequences,
            width=sizes.prompt,
            chunk=min(32, sizes.new),
            lengths=tuple(range(most, sizes.prompt, -64))[::-1],
        )
        self._engine = Engine(self._config, config, stop_id=-1)
        self.held_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._engine._cache))
        return self._engine

    def compiled_bytes(self, task: str) -> int | None:
        if task != "training":
            return None  # an engine is several computations
        compiled = self._step.lower(self._state, self._batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes


class Torch:
    """transformers with torch's scaled-dot-product attention; the variant is eager or compile."""

    held_bytes = 0

    def __init__(self, folder: Path, sizes: Sizes, variant: Any) -> None:
        import torch  # type: ignore[import-not-found]
        import transformers

        transformers.logging.set_verbosity_error()
        self._torch, self._sizes = torch, sizes
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._forward = torch.compile(self._model) if variant == "compile" else self._model
        self._tx = torch.optim.AdamW(
            self._model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True
        )
        self._tokens = torch.tensor(np.load(folder / "tokens.npy"), dtype=torch.long)
        self._prompts = torch.tensor(np.load(folder / "prompts.npy"), dtype=torch.long)

    def train(self) -> float:
        loss = self._forward(input_ids=self._tokens, labels=self._tokens, use_cache=False).loss
        loss.backward()
        self._torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._tx.step()
        self._tx.zero_grad(set_to_none=True)
        return loss.item()

    def generate(self, sampled: bool) -> list[list[int]]:
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        with self._torch.inference_mode():
            out = self._model.generate(
                self._prompts,
                attention_mask=self._torch.ones_like(self._prompts),
                max_new_tokens=self._sizes.new,
                pad_token_id=0,
                **(how if sampled else {"do_sample": False}),
            )
        return out[:, self._sizes.prompt :].tolist()

    def compiled_bytes(self, task: str) -> int | None:
        return None


class Tunix:
    """google-tunix's Qwen3 with an optax step, and its own sampler.

    The variant is its remat and the number of devices.
    """

    held_bytes = 0

    def __init__(self, folder: Path, sizes: Sizes, variant: Any) -> None:
        import jax
        import jax.numpy as jnp
        import optax
        from flax import nnx
        from jax.sharding import Mesh, NamedSharding
        from jax.sharding import PartitionSpec as P
        from tunix.generate.sampler import (  # type: ignore[import-not-found]
            CacheConfig,
            Sampler,
        )

        remat, devices = variant.split(":")
        jax.config.update("jax_num_cpu_devices", int(devices))
        self._model = tunix_model(folder, sizes, remat)
        tx = optax.chain(
            optax.clip_by_global_norm(CLIP), optax.adamw(LEARNING_RATE, weight_decay=0.0)
        )
        self._optimizer = nnx.Optimizer(self._model, tx, wrt=nnx.Param)
        self._tokens = jnp.asarray(np.load(folder / "tokens.npy"), jnp.int32)
        if int(devices) > 1:
            mesh = Mesh(np.array(jax.devices()), ("data",))
            rows, whole = (NamedSharding(mesh, P(*axes)) for axes in (("data",), ()))
            self._tokens = jax.device_put(self._tokens, rows)
            for part in (self._model, self._optimizer):
                nnx.update(part, jax.device_put(nnx.state(part), whole))

        def loss(network: Any, tokens: jax.Array) -> jax.Array:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
            mask = jnp.broadcast_to(causal, (tokens.shape[0], *causal.shape))
            logits, _ = network(tokens, positions, None, mask)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
            return losses.mean()

        def step(network: Any, optimizer: Any, tokens: jax.Array) -> jax.Array:
            value, grads = nnx.value_and_grad(loss)(network, tokens)
            optimizer.update(network, grads)
            return value

        self._step: Any = nnx.jit(step, donate_argnames=("network", "optimizer"))
        self._sizes = sizes
        self._prompts = [" ".join(map(str, row)) for row in np.load(folder / "prompts.npy")]
        cache = CacheConfig(sizes.prompt + sizes.new, sizes.layers, sizes.kv_heads, sizes.head_dim)
        self._sampler = Sampler(tunix_model(folder, sizes, remat), Numbers(), cache)

    def train(self) -> float:
        return float(self._step(self._model, self._optimizer, self._tokens))

    def generate(self, sampled: bool) -> list[list[int]]:
        out = self._sampler(
            self._prompts,
            max_generation_steps=self._sizes.new,
            max_prompt_length=self._sizes.prompt,
            temperature=1.0 if sampled else 0.0,
            top_p=1.0 if sampled else None,
        )
        return [np.asarray(row).tolist() for row in out.tokens]

    def compiled_bytes(self, task: str) -> int | None:
        if task != "training":
            return None
        compiled = self._step.lower(self._model, self._optimizer, self._tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes


class Numbers:
    """A tokenizer whose texts are the token ids themselves."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 0  # none

    def eos_id(self) -> int:
        return -1

    def pad_id(self) -> int:
        return -1


KINDS: dict[str, type[Contender]] = {"ours": Ours, "torch": Torch, "tunix": Tunix}


def serve(kind: str, variant: str, folder: Path) -> None:
    """Answer requests from standard input, a JSON line each, until it ends."""
    stream = answers()
    sizes = Sizes(**json.loads((folder / "sizes.json").read_text()))
    contender = KINDS[kind](folder, sizes, variant)
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"remember": remember, "time": take_time}[request["ask"]](
            contender, sizes, request["task"]
        )
        stream.write(json.dumps(answer) + "\n")
        stream.flush()


def run(contender: Contender, task: str) -> float | list[list[int]]:
    return contender.train() if task == "training" else contender.generate(task == "sampled")


def remember(contender: Contender, sizes: Sizes, task: str) -> dict[str, Any]:
    """Warm up, and measure the memory of a call; its results are for comparison."""
    results = [run(contender, task) for _ in range(LOSSES - 1)]
    before = give_back_memory()
    with peak_of(anonymous_bytes) as peak:
        results.append(run(contender, task))
    held = 0 if task == "training" else contender.held_bytes
    return {
        "results": results,
        "bytes": max(peak) - before + held,
        "compiled bytes": contender.compiled_bytes(task),
    }


def take_time(contender: Contender, sizes: Sizes, task: str) -> dict[str, float]:
    """Seconds and processor seconds of one call."""
    begun, used = time.perf_counter(), cpu_seconds()
    run(contender, task)
    return {"s": time.perf_counter() - begun, "CPU-s": cpu_seconds() - used}


# --- the process that asks -----------------------------------------------------------------------


class Entry(NamedTuple):
    """A contender by its class and variant, and what it is asked to do."""

    name: str
    kind: str
    variant: str
    tasks: tuple[str, ...]


TRAINING = TASKS[:1]
ENTRIES = (
    Entry("ours, remat none", "ours", "none:1", TASKS),
    Entry("ours, remat products", "ours", "products:1", TRAINING),
    Entry("ours, remat full", "ours", "full:1", TRAINING),
    Entry("ours, 2 devices", "ours", "none:2", TRAINING),
    Entry("torch eager", "torch", "eager", TASKS),
    Entry("torch.compile", "torch", "compile", TRAINING),
    Entry("tunix", "tunix", "NONE:1", TASKS),
    Entry("tunix, remat", "tunix", "DECODER:1", TRAINING),
    Entry("tunix, 2 devices", "tunix", "NONE:2", TRAINING),
)


def prepare(folder: Path, sizes: Sizes) -> None:
    """Write random weights as a Hugging Face folder, and the tokens of both batches."""
    write_model(folder, sizes)
    rng = np.random.default_rng(0)
    np.save(folder / "tokens.npy", rng.integers(0, sizes.vocab, (sizes.rows, sizes.length)))
    np.save(folder / "prompts.npy", rng.integers(0, sizes.vocab, (sizes.sequences, sizes.prompt)))
    (folder / "sizes.json").write_text(json.dumps(asdict(sizes)))


def compare(entries: Sequence[Entry], answers: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """How far the contenders' results are from the first one's; `SystemExit` where too far."""
    first = entries[0].name
    losses = {e.name: answers["training", e.name]["results"] for e in entries}
    far = {n: float(np.max(np.abs(np.divide(v, losses[first]) - 1))) for n, v in losses.items()}
    texts = {
        e.name: np.array(answers["greedy", e.name]["results"][-1])
        for e in entries
        if "greedy" in e.tasks
    }
    same = {n: float(np.mean(t == texts[first])) for n, t in texts.items()}
    start = {n: float(np.mean((t == texts[first])[:, :ALIKE])) for n, t in texts.items()}
    report = {"losses": losses, "relative": far, "greedy tokens alike": same}
    if max(far.values()) > TOLERANCE or min(start.values()) < 1.0:
        sys.exit(f"the contenders compute different things: {report}, beginnings alike {start}")
    return report


def measure(
    entries: Sequence[Entry], children: Sequence[Child], rounds: int, sizes: Sizes
) -> dict[str, dict[str, Any]]:
    """A row of medians for each contender, under each task."""
    asked = [
        (task, entry, process)
        for task in TASKS
        for entry, process in zip(entries, children, strict=True)
        if task in entry.tasks
    ]
    # Training changes the weights, so it comes last.
    answers = {
        (task, entry.name): process.ask({"ask": "remember", "task": task})
        for task, entry, process in sorted(asked, key=lambda a: a[0] == "training")
    }
    results: dict[str, dict[str, Any]] = {"agreement": compare(entries, answers)}
    runs: dict[tuple[str, str], list[dict[str, float]]] = {key: [] for key in answers}
    for task in TASKS:
        for _ in range(rounds):
            for mine, entry, process in asked:
                if mine == task:
                    answer = process.ask({"ask": "time", "task": task})
                    runs[task, entry.name].append(answer)
    tokens = dict.fromkeys(TASKS, sizes.sequences * sizes.new)
    tokens["training"] = sizes.rows * sizes.length
    for (task, name), taken in runs.items():
        seconds = statistics.median(run["s"] for run in taken)
        results.setdefault(task, {})[name] = {
            "tokens/s": tokens[task] / seconds,
            "CPU-s": statistics.median(run["CPU-s"] for run in taken),
            "MiB": answers[task, name]["bytes"] / MIB,
            "compiled MiB": (answers[task, name]["compiled bytes"] or 0) / MIB or None,
            "s": [run["s"] for run in taken],
        }
    return results


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print the table: each contender's speed is also given as a share of our fastest."""
    for task in TASKS:
        rows = results[task]
        best = max(row["tokens/s"] for name, row in rows.items() if name.startswith("ours"))
        print(f"{task:<24}{'tokens/s':>10}{'of ours':>9}{'CPU-s':>8}{'MiB':>8}{'compiled MiB':>14}")
        for name, row in rows.items():
            row["of ours"] = row["tokens/s"] / best
            compiled = row["compiled MiB"]
            print(
                f"  {name:<22}{row['tokens/s']:>10.0f}{row['of ours']:>9.2f}{row['CPU-s']:>8.1f}"
                f"{row['MiB']:>8.0f}{f'{compiled:.0f}' if compiled else '-':>14}"
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-python", help="an interpreter that has torch and transformers")
    parser.add_argument("--tunix-python", help="an interpreter that has google-tunix")
    parser.add_argument("--rounds", type=int, default=5)
    for field in fields(Sizes):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=int, default=field.default)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve[0], args.serve[1], Path(args.serve[2]))
    sizes = Sizes(**{field.name: getattr(args, field.name) for field in fields(Sizes)})
    pythons = {"ours": sys.executable, "torch": args.torch_python, "tunix": args.tunix_python}
    for kind in (kind for kind, python in pythons.items() if python is None):
        print(f"{kind} is left out: no --{kind}-python")
    entries = [entry for entry in ENTRIES if pythons[entry.kind] is not None]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        prepare(folder, sizes)
        children = [
            stack.enter_context(
                child(e.name, [pythons[e.kind], __file__, "--serve", e.kind, e.variant, name])
            )
            for e in entries
        ]
        results = measure(entries, children, args.rounds, sizes)
    show(results)
    print("\n" + json.dumps({"arguments": vars(args), "results": results}))


if __name__ == "__main__":
    main()
