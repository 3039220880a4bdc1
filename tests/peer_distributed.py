"""What tests/test_distributed.py starts with torchrun; imported, it is one process's reference.

    torchrun --nproc_per_node=2 tests/peer_distributed.py OUT JOB...

A JOB is the JSON of `train`'s arguments. Each process writes OUT/RANK.json: a result for each job.
"""

import hashlib
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

import train as trainer  # noqa: E402
from data import distributed  # noqa: E402
from data.checkpoint import Run  # noqa: E402
from data.prepare import Corpus  # noqa: E402

SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4, warmup=3, eval_batches=3,
             steps=40, lr=3e-3)  # fmt: skip


def digest(arm):
    """Of everything that all processes must agree on."""
    found = hashlib.sha256()
    state = distributed.whole_weights(arm.model)
    for name, t in sorted(state.items()):
        found.update(name.encode())
        found.update(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train(data, text, steps=20, loud=0, broken=(), saved=None, save=None, grid=False, **fields):
    """Train an arm -> losses and a digest. In every second micro-batch, which is that of rank 1 of
    two, activations are `loud` times as large; in the steps `broken`, its first try, they are NaN.
    saved, save: directories of a checkpoint to start from and to write.
    grid: a micro-batch's gradients are rounded to multiples of 2**-20. Sums of some of those, below
    16, are exact in fp32, so it does not matter in which order processes add them."""
    c = replace(trainer.Config(data=data), **SMALL | fields, **trainer.parse_arm(text))
    corpus = Corpus(c.data, c.tokenizer, c.block_size, say=lambda line: None)
    state = trainer.read_checkpoint(saved) if saved else None
    arm = trainer.Arm(c, corpus, torch.device("cpu"), Run(saved, state) if saved else None)
    if saved:
        arm.restore(state)
    broken, batch, factor = list(broken), arm.batch, [1.0]

    def watched(split, *key):
        odd = split == "train" and key[-1] % 2 == 1
        factor[0] = loud if odd and loud else 1.0
        if odd and arm.step in broken:
            factor[0] = broken.remove(arm.step) or torch.nan
        return batch(split, *key)

    arm.batch, drawn = watched, []
    arm.model.wte.register_forward_hook(lambda m, args, out: out * factor[0])
    if grid:
        least = c.loss_scale * 2.0**-20
        for w in arm.model.parameters():
            w.register_hook(lambda g: (g / least).round() * least)
    while arm.step < steps:
        loss, _ = arm.train_step()
        drawn.append(loss if not arm.skipped else None)
    if save:
        if distributed.rank() == 0:
            Path(save).mkdir(parents=True, exist_ok=True)
        arm.save(Path(save) / "ckpt.pt")
    return dict(losses=drawn, val=arm.evaluate(), digest=digest(arm))


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.chdir(tempfile.gettempdir())
    rank = int(os.environ["RANK"])
    distributed.join(torch.device("cpu"))
    out, *jobs = sys.argv[1:]
    results = [train(**json.loads(job)) for job in jobs]
    (Path(out) / f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()
