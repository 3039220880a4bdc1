"""Several processes by torchrun and gloo, beside one process that accumulates the same batches."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from peer_distributed import train as alone
from test_train import ROOT, TINY

import train
from data import distributed
from data.prepare import UserError
from fp8gpt import RECIPES

pytestmark = pytest.mark.xdist_group("distributed")  # each start is many processes
PEER = Path(__file__).with_name("peer_distributed.py")
# The same losses, where the sums are: two micro-batches, or more on a grid (peer_distributed).
SAME = 1e-5
# Sums of more than two gradients depend on their order, by 1e-7, until that crosses the middle of
# two codes of some operand: then by as much as one code of it does. So does FSDP's clipping norm, a
# sum of shards. Measured 1.3e-3, after 20 steps of a loss that has fallen by 1.
ORDER = 5e-3
# FP8 Adam: under FSDP a tile of moments ends with the shard, so scales differ; and a code of one
# that flips is 6 % of it. Measured 5.5e-3 after 20 steps of a loss that has fallen by 1.
MOMENTS = 2e-2


def torchrun(n, *args, wait=True, **kwargs):
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={n}",
               "--standalone", *map(str, args)]  # fmt: skip
    env = os.environ | dict(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
    started = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, **kwargs)  # fmt: skip
    if wait:
        out, _ = started.communicate(timeout=900)
        return started.returncode, out
    return started


def together(n, out, jobs):
    """-> for each job, the results of all ranks"""
    out.mkdir(exist_ok=True)
    code, said = torchrun(n, PEER, out, *map(json.dumps, jobs))
    assert code == 0, said[-3000:]
    ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(n)]
    return list(zip(*ranks))


def check(n, job, ranks):
    """All ranks agree to the last bit, and with one process within the named tolerance."""
    one = alone(**{k: v for k, v in job.items() if k != "fsdp"})
    assert len({r["digest"] for r in ranks}) == 1, job
    assert len({str(r["losses"]) for r in ranks}) == 1
    exact = not job.get("fsdp") and (job["accum"] == 2 or job.get("grid"))
    far = SAME if exact else ORDER
    far = MOMENTS if far is ORDER and "fp8adam" in job["text"] else far
    for a, b in zip([*one["losses"], one["val"]], [*ranks[0]["losses"], ranks[0]["val"]]):
        assert (a is None) == (b is None) and (a is None or abs(a - b) < far), (job, a, b)
    return one


FAST = [
    dict(text="delayed,optimizer=fp8adam,smooth=channel,stochastic_rounding=true", accum=4,
         loud=8, grid=True, broken=[5, 11]),
    dict(text="current", accum=2, loud=8),
    dict(text="delayed", accum=4, loud=8, broken=[7], fsdp=True),
    dict(text="mxfp8,family=gpt2,optimizer=fp8adam,loss_scale=1024", accum=2, fsdp=True),
]  # fmt: skip


def test_two_processes_train_as_one_does(text, tmp_path):
    jobs = [dict(data=str(text), **job) for job in FAST]
    for job, ranks in zip(jobs, together(2, tmp_path / "2", jobs)):
        one = check(2, job, ranks)
        assert one["losses"].count(None) == len(job.get("broken", ()))  # a NaN of one, seen by all
        assert one["losses"][-1] < one["losses"][0] - 0.2


@pytest.mark.soak
def test_a_checkpoint_goes_on_among_another_number_of_processes(text, tmp_path):
    """One to two, two to one, whole to shards and back; FP8 moments, too."""
    for optimizer, far in (("adamw", ORDER), ("fp8adam", MOMENTS)):
        job = dict(data=str(text), text=f"delayed,optimizer={optimizer}", accum=2)
        straight = alone(**job)
        alone(**job, steps=10, save=str(tmp_path / "one"))
        jobs = [job | dict(saved=str(tmp_path / "one")),
                job | dict(saved=str(tmp_path / "one"), fsdp=True),
                job | dict(steps=10, save=str(tmp_path / "two")),
                job | dict(steps=10, save=str(tmp_path / "shards"), fsdp=True)]  # fmt: skip
        jobs.append(job | dict(steps=0, save=str(tmp_path / "start"), fsdp=True))
        found = [ranks[0] for ranks in together(2, tmp_path / optimizer, jobs)][:2]
        found += [alone(**job, saved=str(tmp_path / name)) for name in ("two", "shards")]
        begun = alone(**job, saved=str(tmp_path / "start"))  # of a run that has done no step
        assert begun == straight
        for result in found:
            assert all(abs(a - b) < far for a, b in zip(straight["losses"][10:], result["losses"]))
            assert abs(result["val"] - straight["val"]) < far


@pytest.mark.soak
def test_a_sharded_run_ends_in_a_sample_and_goes_on(text, tmp_path):
    more = ["--resume", tmp_path / "delayed", "--steps", 6]
    for args in (flags(text, tmp_path, "--steps", 3, "--fsdp"), [ROOT / "train.py", *more]):
        code, said = torchrun(2, *args)
        assert code == 0 and said.count("result   val loss") == said.count("sample   ") == 1, said
    assert train.read_checkpoint(tmp_path / "delayed")["config"]["fsdp"] is True


@pytest.mark.soak
@pytest.mark.parametrize("n, how", [
    (2, {"grid": True}), (2, {"fsdp": True}), (4, {"grid": True}), (4, {}), (4, {"fsdp": True}),
], ids=["2 on a grid", "2 shards", "4 on a grid", "4", "4 shards"])  # fmt: skip
@pytest.mark.parametrize("optimizer", ["adamw", "fp8adam"])
def test_every_recipe_trains_in_several_processes_as_in_one(n, how, optimizer, text, tmp_path):
    jobs = [dict(data=str(text), text=f"{r},optimizer={optimizer}", accum=4, loud=8) | how
            for r in RECIPES]  # fmt: skip
    for job, ranks in zip(jobs, together(n, tmp_path / "out", jobs)):
        check(n, job, ranks)


def flags(text, out, *more):
    return [ROOT / "train.py", *TINY, "--data", text, "--out", out, "--recipe", "delayed", *more]


def test_only_rank_0_writes_and_termination_leaves_a_checkpoint(text, tmp_path):
    """The command itself, sharded: stopped by SIGTERM, resumed by one process, which has no
    shards."""
    started = torchrun(2, *flags(text, tmp_path, "--steps", 100000, "--fsdp"), wait=False)
    rows = tmp_path / "delayed" / "steps.jsonl"
    until = time.monotonic() + 120
    while not rows.exists() or rows.read_text().count("\n") < 3:
        assert time.monotonic() < until and started.poll() is None
        time.sleep(0.1)
    os.kill(started.pid, signal.SIGTERM)
    said, _ = started.communicate(timeout=120)
    assert started.returncode != 0 and said.count("terminated at step") == 1, said[-2000:]
    state = train.read_checkpoint(tmp_path / "delayed")
    steps = [json.loads(line)["step"] for line in rows.open()]
    assert steps == list(range(1, state["step"] + 1)) and state["config"]["accum"] == 2
    assert sorted(p.name for p in (tmp_path / "delayed").iterdir()) == [
        "ckpt.old.pt", "ckpt.pt", "steps.jsonl"]  # fmt: skip
    train.main(["--resume", str(tmp_path / "delayed"), "--steps", str(state["step"] + 2)])


def test_a_process_that_dies_ends_the_job_with_a_message(text, tmp_path):
    code = (
        "import os, sys, train; from data import distributed\n"
        "step = train.Arm.train_step\n"
        "def dies(arm):\n"
        "    if arm.step == 2 and distributed.rank() == 1: os._exit(9)\n"
        "    return step(arm)\n"
        "train.Arm.train_step = dies\n"
        "train.run_main(sys.argv[1:])\n"
    )
    here = f"import data.prepare, pathlib; data.prepare.HERE = pathlib.Path({str(tmp_path)!r})\n"
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    (tmp_path / "dies.py").write_text(path + here + code)
    start = time.monotonic()
    args = [str(a) for a in flags(text.with_suffix(".txt"), tmp_path, "--steps", 50)[1:]]
    code, said = torchrun(2, tmp_path / "dies.py", *args)
    assert code != 0 and time.monotonic() - start < 120
    assert (
        "another process of this job is gone" in said
        and "Traceback (most recent" not in (said.split("another process")[0])
    )
    assert train.read_checkpoint(tmp_path / "delayed")["step"] == 0  # whole


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="1 GPUs are here"):
        distributed.join(torch.device("cuda"))


@pytest.mark.parametrize("argv, says", [
    (["--fsdp"], "shards a model over processes"),
    (["--compare", "bf16,fsdp=true"], "same for all arms"),
])  # fmt: skip
def test_a_mistake_is_one_sentence(argv, says, text):
    with pytest.raises(UserError, match=says):
        train.main([*TINY, "--data", str(text), *argv])
