"""Scales and quantised operands: known answers, torchao, gfloat, formulas of other systems."""

import math

import gfloat
import gfloat.formats
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8gpt import (
    BF16,
    E4M3,
    E5M2,
    RECIPES,
    Quantized,
    ceil_pow2,
    decode,
    dequantize,
    encode_scale,
    health,
    quantize,
    quantize_operand,
)

FP8_RECIPES = [r for r in RECIPES.values() if r.name != "bf16"]
NAN, INF = float("nan"), float("inf")


def by_name(recipe):
    return recipe.name


def codes(x8):
    return x8.q.contiguous().view(torch.uint8)


def hexes(x8):
    return " ".join(f"{c:02X}" for c in codes(x8).flatten().tolist())


def e8m0(s):
    """The byte of a power-of-two scale: its exponent field."""
    return (s.view(torch.int32) >> 23).tolist()


@pytest.mark.parametrize(
    "amax, e, s",
    [(1.0, 448.0, 2**-8), (1.75, 256.0, 2**-8), (2.0, 224.0, 2**-7), (3.0, 149.333328, 2**-7)]
    + [(448.0, 1.0, 1.0), (449.0, 0.997772813, 2.0), (1000.0, 0.448000014, 4.0)],
)
def test_known_scales(amax, e, s):
    a = torch.tensor([amax])
    assert encode_scale(a, E4M3, "fp32").item() == np.float32(e)
    assert 1 / encode_scale(a, E4M3, "pow2").item() == s


def test_known_e8m0_bytes():
    v = torch.tensor([2.0**-126, 1.5 * 2**-126, 1, 1 + 2**-23, 1.5, 2, 3])
    assert e8m0(ceil_pow2(v)) == [1, 2, 127, 128, 128, 128, 129]
    s = 1 / encode_scale(v * 448, E4M3, "pow2")  # 448 v is exact for these
    assert e8m0(s) == [1, 2, 127, 128, 128, 128, 129]


MX = [
    ([1, 0.5, -0.3, 0.001], E4M3, 119, "78 70 EA 28", 119, "78 70 EA 28"),
    ([448, 449, -500, 1], E4M3, 128, "76 76 F8 30", 127, "7E 7E FE 38"),
    ([3, -7.9, 0.01, 5.5], E4M3, 122, "6C F8 2A 73", 121, "74 FE 32 7B"),
    ([1.9, 1, 0.1, -1.75], E4M3, 120, "77 70 55 F6", 119, "7E 78 5D FE"),
    ([448] * 32, E4M3, 127, "7E 7E 7E 7E", 127, "7E 7E 7E 7E"),
    ([449] * 32, E4M3, 128, "76 76 76 76", 127, "7E 7E 7E 7E"),
    ([3, -7.9, 0.01, 5.5], E5M2, 115, "72 F8 51 76", 114, "76 FB 55 7A"),
]


@pytest.mark.parametrize("values, fmt, up, up_codes, down, down_codes", MX)
def test_known_mx_blocks(values, fmt, up, up_codes, down, down_codes):
    x = torch.zeros(1, 32)
    x[0, : len(values)] = torch.tensor(values, dtype=torch.float32)
    for rounding, byte, wanted in (("pow2", up, up_codes), ("floor", down, down_codes)):
        x8 = quantize(x, fmt, (1, 32), rounding)
        assert e8m0(x8.s) == [[byte]] and hexes(x8)[:11] == wanted


def test_known_rows_tensors_and_amax_biases():
    rows = torch.tensor([[1.0, -2, 0.5], [100, 3, -448]])
    assert hexes(quantize(rows, tile=(1, None))) == "76 FE 6E 6C 44 FE"
    assert hexes(quantize(rows, tile=(1, None), rounding="pow2")) == "70 F8 68 6C 44 FE"
    x = torch.tensor([[1, -0.3, 0.001]])
    assert hexes(quantize(x, rounding="pow2")) == "78 EA 28"
    assert hexes(quantize(x, rounding="fp32")) == "7E F0 2E"
    x8, _ = quantize_operand(x, "x", RECIPES["amax"])
    g8, _ = quantize_operand(x, "g", RECIPES["amax"])
    assert (hexes(x8), 1 / x8.s.item()) == ("78 EA 28", 2**8)
    assert (hexes(g8), 1 / g8.s.item()) == ("6C E5 44", 2**12)


def spread(rows, columns):
    """Normal numbers whose rows and columns differ by orders of magnitude."""
    r = torch.logspace(-3, 3, rows)[:, None] * torch.logspace(-2, 2, columns)
    return torch.randn(rows, columns) * r


@pytest.mark.parametrize("rounding", ["pow2", "floor"])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mx_equals_torchao(rounding, fmt, dtype):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    x = spread(64, 256).to(dtype)
    mode = {"pow2": ScaleCalculationMode.RCEIL, "floor": ScaleCalculationMode.FLOOR}[rounding]
    s, q = to_mx(x, fmt.dtype, 32, mode)
    ours = quantize(x, fmt, (1, 32), rounding)
    assert e8m0(ours.s) == s.view(torch.uint8).tolist()
    assert torch.equal(codes(ours), q.view(torch.uint8))


def test_floor_blocks_equal_gfloat():
    x = spread(8, 128)
    ours = quantize(x, E4M3, (1, 32), "floor")
    block = gfloat.formats.format_info_mxfp8_e4m3
    for row, ours_row in zip(x.view(-1, 32), dequantize(ours).view(-1, 32)):
        theirs = gfloat.quantize_block(block, row.double().numpy(), gfloat.compute_scale_amax)
        assert torch.equal(ours_row, torch.from_numpy(theirs).float())


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_current_and_rowwise_equal_torchao(fmt):
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    for x in (spread(33, 80), spread(64, 64).bfloat16(), torch.randn(17, 1) * 1e-9):
        tensor = hp_tensor_to_float8_dynamic(x, fmt.dtype, LinearMMConfig())
        rows = hp_tensor_to_float8_dynamic(
            x,
            fmt.dtype,
            LinearMMConfig(),
            scaling_granularity=ScalingGranularity.AXISWISE,
            axiswise_dim=-1,
            round_scales_to_power_of_2=True,
        )
        for theirs, tile, rounding in ((tensor, (None, None), "fp32"), (rows, (1, None), "pow2")):
            ours = quantize(x, fmt, tile, rounding)
            assert torch.equal(codes(ours), theirs._data.view(torch.uint8))
            assert torch.equal(ours.s.flatten(), theirs._scale.reciprocal().flatten())


def amaxes():
    """fp32 numbers from the smallest amax for which equality is claimed to the largest."""
    powers = 2.0 ** torch.arange(-117, 127).double()
    around = [
        powers * f for f in (1, 1.75, 1 + 2**-23, 1 - 2**-24, 1.75 + 2**-22, 1.75 - 2**-23, 1.3)
    ]
    return torch.cat(around).float()


def test_pow2_equals_transformer_engine_and_deepgemm():
    """Formulas, in other words than ours: TE's block kernel clears the mantissa bits of
    RN(448 / amax); DeepGEMM and MXFP8 take 2^ceil(log2(amax / 448)), here in doubles."""
    a = amaxes()
    ours = encode_scale(a, E4M3, "pow2")
    te = ((np.float32(448) / a.numpy()).view(np.int32) & 0x7F800000).view(np.float32)
    assert torch.equal(ours, torch.from_numpy(te))
    mantissa, exponent = np.frexp(a.double().numpy() / 448)
    up = 2.0 ** (exponent - (mantissa == 0.5))
    assert torch.equal(1 / ours, torch.from_numpy(up).float())


def test_amax_equals_the_formula_of_fp8_amax():
    for fmt, margin, operand in ((E4M3, 0, "x"), (E5M2, 3, "g")):
        for a in (1e-30, 1e-7, 0.003, 1.0, 1.75, 447.9, 448.0, 449.0, 1e6, 3e38):
            x = torch.tensor([[a, -a / 3]], dtype=torch.float32)
            b = math.floor(math.log2(fmt.max / x[0, 0].item()))
            b = min(max(b, -31), 31) - margin
            x8, _ = quantize_operand(x, operand, RECIPES["amax"])
            assert x8.s.item() == 2.0**-b


def test_transformer_engines_current_scale():
    """s_inv = 1 / RN(max / amax), two roundings: amax / max differs for a quarter of all amax."""
    a = torch.rand(10000) * 10 + 0.1
    e = (np.float32(448) / a.numpy()).astype(np.float32)
    x8 = [quantize(v.view(1, 1)).s for v in a[:100]]
    assert torch.equal(torch.cat(x8).flatten(), torch.from_numpy(np.float32(1) / e)[:100])
    assert (torch.from_numpy(np.float32(1) / e) != a / torch.full_like(a, 448)).float().mean() > 0.2


@pytest.mark.parametrize("rounding", ["fp32", "pow2", "floor"])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_scales_are_normal_numbers_from_the_smallest_amax_to_the_largest(rounding, fmt):
    a = torch.tensor([1e-45, 1e-40, 2**-126, 5e-36, 1e-30, 1, 1e30, 3.4e38])
    e = encode_scale(a, fmt, rounding)
    for n in (e, 1 / e):
        assert bool((n.isfinite() & (n >= 2**-126)).all())
    assert encode_scale(torch.zeros(1), fmt, rounding).item() == 1


def test_margin_moves_the_scale_by_powers_of_two():
    x = torch.randn(8, 64)
    for rounding in ("fp32", "pow2", "floor"):
        s = [quantize(x, rounding=rounding, margin=k).s.item() for k in (0, 1, 5)]
        assert s[1] == 2 * s[0] and s[2] == 32 * s[0]


@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=by_name)
def test_zeros_stay_zeros(recipe):
    for operand in "xwg":
        for x8 in quantize_operand(torch.zeros(64, 128), operand, recipe):
            assert not codes(x8).any() and bool((x8.s.isfinite() & (x8.s > 0)).all())
            assert not dequantize(x8).any()


@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=by_name)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("at", [0, 1, 31])
def test_a_non_finite_number_makes_its_tile_nan_in_both_copies(recipe, bad, at):
    x = torch.ones(64, 96)
    x[at, at] = bad
    for x8 in quantize_operand(x, "x", recipe):
        y = dequantize(x8)
        assert y[at, at].isnan()
        assert torch.equal(x8.s.isnan(), ~x8.amax.isfinite())


@pytest.mark.parametrize("flush", [False, True])
def test_tiny_blocks_survive_flushed_denormals(flush):
    torch.set_flush_denormal(flush)
    try:
        for value in (1e-37, 2e-38, 1e-30):
            for rounding in ("fp32", "pow2"):
                y = dequantize(
                    quantize(torch.full((1, 32), value), tile=(1, 32), rounding=rounding)
                )
                assert bool(y.isfinite().all()) and bool((y <= 1.1 * value).all())
                if value > 5e-36:
                    assert bool((y >= 0.9 * value).all())
    finally:
        torch.set_flush_denormal(False)


def test_round_up_never_clips_and_floor_does():
    x = torch.randn(512, 32)
    up, down = (quantize(x, tile=(1, 32), rounding=r) for r in ("pow2", "floor"))
    assert health(x, up)["clip"] == 0 < health(x, down)["clip"]
    top = x.abs().argmax(1, keepdim=True)
    error = (dequantize(up) / x - 1).abs().gather(1, top)
    assert error.max() <= 2**-4  # half a step of a 3-bit mantissa


@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=by_name)
def test_views_quantise_like_their_contiguous_copies(recipe):
    base = torch.randn(130, 260)
    fused = torch.randn(64, 3 * 48)
    views = [base.t(), base[:, ::2], base[::3], base[1:2].expand(40, 260), fused[:, 48:96]]
    views += [base.flatten()[1 : 1 + 64 * 100].view(64, 100)]
    for view in views:
        for ours, theirs in zip(
            quantize_operand(view, "x", recipe), quantize_operand(view.contiguous(), "x", recipe)
        ):
            assert torch.equal(codes(ours), codes(theirs)) and torch.equal(ours.s, theirs.s)
            assert torch.equal(decode(ours.q), ours.q.float())


@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=by_name)
@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (8, 33), (17, 127), (129, 160), (130, 300)])
def test_an_edge_equals_the_same_operand_padded_with_zeros(recipe, shape):
    x = torch.randn(shape)
    padded = torch.zeros(256, 384)
    padded[: shape[0], : shape[1]] = x
    for operand in "xwg":
        for small, large in zip(
            quantize_operand(x, operand, recipe), quantize_operand(padded, operand, recipe)
        ):
            R, C = small.q.shape
            assert torch.equal(codes(small), codes(large)[:R, :C])
            assert torch.equal(small.s, large.s[: small.s.shape[0], : small.s.shape[1]])
            r, c = (t or n for t, n in zip(small.tile, small.q.shape))
            assert small.s.shape == (-(-R // min(r, R)), -(-C // min(c, C)))


@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=by_name)
def test_the_transposed_copy_is_cut_from_the_original_and_not_from_the_first_copy(recipe):
    x = torch.randn(64, 96) * torch.logspace(-3, 3, 64)[:, None]
    x8, x8_t = quantize_operand(x, "x", recipe)
    fresh, _ = quantize_operand(x.t(), "x", recipe, copies="first")
    assert torch.equal(codes(x8_t), codes(fresh)) and torch.equal(x8_t.s, fresh.s)
    if recipe.x_tile not in ((None, None), (128, 128)):
        twice, _ = quantize_operand(dequantize(x8).t(), "x", recipe, copies="first")
        assert not torch.equal(dequantize(twice), dequantize(x8_t))


def test_history_and_constant_replace_the_amax():
    x = torch.tensor([[10.0, 5.0, 1.0]])
    old = quantize(x, amax=torch.tensor(1.0))
    assert dequantize(old).tolist() == [[1, 1, 1]]  # a sudden jump saturates, for one step
    assert health(x, old)["clip"] == pytest.approx(2 / 3) and old.amax.item() == 10
    assert quantize(x, amax=torch.tensor(0.0)).s.equal(quantize(x).s)  # no history yet
    x[0, 0] = NAN
    assert quantize(x, amax=torch.tensor(1.0)).s.isnan()
    assert quantize(x, amax=448.0 * 2**-3, rounding="pow2").s.isnan()
    w8, _ = quantize_operand(torch.randn(4, 4), "w", RECIPES["constant"])
    assert w8.s.item() == 2.0 ** -RECIPES["constant"].bias[1]


def test_quantize_refuses_what_is_no_matrix():
    for x in (torch.ones(3), torch.ones(2, 2, 2), torch.ones(0, 4)):
        with pytest.raises(ValueError, match="matrix"):
            quantize(x)


def test_bf16_needs_no_scale():
    x = torch.randn(5, 7) * 1e30
    x8 = quantize(x, BF16)
    assert x8.s.tolist() == [[1]] and torch.equal(dequantize(x8), x.bfloat16().float())


def test_dequantize_multiplies_every_code_by_the_scale_of_its_tile():
    q = torch.arange(1, 7.0).view(2, 3).to(E4M3.dtype)
    s = torch.tensor([[1.0, 10.0]])
    assert dequantize(Quantized(q, s, (None, 2), E4M3)).tolist() == [[1, 2, 30], [4, 5, 60]]


# Half a step of the mantissa, relative; below the normal numbers half a subnormal step, absolute.
# 1 + 2^-20 covers the roundings of x e and q s in fp32.
SLACK = 1 + 2**-20


@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=by_name)
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 140),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 2**31),
)
def test_an_element_is_right_to_half_a_step(recipe, rows, columns, exponent, seed):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    for operand in "xwg":
        if recipe.amax == "constant":
            return
        x8, _ = quantize_operand(x, operand, recipe, copies="first")
        fmt, s = x8.fmt, dequantize(x8._replace(q=torch.ones_like(x8.q, dtype=torch.float32)))
        half_step = torch.maximum(
            x.abs() * 2.0 ** -(fmt.mantissa + 1), s * 2.0 ** (fmt.emin - fmt.mantissa - 1)
        )
        assert bool(((dequantize(x8) - x).abs() <= half_step * SLACK).all())


def test_health_counts_underflow_and_clipping():
    x = torch.tensor([[448.0, 1e-4, 0.0, 1000.0]])
    h = health(x, quantize(x, amax=torch.tensor(448.0)))
    assert h["underflow"] == pytest.approx(1 / 3) and h["clip"] == pytest.approx(1 / 4)
    many = torch.randn(256, 512)
    assert 30 < health(many, quantize(many))["sqnr"] < 33  # E4M3
    assert 24 < health(many, quantize(many, E5M2))["sqnr"] < 27
