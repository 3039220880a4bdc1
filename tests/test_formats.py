"""Casts, against ml_dtypes, gfloat, and answers worked out by hand."""

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8gpt import E4M3, E5M2, FP16, decode, encode, round_to

FORMATS = [E4M3, E5M2]
ML = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
GFLOAT = {
    E4M3: gfloat.formats.format_info_ocp_e4m3,
    E5M2: gfloat.formats.format_info_ocp_e5m2,
}
BF16_INPUTS = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()


def codes(x, fmt):
    return encode(torch.as_tensor(x, dtype=torch.float32).clone(), fmt).view(torch.uint8)


def oracle(x, fmt):
    """ml_dtypes does not saturate, so it is given clamped numbers; its NaN keeps its sign too."""
    clamped = np.clip(x.numpy(), -fmt.max, fmt.max)
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(clamped.astype(ML[fmt]).view(np.uint8))


def same_codes(a, b, fmt):
    """Equal bytes, but any NaN equals any NaN."""
    nan_a, nan_b = (t.view(fmt.dtype).float().isnan() for t in (a, b))
    return bool(((a == b) | (nan_a & nan_b)).all())


def neighbours_of_powers_of_two():
    bits = torch.arange(0, 255, dtype=torch.int32) << 23
    bits = torch.cat([bits + d for d in (-1, 0, 1)] + [torch.arange(0, 64, dtype=torch.int32)])
    x = bits[bits >= 0].view(torch.float32)
    x = x[x.isfinite()]
    return torch.cat([x, -x])


@pytest.mark.parametrize(
    "x, code",
    [(0.0, 0x00), (-0.0, 0x80), (2**-10, 0x00), (2**-9, 0x01), (1.5 * 2**-9, 0x02)]
    + [(7 * 2**-9, 0x07), (2**-6, 0x08), (0.1, 0x1D), (1 / 3, 0x2B), (1, 0x38), (1.0625, 0x38)]
    + [(1.1875, 0x3A), (1.3, 0x3A), (17, 0x58), (19, 0x5A), (240, 0x77), (432, 0x7E), (448, 0x7E)]
    + [(464, 0x7E), (465, 0x7E), (480, 0x7E), (1e4, 0x7E), (1e30, 0x7E), (-500, 0xFE)]
    + [(1.31640625, 0x3B)],  # through BF16 it would become 1.25
)
def test_known_answers_of_e4m3(x, code):
    assert codes([x], E4M3).item() == code


@pytest.mark.parametrize(
    "x, code",
    [(0.0, 0x00), (2**-17, 0x00), (2**-16, 0x01), (1.5 * 2**-16, 0x02), (2**-14, 0x04), (0.1, 0x2E)]
    + [(1 / 3, 0x35), (1, 0x3C), (1.125, 0x3C), (1.375, 0x3E), (57344, 0x7B), (61439, 0x7B)]
    + [(61440, 0x7B), (65536, 0x7B), (1e6, 0x7B), (-1e9, 0xFB)],
)
def test_known_answers_of_e5m2(x, code):
    assert codes([x], E5M2).item() == code


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_every_code_decodes_as_elsewhere_and_encodes_to_itself(fmt):
    all_codes = torch.arange(256, dtype=torch.uint8)
    values = decode(all_codes.view(fmt.dtype))
    elsewhere = torch.from_numpy(all_codes.numpy().view(ML[fmt]).astype(np.float32))
    third = torch.tensor([gfloat.decode_float(GFLOAT[fmt], int(c)).fval for c in all_codes])
    torch.testing.assert_close(values, elsewhere, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values, third.float(), rtol=0, atol=0, equal_nan=True)
    finite = values.isfinite()
    assert torch.equal(codes(values, fmt)[finite], all_codes[finite])
    transposed = decode(all_codes.view(fmt.dtype).view(16, 16).t())
    torch.testing.assert_close(transposed, values.view(16, 16).t(), equal_nan=True)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize(
    "inputs", [BF16_INPUTS, neighbours_of_powers_of_two()], ids=["bf16", "powers of two"]
)
def test_casts_equal_ml_dtypes_and_gfloat(fmt, inputs):
    ours = codes(inputs, fmt)
    assert same_codes(ours, oracle(inputs, fmt), fmt)
    finite = inputs[inputs.isfinite()]
    rounded = gfloat.round_ndarray(GFLOAT[fmt], finite.numpy().astype(np.float64), sat=True)
    assert torch.equal(decode(encode(finite.clone(), fmt)), torch.from_numpy(rounded).float())
    # the definition, and the single pass that stands for it
    assert same_codes(ours, round_to(inputs, fmt).to(fmt.dtype).view(torch.uint8), fmt)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@settings(max_examples=200, deadline=None)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_any_fp32_pattern_casts_as_in_ml_dtypes(fmt, bits):
    x = torch.from_numpy(np.array(bits, np.uint32).view(np.float32).copy())
    assert same_codes(codes(x, fmt), oracle(x, fmt), fmt)
    assert same_codes(round_to(x, fmt).to(fmt.dtype).view(torch.uint8), oracle(x, fmt), fmt)


def test_signs_of_zero_nan_and_infinity():
    x = torch.tensor([-0.0, -1e-30, float("nan"), float("inf"), float("-inf")])
    r = round_to(x, E4M3)
    assert torch.equal(torch.signbit(r[:2]), torch.tensor([True, True]))
    assert r[2].isnan() and r[3] == 448 and r[4] == -448  # quantize sees an inf before the cast


def test_the_fp16_grid_is_torchs():
    x = torch.randn(10000) * torch.logspace(-9, 5, 10000)
    assert torch.equal(round_to(x, FP16), x.clamp(-65504, 65504).half().float())


MEAN_ERROR = 4.0  # standard errors of the mean of a coin: 1 in 16,000 runs, and the seed is fixed


@pytest.mark.parametrize("fmt, x", [(E4M3, 1.03), (E4M3, 0.0007), (E5M2, -3.3), (E4M3, 447.0)])
def test_stochastic_rounding_takes_a_neighbour_and_is_right_in_the_mean(fmt, x):
    n = 100_000
    y = decode(encode(torch.full((n,), x), fmt, stochastic=True)).double()
    low, high = y.unique().tolist()
    assert low <= x <= high and codes([low], fmt).item() != codes([high], fmt).item()
    p = (x - low) / (high - low)
    assert abs(y.mean().item() - x) < MEAN_ERROR * (high - low) * (p * (1 - p) / n) ** 0.5
