"""Supervised training beside trl's SFTTrainer and google-tunix's PeftTrainer, whole loops.

Every contender is a process of its own that runs its own trainer over the same examples, on the
same weights, and stops for a request at the boundary of an update; they are asked in turn, one at a
time, and nothing else may run meanwhile. trl with torch, and google-tunix, live in environments of
their own:

    python -m venv /tmp/torch && /tmp/torch/bin/pip install torch transformers trl
    python -m venv /tmp/tunix && /tmp/tunix/bin/pip install google-tunix
    python tests/benchmarks/sft_speed.py --torch-python /tmp/torch/bin/python \\
        --tunix-python /tmp/tunix/bin/python

Two kinds of data. *Full*: every example fills a row; the losses of the first three updates must
then agree to 1e-3, relative. *Ragged*: lengths are lognormal with the mean and cap of the paper's
trajectories (11.8K of 32K), scaled to a row; we pack whole examples into rows, tunix pads to a row,
trl pads to the longest of a batch, or packs. Tokens are real ones, without padding. Memory is the
peak of anonymous memory in an update above the level between two, one row an update, as the row
doubles. `data wait` is the share of our updates' time that waited for a batch. Prints tables of
medians, and JSON; not a test.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

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
WARM = 4  # updates before any measurement
LOSSES = 3
TOLERANCE = 1e-3
MEAN = 11.8 / 32.768  # of the lengths, as a share of a row
SPREAD = 0.6  # of their logarithm
DATA = ("full", "ragged")


@dataclass(frozen=True)
class Sizes(ModelSizes):
    """The model, rows of an update, tokens of a row, and how many updates there are data for."""

    rows: int = 8
    length: int = 1024
    updates: int = 24


# --- contenders: each of these functions runs in its own process ---------------------------------


class Gate:
    """Where a trainer stops between two updates, to answer a request and to wait for the next."""

    def __init__(self) -> None:
        self._answers = answers()
        self._left = 0
        self._request: dict[str, Any] | None = None
        self._values: dict[str, list[float]] = {}

    def note(self, **values: float) -> None:
        """Add an update's figures to the answer; the trainer may be late by an update."""
        for name, value in values.items():
            self._values.setdefault(name, []).append(float(value))

    def boundary(self) -> None:
        """Call between two updates, with nothing left to compute."""
        if self._request is not None:
            self._left -= 1
            if self._left > 0:
                return
            self._answer()
        line = sys.stdin.readline()
        if not line:
            sys.exit()
        self._request = json.loads(line)
        self._left, self._values = self._request["updates"], {}
        self._level = give_back_memory() if self._request["memory"] else 0
        self._watch = peak_of(anonymous_bytes) if self._request["memory"] else None
        self._peak = self._watch.__enter__() if self._watch else [0]
        self._begun, self._used = time.perf_counter(), cpu_seconds()

    def _answer(self) -> None:
        spent = {"s": time.perf_counter() - self._begun, "CPU-s": cpu_seconds() - self._used}
        if self._watch:
            self._watch.__exit__(None, None, None)
        memory = max(self._peak) - self._level
        self._answers.write(json.dumps(spent | self._values | {"bytes": memory}) + "\n")
        self._answers.flush()


def ours(folder: Path, sizes: Sizes, variant: str, gate: Gate) -> None:
    """The loop of `hsql sft`; the variant is the rematerialisation policy."""
    import jax

    from hsql_jax.data import Batch, BatchStream, Example
    from hsql_jax.objectives import sft
    from hsql_jax.optim import OptimConfig, make_optimizer
    from hsql_jax.sharding import MeshConfig, make_mesh
    from hsql_jax.speed import Meter
    from hsql_jax.train import Metrics, TrainState, create_state, make_train_step, train
    from hsql_jax.weights import load_hf

    config, params = load_hf(folder)
    model = replace(config, remat=variant)
    optim = OptimConfig(
        learning_rate=LEARNING_RATE, schedule="constant", warmup=0.0, clip_norm=CLIP
    )
    tx, mesh = make_optimizer(optim, 1), make_mesh(MeshConfig())
    examples = [Example(ids, np.ones(len(ids))) for ids in read_examples(folder, shuffled=False)]
    stream = BatchStream(examples, sizes.length, sizes.rows, seed=0, workers=2)
    meter = Meter(model, None)

    def next_batch(_: TrainState) -> Batch:
        gate.boundary()
        with meter.waiting():
            batch = jax.tree.map(lambda leaf: leaf[None], next(stream))
        meter.take(batch)
        return batch

    def on_step(_: TrainState, metrics: Metrics) -> None:
        speed = meter.lap(1.0)
        gate.note(loss=metrics["loss"], tokens=speed["tokens"], wait=speed["data_wait"])

    state = create_state(params, model, tx, mesh)
    train(state, make_train_step(model, sft().loss, tx, mesh), next_batch, 10**6, on_step)


def trl(folder: Path, sizes: Sizes, variant: str, gate: Gate) -> None:
    """trl's SFTTrainer; the variants: eager, checkpointing (of activations), packed."""
    import datasets  # type: ignore[import-untyped,import-not-found,unused-ignore]
    import tokenizers
    import torch  # type: ignore[import-not-found]
    import transformers
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    class Trainer(SFTTrainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any) -> Any:
            shown = inputs.get("attention_mask")
            real = inputs["input_ids"].numel() if shown is None else int(shown.sum())
            loss = super().training_step(model, inputs, *rest)
            gate.note(loss=float(loss), tokens=real)
            return loss

    class Stop(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            gate.boundary()

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<pad>"
    )
    config = SFTConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=sizes.rows,
        max_steps=10**6,
        max_length=sizes.length,
        packing=variant == "packed",
        gradient_checkpointing=variant == "checkpointing",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=CLIP,
        optim="adamw_torch_fused",
        train_sampling_strategy="sequential",
        bf16=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    data = datasets.Dataset.from_dict({"input_ids": read_examples(folder)})
    Trainer(model, config, train_dataset=data, processing_class=words, callbacks=[Stop()]).train()


def tunix(folder: Path, sizes: Sizes, variant: str, gate: Gate) -> None:
    """google-tunix's PeftTrainer, all parameters trained; the variant is its remat."""
    import jax
    import optax
    from flax import nnx
    from tunix.sft import peft_trainer, utils  # type: ignore[import-not-found]

    model = tunix_model(folder, sizes, variant)

    class Losses(peft_trainer.hooks.TrainingHooks):  # type: ignore[misc]
        def on_train_step_end(self, _: Any, __: int, loss: float) -> None:
            gate.note(loss=loss)

        def nothing(self, *_: Any) -> None:
            pass

        on_train_start = on_train_end = on_train_step_start = nothing
        on_eval_step_start = on_eval_step_end = nothing

    def batches() -> Iterator[Any]:
        examples = read_examples(folder)
        for start in range(0, 10**9, sizes.rows):
            jax.block_until_ready(jax.tree.leaves(nnx.state(trainer.model)))
            gate.boundary()
            ids, real = np.zeros((2, sizes.rows, sizes.length), np.int32)
            for row in range(sizes.rows):
                example = examples[(start + row) % len(examples)]
                ids[row, : len(example)], real[row, : len(example)] = example, 1
            gate.note(tokens=real.sum())
            yield peft_trainer.TrainingInput(input_tokens=ids, input_mask=real.astype(bool))

    def model_input(batch: Any) -> dict[str, Any]:
        mask = batch.input_mask
        return {
            "input_tokens": batch.input_tokens,
            "input_mask": mask,
            "positions": utils.build_positions_from_mask(mask),
            "attention_mask": utils.make_causal_attn_mask(mask),
        }

    tx = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(LEARNING_RATE, weight_decay=0.0))
    settings = peft_trainer.TrainingConfig(eval_every_n_steps=10**9, max_steps=10**6)
    trainer = peft_trainer.PeftTrainer(model, tx, settings)
    trainer = trainer.with_gen_model_input_fn(model_input)
    trainer.with_training_hooks(Losses())
    trainer.train(batches())


KINDS = {"ours": ours, "torch": trl, "tunix": tunix}


def serve(kind: str, variant: str, folder: Path) -> None:
    """Train and answer requests from standard input until it ends."""
    KINDS[kind](folder, Sizes(**json.loads((folder / "sizes.json").read_text())), variant, Gate())


def read_examples(folder: Path, shuffled: bool = True) -> list[list[int]]:
    """The examples of a folder, for those who keep the order as our stream shuffles them."""
    file = folder / ("shuffled.json" if shuffled else "examples.json")
    found: list[list[int]] = json.loads(file.read_text())
    return found


# --- the process that asks -----------------------------------------------------------------------


class Entry(NamedTuple):
    """A contender by its function and variant, and the data it trains on."""

    name: str
    kind: str
    variant: str
    data: tuple[str, ...] = DATA


ENTRIES = (
    Entry("ours", "ours", "none"),
    Entry("ours, recomputed", "ours", "full"),
    Entry("trl", "torch", "eager"),
    Entry("trl, recomputed", "torch", "checkpointing"),
    Entry("trl, packed", "torch", "packed", DATA[1:]),
    Entry("tunix", "tunix", "NONE"),
    Entry("tunix, recomputed", "tunix", "DECODER"),
)


def prepare(folder: Path, sizes: Sizes, data: str) -> None:
    """Write the weights, and examples in the order of our stream's rows."""
    from hsql_jax.data import BatchStream, Example

    write_model(folder, sizes)
    (folder / "sizes.json").write_text(json.dumps(asdict(sizes)))
    rng = np.random.default_rng(0)
    count = sizes.rows * sizes.updates
    lengths = np.full(count, sizes.length)
    if data == "ragged":
        centre = np.log(MEAN * sizes.length) - SPREAD**2 / 2
        drawn = rng.lognormal(centre, SPREAD, int(count / MEAN))
        lengths = np.clip(drawn, 8, sizes.length).astype(int)
    examples = [rng.integers(1, sizes.vocab, length) for length in lengths]
    write_examples(folder / "examples.json", examples)
    if data == "full":
        rows = [Example(ids, np.ones(len(ids))) for ids in examples]
        stream = BatchStream(rows, sizes.length, sizes.rows, seed=0, epochs=1)
        examples = [row for batch in stream for row in np.asarray(batch.tokens)]
    write_examples(folder / "shuffled.json", examples)


def write_examples(file: Path, examples: Sequence[np.ndarray]) -> None:
    file.write_text(json.dumps([ids.tolist() for ids in examples]))


def compare_losses(answers: dict[str, Any]) -> float:
    """How far the first losses are from ours, relative; `SystemExit` where too far."""
    losses = {name: answer["loss"][:LOSSES] for name, answer in answers.items()}
    first = next(iter(losses.values()))
    far = max(float(np.max(np.abs(np.divide(v, first) - 1))) for v in losses.values())
    if far > TOLERANCE:
        sys.exit(f"the contenders compute different things: {losses}")
    return far


def measure_speed(
    names: Sequence[str], children: Sequence[Child], data: str, rounds: int, updates: int
) -> dict[str, Any]:
    """A row of medians for each contender."""
    warm = {
        n: c.ask({"updates": WARM, "memory": False}) for n, c in zip(names, children, strict=True)
    }
    agreement = compare_losses(warm) if data == "full" else None
    runs: dict[str, list[Any]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, process in zip(names, children, strict=True):
            runs[name].append(process.ask({"updates": updates, "memory": False}))
    rows = {
        name: {
            "tokens/s": statistics.median(sum(run["tokens"]) / run["s"] for run in taken),
            "CPU-s an update": statistics.median(run["CPU-s"] / updates for run in taken),
            "data wait": float(np.mean([run["wait"] for run in taken]))
            if "wait" in taken[0]
            else None,
            "s": [run["s"] for run in taken],
        }
        for name, taken in runs.items()
    }
    return {"losses differ by": agreement, "contenders": rows}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-python", help="an interpreter that has torch, transformers, trl")
    parser.add_argument("--tunix-python", help="an interpreter that has google-tunix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates-a-round", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 2048, 4096])
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

    def start(entry: Entry, folder: str) -> Any:
        command = [pythons[entry.kind], __file__, "--serve", entry.kind, entry.variant, folder]
        return child(entry.name, command)

    results: dict[str, Any] = {"speed": {}, "memory": {}}
    for data in DATA:
        present = [entry for entry in entries if data in entry.data]
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            prepare(Path(folder), sizes, data)
            children = [stack.enter_context(start(entry, folder)) for entry in present]
            names = [entry.name for entry in present]
            found = measure_speed(names, children, data, args.rounds, args.updates_a_round)
        results["speed"][data] = found
        best = max(r["tokens/s"] for n, r in found["contenders"].items() if n.startswith("ours"))
        print(f"{data:<24}{'tokens/s':>10}{'of ours':>9}{'CPU-s an update':>17}{'data wait':>11}")
        for name, row in found["contenders"].items():
            wait = "-" if row["data wait"] is None else f"{row['data wait']:.2%}"
            print(
                f"  {name:<22}{row['tokens/s']:>10.0f}{row['tokens/s'] / best:>9.2f}"
                f"{row['CPU-s an update']:>17.1f}{wait:>11}"
            )
    alone = [entry for entry in entries if "full" in entry.data]
    print(f"{'memory, MiB':<24}" + "".join(f"{length:>10}" for length in args.lengths))
    for entry in alone:
        row = {}
        for length in args.lengths:
            with tempfile.TemporaryDirectory() as folder:
                prepare(Path(folder), replace(sizes, rows=1, length=length), "full")
                with start(entry, folder) as process:
                    process.ask({"updates": WARM, "memory": False})
                    row[length] = process.ask({"updates": 1, "memory": True})["bytes"] / MIB
        results["memory"][entry.name] = row
        print(f"  {entry.name:<22}" + "".join(f"{value:>10.0f}" for value in row.values()))
    print("\n" + json.dumps({"arguments": vars(args), "results": results}))


if __name__ == "__main__":
    main()
