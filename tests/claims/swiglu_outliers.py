"""SwiGLU squares an outlier, delayed scaling breaks on it, Smooth-SwiGLU cures it (2409.12517).

The document: up * silu(gate) grows with the square of its input where w1 and w2 of a channel are
aligned, and long training with weight decay aligns them. Some 200 billion tokens into a training
such a channel fires sporadically, delayed scaling cannot follow, and the loss diverges.
Smooth-SwiGLU cures it; so does leaving w3's input in BF16.

Here a frozen channel replaces 200 billion tokens: an *accelerated, injected outlier*. Four rungs:
R1  one neuron trains on under L2: does |cos(w1, w2)| rise?
R2  a channel's w1 times a, its w3 divided by a: the same function, in ever larger numbers.
R3  the same as a ramp while training goes on; BF16 must not notice, to the last bit.
R4  in each block the least used channel is made to fire on a rare byte: w1 = w2 along the byte's
    direction, a small w3. It stays frozen while the rest trains on, from the same BF16 checkpoint.

    python tests/claims/swiglu_outliers.py      about 14 minutes on 2 cores of an AMD EPYC
"""

import functools
import math
import tempfile
from statistics import mean

import common
import numpy as np
import torch
import torch.nn.functional as F
from common import BASE, SEEDS, TOY, Result, main, mean_and_spread, revive, run

from fp8gpt import end_step, health, quantize_operand

SIZE = BASE | dict(n_embd=64, n_head=2, block_size=64, steps=900, eval_batches=40)
BEFORE, DOUBLE = 700, 12  # steps of the BF16 checkpoint; R3 doubles after every 12 of the other 200
SPIKE, WRITES = 20, 4.0  # R4: h is 2^20 on the byte and adds a vector of norm 4 to the residual
EVERY = 5  # the byte is the one that is read about once in 5 batches
ARMS = ("bf16", "delayed", "current", "delayed,w3=bf16", "delayed,smooth=channel",
        "delayed,smooth=token", "blockwise", "mxfp8")  # fmt: skip
GATES, COSINES, MUS = ("ReGLU", "SwiGLU"), (0.0, 0.5, 0.8), (0.0, 0.03, 0.1, 0.2, 0.3)


def align(gate, neurons, steps):
    """R1: |cos(w1, w2)| (cosines, mus, neurons) of y = (x . w1) gate(x . w2), x in 8 dimensions.
    A neuron starts as trained, at a teacher of a known cosine, and trains on under the loss and
    mu / 2 (|w1|^2 + |w2|^2)."""
    rng, gate = torch.Generator().manual_seed(0), F.relu if gate == "ReGLU" else F.silu
    x, a, b = (torch.randn(neurons, n, 8, generator=rng).double() for n in (256, 1, 1))
    a = F.normalize(a.squeeze(1), dim=-1)
    b = F.normalize(b.squeeze(1) - (a * b.squeeze(1)).sum(-1, True) * a, dim=-1)
    cosine = torch.tensor(COSINES).double()[:, None, None, None]
    mu = torch.tensor(MUS).double()[:, None]
    w1 = a.expand(len(COSINES), len(MUS), -1, -1).clone().requires_grad_()
    w2 = (cosine * a + (1 - cosine**2).sqrt() * b).expand_as(w1).clone().requires_grad_()

    def neuron():
        z1, z2 = (torch.einsum("snd,cmsd->cmsn", x, w) for w in (w1, w2))
        return z1 * gate(z2)

    y, optimizer = neuron().detach(), torch.optim.Adam([w1, w2])
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / steps)
        l2 = mu / 2 * (w1.square().sum(-1) + w2.square().sum(-1))
        optimizer.zero_grad()
        ((neuron() - y).square().mean(-1) / 2 + l2).sum().backward()
        optimizer.step()
    return F.cosine_similarity(w1, w2, dim=-1).abs().tolist()


def training_bytes():
    return np.concatenate(common.corpus(32).shards["train"])


def rare_byte(c, every):
    """The byte whose frequency is nearest to once in `every` batches -> (byte, its frequency)."""
    share = np.bincount(training_bytes(), minlength=256) / len(training_bytes())
    wanted = 1 / (every * c.batch_size * c.block_size)
    byte = int(np.abs(np.log(np.maximum(share, 1e-12) / wanted)).argmin())
    return byte, float(share[byte])


def cosines(model):
    w = torch.stack([b.mlp.w12.weight.detach() for b in model.blocks])  # (layers, 2 H, C)
    return F.cosine_similarity(*w.chunk(2, dim=1), dim=-1).abs()


@torch.no_grad()
def look(arm, byte, batches):
    """Per block, the channels in order of use, and the byte's direction: u with u . x = 1 in the
    mean over that byte's inputs x, and least over all others."""
    seen = {b: ([], []) for b in range(len(arm.model.blocks))}
    hooks = []
    for b, block in enumerate(arm.model.blocks):
        for i, linear in enumerate((block.mlp.w12, block.mlp.w3)):
            hooks.append(linear.register_forward_pre_hook(
                lambda m, args, keep=seen[b][i]: keep.append(args[0].flatten(0, -2))))  # fmt: skip
    data, rng = training_bytes(), np.random.default_rng(0)
    T, B = arm.c.block_size, arm.c.batch_size
    places = np.flatnonzero(data[T:-T] == byte) + T
    starts = rng.choice(places, B * batches // 4) - rng.integers(0, T, B * batches // 4)
    rows = [torch.from_numpy(data[s : s + T].astype(np.int64)) for s in starts]
    rare = [torch.stack(rows[i : i + B]) for i in range(0, len(rows), B)]
    plain = [arm.batch("train", 10**6, i)[0] for i in range(batches)]
    for idx in plain + rare:
        arm.model(idx, idx)
    for hook in hooks:
        hook.remove()
    found, is_rare = [], torch.cat([idx.flatten() == byte for idx in rare])
    n = sum(idx.numel() for idx in plain)
    for b, block in enumerate(arm.model.blocks):
        x, h = (torch.cat(t) for t in seen[b])
        target = x[n:][is_rare].mean(0)
        second = x[:n].t() @ x[:n] / n
        u = torch.linalg.solve(second + 1e-4 * second.trace() * torch.eye(len(second)), target)
        use = h[:n].abs().mean(0) * block.mlp.w3.weight.norm(dim=0)
        found.append((use.argsort(), u / (u @ target)))
    return found


def pretrain(seed, base, before, everies, batches, path):
    """The checkpoint that all arms of a seed start from, and what was looked up in it."""
    arm = common.make_arm("bf16", seed, base)
    start = cosines(arm.model)
    while arm.step < before:
        arm.train_step()
    end, rare = cosines(arm.model), {str(every): rare_byte(arm.c, every) for every in everies}
    found = {every: look(arm, byte, batches) for every, (byte, _) in rare.items()}
    common.keep(arm, path, found=found)
    start, end = ([c.square().mean().sqrt().item(), c.max().item()] for c in (start, end))
    return dict(start=start, end=end, bytes=rare)


def freeze(arm, channels):
    """Keep one channel of each block as it is: no gradient (so no part in the norm that clips), no
    moments -> its (parameter, axis, index, values), which `restore` writes back after each step,
    because weight decay is not a gradient."""
    kept = []
    for block, i in zip(arm.model.blocks, channels):
        up_gate, i = torch.tensor([i, i + block.mlp.w3.in_features]), torch.tensor([i])
        for p, axis, index in ((block.mlp.w12.weight, 0, up_gate), (block.mlp.w3.weight, 1, i)):
            p.register_hook(lambda g, axis=axis, index=index: g.index_fill(axis, index, 0.0))
            for moment in ("exp_avg", "exp_avg_sq"):
                arm.optimizer.state[p][moment].index_fill_(axis, index, 0.0)
            kept.append((p, axis, index, p.detach().index_select(axis, index)))
    return kept


@torch.no_grad()
def restore(kept):
    for p, axis, index, values in kept:
        p.index_copy_(axis, index, values)


def gauge(kept, a):
    """w1 * a, w3 / a: for a power of two the function stays the same to the last bit."""
    for _, axis, _, values in kept:
        if axis == 0:
            values[0] *= a
        else:
            values /= a
    restore(kept)


def inject(kept, found, spike):
    """up = gate = 2^(spike / 2) on the byte, so h = 2^spike there."""
    rng = torch.Generator().manual_seed(0)
    directions = (u for _, u in found for _ in range(2))  # w12 and w3 of each block
    for (_, axis, _, values), u in zip(kept, directions):
        if axis == 0:
            values.copy_(2 ** (spike / 2) * u.expand(2, -1))
        else:
            w = torch.randn(values.shape, generator=rng)
            values.copy_(WRITES / 2**spike * w / w.norm())
    restore(kept)


def watch(arm, every):
    """Collect, in training, amax and health of every w3's input."""
    seen = dict(amax=[])

    def hook(module, args, kwargs):
        if module.training and arm.step % every == 0:
            fold = kwargs.get("fold")
            x = args[0].detach().flatten(0, -2)
            seen["amax"].append(x.abs().max().item())
            x = x if fold is None else x / fold
            history = module.history()[0]
            x8, _ = quantize_operand(x, "x", module.recipe, history, "first")
            for k, value in health(x, x8).items():
                seen.setdefault(k, []).append(value)

    for block in arm.model.blocks:
        block.mlp.w3.register_forward_pre_hook(hook, with_kwargs=True)
    return seen


def sweep(text, seed, base, path, gauges):
    """R2: (log2 a, validation loss, underflow, SQNR)."""
    rows = []
    for exponent in gauges:
        arm, state = revive(text, seed, base, path)
        middle = [order[len(order) // 2].item() for order, _ in next(iter(state["found"].values()))]
        gauge(freeze(arm, middle), 2.0**exponent)
        arm.model(*arm.batch("train", seed, arm.step, 0))  # fills the history, if there is one
        end_step(arm.model)
        seen = watch(arm, 1)
        arm.model(*arm.batch("train", seed, arm.step, 0))
        rows.append((exponent, arm.evaluate(), mean(seen["underflow"]), mean(seen["sqnr"])))
    return rows


def go_on(text, seed, base, path, spike=None, every=EVERY, double=None):
    """R3 (double) and R4 (spike): train to the end from the checkpoint, the channel frozen."""
    arm, state = revive(text, seed, base, path)
    found = state["found"][str(every)]
    rank = 0 if double is None else len(found[0][0]) // 2
    kept = [] if spike is double is None else freeze(arm, [o[rank].item() for o, _ in found])
    if spike:
        inject(kept, found, spike)
    seen, losses, start = watch(arm, 4), [], arm.step
    while arm.step < arm.c.steps:
        if double and arm.step > start and (arm.step - start) % double == 0:
            gauge(kept, 2.0)
        loss, norm = arm.train_step()
        losses.append(loss)
        if not math.isfinite(loss + norm):
            break
        restore(kept)
    diverged = arm.step < arm.c.steps
    return dict(text=text, seed=seed, spike=spike, every=every, double=double, losses=losses,
                val=math.nan if diverged else arm.evaluate(), diverged=diverged,
                underflow=mean(seen["underflow"]), amax=seen["amax"])  # fmt: skip


def call(job):
    torch.set_num_threads(1)
    return job()


def claim(toy=False):
    base, before, seeds, batches, double = SIZE, BEFORE, SEEDS, 40, DOUBLE
    arms, gauges, neurons, everies = ARMS, range(0, 21, 2), (24, 400), (EVERY, 1, 25)
    tried = [(f"delayed,amax_history_len={n}", SPIKE, EVERY, seeds) for n in (1, 16)]
    for text in ("delayed", "current"):
        tried += [(text, spike, EVERY, seeds[:1]) for spike in (14, 16, 18, 22)]
        tried += [(text, SPIKE, every, seeds[:1]) for every in everies[1:]]
    if toy:
        base, before, seeds, batches, double = TOY | dict(steps=9), 4, SEEDS[:1], 4, 1
        arms, gauges, neurons, everies, tried = ARMS[:5], (16,), (2, 60), (EVERY,), []
    partial = functools.partial
    run_all = partial(run, work=call, workers=1 if toy else None)
    with tempfile.TemporaryDirectory() as folder:
        path = {seed: f"{folder}/{seed}" for seed in seeds}
        jobs = [partial(pretrain, s, base, before, everies, batches, path[s]) for s in seeds]
        no_decay = base | dict(weight_decay=0.0)
        jobs += [partial(pretrain, seeds[0], no_decay, before, (), 0, folder + "/no decay")]
        drift, one = run_all(jobs), (seeds[0], base, path[seeds[0]])
        first = [partial(align, gate, *neurons) for gate in GATES]
        second = [partial(sweep, text, *one, gauges) for text in arms]
        third = [partial(go_on, "bf16", *one, double=10**6)]  # frozen, never doubled
        third += [partial(go_on, text, *one, double=double) for text in arms]
        every_arm = [(text, spike, EVERY, seeds) for text in arms for spike in (None, SPIKE)]
        fourth = [partial(go_on, text, s, base, path[s], spike, every)
                  for text, spike, every, some in every_arm + tried for s in some]  # fmt: skip
        done = iter(run_all(first + second + third + fourth))
    data = dict(drift=drift, arms=arms, before=before, steps=base["steps"], double=double)
    data |= dict(neurons=[next(done) for _ in first], gauge={arm: next(done) for arm in arms})
    return judge(data | dict(ramp=[next(done) for _ in third], runs=list(done)))


def select(data, **same):
    return [r for r in data["runs"] if same.items() <= r.items()]


def costs(data, text, spike=SPIKE, every=EVERY, against=None):
    """Per seed: validation loss with the outlier minus that without, of `against` or the arm."""
    calm = select(data, text=against or text.split(",amax")[0], spike=None)
    return [b["val"] - a["val"] for b in select(data, text=text, spike=spike, every=every)
            for a in calm if a["seed"] == b["seed"]]  # fmt: skip


def judge(data):
    still, *ramped = data["ramp"]
    at = {arm: next(r for r in rows if r[0] == 16) for arm, rows in data["gauge"].items()}
    after = {r["text"]: r["val"] - still["val"] for r in ramped}
    cos = torch.tensor(data["neurons"]).quantile(0.5, -1)  # (gates, starts, mus)
    header = "arm|R2: costs|made 0|SQNR|R3: costs|R4: h|byte|no outlier|outlier|costs|made 0"
    rows = [header.split("|")]
    for text, spike, every in dict.fromkeys((r["text"], r["spike"], r["every"])
                                            for r in data["runs"] if r["spike"]):  # fmt: skip
        row, usual = [text] + ["-"] * 4, (spike, every) == (SPIKE, EVERY)
        if usual and text in at:
            _, val, underflow, sqnr = at[text]
            row = [text, f"{val - at['bf16'][1]:+.4f}", f"{underflow:.2%}", f"{sqnr:.1f} dB"]
            row += [f"{after[text]:+.4f}"]
        byte, share = data["drift"][0]["bytes"][str(every)]
        row += [f"2^{spike}", f"{bytes([byte])!r}, 1 in {1 / share:,.0f}"]
        mine, calm = (select(data, text=text, spike=s, every=every) for s in (spike, None))
        row += [mean_and_spread([r["val"] for r in runs]) if runs else "-" for runs in (calm, mine)]
        row += [mean_and_spread(costs(data, text, spike, every))]
        rows.append(row + [f"{mean(r['underflow'] for r in mine):.2%}"])
    drift, *_, no_decay = data["drift"]
    start, end, other = (f"{rms:.2f} and {top:.2f}" for rms, top in
                         (drift["start"], drift["end"], no_decay["end"]))  # fmt: skip
    title = (
        "Accelerated, injected outlier. Costs: validation loss, nats a token; R2 (a = 2^16) and\n"
        "R3 minus bf16's, R4 minus that without outlier; made 0: of w3's input.\nThe language"
        f" model's RMS and largest |cos(w1, w2)|: {start}, after {data['before']} steps {end},"
        f" without weight decay {other}"
    )
    aligned = [["R1: |cos(w1, w2)|", "from", *(f"mu {mu:g}" for mu in MUS)]]
    aligned += [[gate, str(start), *(f"{c:.3f}" for c in row)]
                for gate, table in zip(GATES, cos)
                for start, row in zip(COSINES, table)]  # fmt: skip
    said = verdicts(data, cos, at, after)
    return Result(title, rows, said, data, draw, more=[aligned])


def verdicts(data, cos, at, after):
    floor = functools.partial(costs, data, against="delayed")
    h10, h1 = (torch.tensor(u) for u in (40.0, 4.0))  # x . w of an aligned channel
    cured = ("delayed,smooth=channel", "delayed,w3=bf16")
    drift, *_, no_decay = data["drift"]
    still, ramped = data["ramp"][:2]
    said = {
        "an input 10 times as large makes an aligned channel 100 times as large, GELU's 10 times":
            abs(h10 * F.silu(h10) / (h1 * F.silu(h1)) - 100) < 5
            and abs(F.gelu(h10) / F.gelu(h1) - 10) < 0.1,
        "R1: |cos(w1, w2)| rises with L2, from every start":
            (cos.diff() > -0.01).all() and (cos[..., -1] > cos[..., 0] + 0.1).all(),
        "R1: w1 = +-w2 (|cos| > 0.99) in the end, from 0.5 and 0.8":
            (cos[:, 1:, -1] > 0.99).all(),
        "R1: w1 = +-w2 in the end, from orthogonal starts": (cos[:, 0, -1] > 0.99).all(),
        "R1: |cos| rises in the language model too": drift["end"][0] > drift["start"][0],
        "R1: there it is weight decay that raises it": no_decay["end"][0] < drift["end"][0] / 2,
        "R2: one scale a tensor makes over half of w3's input zero; its SQNR stays over 28 dB":
            all(at[arm][2] > 0.5 and at[arm][3] > 28 for arm in ("delayed", "current")),
        "R2: with smooth=channel or w3=bf16 less than 1 %": all(at[arm][2] < 0.01 for arm in cured),
        "R3: bf16 does not notice the ramp, to the last bit":
            (still["losses"], still["val"]) == (ramped["losses"], ramped["val"]),
        "R3: it costs delayed and current over 0.03":
            min(after["delayed"], after["current"]) > 0.03,
        "R3: it costs smooth=channel and w3=bf16 under 0.02":
            max(after[arm] for arm in cured) < 0.02,
        "R4: the outlier makes over half of w3's input zero, under 1 % with smooth=channel":
            select(data, text="delayed", spike=SPIKE, every=EVERY)[0]["underflow"] > 0.5
            and select(data, text=cured[0], spike=SPIKE)[0]["underflow"] < 0.01,
        "R4, rule 1: it costs bf16 at most 0.005, on every seed": max(costs(data, "bf16")) <= 0.005,
        "R4, rule 2: it costs delayed at least 0.05, on every seed": min(floor("delayed")) >= 0.05,
        "R4, rule 3: it costs smooth=channel at most 0.01, on every seed":
            max(floor(cured[0])) <= 0.01,
        "R4: it costs w3=bf16 at most 0.01, on every seed": max(floor(cured[1])) <= 0.01,
        "R4: it costs delayed more than current, on every seed":
            all(a > b for a, b in zip(floor("delayed"), floor("current"))),
        "R4: delayed diverges": any(r["diverged"] for r in select(data, text="delayed")),
    }  # fmt: skip
    if len(data["arms"]) == len(ARMS):
        histories = [costs(data, "delayed" + h) for h in
                     (",amax_history_len=1", ",amax_history_len=16", "")]  # fmt: skip
        said |= {
            "R4: it costs blockwise and mxfp8 at most 0.01, on every seed":
                max(floor("blockwise") + floor("mxfp8")) <= 0.01,
            "R4: it costs smooth=token, the released code, at most 0.01, on every seed":
                max(floor("delayed,smooth=token")) <= 0.01,
            "R4: it costs more the longer delayed looks back: 1, 16, 1024 steps":
                mean(histories[0]) < mean(histories[1]) < mean(histories[2]),
        }  # fmt: skip
    return {sentence: bool(held) for sentence, held in said.items()}


def draw(data):
    import matplotlib.pyplot as plt

    figure, ((one, two), (three, four)) = plt.subplots(2, 2, figsize=(11, 8.4))
    for gate, style, starts in zip(GATES, ("-", "--"), data["neurons"]):
        for color, start, neurons in zip(("C4", "C5", "C8"), COSINES, starts):
            low, middle, high = torch.tensor(neurons).quantile(torch.tensor([0.25, 0.5, 0.75]), -1)
            one.plot(MUS, middle, style, marker="o", color=color, label=f"{gate}, from {start}")
            one.fill_between(MUS, low, high, color=color, alpha=0.12)
    one.set(title="R1: a neuron trains on under L2", xlabel="strength mu of L2")
    one.set_ylabel("|cos(w1, w2)|, median and quartiles")
    one.legend(fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0.01, 0.17))
    (still, *ramped), k = data["ramp"], data["double"]
    for i, (arm, run_) in enumerate(zip(data["arms"], ramped)):
        gap = [r[1] - b[1] for r, b in zip(data["gauge"][arm], data["gauge"]["bf16"])]
        two.plot([r[0] for r in data["gauge"][arm]], gap, "o-", color=f"C{i}", label=arm)
        gap = np.subtract(run_["losses"], still["losses"])
        gap = np.convolve(gap, np.ones(k) / k, "valid")
        three.plot(np.arange(k, k + len(gap)) / k, gap, color=f"C{i}")
        values = costs(data, arm)
        four.bar(i, mean(values), color=f"C{i}")
        four.plot([i] * len(values), values, "k_", ms=12)
        four.annotate(f"{mean(values):+.3f}", (i, max(*values, 0)), (0, 4), ha="center",
                      textcoords="offset points", fontsize=9)  # fmt: skip
    two.set(title="R2: w1 of a channel times a, its w3 divided by a", xlabel="log2 a")
    two.set_ylabel("validation loss - bf16's, nats")
    three.set(title=f"R3: a doubles every {k} training steps (mean of {k})", xlabel="log2 a")
    three.set_ylabel("training loss - unramped bf16's, nats")
    four.set(title="R4: a channel that fires on a rare byte, 3 seeds", xticks=[])
    four.set_ylabel("validation loss - that without it, nats")
    four.margins(y=0.1)
    for ax in (one, two, three, four):
        ax.grid(alpha=0.3)
    for ax in (two, three):
        ax.set_yscale("symlog", linthresh=0.02)
    two.set(xticks=range(0, 21, 4), ylim=(-0.004, 10))
    figure.legend(*two.get_legend_handles_labels(), ncols=4, loc="lower center", frameon=False)
    figure.suptitle("Accelerated, injected outlier in SwiGLU: 2 layers, width 64, bytes")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    return figure


if __name__ == "__main__":
    main(claim, judge)
