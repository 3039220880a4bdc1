"""Claim 3: delayed against current scaling, on calm data and under sporadic spikes.

NVIDIA's "Per-Tensor and Per-Block Scaling Strategies for Effective FP8 Training", in a summary of
it: delayed scaling uses "maximum absolute values observed over several iterations, smoothing out
outliers and reducing abrupt changes", which "helps maintain stability". Against it: delayed scaling
broke on sporadic outliers (arXiv 2409.12517), and DeepSeek-V3 scales online (arXiv 2412.19437).

Here both are measured. The *injected* spike: in every 25th step (13, 38, ...) the first token of
the batch enters w3, the MLP's down projection, of every block 2^20 times too large, and w3's output
for it is divided by 2^20, by hooks. In exact arithmetic, and bit for bit in BF16, neither outputs
nor gradients change; only an amax sees it. Evaluation is never injected. It is done twice: in the
arm's own FP8 with its scales as they stand (the last spike is 12 steps old: a history of 16 has not
forgotten it), and in BF16, which judges the weights alone.

    python tests/claims/delayed_or_current.py   8 minutes on 2 cores of an AMD EPYC
"""

import math
import statistics
from functools import partial

import torch
from common import BASE, SEEDS, TOY, Result, main, mean_and_spread, run

from fp8gpt import RECIPES, FP8Linear, health, quantize_operand

EVERY, FIRST, SIZE = 25, 12, 20  # steps, from 0; a spike is 2^SIZE
LOOK = (0, 1, 2, 8, 16, 17, 24)  # steps after a spike at which w3's input is examined
SMALL = BASE | dict(n_embd=64, n_head=2, block_size=64, batch_size=8, steps=200)
H1, H16, H1024 = (f"delayed,amax_history_len={n}" for n in (1, 16, 1024))
RECENT, MARGINS = H16 + ",amax_compute_algo=most_recent", [f"{H16},margin={m}" for m in (1, 3)]
NAMES = {H1: "delayed, 1 step", H16: "delayed, 16 steps", H1024: "delayed, 1024 steps",
         RECENT: "delayed, most recent of 16", MARGINS[0]: "delayed, 16 steps, margin 1",
         MARGINS[1]: "delayed, 16 steps, margin 3"}  # fmt: skip
ARMS = ["bf16", "current", H1, RECENT, H16, *MARGINS, H1024, "mxfp8"]


class Spikes:
    """Hooks around the w3 of every block that inject spikes of 2^size (0: none), and watch the last
    block's input."""

    def __init__(self, arm, size):
        self.arm, self.size, self.amax, self.health = arm, size, [], {k: [] for k in LOOK}
        for block in arm.model.blocks:
            block.mlp.w3.register_forward_pre_hook(self.before)
            block.mlp.w3.register_forward_hook(lambda w3, args, y: y / self.factor(w3, y))

    def factor(self, w3, x):
        """(B, T, 1): 2^size for the first token in a step with a spike, otherwise 1."""
        factor = torch.ones(*x.shape[:2], 1)
        if self.size and w3.training and self.arm.step % EVERY == FIRST:
            factor[0, 0] = 2.0**self.size
        return factor

    def before(self, w3, args):
        x, after = args[0] * self.factor(w3, args[0]), (self.arm.step - FIRST) % EVERY
        if w3.training and w3 is self.arm.model.blocks[-1].mlp.w3:
            flat, history = x.detach().flatten(0, 1), w3.history()[0]
            used = flat.abs().amax() if history is None or history == 0 else history
            self.amax.append(math.log2(used))
            if after in LOOK and self.arm.step >= FIRST:
                seen = health(flat, quantize_operand(flat, "x", w3.recipe, history, "first")[0])
                self.health[after].append((seen["underflow"], seen["clip"]))
        return x


def inject(arm, size):
    arm.spikes = Spikes(arm, size)


def last(arm):
    """What the hooks saw, and the loss of the weights, evaluated in BF16."""
    for m in arm.model.modules():
        if isinstance(m, FP8Linear):
            m.recipe = RECIPES["bf16"]
    amax, seen = arm.spikes.amax, arm.spikes.health
    return dict(
        underflow={k: statistics.fmean(u for u, _ in h) for k, h in seen.items() if h},
        clip={k: statistics.fmean(c for _, c in h) for k, h in seen.items() if h},
        moves=statistics.fmean(abs(b - a) for a, b in zip(amax, amax[1:])),
        weights=arm.evaluate(),
    )


def claim(toy):
    arms, seeds, base = ARMS, SEEDS, SMALL
    sweep = [(arm, size) for arm in ("current", H16, H1024) for size in (12, 16)]
    if toy:
        arms, seeds, sweep = ["bf16", "current", H1, RECENT, H16], SEEDS[:1], []
        base = TOY | dict(n_layer=1, steps=FIRST + 3)
    arms = [(arm, size) for arm in arms for size in (0, SIZE)] + sweep
    jobs = [dict(text=arm, seed=seed, base=base, setup=partial(inject, size=size), last=last)
            for arm, size in arms for seed in seeds]  # fmt: skip
    results = iter(run(jobs, workers=1 if toy else None))
    runs = {f"{arm}@{size}": [next(results) for _ in seeds] for arm, size in arms}
    return judge({key: {**{k: [r[k] for r in rs] for k in ("val", "losses", "diverged")},
                        **{k: [r["last"][k] for r in rs] for k in rs[0]["last"]}}
                  for key, rs in runs.items()})  # fmt: skip


def judge(data):
    def value(arm, size, what="val"):
        return statistics.fmean(data[f"{arm}@{size}"][what])

    def seen(what, arm, size, after):
        """The mean fraction that underflows or clips, so many steps after a spike."""
        found = [d.get(after, d.get(str(after), math.nan)) for d in data[f"{arm}@{size}"][what]]
        return statistics.fmean(found)

    def underflow(arm, after):
        return seen("underflow", arm, SIZE, after)

    arms = [arm for arm in ARMS if f"{arm}@0" in data]
    rows = ["arm|calm: val loss|amax moves|clip|injected: val loss|weights in BF16|amax moves|"
            "clip at spike|underflow at spike|1 after|16 after|24 after".split("|")]  # fmt: skip
    for arm in arms:
        cells = []
        for size in (0, SIZE):
            found = data[f"{arm}@{size}"]
            cells += [mean_and_spread(found["val"])]
            cells += [mean_and_spread(found["weights"])] * bool(size)
            clip = (
                seen("clip", arm, size, 0)
                if size
                else statistics.fmean(c for d in found["clip"] for c in d.values())
            )
            cells += [f"{value(arm, size, 'moves'):.2f}", f"{clip:.3%}"]
        lost = (f"{underflow(arm, k):.1%}" for k in (0, 1, 16, 24))
        rows.append([NAMES.get(arm, arm), *cells, *lost])
    verdicts = {
        "the injected spikes leave bf16 as it was, to the last bit": (
            data["bf16@0"]["losses"] == data[f"bf16@{SIZE}"]["losses"]
        ),
        "the most recent of 16 is a history of 1, to the last bit": (
            data[f"{H1}@{SIZE}"]["losses"] == data[f"{RECENT}@{SIZE}"]["losses"]
        ),
        "current loses the other tokens in a spike's step, delayed in the steps that remember it": (
            min(underflow("current", 0), underflow(H1, 1), underflow(H16, 1), underflow(H16, 2))
            > 0.5
            and max(underflow("current", 1), underflow(H1, 0), underflow(H1, 2)) < 0.1
        ),
    }
    if H1024 in arms:
        noise = 2 * statistics.stdev(data["bf16@0"]["val"])
        harm = {arm: value(arm, SIZE) - value(arm, 0) for arm in arms}
        weights = {arm: value(arm, SIZE, "weights") - value(arm, 0, "weights") for arm in arms}
        long = (H16, H1024)
        verdicts |= {
            "calm: every arm is within twice bf16's deviation of it": all(
                abs(value(arm, 0) - value("bf16", 0)) <= noise for arm in arms
            ),
            "calm: a history of 16 or 1024 smooths the scale (NVIDIA)": all(
                value(arm, 0, "moves") < 0.5 * value("current", 0, "moves") for arm in long
            ),
            "injected: a history of 16 or 1024 is more stable than current (NVIDIA)": all(
                harm[arm] < harm["current"] for arm in long
            ),
            "injected: it is worse than current, also by its weights alone": all(
                harm[arm] > harm["current"] + noise and weights[arm] > weights["current"] + noise
                for arm in long
            ),
            "injected: a history of 1 and current differ by less than bf16's seeds": (
                abs(harm[H1] - harm["current"]) <= noise
            ),
            "injected: 1024 steps are worse than 16": harm[H1024] > harm[H16],
            "injected: a margin of 1 or 3 bits saves a history of 16": all(
                harm[arm] <= harm["current"] + noise for arm in MARGINS
            ),
            "injected: mxfp8 does not notice": abs(harm["mxfp8"]) <= noise,
            "no run diverged": not any(any(d["diverged"]) for d in data.values()),
        }
    title = f"Delayed or current scaling; calm, and with injected spikes of 2^{SIZE} at w3's input"
    return Result(title, rows, verdicts, data, draw)


def draw(data):
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(1, 3, figsize=(11, 4.6))
    base, k = np.mean(data["bf16@0"]["losses"], 0), 10
    for i, arm in enumerate(("current", H1, H16, H1024, "mxfp8")):
        d, style = data[f"{arm}@{SIZE}"], dict(color=f"C{i}", lw=1.5, label=NAMES.get(arm, arm))
        gap = np.convolve(np.mean(d["losses"], 0) - base, np.ones(k) / k, "valid")
        axes[0].plot(np.arange(k, k + len(gap)), gap, **style)
        lost = [np.mean([u[str(after)] for u in d["underflow"]]) for after in LOOK]
        axes[1].plot(LOOK, lost, marker="o", **style)
        if f"{arm}@12" in data:
            sizes = (0, 12, 16, SIZE)
            ends = [
                np.mean(data[f"{arm}@{s}"]["val"]) - np.mean(data["bf16@0"]["val"]) for s in sizes
            ]
            axes[2].plot([8, *sizes[1:]], ends, marker="o", **style)
    axes[0].set(
        title="training loss minus calm bf16's", xlabel="step", ylabel=f"nats a token, mean of {k}"
    )
    axes[1].set(title="underflow of w3's input", xlabel="steps after an injected spike")
    axes[1].set_ylabel("fraction")
    axes[2].set(
        title="val loss minus bf16's", ylabel="nats a token", xlabel="size of the injected spike"
    )
    axes[2].set_xticks([8, 12, 16, 20], ["none", "$2^{12}$", "$2^{16}$", "$2^{20}$"])
    for ax in axes:
        ax.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=5, loc="lower center", frameon=False)
    figure.suptitle(f"Injected spikes of $2^{{{SIZE}}}$ in one token of every {EVERY}th step")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


if __name__ == "__main__":
    main(claim, judge)
