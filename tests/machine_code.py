"""What Triton makes of kernels.py, on a machine without a GPU: its machine code, read.

    python tests/machine_code.py            every configuration for Hopper, one per kernel elsewhere
    python tests/machine_code.py --all      every configuration and format for four kinds of GPU

Each wrapper of kernels.py is called as FP8Linear would call it, on a CPU's tensors, under a driver
that pretends to be the GPU; instead of a launch there is a compilation. cuobjdump and ptxas come
with Triton. A table of registers, shared memory and instructions is printed.
"""

import collections
import concurrent.futures
import functools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TARGETS = {89: "Ada", 90: "Hopper", 100: "Blackwell", 120: "RTX Blackwell"}
SHARED = {89: 101376, 90: 232448, 100: 232448, 120: 101376}  # bytes a program may have
TENSOR_CORES = {89: "QMMA", 90: "QGMMA", 100: "UTCQMMA", 120: "QMMA"}  # of FP8
n = 4096


def casts(fmt=E4M3, dtype=torch.bfloat16):
    """name -> a call of a wrapper, as a layer makes it."""
    empty, known = functools.partial(torch.empty, dtype=dtype), torch.ones(())

    def cast(shape, kernels, **how):
        kernels.cast(empty(shape), fmt, **how)

    ways = {
        "cast_tensor, current": ((None, None), "fp32", None),
        "cast_tensor, delayed": ((None, None), "fp32", known),
        "cast_rows": ((1, None), "pow2", None),
        "cast_blocks": ((1, 128), "pow2", None),
        "cast_blocks, square": ((128, 128), "pow2", None),
        "cast_mx": ((1, 32), "pow2", None),
    }
    calls = {}
    for name, (tile, rounding, known) in ways.items():
        how = dict(tile=tile, rounding=rounding, known=known)
        calls[name] = functools.partial(cast, (n, n), **how)
        if "square" not in name and (fmt, dtype) == (E4M3, torch.bfloat16):
            fused = {  # an MLP whose hidden layer is as wide as x
                "SwiGLU": ((n, 2 * n), dict(act="swiglu")),
                "smooth": ((n, 2 * n), dict(act="swiglu", fold=torch.ones(1, n))),
                "its gradient": ((n, n), dict(act="swiglu_backward", ug=empty(n, 2 * n))),
            }
            for what, (shape, more) in fused.items():
                more = how | more
                calls[f"{name}, {what}"] = functools.partial(cast, shape, **more)
    return calls


def steps(fmt=E4M3):
    """FP8 Adam; fmt is that of m."""

    def call(kernels, block, scales):
        p, m, v = (torch.empty(n * n, dtype=d) for d in (torch.float32, fmt, E5M2))
        scale = torch.ones(1, scales)
        kernels.adam_step(p, p, m, v, scale, scale, p[0], block, 1e-3, 0.9, 0.95, 1e-8, 0.1)

    return {
        "adam_step": lambda k: call(k, 0, 1),
        "adam_step, blocks": lambda k: call(k, 256, n * n // 256),
    }


def gemms(a_fmt=E4M3, b_fmt=E4M3, out=torch.bfloat16):
    def call(kernels, wrapper, s_a, s_b, *how, size=n):
        a, b = torch.empty(size, n, dtype=a_fmt), torch.empty(size, n, dtype=b_fmt)
        getattr(kernels, wrapper)(a, s_a, b, s_b, out, *how)

    def mx(k):
        native = k.capability(None)[0] >= 10
        s = torch.empty((n * n // 32,) if native else (n, n // 32), dtype=torch.float8_e8m0fnu)
        call(k, "gemm_mx", s, s)

    one, rows, square = torch.ones(1, 1), torch.ones(n, n // 128), torch.ones(n // 128, n // 128)
    return {
        "gemm_scaled, fast": lambda k: call(k, "gemm_scaled", one, one, True),
        "gemm_scaled, fast, small": lambda k: call(k, "gemm_scaled", one, one, True, size=128),
        "gemm_scaled, precise": lambda k: call(k, "gemm_scaled", one, one, False),
        "gemm_blocks, square": lambda k: call(k, "gemm_blocks", rows, square),
        "gemm_blocks": lambda k: call(k, "gemm_blocks", rows, rows),
        "gemm_mx": mx,
    }


class Pretended:
    """A driver whose device is the GPU `sm`."""

    def __init__(self, sm):
        self.sm = sm

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.sm, 32)

    def get_current_device(self):
        return self.sm

    def get_current_stream(self, device):
        return 0


def compile_for(sm: int, name: str, calls: dict) -> list:
    """The kernels that a call launches on the GPU `sm`, as rows of `read`."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    import kernels

    driver.set_active(Pretended(sm))
    kernels.capability = lambda device: (sm // 10, sm % 10)
    kernels.processors = lambda device: 132
    rows, run = [], JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        x = args[0]  # a matrix, the descriptor of one, or a source
        if isinstance(x, tuple):
            x = x[3] if x[0] is None else x[0]  # up | gate, or a matrix
        itemsize = getattr(x, "base", x).dtype.itemsize
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        rows.append(read(sm, name, kernel) | {"itemsize": itemsize})

    JITFunction.run = compile_only
    try:
        calls[name](kernels)
    finally:
        JITFunction.run = run
    return rows


def read(sm: int, name: str, kernel) -> dict:
    """What is in the machine code of a compiled kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "kernel.cubin")
        file.write_bytes(kernel.asm["cubin"])
        command = [tool, "-sass", "-res-usage", file]
        dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # "        /*0070*/              @!P0 LDG.E.128 R4, desc[UR6][R4.64] ;"
    ops = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", dump, re.MULTILINE)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", dump).groups()
    return {
        "sm": sm, "call": name, "kernel": kernel.metadata.name, "ptx": kernel.asm["ptx"],
        "threads": 32 * kernel.metadata.num_warps, "registers": int(registers),
        "stack": int(stack), "shared": kernel.metadata.shared, "ops": collections.Counter(ops),
    }  # fmt: skip


def count(row: dict, pattern: str) -> int:
    return sum(k for op, k in row["ops"].items() if re.match(pattern, op))


def compiler():
    """Only the processes of the pool import Triton: as a compiler, not as an interpreter."""
    os.environ.update(TRITON_INTERPRET="0", TRITON_DEFAULT_FP_FUSION="1")


def work(job: tuple) -> list:
    sm, name, kind, how = job
    return compile_for(sm, name, globals()[kind](*how))


def jobs(everything: bool) -> list:
    """(sm, name, kind, formats): by default one configuration a kernel, and for Hopper more.
    (E5M2 for g, fp32 for weights and the output of wgrad.)"""
    kinds = [("casts", ()), ("gemms", ()), ("steps", ())]
    if everything:
        kinds += [("casts", (E5M2,)), ("casts", (E4M3, torch.float32))]
        kinds += [("gemms", (E5M2, E4M3)), ("gemms", (E4M3, E4M3, torch.float32))]
    names = {name: name.split(", ") for name in (*casts(), *gemms(), *steps())}
    twins = {name for name, p in names.items() if "smooth" in p or "delayed" in p and len(p) == 3}
    usual = {
        "cast_tensor, current", "cast_rows", "cast_blocks", "cast_blocks, square", "cast_mx",
        "gemm_scaled, fast", "gemm_blocks, square", "gemm_mx", "adam_step, blocks",
    }  # fmt: skip
    # A kernel's second configuration on every other kind of GPU; on Hopper SwiGLU or its gradient.
    left_out = {
        89: {"cast_blocks, square", "cast_blocks"}, 100: {"cast_tensor, current", "cast_blocks"},
        120: {"cast_blocks, square", "cast_mx"},
        90: twins | {"cast_tensor, current, its gradient", "cast_rows, SwiGLU",
                     "cast_blocks, its gradient", "cast_mx, SwiGLU"},
    }  # fmt: skip
    chosen = {sm: (set(names) if sm == 90 else usual) - left_out[sm] for sm in TARGETS}
    return [
        (sm, name, kind, how)
        for sm in TARGETS
        for kind, how in kinds
        for name in globals()[kind](*how)
        if everything or name in chosen[sm]
    ]  # fmt: skip


def compile_all(everything: bool = False) -> list:
    """Rows of `read`, compiled by as many processes as there are cores."""
    workers, spawn = min(os.cpu_count(), 8), multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, spawn, compiler) as pool:
        return [row for rows in pool.map(work, jobs(everything)) for row in rows]


def table(rows: list) -> str:
    head = f"GPU            {'call':34} {'kernel':13}  regs  stack  shared   code"
    lines = [f"{head}  ld.128  st.128  shuffles  tensor cores"]
    for r in rows:
        cores = sorted(op for op in r["ops"] if re.match(r"Q?[GHO]?MMA\.|QGMMA|HGMMA|UTC\wMMA", op))
        lines.append(
            f"{TARGETS[r['sm']]:14} {r['call']:34} {r['kernel']:13} {r['registers']:5} "
            f"{r['stack']:6} {r['shared']:7} {sum(r['ops'].values()):6} "
            f"{count(r, r'LDG.*128'):7} {count(r, r'STG.*128'):7} {count(r, 'SHFL|REDUX'):9}  "
            + " ".join(cores)
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(compile_all("--all" in sys.argv[1:])))
