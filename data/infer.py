"""A trained model at work: text, post-training quantisation, static scales, smoothing absorbed.

Weights are cast once (`weights_cast`). An activation's scale is *dynamic*, from the amax of what
passes, or *static*, from the amax that a few batches showed: for that it is what delayed scaling
reads in evaluation, a history that nobody writes any more. Tiles of rows and blocks are dynamic.
"""

import math
from dataclasses import replace

import torch

from data.prepare import get_tokenizer
from data.report import print_table
from fp8gpt import GPT, SwiGLU, end_step, fold_of

ENOUGH = 0.995  # of BF16's accuracy: the criterion of arXiv 2309.17224


@torch.no_grad()
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, cached=True):
    """Continue idx (B, T >= 1) by sampling; temperature 0 takes the likeliest token. Keys and
    values of past tokens are cached, until the context is full: then it slides, and with it every
    position, so each token needs the whole window again."""
    size, cache, new = model.config.block_size, None, idx
    with model.weights_cast():
        for _ in range(max_new_tokens):
            if not cached or cache is None or idx.shape[1] > size:
                cache, new = [[] for _ in model.blocks], idx[:, -size:]
            logits = model(new, cache=cache)[0][:, -1]  # (B, vocab)
            if top_k:
                kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                new = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1)
            idx = torch.cat((idx, new), dim=1)
    return idx


def write_text(model, tokenizer, seed, args):
    """Text after the prompt args.sample: args.tokens more, at args.temperature."""
    encoding = get_tokenizer(tokenizer)
    ids = encoding.encode_ordinary(args.sample or "\n")
    torch.manual_seed(seed)
    model.eval()
    with torch.compiler.set_stance("force_eager"):  # else every length would be compiled
        idx = torch.tensor([ids], device=model.wte.weight.device)
        sharded = hasattr(model, "set_requires_gradient_sync")  # FSDP hands lists on as copies
        idx = generate(model, idx, args.tokens, args.temperature, top_k=50, cached=not sharded)
    return encoding.decode(idx[0].tolist())


@torch.no_grad()
def score(model, batches):
    """Batches of (x, y), each (B, T) -> (mean loss in nats a token, the share of next tokens that
    are the likeliest to the model)."""
    model.eval()
    with model.weights_cast():
        found = []
        for x, y in batches:
            logits, loss = model(x, y)
            found.append(torch.stack((loss.double(), (logits.argmax(-1) == y).double().mean())))
    model.train()
    return torch.stack(found).mean(0).tolist()


# ------------------------------------------------------------------------------------------------
# Static scales


def whole(recipe):
    return {recipe.x_tile, recipe.w_tile} == {(None, None)} and recipe.name != "bf16"


def static(config):
    """The configuration with static activation scales, for `calibrate` to fill."""
    return replace(config, recipe=replace(config.recipe, amax="history"))


def calibrate(model, batches):
    """Fill the amax histories of a model, and nothing else, with what these batches show."""
    for name, history in model.named_buffers():
        if name.endswith("amax_history"):
            history.zero_()
    with torch.enable_grad():  # else a history is only read
        for x, y in batches:
            model.train()(x, y)
            end_step(model)


def calibrated(model):
    """Whether every amax history holds something."""
    histories = [b for name, b in model.named_buffers() if name.endswith("amax_history")]
    return all((h[0, :2] > 0).all() for h in histories)


@torch.no_grad()
def absorb(model, batches):
    """The same function without Smooth-SwiGLU: w1 and w3 take up the largest fold of each channel
    in these batches. Powers of two: outside FP8 not one bit of an output changes."""
    folds, hooks = {}, []

    def look(mlp, args, output):
        up, gate = mlp.w12(args[0]).float().chunk(2, dim=-1)
        fold = fold_of(up, gate, "channel")[0]
        folds[mlp] = torch.maximum(folds[mlp], fold) if mlp in folds else fold

    if model.config.smooth == "channel":
        hooks = [m.register_forward_hook(look) for m in model.modules() if isinstance(m, SwiGLU)]
    for x, y in batches if hooks else ():
        model.eval()(x, y)
    for hook in hooks:
        hook.remove()
    plain = GPT(replace(model.config, smooth=None)).to(model.wte.weight.device)
    plain.load_state_dict(model.state_dict())
    for old, new in zip(model.blocks, plain.blocks):
        if old.mlp in folds:
            up = new.mlp.w12.weight[: model.config.hidden]
            up /= folds[old.mlp][:, None]
            new.mlp.w3.weight *= folds[old.mlp]
    return plain


# ------------------------------------------------------------------------------------------------
# Post-training quantisation


def post_training(source, configs, held_out, calibration):
    """A table: every recipe on the same weights beside BF16.

    source       of data/convert.py; configs {recipe: GPTConfig}, "bf16" among them
    held_out     -> batches to score; calibration -> batches to calibrate static scales, or none
    """
    device = next(iter(held_out()))[0].device
    rows = ["recipe|activations|val loss|perplexity|differs|accuracy|of bf16's".split("|")]
    base, below = None, []
    for name, config in sorted(configs.items(), key=lambda item: item[0] != "bf16"):
        kinds = [(config, "dynamic" if name != "bf16" else "-")]
        if config.recipe.amax == "constant":
            kinds = [(config, "constant")]
        elif whole(config.recipe) and config.recipe.amax == "now" and any(calibration()):
            kinds.append((static(config), "static"))
        for config, how in kinds:
            model = GPT(config).to(device)
            source.fill(model, pin=name == source.fields["recipe"] and how != "static")
            if config.recipe.amax == "history":
                own = how != "static" and calibrated(model)
                how = "static, the run's" if own else "static"
                if not own:
                    calibrate(model, calibration())
            loss, accuracy = score(model, held_out())
            base = base or (loss, accuracy)
            part = accuracy / base[1] if base[1] else math.nan
            perplexity = math.exp(loss) if loss < 700 else math.inf
            row = [name, how, f"{loss:.4f}", f"{perplexity:.3f}", f"{loss - base[0]:+.4f}"]
            rows.append([*row, f"{accuracy:.2%}", f"{part:.2%}"])
            below += [f"{name} ({how})"] if part < ENOUGH else []
    print_table(rows)
    verdict = f"all but {', '.join(below)} keep" if below else "all keep"
    print(f"\n{verdict} {ENOUGH:.1%} of BF16's accuracy, the criterion of arXiv 2309.17224")
