"""kernels.py in Triton's interpreter, on a CPU, against the lesson."""

import dataclasses
import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton
import triton.language as tl

import kernels
from fp8gpt import (
    BF16,
    E4M3,
    E5M2,
    GPT,
    RECIPES,
    Backend,
    FP8Linear,
    GPTConfig,
    Recipe,
    dequantize,
    encode,
    encode_scale,
    end_step,
    gemm_nt,
    quantize,
)  # fmt: skip

# numpy warns of inf and NaN, torch of its own torch.jit
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:.torch.jit")

TRITON = tuple(int(v) for v in triton.__version__.split(".")[:2])
if TRITON < (3, 7) and tuple(int(v) for v in np.__version__.split(".")[:2]) >= (2, 4):
    pytest.skip("the interpreter of Triton 3.6 needs numpy 2.3", allow_module_level=True)
FP32_SUM = 1e-6  # relative: sums of up to 400 products in fp32, in another order
TILES = {"tensor": (None, None), "row": (1, None), "block": (1, 128), "square": (128, 128),
         "mx": (1, 32)}  # fmt: skip
KERNELS = Backend("triton", "triton", "a test")


def same(a, b):
    """Bit for bit, but that any NaN equals any other; 0 and -0 differ."""
    a, b = a.float(), b.float()
    equal = (a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()
    return a.shape == b.shape and bool(equal.all())


def same_cast(q, s, expected):
    """Scales everywhere, codes where the scale is a number: those of a tile of NaN say nothing."""
    ones = torch.ones(q.shape).to(q.dtype)
    real = dequantize(expected._replace(q=ones)).isfinite()
    equal = q.view(torch.uint8) == expected.q.view(torch.uint8)
    return same(s, expected.s) and bool((equal | ~real).all())


# Casts -------------------------------------------------------------------------------------------


@triton.jit
def encode_all(x_ptr, q_ptr, n, FMT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(q_ptr + i, kernels.to_fp8(x, FMT), mask=i < n)


@triton.jit
def scale_all(a_ptr, e_ptr, s_ptr, n, FMT: tl.constexpr, ROUNDING: tl.constexpr,
              MARGIN: tl.constexpr, MAX_EXPONENT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    amax = kernels.magnitude(tl.load(a_ptr + i, mask=i < n, other=0.0))
    e, s = kernels.encode_scale(amax, FMT, ROUNDING, MARGIN, MAX_EXPONENT)
    tl.store(e_ptr + i, e, mask=i < n)
    tl.store(s_ptr + i, s, mask=i < n)


def every_kind_of_number():
    """All BF16 numbers, 100,000 random fp32 patterns, all powers of two and their neighbours, and
    what lies at and next to the ties of both grids."""
    bf16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,)).int()
    powers = (torch.arange(1, 255, dtype=torch.int32) << 23)[:, None] + torch.tensor([-1, 0, 1])
    codes = [torch.arange(127, dtype=torch.uint8).view(f.dtype).float() for f in (E4M3, E5M2)]
    ties = torch.cat([(c[1:] + c[:-1]) / 2 for c in codes])
    ties = ties[ties.isfinite()].view(torch.int32)[:, None] + torch.tensor([-1, 0, 1])
    patterns = torch.cat([bits, powers.flatten().int(), ties.flatten().int()])
    return torch.cat([bf16, patterns.view(torch.float32)])


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_codes_of_every_kind_of_number(fmt):
    x = every_kind_of_number()
    q = torch.empty(x.shape, dtype=fmt.dtype)
    encode_all[(triton.cdiv(len(x), 8192),)](x, q, len(x), kernels.FORMATS[fmt.dtype], 8192)
    expected, real = encode(x.clone(), fmt).view(torch.uint8), ~x.isnan()
    assert torch.equal(q.view(torch.uint8)[real], expected[real])
    assert q.float().isnan().equal(x.isnan())


@pytest.mark.parametrize("rounding", ["fp32", "pow2", "floor"])
@pytest.mark.parametrize("margin, max_exponent", [(0, 126), (3, 31), (0, 119), (0, 112)])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_scales_of_every_kind_of_amax(fmt, rounding, margin, max_exponent):
    amax = every_kind_of_number().abs()
    e, s = torch.empty_like(amax), torch.empty_like(amax)
    how = kernels.FORMATS[fmt.dtype], rounding, margin, max_exponent
    scale_all[(triton.cdiv(len(amax), 8192),)](amax, e, s, len(amax), *how, 8192)
    expected, real = encode_scale(amax, fmt, rounding, margin, max_exponent), amax.isfinite()
    assert torch.equal(e[real], expected[real])
    assert torch.equal(s[real], expected.reciprocal()[real]) and s[~real].isnan().all()


def awkward(kind, shape):
    x = torch.randn(shape) * torch.exp(3 * torch.randn(shape))
    if kind == "subnormal":
        x = torch.randn(shape) * 1e-40
    elif kind == "huge":
        x = torch.randn(shape) * 1e38
    elif kind == "zeros":
        x[: shape[0] // 2 + 1] = 0
        x[-1:] = -0.0
    elif kind == "NaN and inf":
        x[0, 0], x[-1, -1] = torch.nan, torch.inf
    elif kind == "BF16":
        x = x.bfloat16()
    elif kind == "transposed":
        x = (torch.randn(shape[::-1]) * 7).t()
    elif kind == "strided":
        x = torch.randn(2 * shape[0], shape[1] + 3)[::2, 3:]
    return x


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "kind",
    ["random", "subnormal", "huge", "zeros", "NaN and inf", "BF16", "transposed", "strided"],
)
def test_casts_equal_the_lesson_bit_for_bit(kind, tile):
    r, c = TILES[tile]
    shapes = [(130, 45), (33, 260), (1, 7)] if kind == "random" else [(70, 131)]
    for shape, fmt in itertools.product(shapes, (E4M3, E5M2)):
        x, rounding = awkward(kind, shape), "pow2" if tile != "tensor" else "fp32"
        (q, s), (q_t, s_t), amax = kernels.cast(x, fmt.dtype, (r, c), rounding)
        assert same_cast(q, s, quantize(x, fmt, (r, c), rounding))
        assert same_cast(q_t, s_t, quantize(x, fmt, (c, r), rounding).t())
        if tile == "tensor":
            assert same(amax, quantize(x, fmt).amax)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("rounding", ["fp32", "pow2", "floor"])
def test_a_cast_takes_every_rounding_and_makes_the_copies_that_are_wanted(rounding, tile):
    (r, c), x = TILES[tile], torch.randn(40, 150) * 5
    if tile == "mx" and rounding == "fp32":
        pytest.skip("MX scales are powers of two")
    how = dict(rounding=rounding, margin=2)
    both = kernels.cast(x, E4M3.dtype, (r, c), **how)
    first = kernels.cast(x, E4M3.dtype, (r, c), copies="first", **how)
    second = kernels.cast(x, E4M3.dtype, (r, c), copies="second", **how)
    assert first[1] is None and second[0] is None
    rest = ("pow2", 0, 126)
    for copies, n in (("both", 4), ("first", 2), ("second", 2)):
        assert len(kernels.cast_rows(x, E4M3.dtype, *rest, copies)) == n
    assert same_cast(*both[0], quantize(x, E4M3, (r, c), **how))
    assert same_cast(*both[1], quantize(x, E4M3, (c, r), **how).t())
    for one, of_both in ((first[0], both[0]), (second[1], both[1])):
        assert all(same(a, b) for a, b in zip(one, of_both))


@pytest.mark.parametrize("known", [0.0, 0.5, 300.0])
@pytest.mark.parametrize("bad", [None, torch.nan, torch.inf])
def test_a_known_amax_scales_and_the_own_one_comes_back(known, bad):
    x = torch.randn(150, 70)
    if bad is not None:
        x[149, 1] = bad
    (q, s), _, amax = kernels.cast(x, E5M2.dtype, (None, None), known=torch.tensor(known))
    expected = quantize(x, E5M2, amax=known)
    assert same_cast(q, s, expected) and same(amax, expected.amax)
    assert torch.equal(q.view(torch.uint8)[0], expected.q.view(torch.uint8)[0]) or not known


@pytest.mark.parametrize(
    "shape, fmt, tile, rounding",
    [((0, 4), E4M3, (None, None), "fp32"), ((4,), E4M3, (1, None), "pow2"),
     ((4, 4), BF16, (1, None), "pow2"), ((4, 4), E4M3, (1, 64), "pow2"),
     ((4, 4), E4M3, (1, 32), "fp32")],
)  # fmt: skip
def test_what_has_no_kernel_is_refused(shape, fmt, tile, rounding):
    with pytest.raises(ValueError, match="no cast"):
        kernels.cast(torch.ones(shape), fmt.dtype, tile, rounding)
    (q, s), _, _ = kernels.cast(torch.ones(2, 3), E4M3.dtype, (None, None))
    with pytest.raises(ValueError, match="no product"):
        kernels.gemm_nt(q, s, q[:, :2], s)
    with pytest.raises(ValueError, match="no product"):
        kernels.gemm_nt(q, s, q, torch.ones(2, 2))
    with pytest.raises(ValueError, match="known"):
        kernels.cast(torch.ones(2, 3), E4M3.dtype, (1, None), known=torch.ones(()))


def test_the_swizzled_scales_are_torchaos():
    from torchao.prototype.mx_formats.utils import to_blocked

    x = torch.randn(150, 300)
    how = E4M3.dtype, "pow2", 0, 126, "both"
    *_, s, s_t = kernels.cast_mx(x, *how, swizzle=False)
    *_, z, z_t = kernels.cast_mx(x, *how, swizzle=True)
    for plain, swizzled in ((s, z), (s_t, z_t)):
        assert torch.equal(
            swizzled.view(torch.uint8), to_blocked(plain.view(torch.uint8)).flatten()
        )


BYTES = {  # an element of a BF16 x, and for each scale: a 256 x 384 matrix has
    "current": (6, 0), "delayed": (4, 0), "row": (6, 4), "block": (4, 4), "square": (4, 4),
    "mx": (4, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_a_cast_moves_no_byte_more_than_its_floor(name, monkeypatch):
    from triton.runtime.interpreter import interpreter_builder as builder

    moved = {"elements": 0, "scales": 0}

    def counted(move, value_at):
        def count(*args, **kwargs):
            out = move(*args, **kwargs)
            value, mask = (args[1] if value_at else out).data, args[1 + value_at].data
            element = value.dtype.itemsize == 1 + (not value_at)  # BF16 in, FP8 out
            if name == "mx" and value_at and value.shape[-1] <= 4:
                element = False  # E8M0 bytes
            moved["elements" if element else "scales"] += int(mask.sum()) * value.dtype.itemsize
            return out

        return count

    x = torch.randn(256, 384).bfloat16()
    tile = TILES.get(name, (None, None))
    known = torch.tensor(1.0) if name == "delayed" else None
    for move, value_at in (("create_masked_load", 0), ("create_masked_store", 1)):
        monkeypatch.setattr(builder, move, counted(getattr(builder, move), value_at))
    (_, s), (_, s_t), _ = kernels.cast(x, E4M3.dtype, tile, "pow2", known=known)
    element, scale = BYTES[name]
    assert moved["elements"] == element * x.numel()
    written = s.numel() + (s_t.numel() if name != "square" else 0)
    if name == "row":  # an amax is read by each tile
        written += s.numel() * 384 // 64 + s_t.numel() * 256 // 64
    # For a whole tensor each of the 24 programs that cast reads the amax, 4 bytes; with a known one
    # they read that as well, and so do the 6 that then find no amax to take.
    scalars = {"current": 24 * 4, "delayed": (24 + 24 + 6) * 4}
    assert moved["scales"] == scalars.get(name, scale * written)


# GEMMs -------------------------------------------------------------------------------------------

SHAPES = [(1, 1, 1), (5, 7, 33), (70, 130, 300), (129, 260, 256)]
PAIRS = {  # the tiles and formats of A and B: fprop, dgrad and wgrad of every recipe, and mixtures
    "tensor": ("tensor", E4M3, "tensor", E4M3), "tensor, E5M2": ("tensor", E5M2, "tensor", E4M3),
    "E5M2 twice": ("tensor", E5M2, "tensor", E5M2), "row": ("row", E4M3, "row", E4M3),
    "row, tensor": ("row", E4M3, "tensor", E4M3), "block": ("block", E4M3, "block", E4M3),
    "square": ("block", E4M3, "square", E4M3), "mx": ("mx", E4M3, "mx", E5M2),
}  # fmt: skip
GPUS = {"Hopper": (9, 0), "Ada": (8, 9), "RTX Blackwell": (12, 0), "Blackwell": (10, 0)}


@pytest.fixture
def gpu(monkeypatch):
    """The kernels believe that they run on this GPU, with two processors."""

    def pretend(name):
        monkeypatch.setattr(kernels, "capability", lambda device: GPUS[name])
        monkeypatch.setattr(kernels, "processors", lambda device: 2)

    return pretend


def operands(pair, M, N, K):
    """A and B as the lesson quantises them, and as the kernels do."""
    made = []
    a_tile, a_fmt, b_tile, b_fmt = PAIRS[pair]
    for tile, fmt, rows in ((a_tile, a_fmt, M), (b_tile, b_fmt, N)):
        x = torch.randn(rows, K) * torch.exp(torch.randn(rows, K))
        how = (fmt.dtype, TILES[tile], "fp32" if tile == "tensor" else "pow2")
        made += [quantize(x, fmt, *how[1:]), kernels.cast(x, *how, copies="first")[0]]
    return made


def error(y, expected):
    return ((y.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", ["Hopper", "Ada", "RTX Blackwell"])
def test_gemms_equal_the_lesson(name, pair, gpu):
    gpu(name)
    if "mx" in pair and name == "RTX Blackwell" and TRITON < (3, 8):
        pytest.skip("the interpreter of this Triton has no dot_scaled")
    for M, N, K in SHAPES if name == "Hopper" else SHAPES[2:3]:
        a8, a, b8, b = operands(pair, M, N, K)
        expected = gemm_nt(a8, b8)
        for fast, dtype in ((True, torch.float32), (False, torch.bfloat16)):
            y = kernels.gemm_nt(*a, *b, dtype, fast)
            assert y.dtype is dtype and y.shape == (M, N)
            # BF16 rounds once more; the interpreter's store truncates: 2^-7 instead of 2^-8
            assert error(y, expected) < (FP32_SUM if dtype is torch.float32 else 2**-7)


@pytest.mark.skipif(TRITON < (3, 8), reason="the interpreter of this Triton has no dot_scaled")
def test_block_scaled_tensor_cores_of_blackwell(gpu):
    gpu("Blackwell")
    for M, N, K in SHAPES[1:]:
        a8, a, b8, b = operands("mx", M, N, K)
        assert a[1].dim() == 1  # swizzled
        assert error(kernels.gemm_nt(*a, *b), gemm_nt(a8, b8)) < FP32_SUM


@pytest.mark.parametrize("pair", ["tensor", "row", "block", "square", "mx"])
def test_a_scale_of_nan_reaches_the_output_and_only_its_own(pair):
    a8, (q, s), b8, b = operands(pair, 70, 50, 200)
    row = s.float().clone()
    row[0] = torch.nan
    broken = row.to(s.dtype) if pair != "mx" else row.to(torch.float8_e8m0fnu)
    y = kernels.gemm_nt(q, broken, *b)
    assert y[0].isnan().all()
    if pair not in ("tensor",):
        assert torch.equal(y[1:], kernels.gemm_nt(q, s, *b)[1:])


def test_scales_of_the_ends_of_the_range_decode():
    """A byte of 0 in foreign data is 2^-127; 2^119 is the largest that BF16 holds beside a code."""
    q = torch.ones(1, 32).to(E4M3.dtype)
    for byte, scale in ((0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (246, 2.0**119)):
        s = torch.full((1, 1), byte, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        one = torch.full((1, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        assert kernels.gemm_nt(q, s, q, one).item() == 32 * scale


def test_operands_of_any_layout():
    """Codes from elsewhere: rows that do not start at 16 bytes, columns that are not contiguous."""
    a, b = (torch.randn(rows, 40).to(E4M3.dtype) for rows in (50, 30))
    one = torch.ones(1, 1)
    expected = a.float() @ b.float().t()
    bytes = torch.zeros(50, 43, dtype=torch.uint8)
    bytes[:, 1:41] = a.view(torch.uint8)
    odd = bytes[:, 1:41].view(E4M3.dtype)
    turned = b.view(torch.uint8).t().contiguous().t().view(E4M3.dtype)
    assert error(kernels.gemm_nt(odd, one, turned, one), expected) < FP32_SUM
    scales = torch.rand(50, 3)[:, :1]
    assert error(kernels.gemm_nt(odd, scales, turned, one), expected * scales) < FP32_SUM


# The layer and the model -------------------------------------------------------------------------

FP8 = [name for name in RECIPES if name != "bf16"]
E5M2_TWICE = dataclasses.replace(RECIPES["current"], name="twice", x_fmt=E5M2)
PARTIAL = dataclasses.replace(RECIPES["blockwise"], name="partial", wgrad=False)
SUBCHANNELS = Recipe("rows of 128", (1, 128), (1, 128), (1, 128), rounding="fp32")


def pair_of_layers(recipe, **options):
    layers = []
    for _ in range(2):
        torch.manual_seed(0)
        layers.append(FP8Linear(48, 70, recipe=recipe, **options))
    layers[1].backend = KERNELS
    return layers


@pytest.mark.parametrize(
    "recipe", [*FP8, E5M2_TWICE, PARTIAL, SUBCHANNELS], ids=lambda r: getattr(r, "name", r)
)
@pytest.mark.parametrize("fold", [False, True])
def test_a_layer_on_kernels_equals_the_layer_of_the_lesson(recipe, fold):
    outs = []
    for layer in pair_of_layers(recipe):
        torch.manual_seed(1)
        for _ in range(2):  # delayed scaling has a history in the second
            x = torch.randn(2, 17, 48, requires_grad=True)
            scale = torch.exp2(torch.randint(-3, 4, (48,)).float()) if fold else None
            y = layer(x, scale)
            layer.zero_grad()
            y.backward(torch.randn(y.shape) * 1e-3)
            end_step(layer)
        outs.append([y, x.grad, layer.weight.grad, layer.bias.grad, *layer.buffers()])
    for ours, kernel in zip(*outs):
        assert error(kernel.detach() + 1e-30, ours.detach() + 1e-30) < FP32_SUM


def tiny(recipe, backend=KERNELS):
    torch.manual_seed(0)
    config = GPTConfig(64, 16, n_layer=1, n_head=2, n_embd=32, recipe=recipe)
    model = GPT(config)
    for m in model.modules():
        if isinstance(m, FP8Linear) and m.recipe.x_fmt != BF16:
            m.backend = backend
    return model


def train(model, run):
    """A step on a new batch -> loss and gradients."""
    batch = torch.randint(0, 64, (2, 16))
    loss = run(batch, batch)[1]
    loss.backward()
    end_step(model)
    return [loss.detach()] + [p.grad for p in model.parameters()]


@pytest.mark.parametrize("recipe", FP8)
def test_one_graph_holds_forward_and_backward_of_every_recipe(recipe):
    torch._dynamo.reset()
    compiled, counter = tiny(recipe), CompileCounterWithBackend("aot_eager")
    run = torch.compile(compiled, fullgraph=True, backend=counter, dynamic=False)
    plain = tiny(recipe)
    torch.manual_seed(1)
    first = train(compiled, run)
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(first, train(plain, plain)))
    train(compiled, run)
    assert counter.frame_count == 1  # no break, and no recompilation for the second batch


@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_inductor_keeps_the_kernels_in_one_graph(recipe):
    torch._dynamo.reset()
    layer, plain = FP8Linear(48, 70, recipe=recipe), FP8Linear(48, 70, recipe=recipe)
    plain.load_state_dict(layer.state_dict())
    layer.backend = plain.backend = KERNELS
    run = torch.compile(layer, fullgraph=True, dynamic=False)
    for _ in range(2):
        x = torch.randn(17, 48)
        y, expected = run(x), plain(x)
        y.sum().backward()
        expected.sum().backward()
        assert error(y.detach(), expected.detach()) < FP32_SUM
        assert error(layer.weight.grad, plain.weight.grad) < FP32_SUM


def test_the_operators_keep_torchs_rules():
    """Schemas, fake outputs, no aliasing, no mutation: torch's own checks."""
    x, how = torch.randn(40, 70), (E4M3.dtype, "pow2", 0, 126, "both")
    calls = [
        (kernels.cast_tensor, (x, *how, None)), (kernels.cast_tensor, (x, *how, torch.ones(()))),
        (kernels.cast_rows, (x, *how)), (kernels.cast_blocks, (x, *how, False)),
        (kernels.cast_blocks, (x, *how, True)), (kernels.cast_mx, (x, *how, False)),
        (kernels.cast_mx, (x, *how, True)),
    ]  # fmt: skip
    for pair in ("tensor", "block", "mx"):
        _, a, _, b = operands(pair, 40, 30, 150)
        op = {"tensor": kernels.gemm_scaled, "block": kernels.gemm_blocks, "mx": kernels.gemm_mx}
        calls.append((op[pair], (*a, *b, torch.float32, *([True] if pair == "tensor" else []))))
    for op, args in calls:
        checks = ["test_faketensor"]
        if op in (kernels.cast_tensor, kernels.cast_rows, kernels.cast_blocks, kernels.cast_mx):
            checks += ["test_schema"]  # it does arithmetic with inputs, which FP8 has none of
        torch.library.opcheck(op, args, test_utils=checks)


def test_nothing_on_a_cpu_imports_triton():
    """Nor the kernels: a default run needs neither."""
    code = (
        "import sys, torch, fp8gpt; from train import *; m = fp8gpt.GPT(fp8gpt.GPTConfig(64, 16));"
        "m(*[torch.zeros(1, 4, dtype=torch.long)] * 2)[1].backward();"
        "assert not {'triton', 'kernels'} & set(sys.modules)"
    )
    root = Path(kernels.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_benchmark_for_gpus_runs_here_and_says_what_it_left_out(tmp_path):
    script = Path(__file__).with_name("gpu_bench.py")
    out = subprocess.run(
        [sys.executable, script, "--out", tmp_path / "bench.json"], capture_output=True, text=True
    )
    assert out.returncode == 0, out.stdout + out.stderr
    assert "no speed is measured" in out.stdout and "skipped  graph: no CUDA" in out.stdout
    results = json.loads((tmp_path / "bench.json").read_text())["results"]
    phases = {"correct", "ceiling", "cast", "gemm", "step", "adam"}
    assert {r["phase"] for r in results} == phases and not any(r.get("wrong") for r in results)
