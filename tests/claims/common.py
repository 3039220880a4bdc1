"""What the claims share: arms trained by train.py, in two processes; a table, a picture, a record.

A claim is a file with `claim(toy) -> Result`. `main(claim)` runs it, prints its table, draws its
picture into assets/ and keeps its numbers in out/claims/. `toy` is the size of a test: seconds.
With `main(claim, judge)`, judge(data) -> Result: `--redraw` makes table and picture from them.
"""

import argparse
import concurrent.futures
import functools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from data.prepare import Corpus  # noqa: E402
from data.report import print_table  # noqa: E402
from train import Arm, Config, parse_arm  # noqa: E402

SEEDS = (1337, 1338, 1339)
# The claims' model: half as wide as train.py's default, so that three seeds of many arms fit into
# minutes. A test's: as small as it goes.
BASE = dict(n_layer=2, n_embd=96, n_head=3, block_size=96, batch_size=12, steps=300, warmup=30,
            eval_every=10**6, eval_batches=20)  # fmt: skip
TOY = BASE | dict(n_embd=32, n_head=2, block_size=32, batch_size=4, steps=12, warmup=2,
                  eval_batches=2)  # fmt: skip


@dataclass
class Result:
    """`rows`: the table, its header first. `verdicts`: {a sentence: whether it held}. `data`:
    numbers for the picture. `draw`: data -> a matplotlib figure. `more`: further tables."""

    title: str
    rows: list
    verdicts: dict
    data: dict = field(default_factory=dict)
    draw: object = None
    more: list = field(default_factory=list)


@functools.cache
def corpus(block_size):
    return Corpus("stdlib", "bytes", block_size)


def make_arm(text, seed, base, **changes):
    """train.py's Arm of "delayed,smooth=channel" on the CPU: same seed, same weights and batches
    for all arms."""
    c = replace(Config(), **(base | changes | parse_arm(text)), seed=seed, device="cpu")
    return Arm(c, corpus(c.block_size), torch.device("cpu"))


def keep(arm, path, **more):
    """A checkpoint for `revive`."""
    state = dict(model=arm.model.state_dict(), optimizer=arm.optimizer.state_dict(), step=arm.step)
    torch.save(state | more, path)


def revive(text, seed, base, path):
    """An arm that goes on from a checkpoint of another recipe -> (arm, what was kept). The file is
    read for each arm: an optimizer's load_state_dict shares the tensors that it is given."""
    arm, state = make_arm(text, seed, base), torch.load(path)
    missing, unexpected = arm.model.load_state_dict(state["model"], strict=False)
    assert not unexpected and all(k.endswith("amax_history") for k in missing)  # starts empty
    arm.optimizer.load_state_dict(state["optimizer"])
    arm.step = state["step"]
    return arm, state


def train_arm(job):
    """job: text, seed, base, and optionally `setup(arm)` and `each(arm)`, called before every step;
    functions of a module, because the job travels to another process -> what the run showed. A
    non-finite step ends the run: `diverged`."""
    torch.set_num_threads(1)
    arm = make_arm(job["text"], job["seed"], job["base"])
    kept = [job["setup"](arm)] if job.get("setup") else []
    losses, diverged = [], False
    while arm.step < arm.c.steps and not diverged:
        if job.get("each"):
            kept.append(job["each"](arm))
        loss, norm = arm.train_step()
        diverged = not (math.isfinite(loss) and math.isfinite(norm))
        losses.append(loss)
    val = math.nan if diverged else arm.evaluate()
    last = job["last"](arm) if job.get("last") else None
    return dict(text=job["text"], seed=job["seed"], losses=losses, val=val, diverged=diverged,
                kept=[k for k in kept if k is not None], last=last)  # fmt: skip


def run(jobs, work=train_arm, workers=None):
    """Every job in one of as many single-threaded processes as there are cores (or `workers`) ->
    results, in the order of the jobs."""
    corpus(32)  # prepared once, before the processes start
    workers = workers or min(os.cpu_count(), len(jobs), 8)
    if workers < 2:
        return [work(job) for job in jobs]
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, spawn) as pool:
        return list(pool.map(work, jobs))


def mean_and_spread(values, digits=4):
    """ "1.9322 ± 0.0123" """
    text = f"{statistics.mean(values):.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):.{digits}f}"


def main(claim, judge=None):
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument(
        "--toy", action="store_true", help="the size of a test: seconds, no picture"
    )
    if judge:
        parser.add_argument(
            "--redraw", action="store_true", help="table and picture from out/claims, no run"
        )
    args = parser.parse_args()
    name, start = Path(sys.argv[0]).stem, time.monotonic()
    old = None
    if judge and args.redraw:
        old = json.loads((ROOT / "out" / "claims" / f"{name}.json").read_text())
    result = judge(old["data"]) if old else claim(args.toy)
    seconds = old["seconds"] if old else time.monotonic() - start
    cpu = old.get("cpu") if old else sum(os.times()[:4])  # other work on the machine is not in it
    print(f"{result.title}\n")
    for rows in (result.rows, *result.more):
        print_table(rows)
        print()
    for sentence, held in result.verdicts.items():
        print(f"{'holds   ' if held else 'does not'}  {sentence}")
    if args.toy:
        return
    out = ROOT / "out" / "claims"
    out.mkdir(parents=True, exist_ok=True)
    record = dict(title=result.title, rows=result.rows, more=result.more, verdicts=result.verdicts,
                  data=result.data, seconds=seconds, cpu=cpu, torch=torch.__version__,
                  date=old["date"] if old else time.strftime("%Y-%m-%d"))  # fmt: skip
    (out / f"{name}.json").write_text(json.dumps(record, indent=1))
    if result.draw:
        import matplotlib

        matplotlib.use("Agg")
        figure = result.draw(json.loads(json.dumps(result.data)))  # as --redraw reads it
        figure.savefig(ROOT / "assets" / f"{name}.png", dpi=110)
    took = f"{seconds:.0f} s" + (f", {cpu:.0f} s of CPU" if cpu else "")
    print(f"{took}; see out/claims/{name}.json" + f", assets/{name}.png" * bool(result.draw))
