"""Ours beside torchao's emulated linears, on a CPU: one training step of the same model.

    python tests/bench_peers.py                eager, train.py's default model
    python tests/bench_peers.py --compile      both compiled (minutes of warm-up)
    python tests/bench_peers.py --optimizer    FP8 Adam beside fused AdamW and torchao's AdamWFp8

Ratios of medians of interleaved steps to the step with nn.Linear in fp32. A benchmark, not a test.
"""

import argparse
import dataclasses
import logging
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from fp8gpt import E4M3, GPT, FP8Adam, FP8Linear, GPTConfig, end_step  # noqa: E402

PEERS = {"current": "torchao tensorwise", "rowwise": "torchao rowwise", "mxfp8": "torchao mxfp8"}


def torchao_linear(linear, name):
    """torchao's emulated layer with the weights of an nn.Linear."""
    if name == "mxfp8":
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
        from torchao.quantization.quantize_.common import KernelPreference

        emulated = KernelPreference.EMULATED
        sizes = linear.in_features, linear.out_features
        theirs = MXFP8Linear(*sizes, bias=False, kernel_preference=emulated)
        theirs.weight = linear.weight
        return theirs
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    recipe = {"current": "tensorwise", "rowwise": "rowwise"}[name]
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    return Float8Linear.from_float(linear, config)


def with_linears(config, make):
    """The model with every FP8 linear of its blocks replaced by make(nn.Linear)."""
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(config, recipe="bf16"))
    for block in model.blocks:
        for module in block.modules():
            for name, child in list(module.named_children()):
                if isinstance(child, FP8Linear):
                    plain = nn.Linear(child.in_features, child.out_features, bias=False)
                    plain.weight = child.weight
                    setattr(module, name, make(plain))
    return model


def linears(args):
    config = GPTConfig(n_embd=args.width, block_size=args.tokens)
    models = {"fp32 nn.Linear": with_linears(config, lambda plain: plain)}
    for recipe, peer in PEERS.items():
        torch.manual_seed(0)
        models[recipe] = GPT(dataclasses.replace(config, recipe=recipe))
        models[peer] = with_linears(config, lambda plain, r=recipe: torchao_linear(plain, r))
    for recipe in ("delayed", "blockwise"):
        torch.manual_seed(0)
        models[recipe] = GPT(dataclasses.replace(config, recipe=recipe))
    optimizers = {n: torch.optim.AdamW(m.parameters(), 1e-3, fused=True) for n, m in models.items()}
    x = torch.randint(0, 256, (args.batch, args.tokens))

    def step(name):
        start = time.perf_counter()
        loss = models[name](x, x)[1]
        loss.backward()
        optimizers[name].step()
        optimizers[name].zero_grad()
        end_step(models[name])
        return time.perf_counter() - start

    if args.compile:
        torch._dynamo.config.recompile_limit = 64  # the models share the code of a block
        for name, model in models.items():
            if name == "fp32 nn.Linear":
                continue
            start = time.perf_counter()
            for block in model.blocks:
                block.compile(dynamic=False)
            step(name)
            print(f"compiled {name} in {time.perf_counter() - start:.0f} s", flush=True)
    times = {name: [] for name in models}
    for i in range(-2, args.rounds):
        for name in models:
            seconds = step(name)
            if i >= 0:
                times[name].append(seconds)
    report(times, "fp32 nn.Linear")


def optimizers(args):
    """One flat parameter, so that what counts is the work on an element."""
    from torchao.optim import AdamWFp8

    params = [nn.Parameter(torch.randn(args.elements) * 0.02) for _ in range(4)]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    a, b, c, d = params
    steps = {
        "torch AdamW, fused": torch.optim.AdamW([a], fused=True),
        "FP8Adam, a tensor": FP8Adam([b]),
        "FP8Adam, blocks of 256": FP8Adam([c], v_fmt=E4M3, block=256),
        "torchao AdamWFp8": AdamWFp8([d]),
    }
    times = {name: [] for name in steps}
    for i in range(-2, args.rounds):
        for name, optimizer in steps.items():
            start = time.perf_counter()
            optimizer.step()
            if i >= 0:
                times[name].append(time.perf_counter() - start)
    report(times, "torch AdamW, fused")


def report(times, base):
    unit = statistics.median(times[base])
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; {base}: {1e3 * unit:.1f} ms"
    )
    for name, seconds in times.items():
        print(f"  {name:24} {statistics.median(seconds) / unit:5.2f}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--optimizer", action="store_true")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--elements", type=int, default=2**22)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    (optimizers if arguments.optimizer else linears)(arguments)
