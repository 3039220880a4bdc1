"""What a step costs, and which recipe pays: train.py's --bench and --advise; machine and MFU."""

import contextlib
import functools
import os
import platform
import shutil
import statistics
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import torch

import fp8gpt
from data.report import medians, print_table, sync
from fp8gpt import FP32, GPT, RECIPES, FP8Linear

# Dense BF16 peak, FLOP/s, from NVIDIA's data sheets: every arm's MFU is measured against it.
PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12}


def machine(device_line):
    """What a number needs beside it: machine, versions, commit, date."""
    git = ["git", "-C", str(Path(__file__).resolve().parents[1]), "rev-parse", "--short", "HEAD"]
    commit = (
        shutil.which("git") and subprocess.run(git, capture_output=True, text=True).stdout.strip()
    )
    versions = dict(python=platform.python_version(), torch=torch.__version__, commit=commit)
    cpu = f"{platform.machine()}, {os.cpu_count()} cores"
    return dict(device=device_line, cpu=cpu, date=time.strftime("%Y-%m-%d"), **versions)


def flops_per_token(model, T=None):
    """Forward and backward: 6 a parameter, but for a table that is only looked up, and 12 T C a
    layer for attention (arXiv 2204.02311)."""
    only_read = model.wte if model.wpe is None else model.wpe
    attention = 12 * model.config.n_layer * model.config.n_embd * (T or model.config.block_size)
    return 6 * (model.num_params() - only_read.weight.numel()) + attention


def flops_utilisation(arm, tokens_per_s):
    """Model FLOPs utilisation, or None for a device whose peak is not in the table."""
    name = torch.cuda.get_device_name(arm.device) if arm.device.type == "cuda" else "CPU"
    peak = next((p for n, p in PEAKS.items() if n in name), None)
    return tokens_per_s * flops_per_token(arm.model) / peak if peak else None


@functools.cache
def can_compile(device):
    """Whether torch.compile works here; if not, say so once and go on without it."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
        return True
    except Exception as error:  # no compiler, no Python headers, no Triton: many kinds of errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(f"compile  does not work here, going on without it: {reason[:100]}")
        return False


@contextlib.contextmanager
def timed(parts, targets, device):
    """Add the seconds spent in functions to `parts`; targets: {part: (owner, function's name)}."""
    originals = {part: getattr(*target) for part, target in targets.items()}

    def wrap(part):
        def timer(*args, **kwargs):
            sync(device)
            start = time.perf_counter()
            result = originals[part](*args, **kwargs)
            sync(device)
            parts[part] = parts.get(part, 0.0) + time.perf_counter() - start
            return result

        return timer

    for part, target in targets.items():
        setattr(*target, wrap(part))
    yield
    for part, target in targets.items():
        setattr(*target, originals[part])


def bench(make_arm, c, device, rounds=9):
    """A step of every recipe and its parts, interleaved, in units of a step in high precision.
    make_arm(field=value, ...): train.py's Arm of the configuration c, changed."""
    arms = {name: make_arm(recipe=name) for name in RECIPES}
    base = "fp32" if device.type == "cpu" else "bf16"
    if base == "fp32":
        arms = {base: make_arm(recipe="bf16", compile=False), **arms}
        for m in arms[base].model.modules():
            if isinstance(m, FP8Linear):
                m.recipe = replace(m.recipe, name=base, x_fmt=FP32, w_fmt=FP32, g_fmt=FP32)
    times = {name: [] for name in arms}
    for i in range(-2, rounds):  # two to warm up
        for name, arm in arms.items():
            start = time.perf_counter()
            arm.train_step()
            sync(device)
            parts = dict(step=time.perf_counter() - start)
            targets = dict(optimizer=(arm.optimizer, "step"))
            if not c.compile:  # compiled, the casts are fused with their neighbours
                targets |= dict(quantise=(fp8gpt, "quantize"), GEMM=(fp8gpt, "gemm_nt"))
            with timed(parts, targets, device):
                arm.train_step()
            if i >= 0:
                times[name].append(parts)
    unit = statistics.median(t["step"] for t in times[base])
    print(f"model    {arms[base].model.num_params():,} parameters, {c.batch_size} x {c.block_size}")
    how = f"{rounds} interleaved steps{', compiled' * c.compile}"
    print(f"unit     a step in {base}: {1e3 * unit:.0f} ms; medians of {how}\n")
    columns = [p for p in ("step", "quantise", "GEMM", "optimizer") if p in times[base][0]]
    rows = [["recipe", *columns]]
    for name, measured in times.items():
        cells = (statistics.median(m[p] for m in measured) / unit for p in columns)
        rows.append([name, *(f"{x:.2f}" for x in cells)])
    print_table(rows)


def block_step(config, batch, device):
    """Forward and backward of a model on random tokens, its blocks compiled on a GPU, as a call."""
    model, shape = GPT(config).to(device), (batch, config.block_size)
    idx = torch.randint(0, config.vocab_size, shape, device=device)
    if device.type == "cuda" and can_compile(device):
        torch._dynamo.config.recompile_limit = 64  # the recipes share the code
        for block in model.blocks:
            block.compile(dynamic=False)

    def step():
        model(idx, idx)[1].backward()
        model.zero_grad(set_to_none=True)
        fp8gpt.end_step(model)

    return step


ADVISED = ("bf16", "delayed", "current", "blockwise", "rowwise", "mxfp8")


def advise(configs, c, device, limit=50):
    """One block of this width, forward and backward, under each recipe that has FP8 GEMMs here, as
    a multiple of the speed of BF16; what does not fit into `limit` seconds is named. configs:
    {recipe: its GPTConfig}."""
    start, calls, slow = time.perf_counter(), {}, []
    for name, config in configs.items():
        where = fp8gpt.choose_backend(config.recipe, device)
        if name != "bf16" and "FP8 tensor cores" not in where.why:
            slow.append(f"{name}: {where.why}")
        elif time.perf_counter() - start > limit:
            slow.append(f"{name}: not measured, the time was up")
        else:
            calls[name] = block_step(config, c.batch_size, device)
            calls[name]()  # compiles
    print(*(f"not here {line}" for line in slow), sep="\n")
    if len(calls) < 2:
        print(
            "advice   bf16: no recipe can be faster here. What would pay on a GPU cannot be known"
        )
        print("         without one; its limits: python tests/roofline.py")
        return
    seconds = medians(calls, device, rounds=5, seconds=0.1)
    speed = {name: seconds["bf16"] / t for name, t in seconds.items()}
    shape = f"width {c.n_embd}, {c.batch_size} x {c.block_size} tokens, forward and backward"
    print(f"unit     a block in bf16: {1e3 * seconds['bf16']:.2f} ms; {shape}\n")
    print_table([["recipe", "times as fast"], *([n, f"{x:.2f}"] for n, x in speed.items())])
    best = max(speed, key=speed.get)
    gain = f"{best} is {speed[best]:.2f} times as fast as bf16: --recipe {best}; compare its loss"
    print(f"\nadvice   at this width {gain if best != 'bf16' else 'bf16 is fastest: none pays'}")
