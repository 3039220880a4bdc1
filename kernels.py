"""fp8gpt, the speed: Triton casts and GEMMs, each of which replaces one function of fp8gpt.py.

fp8gpt.py, "the lesson", says what must come out, this file how a GPU gets there fast. Two numbers
decide:

    bytes    A cast does next to no arithmetic: its floor is the bytes that it moves, over the
             memory's bandwidth. So x is read as seldom as its scale allows, one read makes both
             FP8 copies, and what only a cast would read (SwiGLU, section 2) is never stored.
    FLOPs    A GEMM of 2 M N K operations is bound by the tensor cores, which do twice as many in
             FP8 as in BF16. Hopper's take FP8 operands only K-major, that is, with the contracted
             axis contiguous, on both sides: hence the transposed copies that the casts write.

    of fp8gpt.py                        here                               bytes an element (BF16 x)
    quantize, tile (None, None)         cast_tensor                        4 delayed, 6 current
    quantize, tile (1, None)            cast_rows                          6
    quantize, tile (1, 128), (128, 128) cast_blocks                        4, and the scales
    quantize, tile (1, 32)              cast_mx                            4, and the scales
    gemm_nt                             gemm_scaled, gemm_blocks, gemm_mx
    FP8Adam.update                      adam_step                          16 or 22 a parameter

Casts equal the lesson bit for bit (but for the codes of a tile that holds NaN, whose s is NaN, and
for the last bit of a GPU's exp); a GEMM adds in another order. Below each kernel stands what
launches it; `cast` and `gemm_nt`, at the end, choose by tile. In Triton's interpreter
(TRITON_INTERPRET=1) all of it runs on a CPU, where the tests compare it with the lesson; what that
cannot show they read in machine code, and what neither shows tests/gpu_bench.py tries on a GPU.
"""

import contextlib
import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses import FakeTensor
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))
INF, NAN = tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000)  # as bits of fp32

# ------------------------------------------------------------------------------------------------
# 1. What every cast does to a number
#
#     amax   the largest |x|, compared as integers: the bits of fp32 magnitudes are in the order of
#            the numbers, and NaN lies above inf: one maximum finds the amax and any NaN and inf
#     e, s   fp8gpt.encode_scale: x is multiplied by e before the cast, and s = 1 / e undoes it
#     code   fp8gpt.encode: x e, rounded to the grid, saturated


@triton.jit
def magnitude(x):
    """|x| of any float dtype, as the bits of an fp32 number."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def encode_scale(amax, HOW: tl.constexpr):
    """amax as bits -> multiplier e, decode scale s; s is NaN where amax is NaN or inf. HOW: format,
    rounding, margin, max_exponent of fp8gpt.encode_scale."""
    FMT: tl.constexpr = HOW[0]
    MARGIN: tl.constexpr = HOW[2]
    MAX_EXPONENT: tl.constexpr = HOW[3]
    FMAX: tl.constexpr = 448.0 if FMT == tl.float8e4nv else 57344.0
    EMAX: tl.constexpr = 8 if FMT == tl.float8e4nv else 15
    LOW: tl.constexpr = FMAX * 2.0**-MAX_EXPONENT
    MAX: tl.constexpr = 3.4028234663852886e38  # of fp32
    HIGH: tl.constexpr = FMAX * 2.0**MAX_EXPONENT if EMAX + MAX_EXPONENT <= 127 else MAX
    a = tl.minimum(tl.maximum(amax.to(tl.float32, bitcast=True), LOW), HIGH)
    if HOW[1] == "fp32":
        e = tl.div_rn(a * 0 + FMAX, a) * 2.0**-MARGIN  # Triton's `/` is not exact
        s = tl.div_rn(e * 0 + 1, e)
    else:
        # s = 2^n. 448 and 57344 are 1.75 times a power of two: "pow2" rounds amax / FMAX up by the
        # carry that a mantissa above 1.75 makes; "floor" drops the mantissa. No division.
        bits = a.to(tl.int32, bitcast=True) + (0x1FFFFF if HOW[1] == "pow2" else 0)
        bits = (bits & 0x7F800000) - (EMAX << 23)
        s = bits.to(tl.float32, bitcast=True) * 2.0**MARGIN
        e = ((254 << 23) - bits).to(tl.float32, bitcast=True) * 2.0**-MARGIN
    s = tl.where(amax == 0, 1.0, s).to(tl.int32, bitcast=True)
    s = tl.where(amax < INF, s, NAN).to(tl.float32, bitcast=True)
    return tl.where(amax == 0, 1.0, e), s


@triton.jit
def round_fp8(x, FMT: tl.constexpr):
    """fp8gpt.round_to: fp32 -> the nearest number of the grid, ties to even, saturated, as fp32.

    Add 2^23 steps of the grid: fp32 has no bits left below a step, and its own rounding is ours."""
    FMAX: tl.constexpr = 448.0 if FMT == tl.float8e4nv else 57344.0
    MANTISSA: tl.constexpr = 3 if FMT == tl.float8e4nv else 2
    EMIN: tl.constexpr = -6 if FMT == tl.float8e4nv else -14
    bits = x.to(tl.int32, bitcast=True)
    a = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), FMAX)
    exponent = tl.maximum(a.to(tl.int32, bitcast=True) >> 23, EMIN + 127)
    magic = ((exponent - MANTISSA + 23) << 23).to(tl.float32, bitcast=True)
    r = ((a + magic) - magic).to(tl.int32, bitcast=True) | (bits & -0x80000000)
    return tl.where(x == x, r.to(tl.float32, bitcast=True), x)


@triton.jit
def to_fp8(x, FMT: tl.constexpr):
    """fp32 -> codes. From sm_89 on one instruction, cvt.rn.satfinite, does to two numbers what
    round_fp8 spells out. The interpreter's cast does not (triton#8322), so there it comes first."""
    if INTERPRET:
        q = round_fp8(x, FMT).to(FMT).to(tl.uint8, bitcast=True)
        return tl.where(x == x, q, 0x7F).to(tl.uint8).to(FMT, bitcast=True)
    else:
        return x.to(FMT)


@triton.jit
def load(ptr, rows, cols, R, C, stride_r, stride_c):
    """The elements (rows, cols) of a matrix (R, C), 0 outside; offsets have 64 bits."""
    inside = (rows < R)[:, None] & (cols < C)[None, :]
    at = rows.to(tl.int64)[:, None] * stride_r + cols.to(tl.int64)[None, :] * stride_c
    return tl.load(ptr + at, mask=inside, other=0.0)


@triton.jit
def store(ptr, rows, cols, R, C, pitch, x):
    """x into the elements (rows, cols) of a matrix (R, C) whose rows start every `pitch`."""
    inside = (rows < R)[:, None] & (cols < C)[None, :]
    at = rows.to(tl.int64)[:, None] * pitch + cols.to(tl.int64)[None, :]
    tl.store(ptr + at, x, mask=inside)


@triton.jit
def tile_at(C, GRID: tl.constexpr):
    """The tile of this program: its half, its place (i, j) there, its rows and its columns. GRID:
    halves, rows of a tile, columns of a tile."""
    half, at, across = tl.program_id(0) % GRID[0], tl.program_id(0) // GRID[0], tl.cdiv(C, GRID[2])
    i, j = at // across, at % across
    return half, i, j, i * GRID[1] + tl.arange(0, GRID[1]), j * GRID[2] + tl.arange(0, GRID[2])


# Whatever allocates and launches is a torch operator, so that torch.compile keeps one graph: on
# tensors that have shapes but no memory it launches nothing. (Gradients: fp8gpt.FP8Matmul.)

FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def torch_operator(fn, mutates=()):
    op = torch.library.custom_op(f"fp8gpt::{fn.__name__}", fn, mutates_args=mutates)
    op.register_fake(fn)
    return op


def launch(kernel, programs: int, *args, **options):
    first = args[0] if isinstance(args[0], tuple) else args
    x = next(t for t in first if isinstance(t, Tensor))
    if not (isinstance(x, FakeTensor) or x.is_meta):
        with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
            kernel[(programs,)](*args, **options)


@functools.cache
def capability(device: torch.device) -> tuple:
    """(9, 0) for Hopper; and the interpreter plays a Hopper, of two processors."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if cuda else 2


def has_tma(device: torch.device) -> bool:
    return capability(device) >= (9, 0)


def tiles(R: int, C: int, r: int, c: int) -> int:
    return triton.cdiv(R, r) * triton.cdiv(C, c)


# ------------------------------------------------------------------------------------------------
# 2. What a cast reads: x, or a SwiGLU that nobody stores
#
# Between the two linears of an MLP lies h = up silu(gate) / fold (fold: section 7 of fp8gpt.py; 1
# without). A kernel that writes h and another that reads it, to cast it, move 2 + 2 bytes that one
# kernel, which casts what it has just computed, does not. So all casts take their tiles from here:
#
#     a source                   the operand that is cast                    bytes to read, in BF16
#     x                          x (R, C)                                    2 an element
#     (up | gate)                h (R, C)                                    4 an element of h
#     dh and (up | gate)         the gradient of (up | gate), (R, 2 C):      3 an element of these
#                                dh silu(gate) | dh up silu'(gate)
#
# Where a scale needs an amax first, h is computed twice. The two halves of the gradient read the
# same numbers, in programs that start together: the second finds them in the L2 cache.


@triton.jit
def value(source, half, rows, cols, R, C):
    """The elements (rows, cols) of the operand, or of one half of it: x in its own dtype, a SwiGLU
    in fp32; 0 outside (R, C)."""
    x_ptr, stride_r, stride_c, ug_ptr, pitch, row_fold_ptr, col_fold_ptr = source  # in this order
    if ug_ptr is None:  # None is known when Triton compiles: the other branch vanishes
        return load(x_ptr, rows, cols, R, C, stride_r, stride_c)
    else:
        up = load(ug_ptr, rows, cols, R, C, pitch, 1).to(tl.float32)
        gate = load(ug_ptr + C, rows, cols, R, C, pitch, 1).to(tl.float32)
        below = 1 + tl.exp(-gate)  # sigmoid(gate) = 1 / below
        if x_ptr is None:
            x = up * (gate / below)
        else:
            x = load(x_ptr, rows, cols, R, C, stride_r, stride_c).to(tl.float32)
            if half == 0:
                x *= gate / below
            else:
                x *= up * (1 / below * (1 + gate * (1 - 1 / below)))
        if row_fold_ptr is not None:
            fold = tl.load(row_fold_ptr + rows, mask=rows < R, other=1.0)[:, None]
            x *= tl.div_rn(fold * 0 + 1, fold)  # exact: a power of two
        if col_fold_ptr is not None:
            fold = tl.load(col_fold_ptr + cols, mask=cols < C, other=1.0)[None, :]
            x *= tl.div_rn(fold * 0 + 1, fold)
        return x


class Job(NamedTuple):  # a cast, as all of its kernels take it
    source: tuple  # see `value`
    codes: tuple  # q, q_t and the pitches of both
    R: int
    C: int  # of a half
    halves: int
    how: tuple  # see encode_scale

    def run(self, kernel, *own, tile: tuple, **options):
        """A program for each tile of (R, C), and of each half."""
        programs = self.halves * tiles(self.R, self.C, *tile)
        launch(kernel, programs, *self[:4], *own, self.how, (self.halves, *tile), **options)

    def two(self, first, second) -> list:
        """[first(), second()], made for q and for q_t; None beside a copy that nobody wants."""
        q, q_t, *_ = self.codes
        return [None if q is None else first(), None if q_t is None else second()]


def empty_codes(x: Tensor, R: int, C: int, fmt: torch.dtype) -> Tensor:
    """Rows start at multiples of 16 bytes, as TMA wants them: then a GEMM takes any shape, since
    TMA itself reads zeros beyond the end of a row."""
    return x.new_empty((R, triton.cdiv(C, 16) * 16), dtype=fmt)[:, :C]


# ------------------------------------------------------------------------------------------------
# 3. Casts whose scale is known before the tile is read: cast_tensor and cast_rows
#
# A scale of the whole tensor, or of a whole row, must be known before the first code is written, so
# x is read twice: 2 bytes for the amax, then 2 + 1 + 1 to cast. Delayed scaling knows its amax
# beforehand: the first kernel finds it positive and returns without a read, and the second collects
# this step's amax on the way. That is all that delayed scaling saves: 4 bytes instead of 6.
#
#     for each tile of x, in parallel                  for each tile of x, in parallel
#         amax = max(amax, |tile|)    (atomic)             e   = encode_scale(amax)
#                                                          q   = code(tile e)
#                                                          q_t = code(tile^T e)
#
# The tile is transposed in BF16, before the cast: shared memory hands a thread 8 transposed numbers
# of 16 bits in one instruction (LDSM.T), but 8-bit numbers one at a time. 64 x 64 numbers take few
# registers: 28 warps (of a plain x) share a processor and hide the latency of memory.


@triton.jit
def _amax(source, codes, R, C, known_ptr, amax_ptr, amax_t_ptr, LINES: tl.constexpr,
          HOW: tl.constexpr, GRID: tl.constexpr):  # fmt: skip
    if known_ptr is not None:
        if tl.load(known_ptr) > 0:
            return
    half, _, _, rows, cols = tile_at(C, GRID)
    m = magnitude(value(source, half, rows, cols, R, C))
    if not LINES:
        tl.atomic_max(amax_ptr, tl.max(m), sem="relaxed")
    else:  # of every row and of every column
        if amax_ptr is not None:
            tl.atomic_max(amax_ptr + rows, tl.max(m, 1), mask=rows < R, sem="relaxed")
        if amax_t_ptr is not None:
            at = amax_t_ptr + half * C + cols
            tl.atomic_max(at, tl.max(m, 0), mask=cols < C, sem="relaxed")


@triton.jit
def _cast_whole(source, codes, R, C, known_ptr, amax_ptr, s_ptr, HOW: tl.constexpr,
                GRID: tl.constexpr):  # fmt: skip
    q_ptr, qt_ptr, pitch, pitch_t = codes
    half, _, _, rows, cols = tile_at(C, GRID)
    x, at, end = value(source, half, rows, cols, R, C), half * C + cols, half * C + C
    own = tl.max(magnitude(x))
    if amax_ptr is None:  # a square of the recipe is a tile of this program
        e, s = encode_scale(own, HOW)
        tl.store(s_ptr + tl.program_id(0), s)
    else:
        amax = tl.load(amax_ptr)
        if known_ptr is not None:
            known = tl.load(known_ptr)
            amax = tl.where(known > 0, known.to(tl.int32, bitcast=True), amax)
        e, s = encode_scale(amax, HOW)
        # Program 0 writes s, and as a maximum: as bits NaN is above every number, so any program
        # that meets NaN or inf has the last word, whenever it runs.
        tl.atomic_max(amax_ptr, own, sem="relaxed")
        s = tl.where(own < INF, s.to(tl.int32, bitcast=True), NAN)
        tl.atomic_max(s_ptr, s, mask=(tl.program_id(0) == 0) | (own >= INF), sem="relaxed")
    if q_ptr is not None:
        store(q_ptr, rows, at, R, end, pitch, to_fp8(x.to(tl.float32) * e, HOW[0]))
    if qt_ptr is not None:
        store(qt_ptr, at, rows, end, R, pitch_t, to_fp8(tl.trans(x).to(tl.float32) * e, HOW[0]))


def amaxes(job: Job, x: Tensor, known: Tensor | None, lines: bool) -> list:
    """As bits: the amax of everything, and None; or (`lines`) that of every row and every column,
    beside those copies that are wanted."""
    zeros = functools.partial(x.new_zeros, dtype=torch.int32)
    out = [zeros(1), None]
    if lines:
        out = job.two(lambda: zeros(job.R), lambda: zeros(job.halves * job.C))
    edge = 128 if job.source[3] is None else 64  # a SwiGLU needs more registers
    job.run(_amax, known, *out, lines, tile=(edge, edge), num_warps=edge // 16)
    return out


def cast_tensor(job: Job, x: Tensor, known: Tensor | None) -> list:
    """`quantize` with tile (None, None) -> [amax, s], each (1, 1); `known` is quantize's amax.

    Bytes an element of a BF16 x: 4 if `known` is positive, else 6."""
    (amax, _), s = amaxes(job, x, known, False), x.new_zeros(1, dtype=torch.int32)
    job.run(_cast_whole, known, amax, s, tile=(64, 64))
    return [t.view(torch.float32).view(1, 1) for t in (amax, s)]


@triton.jit
def _cast_rows(source, codes, R, C, amax_ptr, amax_t_ptr, s_ptr, st_ptr, HOW: tl.constexpr,
               GRID: tl.constexpr):  # fmt: skip
    q_ptr, qt_ptr, pitch, pitch_t = codes
    half, i, j, rows, cols = tile_at(C, GRID)
    x, at, end = value(source, half, rows, cols, R, C), half * C + cols, half * C + C
    if q_ptr is not None:
        amax = tl.load(amax_ptr + rows, mask=rows < R, other=0)
        e, s = encode_scale(amax, HOW)
        if j + half == 0:
            tl.store(s_ptr + rows, s, mask=rows < R)
        store(q_ptr, rows, at, R, end, pitch, to_fp8(x.to(tl.float32) * e[:, None], HOW[0]))
    if qt_ptr is not None:
        amax = tl.load(amax_t_ptr + at, mask=at < end, other=0)
        e, s = encode_scale(amax, HOW)
        if i == 0:
            tl.store(st_ptr + at, s, mask=at < end)
        v = tl.trans(x).to(tl.float32) * e[:, None]
        store(qt_ptr, at, rows, end, R, pitch_t, to_fp8(v, HOW[0]))


def cast_rows(job: Job, x: Tensor) -> list:
    """`quantize` with tile (1, None), of x (R, C) and of its transpose -> [s (R, 1), s_t (C, 1)].

    Bytes an element of a BF16 x: 6; for one copy alone 5."""
    bits = amaxes(job, x, None, True)
    scales = [None if t is None else torch.empty_like(t, dtype=torch.float32) for t in bits]
    job.run(_cast_rows, *bits, *scales, tile=(64, 64))
    return [None if s is None else s[:, None] for s in scales]


# ------------------------------------------------------------------------------------------------
# 4. Casts whose scale is found on the way: cast_blocks and cast_mx
#
# If a tile of the recipe fits into a tile of the program, the amax is there as soon as x is: one
# read, no atomics, 2 + 1 + 1 bytes and the scales (4 bytes for 128 numbers, or 1 for 32, each way).
# The price is arithmetic: threads of a warp must compare their maxima, by shuffles.
#
#     x = load(tile)
#     for v in (x, x^T):
#         amax = the maximum of every 128 (32) numbers of a row of v
#         e, s = encode_scale(amax)
#         store code(v e), s
#
# An H200 that copies 4.3 TB/s has time for about 27 instructions an element at 4 bytes. These tiles
# make Triton spend 21 (tests/machine_code.py counts); 64 x 64 would take 44 for MX, shuffles.


@triton.jit
def quantize_rows(x, HOW: tl.constexpr, WIDTH: tl.constexpr):
    """A tile (r, c), one scale for WIDTH numbers of a row -> codes (r, c), s (r, c / WIDTH)."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    v = tl.reshape(x, (R, C // WIDTH, WIDTH))
    e, s = encode_scale(tl.max(magnitude(v), 2), HOW)
    return tl.reshape(to_fp8(v.to(tl.float32) * e[:, :, None], HOW[0]), (R, C)), s


@triton.jit
def in_half(i, half, n, HALVES: tl.constexpr):
    """Places i of one half on an axis of HALVES n places; beyond n: beyond the end of the axis."""
    if HALVES == 1:
        return i
    else:
        return tl.where(i < n, half * n + i, HALVES * n)


@triton.jit
def store_scales(ptr, rows, cols, R, C, s, E8M0: tl.constexpr, SWIZZLE: tl.constexpr):
    """s (r, c) into a matrix (R, C): fp32 column by column, because a GEMM reads a column for each
    step along K; or as bytes, row by row or in the order of Blackwell's tensor cores."""
    inside = (rows < R)[:, None] & (cols < C)[None, :]
    rows, cols = rows.to(tl.int64)[:, None], cols.to(tl.int64)[None, :]
    if E8M0:
        s = (s.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)  # the exponent; of NaN, 255
    if SWIZZLE:  # 32_4_4: 128 rows x 4 columns are 512 bytes; rows 0, 32, 64, 96 lie side by side
        at = (rows // 128 * tl.cdiv(C, 4) + cols // 4) * 512
        at += rows % 32 * 16 + rows % 128 // 32 * 4 + cols % 4
    elif E8M0:
        at = rows * C + cols
    else:
        at = rows + cols * R
    tl.store(ptr + at, s, mask=inside)


@triton.jit
def _cast_tiles(source, codes, R, C, s_ptr, st_ptr, WIDTH: tl.constexpr, E8M0: tl.constexpr,
                SWIZZLE: tl.constexpr, HOW: tl.constexpr, GRID: tl.constexpr):  # fmt: skip
    q_ptr, qt_ptr, pitch, pitch_t = codes
    half, i, j, rows, cols = tile_at(C, GRID)
    x, at, end = value(source, half, rows, cols, R, C), half * C + cols, half * C + C
    if q_ptr is not None:
        q, s = quantize_rows(x, HOW, WIDTH)
        store(q_ptr, rows, at, R, end, pitch, q)
        blocks, across = j * (GRID[2] // WIDTH) + tl.arange(0, GRID[2] // WIDTH), tl.cdiv(C, WIDTH)
        blocks = in_half(blocks, half, across, GRID[0])
        store_scales(s_ptr, rows, blocks, R, GRID[0] * across, s, E8M0, SWIZZLE)
    if qt_ptr is not None:
        q, s = quantize_rows(tl.trans(x), HOW, WIDTH)
        store(qt_ptr, at, rows, end, R, pitch_t, q)
        blocks = i * (GRID[1] // WIDTH) + tl.arange(0, GRID[1] // WIDTH)
        lines = in_half(cols, half, C, GRID[0])
        store_scales(st_ptr, lines, blocks, GRID[0] * C, tl.cdiv(R, WIDTH), s, E8M0, SWIZZLE)


def cast_blocks(job: Job, x: Tensor, square: bool) -> list:
    """`quantize` with tile (1, 128), of x (R, C) and of its transpose -> [s (R, C/128), s_t (C,
    R/128)]; `square`: with tile (128, 128), for weights -> [s].

    Bytes an element of a BF16 x: 4, and 4 a scale."""
    down, across = triton.cdiv(job.R, 128), job.halves * triton.cdiv(job.C, 128)
    empty = functools.partial(x.new_empty, dtype=torch.float32)
    if square:
        job.run(_cast_whole, None, None, s := empty(down, across), tile=(128, 128), num_warps=8)
        return [s]
    scales = job.two(lambda: empty(across, job.R).t(), lambda: empty(down, job.halves * job.C).t())
    job.run(_cast_tiles, *scales, 128, False, False, tile=(128, 128), num_warps=8)
    return scales


def cast_mx(job: Job, x: Tensor) -> list:
    """`quantize` with tile (1, 32), of x (R, C) and of its transpose -> [s (R, C/32), s_t (C,
    R/32)] as torch.float8_e8m0fnu; on Blackwell flat, in the layout 32_4_4 of its tensor cores and
    of F.scaled_mm.

    Bytes an element of a BF16 x: 4, and 1 a scale."""
    R, C, swizzle = job.R, job.halves * job.C, capability(x.device)[0] >= 10

    def empty(R, C):
        if swizzle:
            return x.new_zeros(triton.cdiv(R, 128) * triton.cdiv(C, 4) * 512, dtype=torch.uint8)
        return x.new_empty((R, C), dtype=torch.uint8)

    scales = job.two(lambda: empty(R, triton.cdiv(C, 32)), lambda: empty(C, triton.cdiv(R, 32)))
    job.run(_cast_tiles, *scales, 32, True, swizzle, tile=(32, 128), num_warps=2)
    return [None if t is None else t.view(torch.float8_e8m0fnu) for t in scales]


# ------------------------------------------------------------------------------------------------
# 5. gemm_scaled: the scale waits until the sum is done
#
# A scale of a tensor or a row leaves the sum over K, so the loop is that of a plain FP8 GEMM, and
# the scales multiply each output once: 2 M N K operations at the tensor cores' rate.
#
#     for each tile of y that this program owns:       the program lives on while there are tiles
#         acc = 0
#         for k in steps of 128:                       TMA brings the next steps meanwhile
#             acc += a[:, k] . b[:, k]^T
#         y = acc s_a s_b^T
#
# Hopper's FP8 tensor cores keep about 14 bits of a running sum. That will do for activations (fast
# accumulation: fprop), not for gradients: there (dgrad, wgrad) every 128 products are added to a
# sum in fp32 registers. max_num_imprecise_acc=0 would leave the FP8 tensor cores; on other GPUs
# Triton ignores it.


@triton.jit
def tile_of(tile, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """Row and column where output tile number `tile` begins. Eight tiles down, then one right: the
    tiles in flight share rows of A and of B in the L2 cache."""
    GROUP: tl.constexpr = 8
    down, right = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = tile // (GROUP * right) * GROUP
    height = tl.minimum(down - first, GROUP)
    inner = tile % (GROUP * right)
    return (first + inner % height) * BM, inner // height * BN


@triton.jit
def operand(a, row, k, R, K, stride, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    """Codes from (row, k) of an operand (R, K), 0 outside: `a` is a TMA descriptor, or, on Ada,
    which has none, a pointer."""
    if TMA:
        return a.load([row, k])
    else:
        return load(a, row + tl.arange(0, ROWS), k + tl.arange(0, COLS), R, K, stride, 1)


@triton.jit
def plain(x):
    """Codes for tl.dot. (The interpreter multiplies fp32.)"""
    return x.to(tl.float32) if INTERPRET else x


@triton.jit
def _gemm_scaled(a_ptr, b_ptr, sa_ptr, sb_ptr, y_ptr, M, N, K, a_stride, b_stride, sa_stride,
                 sb_stride, IMPRECISE: tl.constexpr, TMA: tl.constexpr, PROGRAMS: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    count = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), count, PROGRAMS, flatten=True):
        m, n = tile_of(tile, M, N, BM, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, 128):
            a = operand(a_ptr, m, k, M, K, a_stride, BM, 128, TMA)
            b = operand(b_ptr, n, k, N, K, b_stride, BN, 128, TMA)
            acc = tl.dot(plain(a), plain(b).T, acc, max_num_imprecise_acc=IMPRECISE)
        rows = m + tl.arange(0, BM)
        s_a = tl.load(sa_ptr + rows * sa_stride, mask=rows < M, other=0)
        halves = (acc,)  # a wide tile leaves in two halves: half the registers and shared memory
        if PARTS == 2:
            halves = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        for p in tl.static_range(PARTS):
            cols = n + p * (BN // PARTS) + tl.arange(0, BN // PARTS)
            s_b = tl.load(sb_ptr + cols * sb_stride, mask=cols < N, other=0)
            y = halves[p] * (s_a[:, None] * s_b[None, :])
            store(y_ptr, rows, cols, M, N, N, y.to(y_ptr.dtype.element_ty))


def k_major(a: Tensor) -> Tensor:
    """a (R, K), or a copy of it, with rows that TMA can read."""
    if a.stride(1) == 1 and a.stride(0) % 16 == 0 and a.storage_offset() % 16 == 0:
        return a
    return empty_codes(a, *a.shape, a.dtype).copy_(a)


def tma(a: Tensor, rows: int, cols: int):
    """The descriptor by which TMA loads tiles of a, which is made on the host."""
    if isinstance(a, FakeTensor) or not has_tma(a.device):
        return a
    return TensorDescriptor.from_tensor(a, [rows, cols])


def is_small(device: torch.device) -> bool:
    """Ada and consumer Blackwell: 99 KB of shared memory for a program instead of 227."""
    return capability(device) == (8, 9) or capability(device)[0] == 12


@torch_operator
def gemm_scaled(
    a: Tensor, s_a: Tensor, b: Tensor, s_b: Tensor, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """`gemm_nt`: codes a (M, K), b (N, K); s_a (M, 1) or (1, 1), s_b (N, 1) or (1, 1) fp32 ->
    (M, N). Any mix of formats; any M, N, K >= 1."""
    (M, K), N = a.shape, b.shape[0]
    a, b, y = k_major(a), k_major(b), a.new_empty((M, N), dtype=out_dtype)
    programs = processors(a.device)
    tile, options = (128, 128, 1), dict(num_warps=8, num_stages=4)  # BM, BN, PARTS
    if is_small(a.device):
        options["num_stages"] = 3
    elif fast_accum and tiles(M, N, 128, 256) >= programs:
        # A third more products for each byte that is loaded. (A second sum, in fp32, would not fit
        # into the registers, and few tiles would leave processors idle.) An fp32 output takes the
        # shared memory of the fourth stage.
        tile = (128, 256, 2)
        options["num_stages"] = 4 if out_dtype.itemsize == 2 else 3
    how = (None if fast_accum else 128), has_tma(a.device), programs
    strides = (s.stride(0) if s.numel() > 1 else 0 for s in (s_a, s_b))  # one scale serves all
    shape = M, N, K, a.stride(0), b.stride(0), *strides
    launch(
        _gemm_scaled, min(programs, tiles(M, N, *tile[:2])), tma(a, tile[0], 128),
        tma(b, tile[1], 128), s_a, s_b, y, *shape, *how, *tile, **options,
    )  # fmt: skip
    return y


# ------------------------------------------------------------------------------------------------
# 6. gemm_blocks: a scale for every 128 products
#
# The scales change along K, so the tensor core sums 128 products and the ordinary units add the
# scaled sum to fp32 registers: 2 instructions for each element and step, while the tensor core
# waits. It need not idle: tiles of 64 x 128 are small enough for three programs to share a
# processor, and while one adds another multiplies. Precise accumulation comes for free.
#
#     acc = 0
#     for k in steps of 128:
#         acc += (a[:, k] . b[:, k]^T) s_a[:, k] s_b[:, k]^T       s_b: one number for 128 x 128
#     y = acc


@triton.jit
def _gemm_blocks(a_ptr, b_ptr, sa_ptr, sb_ptr, y_ptr, M, N, K, a_stride, b_stride, sb_n, sb_k,
                 B_ROWS: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr,
                 BN: tl.constexpr):  # fmt: skip
    m, n = tile_of(tl.program_id(0), M, N, BM, BN)
    rows, cols = m + tl.arange(0, BM), n + tl.arange(0, BN)
    acc, blocks = tl.zeros((BM, BN), tl.float32), tl.cdiv(K, 128)
    for k in range(0, blocks):
        a = operand(a_ptr, m, k * 128, M, K, a_stride, BM, 128, TMA)
        b = operand(b_ptr, n, k * 128, N, K, b_stride, BN, 128, TMA)
        block = k + tl.arange(0, 1)
        s_a = load(sa_ptr, rows, block, M, blocks, 1, M)  # (BM, 1)
        s_b = load(sb_ptr, block, cols // B_ROWS, blocks, tl.cdiv(N, B_ROWS), sb_k, sb_n)  # (1, BN)
        acc += tl.dot(plain(a), plain(b).T) * s_a * s_b
    store(y_ptr, rows, cols, M, N, N, acc.to(y_ptr.dtype.element_ty))


@torch_operator
def gemm_blocks(a: Tensor, s_a: Tensor, b: Tensor, s_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`gemm_nt`: codes a (M, K), b (N, K); s_a (M, K/128) fp32, and s_b (N, K/128), or (N/128,
    K/128) for squares -> (M, N)."""
    (M, K), N = a.shape, b.shape[0]
    a, b, y = k_major(a), k_major(b), a.new_empty((M, N), dtype=out_dtype)
    s_a = s_a.t().contiguous().t()  # column by column, as cast_blocks writes it
    bm, bn = 64, 128 if has_tma(a.device) else 64  # Ada keeps both operands in registers, too
    how = (1 if s_b.shape[0] == N else 128), has_tma(a.device), bm, bn
    shape = M, N, K, a.stride(0), b.stride(0), *s_b.stride()
    operands = tma(a, bm, 128), tma(b, bn, 128), s_a, s_b, y
    launch(_gemm_blocks, tiles(M, N, bm, bn), *operands, *shape, *how, num_warps=4, num_stages=3)
    return y


# ------------------------------------------------------------------------------------------------
# 7. gemm_mx: a scale for every 32 products
#
# Blackwell's tensor cores multiply by the scales themselves, one byte for 32 codes, at the full FP8
# rate. No earlier GPU of NVIDIA can: Hopper and Ada decode the codes to BF16 on the way to their
# BF16 tensor cores, which is exact, and slower than a BF16 GEMM: right numbers, no speed.
#
#     acc = 0
#     for k in steps of 128:
#         Blackwell: acc += dot_scaled(a[:, k], s_a[:, k], b[:, k], s_b[:, k])
#         else:      acc += (a[:, k] s_a[:, k]) . (b[:, k] s_b[:, k])^T         in BF16
#     y = acc


@triton.jit
def decode_mx(q, s):
    """Codes (r, c) and E8M0 bytes (r, c / 32) -> BF16; exact for scales from 2^-117 to 2^112."""
    R: tl.constexpr = q.shape[0]
    C: tl.constexpr = q.shape[1]
    bits = tl.where(s == 0, 0x400000, s.to(tl.int32) << 23)  # a byte of 0 stands for 2^-127
    s = tl.where(s == 255, NAN, bits).to(tl.float32, bitcast=True)
    q, s = (plain(q), s) if INTERPRET else (q.to(tl.bfloat16), s.to(tl.bfloat16))
    return tl.reshape(tl.reshape(q, (R, C // 32, 32)) * s[:, :, None], (R, C))


@triton.jit
def load_swizzled(ptr, row, k, R, across, ROWS: tl.constexpr):
    """E8M0 bytes (ROWS, 4) of the rows from `row` and the blocks from 4 k on, in layout 32_4_4."""
    tile = row // 128 + tl.arange(0, ROWS // 128)[:, None]
    at = (tile.to(tl.int64) * across + k) * 512 + tl.arange(0, 512)[None, :]
    s = tl.load(ptr + at, mask=tile * 128 < R, other=0)
    s = tl.permute(tl.reshape(s, (ROWS // 128, 32, 4, 4)), (0, 2, 1, 3))
    return tl.reshape(s, (ROWS, 4))


@triton.jit
def _gemm_mx(a_ptr, b_ptr, sa_ptr, sb_ptr, y_ptr, M, N, K, a_stride, b_stride, FMT_A: tl.constexpr,
             FMT_B: tl.constexpr, NATIVE: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr,
             BN: tl.constexpr):  # fmt: skip
    m, n = tile_of(tl.program_id(0), M, N, BM, BN)
    rows, cols = m + tl.arange(0, BM), n + tl.arange(0, BN)
    acc, blocks = tl.zeros((BM, BN), tl.float32), tl.cdiv(K, 32)
    for k in range(0, tl.cdiv(K, 128)):
        a = operand(a_ptr, m, k * 128, M, K, a_stride, BM, 128, TMA)
        b = operand(b_ptr, n, k * 128, N, K, b_stride, BN, 128, TMA)
        if NATIVE:
            s_a = load_swizzled(sa_ptr, m, k, M, tl.cdiv(blocks, 4), BM)
            s_b = load_swizzled(sb_ptr, n, k, N, tl.cdiv(blocks, 4), BN)
            acc = tl.dot_scaled(a, s_a, FMT_A, b.T, s_b, FMT_B, acc)
        else:
            at = k * 4 + tl.arange(0, 4)
            a = decode_mx(a, load(sa_ptr, rows, at, M, blocks, blocks, 1))
            b = decode_mx(b, load(sb_ptr, cols, at, N, blocks, blocks, 1))
            acc = tl.dot(a, b.T, acc)
    store(y_ptr, rows, cols, M, N, N, acc.to(y_ptr.dtype.element_ty))


@torch_operator
def gemm_mx(a: Tensor, s_a: Tensor, b: Tensor, s_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`gemm_nt`: codes a (M, K), b (N, K); scales as cast_mx writes them -> (M, N). Swizzled scales
    need Blackwell."""
    (M, K), N, native = a.shape, b.shape[0], s_a.dim() == 1
    a, b, y = k_major(a), k_major(b), a.new_empty((M, N), dtype=out_dtype)
    if native and is_small(a.device):
        bm, bn, options = 128, 128, dict(num_warps=8, num_stages=2)
    elif native:
        warps = 4 if out_dtype.itemsize == 2 else 8  # fp32 outputs need more registers
        bm, bn, options = 128, 256, dict(num_warps=warps, num_stages=4)
    elif is_small(a.device):  # decoding takes registers: a small tile for Ada, or they spill
        bm, bn, options = 64, 128, dict(num_warps=8, num_stages=2)
    else:
        bm, bn, options = 128, 128, dict(num_warps=8, num_stages=3)
    names = ("e4m3" if t.dtype is torch.float8_e4m3fn else "e5m2" for t in (a, b))
    how = *names, native, has_tma(a.device), bm, bn
    operands = tma(a, bm, 128), tma(b, bn, 128), s_a.view(torch.uint8), s_b.view(torch.uint8), y
    shape = M, N, K, a.stride(0), b.stride(0)
    launch(_gemm_mx, tiles(M, N, bm, bn), *operands, *shape, *how, **options)
    return y


# ------------------------------------------------------------------------------------------------
# 8. adam_step: AdamW between two casts
#
# torch's fused AdamW moves 28 bytes a parameter: it reads p, g, m, v and writes p, m, v in fp32.
# With moments of one byte it is 4 + 4 + 1 + 1 and 4 + 1 + 1: 16, if every block of the flattened
# tensor has its scale. A scale of the whole tensor must be known before the first code is written,
# so the new moments are computed twice: 6 bytes more. Every element is updated in place by the
# program that has read it.
#
#     m, v = code_m s_m, code_v s_v
#     m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2
#     p  = (1 - lr decay) p - lr (m / bias1) / (sqrt(v / bias2) + eps)      bias = 1 - beta^step
#     encode m and v; a v > 0 never becomes code 0


@triton.jit
def bias_of(step, log_beta):
    """1 - beta^step = 1 - e^x, which cancels near 0: there -x (1 + x/2 (1 + x/3 ...))."""
    x = step * log_beta
    series = x * 0 + 1
    for k in tl.static_range(8):
        series = 1 + x * series * (1 / (9 - k))
    return tl.where(x > -0.5, -x * series, 1 - tl.exp(x))


@triton.jit
def encode_moment(ptr, s_ptr, rows, at, inside, x, amax, FMT: tl.constexpr, FLOOR: tl.constexpr):
    """x (r, c) into codes at `at`, s into s_ptr[rows]; FLOOR: no positive x becomes code 0."""
    e, s = encode_scale(amax, (FMT, "fp32", 0, 126))
    tl.store(s_ptr + rows, s, mask=tl.max(inside.to(tl.int32), 1) > 0)
    code = to_fp8(x * e[:, None], FMT).to(tl.uint8, bitcast=True)
    if FLOOR:
        code = tl.where((code == 0) & (x > 0), 1, code).to(tl.uint8)
    tl.store(ptr + at, code, mask=inside)


@triton.jit
def _adam(p_ptr, g_ptr, m_ptr, v_ptr, sm_ptr, sv_ptr, amax_ptr, new_ptr, step_ptr, N, rate1, rate2,
          beta2, log1, log2, lr, decay, eps, AMAX: tl.constexpr, M_FMT: tl.constexpr,
          V_FMT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = rows.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < N
    scale = rows * 0 if amax_ptr is not None else rows  # one for all, or one a row
    known = (scale * BLOCK < N) & (rows.to(tl.int64) * BLOCK < N)
    m = tl.load(m_ptr + at, mask=inside, other=0).to(M_FMT, bitcast=True).to(tl.float32)
    v = tl.load(v_ptr + at, mask=inside, other=0).to(V_FMT, bitcast=True).to(tl.float32)
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    m *= tl.load(sm_ptr + scale, mask=known, other=0.0)[:, None]
    v *= tl.load(sv_ptr + scale, mask=known, other=0.0)[:, None]
    m += rate1 * (g - m)
    v = beta2 * v + rate2 * (g * g)
    if AMAX:
        tl.atomic_max(amax_ptr, tl.max(magnitude(m)), sem="relaxed")
        tl.atomic_max(amax_ptr + 1, tl.max(magnitude(v)), sem="relaxed")
    else:
        step = tl.load(step_ptr)
        root = tl.sqrt(v) / tl.sqrt(bias_of(step, log2))
        p = tl.load(p_ptr + at, mask=inside, other=0.0) * (1 - lr * decay)
        p -= lr / bias_of(step, log1) * (m / (root + eps))
        tl.store(p_ptr + at, p, mask=inside)
        if amax_ptr is not None:
            amax_m, amax_v = tl.load(amax_ptr + scale), tl.load(amax_ptr + 1 + scale)
            sm_ptr, sv_ptr = new_ptr, new_ptr + 1  # the old scale is still read by others
        else:
            amax_m, amax_v = tl.max(magnitude(m), 1), tl.max(magnitude(v), 1)
        encode_moment(m_ptr, sm_ptr, scale, at, inside, m, amax_m, M_FMT, False)
        encode_moment(v_ptr, sv_ptr, scale, at, inside, v, amax_v, V_FMT, True)


@functools.partial(torch_operator, mutates=("p", "m", "v", "s_m", "s_v"))
def adam_step(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, s_m: Tensor, s_v: Tensor, step: Tensor, block: int,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """fp8gpt.FP8Adam's step of p (fp32) with gradient g, both contiguous, in place: codes m, v
    (1, N) with scales s_m, s_v (1, 1), or (1, N / block) for a `block` that is a power of two up to
    4096; 0: one scale. step: a scalar tensor, 1 in the first step.

    Bytes a parameter: 16, or 22 with one scale; and 16 for each block."""
    size, (amax, new) = block or 256, (None, None)
    if not block:
        amax, new = p.new_zeros(2, dtype=torch.int32), p.new_empty(2)
    logs = (math.log(max(beta, 1e-30)) for beta in (beta1, beta2))
    state = m.view(torch.uint8), v.view(torch.uint8), s_m, s_v, amax, new, step
    scalars = p.numel(), 1 - beta1, 1 - beta2, beta2, *logs, lr, weight_decay, eps
    how = FORMATS[m.dtype], FORMATS[v.dtype], max(1, 2048 // size), size
    programs = triton.cdiv(p.numel(), max(2048, size))
    if not block:
        launch(_adam, programs, p, g, *state, *scalars, True, *how)
    launch(_adam, programs, p, g, *state, *scalars, False, *how)
    if not block:
        s_m.copy_(new[:1])
        s_v.copy_(new[1:])


# ------------------------------------------------------------------------------------------------
# 9. The doors

TILES = {(None, None): "tensor", (1, None): "row", (1, 128): "block", (128, 128): "square",
         (1, 32): "mx"}  # fmt: skip


@torch_operator
def cast_operator(
    x: Tensor, fmt: torch.dtype, tile: str, rounding: str, margin: int, max_exponent: int,
    copies: str, known: Tensor | None, act: str, ug: Tensor | None, fold: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """-> what `cast` returns, in a row, without what is None."""
    (R, C), halves, source = x.shape, 1, (x, *x.stride(), None, 0)
    if act == "swiglu":
        C, source = C // 2, (None, 0, 0, x, x.stride(0))
    elif act == "swiglu_backward":
        halves, source = 2, (x, *x.stride(), ug, ug.stride(0))
    by_row = fold is not None and fold.shape == (R, 1)
    source = *source, fold if by_row else None, None if by_row else fold
    q = empty_codes(x, R, halves * C, fmt) if copies != "second" else None
    q_t = empty_codes(x, halves * C, R, fmt) if copies != "first" else None
    codes = q, q_t, *(0 if t is None else t.stride(0) for t in (q, q_t))
    job = Job(source, codes, R, C, halves, (FORMATS[fmt], rounding, margin, max_exponent))
    if tile == "tensor":
        scales = cast_tensor(job, x, known)
    elif tile in ("row", "mx"):
        scales = cast_rows(job, x) if tile == "row" else cast_mx(job, x)
    else:
        scales = cast_blocks(job, x, tile == "square")
    return [t for t in (q, q_t, *scales) if t is not None]


def cast(
    x: Tensor, fmt: torch.dtype, tile: tuple, rounding="fp32", margin=0, max_exponent=126,
    copies="both", known: Tensor | None = None, act="none", ug: Tensor | None = None,
    fold: Tensor | None = None,
) -> tuple:  # fmt: skip
    """fp8gpt.quantize of an operand (R, C) in tiles, and of its transpose -> ((q (R, C), s), (q_t
    (C, R), s_t), amax). A copy that is not wanted is None; amax is (1, 1) for a whole tensor, else
    None. Raises ValueError for what has no kernel.

    copies  "both", "first" or "second". known: quantize's amax, a scalar, for a whole tensor
    act     "none": the operand is x, any float dtype and strides; "swiglu": x (R, 2 C) is up | gate
            and the operand h; "swiglu_backward": x (R, C/2) is dh, `ug` (R, C) up | gate, and the
            operand their gradient
    fold    (R, 1) or (1, C) fp32, powers of two: divides h
    """
    if x.dim() != 2 or x.numel() == 0 or fmt not in FORMATS:
        raise ValueError(f"no cast of {tuple(x.shape)} to {fmt}: a matrix, E4M3 or E5M2, please")
    if tile not in TILES or tile == (1, 32) and rounding == "fp32":
        raise ValueError(f"no cast in tiles {tile} with scales {rounding}")
    if known is not None:
        if tile != (None, None):
            raise ValueError(f"no cast in tiles {tile} by a known amax")
        known = known.to(x.device, torch.float32)
    if act != "none":
        both = x if act == "swiglu" else ug
        R, C = both.shape[0], both.shape[1] // 2
        fits = act == "swiglu" or x.shape == (R, C) and C % (tile[1] or 1) == 0  # no tile has both
        fits = fits and (fold is None or fold.shape in ((R, 1), (1, C)))
        if not fits or both.stride(1) != 1 or both.shape[1] % 2 or tile == (128, 128):
            raise ValueError(f"no {act} of {tuple(both.shape)} in tiles {tile}")
    how = rounding, margin, max_exponent, copies, known, act, ug, fold
    made, amax, n = cast_operator(x, fmt, TILES[tile], *how), None, 1 + (copies == "both")
    q, s = made[:n], made[n:]
    if tile == (None, None):
        amax, s = s[0], s[1:] * n
    elif tile == (128, 128):
        s = [s[0], s[0].t()]
    first = (q[0], s[0]) if copies != "second" else None
    return first, (q[-1], s[-1]) if copies != "first" else None, amax


def gemm_nt(
    a: Tensor, s_a: Tensor, b: Tensor, s_b: Tensor, out_dtype=torch.float32, fast_accum=False
) -> Tensor:
    """fp8gpt.gemm_nt: codes a (M, K), b (N, K) and their scales, as `cast` makes them -> (M, N)."""
    (M, K), N = a.shape, b.shape[0]
    bare = s_a.shape in ((M, 1), (1, 1)) and s_b.shape in ((N, 1), (1, 1))
    mx, blocks = s_a.dtype is torch.float8_e8m0fnu, triton.cdiv(K, 128)
    blocked = s_a.shape == (M, blocks) and s_b.shape in ((N, blocks), (triton.cdiv(N, 128), blocks))
    if b.shape[1] != K or s_a.dtype is not s_b.dtype or not (bare or mx or blocked):
        shapes = " ".join(f"{tuple(t.shape)}" for t in (a, s_a, b, s_b))
        raise ValueError(f"no product of codes and scales of the shapes {shapes}")
    if mx:
        return gemm_mx(a, s_a, b, s_b, out_dtype)
    if bare:
        return gemm_scaled(a, s_a, b, s_b, out_dtype, fast_accum)
    return gemm_blocks(a, s_a, b, s_b, out_dtype)
