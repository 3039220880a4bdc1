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
