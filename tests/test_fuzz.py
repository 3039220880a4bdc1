"""Anything in: numbers against other implementations, and command lines, token files, checkpoints
and disks that are wrong in ways nobody thought of. Each ends well or in one sentence.

The plain tests take seconds. `pytest -m soak tests/test_fuzz.py` takes minutes, and prints
how many values it has compared."""

import builtins
import contextlib
import copy
import dataclasses
import functools
import io
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import count
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from data import prepare as p
from data.prepare import UserError
from fp8gpt import (
    E4M3,
    E5M2,
    FP16,
    RECIPE_CHOICES,
    ceil_pow2,
    dequantize,
    encode,
    encode_scale,
    quantize,
    round_to,
)

ROOT = Path(__file__).resolve().parent.parent
FORMATS = [E4M3, E5M2, FP16]
ML = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, FP16: np.float16}
GFLOAT = {
    E4M3: gfloat.formats.format_info_ocp_e4m3,
    E5M2: gfloat.formats.format_info_ocp_e5m2,
    FP16: gfloat.formats.format_info_binary16,
}
TOP_NOISE = 1 - 2.0**-24  # the largest that torch.rand gives in fp32
each_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
# The same examples on every machine: a change should fail by what it does, not by luck. The soaks
# draw new ones.
few = settings(max_examples=25, deadline=None, derandomize=True, database=None)
many = settings(max_examples=2000, deadline=None, database=None)


# Numbers -----------------------------------------------------------------------------------------


def grid(fmt):
    """Every finite number of the format in order, as ml_dtypes has them (one zero)."""
    codes = np.arange(256, dtype=np.uint8) if fmt is not FP16 else np.arange(65536, dtype=np.uint16)
    values = codes.view(ML[fmt]).astype(np.float32)
    return np.unique(values[np.isfinite(values)] + np.float32(0))


def nearest(x, fmt):
    """fp32 -> fp32 by ml_dtypes (numpy for FP16), which are given clamped numbers: they do not
    saturate."""
    with np.errstate(invalid="ignore"):
        return np.clip(x, -fmt.max, fmt.max).astype(ML[fmt]).astype(np.float32)


def by_gfloat(x, fmt):
    return gfloat.round_ndarray(GFLOAT[fmt], x.astype(np.float64), sat=True).astype(np.float32)


def differs(a, b):
    """How many values have other bits; any NaN equals any NaN."""
    return int(((a.view(np.int32) != b.view(np.int32)) & ~(np.isnan(a) & np.isnan(b))).sum())


@functools.cache
def enclosing(fmt):
    """For each code the next number of the format below and above it, -inf and inf at the ends."""
    marks = np.concatenate([[-np.inf], grid(fmt), [np.inf]]).astype(np.float32)
    codes = np.arange(1 << (8 * fmt.dtype.itemsize)).astype(f"u{fmt.dtype.itemsize}")
    x = np.nan_to_num(codes.view(ML[fmt]).astype(np.float32), posinf=fmt.max, neginf=-fmt.max)
    at = np.searchsorted(marks, x)
    return marks[at - 1], marks[at + 1]


def not_neighbours(r, x, fmt):
    """How many r are not one of the two numbers of the format that enclose x: x itself where it is
    one, the largest beyond it, NaN for NaN."""
    x = np.clip(x, -fmt.max, fmt.max)
    q = r.astype(ML[fmt])
    below, above = (table[q.view(f"u{q.itemsize}")] for table in enclosing(fmt))
    good = (q.astype(np.float32) == r) & (np.abs(r) <= fmt.max) & (below < x) & (x < above)
    return int((~(good | (np.isnan(x) & np.isnan(r)))).sum())


@functools.cache
def interesting(fmt):
    """Bits of fp32 numbers where casts go wrong: the grid, its ties, and one ulp beside both."""
    marks = grid(fmt)[:: 1 if fmt is not FP16 else 37]
    ties = ((marks[1:].astype(np.float64) + marks[:-1]) / 2).astype(np.float32)
    step = 2.0 ** (fmt.emax - fmt.mantissa)
    edges = [fmt.max, fmt.max + step / 2, fmt.max + step, 2.0**fmt.emin, 0.0, np.inf, np.nan]
    edges += [2.0**-126, 2.0**-149, 3.4028234663852886e38]
    x = np.concatenate([marks, ties, np.array(edges, np.float32)])
    bits = np.concatenate([x, -x]).view(np.uint32).astype(np.int64)
    return np.unique(np.concatenate([bits - 1, bits, bits + 1]) % 2**32).tolist()


def values(fmt):
    return st.one_of(st.sampled_from(interesting(fmt)), st.integers(0, 2**32 - 1))


def numbers(bits):
    return np.array(bits, np.uint32).view(np.float32)


@each_format
@few
@given(data=st.data())
def test_nearest_rounding_agrees_with_two_other_implementations(fmt, data):
    x = numbers(data.draw(st.lists(values(fmt), min_size=1, max_size=64)))
    rounded = round_to(torch.from_numpy(x.copy()), fmt).numpy()
    stored = encode(torch.from_numpy(x.copy()), fmt).float().numpy()
    assert differs(rounded, nearest(x, fmt)) == 0 and differs(stored, rounded) == 0
    assert differs(rounded, by_gfloat(x, fmt)) == 0


@each_format
@few
@given(data=st.data())
def test_stochastic_rounding_takes_one_of_the_two_neighbours(fmt, data):
    x = numbers(data.draw(st.lists(values(fmt), min_size=1, max_size=32)))
    some = st.one_of(st.sampled_from([0.0, 2.0**-24, 0.5, TOP_NOISE]), st.floats(0, TOP_NOISE))
    noise = data.draw(st.lists(some, min_size=len(x), max_size=len(x)))
    noise = torch.tensor(noise, dtype=torch.float32).clamp(max=TOP_NOISE)
    rounded = round_to(torch.from_numpy(x.copy()), fmt, noise).numpy()
    assert not_neighbours(rounded, x, fmt) == 0


@each_format
def test_stochastic_rounding_leaves_what_is_representable(fmt):
    """Also under the largest noise, which fp32 rounds up when it is added to 8 steps or more."""
    x = torch.from_numpy(grid(fmt))
    for noise in (0.0, 0.5, TOP_NOISE):
        assert torch.equal(round_to(x, fmt, torch.full_like(x, noise)), x)


MEAN_ERROR = 5.0  # standard errors of a coin's mean: 1 in 1.7 million values


@each_format
@few
@given(data=st.data())
def test_stochastic_rounding_is_right_in_the_mean(fmt, data):
    n, marks = 1 << 14, grid(fmt)
    i = data.draw(st.integers(0, len(marks) - 2))
    low, high = marks[i : i + 2].astype(np.float64)
    x = np.float32(low + (high - low) * data.draw(st.floats(0.05, 0.95)))
    noise = torch.rand(n, generator=torch.Generator().manual_seed(i))
    y = round_to(torch.full((n,), float(x)), fmt, noise).double().mean().item()
    part = (float(x) - low) / (high - low)
    assert abs(y - float(x)) <= MEAN_ERROR * (high - low) * (part * (1 - part) / n) ** 0.5


def exact_scale(amax, fmt, rounding, margin=0, max_exponent=126):
    """e = 1 / s of amax (numpy fp32, finite) in float64, powers of two by `frexp`: an exponent, no
    logarithm, no bits."""
    a = np.maximum(amax.astype(np.float64), fmt.max * 2.0**-max_exponent)
    a = np.minimum(a, fmt.max * 2.0**max_exponent)
    (part, exponent), (top, top_exponent) = np.frexp(a), math.frexp(fmt.max)
    e = (fmt.max / a).astype(np.float32)  # a quotient of fp32 numbers, rounded once in effect
    if rounding == "pow2":
        e = np.ldexp(1.0, -(exponent - top_exponent + (part > top)))
    elif rounding == "floor":
        e = np.ldexp(1.0, fmt.emax - (exponent - 1))
    return np.where(amax == 0, 1.0, e * 2.0**-margin).astype(np.float32)


ROUNDINGS = RECIPE_CHOICES["rounding"]


@each_format
@few
@given(data=st.data())
def test_scales_agree_with_exact_arithmetic(fmt, data):
    bits = st.lists(st.one_of(values(fmt), st.integers(0, 2**24)), min_size=1, max_size=64)
    amax = np.abs(numbers(data.draw(bits)))
    amax = amax[np.isfinite(amax)]
    rounding, margin = data.draw(st.sampled_from(ROUNDINGS)), data.draw(st.integers(-3, 3))
    limit = data.draw(st.sampled_from([126, 31]))
    margin = margin if limit == 31 else 0  # at the ends a margin leaves the normal numbers
    e = encode_scale(torch.from_numpy(amax), fmt, rounding, margin, limit).numpy()
    assert differs(e, exact_scale(amax, fmt, rounding, margin, limit)) == 0


@few
@given(bits=st.lists(st.integers(0, 0x7F800000), min_size=1, max_size=64))
def test_the_power_of_two_at_or_above_is_exact(bits):
    """A normal fp32 number: for 0 it is 1, above 2^127 inf."""
    assert differs(ceil_pow2(torch.from_numpy(numbers(bits))).numpy(), above(numbers(bits))) == 0


def above(x):
    part, exponent = np.frexp(x.astype(np.float64))
    power = np.ldexp(1.0, np.maximum(exponent - (part == 0.5), -126))
    with np.errstate(over="ignore"):
        return np.where(x == 0, 1.0, np.where(np.isinf(x), x, power)).astype(np.float32)


def view_of(x, how):
    """The same matrix with other strides."""
    if how == "transposed":
        return x.t().contiguous().t()
    if how == "every third":
        wide = torch.full((2 * x.shape[0], 3 * x.shape[1] + 1), math.nan, dtype=x.dtype)
        wide[::2, 1::3] = x
        return wide[::2, 1::3]
    return x[:1].expand(x.shape) if how == "expanded" else x


TILES = [(None, None), (1, None), (None, 1), (1, 1), (1, 4), (4, 4), (1, 32), (3, 5), (128, 128)]


def reference(x, fmt, tile, rounding):
    """x (R, C) numpy fp32 -> codes as fp32 numbers (R, C), scales: tile by tile in a plain loop."""
    r, c = (t or n for t, n in zip(tile, x.shape))
    q, s = np.empty_like(x), np.empty((-(-x.shape[0] // r), -(-x.shape[1] // c)), np.float32)
    for i, k in np.ndindex(s.shape):
        part = x[i * r : (i + 1) * r, k * c : (k + 1) * c]
        amax = np.abs(part).max(keepdims=True)
        finite = np.isfinite(amax).all()
        e = exact_scale(amax, fmt, rounding) if finite else np.float32(np.nan)
        s[i, k] = (1 / np.float64(e)).astype(np.float32).item() if finite else math.nan
        with np.errstate(invalid="ignore", under="ignore"):
            q[i * r : (i + 1) * r, k * c : (k + 1) * c] = nearest(part * e, fmt)
    return q, s


@each_format
@few
@given(data=st.data())
def test_quantize_agrees_with_a_plain_loop_for_any_shape_stride_and_dtype(fmt, data):
    shape = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 40)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-140, 100)  # subnormal and huge tiles too
    for bits in data.draw(st.lists(values(fmt), max_size=3)):
        x[tuple(rng.integers(shape))] = numbers([bits]).item()
    x = torch.from_numpy(x.astype(np.float32))
    x = view_of(x.to(dtype), data.draw(st.sampled_from(STRIDES)))
    tile, rounding = data.draw(st.sampled_from(TILES)), data.draw(st.sampled_from(ROUNDINGS))
    before = x.clone()
    x8 = quantize(x, fmt, tile, rounding)
    q, s = reference(x.float().numpy(), fmt, tile, rounding)
    assert differs(x8.s.numpy(), s) == 0
    broken = dequantize(x8).isnan().numpy()
    r, c = (t or n for t, n in zip(tile, shape))
    assert (broken == np.isnan(s).repeat(r, 0).repeat(c, 1)[: shape[0], : shape[1]]).all()
    assert differs(np.where(broken, 0, x8.q.float().numpy()), np.where(broken, 0, q)) == 0
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)  # the operand stays


STRIDES = ["plain", "transposed", "every third", "expanded"]


@few
@given(x=st.one_of(st.just([]), st.lists(st.just([]), max_size=3)), fmt=st.sampled_from(FORMATS))
def test_an_empty_matrix_is_refused(x, fmt):
    with pytest.raises(ValueError, match="at least one element"):
        quantize(torch.tensor(x), fmt)


CHUNK, CHUNKS = 1 << 22, 32  # 1.3e8 patterns
SPREAD = 0x9E3779B1  # odd, so i * SPREAD mod 2^32 takes every pattern once and skips about evenly


def patterns():
    start = random.SystemRandom().randrange(2**32)
    for k in range(CHUNKS):
        i = np.arange(start + k * CHUNK, start + (k + 1) * CHUNK, dtype=np.uint64)
        yield (i * np.uint64(SPREAD)).astype(np.uint32).view(np.float32)


def told(n, wrong):
    count("values compared", n)
    assert wrong == 0 and n >= 1e8


@pytest.mark.soak
@each_format
def test_soak_of_nearest_rounding(fmt):
    wrong = n = 0
    for x in patterns():
        expected = nearest(x, fmt)
        wrong += differs(round_to(torch.from_numpy(x), fmt).numpy(), expected)
        wrong += differs(encode(torch.from_numpy(x.copy()), fmt).float().numpy(), expected)
        n += len(x)
    told(n, wrong)


@pytest.mark.soak
@each_format
def test_soak_of_stochastic_rounding(fmt):
    wrong = n = 0
    for x in patterns():
        noise = torch.rand(len(x))
        noise[::5], noise[1::5] = TOP_NOISE, 0  # a fifth each at the ends
        rounded = round_to(torch.from_numpy(x), fmt, noise)
        wrong, n = wrong + not_neighbours(rounded.numpy(), x, fmt), n + len(x)
        again = round_to(rounded, fmt, noise.flip(0))  # what is representable stays
        wrong += differs(again.numpy() + np.float32(0), rounded.numpy() + np.float32(0))
    told(n, wrong)


@pytest.mark.soak
@each_format
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_soak_of_scales(fmt, rounding):
    wrong = n = 0
    for amax in map(np.abs, patterns()):
        amax = amax[np.isfinite(amax)]
        e = encode_scale(torch.from_numpy(amax), fmt, rounding).numpy()
        wrong, n = wrong + differs(e, exact_scale(amax, fmt, rounding)), n + len(amax)
    told(n, wrong)


@pytest.mark.soak
def test_soak_of_powers_of_two():
    wrong = n = 0
    for x in map(np.abs, patterns()):
        x = x[~np.isnan(x)]
        wrong += differs(ceil_pow2(torch.from_numpy(x)).numpy(), above(x))
        n += len(x)
    told(n, wrong)


# One sentence ------------------------------------------------------------------------------------


def one_sentence(call, *args, also=()):
    """The result of a call, or None where it ends as a program may: in a UserError of one line, in
    help, or, where the caller says so, in an error of `also`, which train.py prints as well."""
    try:
        return call(*args)
    except (UserError, *also) as error:
        assert str(error) and len(str(error).splitlines()) == 1, repr(str(error))
    except SystemExit as error:
        assert error.code in (0, 2)  # 0: --help
    return None


class Late(BaseException):
    """No Exception (TimeoutError is even an OSError): nothing may take it for a fault of a file."""


@contextlib.contextmanager
def within(seconds):
    """What hangs is interrupted: no test waits for ever."""

    def late(*_):
        raise Late(f"not done after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# The command line --------------------------------------------------------------------------------

ODD = ["", " ", "-", "--", "-1", "0", "1", "2", "3", "+3", "1e3", "1e400", "-1e400", "nan", "inf"]
ODD += ["-inf", "0x10", "1_000", "1,2", "1/2/3", "99/99/99", "-99", "8/1/4/8192", "nan/1/4/8192"]
ODD += ["8/1/4/inf", "inf/1/4/1", "9" * 400, "9" * 5000, "٣", "١/٢/٣", "½", "é", "\U0001f600", "%"]
ODD += ["nan\n", "\n", "a\nb", "0\r", "1\u2028", "\x85", "\udce9", "%s", "{}", "None", "none", "'"]
ODD += ["true", "True", "FALSE", "maybe", '"', "a=b", "=", "..", "cpu", "cpu:1", "cpu:" + "9" * 30]
ODD += ["meta", "cuda", "x" * 300, "bf16", "mxfp8", "delayed", "llama", "gpt2", "gpt-111m", "NULL"]
ODD += ["channel", "token", "pow2", "E4M3", "fp16", "most_recent", "fp8adam", "mxfp9", "bf16,"]
ODD += [
    "bf16,=",
    "bf16,lr",
    "bf16,__class__=1",
    "amax,margin=1/2",
    "bf16,n_layer=",
    "bf16,lr=nan\n",
]
OTHER = "compare seeds bench advise resume eval calibrate sample tokens temperature help stepz"
FLAGS = [n.replace("_", "-") for n in train.FIELDS] + list(train.FIELDS)
FLAGS += [*OTHER.split(), "", "-", "\n"]
word = st.one_of(
    st.sampled_from(ODD),
    st.text(st.characters(exclude_characters="\0"), max_size=12),  # a shell passes no NUL
    st.integers(-(10**20), 10**20).map(str),
    st.floats().map(repr),
)
flag = st.sampled_from(FLAGS).map(lambda name: "--" + name)
argument = st.one_of(
    st.tuples(flag, word).map(list),
    st.tuples(flag, word).map(lambda pair: ["=".join(pair)]),
    flag.map(lambda f: [f]),
    word.map(lambda w: [w]),
)
command_lines = st.lists(argument, max_size=6).map(lambda parts: sum(parts, []))


def understand(argv):
    """What train.py does with a command line before it reads or writes anything."""
    fields, args = train.parse_command_line(argv)
    train.pick_device(fields.get("device", "auto"))
    c = train.Config(**(train.SIZES.get(fields.get("size"), {}) | fields))
    for arm in args.compare or [c.recipe]:
        config = train.model_config(dataclasses.replace(c, **train.parse_arm(arm)), 256)
        assert math.isfinite(sum(config.rope_scaling or ()))  # or every loss would be NaN
    return c


def command_line(argv):
    count("bad inputs tried")
    with contextlib.redirect_stdout(io.StringIO()):  # help
        return one_sentence(understand, argv)


@few
@given(argv=command_lines)
def test_any_command_line_is_understood_or_answered_in_one_sentence(argv):
    command_line(argv)


@pytest.mark.parametrize("name", train.FIELDS)
def test_any_value_of_a_field_is_taken_or_answered_in_one_sentence(name):
    for value in ODD:
        one_sentence(train.convert, name, value)
        one_sentence(train.parse_arm, f"bf16,{name}={value}")


@pytest.mark.parametrize("form", ["nan/1/4/8192", "inf/1/4/8192", "8/1/inf/8192", "8/1/4/inf"])
def test_rotary_positions_are_finite_numbers(form):
    with pytest.raises(UserError, match="rope_scaling takes"):
        train.parse_command_line(["--rope-scaling", form])


@pytest.mark.parametrize("flag", ["--seed", "--lr", "--tokens", "--compare"])
def test_two_dashes_are_no_value(flag):
    """argparse drops them before Python 3.13, and leaves an empty list."""
    with pytest.raises(UserError):
        understand([flag + "=--"])
    c = one_sentence(understand, ["--data=--"])
    assert c is None or c.data == "--"


def test_a_newline_in_a_value_does_not_break_the_sentence():
    with pytest.raises(UserError) as error:
        train.parse_command_line(["--lr", "nan\n"])
    assert str(error.value).count("\n") == 0


@pytest.mark.soak
@pytest.mark.parametrize("name", [*train.FIELDS, *OTHER.split()])
def test_soak_of_values_of_a_flag(name):
    for value in ODD:
        command_line([f"--{name}={value}"])
        command_line(["--compare", f"bf16,{name}={value}"])


@pytest.mark.soak
@settings(many, max_examples=3000)
@given(argv=command_lines)
def test_soak_of_command_lines(argv):
    command_line(argv)


def run(*argv, **kwargs):
    command = [sys.executable, ROOT / "train.py", *map(str, argv)]
    return subprocess.run(command, capture_output=True, timeout=120, **kwargs)


def refused(out):
    assert out.returncode == 2, (out.returncode, out.stderr)
    assert out.stderr.startswith(b"train.py: ") and out.stderr.count(b"\n") == 1, out.stderr


@pytest.mark.soak
def test_soak_of_command_lines_of_a_real_process(tmp_path):
    shell = [w for w in ODD if w]
    rng = random.SystemRandom()
    for _ in range(8):
        argv = [f"--{rng.choice(FLAGS)}={rng.choice(shell)}" for _ in range(rng.randint(1, 4))]
        out = run("--data", tmp_path / "none", *map(os.fsencode, argv), cwd=tmp_path)
        assert out.returncode == 0 and b"usage" in out.stdout or not refused(out)
    assert not list(tmp_path.iterdir())


# Token files -------------------------------------------------------------------------------------

META = dict(name="x", tokenizer="bytes", vocab_size=256)
BLOCK, NO_FILE = 8, "none"


def corpus_in(root, train_bin, val_bin=bytes(200), meta=None):
    root.mkdir(exist_ok=True)
    meta = json.dumps(META).encode() if meta is None else meta
    for name, content in (("train.bin", train_bin), ("val.bin", val_bin), ("meta.json", meta)):
        if content != NO_FILE:
            (root / name).write_bytes(content)
    return root


def read(root, block_size=BLOCK):
    """Open a corpus and draw from it, as training does -> the rows, or None where it is refused."""

    def draw():
        corpus = p.Corpus(str(root), "bytes", block_size, say=lambda line: None)
        assert isinstance(corpus.vocab_size, int) and isinstance(corpus.tokenizer, str)
        rows = np.concatenate([corpus.batch("train", (0, i), 4) for i in range(3)])
        assert rows.shape == (12, block_size + 1) and 0 <= rows.min()
        assert rows.max() < corpus.vocab_size
        return rows

    with within(10):
        return one_sentence(draw)


ids = st.lists(st.one_of(st.integers(0, 255), st.integers(0, 65535)), max_size=40)
int32 = st.one_of(st.sampled_from([20240520, 1, 0, -1, -10, 2**31 - 1]), st.integers(-600, 600))


def headed(head, count, body):
    start = np.zeros(256, np.int32)
    start[: len(head)] = head
    return start.tobytes()[:count] + body


token_files = st.one_of(
    st.binary(max_size=80),
    ids.map(lambda v: np.array(v, np.uint16).tobytes()),
    st.lists(st.integers(0, 255), min_size=9, max_size=40).map(
        lambda v: np.array(v, np.uint16).tobytes()
    ),
    # llm.c's header: right or wrong, whole or cut short
    st.builds(
        headed,
        st.tuples(st.sampled_from([20240520, 20240521]), st.sampled_from([1, 2]), int32),
        st.one_of(st.just(1024), st.integers(0, 1024)),
        st.one_of(st.binary(max_size=80), ids.map(lambda v: np.array(v, np.uint16).tobytes())),
    ),
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner)
    ),
    max_leaves=4,
)
odd_size = st.sampled_from([256, 256.0, True, 1, 0, -1, 2**31, 2**40, 1e300, "256", None, 70000])
metas = st.one_of(
    st.none(),  # the right one
    st.just(NO_FILE),
    st.binary(max_size=30),
    json_values.map(json.dumps).map(str.encode),
    st.fixed_dictionaries(
        dict(vocab_size=st.one_of(odd_size, json_values)),
        optional=dict(
            tokenizer=st.one_of(st.sampled_from(["bytes", "gpt2", "", "x.json"]), json_values),
            name=json_values, python=json_values, files=json_values,
        ),
    ).map(lambda meta: json.dumps(meta).encode()),
)  # fmt: skip


def any_token_files(train_bin, val_bin, meta, block_size):
    count("bad inputs tried")
    with tempfile.TemporaryDirectory() as scratch:
        read(corpus_in(Path(scratch) / "c", train_bin, val_bin, meta), block_size)


@few
@given(token_files, token_files, metas, st.sampled_from([1, BLOCK]))
def test_any_token_file_is_read_or_refused_in_one_sentence(train_bin, val_bin, meta, block_size):
    any_token_files(train_bin, val_bin, meta, block_size)


@pytest.mark.soak
@many
@given(token_files, token_files, metas, st.sampled_from([1, BLOCK]))
def test_soak_of_token_files(train_bin, val_bin, meta, block_size):
    any_token_files(train_bin, val_bin, meta, block_size)


@pytest.mark.parametrize("count", [-488, -10, 0])
def test_a_header_that_counts_below_one_is_refused(count, tmp_path):
    whole = headed((20240520, 1, count), 1024, b"")
    root = corpus_in(tmp_path / "c", whole[: 1024 + 2 * count])  # the size that such a count means
    with pytest.raises(UserError, match="not the whole"):
        p.Corpus(str(root), "bytes", BLOCK)


@pytest.mark.parametrize("wrong", [256.0, True, "256", None])
def test_a_vocabulary_of_no_whole_number_is_refused(wrong, tmp_path):
    meta = json.dumps(META | dict(vocab_size=wrong)).encode()
    assert read(corpus_in(tmp_path / "c", bytes(200), meta=meta)) is None


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.json"])
@pytest.mark.parametrize("kind", ["pipe", "directory", "nowhere", "device", "itself"])
def test_what_is_no_file_is_refused_and_not_waited_for(name, kind, tmp_path):
    root = corpus_in(tmp_path / "c", bytes(200))
    path = root / name
    path.unlink()
    make = dict(pipe=os.mkfifo, directory=os.mkdir)
    make |= dict(
        nowhere=lambda q: q.symlink_to("/no/such"),
        device=lambda q: q.symlink_to("/dev/zero"),
        itself=lambda q: q.symlink_to(q),
    )
    make[kind](path)
    rows = read(root)
    if not (name == "meta.json" and kind in ("nowhere", "itself")):  # as if there were none
        assert rows is None


@pytest.mark.parametrize(
    "source", ["", ".", "..", "/", "x" * 300, "y/" * 3000, "/dev/null", "a\nb"], ids=repr
)
def test_an_odd_name_of_a_corpus_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(p, "HERE", tmp_path / "here")
    assert read(source) is None


def test_what_may_not_be_read_is_refused(tmp_path, monkeypatch):
    """Tests may run as root, whom no mode stops: so the calls refuse."""
    root = corpus_in(tmp_path / "c", bytes(200))
    assert read(root) is not None

    def deny(original, name):
        def call(path, *args, **kwargs):
            if Path(path).name == name:
                raise PermissionError(13, "Permission denied", str(path))
            return original(path, *args, **kwargs)

        return call

    for target, attribute in ((io, "open"), (builtins, "open"), (os, "stat")):
        for name in ("train.bin", "val.bin", "meta.json", "c"):
            with monkeypatch.context() as m:
                m.setattr(target, attribute, deny(getattr(target, attribute), name))
                read(root)


@pytest.mark.parametrize("spoil", ["shorten", "empty", "remove", "replace", "ids"])
def test_a_file_that_changes_under_a_reader_ends_in_one_sentence(spoil, tmp_path):
    """A memory map would end in SIGBUS, and ids beyond the table in an assertion of the GPU."""
    root = corpus_in(tmp_path / "c", bytes(1 << 16))
    corpus = p.Corpus(str(root), "bytes", BLOCK, say=lambda line: None)
    corpus.batch("train", (0, 0), 4)
    path = root / "train.bin"
    if spoil in ("shorten", "empty"):
        os.truncate(path, 10 if spoil == "shorten" else 0)
    elif spoil == "ids":
        path.write_bytes(b"\xff" * (1 << 16))
    else:
        path.unlink()
        if spoil == "replace":
            path.mkdir()
    with pytest.raises(UserError, match="cannot read|shorter|changed") as error:
        corpus.batch("train", (0, 1), 4)
    assert len(str(error.value).splitlines()) == 1


def test_a_file_that_is_rewritten_all_the_time_never_breaks_a_reader(tmp_path):
    """In a process of its own: a signal would end it."""
    read_while_rewritten(tmp_path, seconds=1)


@pytest.mark.soak
def test_soak_of_a_file_that_is_rewritten_all_the_time(tmp_path):
    read_while_rewritten(tmp_path, seconds=10)


def read_while_rewritten(tmp_path, seconds):
    root = corpus_in(tmp_path / "c", bytes(1 << 16))
    code = f"""if True:
        import sys, time
        sys.path.insert(0, {str(ROOT)!r})
        from data import prepare as p
        end, read, refused = time.time() + {seconds}, 0, 0
        while time.time() < end:
            try:
                corpus = p.Corpus({str(root)!r}, "bytes", 8, say=lambda line: None)
                for i in range(50):
                    read += len(corpus.batch("train", (0, i), 8)) == 8
            except p.UserError as error:
                assert len(str(error).splitlines()) == 1
                refused += 1
        print(read, refused)
        """
    reader = subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True)
    sizes, rng = (0, 1, 2, 100, 1000, 1 << 16), random.Random(0)
    path = root / "train.bin"
    while reader.poll() is None:
        how, size = rng.random(), rng.choice(sizes)
        if how < 0.4:
            os.truncate(path, size)
        else:
            path.write_bytes((b"\0\0" if how < 0.9 else b"\xff\xff") * (size // 2))
        time.sleep(0.0005)
    out, err = reader.communicate(timeout=60)
    assert reader.returncode == 0, (reader.returncode, err)
    read, refused = map(int, out.split())
    count("bad inputs tried", refused)
    assert read and refused


# Checkpoints -------------------------------------------------------------------------------------

TINY = dict(n_layer=1, n_head=1, n_embd=16, block_size=BLOCK, batch_size=2, eval_batches=1, steps=1)
KINDS = dict(
    adamw=dict(recipe="delayed", amax_history_len=4),
    fp8adam=dict(recipe="delayed", optimizer="fp8adam", adam_block=16, family="gpt2"),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return corpus_in(
        tmp_path_factory.mktemp("fuzz") / "c", np.arange(200, dtype=np.uint16).tobytes() * 4
    )


def arm(text, **changes):
    c = train.Config(**(TINY | dict(data=str(text)) | changes))
    corpus = p.Corpus(c.data, c.tokenizer, c.block_size, say=lambda line: None)
    return train.Arm(c, corpus, torch.device("cpu"))


@pytest.fixture(scope="module", params=KINDS)
def saved(request, text, tmp_path_factory):
    """A kind of run after two steps: how to make its arm, and its directory."""
    root = tmp_path_factory.mktemp("saved")
    make = functools.partial(arm, text, **KINDS[request.param])
    a = make()
    for _ in range(2):
        a.train_step()
    a.save(root / "ckpt.pt")
    return make, root


def load(directory):
    return train.load_checkpoint(directory)[0]


def restore(make, state):
    a = make()
    a.restore(state)
    return a


def go_on(make, state):
    """Restore and do a step, which may be refused: a flipped bit may have made it NaN."""
    a = restore(make, state)
    with contextlib.redirect_stdout(io.StringIO()):
        a.train_step()
    return a


def flip(blob, rng):
    for _ in range(rng.choice([1, 1, 8])):
        blob[rng.randrange(len(blob))] ^= 1 << rng.randrange(8)


def cut(blob, rng):
    del blob[rng.randrange(len(blob)) :]


def wipe(blob, rng):
    i = rng.randrange(len(blob))
    n = rng.choice([1, 16, 4096])
    blob[i : i + n] = bytes(len(blob[i : i + n]))


def leave_out(blob, rng):
    i = rng.randrange(len(blob))
    del blob[i : i + rng.randrange(1, 100)]


def repeat(blob, rng):
    i = rng.randrange(len(blob))
    blob[i:i] = blob[i : i + rng.randrange(1, 100)]


def damaged_files(saved, tmp_path, number, rng):
    make, root = saved
    ended = dict(refused=0, loaded=0)
    for i in range(number):
        count("bad inputs tried")
        directory = tmp_path / str(i)
        shutil.copytree(root, directory)
        path = rng.choice(sorted(q for q in directory.rglob("*") if q.is_file()))
        blob = bytearray(path.read_bytes())
        damage = rng.choice([flip, flip, cut, wipe, leave_out, repeat])
        damage(blob, rng)
        path.write_bytes(blob)
        state = one_sentence(load, directory)
        if state is not None:
            state = one_sentence(go_on, make, state)
        ended["refused" if state is None else "loaded"] += 1
        shutil.rmtree(directory)
    return ended


def test_a_damaged_checkpoint_loads_or_is_refused_in_one_sentence(saved, tmp_path):
    ended = damaged_files(saved, tmp_path, 15, random.Random(0))
    assert ended["refused"]


@pytest.mark.soak
def test_soak_of_damaged_checkpoints(saved, tmp_path):
    assert damaged_files(saved, tmp_path, 400, random.Random())["refused"]


def places(value, path=()):
    """Every place in a state: paths of keys."""
    items = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list | tuple) else items:
        yield (*path, key)
        yield from places(inner, (*path, key))


ABSURD = [None, True, -1, 0, 3, 10**30, 1.5, math.inf, math.nan, "", "x", "0\n1", [], {}, [1]]


def absurd(old, rng):
    """Something else in the place of a value."""
    other = [*ABSURD, torch.zeros(()), torch.zeros(0), torch.zeros(2, 3), torch.zeros(1, 1, 1)]
    if isinstance(old, torch.Tensor):
        dtypes = [torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e5m2]
        x = old.float()
        other += [x.to(d) for d in dtypes] + [old[None], old.flatten(), x.mT if x.dim() > 1 else x]
        other += [x.to_sparse(), x * math.nan, old[:0] if old.dim() else old]
    return rng.choice(other)


def forge(state, rng):
    """A state with something removed, changed, renamed or added, and where."""
    state = copy.deepcopy(state)
    path = rng.choice([q for q in places(state) if rng.random() < 4 ** -len(q) * 16] or [("step",)])
    where = state
    for key in path[:-1]:
        where = where[key]
    how = rng.choice(["change", "change", "remove", "rename", "add"])
    if isinstance(where, tuple):
        return state, "untouched"
    old = where[path[-1]]
    if how == "change":
        where[path[-1]] = absurd(old, rng)
    elif how == "remove":
        del where[path[-1]]
    elif isinstance(where, list):
        where.append(copy.deepcopy(old))
    else:
        where[rng.choice(["x", 7, ""])] = where.pop(path[-1]) if how == "rename" else old
    return state, (how, path)


def forged_states(saved, tmp_path, number, rng):
    make, root = saved
    state, ended = load(root), dict(refused=0, loaded=0)
    for _ in range(number):
        count("bad inputs tried")
        forged, what = forge(state, rng)
        torch.save(forged, tmp_path / "ckpt.pt")
        try:
            read = one_sentence(load, tmp_path)
            again = one_sentence(restore, make, forged) if needed(forged) else None
            if again is not None:
                one_sentence(again.train_step)
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        ended["refused" if read is None or again is None else "loaded"] += 1
    return ended


def needed(state):
    """What `read_checkpoint` lets through: the keys are all there."""
    keys = {"model", "optimizer", "step", "rng", "tokenizer", "vocab_size", "config"}
    return keys <= state.keys()


def test_a_forged_checkpoint_loads_or_is_refused_in_one_sentence(saved, tmp_path):
    ended = forged_states(saved, tmp_path, 20, random.Random(1))
    assert ended["refused"]


@pytest.mark.soak
def test_soak_of_forged_checkpoints(saved, tmp_path):
    assert forged_states(saved, tmp_path, 300, random.Random())["refused"]


@pytest.mark.parametrize("key", ["step", "vocab_size", "tokenizer", "rng"])
def test_resume_answers_absurd_values_in_one_sentence(key, text, tmp_path):
    arm(text).save(tmp_path / "ckpt.pt")
    state = load(tmp_path)
    for value in [None, -1, math.inf, "x", "0\n1", {}, torch.zeros(3)]:
        torch.save(state | {key: value}, tmp_path / "ckpt.pt")
        with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())), within(60):
            flags = ["--sample", "a", "--tokens", "1", "--steps", "2"]
            try:
                one_sentence(train.main, ["--resume", str(tmp_path), *flags], also=(OSError,))
            except Exception as error:
                raise AssertionError(f"{key} {value!r}: {type(error).__name__}: {error}") from error


# Disks -------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    """-> a function that mounts an empty disk of so many bytes. Needs root, as a container has."""
    mounted = []

    def mount(options):
        path = tmp_path / f"disk{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path]
        if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a small disk needs root")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", path], check=True)


def assert_whole(directory):
    """What a run has left: whole files, and of what it appends to, whole lines up to the checkpoint
    (a later one may be cut off; a run that goes on drops it)."""
    for path in (q for q in directory.rglob("*") if q.is_file()):
        content = path.read_bytes()
        if path.suffix == ".json":
            json.loads(content)
        elif path.suffix == ".jsonl":
            rows = [json.loads(line) for line in content.splitlines(True) if line.endswith(b"\n")]
            assert len(content.splitlines()) <= len(rows) + 1
            if path.name == "steps.jsonl" and (path.parent / "ckpt.pt").exists():
                assert len(rows) >= load(path.parent)["step"]
        elif path.suffix == ".png":
            assert content.endswith(b"IEND\xaeB`\x82"), path
        else:
            assert path.suffix == ".pt", path
            load(path.parent)


def flags(text, out):
    pairs = (TINY | dict(data=text, out=out, steps=3, eval_every=1, monitor=1, tokens=1)).items()
    return [w for n, v in pairs for w in (f"--{n.replace('_', '-')}", str(v))]


@pytest.mark.parametrize("pages", [6, 40])
def test_a_full_disk_ends_a_run_in_one_sentence_and_leaves_whole_files(pages, text, disk):
    root = disk(f"size={4 * pages}k")
    with pytest.raises((UserError, OSError)) as error:
        train.main(flags(text, root / "out"))
    assert len(str(error.value).splitlines()) == 1 and "No space left" in str(error.value)
    assert_whole(root)


def test_a_disk_without_room_for_a_name_ends_a_run_in_one_sentence(text, disk):
    for inodes in (3, 5):
        root = disk(f"size=1m,nr_inodes={inodes}")
        with pytest.raises((UserError, OSError)) as error:
            train.main(flags(text, root / "out"))
        assert len(str(error.value).splitlines()) == 1
        assert_whole(root)


def test_a_disk_that_may_only_be_read_ends_a_run_in_one_sentence(text, disk):
    root = disk("ro,size=1m")
    with pytest.raises(UserError, match="cannot write to .*Read-only file system"):
        train.main(flags(text, root / "out"))
    assert not list(root.iterdir())


def test_a_full_disk_leaves_no_half_of_a_corpus(disk, tmp_path):
    (tmp_path / "text.txt").write_bytes(bytes(range(200)) * 100)
    root = disk("size=16k")
    with pytest.raises(UserError, match="cannot write .*"):
        p.prepare("file", tmp_path / "text.txt", out=root / "corpus")
    assert not list(root.iterdir())


@pytest.mark.soak
def test_soak_of_full_disks(text, disk):
    done = 0
    for pages in range(1, 130, 8):
        root = disk(f"size={4 * pages}k")
        with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
            try:
                train.main(flags(text, root / "out"))
                done += 1
            except (UserError, OSError) as error:
                assert len(str(error).splitlines()) == 1
        assert_whole(root)
        count("bad inputs tried")
    assert done


@pytest.mark.soak
def test_soak_of_full_disks_of_a_real_process(text, disk):
    for pages in (1, 8, 30, 60):
        root = disk(f"size={4 * pages}k")
        refused(run(*flags(text, root / "out")))
        assert_whole(root)
    refused(run(*flags(text, disk("ro") / "out")))


@pytest.mark.soak
def test_an_output_that_takes_nothing_ends_in_one_sentence(text, tmp_path):
    with open("/dev/full", "w") as full:
        refused(subprocess_to(full, text, tmp_path))
    reader, writer = os.pipe()
    os.close(reader)
    refused(subprocess_to(writer, text, tmp_path))
    os.close(writer)


def subprocess_to(stdout, text, tmp_path):
    command = [sys.executable, ROOT / "train.py", *flags(text, tmp_path / "out")]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, timeout=120)
