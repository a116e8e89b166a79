"""`hsql sft` as its users run it: real processes, ended in every way and started again."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from demo_process import compile_quickly
from events import read_events
from samples import TOOLS, conversation

from hsql_jax.metrics import read_metrics
from hsql_jax.weights import load_hf

TOY = f"{Path(__file__).parent / 'sft_toy.py'}:toy"
STEPS = 12
KILLS = int(os.environ.get("HSQL_KILLS", "3"))  # the longer suite asks for 20

Run = Callable[..., subprocess.Popen[str]]


def write_corpus(path: Path, seeds: range) -> Path:
    """Conversations in OpenAI's form, a line each."""
    lines = (
        {"messages": [m.model_dump() for m in conversation(seed)], "tools": TOOLS} for seed in seeds
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, compiled: Path) -> Run:
    """Start `hsql sft` on 16 conversations: run(FOLDER, *options, devices=1)."""
    folder = tmp_path_factory.mktemp("corpus")
    corpus = write_corpus(folder / "train.jsonl", range(16))
    held_out = write_corpus(folder / "held_out.jsonl", range(100, 106))
    given = {"--data.path": corpus, "--held-out": held_out, "--tokenizer": tiny_folder}

    def start(run_dir: Path, *options: str, devices: int = 1) -> subprocess.Popen[str]:
        paths = [str(part) for pair in given.items() for part in pair]
        program = "from hsql_jax.cli import main; raise SystemExit(main())"
        command = [sys.executable, "-c", program, "sft", "--config", TOY, "--run-dir", str(run_dir)]
        return subprocess.Popen(
            [*command, *paths, *options],
            env=os.environ | compile_quickly(compiled) | {"JAX_NUM_CPU_DEVICES": str(devices)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def finish(process: subprocess.Popen[str], status: int = 0) -> tuple[str, str]:
    try:
        out, err = process.communicate(timeout=200)
    except BaseException:
        process.kill()
        raise
    assert process.returncode == status, (process.returncode, out, err)
    return out, err


def state_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "status.json").read_text())


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while not any(row["step"] >= step for row in read_metrics(run_dir)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def same_model(left: Path, right: Path) -> bool:
    both = [jax.tree.leaves(load_hf(folder / "model")[1]) for folder in (left, right)]
    return all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(*both, strict=True)
    )


@pytest.fixture(scope="module")
def whole(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without interruption."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(run(folder))
    return folder


def test_a_run_leaves_a_model_metrics_and_its_state(whole: Path) -> None:
    assert state_of(whole) == {"status": "finished", "step": STEPS, "steps": STEPS}
    rows = read_metrics(whole)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    losses = [row["values"]["loss"] for row in rows]
    assert losses[0] == pytest.approx(np.log(1000), rel=0.2)
    assert losses[-1] < losses[0] - 0.3
    measured = {
        r["step"]: r["values"]["held_out_loss"] for r in rows if "held_out_loss" in r["values"]
    }
    assert list(measured) == list(range(2, STEPS + 1, 2))
    assert measured[STEPS] < measured[2]
    assert rows[3]["values"]["epoch"] == 1.0
    assert load_hf(whole / "model")[0].vocab_size == 1000
    tokens = [row["values"]["tokens"] for row in rows]
    assert sum(tokens[:4]) == sum(tokens[4:8]) > 4 * 4 * 50
    for value in (row["values"] for row in rows):
        assert value["tokens_per_s"] == pytest.approx(value["tokens"] / value["step_s"])
        assert "mfu" not in value  # nobody knows a CPU's peak


def curve_of(run_dir: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["values"]["loss"]) for row in read_metrics(run_dir)]


def test_tensorboard_has_the_curves(whole: Path) -> None:
    curves = read_events(whole / "tensorboard" / "sft")
    assert curves["loss"] == curve_of(whole)
    assert [step for step, _ in curves["held_out_loss"]] == list(range(2, STEPS + 1, 2))


def test_sigterm_saves_and_the_run_goes_on_as_if_nothing_had_been(
    run: Run, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = run(folder)
    wait_for_step(process, folder, 3)
    process.send_signal(signal.SIGTERM)
    out, _ = finish(process)
    state = state_of(folder)
    assert state["status"] == "stopped"
    assert 3 <= state["step"] < STEPS
    assert f"stopped after step {state['step']}; --resume continues it" in out
    out, _ = finish(run(folder, "--resume"))
    assert re.search(
        rf"{STEPS}/{STEPS} steps, .*  loss [\d.]+  tokens/s [\d,]+$", out, re.MULTILINE
    )
    assert same_model(folder, whole)
    assert read_events(folder / "tensorboard" / "sft")["loss"] == curve_of(whole)


def test_an_interrupt_is_no_failure(run: Run, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = run(folder)
    wait_for_step(process, folder, 3)
    process.send_signal(signal.SIGINT)
    _, err = finish(process, status=130)
    assert "hsql: interrupted; to continue: " in err
    assert state_of(folder)["status"] == "interrupted"
    finish(run(folder, "--resume"))
    assert same_model(folder, whole)


@pytest.mark.timeout(200 + 40 * KILLS)
def test_kills_at_any_step_change_no_bit(run: Run, tmp_path: Path) -> None:
    longer = ("--epochs", str(3 + KILLS))
    whole, folder, pick = tmp_path / "whole", tmp_path / "run", random.Random(0)
    finish(run(whole, *longer))
    resume: tuple[str, ...] = ()
    for _ in range(KILLS):
        reached = max((row["step"] for row in read_metrics(folder)), default=0)
        process = run(folder, *longer, *resume)
        wait_for_step(process, folder, reached + pick.randrange(1, 4))
        # Between two steps, in the middle of one, or in the middle of a checkpoint.
        time.sleep(pick.random() * 0.02)
        process.kill()
        finish(process, -signal.SIGKILL)
        resume = ("--resume",)
    finish(run(folder, *longer, *resume))
    assert same_model(folder, whole)
    steps = [row["step"] for row in read_metrics(folder)]
    assert sorted(steps) == list(range(1, 4 * (3 + KILLS) + 1))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def cluster(rank: int, port: int) -> tuple[str, ...]:
    return (
        *("--cluster.coordinator", f"127.0.0.1:{port}", "--cluster.processes", "2"),
        *("--cluster.process", str(rank), "--mesh.fsdp", "2"),
    )


def test_two_processes_learn_what_one_does_and_stop_together(
    run: Run, whole: Path, tmp_path: Path
) -> None:
    folder, port = tmp_path / "run", free_port()
    pair = [run(folder, *cluster(rank, port)) for rank in (0, 1)]
    wait_for_step(pair[0], folder, 2)
    pair[1].send_signal(signal.SIGTERM)  # one of them is told, both stop
    for process in pair:
        finish(process)
    assert state_of(folder)["status"] == "stopped"
    port = free_port()
    for process in [run(folder, "--resume", *cluster(rank, port)) for rank in (0, 1)]:
        finish(process)
    alone, together = (
        [row["values"]["loss"] for row in read_metrics(place)] for place in (whole, folder)
    )
    np.testing.assert_allclose(together, alone, rtol=1e-4)


def test_a_missing_process_is_named(run: Run, tmp_path: Path) -> None:
    options = (*cluster(1, free_port()), "--cluster.start-seconds", "2")
    process = run(tmp_path / "run", *options)
    _, err = process.communicate(timeout=100)
    assert process.returncode not in (0, None)
    assert "process 1 of 2: joining 127.0.0.1:" in err


def test_a_step_without_an_end_stops_with_every_stack(tmp_path: Path) -> None:
    program = (
        "import time; from hsql_jax.distributed import watchdog\n"
        "with watchdog(0.5) as beat:\n    beat(); time.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 1
    assert "most recent call first" in done.stderr


def test_the_papers_counts(capfd: pytest.CaptureFixture[str]) -> None:
    from hsql_jax.cli import main

    assert main(["sft", "--config", "configs/sft.py:qwen3_8b_32k", "--dry-run"]) == 0
    out, _ = capfd.readouterr()
    counts = [line.split()[1] for line in out.splitlines()[:4]]
    assert counts == ["2,512", "3", "16", "471"]
    assert "'fsdp': 8" in out
    assert '"learning_rate": 1e-05' in out

    plan = ["sft", "--config", "configs/sft.py:qwen3_8b_32k", "--dry-run", "--json"]
    assert main(plan) == 0
    found = json.loads(capfd.readouterr().out)
    named = ("trajectories", "epochs", "rows", "row_tokens", "updates", "devices")
    assert [found[name] for name in named] == [2512, 3, 16, 32_768, 471, 8]
    assert found["config"]["optim"]["learning_rate"] == 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.path", "absent.jsonl"], "absent.jsonl"),
        (["--data.rows", "6", "--micro-batches", "4"], "must divide data.rows = 6"),
        (["--mesh.fsdp", "3"], "fsdp"),
        (["--model.d-model", "0"], "d_model"),
    ],
)
def test_bad_input_is_one_line(run: Run, tmp_path: Path, options: list[str], message: str) -> None:
    _, err = finish(run(tmp_path / "run", *options), status=2)
    assert message in err
    assert "Traceback" not in err
