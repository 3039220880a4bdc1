"""Train a GPT in FP8 and compare it with BF16: data, loop, comparison, numbers, pictures.

    python train.py --recipe mxfp8                            one model, about 2 minutes on a CPU
    python train.py --compare bf16 delayed current mxfp8      the same run under several recipes
    python train.py --compare delayed delayed,smooth=channel  an arm is a recipe plus overrides
    python train.py --recipe delayed --monitor 10             look inside, every 10 steps
    python train.py --init-from out/bf16 --recipe current     go on in another recipe
    python train.py --init-from out/bf16 --eval               post-training quantisation: a table
    python train.py --init-from DIR --sample "def "           text from a run or an export
    python train.py --bench                                   what a step costs, part by part
    python train.py --advise --n-embd 4096                    which recipe pays on this GPU

Every field of Config is a flag (--batch-size 16) and, unless all arms must share it, an override
in an arm (current,batch_size=16). What a recipe is stands in fp8gpt.py.
"""

import argparse
import contextlib
import difflib
import functools
import json
import math
import os
import re
import shutil
import signal
import statistics
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

import fp8gpt
from data import distributed
from data.bench import ADVISED, advise, bench, can_compile, flops_utilisation, machine
from data.checkpoint import (
    QUANTISED,
    RECIPE_FIELDS,
    SHAPE,
    SIZES,
    Run,
    alone_in,
    caught_signals,
    check_adamw,
    load_weights,
    model_config,
    read_checkpoint,
    scaling,
    triple,
    write_checkpoint,
    written,
)  # fmt: skip
from data.convert import open_source
from data.infer import post_training, write_text
from data.prepare import Corpus, UserError
from data.report import Monitor, memory, operand_health, plot, print_arms, summary, write_whole
from fp8gpt import E4M3, E5M2, GPT, MASTERS, RECIPES, FP8Adam, FP8Linear

# ------------------------------------------------------------------------------------------------
# Configuration. The comment of a field is its help. The values are those for a CPU; a GPU starts
# from GPU_PRESET. None leaves it to the recipe, or to GPTConfig.


@dataclass
class Config:
    recipe: str = "mxfp8"  # how x, w and g become FP8: a row of RECIPES in fp8gpt.py
    seed: int = 1337  # of the initial weights, the batches and the sample
    device: str = "auto"  # cpu, cuda, or auto: cuda where torch can use it
    threads: int = 0  # CPU threads; 0: torch's own choice
    fsdp: bool = False  # with torchrun: weights, gradients and moments in shards (FSDP2)
    compile: bool = False  # torch.compile the blocks: faster, after a warm-up
    out: str = "out"  # directory for runs
    init_from: str | None = None  # start from this run's weights, or a Hugging Face directory's
    # data
    data: str = "stdlib"  # a corpus of data/prepare.py, a text file, or a directory of .bin files
    tokenizer: str = "bytes"  # for a corpus that is not prepared yet: bytes or gpt2
    # model
    size: str | None = None  # a published shape, for the fields that are not given
    family: str = "llama"  # llama (RMSNorm, RoPE, SwiGLU) or gpt2 (LayerNorm, GELU, tied head)
    n_layer: int = 4  # blocks
    n_head: int = 4  # attention heads
    n_kv_head: int | None = None  # key and value heads; fewer than n_head: shared by groups
    n_embd: int = 128  # width C
    hidden: int | None = None  # width of the MLP
    block_size: int = 128  # context length T, tokens
    smooth: str | None = None  # Smooth-SwiGLU: channel or token
    w3: str | None = None  # bf16: the MLP's down projection stays BF16
    head: str = "bf16"  # fp8: the output head follows the recipe too
    bf16_first: int = 0  # blocks at the start that stay BF16
    bf16_last: int = 0  # blocks at the end that stay BF16
    rope_theta: float | None = None  # base of the rotary positions
    rope_scaling: str | None = None  # Llama 3's: factor/low/high/old context, as 8/1/4/8192
    norm_eps: float | None = None  # of the norms
    checkpoint: bool = False  # activation checkpointing: recompute blocks in backward
    # the recipe's own fields
    amax_history_len: int | None = None  # steps that delayed scaling looks back
    amax_compute_algo: str | None = None  # max of that history, or its most_recent entry
    margin: str | None = None  # headroom of 2^margin: one number, or x/w/g as 0/0/3
    bias: str | None = None  # constant scaling: encode by 2^bias; one number, or x/w/g
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
    loss_scale: float = 1.0  # multiplies the loss before backward, divides the gradients after
    m_fmt: str = "E4M3"  # fp8adam: format of the first moment
    v_fmt: str = "E5M2"  # fp8adam: format of the second moment
    adam_block: int | None = None  # fp8adam: elements that share a scale; none: the whole tensor
    stochastic_rounding: bool = False  # fp8adam: of the moments
    master: str = "fp32"  # fp8adam: fp32, fp16 or fp8 master weights
    # loop
    steps: int = 300  # optimizer steps
    batch_size: int = 8  # sequences in a micro-batch
    accum: int = 1  # micro-batches in a step
    eval_every: int = 100  # steps between evaluations, each with a checkpoint
    eval_batches: int = 20  # batches in an evaluation
    max_skips: int = 5  # stop after this many non-finite steps in a row
    monitor: int = 0  # steps between looks inside: monitor.jsonl and monitor.png; 0: none


GPU_PRESET = dict(
    n_layer=12, n_head=16, n_kv_head=4, n_embd=2048, block_size=2048, batch_size=8, lr=6e-4,
    min_lr=6e-5, compile=True,
)  # fmt: skip

FIELDS = {f.name: f for f in fields(Config)}
FP8ADAM_FIELDS = ["m_fmt", "v_fmt", "adam_block", "stochastic_rounding", "master"]
COMMON_FIELDS = [
    "device", "threads", "fsdp", "out", "seed", "data", "tokenizer", "block_size", "init_from",
    "size",
]  # fmt: skip
FORMATS = {f.name: f for f in (E4M3, E5M2)}
CHOICES = dict(
    fp8gpt.RECIPE_CHOICES | fp8gpt.CONFIG_CHOICES,
    recipe=RECIPES, size=SIZES, optimizer=("adamw", "fp8adam"),
    m_fmt=FORMATS, v_fmt=FORMATS, master=MASTERS,
)  # fmt: skip
FROM_ZERO = ["seed", "bf16_first", "bf16_last", "warmup", "monitor"]  # other counts are from 1 on
LIMITS = dict(
    beta1=(0, 1), beta2=(0, 1), loss_scale=(1e-30, 3.4e38), n_layer=(1, 1000), threads=(0, 1000)
)  # from, to below
BOOLS = {"true": True, "1": True, "false": False, "0": False}
SHAPED = dict(margin=triple, bias=triple, rope_scaling=scaling)  # text with an inner form
PARSE = {"int": int, "float": float, "str": str, "bool": lambda text: BOOLS[text.lower()]}

# ------------------------------------------------------------------------------------------------
# Command line and arms


def similar(word, words):
    near = difflib.get_close_matches(word.lower(), list(words), 1)
    return f" (did you mean {near[0]}?)" if near else ""


def convert(name, text):
    """The value of a field from its text; a UserError says what would do."""
    kind = getattr(FIELDS[name].type, "__name__", str(FIELDS[name].type))
    kind, optional = kind.removesuffix(" | None"), kind.endswith("None")
    if optional and text.lower() == "none":
        return None
    try:
        value = PARSE[kind](text)
        if name in SHAPED:
            SHAPED[name](text)
    except (ValueError, KeyError) as error:
        wanted = {"int": "a whole number", "float": "a number", "bool": "true or false"}
        raise UserError(f"{name} takes {wanted.get(kind, error)}, not {text!r}") from None
    if name in CHOICES and value not in CHOICES[name]:
        choices = [c for c in CHOICES[name] if c]
        raise UserError(f"{name} {text!r} is unknown{similar(text, choices)}: {', '.join(choices)}")
    usual = (name not in FROM_ZERO, 2**31) if kind == "int" else (0, 1e38)
    least, most = LIMITS.get(name, usual)
    if kind in ("int", "float") and not least <= value < most:
        raise UserError(f"{name} cannot be {text}: it goes from {least:g} to below {most:g}")
    return value


# Options that are no fields: usual value, from, to.
NUMBERS = dict(
    seeds=(1, 1, 9999), calibrate=(8, 0, 10**6), tokens=(200, 1, 10**6), temperature=(0.8, 0, 100)
)  # fmt: skip


def number(name, text, usual, least, most):
    try:
        value = usual if text is None else type(usual)(text)
        if least <= value <= most:
            return value
    except ValueError:
        pass
    raise UserError(f"{name} takes a number from {least} to {most}, not {text!r}")


def parse_arm(text):
    """ "delayed,smooth=channel" -> {"recipe": "delayed", "smooth": "channel"}"""
    recipe, *pairs = text.split(",")
    overrides = {"recipe": convert("recipe", recipe)}
    for pair in pairs:
        name, _, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if name not in FIELDS or name == "recipe" or not value:
            raise UserError(f"arm {text!r}: {pair!r} is not field=value{similar(name, FIELDS)}")
        if name in COMMON_FIELDS:
            raise UserError(f"arm {text!r}: {name} is the same for all arms; give it as a flag")
        overrides[name] = convert(name, value)
    return overrides


def parse_command_line(argv):
    """-> (the fields that were given, the other options). Help comes from the block above."""
    comments = dict(
        re.findall(r"^    (\w+): .*?  # (.*)$", Path(__file__).read_text("utf-8"), re.M)
    )
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)

    def error(message):
        raise UserError(message)

    parser.error = error
    add = parser.add_argument
    add("--compare", nargs="+", metavar="ARM", help="train arms: RECIPE[,field=value...]")
    add("--seeds", metavar="N", help="repeat a comparison: mean and spread (1)")
    add("--bench", action="store_true", help="time a training step of every recipe")
    add("--advise", action="store_true", help="which recipe pays here, at this --n-embd: a minute")
    add("--resume", metavar="DIR", help="continue the run in this directory")
    add("--older", action="store_true", help="... from the checkpoint before its last one")
    add("--eval", action="store_true", help="the recipes on the weights of --init-from: a table")
    add("--calibrate", metavar="N", help="batches that static activation scales are from (8)")
    add("--sample", metavar="TEXT", help="prompt of the sample at the end; with --init-from: only")
    add("--tokens", metavar="N", help="length of the sample (200)")
    add("--temperature", metavar="T", help="of the sample; 0: always the likeliest token (0.8)")
    for f in fields(Config):
        preset = f"; {GPU_PRESET[f.name]} on a GPU" if f.name in GPU_PRESET else ""
        text = f"{comments[f.name]} ({f.default}{preset})".replace("%", "%%")
        boolean = dict(nargs="?", const="true") if "bool" in str(f.type) else {}
        add("--" + f.name.replace("_", "-"), metavar=f.name.upper(), help=text, **boolean)
    argv = [re.sub(r"^--\w[\w-]*", lambda m: m[0].replace("_", "-"), a) for a in argv]
    args, unknown = parser.parse_known_args(argv)
    if [] in vars(args).values():  # argparse drops the dashes of --seed=--
        raise UserError("-- is no value")
    if unknown:
        near = similar(unknown[0].split("=")[0], parser._option_string_actions)
        raise UserError(f"unknown argument {unknown[0]!r}{near}; --help lists all")
    given = {n: convert(n, v) for n in FIELDS if (v := getattr(args, n)) is not None}
    other = args.compare or args.bench or args.advise or args.eval
    useful = dict(seeds=True, calibrate=args.eval, tokens=not other, temperature=not other)
    for name, limits in NUMBERS.items():
        if getattr(args, name) is not None and not useful[name]:
            where = "--eval" if name == "calibrate" else "a single run and its sample"
            raise UserError(f"--{name} goes with {where}")
        setattr(args, name, number(name, getattr(args, name), *limits))
    if sum(map(bool, (args.compare, args.bench, args.resume, args.advise, args.eval))) > 1:
        raise UserError("--compare, --bench, --advise, --eval and --resume: choose one")
    if args.compare or args.bench or args.advise:
        if args.sample is not None or "recipe" in given:
            raise UserError("--recipe and --sample go with a single run")
    if args.eval and "init_from" not in given:
        raise UserError("--eval evaluates the weights of a run or an export: give --init-from")
    if args.resume and "out" in given:
        raise UserError("--resume goes on in its own directory: leave --out out")
    if args.older and not args.resume:
        raise UserError("--older chooses a checkpoint for --resume")
    if "size" in given and "init_from" in given:
        raise UserError("--init-from brings its own size: leave --size out")
    if args.resume and "init_from" in given:
        raise UserError("--resume goes on with a run, --init-from starts one: choose one")
    args.generate = args.sample is not None and "init_from" in given
    if args.generate and (args.eval or "steps" in given):
        raise UserError("--sample with --init-from writes a sample and nothing else")
    if args.seeds > 1 and not args.compare:
        raise UserError("--seeds repeats a comparison: give it with --compare")
    return given, args


def warn_ignored(c, given, label=""):
    """Say which of the given fields this configuration does not read."""
    recipe = RECIPES[c.recipe]
    reads = {
        n: c.recipe != "bf16" for n in (*RECIPE_FIELDS, "w3", "head", "bf16_first", "bf16_last")
    }
    reads |= {n: recipe.amax == "history" for n in ("amax_history_len", "amax_compute_algo")}
    reads |= {"bias": recipe.amax == "constant"}
    reads |= {n: c.optimizer == "fp8adam" for n in FP8ADAM_FIELDS}
    reads |= {n: c.family == "llama" for n in ("rope_theta", "rope_scaling")}
    for n in given:
        if not reads.get(n, True):
            reader = f"optimizer {c.optimizer}" if n in FP8ADAM_FIELDS else f"recipe {c.recipe}"
            reader = f"family {c.family}" if n.startswith("rope") else reader
            print(f"warning  {label}{reader} ignores {n} = {getattr(c, n)}")


# ------------------------------------------------------------------------------------------------
# Machine


def pick_device(name):
    """-> (device, a line about it). Names an NVIDIA GPU that this torch cannot use."""
    cuda, why = torch.cuda.is_available(), ""
    if not cuda and (shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists()):
        what = "is a CPU build" if torch.version.cuda is None else "finds no driver for it"
        why = f"an NVIDIA GPU is here, but torch {torch.__version__} {what}"
    if name.startswith("mps"):
        raise UserError("device mps: torch has no FP8 types on Apple GPUs; use --device cpu")
    if name.startswith("cuda") and not cuda:
        why = why or f"torch {torch.__version__} finds no NVIDIA GPU"
        raise UserError(f"device {name}: {why}; use --device cpu, or see pytorch.org/get-started")
    try:
        device = torch.device(("cuda" if cuda else "cpu") if name == "auto" else name)
        count = torch.cuda.device_count() if device.type == "cuda" else 1
        if device.type not in ("cpu", "cuda") or (device.index or 0) >= count:
            raise RuntimeError
    except RuntimeError:
        raise UserError(f"device {name!r} is not here; use cpu, cuda or auto") from None
    if device.type == "cuda":
        return device, f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    return device, f"CPU, {torch.get_num_threads()} threads" + (f" ({why})" if why else "")


# ------------------------------------------------------------------------------------------------
# An arm: a configuration with its model, its optimizer and its step


def param_groups(model, weight_decay):
    """Two groups for an optimizer: matrices decay; norms, biases and embeddings do not."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    groups = {True: [], False: []}
    for p in model.parameters():
        groups[p.dim() > 1 and id(p) not in tables].append(p)
    return [dict(params=groups[d], weight_decay=weight_decay * d) for d in (True, False)]


class Diverged(UserError):
    """Too many steps in a row were not finite."""


class Arm:
    """source: of data/checkpoint.py or data/convert.py, where the weights come from."""

    def __init__(self, c, corpus, device, source=None):
        self.c, self.corpus, self.device, self.step, self.skipped = c, corpus, device, 0, 0
        if source:
            check_tokenizer(source.tokenizer, corpus)
        config = model_config(c, source.vocab_size if source else corpus.vocab_size)
        if corpus.vocab_size > config.vocab_size:
            many = f"{corpus.vocab_size} ids, the model {config.vocab_size}"
            raise UserError(f"tokenizer {corpus.tokenizer} has {many}")
        torch.manual_seed(c.seed)
        try:
            self.recipe, self.model = config.recipe, GPT(config).to(device)
        except (RuntimeError, TypeError) as error:  # torch's words for sizes beyond its memory
            raise UserError(f"this model does not fit: {str(error).splitlines()[0]}") from None
        if source:
            source.fill(self.model)
        self.wrapped = distributed.wrap(self.model, c.fsdp)
        groups, betas = param_groups(self.model, c.weight_decay), (c.beta1, c.beta2)
        self.shards = distributed.Shards(groups) if c.fsdp else None
        if c.optimizer == "fp8adam":
            fp8 = dict(m_fmt=FORMATS[c.m_fmt], v_fmt=FORMATS[c.v_fmt], block=c.adam_block)
            fp8 |= dict(stochastic_rounding=c.stochastic_rounding, master=c.master)
            self.optimizer = FP8Adam(groups, c.lr, betas, **fp8)
        else:
            self.optimizer = torch.optim.AdamW(groups, c.lr, betas, fused=True)
        if c.compile and can_compile(device):
            torch._dynamo.config.recompile_limit = (
                64  # arms share the code, each recipe compiles it
            )
            for block in self.model.blocks:
                block.compile(dynamic=False)

    def batch(self, split, *key):
        """x and y (B, T) int64: y is one token ahead."""
        rows = torch.from_numpy(self.corpus.batch(split, key, self.c.batch_size)).to(self.device)
        return rows[:, :-1], rows[:, 1:]

    def lr(self):
        c = self.c
        if self.step < c.warmup:
            return c.lr * (self.step + 1) / c.warmup
        done = min(1.0, (self.step - c.warmup) / max(1, c.steps - c.warmup))
        return c.min_lr + (c.lr - c.min_lr) * 0.5 * (1 + math.cos(math.pi * done))

    def train_step(self):
        """One optimizer step -> (loss, gradient norm). If one is not finite the step is skipped:
        weights, moments and histories stay as they were, and the batch counts as never drawn."""
        c, model, optimizer = self.c, self.model, self.optimizer
        for group in optimizer.param_groups:
            group["lr"] = self.lr()
        total = torch.zeros((), device=self.device)
        micros = range(distributed.rank(), c.accum, distributed.size())  # this process's
        with model.weights_cast() if len(micros) > 1 else contextlib.nullcontext():
            for i in micros:
                with distributed.micro_batch(self.wrapped, i == micros[-1]):
                    loss = self.wrapped(*self.batch("train", c.seed, self.step, i))[1] / c.accum
                    (loss * c.loss_scale).backward()
                total += loss.detach()
        distributed.total(total)
        params = [p for p in model.parameters() if p.grad is not None]
        if (scale := distributed.size() / c.loss_scale) != 1:  # they are means over processes
            torch._foreach_mul_([p.grad for p in params], scale)
        norm = torch.nn.utils.clip_grad_norm_(params, c.grad_clip or math.inf)
        norm = norm.full_tensor() if self.shards else norm
        loss, norm = torch.stack((total, norm)).tolist()  # the one wait for the device
        finite = math.isfinite(loss) and math.isfinite(norm)
        if self.shards:
            self.shards.take_gradients()
        if finite:
            optimizer.step()
            self.step += 1
        fp8gpt.end_step(model, keep=finite)
        optimizer.zero_grad()
        # everything after this is diagnostics
        self.skipped = 0 if finite else self.skipped + 1
        if not finite:
            what = "gradient" if math.isfinite(loss) else "loss"
            print(f"step {self.step + 1}: the {what} is not finite: skipped, nothing was changed")
        if self.skipped >= c.max_skips:
            raise Diverged(f"step {self.step + 1} was not finite {self.skipped} times in a row")
        return loss, norm

    @torch.no_grad()
    def evaluate(self):
        """Mean validation loss, nats a token, on the same batches for every arm and step."""
        losses = torch.zeros(self.c.eval_batches, device=self.device)
        self.model.eval()
        with self.model.weights_cast():
            for i in range(self.c.eval_batches):  # sharded, all of them have to gather each block
                if self.shards or i % distributed.size() == distributed.rank():
                    losses[i] = self.model(*self.batch("val", 0, i))[1]
        self.model.train()
        return (losses if self.shards else distributed.total(losses)).mean().item()

    def save(self, path):
        generator = torch.cuda if self.device.type == "cuda" else torch  # rounds stochastically
        state = dict(config=asdict(self.c), step=self.step, rng=generator.get_rng_state())
        moments = self.shards.whole(self.optimizer) if self.shards else self.optimizer.state_dict()
        state |= dict(model=distributed.whole_weights(self.model), optimizer=moments)
        state |= dict(tokenizer=self.corpus.tokenizer, vocab_size=self.model.config.vocab_size)
        if distributed.rank() == 0:
            write_checkpoint(state, path)

    def restore(self, state):
        check_tokenizer(state["tokenizer"], self.corpus)
        groups = [g | {} for g in self.optimizer.param_groups]
        try:
            moments = state["optimizer"]
            if self.shards:  # weights were loaded before they were sharded
                moments = self.shards.part(self.optimizer, moments)
            else:
                load_weights(self.model, state["model"])
            self.optimizer.load_state_dict(moments)
            check_adamw(self.optimizer)
            self.step = int(state["step"])
            (torch.cuda if self.device.type == "cuda" else torch).set_rng_state(state["rng"])
        except UserError:
            raise
        except Exception as error:  # torch and a foreign state have many
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(f"the checkpoint does not fit: {why}") from None
        for group, own in zip(self.optimizer.param_groups, groups):
            group |= own  # the file's settings were those of its first run


def check_tokenizer(name, corpus):
    """A checkpoint's ids have to be the corpus's; None: it does not say, so the corpus decides."""
    if name not in (None, corpus.tokenizer):
        raise UserError(f"the checkpoint speaks {name}, not {corpus.tokenizer}")


def load_checkpoint(directory, older=False):
    """-> (state, its Config)"""
    state = read_checkpoint(directory, older)
    try:
        return state, Config(**{n: convert(n, str(v)) for n, v in state["config"].items()})
    except Exception as error:  # fields of another program
        path = Path(directory) / "ckpt.pt"
        raise UserError(f"{path} is no checkpoint of train.py: {type(error).__name__}") from None


def inherit(source, given, single):
    """The fields that a run takes over from where it starts."""
    theirs, config = source.fields, model_config(source.fields, source.vocab_size)
    for n in SHAPE:
        if n in given and given[n] not in (theirs.get(n), getattr(config, n)):
            raise UserError(
                f"{n} is {getattr(config, n)} in {given['init_from']}: it cannot change"
            )
    names = [*SHAPE, *QUANTISED, "block_size", "data", "batch_size", "eval_batches"]
    if single and given.get("recipe", theirs["recipe"]) == theirs["recipe"]:
        names += RECIPE_FIELDS
    taken = {n: theirs[n] for n in names if theirs.get(n) is not None}
    return taken | (dict(tokenizer=source.tokenizer) if source.tokenizer else {})


def keep(arm, out, val_loss):
    """A checkpoint, unless the model is broken: then the one before it is worth more."""
    if math.isfinite(val_loss):
        arm.save(out / "ckpt.pt")
    else:
        print(f"step {arm.step}: the validation loss is not finite: no checkpoint")


def fit(arm, out, label):
    """Train to the end or to Ctrl-C -> (a row for each step, whether it was Ctrl-C)."""
    from tqdm import tqdm

    c, rows, writes = arm.c, [], distributed.rank() == 0
    tokens = c.batch_size * c.block_size * c.accum
    quiet = not sys.stderr.isatty() or not writes
    bar = tqdm(total=c.steps, initial=arm.step, desc=label, disable=quiet, dynamic_ncols=True)
    arm.model.train()
    path = out / "steps.jsonl" if writes else Path(os.devnull)
    if writes:  # a resumed run keeps the whole rows up to its checkpoint
        path.touch()
        kept = path.read_text().splitlines(keepends=True)[: arm.step]
        kept = "".join(row for row in kept if row.endswith("\n"))
        write_whole(path, lambda aside: aside.write_text(kept))
    if arm.step == 0:
        arm.save(out / "ckpt.pt")  # so that it can be resumed from the first instant on
    look = Monitor(arm, out) if writes else contextlib.nullcontext()
    with open(path, "a") as log, look as monitor, bar, caught_signals() as stop:
        while arm.step < c.steps and not distributed.anywhere(stop, arm.device):
            start, lr = time.perf_counter(), arm.lr()
            loss, norm = arm.train_step()
            seconds = time.perf_counter() - start
            if arm.skipped:
                continue
            row = dict(step=arm.step, loss=loss, grad_norm=norm, lr=lr, seconds=seconds)
            speed = f"{tokens / seconds:,.0f} tokens/s"
            bar.set_postfix_str(f"loss {loss:.3f}, {speed}")
            bar.update()
            if writes:
                monitor.after_step()
            due = arm.step % c.eval_every == 0 or arm.step == c.steps
            if due:
                row["val_loss"] = arm.evaluate()
            rows.append(row)
            log.write(json.dumps(row) + "\n")
            log.flush()
            if due:  # after its row: a resumed run finds one for each of its steps
                keep(arm, out, row["val_loss"])
                if quiet:
                    losses = f"loss {loss:.4f}, val loss {row['val_loss']:.4f}"
                    print(f"{label}: step {arm.step}/{c.steps}, {losses}, {speed}", flush=True)
        if arm.step < c.steps:
            stop += [] if stop else [signal.SIGTERM]  # which another process has got
            # At once, for a second signal ends all; but after a skipped step it may be broken.
            keep(arm, out, arm.evaluate() if arm.skipped else 0)
    if signal.SIGTERM in stop:
        print(f"terminated at step {arm.step}: --resume {out} goes on")
        sys.exit(128 + signal.SIGTERM)
    if stop:
        print(f"interrupted at step {arm.step}: evaluating what is there; --resume {out} goes on")
    if rows and "val_loss" not in rows[-1]:
        rows[-1]["val_loss"] = arm.evaluate()
    return rows, bool(stop)


def throughput(rows, c):
    """Tokens a second, by the median step after the first few."""
    seconds = statistics.median(r["seconds"] for r in rows[3:] or rows)
    return c.batch_size * c.block_size * c.accum / seconds


# ------------------------------------------------------------------------------------------------
# Commands


def announce(arm):
    """The start-up lines: what runs, where, and why."""
    c, r = arm.c, arm.recipe
    casts, gemms, why = fp8gpt.choose_backend(r, arm.device)
    tiles = " ".join(f"{a or 'all'}x{b or 'all'}" for a, b in (r.x_tile, r.w_tile, r.g_tile))
    formats = "/".join(f.name for f in (r.x_fmt, r.w_fmt, r.g_fmt))
    kept = f"{c.m_fmt}/{c.v_fmt} moments, {c.master} weights"
    kept = kept if c.optimizer == "fp8adam" else "fp32 moments and weights"
    print(f"model    {c.family}, {arm.model.num_params():,} parameters")
    print(f"recipe   {r.name}: x/w/g {formats}, tiles {tiles}, amax {r.amax}, scales {r.rounding}")
    print(f"GEMMs    {gemms}, casts by {casts}: {why}")
    linears = {}
    for name, m in arm.model.named_modules():
        if isinstance(m, FP8Linear):
            linears.setdefault(m.recipe.name, []).append(name.removeprefix("blocks."))
    for recipe, names in linears.items():
        print(f"linears  {recipe}: {' '.join(names)}")
    size = f"{c.accum} x {c.batch_size} x {c.block_size} tokens"
    print(f"optim    {c.optimizer}, {kept}; steps {arm.step + 1} to {c.steps} of {size}")


def train(c, given, args, device, device_line, source, state, saved):
    if state:
        same = given.get("recipe", saved.recipe) == saved.recipe
        c = saved if same else replace(saved, **dict.fromkeys(RECIPE_FIELDS))
        c = replace(c, **dict(fsdp=saved.fsdp and distributed.joined()) | given)
        if saved.optimizer != c.optimizer:
            raise UserError(f"--resume continues with {saved.optimizer}: that cannot change")
        if state["step"] >= c.steps:
            raise UserError(f"this run has done its {state['step']} steps: give a larger --steps")
        source = Run(args.resume, state)
    warn_ignored(c, given)
    if c.fsdp and not distributed.joined():
        raise UserError(
            "--fsdp shards a model over processes: torchrun --nproc_per_node=N train.py"
        )
    if c.fsdp and c.monitor:
        raise UserError("--monitor looks at whole weights, which no process has with --fsdp")
    if c.accum % (size := distributed.size()):
        raise UserError(f"{size} processes cannot share {c.accum} micro-batches: change --accum")
    with distributed.first_alone():
        corpus = Corpus(c.data, c.tokenizer, c.block_size)
    if given.get("tokenizer", corpus.tokenizer) != corpus.tokenizer:
        print(f"warning  data {c.data} ignores tokenizer = {c.tokenizer}: {corpus.tokenizer}")
    arm = Arm(c, corpus, device, source)
    if state:
        arm.restore(state)
        changed = f" -> {c.recipe}" if c.recipe != saved.recipe else ""
        changed += f"; the schedule ends at {c.steps}" if c.steps != saved.steps else ""
        print(f"resume   {args.resume}: {saved.recipe}, step {arm.step}{changed}")
    announce(arm)
    start, out = time.perf_counter(), Path(args.resume or Path(c.out) / c.recipe)
    with alone_in(out) if distributed.rank() == 0 else contextlib.nullcontext():
        if state and written(out) != args.seen:
            raise UserError(f"{out} has a newer checkpoint than the one just read: resume again")
        rows, _ = fit(arm, out, c.recipe)
        if rows and distributed.rank() == 0:
            conclude(arm, rows, out, device_line, time.perf_counter() - start)
    if rows and math.isfinite(rows[-1]["val_loss"]):
        print("sample   " + repr(write_text(arm.model, corpus.tokenizer, c.seed, args)))


def conclude(arm, rows, out, device_line, seconds):
    """A run's result: a file, a picture, a line."""
    c, speed, val_loss = arm.c, throughput(rows, arm.c), rows[-1]["val_loss"]
    used, size = flops_utilisation(arm, speed), memory(arm)
    report = dict(step=arm.step, val_loss=val_loss, tokens_per_s=speed, mfu=used, seconds=seconds)
    report |= dict(memory_bytes=size, config=asdict(c), machine=machine(device_line))
    write_whole(out / "run.json", lambda aside: aside.write_text(json.dumps(report, indent=1)))
    with open(out / "steps.jsonl") as log:  # from before a resume, too
        plot([(c.recipe, [json.loads(row)["loss"] for row in log])], out / "loss.png")
    used = "n/a" if used is None else f"{used:.1%}"
    print(f"result   val loss {val_loss:.4f}, {speed:,.0f} tokens/s, MFU {used},", end=" ")
    print(f"{size / 1e6:.0f} MB, {seconds:.0f} s; see {out}/", flush=True)


def compare(c, given, args, device, device_line, source):
    """Arms on the same seed, initial weights and batches: one table, one file, one picture."""
    arms = []
    for text in args.compare:
        overrides = parse_arm(text)
        if text in (a["name"] for a in arms):
            raise UserError(f"arm {text!r} stands twice in --compare")
        arms.append(dict(name=text, config=replace(c, **overrides), runs=[]))
        warn_ignored(arms[-1]["config"], given | overrides, f"arm {text}: ")
    corpus = Corpus(c.data, c.tokenizer, c.block_size)
    for a in arms:  # every mistake of an arm is found before the first one is trained
        model_config(a["config"], corpus.vocab_size)  # a source's fits, or Arm says so
    out, seeds = Path(c.out) / "compare", range(c.seed, c.seed + args.seeds)
    with alone_in(out):
        diverged = compare_arms(arms, seeds, out, corpus, device, source)
    for name, why in diverged.items():
        print(f"diverged {name}: {why}")
    arms = [a for a in arms if a["runs"] and a["name"] not in diverged]
    if diverged and not arms:
        raise UserError("no arm is left to compare")
    seeds = min((len(a["runs"]) for a in arms), default=0)  # those that all arms have
    for a in arms:
        runs, a["config"] = a.pop("runs")[:seeds], asdict(a["config"])
        a["val_losses"] = [run.pop("val_loss") for run in runs]
        a["tokens_per_s"] = statistics.median(run.pop("speed") for run in runs)
        a |= runs[-1]
        a["val_loss"] = statistics.mean(a["val_losses"])
        a["spread"] = statistics.stdev(a["val_losses"]) if len(a["val_losses"]) > 1 else None
        pairs = zip(a["val_losses"], arms[0]["val_losses"])
        a["difference"] = statistics.mean(x - y for x, y in pairs)
        a |= summary(a.pop("health"))
    if not arms:
        return
    report = dict(arms=arms, diverged=diverged, machine=machine(device_line))
    write_whole(out / "compare.json", lambda aside: aside.write_text(json.dumps(report, indent=1)))
    plot([(a["name"], a["losses"]) for a in arms], out / "compare.png")
    spread = f", mean and standard deviation of {seeds} seeds" if seeds > 1 else ""
    print(f"\n{c.steps} steps{spread}; nats a token; differences to {arms[0]['name']}\n")
    print_arms(arms)
    print(f"\nsee {out}/compare.json and {out}/compare.png")


def compare_arms(arms, seeds, out, corpus, device, source):
    """Train them, each seed in turn; a["runs"] gets a result of each whole run -> who diverged."""
    diverged = {}
    for seed in seeds:
        for a in arms:
            if a["name"] in diverged:
                continue
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            arm = Arm(replace(a["config"], seed=seed), corpus, device, source)
            run = re.sub(r"[^\w.,=-]", "_", a["name"]) + f"-{seed}"
            try:
                with alone_in(out / run) as folder:
                    rows, stopped = fit(arm, folder, a["name"])
            except Diverged as error:
                diverged[a["name"]] = f"seed {seed}, {error}"
                continue
            if arm.step == arm.c.steps:  # half a run has no place beside whole ones
                result = dict(val_loss=rows[-1]["val_loss"], speed=throughput(rows, arm.c))
                result |= dict(losses=[r["loss"] for r in rows], memory_bytes=memory(arm))
                a["runs"].append(result | dict(health=operand_health(arm)))
            if stopped:
                return diverged
    return diverged


def evaluate(c, given, args, device, source):
    """Post-training quantisation: each recipe on the weights of a source, beside BF16."""
    corpus = Corpus(c.data, c.tokenizer, c.block_size)
    check_tokenizer(source.tokenizer, corpus)

    def batches(split, n):
        for i in range(n):
            rows = torch.from_numpy(corpus.batch(split, (0, i), c.batch_size)).to(device)
            yield rows[:, :-1], rows[:, 1:]

    names = ["bf16", c.recipe] if "recipe" in given else list(RECIPES)
    configs = {n: model_config(replace(c, recipe=n), source.vocab_size) for n in names}
    held_out = functools.partial(batches, "val", c.eval_batches)
    print(f"\n{c.eval_batches} validation batches of {c.batch_size} x {c.block_size} tokens\n")
    post_training(source, configs, held_out, functools.partial(batches, "train", args.calibrate))


def main(argv):
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a sample's bytes
    given, args = parse_command_line(argv)
    args.seen = written(args.resume) if args.resume else None  # before it is read
    state, saved = load_checkpoint(args.resume, args.older) if args.resume else (None, None)
    told = (asdict(saved) if saved else {}) | given
    if told.get("threads"):
        torch.set_num_threads(told["threads"])
    device, device_line = pick_device(told.get("device", "auto"))
    device = distributed.join(device)
    if distributed.joined() and (args.compare or args.bench or args.advise or args.eval):
        raise UserError("several processes train one run: give --recipe, not another command")
    print(f"machine  {device_line}; torch {torch.__version__}")
    known = GPU_PRESET if device.type == "cuda" else {}
    known = known | SIZES.get(given.get("size"), {})
    source = open_source(given["init_from"]) if "init_from" in given else None
    if source:
        known |= inherit(source, given, not args.compare)
    c = Config(**(dict(accum=distributed.size()) | known | given))  # a micro-batch for each process
    if source:
        changed = not (args.compare or args.eval) and c.recipe != source.fields["recipe"]
        print(f"init     {c.init_from}: {source.what}{f' -> {c.recipe}' * changed}")
    if args.bench:
        corpus = Corpus(c.data, c.tokenizer, c.block_size)
        bench(lambda **changes: Arm(replace(c, **changes), corpus, device), c, device)
    elif args.advise:
        one = replace(c, n_layer=1, bf16_first=0, bf16_last=0)
        advise({r: model_config(replace(one, recipe=r), 256) for r in ADVISED}, c, device)
    elif args.eval:
        evaluate(c, given, args, device, source)
    elif args.generate:
        warn_ignored(c, given)
        model = GPT(model_config(c, source.vocab_size)).to(device)
        source.fill(model, pin=c.recipe == source.fields["recipe"])
        if source.tokenizer is None:
            raise UserError(f"{c.init_from} has no tokenizer.json")
        print("sample   " + repr(write_text(model, source.tokenizer, c.seed, args)))
    elif args.compare:
        compare(c, given, args, device, device_line, source)
    else:
        train(c, given, args, device, device_line, source, state, saved)


def run_main(argv):
    """`main`, with a sentence and an exit code for what can go wrong."""
    say = f"train.py{f', process {n}' if (n := int(os.environ.get('RANK', 0))) else ''}: "
    try:
        main(argv)
    except (UserError, OSError) as error:
        sys.exit(print(f"{say}{error}", file=sys.stderr) or 2)
    except KeyboardInterrupt:
        sys.exit(130)
    except (MemoryError, RuntimeError) as error:
        distributed.leave_if_alone(error, say)
        if "memory" not in str(error).lower() and not isinstance(error, MemoryError):
            raise
        sys.exit(print(f"{say}out of memory; try a smaller --batch-size", file=sys.stderr) or 2)


if __name__ == "__main__":
    run_main(sys.argv[1:])
