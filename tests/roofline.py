"""The limits of one transformer block in FP8, from bytes and FLOPs. Nothing here is measured.

    python tests/roofline.py                      an H200: 4.3 TB/s, 790 TFLOP/s in BF16
    python tests/roofline.py --copy 3.0 --bf16 700    your card, after tests/gpu_bench.py

A block of width C holds 12 C^2 weights and reads T tokens in sequences of S: its linears take 6 T
12 C^2 FLOPs forward and backward, in FP8 at `ratio` times the rate of BF16; causal attention runs
at 450 TFLOP/s in BF16, whatever the recipe; norms, activation and residual move 72 bytes a token
and channel. A cast reads and writes the bytes of kernels.py: inputs of linears are 7 C wide, their
output gradients 9 C, weights are cast once. What is left out (launches, optimizer, embedding, head,
GEMMs below their peak) makes every real number lower.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from data.report import print_table  # noqa: E402

ATTENTION, OTHER = 450e12, 72  # FLOP/s; bytes a token and channel
# Bytes to cast an element of BF16 for both of its readers: alone; and where the kernel that makes
# it casts it, beyond the 2 that it would otherwise write. (The activation of the MLP: 4 C of the
# inputs, and 4 C of the gradients; attention and norms are library kernels and write BF16.)
CASTS = {"current": (6, 6), "delayed": (4, 0), "rowwise": (6, 6), "blockwise": (4.06, 0.06),
         "mxfp8": (4.06, 0.06)}  # fmt: skip
AMAX = {"current": 4, "rowwise": 4}  # a second look at (up | gate) instead of at h
WEIGHT = {"current": 4 + 4 + 2, "rowwise": 4 + 4 + 2}  # of fp32: amax, then the cast; others 6


def seconds(C, T, S, copy, bf16, ratio=1.0, recipe=None, fused=False):
    linears = 6 * T * 12 * C**2 / (bf16 * ratio)
    attention = 7 * T * S * C / ATTENTION  # causal; two products forward, five backward
    bytes = OTHER * T * C
    if recipe:
        alone, with_maker = CASTS[recipe]
        activation = AMAX.get(recipe, 0) + with_maker % 1 if fused else alone
        bytes += T * C * (3 * alone + 4 * activation + 5 * alone + 4 * activation)
        bytes += 12 * C**2 * WEIGHT.get(recipe, 6)
    return linears + attention + bytes / copy


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--copy", type=float, default=4.3, help="TB/s")
    parser.add_argument("--bf16", type=float, default=790, help="TFLOP/s")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=2048, help="of a sequence")
    args = parser.parse_args()
    card = dict(T=args.tokens, S=args.length, copy=args.copy * 1e12, bf16=args.bf16 * 1e12)
    print(f"limits   {args.copy:g} TB/s, {args.bf16:g} TFLOP/s in BF16; times as fast as BF16\n")
    ratios = (1.5, 1.6, 1.8, 1.9)
    rows = [["width 4096", *(f"FP8 at {r}x" for r in ratios), "SwiGLU fused, 1.8x"]]
    for recipe in CASTS:
        base = seconds(4096, **card)
        cells = [base / seconds(4096, **card, ratio=r, recipe=recipe) for r in ratios]
        cells.append(base / seconds(4096, **card, ratio=1.8, recipe=recipe, fused=True))
        rows.append([recipe, *(f"{x:.2f}" for x in cells)])
    print_table(rows)
    widths = (384, 512, 768, 1024, 1280, 1536, 2048, 3072, 4096, 8192)
    rows = [["FP8 at 1.8x, fused", *map(str, widths)]]
    for recipe in CASTS:
        limits = (seconds(C, **card) / seconds(C, **card, ratio=1.8, recipe=recipe, fused=True)
                  for C in widths)  # fmt: skip
        rows.append([recipe, *(f"{x:.2f}" for x in limits)])
    print()
    print_table(rows)
    C, T = 4096, args.tokens
    step = seconds(C, **card, ratio=1.8, recipe="delayed", fused=True)
    print("\nWhat a fusion saves of a block's step (width 4096, delayed, FP8 at 1.8x)")
    for what, saved in (
        ("SwiGLU in its cast", 4 * 4 * T * C + 4 * 4 * T * C),  # h and its gradient, out and in
        ("RMSNorm in its cast", 2 * 2 * T * C),  # the two norms' outputs are not written
        ("FP8 Adam: 16 instead of 28 bytes", 12 * 12 * C**2),
        ("FP8 Adam that casts the weights, too", 4 * 12 * C**2),  # which it has just read
    ):
        print(f"  {what:38} {saved / card['copy'] / step:.1%}")


if __name__ == "__main__":
    main()
