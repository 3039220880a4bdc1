"""Train a GPT in FP8 and compare it with BF16: data, loop, comparison, numbers, pictures.

    python train.py --recipe mxfp8                            one model, about 2 minutes on a CPU
    python train.py --compare bf16 delayed current mxfp8      the same run under several recipes
    python train.py --compare delayed delayed,smooth=channel  an arm is a recipe plus overrides
    python train.py --bench                                   what a step costs, part by part

Every field of the block below is a flag (`--batch-size 16`) and, in an arm, an override
(`current,batch_size=16`). The recipes themselves live in fp8gpt.py.
"""

import argparse
import contextlib
import dataclasses
import difflib
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch

import fp8gpt
from data.prepare import (
    HEADER_INTS,
    HEADER_MAGIC,
    NAMES,
    UserError,
    describe,
    get_tokenizer,
    prepare,
)
from fp8gpt import GPT, RECIPES, FP8Adam, FP8Linear, GPTConfig, Recipe, end_step, param_groups

HERE = Path(__file__).resolve().parent

# ------------------------------------------------------------------------------------------------
# Configuration. The comment of a field is its help. The values are those of a CPU; a GPU starts from
# GPU_PRESET instead. `None` leaves a field of the recipe, or of GPTConfig, as it is.


@dataclass
class Config:
    recipe: str = "mxfp8"  # how x, w and g become FP8: a row of RECIPES in fp8gpt.py
    seed: int = 1337  # of the initial weights, the batches and the sample
    device: str = "auto"  # cpu, cuda, or auto: cuda where torch can use one
    threads: int = 0  # CPU threads; 0: torch's own choice
    compile: bool = False  # torch.compile the blocks: faster, after a warm-up
    # data
    data: str = "stdlib"  # a corpus of data/prepare.py, a text file, or a directory of .bin files
    tokenizer: str = "bytes"  # for text that is not prepared yet: bytes or gpt2
    # model
    family: str = "llama"  # llama (RMSNorm, RoPE, SwiGLU) or gpt2 (LayerNorm, GELU, tied head)
    n_layer: int = 4  # blocks
    n_head: int = 4  # attention heads
    n_kv_head: int | None = None  # key and value heads, shared by groups of query heads
    n_embd: int = 128  # width C
    hidden: int | None = None  # width of the MLP
    block_size: int = 128  # context length T, tokens
    smooth: str | None = None  # Smooth-SwiGLU: channel or token
    w3: str | None = None  # bf16: leave the MLP's down projection in BF16
    head: str = "bf16"  # fp8: the output head follows the recipe too
    bf16_first: int = 0  # blocks at the start that stay BF16
    bf16_last: int = 0  # blocks at the end that stay BF16
    checkpoint: bool = False  # recompute blocks in backward (activation checkpointing)
    # the recipe's own fields
    amax_history_len: int | None = None  # steps that delayed scaling looks back
    amax_compute_algo: str | None = None  # of that history: max or most_recent
    margin: str | None = None  # headroom of 2^margin: one number, or x/w/g as 0/0/3
    bias: str | None = None  # recipe constant: encode by 2^bias, one number or x/w/g
    rounding: str | None = None  # of the scale: fp32, pow2 or floor
    fprop: bool | None = None  # false: this GEMM stays BF16
    dgrad: bool | None = None  # false: this GEMM stays BF16
    wgrad: bool | None = None  # false: this GEMM stays BF16
    # optimizer
    optimizer: str = "adamw"  # adamw (fp32 moments) or fp8adam (8-bit moments)
    lr: float = 2e-3  # peak learning rate, after the warm-up
    min_lr: float = 2e-4  # at the end of the cosine
    warmup: int = 30  # steps of linear warm-up
    weight_decay: float = 0.1  # of matrices; norms, biases and embeddings do not decay
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.95  # decay of the second moment
    grad_clip: float = 1.0  # largest gradient norm; 0: no clipping
    loss_scale: float = 1.0  # multiplies the loss before backward; gradients are divided by it
    m_fmt: str = "E4M3"  # fp8adam: format of the first moment
    v_fmt: str = "E5M2"  # fp8adam: format of the second moment
    adam_block: int | None = None  # fp8adam: elements that share a scale; none: the tensor
    stochastic_rounding: bool = False  # fp8adam: round the moments stochastically
    master: str = "fp32"  # fp8adam: fp32, fp16 or fp8 master weights
    # loop
    steps: int = 300  # optimizer steps
    batch_size: int = 8  # sequences in a micro-batch
    accum: int = 1  # micro-batches in a step
    eval_every: int = 100  # steps between evaluations
    eval_batches: int = 20  # batches in an evaluation
    max_skips: int = 5  # stop after this many non-finite steps in a row
    out: str = "out"  # directory for runs


GPU_PRESET = dict(
    n_layer=12, n_head=16, n_kv_head=4, n_embd=2048, block_size=2048, batch_size=8, steps=300,
    lr=6e-4, min_lr=6e-5, eval_every=100, eval_batches=10, compile=True,
)  # fmt: skip

FIELDS = {f.name: f for f in fields(Config)}
RECIPE_FIELDS = [f.name for f in fields(Recipe) if f.name in FIELDS]
MODEL_FIELDS = [f.name for f in fields(GPTConfig) if f.name in FIELDS and f.name != "recipe"]
FP8ADAM_FIELDS = ["m_fmt", "v_fmt", "adam_block", "stochastic_rounding", "master"]
FORMATS = {f.name: f for f in (fp8gpt.E4M3, fp8gpt.E5M2)}
CHOICES = {
    "recipe": list(RECIPES),
    "tokenizer": ["bytes", "gpt2"],
    "family": ["llama", "gpt2"],
    "smooth": ["channel", "token"],
    "w3": ["bf16"],
    "head": ["bf16", "fp8"],
    "amax_compute_algo": ["max", "most_recent"],
    "rounding": ["fp32", "pow2", "floor"],
    "optimizer": ["adamw", "fp8adam"],
    "m_fmt": list(FORMATS),
    "v_fmt": list(FORMATS),
    "master": list(fp8gpt.MASTERS),
}
AT_LEAST = dict(
    n_layer=1, n_head=1, n_kv_head=1, n_embd=1, hidden=1, block_size=1, bf16_first=0, bf16_last=0,
    amax_history_len=1, lr=0, min_lr=0, warmup=0, weight_decay=0, beta1=0, beta2=0, grad_clip=0,
    adam_block=1, steps=1, batch_size=1, accum=1, eval_every=1, eval_batches=1, max_skips=1, threads=0,
)  # fmt: skip

# ------------------------------------------------------------------------------------------------
# Command line and arms


def convert(name, text):
    """The value of field `name` from a command-line string; UserError says what would do."""
    kind = str(FIELDS[name].type if isinstance(FIELDS[name].type, str) else FIELDS[name].type)
    kind = FIELDS[name].type.__name__ if isinstance(FIELDS[name].type, type) else kind
    if text.lower() == "none" and "None" in kind:
        return None
    try:
        if "bool" in kind:
            value = {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        else:
            value = int(text) if "int" in kind else float(text) if "float" in kind else text
    except (ValueError, KeyError):
        wanted = "true or false" if "bool" in kind else kind.removesuffix(" | None")
        raise UserError(f"{name} takes {wanted}, not {text!r}") from None
    if name in CHOICES and value not in CHOICES[name]:
        near = difflib.get_close_matches(text.lower(), CHOICES[name], 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(f"{name} {text!r} is unknown{hint}; choose from {', '.join(CHOICES[name])}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name} must be finite, not {text}")
    if name in AT_LEAST and value < AT_LEAST[name]:
        raise UserError(f"{name} must be at least {AT_LEAST[name]}, not {text}")
    if name in ("beta1", "beta2") and value >= 1 or name == "loss_scale" and value <= 0:
        raise UserError(f"{name} {text} is out of range")
    if name in ("margin", "bias"):
        triple(name, text)
    return value


def triple(name, text):
    """ "3" or "0/0/3" -> three integers for x, w and g."""
    parts = text.split("/")
    try:
        numbers = tuple(int(p) for p in parts * (3 if len(parts) == 1 else 1))
        if len(numbers) != 3 or max(map(abs, numbers)) > 100:
            raise ValueError
    except ValueError:
        raise UserError(f"{name} takes one integer, or three as x/w/g, not {text!r}") from None
    return numbers


def parse_arm(text):
    """ "delayed,smooth=channel" -> {"recipe": "delayed", "smooth": "channel"}"""
    recipe, *pairs = text.split(",")
    overrides = {"recipe": convert("recipe", recipe)}
    for pair in pairs:
        name, _, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if name not in FIELDS or not value:
            near = difflib.get_close_matches(name, FIELDS, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"arm {text!r}: {pair!r} is not field=value{hint}")
        if name in ("device", "threads", "out", "seed"):
            raise UserError(f"arm {text!r}: {name} is common to all arms; give it as a flag")
        overrides[name] = convert(name, value)
    return overrides


def parse_command_line(argv):
    """-> (the fields that were given, the other options). Help comes from the block above."""
    source = Path(__file__).read_text()
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", source, re.M))
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = lambda message: (_ for _ in ()).throw(UserError(message))
    add = parser.add_argument
    add("--compare", nargs="+", metavar="ARM", help="train several arms: RECIPE[,field=value...]")
    add(
        "--seeds",
        default="1",
        metavar="N",
        help="repeat a comparison with N seeds: mean and spread",
    )
    add("--bench", action="store_true", help="time a training step of every recipe, part by part")
    add("--resume", metavar="DIR", help="continue the run in this directory")
    add("--sample", metavar="TEXT", help="prompt of the sample at the end")
    for f in fields(Config):
        preset = f", {GPU_PRESET[f.name]} on a GPU" if f.name in GPU_PRESET else ""
        flag = "--" + f.name.replace("_", "-")
        shown = f"{comments[f.name]} ({f.default}{preset})".replace("%", "%%")
        if f.type is bool or f.type == bool | None:
            add(flag, nargs="?", const="true", metavar="BOOL", help=shown)
        else:
            add(flag, metavar=f.name.upper(), help=shown)
    argv = [re.sub(r"^--[\w-]+", lambda m: m[0].replace("_", "-"), a) for a in argv]
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [o for a in parser._actions for o in a.option_strings]
        near = difflib.get_close_matches(unknown[0].split("=")[0], flags, 1)
        hint = f" (did you mean {near[0]}?)" if near else "; --help lists all"
        raise UserError(f"unknown argument {unknown[0]!r}{hint}")
    given = {n: convert(n, v) for n in FIELDS if (v := getattr(args, n)) is not None}
    try:
        args.seeds = int(args.seeds)
        if args.seeds < 1:
            raise ValueError
    except ValueError:
        raise UserError(f"seeds takes a number from 1 on, not {args.seeds!r}") from None
    return given, args


def recipe_of(c):
    """The recipe of a configuration: the row, with the fields that were overridden."""
    changed = {n: v for n in RECIPE_FIELDS if (v := getattr(c, n)) is not None}
    for name in {"margin", "bias"} & changed.keys():
        changed[name] = triple(name, changed[name])
    return replace(RECIPES[c.recipe], **changed)


def ignored(c, given):
    """Sentences about fields that were given and that this configuration does not read."""
    history, constant = (RECIPES[c.recipe].amax == kind for kind in ("history", "constant"))
    reads = {
        "amax_history_len": history,
        "amax_compute_algo": history,
        "bias": constant,
        **{n: c.recipe != "bf16" for n in ("margin", "rounding", "fprop", "dgrad", "wgrad")},
        **{n: c.recipe != "bf16" for n in ("w3", "head", "bf16_first", "bf16_last")},
        **{n: c.optimizer == "fp8adam" for n in FP8ADAM_FIELDS},
    }
    because = {n: "optimizer adamw" for n in FP8ADAM_FIELDS}
    return [
        f"{because.get(n, 'recipe ' + c.recipe)} ignores --{n.replace('_', '-')}"
        for n in given
        if not reads.get(n, True)
    ]


# ------------------------------------------------------------------------------------------------
# Data: .bin files of uint16 tokens, as nanoGPT writes them or with llm.c's header


def read_tokens(path):
    """A token file as a memory map."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as f:
            head = np.frombuffer(f.read(12), np.int32) if size >= 12 else np.zeros(1, np.int32)
        if head[0] == HEADER_MAGIC:  # llm.c: 256 int32, the third counts the tokens
            if head[1] != 1 or size != 4 * HEADER_INTS + 2 * int(head[2]):
                raise UserError(
                    f"{path} is not the whole of a version 1 token file: fetch it again"
                )
            return np.memmap(path, np.uint16, "r", offset=4 * HEADER_INTS)
        if size == 0 or size % 2:
            raise UserError(f"{path} has {size} bytes, not a whole number of uint16 tokens")
        return np.memmap(path, np.uint16, "r")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


class Data:
    """Batches of a split. Batch k of a seed is the same whatever ran before: nothing to restore."""

    def __init__(self, c, say=print):
        known = c.data in NAMES
        root = HERE / "data" / c.data if known else Path(c.data)
        if known or root.is_file():
            out = root if known else HERE / "data" / (root.stem + "-text")
            meta = self.meta(out)
            tokenizer = "gpt2" if c.data == "fineweb-edu" else c.tokenizer
            fresh = meta and meta.get("tokenizer") == tokenizer
            fresh = fresh and (c.data != "stdlib" or meta["python"] == platform.python_version())
            if not fresh or not known:
                meta = prepare(c.data if known else "file", root, tokenizer, out)
            root = out
        elif not root.is_dir():
            raise UserError(
                f"--data {c.data}: no such directory or file; or one of {', '.join(NAMES)}"
            )
        self.root, self.shards = root, {}
        meta = self.meta(root) or dict(name=root.name, tokenizer="gpt2", vocab_size=50257)
        self.tokenizer, self.vocab_size = meta["tokenizer"], meta["vocab_size"]
        say("data     " + describe(meta))
        for split in ("train", "val"):
            paths = sorted(p for p in root.glob("*.bin") if split in p.name)
            if not paths:
                raise UserError(f"{root} has no {split}.bin: prepare it with data/prepare.py")
            self.shards[split] = [read_tokens(p) for p in paths]
            for path, tokens in zip(paths, self.shards[split]):
                if len(tokens) <= c.block_size:
                    raise UserError(
                        f"{path} has {len(tokens)} tokens; block_size {c.block_size} needs"
                        f" {c.block_size + 1}: use a longer text or a smaller --block-size"
                    )
                if (top := int(tokens.max())) >= self.vocab_size:
                    raise UserError(
                        f"{path} holds token {top}, but tokenizer {self.tokenizer} ends at"
                        f" {self.vocab_size - 1}: is meta.json of another corpus?"
                    )

    @staticmethod
    def meta(root):
        path = root / "meta.json"
        if not path.exists():
            return None
        try:
            meta = json.loads(path.read_text())
            return meta if {"name", "tokenizer", "vocab_size"} <= meta.keys() else None
        except (OSError, ValueError, AttributeError):
            raise UserError(f"{path} is not readable as JSON: prepare the corpus again") from None

    def batch(self, split, key, c, device):
        """Random windows: x and y (B, T) int64, y one token ahead. `key` is a tuple of integers."""
        rng = np.random.default_rng([{"train": 0, "val": 1}[split], *key])
        shards = self.shards[split]
        sizes = np.array([len(s) - c.block_size for s in shards])
        rows = []
        for start in rng.integers(0, sizes.sum(), c.batch_size):
            shard = int(np.searchsorted(np.cumsum(sizes), start, side="right"))
            start -= sizes[:shard].sum()
            rows.append(shards[shard][start : start + c.block_size + 1].astype(np.int64))
        xy = torch.from_numpy(np.stack(rows)).to(device)
        return xy[:, :-1], xy[:, 1:]


# ------------------------------------------------------------------------------------------------
# Machine

# Dense BF16 tensor peak in FLOP/s, from NVIDIA's data sheets. MFU is measured against it in every
# arm, FP8 too, so that the arms compare.
PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12}
PEAKS |= {"RTX 4090": 165.2e12, "L40S": 362e12}


def pick_device(name):
    """-> (device, a line about it). Names an NVIDIA GPU that this torch cannot use."""
    present = shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists()
    cuda = torch.cuda.is_available()
    why = ""
    if present and not cuda:
        build = "is a CPU build" if torch.version.cuda is None else "finds no usable driver for it"
        why = f"an NVIDIA GPU is present, but torch {torch.__version__} {build}"
    if name.startswith("mps"):
        raise UserError("device mps: Apple GPUs have no FP8 types in PyTorch; use --device cpu")
    if name.startswith("cuda") and not cuda:
        why = why or f"torch {torch.__version__} finds no NVIDIA GPU"
        raise UserError(f"device {name}: {why}; use --device cpu, or see pytorch.org/get-started")
    try:
        device = torch.device(("cuda" if cuda else "cpu") if name == "auto" else name)
        if device.type not in ("cpu", "cuda") or (device.index or 0) >= max(
            1, cuda and torch.cuda.device_count()
        ):
            raise RuntimeError
    except RuntimeError:
        raise UserError(f"device {name!r} is not here; use cpu, cuda or auto") from None
    if device.type == "cuda":
        return device, f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    line = f"CPU, {torch.get_num_threads()} threads" + (f" ({why}: using the CPU)" if why else "")
    return device, line


def machine(device_line):
    """What a number needs beside it: versions, machine, commit."""
    commit = subprocess.run(
        ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    return dict(
        device=device_line,
        cpu=f"{platform.machine()}, {os.cpu_count()} cores",
        python=platform.python_version(),
        torch=torch.__version__,
        commit=commit or None,
        date=time.strftime("%Y-%m-%d"),
    )


def can_compile(device):
    """Whether torch.compile works here; where it does not, says so and the run goes on."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
        return True
    except Exception as error:  # no compiler, no Python headers, no Triton: all sorts of errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        print(f"compile  torch.compile does not work here, going on without it: {reason[:80]}")
        return False


# ------------------------------------------------------------------------------------------------
# One arm: a model, its optimizer, its loop


class Arm:
    """A configuration with everything that trains it."""

    def __init__(self, c, data, device):
        self.c, self.data, self.device, self.step, self.skipped = c, data, device, 0, 0
        torch.manual_seed(c.seed)
        model = {n: v for n in MODEL_FIELDS if (v := getattr(c, n)) is not None}
        try:
            self.recipe = recipe_of(c)
            config = GPTConfig(vocab_size=data.vocab_size, recipe=self.recipe, **model)
            self.model = GPT(config).to(device)
        except ValueError as error:
            raise UserError(str(error)) from None
        groups = param_groups(self.model, c.weight_decay)
        betas = (c.beta1, c.beta2)
        if c.optimizer == "fp8adam":
            self.optimizer = FP8Adam(
                groups, c.lr, betas, m_fmt=FORMATS[c.m_fmt], v_fmt=FORMATS[c.v_fmt],
                block=c.adam_block, stochastic_rounding=c.stochastic_rounding, master=c.master,
            )  # fmt: skip
        else:
            self.optimizer = torch.optim.AdamW(groups, c.lr, betas, fused=True)
        if c.compile and can_compile(device):
            for (
                block
            ) in self.model.blocks:  # one block compiles faster than the whole, and is reused
                block.compile()

    def lr(self):
        c = self.c
        if self.step < c.warmup:
            return c.lr * (self.step + 1) / c.warmup
        done = (self.step - c.warmup) / max(1, c.steps - c.warmup)
        return c.min_lr + 0.5 * (c.lr - c.min_lr) * (1 + math.cos(math.pi * min(1.0, done)))

    def loss_of(self, x, y):
        return self.model(x, y)[1]

    def train_step(self):
        """One optimizer step -> (loss, gradient norm). If either is not finite the step is skipped:
        weights, moments and histories stay as they were, and the batch counts as never drawn."""
        c = self.c
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr()
        total = torch.zeros((), device=self.device)
        with self.model.weights_cast() if c.accum > 1 else contextlib.nullcontext():
            for micro in range(c.accum):
                x, y = self.data.batch("train", (c.seed, self.step, micro), c, self.device)
                loss = self.loss_of(x, y) / c.accum
                (loss * c.loss_scale).backward()
                total += loss.detach()
        params = [p for p in self.model.parameters() if p.grad is not None]
        if c.loss_scale != 1:
            torch._foreach_mul_([p.grad for p in params], 1 / c.loss_scale)
        norm = torch.nn.utils.clip_grad_norm_(params, c.grad_clip or math.inf)
        total, norm = torch.stack(
            (total, norm)
        ).tolist()  # the one time the host waits for the device
        finite = math.isfinite(total) and math.isfinite(norm)
        if finite:
            self.optimizer.step()
        end_step(self.model, keep=finite)
        self.optimizer.zero_grad(set_to_none=True)
        # end of the training step; everything after this is diagnostics
        if finite:
            self.step, self.skipped = self.step + 1, 0
        else:
            self.skipped += 1
            what = "loss" if not math.isfinite(total) else "gradient"
            print(f"step {self.step}: the {what} is not finite; skipped, nothing was changed")
            if self.skipped >= c.max_skips:
                raise UserError(
                    f"{c.recipe}: {self.skipped} non-finite steps in a row at step {self.step}, stopped;"
                    " the last checkpoint is from before them (lower --lr, or another --recipe)"
                )
        return total, norm

    @torch.no_grad()
    def evaluate(self):
        """Mean validation loss in nats a token, on the same batches for every arm and step."""
        self.model.eval()
        losses = []
        with self.model.weights_cast():
            for i in range(self.c.eval_batches):
                losses.append(self.loss_of(*self.data.batch("val", (0, i), self.c, self.device)))
        self.model.train()
        return torch.stack(losses).mean().item()

    def sample(self, prompt, tokens=200):
        encoding = get_tokenizer(self.data.tokenizer)
        ids = encoding.encode_ordinary(prompt or "\n") or encoding.encode_ordinary("\n")
        torch.manual_seed(self.c.seed)
        idx = torch.tensor([ids], device=self.device)
        return encoding.decode(self.model.generate(idx, tokens, 0.8, 50)[0].tolist())

    def checkpoint(self, path):
        """Write aside, then rename: a checkpoint is whole or not there."""
        rng = [torch.get_rng_state()] + (
            torch.cuda.get_rng_state_all() if self.device.type == "cuda" else []
        )
        state = dict(
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            step=self.step,
            rng=rng,
            config=dataclasses.asdict(self.c),
            tokenizer=self.data.tokenizer,
            vocab_size=self.data.vocab_size,
        )
        torch.save(state, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)

    def restore(self, state):
        if (self.data.tokenizer, self.data.vocab_size) != (state["tokenizer"], state["vocab_size"]):
            raise UserError(
                f"the checkpoint was trained with tokenizer {state['tokenizer']}, the data at"
                f" {self.data.root} has {self.data.tokenizer}"
            )
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(f"the checkpoint does not fit: {str(error).splitlines()[0]}") from None
        torch.set_rng_state(state["rng"][0])
        if self.device.type == "cuda" and len(state["rng"]) > 1:
            torch.cuda.set_rng_state_all(state["rng"][1:])
        self.step = state["step"]


def load_checkpoint(directory):
    path = Path(directory) / "ckpt.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        config = Config(**state["config"])
        return state, config
    except FileNotFoundError:
        raise UserError(f"no checkpoint at {path}") from None
    except Exception as error:  # truncated zip, foreign pickle, missing keys: torch has many ways
        raise UserError(
            f"{path} is not a checkpoint of train.py ({type(error).__name__})"
        ) from None


def fit(arm, out, label=""):
    """Train an arm to its end, or to Ctrl-C -> the rows of its steps. Writes steps.jsonl as it goes."""
    from tqdm import tqdm

    c, rows, interrupted = arm.c, [], False
    tokens = c.batch_size * c.block_size * c.accum
    mode = "a" if arm.step else "w"
    bar = tqdm(
        total=c.steps, initial=arm.step, desc=label or c.recipe, disable=not sys.stderr.isatty()
    )
    arm.model.train()
    with open(out / "steps.jsonl", mode) as log, bar:
        try:
            while arm.step < c.steps:
                start = time.perf_counter()
                loss, norm = arm.train_step()
                seconds = time.perf_counter() - start
                if arm.skipped:
                    continue
                row = dict(step=arm.step, loss=loss, grad_norm=norm, lr=arm.lr(), seconds=seconds)
                if arm.step % c.eval_every == 0 or arm.step == c.steps:
                    row["val_loss"] = arm.evaluate()
                    arm.checkpoint(out / "ckpt.pt")
                    if bar.disable:
                        print(
                            f"{label or c.recipe}: step {arm.step}/{c.steps}, loss {loss:.4f},"
                            f" val loss {row['val_loss']:.4f}, {tokens / seconds:,.0f} tokens/s",
                            flush=True,
                        )
                rows.append(row)
                log.write(json.dumps(row) + "\n")
                bar.set_postfix_str(f"loss {loss:.3f}, {tokens / seconds:,.0f} tok/s")
                bar.update(1)
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        print(f"\ninterrupted at step {arm.step}: evaluating what is there")
        if rows:
            rows[-1]["val_loss"] = arm.evaluate()
            arm.checkpoint(out / "ckpt.pt")
    return rows, interrupted


# ------------------------------------------------------------------------------------------------
# Numbers


def throughput(rows, c):
    """Tokens a second, from the median step (the first ones warm up)."""
    seconds = statistics.median(r["seconds"] for r in rows[min(3, len(rows) - 1) :])
    return c.batch_size * c.block_size * c.accum / seconds


def mfu(arm, tokens_per_s):
    if arm.device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(arm.device)
    peak = next((p for n, p in PEAKS.items() if n in name), None)
    return peak and tokens_per_s * arm.model.flops_per_token() / peak


def memory(arm):
    """Bytes: on CUDA the peak that was allocated; on a CPU counted: parameters, optimizer state and
    the tensors that one micro-batch saves for backward."""
    if arm.device.type == "cuda":
        return torch.cuda.max_memory_allocated(arm.device)
    params = {p.untyped_storage().data_ptr() for p in arm.model.parameters()}
    saved = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in params:
            saved[storage.data_ptr()] = storage  # kept, so that its address is not used again
        return t

    x, y = arm.data.batch("train", (arm.c.seed, 0, 0), arm.c, arm.device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        arm.loss_of(x, y)
    state = [v for s in arm.optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    return (
        sum(p.nbytes for p in arm.model.parameters())
        + sum(t.nbytes for t in state)
        + sum(s.nbytes() for s in saved.values())
    )


def operand_health(arm):
    """fp8gpt.health of every operand (x, w, g) of every FP8 linear on one batch -> {name: numbers}."""
    seen, handles = {}, []
    layers = {n: m for n, m in arm.model.named_modules() if isinstance(m, FP8Linear)}
    layers = {n: m for n, m in layers.items() if m.recipe == arm.recipe}

    def watch(name):
        def hook(module, args, kwargs, y):
            fold = kwargs.get("fold")
            x = args[0].detach().flatten(0, -2)
            w = module.weight.detach()
            seen[name, "x"] = x if fold is None else x / fold
            seen[name, "w"] = w if fold is None else w * fold
            y.register_hook(lambda g: seen.__setitem__((name, "g"), g.detach().flatten(0, -2)))

        return hook

    for name, module in layers.items():
        handles.append(module.register_forward_hook(watch(name), with_kwargs=True))
    x, y = arm.data.batch("val", (0, 0), arm.c, arm.device)
    arm.model.eval()  # reads an amax history, does not write it
    (arm.loss_of(x, y) * arm.c.loss_scale).backward()
    arm.model.train()
    arm.optimizer.zero_grad(set_to_none=True)
    for handle in handles:
        handle.remove()
    result = {}
    for (name, operand), value in seen.items():
        h = layers[name].history()["xwg".index(operand)]
        x8, _ = fp8gpt.quantize_operand(value, operand, layers[name].recipe, h, "first")
        result[f"{name}.{operand}"] = fp8gpt.health(value, x8)
    return result


# ------------------------------------------------------------------------------------------------
# Commands


def write_json(path, value):
    path.with_suffix(".tmp").write_text(json.dumps(value, indent=1) + "\n")
    os.replace(path.with_suffix(".tmp"), path)


def make_out(path):
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".write-test").touch()
        (path / ".write-test").unlink()
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}") from None
    return path


def announce(arm, device_line):
    """The start-up lines: what runs, where and why."""
    where, why = fp8gpt.choose_backend(arm.recipe, arm.device)
    r, c = arm.recipe, arm.c
    print(f"machine  {device_line}; torch {torch.__version__}")
    print(f"model    {c.family}, {arm.model.num_params():,} parameters, T = {c.block_size}")
    formats = "/".join(f.name for f in (r.x_fmt, r.w_fmt, r.g_fmt))
    tiles = " ".join(
        str(t).replace("None", "all").replace(" ", "") for t in (r.x_tile, r.w_tile, r.g_tile)
    )
    print(
        f"recipe   {r.name}: x/w/g in {formats}, tiles {tiles}, amax {r.amax}, {r.rounding} scales"
    )
    print(f"GEMMs    {where}: {why}")
    if r.name == "mxfp8" and arm.device.type == "cuda" and where == "emulated":
        print("         right numbers, slower than BF16; for speed use current or delayed")
    for line in arm.model.describe().splitlines():
        print(f"linears  {line}")
    optimizer = (
        f"moments {c.m_fmt}/{c.v_fmt}, master {c.master}" if c.optimizer == "fp8adam" else "fp32"
    )
    print(
        f"optim    {c.optimizer}, {optimizer}; {c.steps} steps of {c.batch_size * c.accum} x {c.block_size}"
    )


def train(c, given, args, device, device_line):
    """One run."""
    state = None
    if args.resume:
        state, saved = load_checkpoint(args.resume)
        c = replace(saved, **given)
        if c.recipe != saved.recipe:
            raise UserError(f"--resume continues {saved.recipe}; it cannot become {c.recipe}")
        if state["step"] >= c.steps:
            raise UserError(
                f"this run is at step {state['step']} of {c.steps}: give a larger --steps"
            )
    for line in ignored(c, given):
        print(f"warning  {line}")
    data = Data(c)
    arm = Arm(c, data, device)
    out = make_out(Path(args.resume or Path(c.out) / c.recipe))
    announce(arm, device_line)
    if state:
        arm.restore(state)
        print(f"resume   from step {arm.step}")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    rows, _ = fit(arm, out)
    if not rows:
        return 0
    speed = throughput(rows, c)
    used = mfu(arm, speed)
    report = dict(config=dataclasses.asdict(c), machine=machine(device_line), step=arm.step)
    report |= dict(val_loss=rows[-1]["val_loss"], tokens_per_s=speed, mfu=used)
    report |= dict(memory_bytes=memory(arm), seconds=time.perf_counter() - start)
    write_json(out / "run.json", report)
    plot([(c.recipe, rows)], out / "loss.png")
    print(
        f"result   val loss {rows[-1]['val_loss']:.4f}, {speed:,.0f} tokens/s,"
        f" MFU {'n/a' if used is None else format(used, '.1%')},"
        f" {report['memory_bytes'] / 1e6:.0f} MB, {report['seconds']:.0f} s; written to {out}/"
    )
    print("sample   " + repr(arm.sample(args.sample)))
    return 0


def compare(c, given, args, device, device_line):
    """Several arms on the same seed, initial weights and batches; one table, one file, one picture."""
    texts = args.compare
    if len(set(texts)) != len(texts):
        raise UserError("an arm stands twice in --compare")
    configs = []
    for text in texts:
        overrides = parse_arm(text)
        configs.append(replace(c, **overrides))
        for line in ignored(configs[-1], given.keys() | overrides.keys()):
            print(f"warning  {text}: {line}")
    out = make_out(Path(c.out) / "compare")
    data = {}
    arms = [dict(name=t, val_losses=[], curves=[], speeds=[]) for t in texts]
    stop = False
    for seed in range(c.seed, c.seed + args.seeds):
        for entry, config in zip(arms, configs):
            if stop:
                break
            config = replace(config, seed=seed)
            key = (config.data, config.tokenizer, config.block_size)
            data[key] = data.get(key) or Data(config)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            arm = Arm(config, data[key], device)
            name = re.sub(r"[^\w.,=-]", "_", entry["name"])
            rows, stop = fit(arm, make_out(out / f"{name}-{seed}"), entry["name"])
            if not rows:
                continue
            entry["val_losses"].append(rows[-1]["val_loss"])
            entry["curves"].append(rows)
            entry["speeds"].append(throughput(rows, config))
            entry["memory_bytes"] = memory(arm)
            entry["health"] = operand_health(arm)
    arms = [a for a in arms if a["val_losses"]]
    if not arms:
        return 0
    for a in arms:
        health, losses = a.pop("health"), a["val_losses"]
        pairs = list(zip(losses, arms[0]["val_losses"]))
        a["val_loss"] = statistics.mean(losses)
        a["spread"] = statistics.stdev(losses) if len(losses) > 1 else None
        a["difference"] = statistics.mean(x - y for x, y in pairs)
        a["tokens_per_s"] = statistics.median(a.pop("speeds"))
        a["underflow"] = statistics.mean(h["underflow"] for h in health.values()) if health else 0
        a["clip"] = statistics.mean(h["clip"] for h in health.values()) if health else 0
        a["worst"], a["worst_sqnr"] = min(
            ((n, h["sqnr"]) for n, h in health.items()),
            key=lambda p: p[1],
            default=(None, math.inf),
        )
    seeds = f"{args.seeds} seed" + "s: mean and standard deviation" * (args.seeds > 1)
    print(f"\n{c.steps} steps, {seeds}; differences to {arms[0]['name']}, in nats\n")
    wide = max(12, *(len(a["name"]) for a in arms))
    print(
        f"| {'arm':{wide}} | val loss        | differs | tokens/s | MB   | underflow | clip    | worst SQNR |"
    )
    print(
        f"|{'-' * (wide + 2)}|-----------------|---------|----------|------|-----------|---------|------------|"
    )
    for a in arms:
        loss = f"{a['val_loss']:.4f}" + (
            f" +- {a['spread']:.4f}" if a["spread"] is not None else ""
        )
        print(
            f"| {a['name']:{wide}} | {loss:15} | {a['difference']:+.4f} | {a['tokens_per_s']:8,.0f} |"
            f" {a['memory_bytes'] / 1e6:4.0f} | {a['underflow']:8.3%}  | {a['clip']:7.3%} |"
            f" {a['worst_sqnr']:7.1f} dB |"
        )
    for a in arms:
        print(f"worst operand of {a['name']}: {a['worst']}")
    curves = [(a["name"], a["curves"][0]) for a in arms]
    for a in arms:
        a["losses"] = [r["loss"] for r in a.pop("curves")[0]]
    report = dict(arms=arms, config=dataclasses.asdict(c), machine=machine(device_line))
    write_json(out / "compare.json", report)
    plot(curves, out / "compare.png")
    print(f"\nwritten to {out}/compare.json and {out}/compare.png")
    return 0


def plot(curves, path):
    """Loss over steps, and its difference to the first curve where there are several."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("picture  matplotlib is not installed: no picture")
        return
    several = len(curves) > 1
    figure, axes = plt.subplots(1, 1 + several, figsize=(5.5 + 5.5 * several, 4), squeeze=False)

    def smooth(values, k):
        padded = np.concatenate([np.full(k - 1, values[0]), values])
        return np.convolve(padded, np.ones(k) / k, "valid")

    k = max(1, len(curves[0][1]) // 15)
    base = np.array([r["loss"] for r in curves[0][1]])
    for i, (name, rows) in enumerate(curves):
        steps, losses = [r["step"] for r in rows], np.array([r["loss"] for r in rows])
        style = dict(color=f"C{i}" if i < 10 else None, lw=1.4)
        axes[0, 0].plot(steps, smooth(losses, k), label=name, **style)
        if several and i:
            n = min(len(base), len(losses))
            axes[0, 1].plot(steps[:n], smooth(losses[:n] - base[:n], k), label=name, **style)
    axes[0, 0].set(
        xlabel="step", ylabel="training loss, nats a token", title=f"loss (mean of {k} steps)"
    )
    if several:
        axes[0, 1].axhline(0, color="C0", lw=1.4)
        axes[0, 1].set(xlabel="step", title=f"loss minus that of {curves[0][0]}, same batches")
        span = max(0.02, *(abs(v) for v in axes[0, 1].get_ylim()))
        axes[0, 1].set_ylim(-min(span, 0.2), min(span, 0.2))
    for ax in axes.flat:
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ------------------------------------------------------------------------------------------------
# What a step costs


@contextlib.contextmanager
def timed(parts, device):
    """Add the seconds spent in fp8gpt.quantize and fp8gpt.gemm_nt to `parts`."""

    def wrap(name, function):
        def timer(*args, **kwargs):
            sync(device)
            start = time.perf_counter()
            result = function(*args, **kwargs)
            sync(device)
            parts[name] += time.perf_counter() - start
            return result

        return timer

    originals = fp8gpt.quantize, fp8gpt.gemm_nt
    fp8gpt.quantize, fp8gpt.gemm_nt = wrap("quantise", originals[0]), wrap("GEMM", originals[1])
    try:
        yield
    finally:
        fp8gpt.quantize, fp8gpt.gemm_nt = originals


def sync(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bench(c, device, device_line, rounds=9):
    """Time one step of every recipe, interleaved; medians as ratios to the high-precision step:
    BF16 on a GPU, fp32 (no rounding anywhere) on a CPU."""
    data = Data(c)
    arms = {name: Arm(replace(c, recipe=name), data, device) for name in RECIPES}
    base = "bf16"
    if device.type == "cpu":
        base, fp32 = "fp32", fp8gpt.FP32
        arms = {base: Arm(replace(c, recipe="bf16"), data, device), **arms}
        for m in arms[base].model.modules():
            if isinstance(m, FP8Linear):
                m.recipe = replace(m.recipe, name=base, x_fmt=fp32, w_fmt=fp32, g_fmt=fp32)
    times = {n: dict(step=[], quantise=[], GEMM=[], optimizer=[]) for n in arms}
    for i in range(-2, rounds):
        for name, arm in arms.items():
            arm.model.train()
            step, optimizer = arm.optimizer.step, []

            def timed_step(step=step, optimizer=optimizer):
                sync(device)
                start = time.perf_counter()
                step()
                sync(device)
                optimizer.append(time.perf_counter() - start)

            start = time.perf_counter()
            arm.train_step()
            sync(device)
            whole, parts = time.perf_counter() - start, dict(quantise=0.0, GEMM=0.0)
            arm.optimizer.step = timed_step
            if not c.compile:
                with timed(parts, device):
                    arm.train_step()
            else:
                arm.train_step()
            arm.optimizer.step = step
            if i >= 0:
                times[name]["step"].append(whole)
                times[name]["optimizer"] += optimizer
                for part, seconds in parts.items():
                    times[name][part].append(seconds)
    unit = statistics.median(times[base]["step"])
    model = arms[base].model
    print(f"machine  {device_line}; torch {torch.__version__}{', compiled' if c.compile else ''}")
    print(f"model    {model.num_params():,} parameters, {c.batch_size} x {c.block_size} tokens")
    print(f"unit     one {base} step, {1e3 * unit:.0f} ms here; medians of {rounds}, interleaved\n")
    print(
        "| recipe    | step | quantise | GEMM | optimizer |\n|-----------|------|----------|------|-----------|"
    )
    for name, t in times.items():
        step, q, g, o = (statistics.median(v) / unit for v in t.values())
        parts = f"{q:8.2f} | {g:4.2f}" if not c.compile else "   fused | fused"
        print(f"| {name:9} | {step:4.2f} | {parts} | {o:9.2f} |")
    return 0


def main(argv):
    given, args = parse_command_line(argv)
    if sum(map(bool, (args.compare, args.bench, args.resume))) > 1:
        raise UserError("--compare, --bench and --resume are three commands: choose one")
    if args.seeds > 1 and not args.compare:
        raise UserError("--seeds repeats a comparison: use it with --compare")
    if given.get("threads"):
        torch.set_num_threads(given["threads"])
    device, device_line = pick_device(given.get("device", "auto"))
    c = Config(**((GPU_PRESET if device.type == "cuda" else {}) | given))
    if args.compare:
        return compare(c, given, args, device, device_line)
    if args.bench:
        return bench(c, device, device_line)
    return train(c, given, args, device, device_line)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(print(f"train.py: {error}", file=sys.stderr) or 2)
