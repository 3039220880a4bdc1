"""The kernels in machine code, on a machine without a GPU; see machine_code.py."""

import importlib.util
import re

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import machine_code
from machine_code import SHARED, TENSOR_CORES, count

# Triton 3.6 on sm_120 leaves a call behind TMA, which takes 8 bytes of stack; a spill takes more.
CALL_FRAME = {120: 8}


def check(rows):
    """What must be true of every kernel, whatever its configuration."""
    for r in rows:
        where = f"{r['kernel']} of {r['call']} on sm_{r['sm']}"
        frame = CALL_FRAME.get(r["sm"], 0) if count(r, r"CALL\.ABS") else 0
        assert r["stack"] <= frame, f"{where} spills"
        assert frame or not count(r, "LDL|STL"), f"{where} spills"
        assert r["shared"] <= SHARED[r["sm"]], f"{where} does not fit into shared memory"
        if r["kernel"] in ("_gemm_scaled", "_gemm_blocks"):
            assert count(r, TENSOR_CORES[r["sm"]]), f"{where} misses the FP8 tensor cores"
            assert not count(r, r"HGMMA|HMMA|UTCHMMA"), f"{where} multiplies in 16 bits"
        elif r["kernel"] == "_gemm_mx" and r["sm"] >= 100:
            assert re.search(r"kind::mxf8f6f4\S*block_scale", r["ptx"]), f"{where}: not native"
            assert count(r, r"UTCQMMA|QMMA\.SF"), f"{where} misses the block-scaled tensor cores"
        elif r["kernel"] == "_gemm_mx":
            assert count(r, r"HGMMA.*BF16|HMMA.*BF16"), f"{where} misses the BF16 tensor cores"
        else:
            assert not count(r, r"F2FP\.BF16"), f"{where} rounds twice"
            check_vectors(r, where)


# What is read for an element of the operand: x; up and gate; dh, up and gate.
READS = {"SwiGLU": 2, "smooth": 2, "its gradient": 3}


def check_vectors(r, where):
    """Every element travels in 16 bytes (a vector of scales may, too); no division that decides a
    scale is the approximate one. (SwiGLU's may be: it is right to 2 units of fp32's last place.)"""
    vectors, what = 16 * r["threads"], r["call"].split(", ")[-1]
    if r["kernel"] == "_adam":  # p and g in fp32, m and v in a byte; the first of two passes has no
        first = not count(r, r"STG\S*\.128")  # p and stores nothing
        loads, stores = (6 if first else 10) * 2048, (0 if first else 6) * 2048
    else:
        fused = what in READS
        assert fused or not re.search(r"div\.(full|approx)", r["ptx"]), f"{where}: coarse division"
        edge = 64 if fused or r["kernel"] != "_amax" else 128
        tile = {"_cast_tiles": 32 * 128 if r["call"].startswith("cast_mx") else 128 * 128}
        tile |= {"_cast_whole": 128 * 128} if "square" in r["call"] else {}
        elements = tile.get(r["kernel"], edge * edge)
        loads = elements * READS.get(what, 1) * r["itemsize"]
        stores = 0 if r["kernel"] == "_amax" else 2 * elements  # q and q_t, a byte each
    assert count(r, r"LDG\S*\.128") * vectors >= loads, f"{where}: narrow loads"
    assert count(r, r"STG\S*\.128") * vectors >= stores, f"{where}: narrow stores"


def check_hopper(rows):
    """The two things that Hopper's kernels are for."""
    hopper = {r["call"]: r for r in rows if r["sm"] == 90 and r["kernel"] != "_amax"}
    for r in hopper.values():
        plain = r["call"].split(", ")[-1] not in READS
        if (
            "cast" in r["kernel"] and plain
        ):  # rounded and saturated in one instruction for two numbers
            codes = 16 * count(r, r"STG\S*\.128")
            assert 2 * count(r, r"F2FP\.SATFINITE\.E4M3") == codes, r["call"]
    # Fast accumulation stays in the tensor cores; precise adds each number in fp32, once a step.
    precise = hopper["gemm_scaled, precise"]
    assert count(hopper["gemm_scaled, fast"], "FADD") == 0
    assert count(precise, "FADD") >= 128 * 128 // precise["threads"]


def test_every_kernel_compiles_for_four_kinds_of_gpu_as_it_should():
    rows = machine_code.compile_all()
    check(rows)
    check_hopper(rows)
    kernels = {"_amax", "_cast_whole", "_cast_rows", "_cast_tiles"}
    kernels |= {"_gemm_scaled", "_gemm_blocks", "_gemm_mx", "_adam"}
    for sm in SHARED:
        assert {r["kernel"] for r in rows if r["sm"] == sm} == kernels


@pytest.mark.slow
def test_every_configuration_and_format(capsys):
    rows = machine_code.compile_all(everything=True)
    with capsys.disabled():
        print("\n" + machine_code.table(rows))
    check(rows)
