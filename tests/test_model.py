"""Smooth-SwiGLU and the GPT: mathematics, families, sampling, start-up rules."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import fp8gpt
from data.bench import flops_per_token
from data.infer import generate
from fp8gpt import FP32, GPT, RECIPES, FP8Linear, GPTConfig, SwiGLU, dequantize, end_step, quantize
from train import param_groups

IDENTITY = replace(RECIPES["bf16"], name="fp32", x_fmt=FP32, w_fmt=FP32, g_fmt=FP32)
TINY = dict(vocab_size=100, block_size=32, n_layer=2, n_head=4, n_embd=64)


def tiny(**changes):
    torch.manual_seed(0)
    return GPT(GPTConfig(**TINY | changes))


def tokens(B=4, T=32, seed=0):
    x = torch.randint(100, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    return x[:, :-1], x[:, 1:]


# Smooth-SwiGLU -----------------------------------------------------------------------------------


@pytest.mark.parametrize("smooth", ["channel", "token"])
def test_with_the_casts_left_out_smoothing_changes_no_bit(smooth):
    mlps = [SwiGLU(32, 48, IDENTITY, smooth=s) for s in (None, smooth)]
    mlps[1].load_state_dict(mlps[0].state_dict())
    results = []
    for mlp in mlps:
        x = (torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(3)) * 8).requires_grad_()
        y = mlp(x)
        (y * torch.linspace(-1, 1, 32)).sum().backward()
        results.append((y, x.grad, mlp.w12.weight.grad, mlp.w3.weight.grad))
    assert all(map(torch.equal, *results))


def test_plain_swiglu_is_the_three_lines():
    mlp, x = SwiGLU(16, 24, IDENTITY), torch.randn(5, 16)
    w1, w2 = mlp.w12.weight.chunk(2)
    y = (x @ w1.t() * F.silu(x @ w2.t())) @ mlp.w3.weight.t()
    torch.testing.assert_close(mlp(x), y)


def test_known_answer_of_token_smoothing(monkeypatch):
    mlp, seen = SwiGLU(3, 3, IDENTITY, smooth="token"), {}
    mlp.w12.weight.data.copy_(torch.cat((torch.diag(torch.tensor([1.0, -4, 2])), torch.eye(3))))
    mlp.w12.weight.data[3:] = torch.diag(torch.tensor([1.0, 2, -1]))
    mlp.w3.register_forward_hook(lambda m, args, y: seen.update(z=args[0], y=y))
    mlp.w3.weight.data.copy_(torch.eye(3))
    y = mlp(torch.ones(1, 3))
    torch.testing.assert_close(
        seen["z"], torch.tensor([[0.1828, -1.7616, -0.1345]]), atol=1e-4, rtol=0
    )
    torch.testing.assert_close(y, torch.tensor([[0.7311, -7.0464, -0.5379]]), atol=1e-4, rtol=0)


def with_outlier(smooth, recipe="current", factor=2.0**17):
    """One channel of h is `factor` times larger and w3 makes up for it: the same function."""
    torch.manual_seed(0)
    mlp = SwiGLU(64, 96, recipe, smooth=smooth)
    mlp.w12.weight.data[5] *= factor
    mlp.w3.weight.data[:, 5] /= factor
    return mlp


def test_an_outlier_channel_ruins_a_tensor_scale_and_channel_smoothing_cures_it():
    x = torch.randn(256, 64)
    h_error = {}
    for smooth in (None, "channel"):
        mlp, caught = with_outlier(smooth), {}
        mlp.w3.register_forward_hook(
            lambda m, args, kwargs, y, c=caught: c.update(h=args[0], s=kwargs.get("fold", None)),
            with_kwargs=True,
        )
        mlp(x)
        h = caught["h"] if caught["s"] is None else caught["h"] / caught["s"]
        x8 = quantize(h)
        others = torch.arange(96) != 5
        relative = ((dequantize(x8) - h)[:, others]).norm() / h[:, others].norm()
        h_error[smooth] = relative.item()
    assert h_error[None] > 0.5 and h_error["channel"] < 0.05


def test_channel_smoothing_reads_the_unfolded_w3_in_dgrad():
    """Folded, w3's small columns underflow under one scale, and dh of those channels is lost."""
    torch.manual_seed(0)
    layer = FP8Linear(64, 32, False, "current")
    fold = 2.0 ** torch.linspace(-12, 12, 64).round()
    h = torch.randn(128, 64) * fold
    g = torch.randn(128, 32)
    h.requires_grad_()
    y = layer(h, fold=fold)
    y.backward(g)
    true = g @ layer.weight
    error = ((h.grad - true).norm(dim=0) / true.norm(dim=0)).max()
    assert error < 0.25
    w8 = quantize(layer.weight.detach() * fold)
    folded = (g @ dequantize(w8)) / fold
    assert ((folded - true).norm(dim=0) / true.norm(dim=0)).max() > 0.9
    dw = layer.weight.grad
    assert ((dw - g.t() @ h.detach()).norm(dim=0) / (g.t() @ h.detach()).norm(dim=0)).max() < 0.25


@pytest.mark.parametrize("smooth", ["channel", "token"])
def test_a_dead_channel_or_token_is_no_division_by_zero(smooth):
    mlp = SwiGLU(16, 32, "current", smooth=smooth)
    mlp.w12.weight.data[3] = 0
    x = torch.randn(8, 16)
    x[2] = 0
    y = mlp(x.requires_grad_())
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all() and not y[2].any()


@pytest.mark.parametrize("smooth", [None, "channel", "token"])
@pytest.mark.parametrize("shape", [(0, 16), (16,), (2, 1, 16)])
def test_swiglu_takes_any_rank_and_no_tokens(smooth, shape):
    assert SwiGLU(16, 32, "current", smooth=smooth)(torch.randn(shape)).shape == shape


def test_delayed_scaling_keeps_the_history_of_the_folded_w3():
    mlp = with_outlier("channel", "delayed")
    mlp(torch.randn(16, 64)).sum().backward()
    end_step(mlp)
    folded_h_amax = mlp.w3.amax_history[0, 0].item()
    assert folded_h_amax <= 1  # |h / s| is at most 1


def test_w3_can_stay_bf16():
    model = tiny(w3="bf16", recipe="current")
    assert {b.mlp.w3.recipe.name for b in model.blocks} == {"bf16"}
    assert {b.mlp.w12.recipe.name for b in model.blocks} == {"current"}


# GPT ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_recipe_learns_in_both_families(family, recipe):
    model = tiny(family=family, recipe=recipe)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    x, y = tokens()
    first = None
    for _ in range(8):
        loss = model(x, y)[1]
        first = first or loss.item()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        end_step(model)
    assert loss.item() < first - 0.15


def test_gpt2_is_gpt2():
    """Against a plain re-telling of GPT-2's block: LayerNorm, learned positions, GELU, biases."""
    model = tiny(family="gpt2", recipe=IDENTITY)
    x, y = tokens()
    p = dict(model.named_parameters())
    h = p["wte.weight"][x] + p["wpe.weight"][:32]
    for i in range(2):
        b = {
            k.removeprefix(f"blocks.{i}."): v for k, v in p.items() if k.startswith(f"blocks.{i}.")
        }
        n = F.layer_norm(h, (64,), b["norm1.weight"], b["norm1.bias"])
        qkv = n @ b["attn.wqkv.weight"].t() + b["attn.wqkv.bias"]
        q, k, v = (t.view(4, 32, 4, 16).transpose(1, 2) for t in qkv.chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) / 4).masked_fill(torch.ones(32, 32).triu(1).bool(), -1e9)
        a = (scores.softmax(-1) @ v).transpose(1, 2).reshape(4, 32, 64)
        h = h + a @ b["attn.wo.weight"].t() + b["attn.wo.bias"]
        n = F.layer_norm(h, (64,), b["norm2.weight"], b["norm2.bias"])
        n = F.gelu(n @ b["mlp.w1.weight"].t() + b["mlp.w1.bias"], approximate="tanh")
        h = h + n @ b["mlp.w3.weight"].t() + b["mlp.w3.bias"]
    h = F.layer_norm(h, (64,), p["norm.weight"], p["norm.bias"])
    logits = (h @ p["wte.weight"].t())[..., :100]
    # the head is a bf16 linear, so its operands are rounded to 8 bits of mantissa
    torch.testing.assert_close(model(x, y)[0], logits, atol=0.02, rtol=0.02)


def test_llama_attention_sees_relative_positions_only_and_nothing_ahead():
    model = tiny(recipe=IDENTITY, n_kv_head=2)
    x, y = tokens()
    logits = model(x, y)[0]
    changed = x.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 100
    again = model(changed, y)[0]
    assert torch.equal(logits[:, :20], again[:, :20]) and not torch.equal(logits, again)
    q, k = torch.randn(2, 1, 1, 1, 16)
    dots = []
    for shift in (0, 7):
        cos, sin = model.rope[:, 3 + shift], model.rope[:, 9 + shift]
        rq, rk = (
            fp8gpt.rotate(q, *model.rope[:, 3 + shift]),
            fp8gpt.rotate(k, *model.rope[:, 9 + shift]),
        )
        dots.append((rq * rk).sum())
        assert cos.shape == sin.shape
    torch.testing.assert_close(dots[0], dots[1])


def test_grouped_queries_equal_repeated_keys():
    few, many = tiny(n_kv_head=1, recipe=IDENTITY), tiny(n_kv_head=4, recipe=IDENTITY)
    state = few.state_dict()
    for name in list(state):
        if name.endswith("wqkv.weight"):
            q, k, v = state[name].split([64, 16, 16])
            state[name] = torch.cat([q, k.repeat(4, 1), v.repeat(4, 1)])
    many.load_state_dict(state)
    x, y = tokens()
    torch.testing.assert_close(few(x, y)[0], many(x, y)[0], atol=1e-5, rtol=1e-5)


def test_a_tied_head_is_one_parameter_with_both_gradients_decayed_once():
    model = tiny(family="gpt2", head="fp8", recipe="current")
    assert model.lm_head.weight is model.wte.weight
    assert model.lm_head.recipe.name == "current"
    names = [n for n, _ in model.named_parameters()]
    assert sum("wte" in n or "lm_head" in n for n in names) == 1
    groups = param_groups(model, 0.1)
    assert sum(p is model.wte.weight for g in groups for p in g["params"]) == 1
    assert (
        any(p is model.wte.weight for p in groups[1]["params"]) and groups[1]["weight_decay"] == 0
    )
    x, y = tokens()
    model(x, y)[1].backward()
    lookup = torch.unique(x)
    absent = [i for i in range(100) if i not in lookup]
    grad = model.wte.weight.grad
    assert grad[lookup].abs().sum() > 0 and (not absent or grad[absent].abs().sum() > 0)
    copy = tiny(family="gpt2", head="fp8", recipe="current")
    copy.load_state_dict(model.state_dict())
    assert copy.lm_head.weight is copy.wte.weight
    assert torch.equal(model.wte(x), model.wte.weight[x])  # the lookup is not quantised


@pytest.mark.parametrize("vocab_size", [50257, 50304, 100])
@pytest.mark.parametrize("head", ["bf16", "fp8"])
def test_padded_ids_have_no_probability_no_gradient_and_are_never_sampled(vocab_size, head):
    model = GPT(GPTConfig(vocab_size, 16, 1, 2, n_embd=32, head=head))
    assert model.wte.num_embeddings % 64 == 0
    with torch.no_grad():
        model.lm_head.weight[vocab_size:] = 50.0  # would win if it were looked at
    x, y = torch.randint(vocab_size, (2, 2, 16)).unbind()
    logits, loss = model(x, y)
    loss.backward()
    assert logits.shape == (2, 16, vocab_size)
    assert not model.lm_head.weight.grad[vocab_size:].any()
    assert generate(model, x[:1, :2], 20, temperature=5.0).max() < vocab_size


def test_first_and_last_blocks_and_the_head_follow_the_rule():
    model = tiny(n_layer=5, bf16_first=1, bf16_last=2, recipe="mxfp8")
    names = [b.attn.wqkv.recipe.name for b in model.blocks]
    assert (
        names == ["bf16", "mxfp8", "mxfp8", "bf16", "bf16"] and model.lm_head.recipe.name == "bf16"
    )


def test_loss_ignores_minus_one_and_only_the_last_position_is_computed_without_targets():
    model = tiny(recipe="current")
    x, y = tokens()
    y = y.clone()
    y[:, 5:] = -1
    loss = model(x, y)[1]
    expected = F.cross_entropy(model(x, y)[0][:, :5].flatten(0, 1), y[:, :5].flatten())
    torch.testing.assert_close(loss, expected)
    logits, none = model(x)
    assert logits.shape == (4, 1, 100) and none is None


def test_generate_is_greedy_at_zero_keeps_to_top_k_and_slides_over_the_block():
    model = tiny(recipe="rowwise")
    x, _ = tokens(1, 32)
    greedy = generate(model, x, 5, temperature=0)
    assert greedy.shape == (1, 37) and torch.equal(greedy, generate(model, x, 5, temperature=0))
    assert torch.equal(generate(model, x, 5, top_k=1), greedy)
    assert generate(model, x[:, :1], 1).shape == (1, 2)
    assert all(m.w_cast is None for m in model.modules() if isinstance(m, FP8Linear))
    torch.manual_seed(1)
    logits = model(x)[0][0, -1]
    allowed = set(logits.topk(3).indices.tolist())
    samples = {generate(model, x, 1, top_k=3)[0, -1].item() for _ in range(30)}
    assert samples <= allowed and len(samples) > 1


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
@pytest.mark.parametrize("smooth", [None, "channel"])
def test_activation_checkpointing_changes_no_bit(recipe, smooth):
    results = []
    for recompute in (False, True):
        model = tiny(recipe=recipe, checkpoint=recompute, smooth=smooth)
        for i in range(3):
            loss = model(*tokens(seed=i))[1]
            loss.backward()
            end_step(model)
        histories = [b for n, b in model.named_buffers() if "amax" in n]
        results.append([loss, *(p.grad for p in model.parameters()), *histories])
    assert all(map(torch.equal, *results))


def test_counts_of_parameters_and_flops():
    model = tiny(hidden=96)
    per_block = 4 * 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert model.num_params() == 2 * 128 * 64 + 2 * per_block + 64
    assert flops_per_token(model, 10) == 6 * (model.num_params() - 128 * 64) + 12 * 2 * 64 * 10
    gpt2 = GPTConfig(50257, 1024, 12, 12, n_embd=768, family="gpt2")
    with torch.device("meta"):
        n = GPT(gpt2).num_params()
    assert (
        n == 124_439_808 + (50304 - 50257) * 768
    )  # GPT-2 small, and the padding of its vocabulary


@pytest.mark.parametrize(
    "wrong",
    [dict(n_embd=65), dict(n_head=3), dict(n_kv_head=3), dict(n_embd=60, n_head=4), dict(n_layer=0)]
    + [dict(family="bert"), dict(smooth="row"), dict(w3="fp8"), dict(head="yes")]
    + [dict(family="gpt2", smooth="token"), dict(recipe="mxfp9"), dict(vocab_size=0)]
    + [dict(hidden=0), dict(n_kv_head=0)],
)
def test_impossible_configurations_are_refused_with_a_sentence(wrong):
    with pytest.raises(ValueError):
        GPTConfig(**TINY | wrong)


def test_too_many_tokens_and_none_are_refused():
    model = tiny()
    for T in (0, 33):
        with pytest.raises(ValueError, match="tokens"):
            model(torch.zeros(1, T, dtype=torch.long))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_a_whole_block_compiles_into_one_graph(recipe):
    torch._dynamo.reset()
    losses = []
    for compiled in (False, True):
        model = tiny(recipe=recipe, smooth="channel", n_layer=1)
        if compiled:
            for block in model.blocks:
                block.compile(fullgraph=True, backend="aot_eager")
        for i in range(3):
            loss = model(*tokens(seed=i))[1]
            loss.backward()
            end_step(model)
        losses.append(loss)
    assert torch.equal(*losses)
