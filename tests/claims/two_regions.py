"""Claim 2: one scale fails where regions of a tensor differ; blocks do not.

NVIDIA's "Per-Tensor and Per-Block Scaling Strategies for Effective FP8 Training", in a summary of
it: "different regions within a tensor may have varying statistical behaviors, which a single scale
cannot accommodate. Using per-block scaling helps mitigate this issue."

Here: an operand x of N(0, 1) in which one region is `ratio` times larger, ratio 1 to 1e8, cast by
every recipe. What becomes of the small region: the relative error of its numbers, the fraction that
underflows, and the error of its share of the GEMM x . w^T. Three arrangements:

    halves of columns   left small, right large: both meet in every row, the contracted axis
    halves of rows      top small, bottom large: tokens differ
    stripes of 64       small, large, small, ...: finer than a block of 128, wider than 32

`delayed` scales by the operand's own amax, as if past steps had looked the same.

    python tests/claims/two_regions.py
"""

import torch
from common import Result, main

from fp8gpt import E4M3, RECIPES, gemm_nt, health, quantize_operand

RATIOS = tuple(10.0 ** (k / 2) for k in range(17))  # 1 to 1e8
ROWS, COLUMNS, OUT = 256, 512, 64
SMALL = {  # arrangement: where a row (0 to 1) and a column belong to the small region
    "halves of columns": lambda row, column: (column < COLUMNS // 2) & (row >= 0),
    "halves of rows": lambda row, column: (row < 0.5) & (column >= 0),
    "stripes of 64 columns": lambda row, column: (column // 64 % 2 == 0) & (row >= 0),
}
LOST = 0.5  # a relative error beyond this: more error than half the signal
KEPT = 0.03  # E4M3's own error is 0.0265, see `closed_form`


def closed_form(ratio, peak):
    """The error of N(0, 1) beside a region `ratio` times larger, under one scale that brings its
    amax, peak * ratio, to 448. A float's error is relative, sqrt(2^-6 / 12 * 3 / (8 ln 2)) or
    0.0265, down to the smallest normal number; below, the grid is even, 2^-9 apart; then all is 0.
    """
    sigma = E4M3.max / (peak * ratio)  # of the small region, in units of the codes
    even = 2.0 ** (E4M3.emin - E4M3.mantissa) / 12**0.5 / sigma
    return min(1.0, (0.0265**2 + even**2) ** 0.5)


def measure(recipe, ratio, small, x, w):
    """-> what became of the small region of x (R, C), and of its share of x . w^T."""
    x = torch.where(small, x, x * ratio)
    x8, x8_t = quantize_operand(x, "x", recipe)
    w8, _ = quantize_operand(w, "w", recipe, copies="first")
    ours, large = health(x, x8, small), health(x, x8, ~small)
    zero = torch.zeros((), dtype=x8.q.dtype)
    share = gemm_nt(x8._replace(q=torch.where(small, x8.q, zero)), w8).double()  # (R, OUT)
    exact = torch.where(small, x, 0.0).double() @ w.double().t()
    return dict(
        error=10 ** (-ours["sqnr"] / 20), underflow=ours["underflow"],
        gemm=((share - exact).norm() / exact.norm()).item(), large=10 ** (-large["sqnr"] / 20),
        whole=10 ** (-health(x, x8)["sqnr"] / 20),
        wgrad=10 ** (-health(x, x8_t.t(), small)["sqnr"] / 20),
    )  # fmt: skip


def claim(toy):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64 if toy else ROWS, COLUMNS, generator=generator)
    w = torch.randn(OUT, COLUMNS, generator=generator)
    row, column = torch.arange(len(x))[:, None] / len(x), torch.arange(COLUMNS)
    ratios = (1.0, 1e3, 1e4, 1e6, 1e8) if toy else RATIOS
    seen = {
        f"{where}/{name}": [measure(r, ratio, inside(row, column), x, w) for ratio in ratios]
        for where, inside in SMALL.items()
        for name, r in RECIPES.items()
    }
    amax = torch.where(SMALL["halves of columns"](row, column), 0, x).abs().max().item()
    return judge(dict(ratios=ratios, seen=seen, peak=amax))


def judge(data):
    ratios, seen = data["ratios"], data["seen"]
    at = {ratio: i for i, ratio in enumerate(ratios)}
    rows = ["regions|recipe|error 1|1e4|1e6|1e8|underflow 1e6|GEMM 1e6|large region 1e8".split("|")]
    for key, s in seen.items():
        cells = [f"{s[at[r]]['error']:.4f}" for r in (1.0, 1e4, 1e6, 1e8)]
        cells += [f"{s[at[1e6]]['underflow']:.2%}", f"{s[at[1e6]]['gemm']:.4f}"]
        rows.append([*key.split("/"), *cells, f"{s[at[1e8]]['large']:.4f}"])

    def worst(where, name, what="error"):
        return max(s[what] for s in seen[f"{where}/{name}"])

    halves, one = ("halves of columns", "halves of rows"), ("amax", "delayed", "current")
    current = seen["halves of columns/current"]
    theory = [closed_form(ratio, data["peak"]) for ratio in ratios]
    verdicts = {
        "one scale for the tensor loses the small region": all(
            worst(where, name) > LOST and worst(where, name, "underflow") > 0.99
            for where in SMALL
            for name in one
        ),
        "tiles of 128 and of 32 that fit into a region keep it, and its share of the GEMM": all(
            worst(where, name) < KEPT and worst(where, name, "gemm") < 2**0.5 * KEPT
            for where in halves
            for name in ("blockwise", "mxfp8")
        ),
        "a scale for each row keeps rows apart, and loses what meets in one row": (
            worst("halves of rows", "rowwise") < KEPT
            and worst("halves of columns", "rowwise") > LOST
            and worst("halves of rows", "rowwise", "wgrad") > LOST  # there a row is a column
        ),
        "a tile wider than a region fails as one scale does: 128 on stripes of 64, and 32 holds": (
            worst("stripes of 64 columns", "blockwise") > LOST
            and worst("stripes of 64 columns", "mxfp8") < KEPT
        ),
        "up to a ratio of 1e3 one scale loses nothing: E4M3 is a float": all(
            s["error"] < KEPT
            for where in SMALL
            for name in one
            for ratio, s in zip(ratios, seen[f"{where}/{name}"])
            if ratio <= 1e3
        ),
        "the error of the whole tensor does not show it": all(s["whole"] < KEPT for s in current),
        "the error under one scale is the closed form's within 15 %": all(
            abs(s["error"] - t) < 0.15 * t for s, t in zip(current, theory)
        ),
        "a constant scale keeps the small region and loses the large one instead": (
            worst("halves of rows", "constant") < KEPT
            and worst("halves of rows", "constant", "large") > LOST
        ),
    }
    title = "Two regions of one operand: what is left of the small one, over their ratio"
    return Result(title, rows, verdicts, data, draw)


def draw(data):
    """Curves that coincide are named together, at their ends."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 4), sharey=True)
    ratios = data["ratios"]
    theory = [closed_form(ratio, data["peak"]) for ratio in ratios]
    for ax, where in zip(axes, SMALL):
        ends = {True: [], False: []}
        for i, name in enumerate(RECIPES):
            errors = [s["error"] for s in data["seen"][f"{where}/{name}"]]
            ax.loglog(ratios, errors, color=f"C{i}", lw=1.6)
            if name != "bf16":
                ends[errors[-1] > LOST].append(name)
        ax.loglog(ratios, theory, "k:", lw=2, label="one scale, closed form")
        kept = ["constant (loses the large region)" if n == "constant" else n for n in ends[False]]
        ax.text(1.3e8, 0.8, "\n".join(ends[True]), ha="right", va="top")
        ax.text(1.3e8, 0.024, "\n".join(kept), ha="right", va="top")
        ax.text(1.3e8, 0.0019, "bf16", ha="right")
        ax.set(title=where, xlabel="the other region is larger by")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("relative error of the small region")
    axes[0].legend(loc="upper left", fontsize=9)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main(claim, judge)
