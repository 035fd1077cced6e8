"""What packing, a second rank and kills do to training, on this machine.

    python scripts/bench_train.py [--json] [--kills 20]

packed_over_padded: trained tokens per CPU second of one update, documents packed over documents padded in the order in
which they came, on an agentic mix of lengths (many short episodes, few long ones); packed_over_sorted: over our own
padded layout, which sorts them by length first. two_ranks_over_one: tokens per second of the sharded trainer, two ranks
over one, each held to one core. kills: a run of 40 steps killed that often with SIGKILL at random moments ends with the
weights of one left alone, bit for bit. update_over_trl_*: null; the comparison with TRL is not written yet.

Wall times mean something on a quiet machine only; CPU seconds are those of one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "recipes" / "tiny_model"
MIX = ((60, 24), (150, 12), (400, 5), (900, 2), (1800, 1))
"""(tokens, episodes) of one batch: most end after a few turns, one runs into its limit."""
STEPS = 40


def make_batch(seed: int) -> Any:
    from rsi.pack import pack
    from rsi.types import Sample

    rng = np.random.default_rng(seed)
    lengths = [int(n * rng.uniform(0.8, 1.2)) for n, count in MIX for _ in range(count)]
    samples = []
    for length in rng.permutation(lengths).tolist():
        mask = np.arange(length) % 10 >= 5  # half is sampled, in turns
        tokens = rng.integers(0, 1000, length)
        logprobs = np.where(mask, -6.0, 0.0)
        samples.append(Sample(tuple(tokens.tolist()), tuple(mask.tolist()), tuple(logprobs.tolist()), 1.0, "solver", 0))
    return pack(samples)


def packed_over_padded(repeats: int = 3) -> dict[str, float]:
    import torch

    from rsi.loss import LossConfig
    from rsi.trainer import ModelConfig, TrainerConfig, layout
    from rsi.trainer.local import LocalTrainer

    torch.set_num_threads(1)
    batch, rates = make_batch(0), {}
    by_length = layout.documents
    for name in ("padded", "sorted", "packed"):
        # by first position: the order of the batch
        in_order = lambda of: sorted(by_length(of), key=lambda row: int(row[0]))  # noqa: E731
        layout.documents = in_order if name == "padded" else by_length
        kind = "packed" if name == "packed" else "padded"
        config = TrainerConfig(layout=kind, microbatch_tokens=4096, threads=1)
        trainer = LocalTrainer(ModelConfig(str(MODEL)), config, LossConfig())
        trainer.update(batch)
        spent = []
        for _ in range(repeats):
            began = time.process_time()
            trainer.update(batch)
            spent.append(time.process_time() - began)
        rates[name] = len(batch.tokens) / min(spent)
    return rates


def ranks(world: int) -> float:
    """Trained tokens per second of the sharded trainer."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="rsi-bench-") as directory:
        out = Path(directory) / "rate"
        command = [*launch, str(Path(__file__)), "--rank-of", str(out)]
        subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
        return float(out.read_text())


def run_rank(out: Path) -> None:
    from rsi.loss import LossConfig
    from rsi.trainer import ModelConfig, TrainerConfig
    from rsi.trainer.fsdp import FsdpTrainer

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    config = TrainerConfig(backend="fsdp", layout="packed", microbatch_tokens=2048, threads=1)
    trainer = FsdpTrainer(ModelConfig(str(MODEL)), config, LossConfig())
    if trainer.rank:
        return trainer.follow()
    batch, spent = make_batch(0), []
    trainer.update(batch)
    for _ in range(3):
        began = time.monotonic()
        trainer.update(batch)
        spent.append(time.monotonic() - began)
    trainer.close()
    out.write_text(str(len(batch.tokens) / min(spent)))


def run_loop(run_dir: Path) -> None:
    """STEPS updates with a checkpoint after each; goes on from the last one."""
    import hashlib
    from dataclasses import make_dataclass

    from rsi.loss import LossConfig
    from rsi.run import RunDir
    from rsi.trainer import ModelConfig, TrainerConfig
    from rsi.trainer.local import LocalTrainer

    settings = make_dataclass("Settings", [("steps", int)], frozen=True)
    trainer = LocalTrainer(ModelConfig(str(MODEL)), TrainerConfig(lr=1e-3, threads=1), LossConfig())
    with RunDir(run_dir, settings(STEPS), tensorboard=False) as run:
        found = run.latest()
        if found:
            trainer.load(found[1] / "policy")
        print("open", flush=True)
        for step in range(found[0] if found else 0, STEPS):
            trainer.update(small_batch(step))
            run.save(step + 1, lambda directory: trainer.save(directory / "policy"), {})
        total = hashlib.sha256()
        for _, tensor in sorted(trainer.model.state_dict().items()):
            total.update(tensor.numpy().tobytes())
        run.write_summary({"weights": total.hexdigest(), "version": trainer.version})


def small_batch(seed: int) -> Any:
    from rsi.pack import pack
    from rsi.types import Sample

    rng = np.random.default_rng(seed)
    rows = [tuple(rng.integers(0, 1000, 40).tolist()) for _ in range(4)]
    mask, logprobs = (False,) * 20 + (True,) * 20, (0.0,) * 20 + (-6.0,) * 20
    return pack([Sample(row, mask, logprobs, float(rng.normal()), "solver", 0) for row in rows])


def kill_at_random(kills: int, seed: int = 0) -> dict[str, Any]:
    """Kill until `kills` of them met a live run, then let it finish; compare with a run left alone."""
    moments, met = random.Random(seed), 0
    with tempfile.TemporaryDirectory(prefix="rsi-bench-") as directory:
        whole, broken = Path(directory) / "whole", Path(directory) / "broken"
        subprocess.run(loop(whole), check=True, stdout=subprocess.DEVNULL)
        while met < kills:
            process = subprocess.Popen(loop(broken), stdout=subprocess.PIPE)
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(moments.uniform(0, 0.4))
            process.kill()
            process.communicate()
            if process.returncode == 0:
                break
            met += 1
            print(f"kill {met}", file=sys.stderr, flush=True)
        subprocess.run(loop(broken), check=True, stdout=subprocess.DEVNULL)
        a, b = ((run / "summary.json").read_text() for run in (whole, broken))
    return {"kills": met, "same_weights_after_kills": a == b}


def loop(run_dir: Path) -> list[str]:
    return [sys.executable, str(Path(__file__)), "--loop-in", str(run_dir)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--loop-in", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        return run_rank(args.rank_of)
    if args.loop_in:
        return run_loop(args.loop_in)
    rates = packed_over_padded()
    print("layouts measured", rates, file=sys.stderr, flush=True)
    one, two = ranks(1), ranks(2)
    print("ranks measured", one, two, file=sys.stderr, flush=True)
    result = {
        "packed_over_padded": round(rates["packed"] / rates["padded"], 2),
        "packed_over_sorted": round(rates["packed"] / rates["sorted"], 2),
        "packed_tokens_per_cpu_s": round(rates["packed"]),
        "padded_tokens_per_cpu_s": round(rates["padded"]),
        "two_ranks_over_one": round(two / one, 2),
        "one_rank_tokens_per_s": round(one),
        **kill_at_random(args.kills),
        "update_over_trl_tokens_per_s": None,
        "update_over_trl_peak_memory": None,
    }
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:32} {value}")


if __name__ == "__main__":
    main()
