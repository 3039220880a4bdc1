"""fp8gpt: a GPT whose linear layers train in 8-bit floating point, in one file.

A linear layer spends its time in three matrix multiplications (GEMMs). With M tokens, K input
features and N output features, x (M, K), w (N, K) and the gradient g = dLoss/dy (M, N):

    fprop   y  = x  . w^T       (M, K) . (N, K)^T -> (M, N)     contracts K
    dgrad   dx = g  . w         (M, N) . (K, N)^T -> (M, K)     contracts N
    wgrad   dw = g^T . x        (N, M) . (K, M)^T -> (N, K)     contracts M

FP8 training runs these three on 8-bit numbers: half the bytes of BF16, and twice the arithmetic on
a GPU with FP8 tensor cores. Everything else (weights as the optimizer sees them, norms, softmax,
residuals, loss) stays in 16 or 32 bits. An 8-bit number has a short range, so an operand is first
multiplied into that range: it travels as codes `q` and scales `s`, with

    x  ~  q * s                 s is the *decode* scale, here and everywhere in this file

How the scales are chosen is a *recipe*, and every published recipe is one sentence: cut the operand
into tiles along the axis that the GEMM contracts, take each tile's largest magnitude (amax), round
the scale, cast. So a recipe is a row of a table (section 3), and the code below exists once.

    1 Formats    what 8 bits can say                     6 FP8 linear     the three GEMMs, labelled
    2 Scaling    amax, scale, quantize, dequantize       7 Smooth-SwiGLU  an outlier, tamed
    3 Recipes    the table: add a row                    8 GPT            GPT-2 or Llama
    4 Health     what one outlier does to the others     9 FP8 Adam       one byte a moment
    5 GEMM       A . B^T on codes and scales

Read it with only the `bf16` row of the table in mind, then again; `python fp8gpt.py` shows what an
outlier does. Without FP8 hardware it is *emulated*: the same codes and scales, multiplied in fp32.
"""

import contextlib
import importlib.util
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adamw import adamw

# ------------------------------------------------------------------------------------------------
# 1. Formats: what 8 bits can say
#
# Take 0.1. In E4M3 (4 exponent bits, 3 mantissa bits, exponent bias 7) its nearest neighbour is
#
#     0.1  ->  0 0011 101  ->  0x1D  ->  2^(3-7) * (1 + 5/8) = 0.1015625
#              | |    |
#              | |    mantissa 5
#              | exponent 3
#              sign
#
# The grid is a ruler whose marks are twice as far apart in every next power of two:
#
#     near 1     0.875  0.9375    1           1.125        1.25        1.375         1.5
#     E4M3     ----|-----|------|------------|------------|------------|------------|----
#
#     near 448     352           384           416           448
#     E4M3     -----|-------------|-------------|-------------|   a cast stops here: it *saturates*
#
# so a number is right to a *relative* 2^-4 = 6.25 % (E5M2, with 2 mantissa bits: 12.5 %), from the
# smallest normal number to the largest. E5M2 spends one bit more on range: gradients like that.
#
# Why not just cast? A gradient of 1e-5 is below half of E4M3's smallest number, 2^-9 = 0.00195: a
# plain cast makes it 0. Multiplied by 2^24 first it is 167.8, which becomes 160 (the grid's step is
# 16 there), and 160 / 2^24 = 9.54e-6: off by 4.6 %, but alive. The whole file is about that scale.


@dataclass(frozen=True)
class Format:
    """A floating-point format. `mantissa`: its explicit bits. `emin`, `emax`: exponents of the
    smallest normal and of the largest number. (OCP 8-bit floating point specification, v1.0.)"""

    name: str
    dtype: torch.dtype
    mantissa: int
    emin: int
    emax: int
    max: float


E4M3 = Format("E4M3", torch.float8_e4m3fn, mantissa=3, emin=-6, emax=8, max=448.0)
E5M2 = Format("E5M2", torch.float8_e5m2, mantissa=2, emin=-14, emax=15, max=57344.0)
FP16 = Format("FP16", torch.float16, mantissa=10, emin=-14, emax=15, max=65504.0)  # master weights
BF16 = Format("BF16", torch.bfloat16, mantissa=7, emin=-126, emax=127, max=3.3895313892515355e38)
FP32 = Format("FP32", torch.float32, mantissa=23, emin=-126, emax=127, max=3.4028234663852886e38)


def round_to(x: Tensor, fmt: Format, noise: Tensor | None = None) -> Tensor:
    """Round fp32 `x` onto the grid of a format of at most 16 bits with `emin` >= -14, as fp32.

    Nearest, ties to even; beyond the largest number it saturates; NaN stays NaN and -0 stays -0.
    With `noise`, uniform in [0, 1), it rounds up with a probability equal to the fraction that is
    cut off, so the mean is right: stochastic rounding (-0 may become 0). This *is* the definition.
    """
    exponent = x.view(torch.int32) & 0x7F800000  # 2^floor(log2 |x|), as the bits of an fp32 number
    exponent = exponent.clamp(min=(fmt.emin + 127) << 23)  # below emin the grid is evenly spaced
    step = (exponent - (fmt.mantissa << 23)).view(torch.float32)
    steps = x / step  # exact: a power of two
    steps = torch.round(steps) if noise is None else steps.floor() + (noise >= 1 - steps % 1)
    return (steps * step).clamp(-fmt.max, fmt.max)


def encode(x: Tensor, fmt: Format, stochastic: bool = False) -> Tensor:
    """fp32 -> codes: `round_to`, stored. (torch rounds so, too, but may not saturate: clamp.)"""
    x = round_to(x, fmt, torch.rand_like(x)) if stochastic else x.clamp_(-fmt.max, fmt.max)
    return x.to(fmt.dtype)


def decode(q: Tensor) -> Tensor:
    """Codes -> fp32. On a CPU torch is slow at it: compiled code there moves the bits to where fp32
    has them and mends the exponent, eager code looks the 256 numbers of E4M3 up in a table."""
    if q.is_cpu and q.itemsize == 1 and torch.compiler.is_compiling():
        fmt, code = E4M3 if q.dtype is E4M3.dtype else E5M2, q.view(torch.uint8).int()
        bits = (code & 0x7F) << (23 - fmt.mantissa) | (code & 0x80) << 24
        x = bits.view(torch.float32) * 2.0 ** (fmt.emin + 126)  # exact, also below emin
        return torch.where(x.abs() <= fmt.max, x, math.nan)
    if q.dtype is not E4M3.dtype or not q.is_cpu:
        return q.float()
    if not q.is_contiguous() and q.dim() == 2 and q.t().is_contiguous():
        return decode(q.t()).t()  # look up in the order of memory
    table = torch.arange(256, dtype=torch.uint8).view(q.dtype).float()
    return table.index_select(0, q.contiguous().view(torch.uint8).flatten().int()).view(q.shape)


# ------------------------------------------------------------------------------------------------
# 2. Scaling: amax -> scale -> codes
#
# One scale serves one *tile* of the operand. Four tile shapes cover every recipe; each drawing is
# one operand with 4 rows, whose columns are the axis that the GEMM contracts:
#
#     tensor (all, all)       row (1, all)          1 x 128 or 1 x 32       128 x 128 (weights)
#     +---------------+     +---------------+     +-------+-------+       +-------+-------+
#     |               |     +---------------+     +-------+-------+       |       |       |
#     |       s       |     +---------------+     +-------+-------+       |   s   |   s   |
#     |               |     +---------------+     +-------+-------+       |       |       |
#     +---------------+     +---------------+     +-------+-------+       +-------+-------+
#
# A tile lies along the contracted axis, so that a tensor core can sum its products and then apply
# the scale. And that axis changes: fprop contracts the K of x (M, K), wgrad its M. So x needs two
# copies (`quantize_operand` makes them),
#
#     for fprop: tiles lie along K           for wgrad: tiles stand along M, then x is transposed
#     +-------+-------+                      +--+--+--+--+
#     +-------+-------+                      |  |  |  |  |
#     +-------+-------+                      |  |  |  |  |
#     +-------+-------+                      +--+--+--+--+
#
# both cut from the high-precision x: quantising the first copy again would round twice. A square
# tile (the whole tensor, or 128 x 128) is its own transpose: there one copy serves both.


class Quantized(NamedTuple):
    """An operand (R, C) in FP8: x ~ q * s. `amax` is the operand's own, whatever s came from."""

    q: Tensor  # (R, C) codes, fmt.dtype
    s: Tensor  # (ceil(R/r), ceil(C/c)) decode scales, fp32; NaN where the tile holds NaN or inf
    tile: tuple  # (r, c); None stands for the whole axis
    fmt: Format
    amax: Tensor | None = None  # like s
    rounding: str = "fp32"

    def t(self) -> "Quantized":
        """The transposed operand (C, R): the same numbers, read the other way."""
        amax = None if self.amax is None else self.amax.t()
        return Quantized(self.q.t(), self.s.t(), self.tile[::-1], self.fmt, amax, self.rounding)


def tiles(x: Tensor, tile: tuple) -> Tensor:
    """View x (R, C) as (R/r, r, C/c, c): element [i, j, k, l] lies in tile (i, k). An edge that
    does not fill a tile is padded with zeros, which change neither an amax nor a code."""
    r, c = (min(t or n, n) for t, n in zip(tile, x.shape))
    if x.shape[0] % r or x.shape[1] % c:
        x = F.pad(x, (0, -x.shape[1] % c, 0, -x.shape[0] % r))
    return x.unflatten(1, (-1, c)).unflatten(0, (-1, r))


def tile_amax(v: Tensor) -> Tensor:
    """The amax of every tile, (R/r, r, C/c, c) -> (R/r, C/c), in fp32; NaN and inf come through."""
    if v.shape[0] == v.shape[2] == 1:  # one tile: both ends in a single pass
        low, high = v.aminmax()
        return torch.maximum(-low, high).view(1, 1)
    return v.abs().amax((1, 3))


def untile(v: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `tiles`: (R/r, r, C/c, c) -> (R, C), padding cut off."""
    return v.flatten(2, 3).flatten(0, 1)[: shape[0], : shape[1]]


def ceil_pow2(x: Tensor) -> Tensor:
    """The power of two at or above x (fp32, x >= 0), by its bits: adding every mantissa bit carries
    into the exponent unless all were 0. (log2 in fp32 is wrong next to a power of two.) 1 for 0."""
    bits = (x.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return torch.where(x > 0, bits.view(torch.float32), 1.0)


def encode_scale(amax: Tensor, fmt: Format, rounding="fp32", margin=0, max_exponent=126) -> Tensor:
    """The multiplier e = 1 / s that brings `amax` (fp32, any shape) to the top of the format.

    rounding  "fp32": e = max / amax                    Transformer Engine, torchao
              "pow2": s = 2^ceil(log2(amax / max))      nothing clips: MXFP8, DeepGEMM, TE's blocks
              "floor": s = 2^(floor(log2 amax) - emax)  the OCP MX rule: the top may clip
    margin    leaves 2^margin of headroom. max_exponent: before it, e is within 2^+-max_exponent; by
              default just so far that s and e are normal fp32 numbers. amax = 0 gives 1.
    """
    a = amax.clamp(fmt.max * 2.0**-max_exponent, min(fmt.max * 2.0**max_exponent, FP32.max))
    top = torch.full_like(a, fmt.max)  # number / tensor would be rounded twice
    if rounding == "fp32":
        e = top / a
    elif rounding == "pow2":
        e = 1 / ceil_pow2(a / top)
    else:
        e = 2.0**fmt.emax / (a.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(amax == 0, 1.0, e * 2.0**-margin)


def quantize(x: Tensor, fmt: Format = E4M3, tile: tuple = (None, None), rounding: str = "fp32",
             amax: Tensor | float | None = None, margin: int = 0, max_exponent: int = 126,
             stochastic=False) -> Quantized:  # fmt: skip
    """Quantise x (R, C), any float dtype and strides, with one scale for each tile.

    amax: scale by this instead of the tile's own largest magnitude (where it is positive). A
    tile that holds NaN or inf gets s = NaN, so its output is NaN and so is the loss: a cast alone
    would turn inf into a quiet 448. Raises ValueError unless x is a matrix with an element.
    """
    if x.dim() != 2 or x.numel() == 0:
        raise ValueError(f"quantize takes a matrix with at least one element, not {tuple(x.shape)}")
    if fmt.dtype in (torch.bfloat16, torch.float32):  # wide enough: no amax, s = 1
        return Quantized(x.to(fmt.dtype), torch.ones(1, 1, device=x.device), (None, None), fmt)
    v = tiles(x.float(), tile)  # (R/r, r, C/c, c)
    own = tile_amax(v)  # (R/r, C/c)
    amax = own if amax is None else torch.where(torch.as_tensor(amax) > 0, amax, own)
    e = encode_scale(amax, fmt, rounding, margin, max_exponent)
    q = encode(v * e[:, None, :, None], fmt, stochastic)
    s = torch.where(own.isfinite(), e.reciprocal(), math.nan)
    return Quantized(untile(q, x.shape), s, tile, fmt, own, rounding)


def dequantize(x8: Quantized) -> Tensor:
    """(R, C) fp32: every code times the scale of its tile."""
    x, s = decode(x8.q), x8.s.float()
    return x * s if s.numel() == 1 else untile(tiles(x, x8.tile) * s[:, None, :, None], x.shape)


# ------------------------------------------------------------------------------------------------
# 3. Recipes: one row each
#
# A tile is (rows, columns) of an operand whose columns are contracted; None is the whole axis. Add
# a row of yours: `python train.py --compare bf16 YOURS` and tests/test_linear.py will find it.

RECIPE_CHOICES = dict(amax=("now", "history", "constant"), rounding=("fp32", "pow2", "floor"),
                      amax_compute_algo=("max", "most_recent"))  # fmt: skip


def check_choices(config, choices: dict):
    for field, allowed in choices.items():
        if (value := getattr(config, field)) not in allowed:
            raise ValueError(f"{field} is {value!r}; choose from {', '.join(map(str, allowed))}")


@dataclass(frozen=True)
class Recipe:
    """How x, w and g become FP8. Change a field with `dataclasses.replace`."""

    name: str
    x_tile: tuple = (None, None)
    w_tile: tuple = (None, None)
    g_tile: tuple = (None, None)
    amax: str = "now"  # "now": the tile's own; "history": of past steps; "constant": from `bias`
    rounding: str = "fp32"  # of the scale, see encode_scale
    x_fmt: Format = E4M3
    w_fmt: Format = E4M3
    g_fmt: Format = E4M3
    margin: tuple = (0, 0, 0)  # x, w, g: headroom of 2^margin
    bias: tuple = (0, 0, 0)  # x, w, g: with amax="constant", encode by 2^bias
    amax_history_len: int = 1024  # optimizer steps that "history" looks back
    amax_compute_algo: str = "max"  # over the history, or its "most_recent" entry
    max_exponent: int = 126  # scales stay within 2^+-max_exponent
    fprop: bool = True  # False: leave this GEMM in BF16
    dgrad: bool = True
    wgrad: bool = True

    def __post_init__(self):
        check_choices(self, RECIPE_CHOICES)
        if self.amax != "now" and {*self.x_tile, *self.w_tile, *self.g_tile} != {None}:
            raise ValueError(f"amax={self.amax!r} needs tiles of the whole tensor")


_ROW, _1X128, _128X128, _1X32 = (1, None), (1, 128), (128, 128), (1, 32)
RECIPES = (
    # The baseline: a 16-bit number has range enough, so s = 1. Same code, no scales.
    Recipe("bf16", x_fmt=BF16, w_fmt=BF16, g_fmt=BF16),
    # FP8-CSCALE (arXiv 2309.17224): fixed powers of two, here those of train.py's default run.
    Recipe("constant", amax="constant", rounding="pow2", bias=(3, 6, 16), g_fmt=E5M2),
    # FP8-AMAX (arXiv 2309.17224): a power of two from the amax; gradients keep 2^3 of headroom.
    Recipe("amax", rounding="pow2", margin=(0, 0, 3), max_exponent=31, g_fmt=E5M2),
    # Transformer Engine's DelayedScaling: the amax of past steps, so a kernel needs one pass.
    Recipe("delayed", amax="history", g_fmt=E5M2),
    # TE's Float8CurrentScaling, torchao's tensorwise: read twice; one scale couples all tokens.
    Recipe("current", g_fmt=E5M2),
    # torchao's rowwise: a scale for each token and each output channel.
    Recipe("rowwise", _ROW, _ROW, _ROW, rounding="pow2"),
    # DeepSeek-V3 (arXiv 2412.19437), TE's Float8BlockScaling: in fine tiles E4M3 will do for g.
    Recipe("blockwise", _1X128, _128X128, _1X128, rounding="pow2"),
    # OCP microscaling (v1.0), rounded up as in arXiv 2506.08027; native on Blackwell.
    Recipe("mxfp8", _1X32, _1X32, _1X32, rounding="pow2"),
)
RECIPES = {r.name: r for r in RECIPES}


def get_recipe(recipe: str | Recipe) -> Recipe:
    """A row of RECIPES by name; a Recipe passes through. Raises ValueError for an unknown name."""
    if not isinstance(recipe, Recipe) and recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}; choose from {', '.join(RECIPES)}")
    return recipe if isinstance(recipe, Recipe) else RECIPES[recipe]


# Each operand is read by two GEMMs: as it lies by the first, transposed by the second.
READERS = {"x": ("fprop", "wgrad"), "w": ("fprop", "dgrad"), "g": ("dgrad", "wgrad")}


def quantize_operand(x, operand: str, recipe: Recipe, history=None, copies="both", by="torch"):
    """Quantise x (R, C), the "x", "w" or "g" of a linear, for its two readers -> (x8, x8_t): (R, C)
    for the GEMM that contracts C, (C, R) for the one that contracts R. history: amax of past steps,
    a scalar tensor, 0 if none. copies: "both", "first" or "second" (the other is None). by: "torch"
    or "triton", the kernels that write both copies in one pass (kernels.py); these also take (a
    tensor, what to make of it): an operand that they compute as they cast it (section 7)."""
    i, tile, fmt = "xwg".index(operand), *(getattr(recipe, operand + f) for f in ("_tile", "_fmt"))
    first, second = (fmt if getattr(recipe, gemm) else BF16 for gemm in READERS[operand])
    if copies == "both" and first is not second:
        one = (quantize_operand(x, operand, recipe, history, c, by) for c in ("first", "second"))
        return next(one)[0], next(one)[1]
    fmt, amax = second if copies == "second" else first, history
    x, act = x if isinstance(x, tuple) else (x, {})
    if recipe.amax == "constant":
        amax = torch.full((), fmt.max * 2.0 ** -recipe.bias[i], device=x.device)
    how = dict(rounding=recipe.rounding, margin=recipe.margin[i], max_exponent=recipe.max_exponent)
    if by == "triton" and fmt in (E4M3, E5M2):
        import kernels

        *pairs, own = kernels.cast(x, fmt.dtype, tile, copies=copies, known=amax, **how, **act)
        return tuple(q and Quantized(*q, tile, fmt, own, recipe.rounding) for q in pairs)
    x8 = quantize(x, fmt, tile, amax=amax, **how) if copies != "second" else None
    if copies == "first" or x8 is not None and tile == tile[::-1]:  # a square tile serves both
        return x8, x8.t() if copies == "both" else None
    return x8, quantize(x, fmt, tile[::-1], amax=amax, **how).t()  # upright, then read transposed


# ------------------------------------------------------------------------------------------------
# 4. Health: how good is a quantised operand?
#
# SQNR is signal to error in dB: 6 dB are a bit, E4M3 gives about 31, E5M2 about 25. But one outlier
# can hold all the energy while everything else becomes zero: look at the underflow beside it.


def health(x: Tensor, x8: Quantized, where: Tensor | None = None) -> dict:
    """How x (R, C) survived; only the elements of the mask `where`, if given. SQNR in dB."""
    y, x = dequantize(x8), x.float()
    s = untile(torch.ones_like(tiles(x, x8.tile)) * x8.s[:, None, :, None], x.shape)
    x, y, s = (t[where] if where is not None else t.reshape(-1) for t in (x, y, s))
    top = x8.fmt.max + 2.0 ** (x8.fmt.emax - x8.fmt.mantissa - 1)  # half a step above the largest
    signal, noise = x.double().square().sum(), (x - y).double().square().sum()
    return {
        "sqnr": (10 * torch.log10(signal / noise)).item(),
        "underflow": ((y == 0) & (x != 0)).sum().item() / max((x != 0).sum().item(), 1),
        "clip": (x.abs() > top * s).float().mean().item(),  # lost more than a rounding does
        "peak": (x.abs().max() / x.abs().median()).item(),  # amax / median
    }


def tour():
    """What one outlier does to all the others, recipe by recipe."""
    print("One outlier in N(0,1), 256 x 512: SQNR in dB and underflow of the other elements")
    outliers = (1, 1e3, 1e4, 1e5, 1e6)
    print("  outlier   " + "".join(f"{size:<17g}" for size in outliers).rstrip())
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    others = torch.arange(x.numel()).view(x.shape) != 100 * 512 + 100
    for r in RECIPES.values():
        cells = []
        for x[100, 100] in outliers:  # assigns each of them to that element
            h = health(x, quantize_operand(x, "x", r, copies="first")[0], others)
            cells.append(f"{h['sqnr']:5.1f} {100 * h['underflow']:6.2f} %")
        print(f"  {r.name:9} " + "  ".join(cells))


# ------------------------------------------------------------------------------------------------
# 5. GEMM: A (M, K) . B (N, K)^T
#
# Emulation is the definition: decode, multiply, add in fp32. A scale that covers the whole of K
# leaves the sum, so the sum runs over bare codes and the scales multiply the output: tensor and row
# scales cost hardware nothing. Finer tiles are decoded first. Hardware has to agree with this.


class Backend(NamedTuple):
    cast: str  # "torch", or "triton": kernels.py
    gemm: str  # "emulated", "scaled_mm" (torch's own) or "triton"
    why: str  # for the user


def choose_backend(recipe: Recipe, device: torch.device) -> Backend:
    """Where the casts and GEMMs of a recipe run on a device; FP8Linear asks when it meets one."""
    formats = [recipe.x_fmt, recipe.w_fmt, recipe.g_fmt]
    cuda = device.type == "cuda" and torch.version.cuda is not None
    sm = torch.cuda.get_device_capability(device) if cuda else (0, 0)
    if {*formats} <= {BF16, FP32}:
        return Backend("torch", "emulated", "no FP8 in this recipe")
    if sm < (8, 9):
        where = "a GPU before Ada; decoded to BF16" if cuda else f"{device.type}; decoded to fp32"
        return Backend("torch", "emulated", f"no FP8 matrix units on {where}")
    kernels = {*formats} <= {E4M3, E5M2} and importlib.util.find_spec("triton") is not None
    x_tile, w_tile, g_tile = recipe.x_tile, recipe.w_tile, recipe.g_tile
    whole = {x_tile, w_tile, g_tile} <= {(None, None), _ROW}  # these scales leave the sum
    blocks = x_tile == g_tile == _1X128 and w_tile in (_1X128, _128X128)
    mx = x_tile == w_tile == g_tile == _1X32 and recipe.rounding != "fp32"
    rows = _ROW in (x_tile, w_tile, g_tile) and sm != (9, 0)
    if whole and formats.count(E5M2) < 2 and not rows:  # what cuBLAS takes, with an fp32 output
        return Backend("triton" if kernels else "torch", "scaled_mm", "FP8 tensor cores")
    if kernels and (whole or blocks or mx and sm >= (10, 0)):
        return Backend("triton", "triton", "FP8 tensor cores, Triton")
    where = ("triton", "triton") if kernels and mx else ("torch", "emulated")
    slow = "emulated here: right numbers, slower than BF16; for speed use current or delayed"
    return Backend(*where, f"{recipe.name} is {slow}")


def _scaled_mm(a8: Quantized, b8: Quantized, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """gemm_nt on FP8 tensor cores by way of torch: tensor or row scales, K and N padded to 16s."""
    (M, K), N = a8.q.shape, b8.q.shape[0]
    a, b = a8.q.contiguous(), b8.q.contiguous()
    if K % 16 or N % 16:  # not otherwise: padding by nothing would still copy
        a, b = (F.pad(t.view(torch.uint8), (0, -K % 16)).view(t.dtype) for t in (a, b))
        b = F.pad(b.view(torch.uint8), (0, 0, 0, -N % 16)).view(b.dtype)
    s_a, s_b = a8.s, b8.s
    if s_a.numel() > 1 or s_b.numel() > 1:
        s_a = s_a.flatten().expand(M).contiguous()[:, None]
        s_b = F.pad(s_b.flatten().expand(N), (0, -N % 16), value=1.0)[None]
    # (F.scaled_mm does the same, but breaks the graph of torch 2.11: pytorch#180604.)
    return torch._scaled_mm(a, b.t(), s_a, s_b, None, None, out_dtype, fast_accum)[:, :N]


def gemm_nt(a8: Quantized, b8: Quantized, out_dtype=torch.float32, backend="emulated",
            fast_accum=False) -> Tensor:  # fmt: skip
    """A (M, K) . B (N, K)^T -> (M, N) in out_dtype, summed in fp32; any M, N, K >= 1.
    backend: a Backend's gemm. fast_accum: Hopper may keep the running sum in about 14 bits."""
    formats, fp8 = {a8.fmt, b8.fmt}, {E4M3, E5M2}
    if backend == "scaled_mm" and formats <= fp8:
        return _scaled_mm(a8, b8, out_dtype, fast_accum)
    if backend == "triton" and formats <= fp8:
        import kernels

        return kernels.gemm_nt(a8.q, a8.s, b8.q, b8.s, out_dtype, fast_accum)
    bare = {a8.tile, b8.tile} <= {(None, None), (1, None)}  # the scales leave the sum
    a, b = (t.q if bare else dequantize(t) for t in (a8, b8))
    scaled = bare and not formats <= {BF16, FP32}
    # BF16 holds every FP8 code, also times a power of two. (A CPU is slow at BF16: there fp32.)
    exact = bare or "fp32" not in (a8.rounding, b8.rounding)
    with torch.autocast(a.device.type, enabled=False):
        if a.is_cuda and exact and formats <= fp8 | {BF16}:
            a, b = a.bfloat16(), b.bfloat16().t()
            y = torch.mm(a, b, out_dtype=torch.float32 if scaled else out_dtype)
        else:
            y = decode(a) @ decode(b).t()
    return (y.mul_(a8.s * b8.s.t()) if scaled else y).to(out_dtype)


# ------------------------------------------------------------------------------------------------
# 6. FP8 linear
#
#                 fprop                      dgrad                      wgrad
#     forward     x8 (M, K) . w8 (N, K)^T
#     backward                               g8 (M, N) . w8_t (K, N)^T  g8_t (N, M) . x8_t (K, M)^T
#
# Between forward and backward the layer keeps only what the two backward GEMMs will read:
#
#     saved   shape    bytes an element   why
#     x8_t    (K, M)   1 + scales         wgrad contracts M; a BF16 layer keeps x: 2 bytes
#     w8_t    (K, N)   1 + scales         dgrad contracts N; cast together with w8
#
# dw is added to an fp32 .grad, never rounded to 16 bits. db is the column sum of g before its cast.


def record(seen: Tensor, *copies: Quantized | None):
    """seen = max(seen, amax), however often (recomputed activations); never NaN or inf."""
    amax = next((c.amax.amax() for c in copies if c is not None and c.amax is not None), seen)
    seen.copy_(torch.where(amax.isfinite(), torch.maximum(seen, amax), seen))


class FP8Matmul(torch.autograd.Function):
    """y = x . w^T + b and its gradients, each GEMM in the formats that the recipe gives it.

    x (M, K), w (N, K) fp32, bias (N,) or None -> y (M, N) in x's dtype.
    fold     None, or powers of two (K,) that move between the operands: y = (x / fold) . (w fold)^T
             (section 7). dgrad reads w unfolded: the folded w has small columns that underflow.
    w_cast   (w8, w8_t), if `weights_cast` has made them.
    history  the amax of past steps for x, w and g, or three None; `seen` (3,) collects this step's.
    """

    @staticmethod
    def forward(ctx, x, w, bias, fold, w_cast, history, seen, recipe, backend, grad):
        h_x, h_w, h_g = history
        copies, by = "both" if grad else "first", backend.cast
        dtype = (x[0] if isinstance(x, tuple) else x).dtype
        x = x if fold is None or isinstance(x, tuple) else x / fold
        x8, x8_t = quantize_operand(x, "x", recipe, h_x, copies, by)
        if fold is None:
            w8, w8_t = w_cast or quantize_operand(w, "w", recipe, h_w, copies, by)
        else:
            w8, _ = quantize_operand(w * fold, "w", recipe, h_w, "first", by)
            _, w8_t = quantize_operand(w, "w", recipe, None, "second", by) if grad else (None, None)
        if seen is not None:
            record(seen[0], x8, x8_t)
            record(seen[1], w8, w8_t if fold is None else None)
        # fprop: x (M, K) . w (N, K)^T -> y (M, N). Fast accumulation is enough for activations.
        y = gemm_nt(x8, w8, dtype if bias is None else FP32.dtype, backend.gemm, fast_accum=True)

        if grad:
            ctx.save_for_backward(x8_t.q, x8_t.s, w8_t.q, w8_t.s, fold)
            ctx.x8_t, ctx.w8_t = (t._replace(q=None, s=None, amax=None) for t in (x8_t, w8_t))
            ctx.recipe, ctx.backend, ctx.h_g, ctx.seen = recipe, backend, h_g, seen
            ctx.x_dtype, ctx.has_bias = dtype, bias is not None
        return y if bias is None else (y + bias).to(dtype)

    @staticmethod
    def backward(ctx, g):
        return *FP8Matmul.gradients(ctx, ctx.saved_tensors, ctx.needs_input_grad, g), *[None] * 7

    @staticmethod
    def gradients(ctx, saved, wanted, g):
        x_q, x_s, w_q, w_s, fold = saved
        x8_t, w8_t = ctx.x8_t._replace(q=x_q, s=x_s), ctx.w8_t._replace(q=w_q, s=w_s)
        g8, g8_t = quantize_operand(g, "g", ctx.recipe, ctx.h_g, by=ctx.backend.cast)
        if ctx.seen is not None:
            record(ctx.seen[2], g8, g8_t)

        # dgrad: g (M, N) . w^T (K, N)^T -> dx (M, K)
        dx = gemm_nt(g8, w8_t, ctx.x_dtype, ctx.backend.gemm) if wanted[0] else None

        # wgrad: g^T (N, M) . x^T (K, M)^T -> dw (N, K), in fp32
        dw = gemm_nt(g8_t, x8_t, FP32.dtype, ctx.backend.gemm) if wanted[1] else None
        if fold is not None and dw is not None:
            dw = dw * fold
        db = g.float().sum(0) if ctx.has_bias else None
        return dx, dw, db


class FP8Linear(nn.Linear):
    """nn.Linear with its three GEMMs in the formats of a recipe: x (..., in) -> y (..., out).

    The weight (out, in) and the bias are fp32; y has x's dtype (under autocast, autocast's). With
    amax="history" it holds `amax_history` (length, 3), newest first, for x, w and g; call
    `end_step(model)` once per optimizer step. Evaluation reads the history and never writes it.
    """

    def __init__(self, in_features, out_features, bias=True, recipe="mxfp8"):
        super().__init__(in_features, out_features, bias)
        self.recipe = get_recipe(recipe)
        if self.recipe.amax == "history":
            self.register_buffer("amax_history", torch.zeros(self.recipe.amax_history_len, 3))
            self.register_buffer("amax_seen", torch.zeros(3), persistent=False)  # in this step
        self.apart = False  # whether `weights_cast` leaves it alone: it folds, or its cast stays
        self.w_cast = None  # (w8, w8_t) inside `weights_cast`
        self.backend = choose_backend(self.recipe, self.weight.device)

    def _apply(self, fn, *args, **kwargs):  # .to(device) and its kin
        super()._apply(fn, *args, **kwargs)
        self.backend = choose_backend(self.recipe, self.weight.device)
        return self

    def history(self) -> tuple:
        """The amax by which this step scales x, w and g, or three None. 0 before the first step: an
        operand then scales by its own. (TE starts with s = 1, which loses small gradients.)"""
        if self.recipe.amax != "history":
            return None, None, None
        newest = self.recipe.amax_compute_algo == "most_recent"
        return (self.amax_history[0].clone() if newest else self.amax_history.amax(0)).unbind()

    def how(self) -> tuple:
        """What FP8Matmul takes after its operands."""
        grad = torch.is_grad_enabled()
        seen = self.amax_seen if self.recipe.amax == "history" and self.training and grad else None
        return self.w_cast, self.history(), seen, self.recipe, self.backend, grad

    def forward(self, x: Tensor, fold: Tensor | None = None) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"x has {x.shape[-1]} features, this layer takes {self.in_features}")
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if x.numel() == 0:  # no tokens, no amax
            return F.linear(x.float(), self.weight, self.bias).to(x.dtype)
        y = FP8Matmul.apply(x.reshape(-1, x.shape[-1]), self.weight, self.bias, fold, *self.how())
        return y.view(*x.shape[:-1], self.out_features)


@contextlib.contextmanager
def weights_cast(model: nn.Module):
    """Cast each weight once, for all micro-batches of an optimizer step. Outside, every forward
    casts, so a change is always seen. Enter it in the forwards' grad mode. (Not folded weights.)"""
    layers = [m for m in model.modules() if isinstance(m, FP8Linear) and not m.apart]
    copies, before = "both" if torch.is_grad_enabled() else "first", [m.w_cast for m in layers]
    try:
        for m in layers:
            how = m.recipe, m.history()[1], copies, m.backend.cast
            m.w_cast = quantize_operand(m.weight.detach(), "w", *how)
        yield
    finally:
        for m, w_cast in zip(layers, before):
            m.w_cast = w_cast


@torch.no_grad()
def end_step(model: nn.Module, keep: bool = True):
    """Once per optimizer step: push what was seen (its maximum over all ranks, in one collective)
    into each history, newest first; what saw nothing keeps it. keep=False: forget, not push."""
    layers = [m for m in model.modules() if isinstance(m, FP8Linear) and m.recipe.amax == "history"]
    if not layers:
        return
    seen = torch.stack([m.amax_seen for m in layers])  # (layers, 3)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(seen, torch.distributed.ReduceOp.MAX)
    for m, now in zip(layers, seen):
        pushed = torch.cat([now[None], m.amax_history[:-1]])
        m.amax_history.copy_(torch.where((now > 0) & keep, pushed, m.amax_history))
        m.amax_seen.zero_()


__test__ = {  # a linear from 4 features to 2, by hand; `python -m pytest` checks it
    "worked example": """
>>> x = torch.tensor([[1.0, -2.0, 0.5, 0.1]])                          # (M, K) = (1, 4)
>>> w = torch.tensor([[0.25, 3.0, -1.0, 0.7], [0.1, 0.2, -0.3, 0.4]])  # (N, K) = (2, 4)
>>> x8, w8 = quantize(x), quantize(w)
>>> print(*(f"amax {t.amax.item():g}, s {t.s.item():.7f};" for t in (x8, w8)))
amax 2, s 0.0044643; amax 3, s 0.0066964;
>>> decode(x8.q)  # the largest became 448; the others were rounded, 22.4 to 22
tensor([[ 224., -448.,  112.,   22.]])
>>> gemm_nt(x8, w8), x @ w.t()  # and without FP8
(tensor([[-6.1727, -0.4092]]), tensor([[-6.1800, -0.4100]]))
"""
}


# ------------------------------------------------------------------------------------------------
# 7. Smooth-SwiGLU: an activation that squares its outliers
#
#     up, gate = x . w1^T, x . w2^T          (in Llama's own code w1 is the gate)
#     h = up * silu(gate)
#     y = h . w3^T
#
# If w1 and w2 of a channel point the same way, both factors of h peak for the same x: one 10 times
# larger makes h 100 times as large. Long training with weight decay aligns them (arXiv
# 2409.12517), and such a channel then sets the scale of all of h. The cure divides h by a power of
# two, `fold`, before the cast, which is exact, and multiplies it back where no cast sees it:
#
#     channel (the paper)        fold >= max over tokens of |h|     y = Q(h / fold) . Q(w3 fold)^T
#     token (its released code)  fold >= max over channels of |up|  y = fold (Q(h / fold) . Q(w3)^T)
#
# fold has no gradient; h is fp32 until its one cast; once trained, w1 and w3 absorb `channel`. Only
# casts read h and the gradient of (up, gate): FP8SwiGLU's kernels compute both and store neither.


def fold_of(up: Tensor, gate: Tensor, smooth: str) -> Tensor:
    """(..., H) each -> (1, H) for "channel", (..., 1) for "token"."""
    up, gate = up.detach().float(), gate.detach().float()
    if smooth == "token":
        return ceil_pow2(up.abs().amax(-1, keepdim=True))
    return ceil_pow2((up * F.silu(gate)).abs().view(-1, up.shape[-1]).amax(0, keepdim=True))


class Inner:  # the ctx of an FP8Matmul inside another function
    def save_for_backward(self, *tensors):
        self.to_save = tensors


class FP8SwiGLU(torch.autograd.Function):  # x (M, C) -> y (M, C)
    @staticmethod
    def forward(ctx, x, w12, w3, smooth, how12, how3):
        ctx.inner = one, two = Inner(), Inner()
        ug, token = FP8Matmul.forward(one, x, w12, None, None, *how12), smooth == "token"
        fold = fold_of(*ug.chunk(2, dim=-1), smooth) if smooth else None
        h, folds_w3 = (ug, dict(act="swiglu", fold=fold)), None if token else fold
        y = FP8Matmul.forward(two, h, w3, None, folds_w3, *how3)
        if how3[-1]:
            ctx.save_for_backward(ug, fold if token else None, *one.to_save, *two.to_save)
            one.to_save = two.to_save = None  # or checkpointing would free nothing
        return y * fold.to(y.dtype) if token else y

    @staticmethod
    def backward(ctx, g):
        (ug, fold, *saved), (one, two) = ctx.saved_tensors, ctx.inner  # fold: of a token
        g = g if fold is None else g.float() * fold
        dh, dw3, _ = FP8Matmul.gradients(two, saved[5:], (True, True), g)
        dug = dh, dict(act="swiglu_backward", ug=ug, fold=fold)
        dx, dw12, _ = FP8Matmul.gradients(one, saved[:5], (True, True), dug)
        return dx, dw12, dw3, None, None, None


class SwiGLU(nn.Module):
    """x (..., C) -> y (..., C) through `hidden` channels. smooth: None, "channel" or "token"."""

    def __init__(self, n_embd, hidden, recipe, w3_recipe=None, smooth=None):
        super().__init__()
        self.smooth = smooth
        self.w12 = FP8Linear(n_embd, 2 * hidden, False, recipe)  # one cast of x serves both
        self.w3 = FP8Linear(hidden, n_embd, False, w3_recipe or recipe)
        self.w3.apart = smooth == "channel"

    def forward(self, x: Tensor) -> Tensor:
        if self.fuses(x):
            operands = x.reshape(-1, x.shape[-1]), self.w12.weight, self.w3.weight, self.smooth
            return FP8SwiGLU.apply(*operands, self.w12.how(), self.w3.how()).view(x.shape)
        up, gate = self.w12(x).float().chunk(2, dim=-1)  # (..., H) each
        h = up * F.silu(gate)
        if not self.smooth or not x.numel():
            return self.w3(h).to(x.dtype)
        fold = fold_of(up, gate, self.smooth)
        y = self.w3(h, fold=fold) if self.smooth == "channel" else fold * self.w3(h / fold)
        return y.to(x.dtype)

    def fuses(self, x: Tensor) -> bool:
        """Only where kernels make all casts, no hook wants to see h, and no tile both halves."""
        for m in (self.w12, self.w3):
            fp8 = isinstance(m, FP8Linear) and m.recipe.fprop and m.recipe.dgrad and m.recipe.wgrad
            if not fp8 or m.backend.cast != "triton" or m._forward_hooks:
                return False
        return x.numel() > 0 and self.w3.in_features % (self.w12.recipe.g_tile[1] or 1) == 0


# ------------------------------------------------------------------------------------------------
# 8. GPT: one class, two families
#
#     family   norm        position   MLP       biases   head     attention
#     gpt2     LayerNorm   learned    GELU      yes      tied     multi-head
#     llama    RMSNorm     rotary     SwiGLU    no       untied   grouped queries (n_kv_head)
#
# FP8 runs in the linear layers of the blocks: wqkv, wo and the MLP's. Embeddings, norms, attention
# and loss stay in high precision. The head does too unless asked; so can the first and last blocks.

CONFIG_CHOICES = dict(family=("llama", "gpt2"), smooth=(None, "channel", "token"),
                      w3=(None, "bf16"), head=("bf16", "fp8"))  # fmt: skip


@dataclass
class GPTConfig:
    vocab_size: int = 256
    block_size: int = 256
    n_layer: int = 4
    n_head: int = 4
    n_kv_head: int | None = None  # None: as many as n_head
    n_embd: int = 128
    family: str = "llama"
    recipe: str | Recipe = "mxfp8"
    smooth: str | None = None  # None, "channel", "token" (llama)
    w3: str | None = None  # "bf16": the MLP's down projection stays BF16
    head: str = "bf16"  # "fp8": the head follows the recipe
    bf16_first: int = 0  # this many blocks at the start stay BF16
    bf16_last: int = 0  # and at the end
    hidden: int | None = None  # None: 4 C, or about 8/3 C for SwiGLU
    rope_theta: float = 10000.0
    rope_scaling: tuple | None = None  # (factor, low, high, old T): Llama 3's, see GPT
    norm_eps: float = 1e-5
    checkpoint: bool = False  # recompute each block in backward instead of keeping its activations

    def __post_init__(self):
        self.recipe = get_recipe(self.recipe)
        self.n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        wide = 8 * self.n_embd // 3 if self.family == "llama" else 4 * self.n_embd
        step = 128 if wide >= 1024 else 32  # whole tiles
        self.hidden = (wide + step - 1) // step * step if self.hidden is None else self.hidden
        check_choices(self, CONFIG_CHOICES)
        for field in "vocab_size block_size n_layer n_head n_kv_head n_embd hidden".split():
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it counts from 1")
        odd = self.family == "llama" and self.n_embd // self.n_head % 2
        if odd or self.n_embd % self.n_head or self.n_head % self.n_kv_head:
            why = "n_head must divide n_embd (to an even number: rotary positions turn pairs)"
            raise ValueError(f"{why}, and n_kv_head must divide n_head")
        if self.smooth and self.family != "llama":
            raise ValueError("smooth needs a SwiGLU: family llama")

    def recipe_of(self, layer: int | None, linear: str) -> Recipe:
        """The rule: which recipe a linear of block `layer` gets (None: the head)."""
        if layer is None:
            return self.recipe if self.head == "fp8" else RECIPES["bf16"]
        inner = self.bf16_first <= layer < self.n_layer - self.bf16_last
        return self.recipe if inner and not (linear == "w3" and self.w3) else RECIPES["bf16"]

    def norm(self) -> nn.Module:
        """Over the last axis; its input is fp32."""
        return (nn.LayerNorm if self.family == "gpt2" else nn.RMSNorm)(self.n_embd, self.norm_eps)


class GELUMLP(nn.Module):
    def __init__(self, n_embd, hidden, recipe, w3_recipe, _):
        super().__init__()
        self.w1 = FP8Linear(n_embd, hidden, recipe=recipe)
        self.w3 = FP8Linear(hidden, n_embd, recipe=w3_recipe)

    def forward(self, x):
        return self.w3(F.gelu(self.w1(x), approximate="tanh"))


def rotate(x, cos, sin):
    """Rotary positions: pairs (i, i + D/2) of x (B, H, T, D) turn by position * frequency."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: GPTConfig, layer: int):
        super().__init__()
        self.n_head, self.n_kv, self.D = c.n_head, c.n_kv_head, c.n_embd // c.n_head
        bias, heads = c.family == "gpt2", c.n_head + 2 * c.n_kv_head
        self.wqkv = FP8Linear(c.n_embd, heads * self.D, bias, c.recipe_of(layer, "wqkv"))
        self.wo = FP8Linear(c.n_embd, c.n_embd, bias, c.recipe_of(layer, "wo"))

    def forward(self, x, rope, cache=None):
        B, T, C = x.shape
        qkv = self.wqkv(x).view(B, T, self.n_head + 2 * self.n_kv, self.D).transpose(1, 2)
        q, k, v = qkv.split([self.n_head, self.n_kv, self.n_kv], dim=1)  # (B, heads, T, D)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if cache is not None:  # [k, v] of the tokens before these, or []
            k, v = (torch.cat(pair, 2) for pair in zip(cache, (k, v))) if cache else (k, v)
            cache[:] = k, v
        old = k.shape[2] - T  # tokens before these; without any the mask is the usual triangle
        mask = torch.ones(T, old + T, device=x.device).tril(old).bool() if old else None
        grouped = self.n_kv < self.n_head  # several query heads share a key head
        y = F.scaled_dot_product_attention(q, k, v, mask, 0.0, not old, enable_gqa=grouped)
        return self.wo(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, c: GPTConfig, layer: int):
        super().__init__()
        self.norm1, self.norm2 = c.norm(), c.norm()
        self.attn = Attention(c, layer)
        mlp, w3 = GELUMLP if c.family == "gpt2" else SwiGLU, c.recipe_of(layer, "w3")
        self.mlp = mlp(c.n_embd, c.hidden, c.recipe_of(layer, "w12"), w3, c.smooth)

    def forward(self, x, rope, cache=None):
        x = x + self.attn(self.norm1(x.float()).to(x.dtype), rope, cache)
        return x + self.mlp(self.norm2(x.float()).to(x.dtype))


class GPT(nn.Module):
    """logits, loss = GPT(config)(idx, targets), as nanoGPT: idx and targets (B, T) int64, T at most
    block_size; a target of -1 does not count. Without targets only the last position's logits
    (B, 1, vocab_size) are computed. Activations are BF16 on a GPU and fp32 on a CPU. cache, a list
    of a [] for each block, makes a call go on where the last one with it ended."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        c = self.config = config
        padded = (c.vocab_size + 63) // 64 * 64  # tensor cores like multiples; see `head`
        self.wte = nn.Embedding(padded, c.n_embd)
        self.wpe = nn.Embedding(c.block_size, c.n_embd) if c.family == "gpt2" else None
        self.blocks = nn.ModuleList(Block(c, i) for i in range(c.n_layer))
        self.norm = c.norm()
        self.lm_head = FP8Linear(c.n_embd, padded, bias=False, recipe=c.recipe_of(None, "lm_head"))
        if c.family == "gpt2":
            self.lm_head.weight = self.wte.weight  # tied: one parameter
        else:
            D = c.n_embd // c.n_head
            freq = c.rope_theta ** (-torch.arange(0, D, 2).float() / D)
            if c.rope_scaling:  # what turns less than `low` times in the old context is stretched
                factor, low, high, old_T = c.rope_scaling
                kept = ((old_T * freq / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
                freq = freq * (kept + (1 - kept) / factor)
            angle = torch.outer(torch.arange(c.block_size).float(), freq)  # (T, D/2)
            self.register_buffer("rope", torch.stack((angle.cos(), angle.sin())), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:  # GPT-2's initialisation; what adds to the residual stream is smaller
                depth = 2 * c.n_layer if name.endswith(("wo.weight", "w3.weight")) else 1
                nn.init.normal_(p, std=0.02 / math.sqrt(depth))
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        self.lm_head.weight.data[c.vocab_size :] = 0  # padded ids: no part in an amax either

    def forward(self, idx: Tensor, targets: Tensor | None = None, cache: list | None = None):
        start = cache[0][0].shape[2] if cache and cache[0] else 0
        end, most = start + idx.shape[1], self.config.block_size
        if not start < end <= most:
            raise ValueError(f"{end} tokens in a row; this model takes 1 to {most}")
        x = self.wte(idx)  # (B, T, C)
        if self.wpe is not None:
            x = x + self.wpe.weight[start:end]
        rope = None if self.wpe is not None else self.rope[:, start:end]
        x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
        for i, block in enumerate(self.blocks):
            if self.config.checkpoint and torch.is_grad_enabled():
                x = torch.utils.checkpoint.checkpoint(block, x, rope, use_reentrant=False)
            else:
                x = block(x, rope, cache and cache[i])
        x = self.norm((x if targets is not None else x[:, -1:]).float()).to(x.dtype)
        logits = self.lm_head(x)[..., : self.config.vocab_size].float()  # padded ids get none
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    weights_cast = weights_cast

    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())  # a tied head counts once


# ------------------------------------------------------------------------------------------------
# 9. FP8 Adam: one byte a moment
#
# AdamW keeps two fp32 moments: 8 bytes a parameter, four times a BF16 weight. Here m is E4M3 (it
# needs precision) and v is E5M2 (it needs range: it is a square, and divided by), as in arXiv
# 2409.12517. A step decodes them, updates with the exact new ones, and encodes (section 2).
#
# Two traps. A v that rounds to 0 while its m does not would make a huge step, of m / eps: so a
# positive v never becomes code 0, but 1. And an average that moves by less than half a step of the
# grid does not move at all under round to nearest: stochastic rounding moves it in the mean.

MASTERS = {"fp32": None, "fp16": FP16, "fp8": E4M3}


class FP8Adam(torch.optim.Optimizer):
    """AdamW (decoupled weight decay) with 8-bit moments: 2 bytes and scales a parameter, not 8.

    block    None: one scale a tensor; n: one for each n elements of it, flattened
    master   "fp32", or "fp16" / "fp8" to study low-precision master weights: after each step the
             parameter is rounded to that format with one scale. (Its storage stays fp32: emulated.)
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01,
                 m_fmt=E4M3, v_fmt=E5M2, block=None, stochastic_rounding=False,
                 master="fp32"):  # fmt: skip
        if master not in MASTERS:
            raise ValueError(f"master is {master!r}, not one of {', '.join(MASTERS)}")
        self.m_fmt, self.v_fmt, self.tile = m_fmt, v_fmt, (None, block)
        self.stochastic, self.master = stochastic_rounding, MASTERS[master]
        self.cast = None  # "torch" or "triton"; None: as choose_backend finds the device
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            adam = {k: group[k] for k in ("lr", "eps", "weight_decay")}
            adam |= dict(zip(("beta1", "beta2"), group["betas"]))
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self.update(p, self.state[p], adam)
        return loss

    def blank(self, p: Tensor) -> dict:
        """The state of a parameter before its first step."""
        state, zero = {"step": torch.zeros((), device=p.device)}, p.new_zeros(1, p.numel())
        for k, fmt in (("m", self.m_fmt), ("v", self.v_fmt)):
            state[k], state[k + "_scale"] = quantize(zero, fmt, self.tile)[:2]
        return state

    def update(self, p: Tensor, state: dict, adam: dict):
        """One parameter: decode, PyTorch's own AdamW, encode, or one kernel that does all three."""
        if p.dtype is not torch.float32:
            raise ValueError(f"FP8Adam updates fp32 parameters, not {p.dtype}")
        if not state:
            state |= self.blank(p)
        cast = self.cast or choose_backend(RECIPES["current"], p.device).cast
        block = self.tile[1] or 0
        whole = p.is_contiguous() and block <= 4096 and block & (block - 1) == 0
        if cast == "triton" and whole and not self.stochastic and self.master is None:
            import kernels

            state["step"] += 1
            moments = (state[k] for k in ("m", "v", "m_scale", "v_scale", "step"))
            return kernels.adam_step(p, p.grad.contiguous(), *moments, block, **adam)
        m = dequantize(Quantized(state["m"], state["m_scale"], self.tile, self.m_fmt))
        v = dequantize(Quantized(state["v"], state["v_scale"], self.tile, self.v_fmt))
        moments, g = ([m.view(p.shape)], [v.view(p.shape)]), p.grad.contiguous()
        how = dict(fused=p.is_contiguous(), amsgrad=False, maximize=False)
        adamw([p], [g], *moments, [], [state["step"]], **how, **adam)
        for k, x, fmt in (("m", m, self.m_fmt), ("v", v, self.v_fmt)):
            x8 = quantize(x, fmt, self.tile, stochastic=self.stochastic)
            state[k], state[k + "_scale"] = x8.q, x8.s
        codes = state["v"].view(torch.uint8)
        torch.maximum(codes, (v > 0).view(torch.uint8), out=codes)  # 0 becomes 1 where v > 0
        if self.master is not None:
            p.copy_(dequantize(quantize(p.reshape(1, -1), self.master)).view(p.shape))

    def load_state_dict(self, state_dict):
        """Bit for bit. Raises ValueError for the state of another optimizer, format or block."""
        saved = sum((group["params"] for group in state_dict["param_groups"]), [])
        params = sum((group["params"] for group in self.param_groups), [])
        blanks = {p: self.blank(p) if p.numel() else {} for p in params}
        for i, blank in zip(saved, blanks.values()):
            entry = state_dict["state"].get(i, blank)
            kinds = ({k: (t.dtype, t.shape) for k, t in d.items()} for d in (entry, blank))
            if next(kinds) != next(kinds):
                raise ValueError("this is the state of another optimizer, format or block")
        super().load_state_dict(state_dict)
        for p, state in self.state.items():  # super() has cast the codes to p's dtype
            state |= {k: state[k].to(t) for k, t in blanks[p].items()}


if __name__ == "__main__":
    tour()
