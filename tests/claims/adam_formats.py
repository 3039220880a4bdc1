"""Both Adam moments in FP8: E4M3 for m, E5M2 for v (arXiv 2409.12517).

The document: m needs precision; v needs range, because the update divides by sqrt(v) and a small v
must not become zero. Master weights are FP16 with a scale.

Here: 2 x 2 formats x tile (one scale a tensor, one for 256 elements) x rounding, each with and
without the rule of fp8gpt.py that a positive v never becomes code 0; then FP16 and FP8 master
weights. Losses alone tell these arms badly apart, so every step also measures what rounding does:
how much of v the cast makes zero, the largest updates in units of the learning rate, and at the end
how far the moments are from exact ones that saw the same gradients.

    python tests/claims/adam_formats.py         7 minutes on 2 cores of an AMD EPYC
"""

import functools
import itertools
from statistics import mean, median, stdev
from unittest import mock

import torch
from common import BASE, SEEDS, TOY, Result, main, make_arm, mean_and_spread, run

import fp8gpt
from fp8gpt import Quantized, dequantize

SIZE = BASE | dict(n_embd=48, n_head=2, block_size=48, batch_size=8, steps=160, warmup=16,
                   lr=4e-3, min_lr=4e-4, eval_batches=40)  # fmt: skip
PLAIN = dict(m="E4M3", v="E5M2", tile=None, stochastic=False, rule=True, master="fp32")
GRID = itertools.product(("E4M3", "E5M2"), ("E4M3", "E5M2"), (None, 256), (False, True))
ARMS = [dict(PLAIN, m="fp32", v="fp32"), dict(PLAIN, master="fp16"), dict(PLAIN, master="fp8")]
ARMS += [dict(zip(PLAIN, (*arm, rule, "fp32"))) for arm in GRID for rule in (True, False)]


def exact_bound(beta1, beta2):
    """The largest |m| / sqrt(v) that any gradients can give an exact AdamW. By Cauchy-Schwarz,
    sum a_k g_k <= sqrt(sum a_k^2 / b_k) sqrt(sum b_k g_k^2) for the two averages' weights a, b."""
    return (1 - beta1) / ((1 - beta2) * (1 - beta1**2 / beta2)) ** 0.5


def text(a):
    if a["m"] == "fp32":
        return "bf16"
    formats = f"m_fmt={a['m']},v_fmt={a['v']},adam_block={a['tile']}"
    rounding = f"stochastic_rounding={a['stochastic']},master={a['master']}"
    return f"bf16,optimizer=fp8adam,{formats},{rounding}"


def watch(arm, rule):
    """Measure every optimizer step of an arm; without `rule`, undo the rule."""
    optimizer, quantize = arm.optimizer, fp8gpt.quantize
    plain_step, plain_update = optimizer.step, getattr(optimizer, "update", None)
    arm.seen, arm.exact = [], {}

    def update(p, state, adam):
        casts = []

        def watched(x, *how, **more):
            x8 = quantize(x, *how, **more)
            casts.append((x.clone(), x8.q.float() == 0))  # now: the rule works in place
            return x8

        with mock.patch.object(fp8gpt, "quantize", watched):
            plain_update(p, state, adam)
        v, zero = casts[-2 if optimizer.master else -1]  # of m, v and maybe p, in this order
        zero &= v > 0
        arm.seen[-1]["zero"] += zero.sum().item()
        arm.seen[-1]["positive"] += (v > 0).sum().item()
        if not rule:  # back from code 1
            state["v"].view(torch.uint8)[zero] = 0

    def step():
        arm.seen.append(dict(zero=0, positive=0))
        decayed, sizes = {}, []
        for group in optimizer.param_groups:
            for p in group["params"]:
                decayed[p] = p.detach() * (1 - group["lr"] * group["weight_decay"])
                m, v = arm.exact.setdefault(p, (torch.zeros_like(p), torch.zeros_like(p)))
                m.lerp_(p.grad, 1 - group["betas"][0])
                v.lerp_(p.grad**2, 1 - group["betas"][1])
        plain_step()
        for group in optimizer.param_groups:
            sizes += [((p - decayed[p]) / group["lr"]).flatten() for p in group["params"]]
        sizes = torch.cat(sizes).detach().abs()
        tail = sizes.kthvalue(round(0.9999 * sizes.numel())).values
        arm.seen[-1] |= dict(largest=sizes.max().item(), tail=tail.item())

    optimizer.step = step
    if plain_update:
        optimizer.update = update


def summarise(arm):
    """The run in a few numbers; `ratios`: 5, 50 and 95 % of stored v / exact v."""
    optimizer, held, stored, exact = arm.optimizer, 0, dict(m=[], v=[]), dict(m=[], v=[])
    for p, state in optimizer.state.items():
        for k, adamw, truth in zip("mv", ("exp_avg", "exp_avg_sq"), arm.exact[p]):
            if k in state:
                how = optimizer.tile, getattr(optimizer, k + "_fmt")
                have = dequantize(Quantized(state[k], state[k + "_scale"], *how))
                held += state[k].nbytes + state[k + "_scale"].nbytes
            else:
                have = state[adamw]
                held += have.nbytes
            stored[k].append(have.flatten().double())
            exact[k].append(truth.flatten().double())
    m, m_exact, v, v_exact = (torch.cat(t[k]) for k in "mv" for t in (stored, exact))
    ratios = (v / v_exact)[v_exact > 0].quantile(torch.tensor([0.05, 0.5, 0.95]).double())
    return dict(
        zero=mean(s["zero"] / max(s["positive"], 1) for s in arm.seen),
        largest=max(s["largest"] for s in arm.seen),
        tail=median(s["tail"] for s in arm.seen),
        m_error=((m - m_exact).norm() / m_exact.norm()).item(),
        ratios=ratios.tolist(),
        bytes=held / m.numel(),
    )


def claim(toy=False):
    base, seeds = (TOY, SEEDS[:1]) if toy else (SIZE, SEEDS)
    arms = [dict(a) for a in ARMS]
    if toy:
        arms = [a for a in arms if a["m"] != "E5M2" and not a["tile"] and not a["stochastic"]]
    jobs = [dict(text=text(a), seed=seed, base=base, last=summarise,
                 setup=functools.partial(watch, rule=a["rule"]))
            for a in arms for seed in seeds]  # fmt: skip
    runs = iter(run(jobs, workers=1 if toy else None))
    for a in arms:
        mine = [next(runs) for _ in seeds]
        a |= dict(vals=[r["val"] for r in mine])
        a |= {k: [r["last"][k] for r in mine] for k in mine[0]["last"]}
    c = make_arm("bf16", SEEDS[0], base).c
    bound = exact_bound(c.beta1, c.beta2)
    return judge(dict(arms=arms, bound=bound, steps=c.steps, seeds=len(seeds)))


def find(arms, a, **changes):
    """The arm that differs from `a` in these, or None."""
    wanted = {k: a[k] for k in PLAIN} | changes
    return next((b for b in arms if wanted.items() <= b.items()), None)


def differences(arms, a):
    """Per seed, validation loss minus that of fp32 moments."""
    return [x - y for x, y in zip(a["vals"], arms[0]["vals"])]


def differ(arms, a):
    return mean(differences(arms, a))


def table(arms, chosen):
    rows = [
        "m|v|tile|rounding|master|val loss|differs|v made 0|99.99 %|largest|v / exact|bytes".split(
            "|"
        )
    ]
    for a in chosen:
        row = [a["m"], a["v"], str(a["tile"] or "tensor"), "nearest", a["master"]]
        row[3] = "stochastic" if a["stochastic"] else row[3]
        row += [mean_and_spread(a["vals"]), mean_and_spread(differences(arms, a))]
        low, _, high = map(mean, zip(*a["ratios"]))
        row += [f"{mean(a['zero']):.4%}", f"{mean(a['tail']):.2f}", f"{max(a['largest']):,.2f}"]
        rows.append(row + [f"{low:.2f} to {high:.2f}", f"{mean(a['bytes']):.3f}"])
    return rows


def judge(data):
    arms, bound = data["arms"], data["bound"]
    title = [
        "Adam moments in FP8, first with the rule that a positive v is never 0, then without it:",
        f"{data['steps']} steps, {data['seeds']} seeds; val loss in nats a token, its difference"
        " to fp32 moments on the same seeds;",
        "updates in learning rates (99.99 % of them, the"
        f" largest; {bound:.2f} is the most that exact moments allow);",
        "5 to 95 % of the"
        " stored v / the exact one; bytes of both moments and their scales a parameter",
    ]
    with_rule, without = (table(arms, [a for a in arms if a["rule"] is r]) for r in (True, False))
    said = verdicts(arms, bound)
    return Result("\n".join(title), with_rule, said, data, draw, more=[without])


def verdicts(arms, bound):
    spread = stdev(arms[0]["vals"]) if len(arms[0]["vals"]) > 1 else 0.02
    plain = find(arms, PLAIN)
    ruled = [a for a in arms[1:] if a["rule"] and a["master"] == "fp32"]
    bare = [a for a in arms if not a["rule"]]
    by_v = [(a, find(arms, a, v="E5M2")) for a in ruled + bare if a["v"] == "E4M3"]
    by_m = [(find(arms, a, m="E4M3"), a) for a in ruled if a["m"] == "E5M2"]
    by_rounding = [(find(arms, a, stochastic=False), a) for a in ruled
                   if a["stochastic"] and not a["tile"]]  # fmt: skip
    fp16, fp8 = (differ(arms, find(arms, PLAIN, master=m)) for m in ("fp16", "fp8"))

    def high(a):
        return mean(r[2] for r in a["ratios"])

    return {
        "E4M3 m and E5M2 v differ in loss from fp32 moments by less than seeds do":
            abs(differ(arms, plain)) < spread,
        "more of v becomes zero in E4M3 than in E5M2, in every pairing":
            all(mean(a["zero"]) > mean(b["zero"]) for a, b in by_v),
        "no rule: v in E4M3 makes updates of over 1000 learning rates":
            all(max(a["largest"]) > 1000 for a in bare if a["v"] == "E4M3"),
        "no rule: v in E4M3 loses more than v in E5M2, in every pairing":
            all(differ(arms, a) > differ(arms, b) for a, b in by_v if not a["rule"]),
        "the rule: no update is more than 3 times what exact moments allow":
            all(max(a["largest"]) < 3 * bound for a in ruled),
        "the rule: v in E4M3 loses no more than in E5M2, in any pairing, within the seeds' spread":
            all(differ(arms, a) < differ(arms, b) + spread for a, b in by_v if a["rule"]),
        "m is nearer to the exact m in E4M3 than in E5M2, in every pairing":
            all(mean(a["m_error"]) < mean(b["m_error"]) for a, b in by_m),
        "one scale a tensor: v sticks above the exact v to nearest, stochastically less so":
            all(high(a) > high(b) > 1 for a, b in by_rounding),
        "FP16 master weights differ from fp32 ones by less than seeds do":
            abs(fp16 - differ(arms, plain)) < spread,
        "FP8 master weights lose more than any pairing of moments under the rule":
            fp8 > max(spread, *(differ(arms, a) for a in ruled)),
    }  # fmt: skip


def draw(data):
    import matplotlib.pyplot as plt

    arms = data["arms"]
    kinds = list(itertools.product(("E4M3", "E5M2"), (None, 256), (False, True)))
    kinds = [dict(v=v, tile=tile, stochastic=stochastic) for v, tile, stochastic in kinds]
    figure, axes = plt.subplots(1, 4, figsize=(12, 4.8), sharey=True)
    values = (lambda a: 100 * mean(a["zero"]), lambda a: max(a["largest"]),
              lambda a: differ(arms, a))  # fmt: skip
    for ax, value in zip(axes, values):
        for y, kind in enumerate(kinds):
            for m, rule in itertools.product(("E4M3", "E5M2"), (True, False)):
                label = None if y else f"m {m}, {'with' if rule else 'without'} the rule"
                style = dict(marker="os"[m == "E5M2"], color=f"C{0 if rule else 3}", ms=7, mew=1.6)
                style |= dict(mfc="none" if m == "E5M2" else None, ls="", label=label)
                ax.plot(value(find(arms, PLAIN, m=m, rule=rule, **kind)), y, **style)
        for y, master in enumerate(("fp16", "fp8"), len(kinds)):
            ax.plot(value(find(arms, PLAIN, master=master)), y, "o", ms=7, color="C0")
        ax.set_xscale("log")
    for y, kind in enumerate(kinds):
        low, middle, high = map(mean, zip(*find(arms, PLAIN, **kind)["ratios"]))
        axes[3].plot((low, high), (y, y), color="C0", lw=2)
        axes[3].plot(middle, y, "o", color="C0", ms=7)
    axes[1].axvline(data["bound"], color="0.4", ls="--", label="most that exact moments allow")
    axes[2].set_xscale("symlog", linthresh=0.1)
    axes[2].set_xticks([-0.1, 0, 0.1, 1], ["-0.1", "0", "0.1", "1"])
    axes[2].axvspan(*(k * stdev(arms[0]["vals"]) for k in (-1, 1)), color="0.85",
                    label="spread of seeds, fp32 moments")  # fmt: skip
    axes[3].axvline(1, color="0.4", ls="--")
    axes[3].set_xscale("log")
    axes[3].set_xticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
    axes[3].minorticks_off()
    names = [f"v {k['v']}, {k['tile'] or 'tensor'}, {('nearest', 'stochastic')[k['stochastic']]}"
             for k in kinds]  # fmt: skip
    axes[0].set_yticks(range(10), [*names, "FP16 master weights", "FP8 master weights"])
    axes[0].invert_yaxis()
    titles = ("v that the cast makes 0", "largest update", "loss minus fp32 moments'",
              "stored v / exact v, m E4M3")  # fmt: skip
    units = ("%", "learning rates", "nats a token", "5 %, median, 95 %")
    for ax, title, unit in zip(axes, titles, units):
        ax.set_title(title, fontsize=11)
        ax.set_xlabel(unit)
        ax.grid(alpha=0.3)
    legend = {name: handle for ax in axes for handle, name in zip(*ax.get_legend_handles_labels())}
    figure.legend(legend.values(), legend, ncols=3, loc="lower center", frameon=False)
    figure.suptitle("FP8 Adam: what rounding does to v and to the updates (3 seeds)")
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    return figure


if __name__ == "__main__":
    main(claim, judge)
