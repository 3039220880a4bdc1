"""Claim 8: memory and throughput.

"Scaling FP8 training to trillion-token LLMs" (arXiv 2409.12517): both Adam moments in FP8, and "up
to a ~34 % throughput improvement" over BF16 on 256 Gaudi2.

Here every byte that training keeps is counted. A parameter has its weight, gradient and two
moments. From forward to backward autograd keeps, each storage once, the linears' inputs and weights
in the recipe's formats with scales (fp32, also where MX hardware has a byte), and what no recipe
touches: norms, attention, SwiGLU, loss. On a CPU activations are fp32; a hook makes them BF16, as
they are on a GPU (norms, SwiGLU and loss stay fp32), and the count is repeated. (FP8SwiGLU, which
needs a GPU, keeps up and gate in BF16 alone: 4 bytes a channel, here it is 12.) `formula` must give
each count to the byte, also that of Llama-2-7B cut to 2 blocks, which is counted on tensors without
data. FP16 masters are emulated: theirs are the bytes of their codes.

Then a training step of every recipe as a multiple of one in fp32, by `train.py --bench` on one
thread, *emulated*: no speed of FP8 can be seen on a CPU. The documents' own stand below, as theirs.

    python tests/claims/memory_and_throughput.py
"""

import contextlib
import io
from dataclasses import replace

import torch
from common import BASE, SEEDS, TOY, Result, main, make_arm
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8gpt import FP16, GPT, RECIPES, FP8Linear, GPTConfig, quantize
from train import Config, bench

LLAMA = dict(vocab_size=32000, n_head=32, n_embd=4096, hidden=11008, block_size=4096)  # 2-7B
STATES = {"AdamW": "bf16", "FP8 Adam": "bf16,optimizer=fp8adam",
          "FP8 Adam, blocks of 256": "bf16,optimizer=fp8adam,adam_block=256"}  # fmt: skip
THEIRS = """document|setting|its number|as told by
trillion-token FP8|7B, 256 Gaudi2: FP8 against BF16|up to ~34 % throughput|its abstract
trillion-token FP8|7B, 8 Gaudi2: FP8, Smooth-SwiGLU|12.65 -> 16.89 samples/s, +33.5 %|notes on it
trillion-token FP8|FP8, SwiGLU's output in BF16|+27.0 %|derived: 5.1 % below, says a review
trillion-token FP8|FP8 alone, which diverges|+37 %|a review, not the paper
trillion-token FP8|memory in all|about -30 %|notes, not the paper
Transformer Engine|H200 NVL, GEMMs of 5B with casts|delayed 1.69x, current 1.57x, block 1.41x|docs
Transformer Engine|B300, the same|delayed 1.61x, MXFP8 1.44x, current 1.41x|its docs
COAT|Llama-2-7B, 8 H100|3.53 to 2.80 s a step, 1.26x|its README
torchao|GPT 1.5B, H100: delayed, compiled|+3.6 to +4.3 %|its issue 1297"""  # noqa: E501


def kept_for_backward(model, B, T, bf16):
    """{"inputs", "weights" of the linears, "rest": bytes that autograd keeps, each storage once}"""
    seen = {t.untyped_storage()._cdata: t for t in (*model.parameters(), *model.buffers())}
    kept, inside, hooks = dict(inputs=0, weights=0, rest=0), [], []
    idx = torch.zeros(B, T + 1, dtype=torch.int64)

    def pack(t):
        storage, part = t.untyped_storage(), "rest"
        if inside:  # FP8Matmul saves x_q, x_s, w_q, w_s
            part, inside[0] = "inputs" if inside[0] < 2 else "weights", inside[0] + 1
        if storage._cdata not in seen:
            seen[storage._cdata] = storage  # held, so that its address is not used again
            kept[part] += storage.nbytes()

    for m in model.modules():
        if isinstance(m, FP8Linear):
            hooks.append(m.register_forward_pre_hook(lambda *_: inside.append(0)))
            hooks.append(m.register_forward_hook(lambda *_: inside.clear()))
    if bf16:
        first = model.blocks[0].register_forward_pre_hook
        hooks.append(first(lambda _, args: (args[0].bfloat16(), *args[1:])))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda _: None):
        model(idx[:, :-1], idx[:, 1:])
    for hook in hooks:
        hook.remove()
    return kept


def formula(c, B, T, wide):
    """The same by arithmetic for a llama without grouped queries and B > 1. wide: bytes of an
    activation. -> ({part: bytes}, tokens, parameters)"""
    M, C, H, L, V = B * T, c.n_embd, c.hidden, c.n_layer, (c.vocab_size + 63) // 64 * 64

    def operand(fmt, rows, columns, tile):  # codes of whole tiles, fp32 scales
        tile = [min(t or n, n) for t, n in zip(tile, (rows, columns))]
        tiles = -(-rows // tile[0]) * -(-columns // tile[1])
        return tiles * (fmt.dtype.itemsize * tile[0] * tile[1] + 4)

    linears = [(c.recipe, L, *shape) for shape in ((C, 3 * C), (C, C), (C, 2 * H), (H, C))]
    linears.append((RECIPES["bf16"], 1, C, V))  # the head
    parts = dict(  # wgrad's x and dgrad's w: their tiles stand upright
        inputs=sum(n * operand(r.x_fmt, M, K, r.x_tile[::-1]) for r, n, K, N in linears),
        weights=sum(n * operand(r.w_fmt, N, K, r.w_tile[::-1]) for r, n, K, N in linears),
        norms=(2 * L + 1) * M * (4 * C + 4 * C + 4),  # x, x / rms and 1 / rms
        attention=L * M * (wide * (C + C + 3 * C + C) + 4 * c.n_head),  # q, k, qkv, y; log-sum
        SwiGLU=L * M * 4 * (H + H + H),  # up, gate and silu(gate)
        loss=M * (4 * c.vocab_size + 8) + 8 * B * (T + 1) + 4,  # log p, targets; tokens; count
    )  # fmt: skip
    return parts, M, V * C + C + 2 * C * L + sum(n * K * N for _, n, K, N in linears)


def count(name, base):
    """{where: [counted or None, formula]} of a recipe."""
    model, B, T = make_arm(name, SEEDS[0], base).model, base["batch_size"], base["block_size"]
    found = {
        where: [kept_for_backward(model, B, T, wide == 2), formula(model.config, B, T, wide)]
        for where, wide in (("fp32", 4), ("BF16", 2))
    }
    with FakeTensorMode():
        model = GPT(GPTConfig(**LLAMA, n_layer=2, recipe=name))
        kept = kept_for_backward(model, 2, 4096, True)
    found["7B, 2 blocks"] = [kept, formula(model.config, 2, 4096, 2)]
    found["7B"] = [None, formula(GPTConfig(**LLAMA, n_layer=32, recipe=name), 2, 4096, 2)]
    return found


def count_states(base):
    """{optimizer and masters: bytes a parameter of [weight, gradient, moments]}"""
    found = {}
    for label, text in STATES.items():
        arm = make_arm(text, SEEDS[0], base)
        arm.train_step()
        n, params = arm.model.num_params(), list(arm.model.parameters())
        moments = sum(t.nbytes for s in arm.optimizer.state.values() for t in s.values())
        found[label] = [sum(p.nbytes for p in params) / n, 4, moments / n]
    codes = [quantize(p.detach().reshape(1, -1), FP16) for p in params]
    master = sum(t.q.nbytes + t.s.nbytes for t in codes) / n
    found["FP8 Adam, FP16 masters"] = [master, *found["FP8 Adam"][1:]]
    return found


def time_steps(base):
    """The table of train.py's benchmark."""
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        bench(replace(Config(), **base), torch.device("cpu"))
    table = [line for line in out.getvalue().splitlines() if line.startswith("| ")]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table if "--" not in line
    ]


def claim(toy):
    base = TOY if toy else BASE
    memory = {n: count(n, base) for n in (("bf16", "current", "mxfp8") if toy else RECIPES)}
    steps = [] if toy else time_steps(base)
    return judge(dict(memory=memory, states=count_states(base), steps=steps))


def judge(data):
    memory, states, steps = data["memory"], data["states"], data["steps"]
    head = (
        "recipe|cast weights: base|7B|inputs: base|7B|all: base, fp32|base, BF16|7B|less than bf16"
    )
    rows, exact, kept = [head.split("|")], True, {}
    for name, found in memory.items():
        for where, (counted, (parts, tokens, params)) in found.items():
            everything = sum(parts.values())
            kept[name, where] = [parts["weights"] / params, parts["inputs"] / tokens,
                                 (everything - parts["weights"]) / tokens]  # fmt: skip
            if counted:
                exact &= all(parts[k] == counted[k] for k in ("inputs", "weights"))
                exact &= everything == sum(counted.values())
        cpu, bf16, big = (kept[name, where] for where in ("fp32", "BF16", "7B"))
        cells = (cpu[0], big[0], cpu[1], big[1], cpu[2], bf16[2], big[2])
        less = 1 - big[2] / kept["bf16", "7B"][2]
        rows.append([name, *(f"{x:,.{2 * (x < 10)}f}" for x in cells), f"{less:.1%}"])
    more = [["optimizer|weight|gradient|moments|B a parameter|Llama-2-7B, GB".split("|")]]
    for label, cells in states.items():
        cells = [*cells, sum(cells), sum(cells) * params / 1e9]
        more[0].append([label, *(f"{x:.2f}" for x in cells)])
    more += [steps] * bool(steps) + [[line.split("|") for line in THEIRS.splitlines()]]
    ratios = [
        [kept[n, "7B"][i] / kept["bf16", "7B"][i] for n in memory if n != "bf16"] for i in (1, 2)
    ]
    quarter = [states[a][2] / states["AdamW"][2] for a in list(STATES)[1:]]
    verdicts = {
        "the formula gives every count to the byte": exact,
        "FP8 keeps half of BF16's inputs of linears, and scales": (
            min(ratios[0]) >= 0.5 and max(ratios[0]) < 0.57
        ),
        "of all activations kept for backward that saves less than a tenth": min(ratios[1]) > 0.9,
        "FP8 Adam keeps a quarter of AdamW's moments, and at most 2 % more for scales": (
            min(quarter) >= 0.25 and max(quarter) < 0.255
        ),
    }
    if steps:
        slower = all(float(row[1]) > 1.05 for row in steps[1:] if row[0] not in ("fp32", "bf16"))
        verdicts["every emulated FP8 step takes longer than fp32's: no speed shown"] = slower
    title = "Kept for backward: bytes of cast weights a parameter, bytes of activations a token"
    return Result(title, rows, verdicts, data, draw, more)


def draw(data):
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.3))
    big, params, tokens = {}, {}, {}
    for name in ("bf16", "current", "rowwise", "blockwise", "mxfp8"):
        parts, M, n = data["memory"][name]["7B"][1]
        casts = parts.pop("weights") / n
        tokens[name] = {"inputs of linears": parts.pop("inputs") / M / 1e6}
        tokens[name] |= {part: size / M / 1e6 for part, size in parts.items()}
        for state, sizes in data["states"].items():
            big[name, state] = dict(zip(("weight", "gradient", "moments"), sizes))
            big[name, state]["cast weight"] = casts
    params["bf16, AdamW"] = big["bf16", "AdamW"]
    params["FP8, AdamW"] = big["current", "AdamW"]
    params["FP8, FP8 Adam"] = big["current", "FP8 Adam"]
    params["the same, FP16\nmasters, emulated"] = big["current", "FP8 Adam, FP16 masters"]
    for ax, stacks in ((left, params), (right, tokens)):
        ends = dict.fromkeys(stacks, 0.0)
        for i, part in enumerate(next(iter(stacks.values()))):
            sizes = [stack[part] for stack in stacks.values()]
            ax.barh(list(stacks), sizes, left=list(ends.values()), color=f"C{i}", label=part)
            ends = {label: end + size for (label, end), size in zip(ends.items(), sizes)}
        for label, end in ends.items():
            ax.text(end, label, f" {end:.1f}", va="center")
        ax.invert_yaxis()
        ax.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.17), frameon=False)
    left.set(title="a parameter of Llama-2-7B, by formula", xlabel="bytes", xlim=(0, 21))
    right.set(title="kept for backward, a token of Llama-2-7B in BF16", xlabel="MB", xlim=(0, 11))
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main(claim, judge)
