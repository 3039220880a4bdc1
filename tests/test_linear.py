"""The FP8 linear: three GEMMs against float64, torchao's layers, delayed state, everyday use."""

from dataclasses import replace

import pytest
import torch
import torch.nn as nn
from conftest import some
from torch.utils.checkpoint import checkpoint

import fp8gpt
from fp8gpt import (
    BF16,
    E4M3,
    E5M2,
    FP32,
    RECIPES,
    FP8Linear,
    Recipe,
    choose_backend,
    dequantize,
    end_step,
    gemm_nt,
    quantize,
    quantize_operand,
    weights_cast,
)

ALL = list(RECIPES.values())
FP8_RECIPES = [r for r in ALL if r.name != "bf16"]
# Emulation adds in fp32, float64 exactly; relative to the largest element, K <= 300.
FP32_SUM = 1e-6


def by_name(recipe):
    return recipe.name


def exact_gemm(a8, b8):
    """float64, as numerics go: bare codes where scales leave the sum, else decoded operands."""
    if a8.tile[1] is None and b8.tile[1] is None:
        return (a8.q.double() @ b8.q.double().t()) * a8.s.double() * b8.s.double().t()
    return dequantize(a8).double() @ dequantize(b8).double().t()


def close(ours, exact, tolerance=FP32_SUM):
    return ((ours.double() - exact).abs().max() / exact.abs().max()).item() <= tolerance


SHAPES = [(1, 1, 1), (3, 17, 5), (8, 32, 15), (33, 160, 31), (40, 300, 130), (16, 128, 256)]


@pytest.mark.parametrize("recipe", ALL, ids=by_name)
@pytest.mark.parametrize("M, K, N", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_y_dx_dw_and_db_equal_float64(recipe, M, K, N, bias):
    layer = FP8Linear(K, N, bias, recipe)
    x = torch.randn(M, K, requires_grad=True)
    g = torch.randn(M, N) * 1e-4
    y = layer(x)
    y.backward(g)
    x8, x8_t = quantize_operand(x.detach(), "x", recipe)
    w8, w8_t = quantize_operand(layer.weight.detach(), "w", recipe)
    g8, g8_t = quantize_operand(g, "g", recipe)
    b = layer.bias.double() if bias else 0
    assert close(y, exact_gemm(x8, w8) + b)
    assert close(x.grad, exact_gemm(g8, w8_t))
    assert close(layer.weight.grad, exact_gemm(g8_t, x8_t))
    assert layer.weight.grad.dtype is torch.float32
    if bias:
        assert close(layer.bias.grad, g.double().sum(0))


@pytest.mark.parametrize("recipe", ALL, ids=by_name)
def test_the_error_against_nn_linear_is_that_of_the_format(recipe):
    """A plain linear is the truth here: no part of ours takes part in it."""
    layer, x = FP8Linear(256, 128, True, recipe), torch.randn(64, 256, requires_grad=True)
    plain, x2 = nn.Linear(256, 128), x.detach().clone().requires_grad_()
    plain.load_state_dict({k: layer.state_dict()[k] for k in ("weight", "bias")})
    g = torch.randn(64, 128)
    y, y2 = layer(x), plain(x2)
    y.backward(g)
    y2.backward(g)

    def sqnr(a, b):
        return 10 * torch.log10(b.square().sum() / (a - b).square().sum()).item()

    forward, backward = (
        (45, 45) if recipe.name == "bf16" else (26, 22 if recipe.g_fmt is E5M2 else 26)
    )
    if recipe.name == "constant":
        backward = 0 if RECIPES["constant"].bias[2] > 15 else backward  # g of 1 clips at 2^16
    assert sqnr(y, y2) > forward
    assert sqnr(x.grad, x2.grad) > backward
    assert sqnr(layer.weight.grad, plain.weight.grad) > backward


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=by_name)
def test_a_gemm_can_stay_in_high_precision(recipe, gemm):
    results = {}
    x, g, w = torch.randn(24, 96), torch.randn(24, 40) * 1e-3, torch.randn(40, 96)
    for name, r in (("bf16", "bf16"), ("fp8", recipe), ("mixed", replace(recipe, **{gemm: False}))):
        layer = FP8Linear(96, 40, False, r)
        layer.weight.data.copy_(w)
        xx = x.clone().requires_grad_()
        y = layer(xx)
        y.backward(g)
        results[name] = dict(fprop=y.detach(), dgrad=xx.grad, wgrad=layer.weight.grad)
        if recipe.amax == "history" and name == "mixed":
            assert bool((layer.amax_seen > 0).all())
    for part in ("fprop", "dgrad", "wgrad"):
        same_as = "bf16" if part == gemm else "fp8"
        assert torch.equal(results["mixed"][part], results[same_as][part])
    assert not torch.equal(results["fp8"][gemm], results["bf16"][gemm])


@pytest.mark.parametrize("changes", [dict(x_fmt=BF16), dict(w_fmt=BF16), dict(g_fmt=BF16)])
@pytest.mark.parametrize("name", ["current", "blockwise"])
def test_one_operand_can_stay_bf16(changes, name):
    layer = FP8Linear(64, 48, False, replace(RECIPES[name], **changes))
    x, g = torch.randn(32, 64, requires_grad=True), torch.randn(32, 48) * 1e-4
    y = layer(x)
    y.backward(g)
    for ours, true in (
        (y, x @ layer.weight.t()),
        (x.grad, g @ layer.weight),
        (layer.weight.grad, g.t() @ x),
    ):
        assert (ours - true).norm() / true.norm() < 0.1


def test_groups_of_rows_can_share_a_scale():
    a8, b8 = quantize(torch.randn(10, 40), tile=(4, None)), quantize(torch.randn(6, 40))
    y = gemm_nt(a8, b8)
    assert close(y, dequantize(a8).double() @ dequantize(b8).double().t())


def test_an_fp32_recipe_is_nn_linear_bit_for_bit():
    recipe = replace(RECIPES["bf16"], x_fmt=FP32, w_fmt=FP32, g_fmt=FP32)
    layer, x = FP8Linear(40, 24, False, recipe), torch.randn(16, 40, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y, x @ layer.weight.t())
    assert torch.equal(layer.weight.grad, torch.ones(24, 16) @ x)


@pytest.mark.parametrize("name", ["rowwise", "mxfp8", "current"])
def test_whole_layers_equal_torchao(name):
    """torchao divides codes by its scale before the matmul, so tensor scales may differ in the last
    BF16 bit of a few elements; the others agree to the bit."""
    x = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
    x2 = x.detach().clone().requires_grad_()
    plain = nn.Linear(128, 96, bias=False, dtype=torch.bfloat16)
    ours = FP8Linear(128, 96, False, name)
    ours.weight.data.copy_(plain.weight.data)
    theirs = torchao_linear(plain, name)
    g = torch.randn(64, 96, dtype=torch.bfloat16)
    y, y2 = ours(x), theirs(x2)
    y.backward(g)
    y2.backward(g)
    pairs = [(y, y2), (x.grad, x2.grad), (ours.weight.grad.bfloat16(), theirs.weight.grad)]
    for a, b in pairs:
        assert a.dtype is b.dtype is torch.bfloat16
        different = (a != b).float().mean().item()
        assert different == 0 if name != "current" else different < 0.01


def torchao_linear(plain, name):
    if name == "mxfp8":
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
        from torchao.quantization.quantize_.common import KernelPreference

        theirs = MXFP8Linear(
            plain.in_features,
            plain.out_features,
            bias=False,
            dtype=plain.weight.dtype,
            kernel_preference=KernelPreference.EMULATED,
        )
        theirs.weight.data.copy_(plain.weight.data)
        return theirs
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    recipe = {"current": "tensorwise", "rowwise": "rowwise"}[name]
    config = Float8LinearConfig.from_recipe_name(recipe)
    return Float8Linear.from_float(plain, replace(config, emulate=True))


@pytest.mark.parametrize("name", ["constant", "amax", "delayed", "current", "rowwise"])
@pytest.mark.parametrize("M, K, N", [(32, 64, 48), (3, 17, 5), (40, 300, 130)])
def test_the_scaled_mm_path_equals_emulation(name, M, K, N):
    """On a CPU torch's scaled_mm accepts more than on CUDA: this proves padding and scales."""
    r = RECIPES[name]
    for a, i, b, j in (("x", 0, "w", 0), ("g", 0, "w", 1), ("g", 1, "x", 1)):
        shapes = {"x": (M, K), "w": (N, K), "g": (M, N)}
        a8 = quantize_operand(torch.randn(shapes[a]) * 1e-2, a, r)[i]
        b8 = quantize_operand(torch.randn(shapes[b]), b, r)[j]
        for dtype in (torch.float32, torch.bfloat16):
            fast = gemm_nt(a8, b8, dtype, "scaled_mm")
            tolerance = 2**-8 if dtype is torch.bfloat16 else FP32_SUM  # one BF16 rounding
            assert fast.dtype is dtype and close(fast, exact_gemm(a8, b8), tolerance)


WHERE = {  # compute capability -> where blockwise and mxfp8 multiply, with Triton
    (8, 0): ("emulated", "emulated"),
    (8, 9): ("triton", "triton, emulated"),
    (9, 0): ("triton", "triton, emulated"),
    (10, 0): ("triton", "triton"),
    (12, 0): ("triton", "triton"),
}


@pytest.mark.parametrize("capability", WHERE)
@pytest.mark.parametrize("has_triton", [True, False])
def test_the_backend_of_each_recipe_on_each_gpu(monkeypatch, capability, has_triton):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    spec = object() if has_triton else None
    monkeypatch.setattr(fp8gpt.importlib.util, "find_spec", lambda name: spec)

    def chosen(recipe):
        cast, gemm, why = choose_backend(recipe, torch.device("cuda"))
        if gemm == "triton" and "emulated here: right numbers, slower than BF16" in why:
            gemm += ", emulated"
        kernels = has_triton and capability >= (8, 9) and recipe.name != "bf16"
        assert gemm == "emulated" or cast == ("triton" if kernels else "torch")
        return gemm

    fast, slow = capability >= (8, 9), "emulated"
    for name in ("constant", "amax", "delayed", "current"):
        assert chosen(RECIPES[name]) == ("scaled_mm" if fast else slow)
    # cuBLAS writes wgrad's fp32 under row scales on Hopper only
    rows = "scaled_mm" if capability == (9, 0) else "triton" if fast and has_triton else slow
    assert chosen(RECIPES["rowwise"]) == rows
    blockwise, mxfp8 = WHERE[capability] if has_triton else (slow, slow)
    assert chosen(RECIPES["blockwise"]) == blockwise
    assert chosen(replace(RECIPES["blockwise"], w_tile=(1, 128))) == blockwise
    assert chosen(RECIPES["mxfp8"]) == mxfp8
    assert chosen(RECIPES["bf16"]) == slow
    # cuBLAS multiplies no E5M2 by E5M2; no kernel has a tile of 64 or a weight in BF16 blocks
    twice = replace(RECIPES["current"], x_fmt=E5M2)
    assert chosen(twice) == ("triton" if fast and has_triton else slow)
    assert chosen(replace(RECIPES["mxfp8"], x_tile=(1, 64))) == slow
    assert chosen(replace(RECIPES["blockwise"], w_fmt=BF16)) == slow
    assert chosen(replace(RECIPES["mxfp8"], rounding="fp32")) == slow


# Delayed scaling ---------------------------------------------------------------------------------


def step(layer, amax, keep=True, training=True):
    """One forward and backward with x of this amax -> the encode multiplier that x got."""
    used = []
    original = fp8gpt.quantize

    def spy(x, *args, **kwargs):
        x8 = original(x, *args, **kwargs)
        used.append(1 / x8.s.item() if x8.s.numel() == 1 else None)
        return x8

    layer.train(training)
    fp8gpt.quantize = spy
    try:
        layer(torch.full((4, layer.in_features), float(amax), requires_grad=True)).sum().backward()
    finally:
        fp8gpt.quantize = original
    end_step(layer, keep)
    return used[0]


@pytest.mark.parametrize(
    "algo, encodes, then",
    [("max", [448, 448, 112, 112, 112, 224], 448)]
    + [("most_recent", [448, 448, 112, 224, 448, 448], 448)],
)
def test_known_answers_of_delayed_scaling(algo, encodes, then):
    recipe = replace(RECIPES["delayed"], amax_history_len=3, amax_compute_algo=algo)
    layer = FP8Linear(8, 4, recipe=recipe)
    got = [step(layer, amax) for amax in (1, 4, 2, 1, 1, 1)]
    assert [round(e, 3) for e in got] == encodes
    assert round(step(layer, 7), 3) == then


@pytest.mark.parametrize("length", [1, 2, 16])
def test_a_jump_saturates_for_exactly_one_step(length):
    layer = FP8Linear(8, 4, recipe=replace(RECIPES["delayed"], amax_history_len=length))
    for _ in range(20):
        step(layer, 1)
    assert round(step(layer, 10)) == 448 and round(step(layer, 10), 2) == 44.8


def test_non_finite_and_zero_amax_never_enter_the_history():
    layer = FP8Linear(8, 4, recipe=replace(RECIPES["delayed"], amax_history_len=16))
    for amax in (1, 2, float("nan"), 3, 0, float("inf")):
        step(layer, amax)
    assert layer.amax_history[:3, 0].tolist() == [3, 2, 1] and not layer.amax_history[3:, 0].any()
    assert round(step(layer, 3), 2) == round(448 / 3, 2)  # and the next clean step is as usual


def test_a_skipped_step_and_evaluation_leave_the_history_alone():
    layer = FP8Linear(8, 4, recipe="delayed")
    for amax in (1, 5):
        step(layer, amax)
    before = layer.amax_history.clone()
    step(layer, 100, keep=False)
    step(layer, 100, training=False)
    with torch.no_grad():
        layer.train()(torch.full((4, 8), 100.0))
    end_step(layer)
    assert torch.equal(layer.amax_history, before)
    assert layer(torch.full((4, 8), 1e30)).isfinite().all()


def test_micro_batches_make_one_entry_with_their_maximum():
    layer = FP8Linear(8, 4, recipe="delayed")
    for amax in (3, 7, 2):
        layer(torch.full((4, 8), float(amax), requires_grad=True)).sum().backward()
    end_step(layer)
    assert layer.amax_history[0, 0] == 7 and not layer.amax_history[1:].any()


# Everyday use ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ALL, ids=by_name)
def test_inputs_of_any_rank_and_strides(recipe):
    layer = FP8Linear(48, 20, recipe=recipe)
    fused = torch.randn(4, 6, 3 * 48)
    flat = torch.randn(1 + 24 * 48)
    for x in (fused[..., 48:96], torch.randn(6, 48, 4).transpose(1, 2), flat[1:].view(24, 48)):
        y = layer(x)
        assert y.shape == (*x.shape[:-1], 20)
        assert torch.equal(y, layer(x.contiguous()))
    assert layer(torch.randn(48)).shape == (20,)
    with pytest.raises(ValueError, match="features"):
        layer(torch.randn(4, 20, 24))


@pytest.mark.parametrize("recipe", ALL, ids=by_name)
def test_no_tokens_are_no_trouble(recipe):
    layer = FP8Linear(64, 32, recipe=recipe)
    x = torch.empty(0, 64, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    end_step(layer)
    assert y.shape == (0, 32) and x.grad.shape == (0, 64) and not layer.weight.grad.any()
    assert recipe.amax != "history" or not layer.amax_history.any()


@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=by_name)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_activation_or_gradient_is_seen(recipe, bad):
    layer = FP8Linear(64, 64, recipe=recipe)
    for _ in range(2):
        x = torch.randn(64, 64)
        layer(x.requires_grad_()).sum().backward()
        end_step(layer)
    x = torch.randn(64, 64)
    x[5, 7] = bad
    assert layer(x)[5].isnan().all()
    layer.zero_grad()
    x = torch.randn(64, 64, requires_grad=True)
    g = torch.randn(64, 64)
    g[5, 7] = bad
    layer(x).backward(g)
    assert x.grad[5].isnan().all() and layer.weight.grad[7].isnan().all()


@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=by_name)
def test_zero_operands_give_zero(recipe):
    layer = FP8Linear(64, 32, False, recipe)
    x = torch.zeros(16, 64, requires_grad=True)
    y = layer(x)
    y.backward(torch.zeros(16, 32))
    assert not y.any() and not x.grad.any() and not layer.weight.grad.any()


@pytest.mark.parametrize("recipe", ALL, ids=by_name)
def test_casting_weights_once_changes_no_bit_and_leaves_nothing_behind(recipe):
    layers = [FP8Linear(48, 40, recipe=recipe) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    batches = [torch.randn(16, 48) for _ in range(4)]
    for change in (lambda w: None, lambda w: w.data.mul_(2), lambda w: w.data.add_(0.1)):
        outputs = []
        for layer, context in zip(layers, (torch.enable_grad(), weights_cast(layers[1]))):
            layer.zero_grad()
            change(layer.weight)
            if layer is layers[1]:
                context = weights_cast(layer)
            with context:
                xs = [b.clone().requires_grad_() for b in batches]
                ys = [layer(x) for x in xs]
                for y in ys:
                    y.sum().backward()
            end_step(layer)
            outputs.append((ys, [x.grad for x in xs], layer.weight.grad))
        (ys, dxs, dw), (ys2, dxs2, dw2) = outputs
        assert all(map(torch.equal, ys + dxs + [dw], ys2 + dxs2 + [dw2]))
        assert layers[1].w_cast is None
    if recipe.amax == "history":
        assert torch.equal(layers[0].amax_history, layers[1].amax_history)


def test_casts_nest():
    layer = FP8Linear(4, 4)
    with weights_cast(layer):
        outer = layer.w_cast
        with torch.no_grad(), weights_cast(layer):
            assert layer.w_cast is not outer
        assert layer.w_cast is outer


def test_casts_are_freed_when_a_step_fails():
    layer = FP8Linear(4, 4)
    with pytest.raises(RuntimeError), weights_cast(layer):
        raise RuntimeError
    assert layer.w_cast is None


def test_recomputed_activations_change_no_bit_and_no_history():
    results = []
    for recompute in (False, True):
        torch.manual_seed(1)
        layer = FP8Linear(32, 32, recipe="delayed")
        for _ in range(5):
            x = torch.randn(8, 32, requires_grad=True)
            y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
            y.square().sum().backward()
            end_step(layer)
        results.append((y, x.grad, layer.weight.grad, layer.amax_history))
    assert all(map(torch.equal, *results))
    assert int((layer.amax_history[:, 0] > 0).sum()) == 5


@pytest.mark.parametrize("recipe", ALL, ids=by_name)
def test_autocast_gives_bf16_out_and_fp32_gradients(recipe):
    layer = FP8Linear(32, 16, recipe=recipe)
    x = torch.randn(8, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    assert y.dtype is torch.bfloat16 and x.grad.dtype is torch.float32
    assert layer.weight.grad.dtype is layer.bias.grad.dtype is torch.float32


@pytest.mark.parametrize("recipe", ALL, ids=by_name)
def test_what_is_saved_for_backward_is_one_byte_an_element(recipe):
    layer, saved = FP8Linear(256, 128, False, recipe), []
    x = torch.randn(512, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    size = BF16.dtype.itemsize if recipe.name == "bf16" else 1
    codes = sum(t.numel() for t in saved if t.dtype.itemsize == size)
    assert codes == 512 * 256 + 128 * 256
    scales = sum(t.nbytes for t in saved if t.dtype is torch.float32)
    assert scales <= 4 * (512 * 256 + 128 * 256) // 32


def test_frozen_weights_and_inputs_without_gradient():
    layer = FP8Linear(16, 8)
    layer.weight.requires_grad_(False)
    x = torch.randn(4, 16, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None and layer.weight.grad is None
    layer.weight.requires_grad_(True)
    layer(torch.randn(4, 16)).sum().backward()
    assert layer.weight.grad is not None


def test_state_dict_is_that_of_a_linear_and_the_history():
    assert set(FP8Linear(4, 4).state_dict()) == {"weight", "bias"}
    assert set(FP8Linear(4, 4, False, "delayed").state_dict()) == {"weight", "amax_history"}


def test_wrong_recipes_are_refused():
    for make in (
        lambda: FP8Linear(4, 4, recipe="mxfp9"),
        lambda: Recipe("r", rounding="up"),
        lambda: Recipe("r", (1, 32), amax="history"),
        lambda: Recipe("r", amax="sometimes"),
    ):
        with pytest.raises(ValueError):
            make()


@pytest.mark.xdist_group("dynamo")
@pytest.mark.parametrize("recipe", some(RECIPES, ["bf16", "delayed", "blockwise", "mxfp8"]))
def test_one_graph_compiles_forward_and_backward(recipe):
    """No graph break, the same bits as eager, and no recompilation for a second batch."""
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        torch.manual_seed(2)
        layer = FP8Linear(48, 33, recipe=recipe)
        f = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        with torch._dynamo.config.patch(error_on_recompile=compiled):
            for _ in range(3):
                x = torch.randn(20, 48, requires_grad=True)
                y = f(x)
                y.square().sum().backward()
                end_step(layer)
        results.append((y, x.grad, layer.weight.grad))
    assert all(map(torch.equal, *results))


def test_a_gemm_of_e5m2_and_fp32_scaled_blocks_is_exact_too():
    a8 = quantize(torch.randn(9, 70), E5M2, (1, 32), "fp32")
    b8 = quantize(torch.randn(11, 70), E4M3, (1, 32), "floor")
    assert close(gemm_nt(a8, b8), exact_gemm(a8, b8))
