"""train.py as a user runs it: commands, resume, faults, and mistakes on the command line."""

import contextlib
import io
import json
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import fp8gpt
import train
from data import bench, checkpoint
from data.prepare import Corpus, UserError
from fp8gpt import RECIPES

ROOT = Path(__file__).resolve().parent.parent
TINY = "--n-layer 2 --n-head 2 --n-embd 32 --block-size 16 --batch-size 4 --eval-batches 2".split()
SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4, eval_batches=2, warmup=3)


def apart(*args, **kwargs):
    """The command in a process of its own, which takes seconds to import torch."""
    command = [sys.executable, ROOT / "train.py", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, **kwargs)


def run(*args, encoding="utf-8"):
    """The command in this process, to the same end: exit code, stdout, and warnings in stderr."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding, write_through=True) for _ in range(2)]
    code, show = 0, lambda *warning: print(warnings.formatwarning(*warning[:4]), file=sys.stderr)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(streams[0]))
        stack.enter_context(contextlib.redirect_stderr(streams[1]))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(mock.patch.object(sys, "argv", ["train.py", *map(str, args)]))
        stack.enter_context(mock.patch.object(warnings, "showwarning", show))
        warnings.simplefilter("default")
        try:
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
    out, err = (s.buffer.getvalue().decode(encoding) for s in streams)
    return subprocess.CompletedProcess(args, code, out, err)


def arm(text, **changes):
    c = replace(train.Config(data=str(text), steps=20), **SMALL | changes)
    corpus = Corpus(c.data, c.tokenizer, c.block_size, say=lambda line: None)
    return train.Arm(c, corpus, torch.device("cpu"))


def state_of(a):
    """Everything that outlives a step."""
    flat = {f"model.{k}": v for k, v in a.model.state_dict().items()}
    flat |= {f"buffer.{k}": v for k, v in a.model.named_buffers()}  # what a step has seen so far
    for i, s in a.optimizer.state_dict()["state"].items():
        flat |= {f"optimizer.{i}.{k}": v for k, v in s.items()}
    flat["rng"], flat["step"] = torch.get_rng_state(), torch.tensor(a.step)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return {k: v.clone().view(bits.get(v.itemsize, v.dtype)) for k, v in flat.items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# Commands ----------------------------------------------------------------------------------------


def test_a_run_prints_and_writes_what_it_promises(text, tmp_path):
    out = apart(
        *TINY,
        "--data",
        text,
        "--steps",
        6,
        "--eval-every",
        3,
        "--out",
        tmp_path,
        "--sample",
        "def ",
    )
    assert out.returncode == 0 and not out.stderr, out.stderr
    for words in (
        "machine  CPU",
        "GEMMs    emulated",
        "linears  mxfp8: 0.attn.wqkv",
        "bf16: lm_head",
    ):
        assert words in out.stdout
    assert "fp32 moments" in out.stdout and re.search("sample   ['\"]def ", out.stdout)
    result = re.search(r"val loss (\d\.\d+), [\d,]+ tokens/s, MFU n/a, \d+ MB", out.stdout)
    report = json.loads((tmp_path / "mxfp8" / "run.json").read_text())
    assert float(result[1]) == pytest.approx(report["val_loss"], abs=1e-4)
    assert report["machine"]["torch"] == torch.__version__ and report["config"]["n_embd"] == 32
    rows = [json.loads(line) for line in (tmp_path / "mxfp8" / "steps.jsonl").open()]
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6] and "val_loss" in rows[2]
    assert (tmp_path / "mxfp8" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    state = torch.load(tmp_path / "mxfp8" / "ckpt.pt", weights_only=True)
    assert state["step"] == 6 and state["tokenizer"] == "bytes"


def test_a_comparison_ends_in_a_table_a_file_and_a_picture(text, tmp_path):
    arms = ["bf16", "current", "delayed,smooth=channel,optimizer=fp8adam", "mxfp8,w3=bf16"]
    out = run(
        *TINY, "--data", text, "--steps", 4, "--out", tmp_path, "--seeds", 2, "--compare", *arms
    )
    assert out.returncode == 0 and not out.stderr, out.stderr
    report = json.loads((tmp_path / "compare" / "compare.json").read_text())
    assert [a["name"] for a in report["arms"]] == arms
    for a in report["arms"]:
        assert len(a["val_losses"]) == 2 and a["spread"] > 0 and a["memory_bytes"] > 0
        assert a["val_loss"] == pytest.approx(sum(a["val_losses"]) / 2)
        assert 0 <= a["underflow"] <= 1 and 0 <= a["clip"] <= 1
        assert abs(a["difference"]) < 0.05  # four steps from the same weights on the same batches
        assert f"| {a['name']}" in out.stdout
    assert report["arms"][0]["difference"] == 0 and report["arms"][0]["worst_sqnr"] > 50
    assert 20 < report["arms"][3]["worst_sqnr"] < 32
    assert (tmp_path / "compare" / "compare.png").read_bytes()[:4] == b"\x89PNG"


def test_the_bench_has_a_row_for_every_recipe(text):
    out = run(*TINY, "--data", text, "--bench")
    assert out.returncode == 0 and not out.stderr, out.stderr
    rows = [line.split()[1] for line in out.stdout.splitlines() if line.startswith("| ")]
    assert rows[0] == "recipe" and rows[2:] == ["fp32", *RECIPES]  # between them, the dashes


def test_advice_on_a_cpu_says_what_it_cannot_know(capsys):
    train.main(["--advise"])
    out = capsys.readouterr().out
    assert "advice   bf16: no recipe can be faster here" in out and "cannot be known" in out
    assert all(f"not here {name}: no FP8" in out for name in RECIPES if name in train.ADVISED[1:])


@pytest.mark.parametrize("limit, best", [(50, "delayed"), (-1, None)])
def test_advice_times_what_has_fp8_gemms_and_names_the_fastest(limit, best, capsys, monkeypatch):
    """The GPU is played by a CPU: its Hopper has no native mxfp8."""
    hopper = lambda recipe, device: fp8gpt.Backend(  # noqa: E731
        "torch", "emulated", "emulated here" if recipe.name == "mxfp8" else "FP8 tensor cores"
    )
    timed = []
    monkeypatch.setattr(fp8gpt, "choose_backend", hopper)
    monkeypatch.setattr(bench, "block_step", lambda config, *_: lambda: timed.append(config))
    seconds = dict(bf16=3.0, delayed=2.0, current=2.5, rowwise=4.0, blockwise=3.5)
    monkeypatch.setattr(bench, "medians", lambda calls, *_, **__: {n: seconds[n] for n in calls})
    c = train.Config(n_embd=64, n_layer=1)
    configs = {r: train.model_config(replace(c, recipe=r), 256) for r in bench.ADVISED}
    bench.advise(configs, c, torch.device("cpu"), limit)
    out = capsys.readouterr().out
    assert "not here mxfp8: emulated here" in out
    if best:
        assert [c.recipe.name for c in timed] == list(bench.ADVISED[:-1])
        assert {(c.n_layer, c.n_embd) for c in timed} == {(1, 64)}
        assert "delayed is 1.50 times as fast as bf16: --recipe delayed; compare" in out
    else:
        assert "current: not measured, the time was up" in out and "--recipe" not in out


def test_a_block_step_leaves_no_gradient_and_a_history(monkeypatch):
    config = fp8gpt.GPTConfig(64, 16, 1, 2, None, 32, recipe="delayed")
    made, GPT = [], bench.GPT
    monkeypatch.setattr(bench, "GPT", lambda c: made.append(GPT(c)) or made[0])
    bench.block_step(config, 2, torch.device("cpu"))()
    assert all(p.grad is None for p in made[0].parameters())
    assert (made[0].blocks[0].attn.wo.amax_history[0] > 0).all()


def test_a_terminal_without_unicode_is_no_obstacle(text, tmp_path):
    flags = [*TINY, "--data", text, "--steps", 1, "--out", tmp_path]
    for more in (["--sample", "naïve"], ["--compare", "bf16", "--seeds", 2]):
        out = run(*flags, *more, encoding="ascii")
        assert out.returncode == 0, out.stderr


def test_help_has_a_line_for_every_field():
    out = run("--help")
    assert out.returncode == 0
    for name in train.FIELDS:
        assert "--" + name.replace("_", "-") in out.stdout


def test_arms_start_from_the_same_weights_and_batches(text):
    a, b = arm(text, recipe="bf16"), arm(text, recipe="mxfp8", smooth="token", optimizer="fp8adam")
    assert all(map(torch.equal, a.model.parameters(), b.model.parameters()))
    assert torch.equal(a.batch("train", 1, 2, 3)[0], b.batch("train", 1, 2, 3)[0])
    x, y = a.batch("val", 0, 0)
    assert torch.equal(x[:, 1:], y[:, :-1])


# Resume and interruption -------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("optimizer", ["adamw", "fp8adam"])
def test_resume_is_exact(recipe, optimizer, text, tmp_path):
    kind = dict(recipe=recipe, optimizer=optimizer, accum=2, stochastic_rounding=True)
    straight = arm(text, **kind)
    for _ in range(6):
        straight.train_step()
    first = arm(text, **kind)
    for _ in range(3):
        first.train_step()
    first.save(tmp_path / "ckpt.pt")
    torch.manual_seed(99)
    state, c = train.load_checkpoint(tmp_path)
    second = arm(text, **kind)
    assert c == first.c
    second.restore(state)
    for _ in range(3):
        second.train_step()
    assert equal(state_of(straight), state_of(second))


def test_ctrl_c_ends_with_evaluation_and_sample_and_the_run_goes_on(text, tmp_path):
    flags = [*TINY, "--data", text, "--steps", 100000, "--out", tmp_path]
    command = [sys.executable, ROOT / "train.py", *map(str, flags)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    rows = tmp_path / "mxfp8" / "steps.jsonl"
    deadline = time.time() + 60
    while not (rows.exists() and rows.read_text().count("\n") > 5) and time.time() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and not err, err
    assert "interrupted at step" in out and "result   val loss" in out and "sample" in out
    done = torch.load(tmp_path / "mxfp8" / "ckpt.pt", weights_only=True)["step"]
    again = run("--resume", tmp_path / "mxfp8", "--steps", done + 3)
    assert again.returncode == 0 and f"steps {done + 1} to {done + 3}" in again.stdout
    steps = [json.loads(line)["step"] for line in rows.open()]
    assert steps == list(range(1, done + 4))


def test_a_bad_checkpoint_is_refused_with_a_sentence(text, tmp_path):
    a = arm(text)
    a.save(tmp_path / "ckpt.pt")
    whole = (tmp_path / "ckpt.pt").read_bytes()
    torch.save({"weights": 1}, tmp_path / "foreign.pt")
    for data in (b"", whole[: len(whole) // 2], b"hello", (tmp_path / "foreign.pt").read_bytes()):
        (tmp_path / "ckpt.pt").write_bytes(data)
        with pytest.raises(UserError, match="no checkpoint of train.py"):
            train.load_checkpoint(tmp_path)
    (tmp_path / "ckpt.pt").write_bytes(whole)
    state, _ = train.load_checkpoint(tmp_path)
    for changes, says in (
        (dict(n_embd=64), "does not fit"),
        (dict(optimizer="fp8adam"), "another optimizer"),
    ):
        arm(text).train_step()
        trained = arm(text)
        trained.train_step()
        trained.save(tmp_path / "ckpt.pt")
        state, _ = train.load_checkpoint(tmp_path)
        with pytest.raises(UserError, match=says):
            arm(text, **changes).restore(state)
    state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(UserError, match="another optimizer"):
        arm(text).restore(state)
    state = whole_state(tmp_path, text)
    with pytest.raises(UserError, match="speaks gpt2"):
        arm(text).restore(state | dict(tokenizer="gpt2"))
    for forged in (dict(rng=None), dict(step="x"), dict(model=None), dict(optimizer=None)):
        with pytest.raises(UserError, match="does not fit"):
            arm(text).restore(state | forged)
    for field, value in (("recipe", "old"), ("steps", "many"), ("margin", "a/b"), ("nonsense", 1)):
        forged = state | dict(config=state["config"] | {field: value})
        torch.save(forged, tmp_path / "ckpt.pt")
        with pytest.raises(UserError, match="no checkpoint of train.py"):
            train.load_checkpoint(tmp_path)


def whole_state(directory, text):
    arm(text).save(directory / "ckpt.pt")
    return train.load_checkpoint(directory)[0]


def test_flags_win_over_the_checkpoint_and_rows_after_it_are_dropped(text, tmp_path):
    out = run(*TINY, "--data", text, "--steps", 4, "--eval-every", 2, "--out", tmp_path)
    assert out.returncode == 0
    rows = tmp_path / "mxfp8" / "steps.jsonl"
    rows.write_text(rows.read_text() + rows.read_text())  # as if killed after the checkpoint
    out = run("--resume", tmp_path / "mxfp8", "--steps", 6, "--weight-decay", 0.5)
    assert out.returncode == 0, out.stderr
    assert [json.loads(line)["step"] for line in rows.open()] == [1, 2, 3, 4, 5, 6]
    state = torch.load(tmp_path / "mxfp8" / "ckpt.pt", weights_only=True)
    assert state["optimizer"]["param_groups"][0]["weight_decay"] == 0.5
    out = run("--resume", tmp_path / "mxfp8", "--steps", 8, "--optimizer", "fp8adam")
    assert out.returncode == 2 and "that cannot change" in out.stderr


def test_a_result_is_written_before_the_sample(text, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "write_text", mock.Mock(side_effect=UserError("no tokenizer")))
    with pytest.raises(UserError, match="no tokenizer"):
        train.main([*TINY, "--data", str(text), "--steps", "2", "--out", str(tmp_path)])
    assert (tmp_path / "mxfp8" / "run.json").exists()


def test_a_comparison_has_no_half_runs_and_names_what_diverged(text, tmp_path, monkeypatch, capsys):
    flags = [*TINY, "--data", str(text), "--steps", "3", "--out", str(tmp_path), "--seeds", "2"]
    step, handler = train.Arm.train_step, signal.getsignal(signal.SIGINT)
    breaks = "current,loss_scale=3e38"  # gradients leave the range
    train.main([*flags, "--compare", "bf16", breaks, "delayed"])
    report = json.loads((tmp_path / "compare" / "compare.json").read_text())
    assert [a["name"] for a in report["arms"]] == ["bf16", "delayed"]
    assert report["diverged"][breaks].startswith("seed 1337, step 1 was not")
    assert f"diverged {breaks}: seed 1337" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is handler
    with pytest.raises(UserError, match="no arm is left"):
        train.main([*flags, "--compare", breaks])

    def interrupted(a):
        if a.c.recipe == "delayed" and a.c.seed == 1338 and a.step == 1:
            signal.raise_signal(signal.SIGINT)
        return step(a)

    monkeypatch.setattr(train.Arm, "train_step", interrupted)
    train.main([*flags, "--compare", "bf16", "delayed", "mxfp8"])
    report = json.loads((tmp_path / "compare" / "compare.json").read_text())
    assert [len(a["val_losses"]) for a in report["arms"]] == [1, 1, 1]  # the seed that all have
    assert "3 steps; nats" in capsys.readouterr().out and len(report["arms"][0]["losses"]) == 3


def test_two_runs_do_not_write_into_one_directory(text, tmp_path):
    flags = [*TINY, "--data", text, "--steps", 2, "--out", tmp_path, "--tokens", 1]
    (tmp_path / "mxfp8").mkdir()
    with checkpoint.alone_in(tmp_path / "mxfp8"):  # as a run in another terminal
        out = run(*flags)
    assert out.returncode == 2 and "another run is writing to" in out.stderr
    assert not (tmp_path / "mxfp8" / "ckpt.pt").exists()
    assert run(*flags).returncode == 0 == run(*flags).returncode


def test_a_model_that_blew_up_ends_without_a_sample(text, tmp_path):
    flags = ["--steps", 1, "--lr", "1e30", "--warmup", 0, "--out", tmp_path]
    out = run(*TINY, "--data", text, *flags)
    assert out.returncode == 0 and "val loss nan" in out.stdout and "sample" not in out.stdout


def test_a_full_disk_is_one_sentence_and_leaves_no_scraps(text, tmp_path):
    def fail(aside):
        aside.write_text("half")
        raise OSError("No space left on device")

    with pytest.raises(UserError, match="No space left"):
        train.write_whole(tmp_path / "file.json", fail)
    assert not list(tmp_path.iterdir())


# Faults ------------------------------------------------------------------------------------------


def break_once(a, monkeypatch, at, bad=float("nan")):
    """The forward of step `at` is multiplied by NaN or inf, the first time it runs."""
    original, broken = a.model.forward, []

    def forward(x, y):
        logits, loss = original(x, y)
        if a.model.training and a.step == at and not broken:
            broken.append(True)
            loss = loss * bad
        return logits, loss

    monkeypatch.setattr(a.model, "forward", forward)


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "mxfp8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_skipped_step_leaves_no_trace(recipe, bad, text, monkeypatch, capsys):
    kind = dict(recipe=recipe, optimizer="fp8adam", stochastic_rounding=True, accum=2)
    clean, faulty = arm(text, **kind), None
    for _ in range(6):
        clean.train_step()
    expected = state_of(clean)
    faulty = arm(text, **kind)
    break_once(faulty, monkeypatch, at=3, bad=bad)
    for i in range(7):
        before = state_of(faulty)
        faulty.train_step()
        assert (faulty.skipped == 1) == (i == 3)
        if i == 3:
            assert equal(before, state_of(faulty))
    assert "step 4: the loss is not finite" in capsys.readouterr().out
    assert equal(state_of(faulty), expected)


def test_a_gradient_that_overflows_is_skipped_and_then_stops_the_run(text, tmp_path):
    a = arm(text, recipe="current", loss_scale=3e38)
    before = state_of(a)
    with pytest.raises(UserError, match="5 times in a row"):
        for _ in range(10):
            a.train_step()
    assert equal(before, state_of(a))
    out = run(*TINY, "--data", text, "--steps", 5, "--out", tmp_path, "--loss-scale", 3e38)
    assert out.returncode == 2 and out.stderr.count("\n") == 1 and "not finite" in out.stdout


def test_loss_scaling_by_a_power_of_two_changes_no_bit(text):
    a, b = arm(text, recipe="mxfp8"), arm(text, recipe="mxfp8", loss_scale=2.0**12)
    for _ in range(3):
        assert a.train_step()[0] == b.train_step()[0]
    assert all(map(torch.equal, a.model.parameters(), b.model.parameters()))


def test_accumulation_equals_one_large_batch(text):
    """In high precision, up to the order of additions in fp32."""
    a = arm(text, recipe="bf16", batch_size=8)
    b = arm(text, recipe="bf16", batch_size=4, accum=2)
    x, y = a.batch("train", 0, 0)
    a.model(x, y)[1].backward()
    for part in (slice(0, 4), slice(4, 8)):
        (b.model(x[part], y[part])[1] / 2).backward()
    for p, q in zip(a.model.parameters(), b.model.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.02, atol=2e-4)  # g is rounded to BF16


def test_memory_on_a_cpu_counts_parameters_moments_and_saved_tensors(text):
    sizes = {}
    for name, changes in (
        ("adamw", {}),
        ("fp8adam", dict(optimizer="fp8adam")),
        ("checkpoint", dict(checkpoint=True)),
    ):
        a = arm(text, n_embd=64, **changes)
        a.train_step()
        sizes[name] = train.memory(a)
        n = a.model.num_params()
    assert sizes["adamw"] - sizes["fp8adam"] == pytest.approx(6 * n, rel=0.02)
    assert 12 * n < sizes["checkpoint"] < sizes["adamw"]


def test_counting_memory_keeps_none_of_it(text):
    """A saved tensor that its own hook returns is a cycle that nobody frees."""
    a = arm(text, block_size=128, batch_size=8)
    for _ in range(5):
        train.memory(a)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(30):
        train.memory(a)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < 5 * train.memory(a)  # 30 leaks would be 30 times that


def test_operand_health_sees_every_operand_and_touches_nothing(text):
    a = arm(text, recipe="delayed", smooth="channel")
    a.train_step()
    before = state_of(a)
    health = train.operand_health(a)
    assert equal(before, state_of(a)) and len(health) == 2 * 4 * 3
    assert all(20 < h["sqnr"] < 40 for h in health.values())


# Mistakes ----------------------------------------------------------------------------------------

MISTAKES = [
    ("--recipe mxfp9", "mxfp8"),
    ("--recipe MXFP8", "did you mean mxfp8?"),
    ("--stepz 3", "did you mean --steps?"),
    ("--steps 0", "it goes from 1"),
    ("--steps 1e3", "a whole number"),
    ("--lr nan", "cannot be nan"),
    ("--lr -1", "cannot be -1"),
    ("--lr", "expected one argument"),
    ("--beta2 1", "cannot be 1"),
    ("--loss-scale 0", "cannot be 0"),
    ("--compile maybe", "true or false"),
    ("--margin 1/2", "three as x/w/g"),
    ("--smooth rows", "channel, token"),
    ("--family gpt2 --smooth token", "family llama"),
    ("--resume x --out y", "leave --out out"),
    ("--n-embd 65", "must divide"),
    ("--n-embd 1000000000", "does not fit"),
    ("--block-size 100000", "smaller --block-size"),
    ("--data /no/such", "no file or directory"),
    ("--device cuda", "--device cpu"),
    ("--device mps", "--device cpu"),
    ("--device toaster", "use cpu, cuda or auto"),
    ("--resume /no/such", "no checkpoint at"),
    ("--out /proc/nothing", "cannot write to"),
    ("--seeds 2", "--compare"),
    ("--compare bf16 --seeds 0", "from 1 to 9999"),
    ("--compare bf16 --bench", "choose one"),
    ("--bench --recipe mxfp8", "single run"),
    ("--advise --bench", "choose one"),
    ("--advise --recipe mxfp8", "single run"),
    ("--advise --n-embd 30", "must divide"),
    ("--compare bf16 --sample x", "single run"),
    ("--compare", "at least one"),
    ("--compare bf16 bf16", "stands twice"),
    ("--compare bf16,foo=3", "not field=value"),
    ("--compare bf16,smoth=token", "did you mean smooth?"),
    ("--compare bf16,steps", "not field=value"),
    ("--compare bf16,seed=3", "same for all arms"),
    ("--compare bf16,recipe=mxfp8", "not field=value"),
    ("--compare bf16 current,n_head=3", "must divide"),
    ("--threads 100000", "below 1000"),
    ("--seed 18446744073709551616", "cannot be"),
    ("--batch-size 10000000000000", "cannot be"),
    ("--warmup " + "9" * 400, "cannot be"),
    ("--lr 1e300", "cannot be"),
    ("extra", "unknown argument"),
]


@pytest.mark.parametrize("flags, says", MISTAKES)
def test_a_mistake_is_explained_in_one_sentence(flags, says, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["--data", str(text), *flags.split()]
    with pytest.raises(UserError) as error:
        train.main(argv)
    assert says in str(error.value) and "\n" not in str(error.value)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]  # nothing half-written


def test_a_mistake_ends_with_exit_code_2_and_no_traceback(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = ["--data", text, "--out", text / "train.bin"]
    for out in (apart("--recipe", "mxfp9"), run("--recipe", "mxfp9"), run(*wrong)):
        assert out.returncode == 2 and out.stderr.count("\n") == 1
        assert out.stderr.startswith("train.py: ")


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--recipe rowwise --amax-history-len 16", "recipe rowwise ignores amax_history_len = 16"),
        ("--recipe bf16 --w3 bf16", "recipe bf16 ignores w3"),
        ("--recipe current --bias 3", "ignores bias"),
        ("--master fp16", "optimizer adamw ignores master"),
        ("--compare bf16 delayed --amax_history_len 4", "arm bf16: recipe bf16 ignores"),
    ],
)
def test_a_flag_that_nothing_reads_is_named(flags, says, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "plot", lambda *args: None)  # that takes most of the time
    argv = [*TINY, "--data", str(text), "--steps", "1", "--out", str(tmp_path), *flags.split()]
    train.main(argv)
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(warnings) == 1 and says in warnings[0]


def test_recipe_fields_reach_the_recipe(text):
    c = train.Config(recipe="amax", margin="1/2/0", rounding="floor", wgrad=False)
    recipe = train.model_config(c, 256).recipe
    assert recipe.margin == (1, 2, 0) and recipe.rounding == "floor" and not recipe.wgrad
    c = train.Config(recipe="delayed", amax_history_len=7, amax_compute_algo="most_recent")
    assert train.model_config(c, 256).recipe.amax_history_len == 7


# Bare machines -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_a_compiler_compile_says_so_and_goes_on(text, tmp_path):
    env = os.environ | dict(CXX="/no/compiler", PATH="/no", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    flags = [*TINY, "--data", text, "--steps", 2, "--out", tmp_path / "out", "--compile"]
    out = apart(*flags, env=env)
    assert out.returncode == 0, out.stderr
    assert out.stdout.count("compile  does not work here, going on without it") == 1


def test_it_runs_without_triton_and_without_a_network(text, tmp_path):
    block = (
        "import sys, socket\n"
        "for name in ('triton', 'torchao', 'gfloat', 'safetensors'): sys.modules[name] = None\n"
        "def refuse(*a, **k): raise OSError('no network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import train; train.main(sys.argv[1:])\n"
    )
    flags = [*TINY, "--data", text, "--steps", 2, "--out", tmp_path]
    command = [sys.executable, "-c", block, *map(str, flags)]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr


@pytest.mark.parametrize(
    "cuda_build, says", [(None, "is a CPU build"), ("13.0", "finds no driver")]
)
def test_an_nvidia_gpu_that_torch_cannot_use_is_named(monkeypatch, cuda_build, says):
    monkeypatch.setattr(train.shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr(torch.version, "cuda", cuda_build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device, line = train.pick_device("auto")
    assert device.type == "cpu" and says in line
    with pytest.raises(UserError, match=says):
        train.pick_device("cuda")


def test_a_gpu_starts_from_its_own_preset_and_flags_win():
    c = train.Config(**(train.GPU_PRESET | dict(n_layer=3)))
    assert (c.n_embd, c.block_size, c.n_layer) == (2048, 2048, 3)
    assert 5e8 < GPT_PARAMETERS(train.Config(**train.GPU_PRESET)) < 8e8


def GPT_PARAMETERS(c):
    with torch.device("meta"):
        return train.GPT(train.model_config(c, 256)).num_params()
