"""Claim 5: how scale biases move over a run, and how often they must be updated (FP8-AMAX, arXiv
2309.17224: s = 2^-bias, one whole number for each tensor).

The document draws the biases of weights, activations and gradients in training and in inference,
and leaves open how often they have to be computed anew. Said of them: weights keep theirs, and
gradients move theirs in the early steps. (There, models are fine-tuned; here they start from
random weights, which is harder on a weight's bias.)

Here: recipe `amax`, whose biases are computed anew for each batch, watched every 3 steps, and after
training on validation batches. Then the same recipe with the amaxes of every 10th, 100th or 1000th
step (in 600: of the first) held until the next: scales grow stale, and what outgrows them is
clipped. One more arm takes each of the first 100 steps and then every 100th.

    python tests/claims/bias_over_time.py       5 minutes on 2 cores of an AMD EPYC
"""

import functools
from statistics import mean, stdev

import torch
from common import BASE, SEEDS, TOY, Result, main, mean_and_spread, run, train_arm

from data.report import heat_map, look
from fp8gpt import FP8Linear

SIZE = BASE | dict(n_embd=48, n_head=2, block_size=48, batch_size=8, steps=600, warmup=50,
                   lr=4e-3, min_lr=4e-4, eval_batches=40)  # fmt: skip
LOOKS = 200  # in a run: every 3 steps
# Name of an arm: new amaxes every so many steps, and at each of the first so many.
HELD = {"10": (10, 0), "100": (100, 0), "100, first 100 each": (100, 100), "1000": (1000, 0)}
TOY_HELD = {"1, held": (1, 0), "1000": (1000, 0)}
PART = 0.2  # of the steps: the first is "early", the last "late"


def biases(operands):
    """{"blocks.0.attn.wqkv.x": bias, ...}: s = 2^-bias; None for an operand of zeros."""
    return {n: None if o["exponent"] is None else -o["exponent"] for n, o in operands.items()}


def watch(arm):
    """Before a step: the biases that it will use, now and then."""
    if arm.step % max(1, arm.c.steps // LOOKS) == 0:
        seen = biases(look(arm, "train", arm.c.seed, arm.step, 0)["operands"])
        return dict(step=arm.step, seen=seen)


def layers(arm):
    return {n: m for n, m in arm.model.named_modules()
            if isinstance(m, FP8Linear) and m.recipe == arm.recipe}  # fmt: skip


def release(arm):
    """Scale by the operands' own amaxes again, as the recipe says."""
    for m in layers(arm).values():
        m.__dict__.pop("history", None)


def hold(arm, every, first):
    """Before a step: every `every` steps, and at each of the `first`, measure the amax of each
    operand in the coming batch and scale by it from now on. A layer asks `history()` for the
    amaxes that it should scale by."""
    if arm.step % every == 0 or arm.step < first:
        release(arm)
        seen = look(arm, "train", arm.c.seed, arm.step, 0)["operands"]
        for name, m in layers(arm).items():
            m.history = torch.tensor([seen[f"{name}.{o}"]["amax"] for o in "xwg"]).unbind


def summarise(arm, batches=0):
    """After the last step: clipping and SQNR under the scales at hand, then the validation loss
    under fresh ones, then the biases in some validation batches."""
    seen = look(arm, "train", arm.c.seed, arm.step, 0)["operands"]
    stale = {o: [h for n, h in seen.items() if n.endswith("." + o)] for o in "xwg"}
    release(arm)
    fresh = arm.evaluate()
    seen = [look(arm, "val", 0, i)["operands"] for i in range(batches)]
    return dict(
        clip={o: mean(h["clip"] for h in found) for o, found in stale.items()},
        sqnr={o: min(h["sqnr"] for h in found) for o, found in stale.items()},
        fresh=fresh,
        inference=[biases(operands) for operands in seen],
    )


def claim(toy=False):
    base = TOY | dict(steps=8, lr=2e-2) if toy else SIZE
    seeds, updates = (SEEDS[:1], TOY_HELD) if toy else (SEEDS, HELD)
    jobs = [dict(text="bf16", seed=s, base=base) for s in seeds]
    last = functools.partial(summarise, batches=base["eval_batches"])
    jobs += [dict(text="amax", seed=s, base=base, each=watch, last=last) for s in seeds]
    for every, first in updates.values():
        each = functools.partial(hold, every=every, first=first)
        jobs += [dict(text="amax", seed=s, base=base, each=each, last=summarise) for s in seeds]
    runs = list(map(train_arm, jobs)) if toy else run(jobs)
    groups = [runs[i : i + len(seeds)] for i in range(0, len(runs), len(seeds))]
    bf16, watched, *held = groups
    arms = []
    for name, group in zip(("1", *updates), (watched, *held)):
        arms.append(dict(name=name, vals=[r["val"] for r in group]))
        arms[-1] |= {what: [r["last"][what] for r in group] for what in ("clip", "sqnr", "fresh")}
    data = dict(
        bf16=[r["val"] for r in bf16],
        arms=arms,
        training=[r["kept"] for r in watched],
        inference=[r["last"]["inference"] for r in watched],
        losses=[[r["losses"] for r in group] for group in (watched, *held)],
        steps=base["steps"],
    )
    return judge(data)


def moves(looks):
    """Of one layer's biases over looks: how far they range, and the share of looks that change."""
    looks = [b for b in looks if b is not None]
    changes = [a != b for a, b in zip(looks, looks[1:])]
    return max(looks) - min(looks), mean(changes)


def motion(data, operand):
    """Means over layers and seeds: the bias in the end minus at the start, how far it ranges and
    how often it changes early and late, and how far it ranges over validation batches."""
    found = dict(drift=[], early=[], late=[], often_early=[], often_late=[], inference=[])
    for looks, batches in zip(data["training"], data["inference"]):
        count = round(PART * len(looks))
        for name in (n for n in looks[0]["seen"] if n.endswith("." + operand)):
            path = [entry["seen"][name] for entry in looks]
            found["drift"].append(path[-1] - path[0])
            for when, part in (("early", path[: count + 1]), ("late", path[-count - 1 :])):
                distance, often = moves(part)
                found[when].append(distance)
                found["often_" + when].append(often)
            found["inference"].append(moves([b[name] for b in batches])[0])
    most = dict(most=max(found["early"]), most_inference=max(found["inference"]))
    return {k: mean(v) for k, v in found.items()} | most


def judge(data):
    part, steps = f"{PART:.0%}", data["steps"]
    header = f"operand|start to end|range, first {part}|most|range, last {part}"
    rows = [(header + "|changes, first|changes, last|range at inference").split("|")]
    m = {o: motion(data, o) for o in "wxg"}
    for o, v in m.items():
        row = [o, f"{v['drift']:+.2f}", f"{v['early']:.2f}", f"{v['most']}", f"{v['late']:.2f}"]
        row += [f"{v['often_early']:.0%}", f"{v['often_late']:.0%}"]
        rows.append(row + ["-" if o == "g" else f"{v['inference']:.2f}"])
    bf16, base = data["bf16"], data["arms"][0]
    header = "new bias every|val loss|to every 1|to bf16|new at the end|clipped x|w|g|SQNR x|w|g"
    updates = [header.split("|"), ["bf16", mean_and_spread(bf16), *["-"] * 9]]
    gap = {}
    for a in data["arms"]:
        gap[a["name"]] = mean(v - w for v, w in zip(a["vals"], base["vals"]))
        to_bf16 = mean(v - w for v, w in zip(a["vals"], bf16))
        fresh = mean(v - w for v, w in zip(a["fresh"], base["fresh"]))
        row = [a["name"], mean_and_spread(a["vals"])]
        row += [f"{d:+.4f}" for d in (gap[a["name"]], to_bf16, fresh)]
        row += [f"{mean(c[o] for c in a['clip']):.2%}" for o in "xwg"]
        updates.append(row + [f"{min(s[o] for s in a['sqnr']):.1f} dB" for o in "xwg"])
    spread = stdev(bf16) if len(bf16) > 1 else 0.02
    verdicts = {
        "weights are still: in the last 20 % of the steps a bias ranges over less than 1":
            m["w"]["late"] < 1,
        "weights are still from the start: in the first 20 % too, less than 1":
            m["w"]["early"] < 1,
        "gradients move early: over more in the first 20 % of the steps than in the last":
            m["g"]["early"] > m["g"]["late"],
        "early, gradients move over more than weights and activations":
            m["g"]["early"] > max(m["w"]["early"], m["x"]["early"]),
        "at inference an activation's bias differs by at most 1 between batches":
            m["x"]["most_inference"] <= 1,
    }  # fmt: skip
    for name in (name for name in gap if name in HELD):
        same = f"new biases every {name}: the loss is that of every step, within the seeds' spread"
        verdicts[same] = gap[name] < spread
    verdicts["biases of the first step clip what outgrows them: over 5 % of x"] = (
        mean(c["x"] for c in data["arms"][-1]["clip"]) > 0.05
    )
    if "1, held" in gap:  # at toy size
        every_step = "amaxes measured before every step are those of the recipe, to the last bit"
        verdicts[every_step] = data["losses"][0] == data["losses"][1]
    title = (f"Scale biases over {steps} steps, {len(bf16)} seeds: means over layers and seeds; a"
             " bias is the exponent of a power of two; losses in nats a token")  # fmt: skip
    return Result(title, rows, verdicts, data, draw, [updates])


def draw(data):
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(10, 7.2), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.25, 1))
    looks, batches = data["training"][0], data["inference"][0]
    steps = [entry["step"] for entry in looks]
    names = [n[:-2] for n in looks[0]["seen"] if n.endswith(".x")]
    axes = top.subplots(1, 4, sharey=True, gridspec_kw=dict(width_ratios=(1, 1, 1, 0.5)))
    for ax, o in zip(axes, "wxgx"):
        training = ax is not axes[3]
        source = [entry["seen"] for entry in looks] if training else batches
        rows = {n.removeprefix("blocks."): [b[f"{n}.{o}"] for b in source] for n in names}
        at, when = (steps, "training") if training else (range(len(batches)), "inference")
        heat_map(top, ax, at, rows, f"bias of {o}, {when}")
        ax.label_outer()
    axes[3].set_xlabel("validation batch", fontsize=9)
    axes[3].collections[0].set_clim(axes[1].collections[0].get_clim())
    left, right = bottom.subplots(1, 2)
    base, *held = data["losses"]  # (seeds, steps) each
    window = max(1, data["steps"] // 20)
    for i, (a, losses) in enumerate(zip(data["arms"][1:], held)):
        gap = (torch.tensor(losses) - torch.tensor(base)).mean(0)
        smooth = gap.unfold(0, window, 1).mean(1)
        left.plot(range(window, data["steps"] + 1), smooth, color=f"C{i}", label=a["name"])
        gaps = [v - w for v, w in zip(a["vals"], data["arms"][0]["vals"])]
        right.plot([i] * len(gaps), gaps, "o", color=f"C{i}", alpha=0.7)
    left.legend(title="new bias every ... steps", fontsize=8, title_fontsize=8)
    left.set_title(f"training loss minus that with new biases every step, mean of {window} steps")
    spread = stdev(data["bf16"]) if len(data["bf16"]) > 1 else 0
    right.axhspan(-spread, spread, color="0.85", label="spread of seeds, bf16")
    right.axhline(0, color="0.4", lw=1)
    names = [a["name"].replace(", ", ",\n") for a in data["arms"][1:]]
    right.set_xticks(range(len(held)), names)
    right.set_xlabel("new bias every ... steps", fontsize=9)
    right.legend(fontsize=8)
    right.set_title("validation loss minus the same, each seed")
    for ax in (left, right):
        ax.title.set_fontsize(10)
        ax.set_ylabel("nats a token", fontsize=9)
        ax.tick_params(labelsize=8)
        ax.grid(alpha=0.3)
    left.set_xlabel("step", fontsize=9)
    return figure


if __name__ == "__main__":
    main(claim, judge)
