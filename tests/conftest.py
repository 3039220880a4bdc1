import os
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


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A prepared directory of a few kilobytes."""
    root = tmp_path_factory.mktemp("corpus")
    source = "".join(p.read_text() for p in sorted((ROOT / "data").glob("*.py")))
    (root / "text.txt").write_text(source)
    from data.prepare import prepare

    prepare("file", root / "text.txt", out=root / "text")
    return root / "text"


# Those that take longest on their own start first: begun last, one would run on alone.
LONG = ("test_every_kernel_compiles", "test_the_benchmark_for_gpus", "test_inductor_keeps",
        "test_convert.py", "test_without_a_compiler", "test_500_steps",
        "test_one_graph", "test_ctrl_c")  # fmt: skip


def pytest_collection_modifyitems(items):
    def rank(item):
        return next((i for i, part in enumerate(LONG) if part in item.nodeid), len(LONG))

    items.sort(key=rank)  # stable: the others stay as they were
