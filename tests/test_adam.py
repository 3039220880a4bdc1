"""FP8 Adam against torch.optim.AdamW, torchao's AdamWFp8, and answers worked out by hand."""

import copy

import pytest
import torch

from fp8gpt import E4M3, E5M2, GPT, FP8Adam, GPTConfig, decode, dequantize, quantize
from train import param_groups

FORMATS = [(E4M3, E5M2), (E4M3, E4M3), (E5M2, E5M2)]


def parameter(*values):
    return torch.nn.Parameter(torch.tensor(values, dtype=torch.float32))


def run(optimizer, p, gradients):
    """Steps with these gradients -> the update of every step."""
    updates = []
    for g in gradients:
        before = p.detach().clone()
        p.grad = torch.as_tensor(g, dtype=torch.float32).expand_as(p).clone()
        optimizer.step()
        updates.append(p.detach() - before)
    return updates


def test_known_codes_after_the_first_step():
    p = parameter(0, 0, 0, 0, 0)
    optimizer = FP8Adam([p], betas=(0.9, 0.999))
    run(optimizer, p, [[1, -0.5, 0.25, 0.01, 0]])
    state = optimizer.state[p]
    assert state["m"].view(torch.uint8).flatten().tolist() == [0x7E, 0xF6, 0x6E, 0x49, 0x00]
    assert state["v"].view(torch.uint8).flatten().tolist() == [0x7B, 0x73, 0x6B, 0x46, 0x00]


@pytest.mark.parametrize("block", [None, 4, 256])
def test_the_first_step_is_adamw_and_storage_is_one_byte(block):
    p, q = parameter(*torch.randn(1000)), None
    q = parameter(*p.tolist())
    ours = FP8Adam([p], 1e-2, (0.9, 0.95), 1e-8, 0.1, block=block)
    theirs = torch.optim.AdamW([q], 1e-2, (0.9, 0.95), 1e-8, 0.1, fused=True)
    g = torch.randn(1000)
    assert torch.equal(run(ours, p, [g])[0], run(theirs, q, [g])[0])
    state = ours.state[p]
    assert state["m"].dtype is E4M3.dtype and state["v"].dtype is E5M2.dtype
    assert state["m"].numel() == state["v"].numel() == 1000
    scales = 1 if block is None else -(-1000 // block)
    assert state["m_scale"].numel() == state["v_scale"].numel() == scales


@pytest.mark.parametrize("m_fmt, v_fmt", FORMATS)
@pytest.mark.parametrize("block", [None, 16])
def test_a_step_is_decode_adamw_encode(m_fmt, v_fmt, block):
    """Re-told with torch's AdamW on explicitly decoded moments, for three steps."""
    p = torch.nn.Parameter(torch.randn(6, 10))
    q = torch.nn.Parameter(p.detach().clone())
    ours = FP8Adam([p], 1e-2, m_fmt=m_fmt, v_fmt=v_fmt, block=block)
    theirs = torch.optim.AdamW([q], 1e-2, fused=True)
    for _ in range(3):
        g = torch.randn(6, 10)
        run(ours, p, [g])
        run(theirs, q, [g])
        assert torch.equal(p, q)
        state = theirs.state[q]
        for name, fmt in (("exp_avg", m_fmt), ("exp_avg_sq", v_fmt)):
            x8 = quantize(state[name].view(1, -1), fmt, (None, block))
            y = dequantize(x8)
            if name == "exp_avg_sq":  # code 1 instead of 0
                q8 = x8.q.view(torch.uint8).clone()
                q8[(q8 == 0) & (state[name].view(1, -1) > 0)] = 1
                y = dequantize(x8._replace(q=q8.view(fmt.dtype)))
            state[name].copy_(y.view(6, 10))


def test_scales_of_256_blocks_equal_torchaos():
    from torchao.optim.subclass_fp8 import quantize_fp8

    x = torch.randn(4096) * 1e-3
    codes, scale = quantize_fp8(x, 256)
    ours = quantize(x.view(1, -1), E4M3, (None, 256))
    torch.testing.assert_close(ours.s.flatten(), scale.flatten(), rtol=2**-22, atol=0)
    # it divides by its scale, we multiply by the reciprocal: a tie may fall the other way
    assert (ours.q.flatten().view(torch.uint8) != codes.flatten().view(torch.uint8)).sum() <= 4


@pytest.mark.parametrize("v_fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_a_vanishing_gradient_makes_no_huge_step(v_fmt):
    """Beside one large gradient the others vanish after 3 steps. fp32 AdamW's largest step is
    1.75 lr here; without the code-1 rule it would be 700 lr in E5M2 and 70,000 lr in E4M3."""
    gradients = [[1.0] + [1e-4] * 15] * 3 + [[1.0] + [0.0] * 15] * 40
    largest = {}
    for name in ("fp32", "fp8"):
        p = parameter(*[0.0] * 16)
        if name == "fp8":
            optimizer = FP8Adam([p], 1.0, weight_decay=0, v_fmt=v_fmt)
        else:
            optimizer = torch.optim.AdamW([p], 1.0, weight_decay=0)
        updates = run(optimizer, p, gradients)
        largest[name] = max(u.abs().max().item() for u in updates)
    assert largest["fp8"] < 2 * largest["fp32"]


def test_a_positive_v_never_becomes_zero_and_a_zero_stays_zero():
    p = parameter(0, 0, 0)
    optimizer = FP8Adam([p])
    run(optimizer, p, [[1e3, 1e-12, 0]])
    assert optimizer.state[p]["v"].view(torch.uint8).flatten().tolist() == [0x7B, 1, 0]


def test_round_to_nearest_stalls_a_slow_average_and_stochastic_rounding_does_not():
    """v climbs from 0 towards 0.25 beside an element that stands at 1, beta2 = 0.999, E4M3: after
    2000 steps 0.216 is right. To nearest, it stops where (1 - beta2) is half a step: at 0.0045."""
    reached = {}
    for stochastic in (False, True):
        p = torch.nn.Parameter(torch.zeros(400))
        optimizer = FP8Adam([p], v_fmt=E4M3, stochastic_rounding=stochastic)
        state = optimizer.state[p]
        state |= optimizer.blank(p)
        start = torch.zeros(1, 400)
        start[0, 0] = 1
        state["v"], state["v_scale"] = quantize(start)[:2]
        g = torch.full((400,), 0.5)
        g[0] = 1
        run(optimizer, p, [g] * 2000)
        reached[stochastic] = (decode(state["v"]) * state["v_scale"])[0, 1:].mean().item()
    assert reached[False] == pytest.approx(0.0045, rel=0.1)
    assert reached[True] == pytest.approx(0.216, rel=0.05)


def gpt(**changes):
    torch.manual_seed(0)
    return GPT(GPTConfig(64, 16, 1, 2, n_embd=32, recipe="current", **changes))


def train(model, optimizer, steps, start=0):
    for i in range(start, start + steps):
        x = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(i))
        loss = model(x[:, :-1], x[:, 1:])[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("kind", [{}, dict(block=32, stochastic_rounding=True), dict(v_fmt=E4M3)])
def test_state_dict_round_trip_is_bit_for_bit_and_so_is_the_next_step(kind, tmp_path):
    a = gpt()
    one = FP8Adam(param_groups(a, 0.1), 1e-3, **kind)
    train(a, one, 10)
    torch.save([a.state_dict(), one.state_dict(), torch.get_rng_state()], tmp_path / "s.pt")
    model_state, state, rng = torch.load(tmp_path / "s.pt", weights_only=True)
    b = gpt()
    two = FP8Adam(param_groups(b, 0.1), 1e-3, **kind)
    b.load_state_dict(model_state)
    two.load_state_dict(state)
    for p, q in zip(a.parameters(), b.parameters()):
        for k, t in one.state[p].items():
            assert two.state[q][k].dtype is t.dtype
            assert two.state[q][k].equal(t) if t.itemsize > 1 else (
                two.state[q][k].view(torch.uint8).equal(t.view(torch.uint8))
            )  # fmt: skip
    train(a, one, 1, 10)
    torch.set_rng_state(rng)
    train(b, two, 1, 10)
    assert all(map(torch.equal, a.parameters(), b.parameters()))


def test_the_state_of_another_optimizer_format_or_block_is_refused_and_nothing_is_loaded():
    model = gpt()
    adamw = torch.optim.AdamW(param_groups(model, 0.1), 1e-3)
    train(model, adamw, 1)
    fp8 = FP8Adam(param_groups(model, 0.1), 1e-3)
    train(model, fp8, 1)
    for state, kind in (
        (adamw.state_dict(), {}),
        (fp8.state_dict(), dict(v_fmt=E4M3)),
        (fp8.state_dict(), dict(block=64)),
    ):
        fresh = FP8Adam(param_groups(model, 0.1), 1e-3, **kind)
        with pytest.raises(ValueError, match="another optimizer, format or block"):
            fresh.load_state_dict(copy.deepcopy(state))
        assert not fresh.state


@pytest.mark.parametrize("master, codes", [("fp16", 2**16), ("fp8", 2**8)])
def test_low_precision_masters_keep_parameters_on_their_grid(master, codes):
    model = gpt()
    optimizer = FP8Adam(param_groups(model, 0.1), 1e-3, master=master)
    train(model, optimizer, 3)
    w = model.blocks[0].mlp.w12.weight.detach()
    assert len(w.unique()) < codes
    if master == "fp8":
        assert len(w.unique()) < 256
    with pytest.raises(ValueError, match="master"):
        FP8Adam(model.parameters(), master="fp4")


def test_groups_decay_matrices_only():
    model = GPT(GPTConfig(64, 16, 1, 2, n_embd=32, family="gpt2"))
    decayed, rest = param_groups(model, 0.1)
    names = {id(p): n for n, p in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1 and rest["weight_decay"] == 0
    assert all(names[id(p)].split(".")[-2] in ("wqkv", "wo", "w1", "w3") for p in decayed["params"])
    assert all(p.dim() == 2 for p in decayed["params"])
    both = decayed["params"] + rest["params"]
    assert len({id(p) for p in both}) == len(both) == len(list(model.parameters()))


# Measured, mean of the last 50 losses: 0.0644 with AdamW, 0.0640 to 0.0643 with FP8 Adam; with
# another seed 0.0694 and 0.0694 to 0.0711.
LOSS_GAP = 0.01


def test_500_steps_end_near_adamw():
    losses = []
    for optimizer_class in (torch.optim.AdamW, FP8Adam):
        model = gpt()
        optimizer = optimizer_class(param_groups(model, 0.1), 2e-3, (0.9, 0.95))
        text = torch.arange(100_000) ** 2 % 61  # a sequence that can be learnt
        total = 0.0
        for i in range(500):
            at = torch.randint(99_000, (8,), generator=torch.Generator().manual_seed(i))
            x = text[at[:, None] + torch.arange(17)]
            loss = model(x[:, :-1], x[:, 1:])[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() / 50 if i >= 450 else 0
        losses.append(total)
    assert abs(losses[1] - losses[0]) < LOSS_GAP, losses


def test_closures_frozen_empty_and_foreign_parameters():
    p, frozen, empty = parameter(1, 2), parameter(1), torch.nn.Parameter(torch.empty(0, 3))
    empty.grad = torch.empty(0, 3)
    optimizer = FP8Adam([p, frozen, empty], 0.1)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 5 and p[0] < 1 and frozen.item() == 1
    FP8Adam([p, frozen, empty]).load_state_dict(optimizer.state_dict())
    half = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    half.grad = torch.ones_like(half)
    with pytest.raises(ValueError, match="fp32"):
        FP8Adam([half]).step()
    strided = torch.nn.Parameter(torch.randn(6, 4).t())
    plain = torch.nn.Parameter(strided.detach().clone(memory_format=torch.contiguous_format))
    g = torch.randn(4, 6)
    for q in (strided, plain):
        q.grad = g.clone()
        FP8Adam([q], 0.1).step()
    torch.testing.assert_close(strided, plain)
