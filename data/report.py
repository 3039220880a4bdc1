"""What comes out of a run: what one batch shows, the monitor, tables, pictures, whole files.

train.py calls all of it. `arm` is its Arm: c (the configuration), recipe, model, optimizer, step
and batch(*key).
"""

import json
import math
import os
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F

from data.prepare import UserError
from fp8gpt import FP8Linear, SwiGLU, health, quantize_operand

# ------------------------------------------------------------------------------------------------
# Files and tables


def write_whole(path, write):
    """Write aside, then rename: the file is whole or not there."""
    aside = path.with_suffix(".tmp")
    try:
        write(aside)
        os.replace(aside, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        aside.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {str(error).splitlines()[0]}") from None


def strict(value):
    """JSON knows neither NaN nor inf: they become null."""
    if isinstance(value, dict):
        return {k: strict(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(rows):
    """Rows of strings, the first one the header, as a Markdown table."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    for row in rows:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")


def summary(health):
    """What a comparison says of the operands of an arm."""
    parts = {k: [h[k] for h in health.values()] or [0.0] for k in ("underflow", "clip")}
    means = {k: statistics.fmean(values) for k, values in parts.items()}
    worst = min(health, key=lambda n: health[n]["sqnr"], default=None)
    return means | dict(worst=worst, worst_sqnr=health[worst]["sqnr"] if health else None)


def print_arms(arms):
    table = ["arm|val loss|differs|tokens/s|MB|underflow|clip|worst SQNR".split("|")]
    for a in arms:
        spread = "" if a["spread"] is None else f" ± {a['spread']:.4f}"
        row = [a["name"], f"{a['val_loss']:.4f}{spread}", f"{a['difference']:+.4f}"]
        row += [f"{a['tokens_per_s']:,.0f}", f"{a['memory_bytes'] / 1e6:.0f}"]
        row += [f"{a['underflow']:.3%}", f"{a['clip']:.3%}"]
        table.append(row + [f"{a['worst_sqnr']:.1f} dB, {a['worst']}" if a["worst"] else "n/a"])
    print_table(table)


def sync(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(call, device, repeats=1):
    """Seconds of a call."""
    sync(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    sync(device)
    return (time.perf_counter() - start) / repeats


def medians(calls, device, rounds=7, seconds=0.02):
    """{name: seconds of a call}: medians over rounds in which every call has its turn. On a GPU a
    turn is as many calls as fit into `seconds`, so that launches hide behind what runs."""
    gpu, repeats, times = device.type == "cuda", {}, {name: [] for name in calls}
    for name, call in calls.items():
        clock(call, device, 3 if gpu else 1)
        repeats[name] = max(1, int(seconds / max(clock(call, device), 1e-6))) if gpu else 1
    for _ in range(rounds if gpu else 1):
        for name, call in calls.items():
            times[name].append(clock(call, device, repeats[name]))
    return {name: statistics.median(t) for name, t in times.items()}


# ------------------------------------------------------------------------------------------------
# Numbers


def memory(arm):
    """Bytes: on CUDA the peak, a monitor's looks included; on a CPU parameters, optimizer state
    and what backward keeps."""
    if arm.device.type == "cuda":
        return torch.cuda.max_memory_allocated(arm.device)
    if arm.shards:  # this process's, without activations
        states = [t for s in arm.optimizer.state.values() for t in s.values()]
        return sum(t.nbytes for t in [*states, *(shard for _, shard in arm.shards.pairs)])
    params = list(arm.model.parameters())
    owned, saved = {p.untyped_storage().data_ptr() for p in params}, {}

    def pack(t):  # keeps the storage, so that its address is not used again, but not the graph
        storage = t.untyped_storage()
        if storage.data_ptr() not in owned:
            saved[storage.data_ptr()] = storage

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda _: None):
        arm.model(*arm.batch("train", arm.c.seed, 0, 0))
    state = [t for s in arm.optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    return sum(t.nbytes for t in params + state) + sum(s.nbytes() for s in saved.values())


def exponents(x8):
    """floor(log2) of the decode scales: their median, smallest and largest; equal for one scale.
    Tiles of zeros and tiles that hold NaN or inf do not count; None where no tile is left, and for
    a BF16 operand, which has no scales."""
    s = () if x8.amax is None else x8.s[x8.s.isfinite() & (x8.amax > 0)]
    if not len(s):
        return dict(exponent=None, exponent_min=None, exponent_max=None)
    e = torch.frexp(s).exponent - 1  # exact; log2 in fp32 is not, next to a power of two
    middle, low, high = (f(e).item() for f in (torch.median, torch.min, torch.max))
    return dict(exponent=middle, exponent_min=low, exponent_max=high)


def swiglu_health(module, y):
    """Of a SwiGLU, y (..., 2H) the output of its w12: h, the product before any smoothing, and how
    far w1_i and w2_i of a channel point the same way. Kurtosis: 3 for a normal distribution."""
    up, gate = y.float().flatten(0, -2).chunk(2, dim=-1)
    h = up * F.silu(gate)  # (M, H)
    peaks = h.abs().amax(0)  # (H,)
    w1, w2 = module.w12.weight.chunk(2)  # (H, C) each
    cos = F.cosine_similarity(w1, w2, dim=1).abs()
    centred = h.double() - h.double().mean()
    kurtosis = centred.pow(4).mean() / centred.square().mean().square()
    numbers = dict(cos_max=cos.max(), cos_rms=cos.square().mean().sqrt(), kurtosis=kurtosis)
    numbers |= dict(amax=peaks.max(), channel=peaks.argmax())
    return {k: v.item() for k, v in numbers.items()}


def look(arm, *key):
    """What the batch arm.batch(*key) shows -> {"operands": {...}, "blocks": {...}}.

    operands  "blocks.0.attn.wqkv.x": fp8gpt.health, amax and `exponents`, for x, w and g of the
              recipe's linears, as a training step would cast them for their first GEMM
    blocks    "blocks.0.mlp": `swiglu_health` of every SwiGLU
    Nothing that outlives it is changed: in evaluation an amax history is only read, nothing is
    drawn at random, and the gradients go. An operand is measured as it passes, not kept.
    """
    operands, blocks, hooks = {}, {}, []

    @torch.no_grad()
    def measure(name, layer, operand, x):
        history = layer.history()["xwg".index(operand)]
        x8, _ = quantize_operand(x, operand, arm.recipe, history, "first")
        amax = x.float().abs().max().item()
        operands[f"{name}.{operand}"] = dict(amax=amax, **exponents(x8), **health(x, x8))

    def watch(name):
        def hook(layer, args, kwargs, y):
            x, fold = (*args, kwargs.get("fold"))[:2]
            x, w, fold = (
                x.detach().flatten(0, -2),
                layer.weight.detach(),
                1 if fold is None else fold,
            )
            measure(name, layer, "x", x / fold)
            measure(name, layer, "w", w * fold)
            y.register_hook(lambda g: measure(name, layer, "g", g.flatten(0, -2)))

        return hook

    def watch_swiglu(name, module):
        def hook(_layer, _args, y):
            with torch.no_grad():
                blocks[name] = swiglu_health(module, y)

        return hook

    for name, m in arm.model.named_modules():
        if isinstance(m, FP8Linear) and m.recipe == arm.recipe:
            hooks.append(m.register_forward_hook(watch(name), with_kwargs=True))
        elif isinstance(m, SwiGLU):
            hooks.append(m.w12.register_forward_hook(watch_swiglu(name, m)))
    arm.model.eval()
    with torch.compiler.set_stance("force_eager"):  # compiled code passes hooks by
        loss = arm.model(*arm.batch(*key))[1]
        (loss * arm.c.loss_scale / arm.c.accum).backward()
    arm.model.train()
    arm.optimizer.zero_grad()
    for hook in hooks:
        hook.remove()
    return dict(operands=operands, blocks=blocks)


def operand_health(arm):
    """`look`'s operands on the first validation batch, the same one for every arm and step."""
    return look(arm, "val", 0, 0)["operands"]


# ------------------------------------------------------------------------------------------------
# Pictures


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_picture(figure, path):
    write_whole(path, lambda aside: figure.savefig(aside, dpi=110, format="png"))
    pyplot().close(figure)


def plot(curves, path):
    """Loss over steps; with several curves, also the difference to the first."""
    plt, several = pyplot(), len(curves) > 1
    figure, axes = plt.subplots(1, 1 + several, figsize=(5.5 + 5.5 * several, 4), squeeze=False)
    k = max(1, len(curves[0][1]) // 15)  # steps in the running mean
    mean, base = np.ones(k) / k, np.array(curves[0][1])
    for i, (name, losses) in enumerate(curves):
        style = dict(color=f"C{i % 10}", lw=1.3, label=name)
        smooth = np.convolve(losses, mean, "valid")
        axes[0, 0].plot(np.arange(k, k + len(smooth)), smooth, **style)
        n = min(len(base), len(losses))
        if i and n >= k:
            smooth = np.convolve(losses[:n] - base[:n], mean, "valid")
            axes[0, 1].plot(np.arange(k, k + len(smooth)), smooth, **style)
    axes[0, 0].set(title=f"training loss, mean of {k} steps", ylabel="nats a token")
    if several:
        axes[0, 1].axhline(0, color="C0", lw=1.3)
        axes[0, 1].set_title(f"loss minus that of {curves[0][0]} on the same batches")
    for ax in axes.flat:
        ax.set_xlabel("step")
        ax.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=9)  # the colours are the same on the right
    figure.tight_layout()
    save_picture(figure, path)


def label(ax, title):
    from matplotlib.ticker import MaxNLocator

    ax.set_title(title, fontsize=10)
    ax.set_xlabel("step", fontsize=9)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.tick_params(labelsize=8)


def heat_map(figure, ax, steps, rows, title):
    """Whole numbers over steps (a column reaches half-way to its neighbours) and over named rows,
    {name: [a value or None for each step]}; grey where there is none."""
    from matplotlib.ticker import MaxNLocator

    x = np.array(steps, float)
    gaps = np.diff(x) / 2 if len(x) > 1 else np.array([0.5])
    edges = np.concatenate((x[:1] - gaps[:1], x[:-1] + gaps[: len(x) - 1], x[-1:] + gaps[-1:]))
    values = np.ma.masked_invalid(np.array([*rows.values()], float))
    low, high = (values.min(), values.max()) if values.count() else (0, 0)
    colours = dict(vmin=low - 0.5, vmax=high + 0.5, cmap="viridis")
    mesh = ax.pcolormesh(edges, np.arange(len(rows) + 1) - 0.5, values, **colours)
    ticks = MaxNLocator(6, integer=True)
    bar = figure.colorbar(mesh, ax=ax, location="bottom", aspect=30, pad=0.02, ticks=ticks)
    bar.ax.tick_params(labelsize=8)
    every = math.ceil(len(rows) / 64)  # more names than that cannot be read
    ax.set_yticks(range(0, len(rows), every), [*rows][::every])
    ax.set_ylim(len(rows) - 0.5, -0.5)  # the first one at the top
    ax.set_facecolor("0.8")
    label(ax, title)


def exploding(rows):
    """-> (name, step, amax, ratio) of the layer that stands out most in a monitor's rows, or None.

    A layer explodes if the amax of its input, or the output of a SwiGLU, exceeds 32 times the
    median of the other blocks'. In runs that train well the first block's SwiGLU reaches 9 times
    the others', so a smaller factor would be a false alarm. Gradients differ by 50 between healthy
    blocks, and weights hardly at all: they are not asked.
    """
    worst = None
    for row in rows:
        kinds = {}  # {"mlp.w3.x": {"blocks.0.mlp.w3.x": amax, ...}, ...}
        for name, seen in (row["operands"] | row["blocks"]).items():
            if name.startswith("blocks.") and name[-2:] not in (".w", ".g") and seen["amax"]:
                kinds.setdefault(name.split(".", 2)[2], {})[name] = seen["amax"]
        for kind in kinds.values():
            for name, amax in kind.items():
                others = [a for n, a in kind.items() if n != name]
                ratio = amax / statistics.median(others) if others else 0.0
                if ratio > max(32.0, worst[3] if worst else 0.0):
                    worst = (name, row["step"], amax, ratio)
    return worst


def series(rows, part, name, value):
    """One number of a monitor's rows, over its steps; None where there is none."""
    return [row[part].get(name, {}).get(value) for row in rows]


def plot_monitor(rows, title, path):
    """Exponents of the scales over steps and layers, for x, w and g (of the amaxes in a recipe
    without scales); below, the output of every SwiGLU and the alignment of its weights."""
    plt, steps = pyplot(), [row["step"] for row in rows]
    layers = [n[:-2] for n in rows[-1]["operands"] if n.endswith(".x")]
    swiglus = list(rows[-1]["blocks"])
    scaled = any(seen["exponent"] is not None for r in rows for seen in r["operands"].values())
    if not layers and not swiglus:
        return  # every block stays in BF16 and has no SwiGLU
    heights = [1.7 + 0.16 * min(len(layers), 64)] * bool(layers) + [2.6] * bool(swiglus)
    figure = plt.figure(figsize=(9, 0.4 + sum(heights)), layout="constrained")
    figure.suptitle(title, fontsize=11)
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for ax, operand in zip(parts[0].subplots(1, 3, sharey=True) if layers else (), "xwg"):
        maps = {}
        for name in layers:
            amaxes = series(rows, "operands", f"{name}.{operand}", "amax")
            values = series(rows, "operands", f"{name}.{operand}", "exponent")
            if not scaled:
                values = [math.frexp(a)[1] - 1 if a else None for a in amaxes]
            maps[name.removeprefix("blocks.")] = values
        heat_map(parts[0], ax, steps, maps, f"{operand}: log2 of {'scale' if scaled else 'amax'}")
        ax.label_outer()
    for ax, value in zip(parts[-1].subplots(1, 2) if swiglus else (), ("amax", "cos_rms")):
        for i, name in enumerate(swiglus):
            shade = plt.get_cmap("viridis")(0.9 * i / max(1, len(swiglus) - 1))
            named = name.split(".")[1] if i % math.ceil(len(swiglus) / 8) == 0 else None
            curve = np.array(series(rows, "blocks", name, value), float)  # None becomes NaN
            ax.plot(steps, curve, color=shade, lw=1.3, marker=".", ms=3, label=named)
        what = "amax of SwiGLU's output" if value == "amax" else "RMS of |cos(w1, w2)|"
        ax.set_yscale("log" if value == "amax" else "linear")
        label(ax, what + ", by block")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    save_picture(figure, path)


# ------------------------------------------------------------------------------------------------
# The monitor


class Monitor:
    """Every c.monitor steps a `look` at the batch that comes next, and at the optimizer: a line in
    OUT/monitor.jsonl, and in the end OUT/monitor.png. A context manager around the steps; with
    c.monitor = 0 it does nothing. The run itself goes on as if nobody had looked.

    Beside `look`'s numbers a line holds the step and, under "optimizer",
    v_zero, v_floored   fractions of the second moment: exactly zero, and, for FP8Adam, at the
                        smallest code, to which it floors what would become zero
    update_ratio        the largest RMS(update) / RMS(weight) of a matrix in the step just done,
                        and update_ratio_of, its name
    """

    def __init__(self, arm, out):
        self.arm, self.out, self.every, self.hooks = arm, out, arm.c.monitor, []
        self.before, self.largest = {}, (None, None)
        self.rows = self.kept_rows(out / "monitor.jsonl", arm.step)

    @staticmethod
    def kept_rows(path, step):
        """A resumed run keeps the rows up to its checkpoint, a fresh one none."""
        rows = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                rows.append(json.loads(line))
            except ValueError:  # cut short by a kill
                break
        rows = [r for r in rows if 0 < step >= r["step"]]
        if path.exists():
            text = "".join(json.dumps(r) + "\n" for r in rows)
            write_whole(path, lambda aside: aside.write_text(text))
        return rows

    def __enter__(self):
        if self.every:
            optimizer = self.arm.optimizer
            self.hooks.append(optimizer.register_step_pre_hook(self.before_update))
            self.hooks.append(optimizer.register_step_post_hook(self.after_update))
            if self.arm.step == 0:
                self.look()
        return self

    def matrices(self):
        return {n: p.detach() for n, p in self.arm.model.named_parameters() if p.dim() > 1}

    def before_update(self, *_):
        if (self.arm.step + 1) % self.every == 0:
            self.before = {n: p.clone() for n, p in self.matrices().items()}

    def after_update(self, *_):
        if self.before:
            ratios = {n: (p - self.before[n]).norm() / p.norm() for n, p in self.matrices().items()}
            ratios = {n: r.item() for n, r in ratios.items()}
            name = max(ratios, key=ratios.get)
            self.before, self.largest = {}, (ratios[name], name)

    def after_step(self):
        if self.every and self.arm.step % self.every == 0:
            self.look()

    def look(self):
        arm, zero, floored, count = self.arm, 0, 0, 0
        for state in arm.optimizer.state.values():
            fp8 = "v" in state  # an FP8Adam's, in codes
            v = state["v"].view(torch.uint8) if fp8 else state["exp_avg_sq"]
            zero, count = zero + (v == 0).sum().item(), count + v.numel()
            floored += (v == 1).sum().item() if fp8 else 0
        moments = dict(v_zero=zero / count, v_floored=floored / count) if count else {}
        optimizer = moments | dict(zip(("update_ratio", "update_ratio_of"), self.largest))
        row = dict(step=arm.step, **look(arm, "train", arm.c.seed, arm.step, 0))
        self.rows.append(strict(row | dict(optimizer=optimizer)))
        with open(self.out / "monitor.jsonl", "a") as log:
            log.write(json.dumps(self.rows[-1], allow_nan=False) + "\n")

    def __exit__(self, kind, *_):
        for hook in self.hooks:
            hook.remove()
        if not self.every or not self.rows or kind is KeyboardInterrupt:
            return
        worst, path = exploding(self.rows), self.out / "monitor.png"
        title = f"{self.arm.c.recipe}: a look inside, every {self.every} steps"
        if worst:
            name, step, amax, ratio = worst
            what = f"{name} explodes: amax {amax:.3g} at step {step}"
            title = f"{what}, {ratio:.0f} times the other blocks'"
            print(f"monitor  {title}; see {path}")
        plot_monitor(self.rows, title, path)
