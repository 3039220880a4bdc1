"""What a GPU makes of kernels.py, in under eight minutes: first whether it is right, then how fast.

    python tests/gpu_bench.py               an H100 or H200; writes out/gpu_bench.json
    python tests/gpu_bench.py --seconds 60  with less time, later phases are cut short

Times are medians of interleaved rounds on random numbers, never zeros, and given as ratios. On a
CPU the same code runs at toy size in Triton's interpreter: that tests this script, not a speed.
"""

import argparse
import dataclasses
import itertools
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import interpreter  # noqa: E402
from bench_peers import with_linears  # noqa: E402

import kernels  # noqa: E402
from data import report as numbers  # noqa: E402
from fp8gpt import (  # noqa: E402
    E4M3,
    GPT,
    RECIPES,
    FP8Adam,
    FP8Linear,
    GPTConfig,
    dequantize,
    end_step,
    gemm_nt,
    quantize,
    quantize_operand,
)  # fmt: skip

DEVICE = torch.device("cuda" if GPU else "cpu")
TILES = {"tensor": (None, None), "row": (1, None), "block": (1, 128), "square": (128, 128),
         "mx": (1, 32)}  # fmt: skip
# Relative to the norm. Hopper's FP8 tensor cores keep about 14 bits of a running sum: at K = 1920
# that costs 1.8e-3, and 1.7e-4 if every 128 products are added in fp32.
LIMITS = {"fast": 5e-3, "precise": 5e-4}
BF16 = torch.bfloat16
RESULTS, SKIPPED = [], []


def random(*shape, dtype=BF16, scale=1.0):
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def report(phase, name, **numbers):
    RESULTS.append({"phase": phase, "name": name, **numbers})
    show = lambda v: f"{v:.3g}" if isinstance(v, float) else v  # noqa: E731
    cells = "  ".join(f"{k} {show(v)}" for k, v in numbers.items())
    print(f"{phase:12} {name:44} {cells}", flush=True)


def medians(calls: dict, rounds=7, seconds=0.02) -> dict:
    """Seconds of each call that this machine can run."""
    return numbers.medians({k: v for k, v in calls.items() if v}, DEVICE, rounds, seconds)


def replayed(calls: dict, times=3) -> dict:
    """Seconds of each call, `times` of them captured in a CUDA graph: what launching costs in
    Python, more than a small kernel takes, does not count. What cannot be captured is called."""
    replays, alone = {}, {}
    for name, call in calls.items():
        if not GPU or not call:
            alone[name] = call
            continue
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                call()
            torch.cuda.synchronize()
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                for _ in range(times):
                    call()
            replays[name] = captured.replay
        except Exception as error:
            SKIPPED.append(f"graph of {name}: {type(error).__name__}; timed with its launches")
            alone[name] = call
    seconds = {k: t / times for k, t in medians(replays).items()} | medians(alone)
    return {name: seconds[name] for name in calls if name in seconds}


def attempt(phase, name, call, *args):
    """The call, or with arguments what it returns; None if this machine cannot run it, with its
    reason in the table."""
    try:
        result = call(*args)
        return result if args else call
    except Exception as error:  # a peer that is missing must not end the benchmark
        why = (str(error).splitlines() or [""])[0][:90]
        SKIPPED.append(f"{phase}, {name}: {type(error).__name__}: {why}")
        return None


# What is right ------------------------------------------------------------------------------------


def poison():
    """Fill what the allocator will hand out next with NaN: an output that nobody writes shows."""
    if GPU:
        torch.cuda.empty_cache()  # or an output would lie where the last, right one did
        for size in (2**28, *[2**19] * 8):  # large and small outputs come from two pools
            torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)


def same(a, b):
    a, b = a.float().cpu(), b.float().cpu()
    return bool(((a == b) | a.isnan() & b.isnan()).all())


def correctness(left):
    x = random(*(1000, 777) if GPU else (100, 77))
    known = torch.full((), 2.5, device=DEVICE)  # of delayed scaling: x clips
    (q, s), (q_t, s_t), amax = kernels.cast(x, E4M3.dtype, (None, None), known=known)
    lesson = quantize(x.cpu(), E4M3, amax=2.5)
    right = same(q, lesson.q) and same(q_t, lesson.q.t()) and same(s, lesson.s)
    report("correct", "cast delayed", wrong=int(not (right and same(amax, lesson.amax))))
    shapes = [(1000, 1111), (4096, 2048), (1, 7)] if GPU else [(34, 131)]
    for name, tile in TILES.items():
        wrong = 0
        for shape in shapes:
            for dtype in (BF16, torch.float32):
                x = random(*shape, dtype=dtype, scale=3)
                x[0, 0] = 1e4
                rounding = "fp32" if name == "tensor" else "pow2"
                first = quantize(x.cpu(), E4M3, tile, rounding)
                second = quantize(x.cpu(), E4M3, tile[::-1], rounding).t()
                for _ in range(3 if GPU else 1):  # a race would differ now and then
                    poison()
                    how = {"tile": tile, "rounding": rounding}
                    (q, s), (q_t, s_t), _ = kernels.cast(x, E4M3.dtype, **how)
                    wrong += not (same(q, first.q) and same(q_t, second.q))
                    swizzled = s.dim() == 1
                    wrong += not (swizzled or same(s, first.s) and same(s_t, second.s))
        report("correct", f"cast {name}", wrong=wrong)
    sizes = [(1000, 1111, 1920), (256, 4096, 512), (5, 7, 33)] if GPU else [(33, 40, 70)]
    for name in TILES:
        worst = dict.fromkeys(LIMITS, 0.0)
        for M, N, K in sizes:
            a, b = random(M, K), random(N, K)
            rounding = "fp32" if name == "tensor" else "pow2"
            tiles = ("block" if name == "square" else name), name
            made = [kernels.cast(x, E4M3.dtype, TILES[t], rounding, copies="first")[0]
                    for x, t in zip((a, b), tiles)]  # fmt: skip
            exact = [dequantize(quantize(x.cpu(), E4M3, TILES[t], rounding)).double()
                     for x, t in zip((a, b), tiles)]  # fmt: skip
            expected = exact[0].to(DEVICE) @ exact[1].to(DEVICE).t()
            for how in worst:
                for _ in range(3 if GPU else 1):
                    poison()
                    y = kernels.gemm_nt(*made[0], *made[1], torch.float32, how == "fast")
                    error = ((y - expected).norm() / expected.norm()).item()
                    worst[how] = max(worst[how], error if error == error else float("inf"))
        right = all(worst[how] < limit for how, limit in LIMITS.items())
        report("correct", f"gemm {name}", wrong=int(not right), **worst)


def made_of(ug, dh=None):
    """h of up | gate, or their gradient, in float64."""
    up, gate = ug.double().chunk(2, dim=1)
    sigmoid = torch.sigmoid(gate)
    if dh is None:
        return up * gate * sigmoid
    dh = dh.double()
    return torch.cat([dh * gate * sigmoid, dh * up * sigmoid * (1 + gate * (1 - sigmoid))], dim=1)


def fused(left):
    """SwiGLU, smooth or not, and its gradient, cast by kernels: as near to the exact operand as the
    lesson's cast of it (a GPU's exp differs in the last bit, so here and there so does a code), and
    three times the same."""
    shapes = [(1000, 1152), (4096, 2048)] if GPU else [(70, 128)]
    for name, act in itertools.product(("tensor", "row", "block", "mx"), ("h", "gradient")):
        wrong, worst = 0, 0.0
        if left() < 5:
            return SKIPPED.append(f"fused: {act}, {name} and after, out of time")
        for R, C in shapes:
            fold = torch.exp2(torch.randint(-4, 5, (1, C), device=DEVICE).float())
            ug, dh = random(R, 2 * C, scale=3), random(R, C)
            exact = made_of(ug) / fold if act == "h" else made_of(ug, dh)
            how = {"tile": TILES[name], "rounding": "fp32" if name == "tensor" else "pow2"}
            args = (ug, {"act": "swiglu", "fold": fold})
            if act == "gradient":
                args = (dh, {"act": "swiglu_backward", "ug": ug})
            lesson, seen = quantize(exact.float().cpu(), E4M3, **how), []
            for _ in range(3 if GPU else 1):
                poison()
                (q, s), (q_t, s_t), _ = kernels.cast(args[0], E4M3.dtype, **how, **args[1])
                seen.append([t.clone() for t in (q, q_t, s, s_t)])
            wrong += not all(same(a, b) for other in seen[1:] for a, b in zip(seen[0], other))
            if s.dim() == 1:  # swizzled: the codes tell
                continue
            for x8, x in ((lesson._replace(q=q, s=s), exact),
                          (lesson._replace(q=q_t, s=s_t), exact.t())):  # fmt: skip
                off = (dequantize(x8).double() - x).norm() / x.norm()
                expected = (dequantize(lesson).double().to(DEVICE) - exact).norm() / exact.norm()
                worst = max(worst, (off / expected).item())
        # a scale in upright tiles differs from one in flat ones, by a little on random data
        report("correct", f"cast of SwiGLU's {act}, {name}", wrong=wrong + (not worst < 1.05),
               error=worst)  # fmt: skip
    for block in (None, 256):
        wrong, differ = 0, 0.0
        p = [torch.nn.Parameter(torch.randn(100_003 if GPU else 3000)) for _ in "ab"]
        p[1].data = p[0].data.clone().to(DEVICE)
        lesson, kernel = (FP8Adam([x], 1e-2, block=block) for x in p)
        kernel.cast = "triton"
        for _ in range(3):
            p[0].grad = torch.randn_like(p[0]) * 1e-3
            p[1].grad = p[0].grad.to(DEVICE)
            lesson.step()
            kernel.step()
        off = (p[0] - p[1].cpu()).norm() / p[0].norm()
        wrong += not off < 1e-4  # a code that flips at a tie moves its parameter
        for k in "mv":
            a, b = (
                o.state[x][k].cpu().view(torch.uint8) for o, x in ((lesson, p[0]), (kernel, p[1]))
            )
            differ = max(differ, (a != b).float().mean().item())
        report("correct", f"FP8 Adam, block {block}", wrong=wrong + (differ > 1e-3), codes=differ)


def graph(left):
    """A training step captured in a CUDA graph gives the bits of the eager step."""
    if not GPU:
        return SKIPPED.append("graph: no CUDA")
    for name in ("delayed", "current", "rowwise", "blockwise", "mxfp8"):
        torch.manual_seed(0)
        model = GPT(GPTConfig(256, 128, n_layer=1, n_head=4, n_embd=256, recipe=name)).to(DEVICE)
        idx = torch.randint(0, 256, (2, 128), device=DEVICE)

        def step(model=model, idx=idx):
            loss = model(idx, idx)[1]
            loss.backward()
            return loss

        def run(name=name, model=model, step=step):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # warm up, as torch.cuda.graphs asks
                for _ in range(3):
                    step()
                    model.zero_grad(set_to_none=True)
                end_step(model)  # delayed scaling has a history
            torch.cuda.synchronize()
            eager = step().item(), [p.grad.clone() for p in model.parameters()]
            model.zero_grad(set_to_none=True)
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                loss = step()
            captured.replay()
            torch.cuda.synchronize()
            equal = all(torch.equal(a, p.grad) for a, p in zip(eager[1], model.parameters()))
            report("graph", name, wrong=int(not (equal and loss.item() == eager[0])))

        try:
            run()
        except Exception as error:
            report("graph", name, wrong=1, error=str(error)[:80])


# How fast -----------------------------------------------------------------------------------------


def ceilings(left):
    n = 2**30 if GPU else 2**20
    a, b = (torch.empty(n, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    size = 8192 if GPU else 64
    x, y = random(size, size), random(size, size)
    seconds = medians({"copy": lambda: b.copy_(a), "BF16 GEMM": lambda: x @ y})
    RATES["copy"], RATES["BF16"] = 2 * n / seconds["copy"], 2 * size**3 / seconds["BF16 GEMM"]
    report("ceiling", "copy, TB/s", value=RATES["copy"] / 1e12)
    report("ceiling", f"BF16 GEMM {size}^3, TFLOP/s", value=RATES["BF16"] / 1e12)


RATES = {}
BYTES = {"current": 6, "delayed": 4, "rowwise": 6, "blockwise": 4 + 8 / 128, "mxfp8": 4 + 2 / 32}


def casts(left):
    """Ours, and the lesson's cast as inductor fuses it: fractions of the time that the bytes take
    at the rate of a copy, and how much longer inductor takes."""
    shapes = [(16384, 16384), (16384, 4096)] if GPU else [(32, 256)]
    for with_inductor in (False, True):  # all of ours first
        for shape, (name, per_element), act in itertools.product(
            shapes, BYTES.items(), ("x", "h", "gradient")
        ):
            if with_inductor and not GPU:
                return
            if left() < 5:
                return SKIPPED.append(f"casts: {name}, {act} {shape} and after, out of time")
            r, known = RECIPES[name], torch.full((), 4.0, device=DEVICE)
            history, (R, C) = known if name == "delayed" else None, shape
            # three inputs, more than the L2 cache holds, in turn
            turns = itertools.cycle([made(act, R, C) for _ in range(3)])
            reads = per_element - 2 - (per_element % 1)
            moved = {"x": reads, "h": 2 * reads, "gradient": 1.5 * reads}[act] + per_element - reads

            def ours(r=r, history=history, turns=turns, act=act):
                x, ug = next(turns)
                how = {"act": "swiglu"} if act == "h" else {"act": "swiglu_backward", "ug": ug}
                x = x if act == "x" else (x, how)
                return quantize_operand(x, "g" if act == "gradient" else "x", r, history,
                                        by="triton")  # fmt: skip

            def plain(x, ug, r=r, history=history, act=act):
                operand = x if act == "x" else swiglu_in_torch(x, ug)
                return quantize_operand(operand, "g" if act == "gradient" else "x", r, history)

            label = f"{name}, {act} {shape}"
            calls = {"ours": attempt("casts", label, ours)}
            if with_inductor:
                torch._dynamo.reset()
                compiled = torch.compile(plain, dynamic=False)
                theirs = lambda compiled=compiled, turns=turns: compiled(*next(turns))  # noqa: E731
                calls["inductor"] = attempt("casts", f"inductor {label}", theirs)
            seconds = replayed(calls)
            if len(seconds) < 1 + with_inductor:
                continue
            if with_inductor:
                ratio = seconds["inductor"] / seconds["ours"]
                report("cast", f"{label}, inductor", **{"inductor / ours": ratio})
            else:
                report("cast", label, of_copy=moved * R * C / RATES["copy"] / seconds["ours"])


def made(act, R, C):
    """What an operand of R x C numbers is made of."""
    if act == "x":
        return random(R, C), None
    return (random(R, 2 * C), None) if act == "h" else (random(R, C // 2), random(R, C))


def swiglu_in_torch(x, ug):
    """h of x = up | gate; or the gradient of ug = up | gate from x = dh."""
    up, gate = (x if ug is None else ug).float().chunk(2, dim=1)
    if ug is None:
        return (up * F.silu(gate)).bfloat16()
    dh, sigmoid = x.float(), torch.sigmoid(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([dh * F.silu(gate), dh * up * slope], dim=1).bfloat16()


def gemms(left):
    wide = [(16384, 4096, 4096), (16384, 4096, 16384), (16384, 16384, 4096), (4096, 16384, 16384)]
    narrow = [(16384, 1536, 1536), (16384, 1536, 6144)]
    for M, K, N in wide + narrow if GPU else [(48, 64, 32)]:
        if left() < 8:
            return SKIPPED.append(f"gemms: {(M, K, N)} and after, out of time")
        a, b = random(M, K), random(N, K)

        def cast(x, tile, rounding):
            return kernels.cast(x, E4M3.dtype, TILES[tile], rounding, copies="first")[0]

        calls = {"BF16": lambda a=a, b=b: a @ b.t()}
        for name, tiles, rounding in (("tensor", ("tensor", "tensor"), "fp32"),
                                      ("row", ("row", "row"), "pow2"),
                                      ("block", ("block", "square"), "pow2"),
                                      ("block, wgrad", ("block", "block"), "pow2"),
                                      ("mx", ("mx", "mx"), "pow2")):  # fmt: skip
            a8, b8 = cast(a, tiles[0], rounding), cast(b, tiles[1], rounding)
            for fast in (True, False) if name in ("tensor", "row") else (False,):
                label = f"{name}, {'fast' if fast else 'precise'}"
                calls[f"ours {label}"] = attempt(
                    "gemm", label,
                    lambda a8=a8, b8=b8, fast=fast: kernels.gemm_nt(*a8, *b8, BF16, fast),
                )  # fmt: skip
                if name in ("tensor", "row"):
                    a_q = quantize(a[:1], E4M3, TILES[name], rounding)._replace(q=a8[0], s=a8[1])
                    b_q = a_q._replace(q=b8[0], s=b8[1])
                    calls[f"scaled_mm {label}"] = attempt(
                        "gemm", f"scaled_mm {label}",
                        lambda a=a_q, b=b_q, f=fast: gemm_nt(a, b, BF16, "scaled_mm", f),
                    )  # fmt: skip
        seconds = replayed(calls)
        for name, t in seconds.items():
            peer = seconds.get(name.replace("ours", "scaled_mm"))
            more = {"of scaled_mm": peer / t} if peer and name.startswith("ours") else {}
            numbers = {"x BF16": seconds["BF16"] / t, "TFLOP/s": 2 * M * N * K / t / 1e12}
            report("gemm", f"{name} {M} x {K} x {N}", **numbers, **more)


def torchao(config):
    """The model with torchao's float8 layers, tensorwise."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    how = Float8LinearConfig.from_recipe_name("tensorwise")
    how = how if GPU else dataclasses.replace(how, emulate=True)
    return with_linears(config, lambda plain: Float8Linear.from_float(plain, how))


def model_of(kind, config):
    """-> model, whether it runs under autocast: nn.Linear and torchao's layers do."""
    if kind == "nn.Linear":
        return with_linears(config, lambda plain: plain).to(DEVICE), True
    if kind == "torchao":
        return torchao(config).to(DEVICE), True
    model = GPT(dataclasses.replace(config, recipe=kind.removeprefix("plain "))).to(DEVICE)
    if kind.startswith("plain"):  # casts in torch, which inductor fuses, and scaled_mm
        for m in model.modules():
            if isinstance(m, FP8Linear):
                m.backend = m.backend._replace(cast="torch")
    return model, False


def step_of(kind, config, batch, optimizer=None):
    """A training step of this kind of model, compiled on a GPU, as a call."""
    model, autocast = model_of(kind, config)
    if GPU:
        torch._dynamo.config.recompile_limit = 64
        for block in model.blocks:
            block.compile(dynamic=False)
    idx = torch.randint(0, config.vocab_size, (batch, config.block_size), device=DEVICE)
    update = optimizer and optimizer(model.parameters())

    def step():
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            loss = model(idx, idx)[1]
        loss.backward()
        if update:
            update.step()
        model.zero_grad(set_to_none=True)
        end_step(model)

    return step


KINDS = [("nn.Linear", "current", "delayed", "blockwise"),  # and what they compete with
         ("nn.Linear", "plain current", "torchao", "bf16", "rowwise", "mxfp8")]  # fmt: skip


def steps(left):
    """Forward and backward of one block with its casts, against one of nn.Linear under autocast."""
    ratios, widths = {}, (4096, 768, 1536, 2048, 1280, 1024) if GPU else (64,)
    rounds = [(KINDS[0], w) for w in widths] + [(KINDS[1], w) for w in widths[:4]]
    for kinds, width in rounds:
        batch, tokens = (8, 2048) if GPU else (1, 16)
        config, calls = GPTConfig(256, tokens, 1, max(width // 128, 1), None, width), {}
        if GPU:
            torch._dynamo.reset()
        for kind in kinds:
            if left() < 15:
                SKIPPED.append(f"steps: width {width} from {kind} on, out of time")
                break
            step = attempt("steps", f"{kind}, width {width}", step_of, kind, config, batch)
            if step:
                calls[kind] = attempt("steps", f"{kind}, width {width}", step)
        if not calls.get("nn.Linear"):
            break
        seconds = medians(calls, rounds=5, seconds=0.1)
        for kind, t in seconds.items():
            ratios[width, kind] = seconds["nn.Linear"] / t
            if kind != "nn.Linear":
                report("step", f"{kind}, one layer of width {width}",
                       **{"x bf16": ratios[width, kind]})  # fmt: skip
    for kind in ("current", "delayed", "blockwise"):
        wins = [w for (w, k), ratio in ratios.items() if k == kind and ratio > 1]
        if GPU and wins:
            report("step", f"smallest width measured at which {kind} wins", width=min(wins))


def train(left):
    """Whole steps of four layers with an optimizer: speed, and the largest memory."""
    width, tokens, batch = (2048, 2048, 8) if GPU else (64, 16, 1)
    config, calls, peaks = GPTConfig(256, tokens, 4, max(width // 128, 1), None, width), {}, {}
    for kind, name in (("nn.Linear", "AdamW"), ("current", "AdamW"), ("delayed", "AdamW"),
                       ("current", "FP8Adam"), ("delayed", "FP8Adam, blocks")):  # fmt: skip
        if left() < 15:
            SKIPPED.append(f"train: {kind}, {name} and after, out of time")
            break
        optimizer = {
            "AdamW": lambda p: torch.optim.AdamW(p, fused=True),
            "FP8Adam": FP8Adam, "FP8Adam, blocks": lambda p: FP8Adam(p, block=256),
        }[name]  # fmt: skip
        before, label = torch.cuda.memory_allocated() if GPU else 0, f"{kind}, {name}"
        step = attempt("train", label, step_of, kind, config, batch, optimizer)
        calls[label] = step and attempt("train", label, step)  # the optimizer has its state now
        if GPU and calls[label]:
            torch.cuda.reset_peak_memory_stats()
            step()
        peaks[label] = torch.cuda.max_memory_allocated() - before if GPU else 0
    seconds, base = medians(calls, rounds=5, seconds=0.1), "nn.Linear, AdamW"
    if base not in seconds:
        return SKIPPED.append("train: no nn.Linear to compare with")
    for label, t in seconds.items():
        more = {"of its memory": peaks[label] / peaks[base]} if peaks[base] else {}
        report(
            "train", f"{label}, 4 layers of width {width}", **{"x bf16": seconds[base] / t}, **more
        )


def adam(left):
    n = 2**27 if GPU else 2**12
    p = [torch.nn.Parameter(random(n, dtype=torch.float32)) for _ in range(3)]
    for q in p:
        q.grad = random(n, dtype=torch.float32, scale=1e-3)
    fused = torch.optim.AdamW([p[0]], fused=True)
    ours, blocks = FP8Adam([p[1]]), FP8Adam([p[2]], block=256)
    ours.cast = blocks.cast = "triton"
    seconds = medians({"fused": fused.step, "FP8Adam": ours.step, "FP8Adam, blocks": blocks.step})
    for (name, t), moved in zip(seconds.items(), (28, 22, 16 + 16 / 256)):
        of_copy = moved * n / RATES["copy"] / t
        report("adam", name, of_copy=of_copy, **{"x fused AdamW": seconds["fused"] / t})


# Seconds. The first three must have run before any other means something.
PHASES = {correctness: 60, fused: 40, graph: 30, ceilings: 15, casts: 75, gemms: 75, adam: 15,
          steps: 100, train: 50}  # fmt: skip

# What an H200 should reach (and could): phase, a part of its rows' names, the number, two values.
TARGETS = [
    *[("cast", name, "of_copy", 0.80, 0.90) for name in BYTES],
    ("adam", "FP8Adam", "of_copy", 0.80, 0.90),
    ("gemm", "ours tensor", "of scaled_mm", 0.90, 0.97), ("gemm", "ours block", "x BF16", 1.0, 1.4),
    ("step", "current, one layer of width 4096", "x bf16", 1.30, 1.45),
    ("step", "delayed, one layer of width 4096", "x bf16", 1.30, 1.45),
    ("step", "delayed, one layer of width 1280", "x bf16", 1.0, 1.0),
    ("step", "delayed, one layer of width 768", "x bf16", 1.0, 1.0),
]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=460, help="for everything (default 460)")
    parser.add_argument("--out", default="out/gpu_bench.json")
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if GPU else "CPU, toy sizes: no speed is measured"
    versions = f"torch {torch.__version__}, triton {kernels.triton.__version__}"
    print(f"{name}; {versions}; {time.strftime('%Y-%m-%d')}")
    torch.manual_seed(0)
    if not GPU:
        interpreter.patch_once()
    start, scale = time.monotonic(), args.seconds / sum(PHASES.values())
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    for phase, seconds in PHASES.items():
        now = time.monotonic()
        if now - start > args.seconds:
            SKIPPED.append(f"{phase.__name__}: out of time")
            continue
        end = min(now + seconds * scale, start + args.seconds)
        try:
            phase(lambda end=end: end - time.monotonic())
            if GPU:
                torch.cuda.empty_cache()
        except Exception as error:
            report(
                phase.__name__, "failed", wrong=1, error=f"{type(error).__name__}: {error}"[:200]
            )
        record = {"device": name, "versions": versions, "results": RESULTS, "skipped": SKIPPED}
        out.write_text(json.dumps(record, indent=1))  # after each: the next may be the last
    wrong = [r for r in RESULTS if r.get("wrong")]

    def ratio(r):
        return next((r[k] for k in ("of_copy", "x BF16", "x bf16") if k in r), None)

    print("\nworst first")
    for r in sorted((r for r in RESULTS if GPU and ratio(r)), key=ratio)[:12]:
        print(f"  {r['phase']:8} {r['name']}: {ratio(r):.2f}")
    for phase, part, key, must, could in TARGETS if GPU else ():
        reached = [
            r[key]
            for r in RESULTS
            if r["phase"] == phase and r["name"].startswith(part) and key in r
        ]
        if reached:
            verdict = (
                "stretch" if min(reached) >= could else "met" if min(reached) >= must else "MISSED"
            )
            print(
                f"target   {phase} {part} {key} >= {must} ({could}): {min(reached):.2f}, {verdict}"
            )
    print(*(f"skipped  {line}" for line in SKIPPED), sep="\n")
    print(f"{len(RESULTS)} rows, {len(wrong)} wrong, {time.monotonic() - start:.0f} s; see {out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
