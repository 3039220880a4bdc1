"""Kills, faults and long runs: what a run that is left alone must survive."""

import copy
import gc
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch
from conftest import count
from test_train import ROOT, TINY, arm, equal, run, state_of

import train
from data import checkpoint
from data.bench import can_compile
from data.prepare import UserError
from fp8gpt import RECIPES

HARD = ["--optimizer", "fp8adam", "--stochastic-rounding", "--accum", "2", "--checkpoint"]


def command(*args):
    return [sys.executable, str(ROOT / "train.py"), *map(str, args)]


def flat(state, prefix=""):
    """A checkpoint as {path: bytes or value}, without what need not be equal."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        elif torch.is_tensor(value):
            bits = value.contiguous().view(-1).view(torch.uint8)
            yield f"{prefix}{key}", bits.numpy().tobytes()
        elif key != "out":
            yield f"{prefix}{key}", repr(value)


def same(a, b):
    a, b = (dict(flat(checkpoint.read_checkpoint(d))) for d in (a, b))
    return a.keys() == b.keys() and all(a[k] == b[k] for k in a)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", range(6))
def test_a_kill_at_any_instant_of_a_write_leaves_a_whole_checkpoint(
    at,
    text,
    tmp_path,
    monkeypatch,
):
    """Before and after each thing that happens to the disk; in half a file, too."""
    path, a = tmp_path / "ckpt.pt", arm(text)
    for _ in range(2):
        a.train_step()
        a.save(path)
    a.train_step()
    instants = []

    def counted(owner, name):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            instants.append(name)
            if len(instants) == at + 1:
                if name == "save":
                    args[1].write(b"half of it")
                raise Killed
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(torch, "save")
    for name in ("fsync", "link", "replace"):
        counted(os, name)
    with pytest.raises(Killed):
        a.save(path)
    monkeypatch.undo()
    assert instants[at] == ["save", "fsync", "link", "replace", "replace", "fsync"][at]
    assert checkpoint.read_checkpoint(tmp_path)["step"] == (3 if at == 5 else 2)
    assert checkpoint.read_checkpoint(tmp_path, older=True)["step"] == (2 if at > 3 else 1)
    a.save(path)  # what was left behind is in nobody's way
    assert checkpoint.read_checkpoint(tmp_path)["step"] == 3


def run_with_kills(flags, out, kills, rng):
    """Start, kill at a random instant, resume ... until it ends -> the number of kills."""
    killed, args = 0, [*flags, "--out", out]
    folder = out / flags[flags.index("--recipe") + 1]
    while True:
        process = subprocess.Popen(command(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        rows = folder / "steps.jsonl"
        before = rows.read_text().count("\n") if rows.exists() else 0
        if killed < kills:
            until = time.monotonic() + 120  # it has begun; then any instant
            while not (folder / "ckpt.pt").exists() or rows.read_text().count("\n") <= before:
                if process.poll() is not None or time.monotonic() > until:
                    break
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.5))
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.communicate()
                killed += 1
                args = ["--resume", folder]
                continue
        said, err = process.communicate(timeout=300)
        assert process.returncode == 0 and not err, err.decode()[-2000:]
        return killed


def check_kills(recipe, text, tmp_path, kills, steps, seed):
    """Killed and never killed: the same bits in the last checkpoint, a row for every step."""
    more = ["--smooth", "channel"] if recipe == "delayed" else []
    flags = [*TINY, "--data", text, "--recipe", recipe, "--steps", steps, "--eval-every", 1, *more]
    flags = [*flags, *HARD, "--adam-block", 64]
    killed = run_with_kills(flags, tmp_path / "killed", kills, random.Random(seed))
    assert run(*flags, "--out", tmp_path / "straight").returncode == 0
    assert same(tmp_path / "killed" / recipe, tmp_path / "straight" / recipe)
    rows = [[json.loads(line) for line in (tmp_path / d / recipe / "steps.jsonl").open()]
            for d in ("killed", "straight")]  # fmt: skip
    for a, b in zip(*rows, strict=True):
        assert {k: v for k, v in a.items() if k != "seconds"} == {
            k: v for k, v in b.items() if k != "seconds"
        }
    return killed


def test_a_run_that_is_killed_and_resumed_has_the_bits_of_one_that_was_not(text, tmp_path):
    """A checkpoint in every step, so that the kill falls into a write about as often as not."""
    assert check_kills("delayed", text, tmp_path, 1, 16, 0) == 1


@pytest.mark.soak
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_kills_at_random_instants_change_no_bit(recipe, text, tmp_path):
    killed = check_kills(recipe, text, tmp_path, 4, 150, recipe)
    count("kills survived", killed)
    assert killed >= 3  # of 8 recipes: at least 24


@pytest.mark.parametrize("signum, code", [(signal.SIGTERM, 143)])
def test_termination_leaves_a_checkpoint_of_the_step_and_goes_on(signum, code, text, tmp_path):
    flags = [*TINY, "--data", text, "--recipe", "current", "--out", tmp_path]
    process = subprocess.Popen(command(*flags, "--steps", 100000), stdout=subprocess.PIPE)
    rows = tmp_path / "current" / "steps.jsonl"
    until = time.monotonic() + 100
    while not (rows.exists() and rows.read_text().count("\n") > 3) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signum)
    said, _ = process.communicate(timeout=100)
    assert process.returncode == code and b"terminated at step" in said
    done = checkpoint.read_checkpoint(tmp_path / "current")["step"]
    assert rows.read_text().count("\n") == done and done % 100  # not one of the usual ones
    train.main(["--resume", str(tmp_path / "current"), "--steps", str(done + 2)])
    assert rows.read_text().count("\n") == done + 2


def test_a_bad_checkpoint_offers_the_one_before_it(text, tmp_path, capsys):
    flags = [*TINY, "--data", str(text), "--recipe", "mxfp8", "--out", str(tmp_path)]
    train.main([*flags, "--steps", "4", "--eval-every", "2"])
    path = tmp_path / "mxfp8" / "ckpt.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    resume = ["--resume", str(tmp_path / "mxfp8"), "--steps", "6"]
    with pytest.raises(UserError, match="no checkpoint of train.py: .*--older goes on"):
        train.main(resume)
    train.main([*resume, "--older"])
    out = capsys.readouterr().out
    assert "mxfp8, step 2" in out and "steps 3 to 6" in out
    (path.parent / "ckpt.old.pt").unlink()
    path.unlink()
    with pytest.raises(UserError, match="there is no checkpoint at [^;]*$"):
        train.main(resume)


def test_no_changed_bit_of_a_checkpoint_is_overlooked(text, tmp_path):
    a = arm(text, recipe="delayed", optimizer="fp8adam")
    a.train_step()
    path = tmp_path / "ckpt.pt"
    a.save(path)
    whole, rng = path.read_bytes(), random.Random(0)
    right, seen = checkpoint.checksum(checkpoint.read_checkpoint(tmp_path)), 0
    for _ in range(60):
        at, bit = rng.randrange(len(whole)), 1 << rng.randrange(8)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
        try:  # what is left to load is what was saved: padding of the archive, a date, a name
            assert checkpoint.checksum(checkpoint.read_checkpoint(tmp_path)) == right
        except UserError as error:
            seen += "is damaged: its CRC 32 differs" in str(error)
    assert seen > 20


def test_a_run_goes_on_in_another_recipe_and_with_another_history(text, tmp_path, capsys):
    flags = [*TINY, "--data", str(text), "--out", str(tmp_path)]
    train.main([*flags, "--recipe", "delayed", "--steps", "4", "--amax-history-len", "8"])
    old = checkpoint.read_checkpoint(tmp_path / "delayed")["model"]
    name = "blocks.0.attn.wo.amax_history"
    for length in (2, 16):  # the newest entries are kept
        a = arm(text, recipe="delayed", amax_history_len=length)
        checkpoint.load_weights(a.model, old)
        kept = a.model.state_dict()[name]
        n = min(length, 8)
        assert (
            len(kept) == length
            and torch.equal(kept[:n], old[name][:n])
            and (old[name][1] > 0).all()
        )
    resume = ["--resume", str(tmp_path / "delayed")]
    train.main([*resume, "--recipe", "mxfp8", "--steps", "6"])
    assert "delayed, step 4 -> mxfp8" in capsys.readouterr().out
    train.main([*resume, "--recipe", "delayed", "--steps", "8"])
    assert "mxfp8, step 6 -> delayed" in capsys.readouterr().out
    rows = (tmp_path / "delayed" / "steps.jsonl").read_text()
    assert [json.loads(r)["step"] for r in rows.splitlines()] == list(range(1, 9))


def test_a_resumed_run_keeps_what_was_chosen_and_drops_what_was_another_recipes(text, tmp_path):
    flags = [*TINY, "--data", str(text), "--out", str(tmp_path), "--steps", "2", "--threads", "1"]
    train.main([*flags, "--recipe", "amax", "--margin", "0/0/5"])
    state = checkpoint.read_checkpoint(tmp_path / "amax")
    state["config"] |= dict(fsdp=True)  # as several processes leave it
    checkpoint.write_checkpoint(state, tmp_path / "amax" / "ckpt.pt")
    torch.set_num_threads(2)
    out = run("--resume", tmp_path / "amax", "--steps", 3, "--tokens", 1)
    assert out.returncode == 0 and "the schedule ends at 3" in out.stdout, out.stderr
    assert torch.get_num_threads() == 1
    config = checkpoint.read_checkpoint(tmp_path / "amax")["config"]
    assert config["margin"] == "0/0/5" and config["fsdp"] is False
    out = run("--resume", tmp_path / "amax", "--steps", 4, "--tokens", 1, "--recipe", "current")
    assert out.returncode == 0 and "amax, step 3 -> current" in out.stdout, out.stderr
    assert checkpoint.read_checkpoint(tmp_path / "amax")["config"]["margin"] is None


def test_a_broken_model_that_is_terminated_replaces_no_checkpoint(text, tmp_path, monkeypatch):
    a = arm(text)
    monkeypatch.setattr(a, "evaluate", lambda: math.nan)
    step = a.train_step

    def terminated():
        os.kill(os.getpid(), signal.SIGTERM)
        loss = step()
        a.skipped = 1
        return loss

    monkeypatch.setattr(a, "train_step", terminated)
    with checkpoint.alone_in(tmp_path), pytest.raises(SystemExit):
        train.fit(a, tmp_path, "mxfp8")
    assert checkpoint.read_checkpoint(tmp_path)["step"] == 0 < a.step


def test_a_checkpoint_that_became_newer_is_not_taken_back(text, tmp_path, monkeypatch):
    """As by a run that was interrupted, and writes its last one while this one prepares."""
    flags = [*TINY, "--data", str(text), "--out", str(tmp_path), "--recipe", "current"]
    train.main([*flags, "--steps", "2", "--tokens", "1"])
    path, corpus = tmp_path / "current" / "ckpt.pt", train.Corpus
    monkeypatch.setattr(train, "Corpus", lambda *args: os.utime(path, (1, 1)) or corpus(*args))
    with pytest.raises(UserError, match="has a newer checkpoint"):
        train.main(["--resume", str(path.parent), "--steps", "4"])
    assert checkpoint.read_checkpoint(path.parent)["step"] == 2


def test_a_row_that_was_cut_off_does_not_spoil_the_next(text, tmp_path):
    flags = [*TINY, "--data", str(text), "--out", str(tmp_path), "--recipe", "current"]
    train.main([*flags, "--steps", "3", "--tokens", "1"])
    rows = tmp_path / "current" / "steps.jsonl"
    rows.write_text(rows.read_text()[:-9])  # as after a power failure
    train.main(["--resume", str(rows.parent), "--steps", "5", "--tokens", "1"])
    assert [json.loads(row)["step"] for row in rows.open()] == [1, 2, 4, 5]


def test_a_file_system_without_links_keeps_two_checkpoints_too(text, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", mock.Mock(side_effect=OSError))
    a = arm(text)
    for _ in range(3):
        a.save(tmp_path / "ckpt.pt")
        a.train_step()
    steps = [checkpoint.read_checkpoint(tmp_path, older)["step"] for older in (False, True)]
    assert steps == [2, 1] and len(list(tmp_path.iterdir())) == 2


# Compiled code may add in another order, and then a code flips. Measured 0 on x86 with AVX2.
FUSED = 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "fp8adam"])
def test_a_run_goes_on_compiled_and_a_compiled_one_goes_on_without(optimizer, text, tmp_path):
    """The same names and shapes in the checkpoint, and losses as of a run never compiled."""
    if not can_compile("cpu"):
        pytest.skip("torch.compile needs a C++ compiler")
    kind = dict(recipe="delayed", optimizer=optimizer, accum=2)

    def go_on(steps, compiled, state=None):
        a = arm(text, compile=compiled, **kind)
        if state:
            a.restore(state)
        losses = [a.train_step()[0] for _ in range(steps)]
        a.save(tmp_path / "ckpt.pt")
        return losses, checkpoint.read_checkpoint(tmp_path)

    straight, whole = go_on(8, False)
    shapes = [{k: v.shape for k, v in whole["model"].items()}]
    for compiled in (False, True):
        before, state = go_on(4, compiled)
        after, whole = go_on(4, not compiled, state)
        shapes.append({k: v.shape for k, v in whole["model"].items()})
        assert max(abs(a - b) for a, b in zip(straight, before + after)) < FUSED
    assert shapes[0] == shapes[1] == shapes[2]


# ------------------------------------------------------------------------------------------------
# Numerics under fire


def inject(a, kind, rng):
    """Break what the next step computes -> a call that mends it."""
    blocks, hooks = list(a.model.blocks), []
    block = blocks[rng.randrange(len(blocks))]
    linear = rng.choice([block.attn.wqkv, block.attn.wo, block.mlp.w12, block.mlp.w3])
    if kind in ("nan", "inf", "outlier"):  # one element of an activation
        value = dict(nan=math.nan, inf=math.inf, outlier=1e6)[kind]

        def hook(module, args):
            x = args[0].clone()
            x.view(-1)[rng.randrange(x.numel())] = value
            return (x, *args[1:])

        hooks.append(linear.register_forward_pre_hook(hook))
    elif kind in ("gradient nan", "gradient inf"):
        value = math.nan if "nan" in kind else math.inf

        def hook(module, args, out):
            at = torch.arange(out.numel()).view(out.shape) == rng.randrange(out.numel())
            out.register_hook(lambda g: g.masked_fill(at, value))

        hooks.append(linear.register_forward_hook(hook))
    elif kind == "zero":
        hooks.append(a.model.wte.register_forward_hook(lambda m, args, out: out * 0))
    else:  # "lr": an exploding learning rate
        a.lr = lambda: 1e30
    rows = list(hooks)

    def mend():
        for h in rows:
            h.remove()
        a.__dict__.pop("lr", None)

    return mend


KINDS = ["nan", "inf", "outlier", "gradient nan", "gradient inf", "zero", "lr"]


def finite(a):
    state = a.model.state_dict().values()
    moments = (t for s in a.optimizer.state.values() for t in s.values())
    return all(t.float().isfinite().all() for t in [*state, *moments])


def under_fire(recipe, optimizer, faults, seed, text, capsys):
    """Faults at random steps. A skipped step is named and touches nothing; one that is not skipped
    leaves only finite numbers; what came of an exploding step is replaced by what was before it."""
    rng, done = random.Random(seed), dict.fromkeys(KINDS, 0)
    smooth = rng.choice([None, "channel", "token"])
    a = arm(text, recipe=recipe, optimizer=optimizer, smooth=smooth, stochastic_rounding=True)
    for number in range(faults):
        for _ in range(rng.randrange(1, 4)):
            a.train_step()
            assert not a.skipped and finite(a)
        kind = KINDS[number % len(KINDS)]
        before = {k: v.clone() for k, v in state_of(a).items()}
        kept = copy.deepcopy((a.model.state_dict(), a.optimizer.state_dict()))
        capsys.readouterr()
        mend = inject(a, kind, rng)
        loss, norm = a.train_step()
        said, skipped = capsys.readouterr().out, a.skipped
        mend()
        if skipped:
            assert equal(before, state_of(a)), (kind, recipe)
            assert f"step {a.step + 1}: the " in said and "is not finite" in said
        else:
            assert kind not in ("nan", "inf", "gradient nan", "gradient inf"), (kind, recipe)
            assert math.isfinite(loss) and math.isfinite(norm) and finite(a), (kind, recipe)
        if kind == "lr":  # the weights are useless now: stopping is right, going on is not asked
            with pytest.raises(UserError, match="not finite 5 times in a row"):
                for _ in range(12):
                    a.train_step()
            a.model.load_state_dict(kept[0])
            a.optimizer.load_state_dict(kept[1])
            a.skipped = 0
        done[kind] += 1
    return done


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_faults_at_random_steps_corrupt_nothing(recipe, text, capsys):
    assert min(under_fire(recipe, "fp8adam", 7, 1, text, capsys).values()) == 1


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", ["adamw", "fp8adam"])
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_many_faults_corrupt_nothing(recipe, optimizer, text, capsys):
    done = under_fire(recipe, optimizer, 14, f"{recipe}{optimizer}", text, capsys)
    count("faults injected", sum(done.values()))  # 16 x 14 = 224


# ------------------------------------------------------------------------------------------------
# Long and steady

STEADY_MEMORY = 8 << 20  # bytes of RSS; a leaked micro-batch of this model would be 20 times that
STEADY_TIME = 1.5  # medians of a third of the steps each, beside other work


def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.soak
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_two_thousand_steps_take_no_more_memory_time_or_files(recipe, text, tmp_path):
    a = arm(text, recipe=recipe, optimizer="fp8adam", steps=2000, eval_every=100)
    seconds, memory, files = [], [], []
    while a.step < 2000:
        start = time.thread_time()
        a.train_step()
        seconds.append(time.thread_time() - start)
        if a.step % 100 == 0:
            a.evaluate()
            a.save(tmp_path / "ckpt.pt")
            gc.collect()
            memory.append(resident())
            files.append(len(os.listdir("/proc/self/fd")))
    first, last = sorted(seconds[600:1200]), sorted(seconds[1400:])
    assert memory[-1] - memory[5] < STEADY_MEMORY, [m >> 20 for m in memory]
    assert last[300] < STEADY_TIME * first[300]
    assert len(set(files[1:])) == 1
    count("steps run", 2000)
