"""What a GPU makes of kernels.py, in under eight minutes: first whether it is right, then how fast.

    python tests/gpu_bench.py               an H100 or H200; writes out/gpu_bench.json
    python tests/gpu_bench.py --seconds 60  with less time, later phases are cut short

Times are medians of interleaved rounds on random numbers, never zeros, and given as ratios. On a
CPU the same code runs at toy size in Triton's interpreter: that tests this script, not a speed.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import kernels  # noqa: E402
from fp8gpt import (  # noqa: E402
    E4M3,
    GPT,
    RECIPES,
    FP8Adam,
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
    """Seconds of each call: medians over rounds in which every call has its turn."""
    repeats, times = {}, {name: [] for name in calls}
    for name, call in calls.items():
        for _ in range(3 if GPU else 1):
            call()
        repeats[name] = max(1, int(seconds / max(clock(call, 1), 1e-6))) if GPU else 1
    for _ in range(rounds if GPU else 1):
        for name, call in calls.items():
            times[name].append(clock(call, repeats[name]))
    return {name: statistics.median(t) for name, t in times.items()}


def clock(call, repeats) -> float:
    """Seconds of a call."""
    if not GPU:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(repeats):
        call()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 1e3 / repeats


def attempt(phase, name, call):
    """The call, or None if this machine cannot run it, with its reason in the table."""
    try:
        call()
        return call
    except Exception as error:  # a peer that is missing must not end the benchmark
        why = (str(error).splitlines() or [""])[0][:90]
        SKIPPED.append(f"{phase}, {name}: {type(error).__name__}: {why}")
        return None


# What is right ------------------------------------------------------------------------------------


def poison():
    """Fill what the allocator will hand out next with NaN: an output that nobody writes shows."""
    if GPU:
        torch.full((2**28,), 255, dtype=torch.uint8, device=DEVICE)


def same(a, b):
    a, b = a.float().cpu(), b.float().cpu()
    return bool(((a == b) | a.isnan() & b.isnan()).all())


def correctness(left):
    shapes = [(1000, 1111), (4096, 2048), (1, 7)] if GPU else [(70, 131)]
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
            with torch.cuda.stream(stream):  # warm up, as torch.cuda.graphs asks
                for _ in range(3):
                    step()
                    model.zero_grad(set_to_none=True)
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
            report("graph", name, wrong=1, error=str(error).splitlines()[0][:80])


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
    for shape in [(16384, 4096), (16384, 16384)] if GPU else [(64, 64)]:
        inputs = [random(*shape) for _ in range(3)]  # more than the L2 cache holds
        for name, per_element in BYTES.items():
            if left() < 5:
                return SKIPPED.append(f"casts: {name} {shape} and after, out of time")
            r, known = RECIPES[name], torch.full((), 4.0, device=DEVICE)
            history = known if name == "delayed" else None
            compiled = torch.compile(quantize_operand, dynamic=False)

            turns = itertools.cycle(inputs)

            def call(by, r=r, history=history, turns=turns, compiled=compiled):
                f = quantize_operand if by == "triton" else compiled
                return f(next(turns), "x", r, history, "both", by)

            calls = {"ours": lambda call=call: call("triton")}
            if GPU:
                torch._dynamo.reset()
                plain = lambda call=call: call("torch")  # noqa: E731
                calls["inductor"] = attempt("casts", f"inductor {name}", plain)
            seconds = medians({k: v for k, v in calls.items() if v})
            floor = per_element * shape[0] * shape[1] / RATES["copy"]
            more = {f"{k} / ours": v / seconds["ours"] for k, v in seconds.items() if k != "ours"}
            report("cast", f"{name} {shape}", of_copy=floor / seconds["ours"], **more)


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
        seconds = medians({k: v for k, v in calls.items() if v})
        for name, t in seconds.items():
            peer = seconds.get(name.replace("ours", "scaled_mm"))
            more = {"of scaled_mm": peer / t} if peer and name.startswith("ours") else {}
            numbers = {"x BF16": seconds["BF16"] / t, "TFLOP/s": 2 * M * N * K / t / 1e12}
            report("gemm", f"{name} {M} x {K} x {N}", **numbers, **more)


def steps(left):
    """Forward and backward of one block with its casts, compiled, against the plain BF16 one."""
    for width in (768, 1536, 2048, 4096) if GPU else (64,):
        calls, kept = {}, []
        batch, tokens = (8, 2048) if GPU else (1, 16)
        idx = torch.randint(0, 256, (batch, tokens), device=DEVICE)
        for name in ("bf16", "delayed", "current", "rowwise", "blockwise", "mxfp8"):
            if left() < 20:
                return SKIPPED.append(f"steps: width {width} from {name} on, out of time")
            heads = max(width // 128, 1)
            config = GPTConfig(256, tokens, 1, heads, None, width, recipe=name)
            model = GPT(config).to(DEVICE)
            if GPU:
                torch._dynamo.reset()
                for block in model.blocks:
                    block.compile(dynamic=False)

            def step(model=model, idx=idx):
                model(idx, idx)[1].backward()
                model.zero_grad(set_to_none=True)
                end_step(model)

            kept.append(model)
            calls[name] = attempt("steps", f"{name}, width {width}", step)
        seconds = medians({k: v for k, v in calls.items() if v}, rounds=5, seconds=0.1)
        for name, t in seconds.items():
            report("step", f"{name}, one layer of width {width}", **{"x bf16": seconds["bf16"] / t})


def adam(left):
    n = 2**27 if GPU else 2**12
    p = [torch.nn.Parameter(random(n, dtype=torch.float32)) for _ in range(3)]
    for q in p:
        q.grad = random(n, dtype=torch.float32, scale=1e-3)
    fused = torch.optim.AdamW([p[0]], fused=True)
    ours, blocks = FP8Adam([p[1]]), FP8Adam([p[2]], block=256)
    seconds = medians({"fused": fused.step, "FP8Adam": ours.step, "FP8Adam, blocks": blocks.step})
    for name, t in seconds.items():
        report("adam", name, **{"x fused AdamW": t / seconds["fused"]})


PHASES = {correctness: 90, graph: 30, ceilings: 20, casts: 90, gemms: 90, steps: 120, adam: 20}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=460, help="for everything (default 460)")
    parser.add_argument("--out", default="out/gpu_bench.json")
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if GPU else "CPU, toy sizes: no speed is measured"
    versions = f"torch {torch.__version__}, triton {kernels.triton.__version__}"
    print(f"{name}; {versions}; {time.strftime('%Y-%m-%d')}")
    torch.manual_seed(0)
    start, scale = time.monotonic(), args.seconds / sum(PHASES.values())
    for phase, seconds in PHASES.items():
        end = time.monotonic() + seconds * scale
        if time.monotonic() - start > args.seconds:
            SKIPPED.append(f"{phase.__name__}: out of time")
            continue
        try:
            phase(lambda end=end: end - time.monotonic())
        except Exception as error:
            report(
                phase.__name__, "failed", wrong=1, error=f"{type(error).__name__}: {error}"[:200]
            )
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"device": name, "versions": versions, "results": RESULTS,
                               "skipped": SKIPPED}, indent=1))  # fmt: skip
    wrong = [r for r in RESULTS if r.get("wrong")]

    def ratio(r):
        return next((r[k] for k in ("of_copy", "x BF16", "x bf16") if k in r), None)

    print("\nworst first")
    for r in sorted((r for r in RESULTS if GPU and ratio(r)), key=ratio)[:12]:
        print(f"  {r['phase']:8} {r['name']}: {ratio(r):.2f}")
    print(*(f"skipped  {line}" for line in SKIPPED), sep="\n")
    print(f"{len(RESULTS)} rows, {len(wrong)} wrong, {time.monotonic() - start:.0f} s; see {out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
