"""Several processes, all of it torch's own: torchrun, process groups, DDP, FSDP2.

    torchrun --nproc_per_node=8 train.py --recipe current          the whole model in each process
    torchrun --nproc_per_node=8 train.py --recipe current --fsdp   its weights and state in shards

The `accum` micro-batches of a step are dealt out to the processes, so a step is the same step in
one process and in eight, and a checkpoint of the one goes on in the other. Delayed scaling needs
one collective more (fp8gpt.end_step); buffers are not broadcast, for until then they are each
process's own. FSDP2 gathers a block's weights in front of its forward and backward: its scales come
from the whole weight, and its casts are made anew in backward, by activation checkpointing, so that
they live no longer than the weight does. (Gathering 8-bit weights is out of scope.)
"""

import contextlib
import datetime
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from data.prepare import UserError
from fp8gpt import FP8Adam, Quantized, dequantize, quantize

# Torch 2.13 has another name for this option of DDP, which also leaves out a copy at the start.
warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
# The model's logits are a view; nobody writes into them.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)

PATIENCE = datetime.timedelta(minutes=10)  # with a process that does not answer


def join(device):
    """Join the processes that torchrun has started -> this one's device. Alone, do nothing."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return device
    cuda = device.type == "cuda"
    if cuda:
        local, here = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= here:
            raise UserError(f"{here} GPUs are here: start no more processes than that")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=PATIENCE)
    if rank():
        sys.stdout = open(os.devnull, "w")  # one of them speaks
    return device


def joined():
    return dist.is_available() and dist.is_initialized()


def rank():
    return dist.get_rank() if joined() else 0


def size():
    return dist.get_world_size() if joined() else 1


@contextlib.contextmanager
def first_alone():
    """The first process goes ahead, the others follow: what it has written is there for them."""
    if rank():
        dist.barrier()
    yield
    if joined() and not rank():
        dist.barrier()


def total(t):
    """The sum over processes of a tensor, in place."""
    if joined():
        dist.all_reduce(t)
    return t


def anywhere(flag, device):
    """Whether it is so in any process: all of them get the same answer."""
    return bool(total(torch.tensor(float(bool(flag)), device=device))) if joined() else bool(flag)


def leave_if_alone(error, say):
    """End this process if the error is what torch says of a process that does not answer any more.
    (Without waiting: an orderly end would wait for the one that is gone.)"""
    words = ("gloo", "closed by peer", "NCCL", "Timed out", "Broken pipe", "Connection reset")
    if joined() and any(word in str(error) for word in words):
        print(f"{say}another process of this job is gone, so it ends: --resume goes on",
              file=sys.stderr, flush=True)  # fmt: skip
        os._exit(1)


# ------------------------------------------------------------------------------------------------
# The model


def wrap(model, fsdp):
    """What a training step calls in place of the model."""
    if fsdp:
        from torch.distributed.fsdp import fully_shard  # here: it takes a second to import

        model.config.checkpoint = True
        model.weights_cast = contextlib.nullcontext  # outside of a block there are only shards
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)
    return DistributedDataParallel(model, broadcast_buffers=False) if joined() else model


@contextlib.contextmanager
def micro_batch(wrapped, last):
    """Gradients are reduced once in a step, after its last micro-batch."""
    if isinstance(wrapped, DistributedDataParallel):
        with contextlib.nullcontext() if last else wrapped.no_sync():
            yield
    else:
        if hasattr(wrapped, "set_requires_gradient_sync"):
            wrapped.set_requires_gradient_sync(last)
        yield


MOMENTS = {torch.optim.AdamW: ("exp_avg", "exp_avg_sq"), FP8Adam: ("m", "v")}


class Shards:
    """This process's shards of the parameters, as parameters of their own: an optimizer that knows
    nothing of DTensors updates them. Tiles of 8-bit moments are tiles of a shard."""

    def __init__(self, groups):
        self.pairs = []
        for group in groups:
            owned = [torch.nn.Parameter(p.to_local().detach()) for p in group["params"]]
            self.pairs += zip(group["params"], owned)
            group["params"] = owned

    def take_gradients(self):
        for p, shard in self.pairs:
            shard.grad = None if p.grad is None else p.grad.to_local()
            p.grad = None

    def whole(self, optimizer):
        """The optimizer's state as one process has it."""
        from torch.distributed.tensor import DTensor

        state = optimizer.state_dict()
        for i, (p, shard) in enumerate(self.pairs if state["state"] else ()):  # none: no step yet
            kept = self.decoded(optimizer, state["state"].get(i, {}), shard)
            for n in MOMENTS[type(optimizer)]:
                t = kept.get(n, torch.zeros_like(shard))
                where = dict(device_mesh=p.device_mesh, placements=p.placements)
                shape = dict(shape=p.shape, stride=p.stride())
                kept[n] = DTensor.from_local(t, run_check=False, **where, **shape).full_tensor()
            state["state"][i] = self.encoded(optimizer, kept)
        return state

    def part(self, optimizer, state):
        """The inverse of `whole`."""
        from torch.distributed.tensor import distribute_tensor

        mine = {}
        for i, (p, shard) in enumerate(self.pairs):
            kept = self.decoded(optimizer, state["state"].get(i, {}), p)
            for n in MOMENTS[type(optimizer)]:
                if n in kept:
                    t = distribute_tensor(kept[n], p.device_mesh, p.placements)
                    kept[n] = t.to_local().clone()
            if kept and shard.numel():
                mine[i] = self.encoded(optimizer, kept)
        return state | dict(state=mine)

    @staticmethod
    def decoded(optimizer, entry, like):
        entry = dict(entry)
        if isinstance(optimizer, FP8Adam):
            for n, fmt in (("m", optimizer.m_fmt), ("v", optimizer.v_fmt)):
                if n in entry:
                    x8 = Quantized(entry[n], entry.pop(n + "_scale"), optimizer.tile, fmt)
                    entry[n] = dequantize(x8).view(like.shape)
        return entry

    @staticmethod
    def encoded(optimizer, entry):
        if isinstance(optimizer, FP8Adam):
            for n, fmt in (("m", optimizer.m_fmt), ("v", optimizer.v_fmt)):
                x8 = quantize(entry[n].reshape(1, -1), fmt, optimizer.tile)
                if n == "v":  # a positive one is never 0: FP8Adam's rule
                    codes = x8.q.view(torch.uint8)
                    torch.maximum(codes, (entry[n].view(1, -1) > 0).byte(), out=codes)
                entry[n], entry[n + "_scale"] = x8.q, x8.s
        return entry


def whole_weights(model):
    """The model's state dictionary as one process has it."""
    state = model.state_dict()
    return {k: t.full_tensor() if hasattr(t, "full_tensor") else t for k, t in state.items()}
