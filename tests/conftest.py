import os
import random
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TRITON_INTERPRET"] = (
    "1"  # kernels.py runs on the CPU; tests/machine_code.py compiles it
)
torch.set_num_threads(1)  # several small processes on few cores: more threads are slower


def some(names, fast):
    """Parameters, of which only the `fast` ones belong to the test command."""
    return [n if n in fast else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A prepared directory of 96 KB: made-up words, the frequent ones as frequent as in a language,
    so that a model of bytes learns something in ten steps. Always the same, on every machine."""
    root, draw = tmp_path_factory.mktemp("corpus"), random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 7))) for _ in range(500)]
    often = draw.choices(words, [1 / rank for rank in range(1, 501)], k=20000)
    lines = (" ".join(often[i : i + 12]).capitalize() + ".\n" for i in range(0, len(often), 12))
    (root / "text.txt").write_text("".join(lines)[:96000])
    from data.prepare import prepare

    prepare("file", root / "text.txt", out=root / "text")
    return root / "text"


# Those that take longest on their own start first: begun last, one would run on alone.
LONG = ("test_every_kernel_compiles", "test_the_benchmark_for_gpus", "test_inductor_keeps",
        "test_convert.py", "test_500_steps", "test_one_graph", "test_ctrl_c")  # fmt: skip


# What a run has counted, over all its processes: `pytest -m soak` ends with these sums.
RUNNING = []


def count(name, n=1):
    """Add to a sum of the test that runs."""
    found = dict(RUNNING[-1].user_properties)
    RUNNING[-1].user_properties[:] = (found | {name: found.get(name, 0) + n}).items()


def pytest_runtest_setup(item):
    RUNNING[:] = [item]


def pytest_terminal_summary(terminalreporter):
    sums = {}
    for report in terminalreporter.stats.get("passed", []):
        for name, n in report.user_properties if report.when == "call" else ():
            sums[name] = sums.get(name, 0) + n
    if sums:
        terminalreporter.write_line(", ".join(f"{name} {n:,}" for name, n in sorted(sums.items())))


def pytest_collection_modifyitems(items):
    def rank(item):
        return next((i for i, part in enumerate(LONG) if part in item.nodeid), len(LONG))

    items.sort(key=rank)  # stable: the others stay as they were
