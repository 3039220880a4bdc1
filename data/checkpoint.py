"""What a run of train.py leaves: its configuration, its checkpoint, and a model from them."""

import contextlib
import math
import os
import re
import shutil
import signal
import zlib
from dataclasses import fields, replace
from pathlib import Path

import torch

from data.prepare import UserError
from fp8gpt import RECIPES, GPTConfig

# ------------------------------------------------------------------------------------------------
# A configuration's model

SHAPE = ("family", "n_layer", "n_head", "n_kv_head", "n_embd", "hidden",
         "rope_theta", "rope_scaling", "norm_eps")  # fmt: skip
QUANTISED = ("recipe", "smooth", "w3", "head", "bf16_first", "bf16_last")
RECIPE_FIELDS = ("amax_history_len", "amax_compute_algo", "margin", "bias", "rounding",
                 "fprop", "dgrad", "wgrad")  # fmt: skip

# Published sizes, n_layer, n_head, n_kv_head, n_embd and hidden: those that arXiv 2309.17224
# fine-tunes and evaluates, Cerebras-GPT's and Llama 2's.
_GPT = dict(family="gpt2", block_size=2048)
_LLAMA2 = dict(family="llama", block_size=4096)
SIZES = {
    name: base | dict(zip(("n_layer", "n_head", "n_kv_head", "n_embd", "hidden"), numbers))
    for name, base, *numbers in (
        ("gpt-111m", _GPT, 10, 12, 12, 768, 3072),
        ("gpt-590m", _GPT, 18, 12, 12, 1536, 6144),
        ("gpt-1.3b", _GPT, 24, 16, 16, 2048, 8192),
        ("gpt-6.7b", _GPT, 32, 32, 32, 4096, 16384),
        ("gpt-13b", _GPT, 40, 40, 40, 5120, 20480),
        ("llama2-7b", _LLAMA2, 32, 32, 32, 4096, 11008),
        ("llama2-13b", _LLAMA2, 40, 40, 40, 5120, 13824),
    )
}


def triple(text):
    """ "3" or "0/0/3" -> integers for x, w and g."""
    parts = text.split("/") * (1 if "/" in text else 3)
    if len(parts) != 3 or not all(re.fullmatch(r"[+-]?\d{1,2}", p) for p in parts):
        raise ValueError("a whole number, or three as x/w/g")
    return tuple(map(int, parts))


def scaling(text):
    """ "8/1/4/8192" -> (factor, low, high, old context) of Llama 3's rotary positions."""
    try:
        factor, low, high, old = map(float, text.split("/"))
    except ValueError:
        factor = 0
    if not (1 <= factor < math.inf and 0 < low < high < math.inf and 1 <= old < math.inf):
        raise ValueError("factor/low/high/old context, as 8/1/4/8192")
    return factor, low, high, old


def model_config(c, vocab_size):
    """The GPTConfig of a configuration, train.py's Config or a dictionary of its fields."""
    c = c if isinstance(c, dict) else vars(c)
    changed = {n: c[n] for n in RECIPE_FIELDS if c.get(n) is not None}
    names = {f.name for f in fields(GPTConfig)} - {"recipe", "vocab_size"}
    model = {n: c[n] for n in names if c.get(n) is not None}
    try:
        changed |= {n: triple(changed[n]) for n in ("margin", "bias") if n in changed}
        if "rope_scaling" in model:
            model["rope_scaling"] = scaling(model["rope_scaling"])
        recipe = replace(RECIPES[c["recipe"]], **changed)
        return GPTConfig(vocab_size=vocab_size, recipe=recipe, **model)
    except ValueError as error:
        raise UserError(str(error)) from None
    except (KeyError, TypeError, AttributeError) as error:  # of a file by another program
        raise UserError(f"this describes no model: {type(error).__name__} {error}") from None


# ------------------------------------------------------------------------------------------------
# Checkpoints: ckpt.pt, and the one before it

NEEDED = {"model", "optimizer", "step", "rng", "tokenizer", "vocab_size", "config"}


def checksum(value, crc=0):
    """CRC 32 of a state. (torch.load does not see that a bit of a weight has changed.)"""
    if isinstance(value, dict):
        for key, inner in value.items():
            crc = checksum(inner, zlib.crc32(repr(key).encode(), crc))
    elif isinstance(value, list | tuple):
        for inner in value:
            crc = checksum(inner, crc)
    elif torch.is_tensor(value):
        what = f"{value.dtype} {tuple(value.shape)}".encode()
        bits = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        crc = zlib.crc32(bits.numpy(), zlib.crc32(what, crc))
    else:
        crc = zlib.crc32(repr(value).encode(), crc)
    return crc


def write_checkpoint(state, path):
    """Write aside, sync, rename: at every instant `path` is whole or not there, and once it was
    there it stays; what it was before is kept beside it."""
    aside, link = path.with_name("ckpt.tmp"), path.with_name("ckpt.link")
    try:
        with open(aside, "wb") as f:
            torch.save(state | dict(crc32=checksum(state)), f)
            f.flush()
            os.fsync(f.fileno())
        if path.exists():
            link.unlink(missing_ok=True)
            try:
                os.link(path, link)  # a second name for the same file
            except OSError:  # a file system without
                shutil.copyfile(path, link)
            os.replace(link, path.with_name("ckpt.old.pt"))
        os.replace(aside, path)
        if os.name == "posix":  # the names themselves
            directory = os.open(path.parent, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        aside.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {str(error).splitlines()[0]}") from None


@contextlib.contextmanager
def caught_signals():
    """-> a list that Ctrl-C and SIGTERM add themselves to; a second one ends the process."""
    caught, before = [], {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    for s in before:
        signal.signal(s, lambda s, _: caught.append(s) or signal.signal(s, before[s]))
    try:
        yield caught
    finally:
        for s in before:
            signal.signal(s, before[s])


@contextlib.contextmanager
def alone_in(directory):
    """Make it, and meanwhile let no other run write there: two would mix their rows and
    checkpoints. A process that dies loses its lock; where there are no locks, none is refused."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror}") from None
    try:
        import fcntl
    except ImportError:  # Windows
        yield directory
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(f"another run is writing to {directory}: choose another --out") from None
    except OSError:  # a file system without locks
        pass
    try:
        yield directory
    finally:
        os.close(handle)


def check_adamw(optimizer):
    """Raise ValueError for a state that torch has loaded without a look at its tensors."""
    for p, state in optimizer.state.items() if isinstance(optimizer, torch.optim.AdamW) else ():
        moment, step = (p.shape, p.dtype, p.layout), ((), torch.float32, torch.strided)
        kinds = {k: (t.shape, t.dtype, t.layout) for k, t in state.items()}
        if kinds != dict(step=step, exp_avg=moment, exp_avg_sq=moment):
            raise ValueError("this is the state of another optimizer")


def written(directory):
    """When the checkpoint there was written, to see whether another one has come."""
    path = Path(directory) / "ckpt.pt"
    return path.stat().st_mtime_ns if path.exists() else None


def read_checkpoint(directory, older=False):
    """The state that train.py saved. Raises UserError, also for a file cut short or foreign."""
    path = Path(directory) / ("ckpt.old.pt" if older else "ckpt.pt")
    before = "" if older or not path.with_name("ckpt.old.pt").is_file() else OFFER
    if not path.is_file():
        raise UserError(f"there is no checkpoint at {path}{before}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        crc = state.pop("crc32", None)
        if crc is not None and crc != checksum(state):
            raise UserError("")
        counts = (state["step"], state["vocab_size"])
        if NEEDED <= state.keys() and all(type(n) is int and 0 <= n < 2**31 for n in counts):
            return state
        raise ValueError
    except UserError:
        raise UserError(f"{path} is damaged: its CRC 32 differs{before}") from None
    except Exception as error:  # cut short, foreign, not a zip: torch has many errors for it
        what = f"{path} is no checkpoint of train.py: {type(error).__name__}"
        raise UserError(what + before) from None


OFFER = "; the one before it is there, too: --older goes on from that"

# ------------------------------------------------------------------------------------------------
# A run as a source: `fields` are those of train.py's Config, `fill(model)` gives a GPT its weights


class Run:
    """A directory of train.py."""

    def __init__(self, directory, state=None):
        state = state or read_checkpoint(directory)
        self.weights, self.fields = state["model"], dict(state["config"])
        self.tokenizer, self.vocab_size = state["tokenizer"], state["vocab_size"]
        self.what = f"{self.fields['recipe']}, step {state['step']}"

    def fill(self, model, pin=False):
        load_weights(model, self.weights)


def load_weights(model, weights):
    """A state dictionary into a model of the same shape and perhaps another recipe: an amax history
    goes where one is kept, its newest entries where it is shorter there."""
    own = model.state_dict()
    histories = {k for k in {*own, *weights} if k.endswith("amax_history")}
    for name in sorted({*own, *weights} - histories):
        if name not in own or name not in weights:
            where = "the checkpoint has" if name in weights else "the model needs"
            raise UserError(f"the checkpoint does not fit: {where} a tensor {name} more")
        if name == "wpe.weight":  # of a longer context
            weights = weights | {name: weights[name][: len(own[name])]}
        if own[name].shape != weights[name].shape:
            shapes = f"{tuple(weights[name].shape)}, not {tuple(own[name].shape)}"
            raise UserError(f"the checkpoint does not fit: tensor {name} is {shapes}")
    with torch.no_grad():
        for name in own.keys() & weights.keys():
            n = min(len(own[name]), len(weights[name])) if name in histories else None
            own[name][:n].copy_(weights[name][:n])
