import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)  # several small processes on few cores: more threads are slower


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
