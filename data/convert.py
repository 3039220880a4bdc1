"""Weights in and out: runs of train.py, Hugging Face directories, FP8 exports for vLLM.

    python data/convert.py export out/bf16 my-model --format bf16     plain Hugging Face layout
    python data/convert.py export out/current my-model --format fp8   E4M3 weights and their scales

`open_source(path)` is where train.py --init-from starts: a run, or a directory in Hugging Face
layout, an FP8 export included. Nothing is unpickled: tensors come from safetensors files, or from a
checkpoint of train.py by torch.load(weights_only=True).
"""

import argparse
import json
import os
import re
import shutil
import struct
import sys
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.checkpoint import QUANTISED, RECIPE_FIELDS, Run, model_config
from data.infer import absorb, calibrate, calibrated, static, whole
from data.prepare import VOCABULARY, Corpus, UserError
from fp8gpt import (
    E4M3,
    GPT,
    RECIPES,
    FP8Linear,
    Quantized,
    dequantize,
    encode_scale,
    quantize_operand,
)

# ------------------------------------------------------------------------------------------------
# Names: ours, and theirs, one or those that ours holds one under the other

_L, _H = "model.layers.{}.", "transformer.h.{}."
NAMES = {
    "llama": {
        "wte": ["model.embed_tokens"],
        "blocks.{}.norm1": [_L + "input_layernorm"],
        "blocks.{}.attn.wqkv": [_L + f"self_attn.{x}_proj" for x in "qkv"],
        "blocks.{}.attn.wo": [_L + "self_attn.o_proj"],
        "blocks.{}.norm2": [_L + "post_attention_layernorm"],
        "blocks.{}.mlp.w12": [_L + "mlp.up_proj", _L + "mlp.gate_proj"],
        "blocks.{}.mlp.w3": [_L + "mlp.down_proj"],
        "norm": ["model.norm"],
        "lm_head": ["lm_head"],
    },
    "gpt2": {  # its linears are stored transposed
        "wte": ["transformer.wte"],
        "wpe": ["transformer.wpe"],
        "blocks.{}.norm1": [_H + "ln_1"],
        "blocks.{}.attn.wqkv": [_H + "attn.c_attn"],
        "blocks.{}.attn.wo": [_H + "attn.c_proj"],
        "blocks.{}.norm2": [_H + "ln_2"],
        "blocks.{}.mlp.w1": [_H + "mlp.c_fc"],
        "blocks.{}.mlp.w3": [_H + "mlp.c_proj"],
        "norm": ["transformer.ln_f"],
    },
}
# What checkpoints hold beside weights: causal masks and rotary frequencies.
NO_WEIGHTS = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")


def layout(model):
    """Of every parameter: our name, itself, [(their module, rows)], whether it lies transposed."""
    c = model.config
    D = c.n_embd // c.n_head
    rows = dict(wqkv=[c.n_head * D, c.n_kv_head * D, c.n_kv_head * D], w12=[c.hidden] * 2)
    rows |= dict(wte=[c.vocab_size], lm_head=[c.vocab_size])
    for name, p in model.named_parameters():  # a tied head is not among them
        path, _, kind = name.rpartition(".")
        index = "".join(re.findall(r"^blocks\.(\d+)\.", path))
        theirs = NAMES[c.family][re.sub(r"^blocks\.\d+", "blocks.{}", path)]
        last = path.rpartition(".")[2]
        counts = rows.get(last) if len(theirs) > 1 or last in ("wte", "lm_head") else None
        parts = list(zip((t.format(index) for t in theirs), counts or [p.shape[0]]))
        linear = isinstance(model.get_submodule(path), FP8Linear)
        yield name, kind, p, parts, c.family == "gpt2" and linear and kind == "weight"


# ------------------------------------------------------------------------------------------------
# In: a source, as data/checkpoint.py's Run


class HuggingFace:
    """A directory with config.json and model.safetensors, or its shards: a GPT-2 or a Llama."""

    def __init__(self, directory):
        self.root = Path(directory)
        config = read_json(self.root / "config.json")
        kind, quantised = config.get("model_type"), config.get("quantization_config")
        if kind not in READERS:
            raise UserError(
                f"{self.root} holds a model of type {kind!r}: only {', '.join(READERS)}"
            )
        try:
            self.fields = READERS[kind](config) | dict(recipe="bf16")
            self.vocab_size = int(config["vocab_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{self.root / 'config.json'}: {error!r} is missing or odd") from None
        self.static = False
        if quantised:
            recipe, self.static = read_quantisation(self.root, quantised)
            self.fields |= recipe
        own = config.get("fp8gpt", {})
        self.fields |= {n: own[n] for n in (*QUANTISED, *RECIPE_FIELDS) if n in own}
        self.tokenizer = own.get("tokenizer", self.find_tokenizer())
        self.tensors, self.quantised = Tensors(self.root), bool(quantised)
        self.tied = bool(config.get("tie_word_embeddings", kind == "gpt2"))
        how = f"FP8, {self.fields['recipe']}" if quantised else "not quantised"
        self.what = f"{kind}, {how}"

    def find_tokenizer(self):
        """A file that data/prepare.py reads, "gpt2" by its size, or None."""
        if (self.root / "tokenizer.json").is_file():
            return str(self.root / "tokenizer.json")
        return "gpt2" if self.vocab_size == VOCABULARY["gpt2"] else None

    @torch.no_grad()
    def fill(self, model, pin=False):
        """pin: FP8 weights run with the very codes and scales of the file. Without, as in training,
        they are decoded and cast again, which gives the same codes."""
        modules = dict(model.named_modules())
        unread = {name for name in self.tensors.entries if not NO_WEIGHTS.search(name)}
        unread -= {"lm_head.weight"} if self.tied else set()
        for name, kind, p, parts, transposed in layout(model):
            module = modules[name.rpartition(".")[0]]
            if kind == "weight" and isinstance(module, FP8Linear) and self.is_fp8(parts, model):
                w8, amax = self.read_fp8(module, parts, unread)
                p.copy_(dequantize(w8))
                if amax is not None and hasattr(module, "amax_history"):
                    module.amax_history.zero_()[0, 0] = amax
                if pin and module.recipe.w_fmt is E4M3:
                    module.w_cast, module.apart = (w8, None), True
                continue
            row = 0
            for theirs, rows in parts:
                theirs = "model.embed_tokens" if theirs == "lm_head" and self.tied else theirs
                shapes = [(rows, *p.shape[1:])[:: -1 if transposed else 1]]
                if theirs.endswith("wpe"):  # of a longer context
                    shapes += [(n, p.shape[1]) for n in range(rows, self.fields["block_size"] + 1)]
                t = self.tensors.read(f"{theirs}.{kind}", *shapes)
                p[row : row + rows].copy_(t.t() if transposed else t[:rows])
                unread.discard(f"{theirs}.{kind}")
                row += rows
        if unread:
            raise UserError(f"{self.root} holds a tensor that no part of the model takes: "
                            f"{min(unread)}")  # fmt: skip

    def is_fp8(self, parts, model):
        """Whether the parts of a linear are codes; all of them or none."""
        kinds = {self.tensors.kind(f"{theirs}.weight") for theirs, _ in parts}
        if kinds <= {"F8_E4M3", "missing"}:  # what is missing is named when it is read
            return "F8_E4M3" in kinds
        if not kinds <= {"F32", "BF16", "F16", "missing"}:
            raise UserError(f"{parts[0][0]}.weight is stored as {' and '.join(sorted(kinds))}")
        return False

    def read_fp8(self, module, parts, unread):
        """-> (Quantized, the amax that its static input scale stands for, or None)"""
        K, q, s, inputs = module.in_features, [], [], []
        block = "weight_scale_inv"
        for theirs, rows in parts:
            if not self.quantised:
                raise UserError(f"{theirs}.weight is FP8, and config.json says nothing of it")
            q.append(self.tensors.read(f"{theirs}.weight", (rows, K), raw=True))
            blocks = f"{theirs}.{block}" in self.tensors.entries
            name = f"{theirs}.{block if blocks else 'weight_scale'}"
            shapes = [(-(-rows // 128), -(-K // 128))] if blocks else [(), (1,), (rows, 1), (rows,)]
            s.append(self.tensors.read(name, *shapes))
            unread -= {f"{theirs}.weight", name}
            if self.static:
                inputs.append(self.tensors.read(f"{theirs}.input_scale", (), (1,)).reshape(()))
                unread.discard(f"{theirs}.input_scale")
            bad = [t for t in (s[-1], *inputs[-1:]) if not (t.isfinite().all() and (t > 0).all())]
            if bad:
                raise UserError(f"{name} or the input_scale beside it is not positive and finite")
        if s[0].dim() == 2 and s[0].shape[1] > 1 or blocks:
            if any(rows % 128 for _, rows in parts[:-1]):
                raise UserError(f"{name}: rows of a part that are no multiple of 128 share a block")
            tile, s = (128, 128), torch.cat(s)
        else:
            s = torch.cat([t.reshape(-1, 1).expand(rows, 1) for t, (_, rows) in zip(s, parts)])
            tile, s = ((None, None), s[:1]) if (s == s[0]).all() else ((1, None), s.contiguous())
        rounding = "pow2" if (torch.frexp(s)[0] == 0.5).all() else "fp32"
        device = module.weight.device
        w8 = Quantized(torch.cat(q).to(device), s.float().to(device), tile, E4M3, None, rounding)
        return w8, amax_of(max(inputs), module.recipe) if inputs else None


def amax_of(s, recipe):
    """The amax from which encode_scale makes this decode scale, to the last bit if there is one."""
    how = recipe.margin[0], recipe.max_exponent
    amax = s * E4M3.max * 2.0 ** -recipe.margin[0]
    near = [amax]
    for _ in range(3):
        near = [near[0].nextafter(near[0] * 0), *near, near[-1].nextafter(near[-1] * 2)]
    for a in sorted(near, key=lambda a: abs(a - amax)):
        if encode_scale(a, E4M3, recipe.rounding, *how).reciprocal() == s:
            return a
    return amax


def read_json(path):
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise UserError(f"cannot read {path}: {reason}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold a JSON object")
    return value


def require(config, **wanted):
    """Refuse what would be computed differently here."""
    for name, values in wanted.items():
        if config.get(name, values[0]) not in values:
            raise UserError(f"{name} = {config[name]!r} is not built here, only {values[0]!r}")


def read_llama(config):
    require(config, hidden_act=["silu"], attention_bias=[False], mlp_bias=[False],
            head_dim=[config["hidden_size"] // config["num_attention_heads"], None],
            pretraining_tp=[1])  # fmt: skip
    rope = (config.get("rope_parameters") or {}) | (config.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    context = int(config["max_position_embeddings"])
    text = None
    if kind == "linear":
        text = f"{float(rope['factor'])!r}/1e8/1e9/{context}"  # nothing turns so often: all slow
    elif kind == "llama3":
        numbers = [rope[n] for n in ("factor", "low_freq_factor", "high_freq_factor")]
        text = "/".join(map(repr, numbers + [rope["original_max_position_embeddings"]]))
    elif kind != "default":
        raise UserError(f"rope_type {kind!r} is not built here, only linear and llama3")
    return dict(
        family="llama", n_layer=int(config["num_hidden_layers"]), n_embd=int(config["hidden_size"]),
        n_head=int(config["num_attention_heads"]), hidden=int(config["intermediate_size"]),
        n_kv_head=int(config.get("num_key_value_heads") or config["num_attention_heads"]),
        block_size=context, norm_eps=float(config.get("rms_norm_eps", 1e-6)), rope_scaling=text,
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
    )  # fmt: skip


def read_gpt2(config):
    require(config, activation_function=["gelu_new", "gelu_pytorch_tanh"],
            scale_attn_weights=[True], scale_attn_by_inverse_layer_idx=[False],
            tie_word_embeddings=[True], add_cross_attention=[False])  # fmt: skip
    return dict(
        family="gpt2", n_layer=int(config["n_layer"]), n_head=int(config["n_head"]),
        n_kv_head=int(config["n_head"]), n_embd=int(config["n_embd"]),
        hidden=int(config.get("n_inner") or 4 * config["n_embd"]),
        block_size=int(config["n_positions"]), norm_eps=float(config["layer_norm_epsilon"]),
    )  # fmt: skip


READERS = {"llama": read_llama, "gpt2": read_gpt2}


def read_quantisation(root, config):
    """quantization_config -> (fields, whether input scales are in the file)"""
    method = config.get("quant_method")
    if method == "fp8":  # DeepSeek's, and transformers' FineGrainedFP8Config
        if list(config.get("weight_block_size") or []) == [128, 128]:
            return dict(recipe="blockwise", rounding="fp32"), False
        method = f"fp8 with blocks of {config.get('weight_block_size')}"
    if method == "compressed-tensors":
        groups = list(config.get("config_groups", {}).values())
        w, x = (
            (groups[0].get(k) or {} for k in ("weights", "input_activations"))
            if groups
            else 2 * ({},)
        )
        float8 = all(t.get("type") == "float" and t.get("num_bits") == 8 for t in (w, x))
        if len(groups) == 1 and float8 and w.get("strategy") == "tensor":
            stays = not x.get("dynamic")
            return dict(recipe="delayed" if stays else "current"), stays
        if len(groups) == 1 and float8 and w.get("strategy") == "channel" and x.get("dynamic"):
            return dict(recipe="rowwise", rounding="fp32"), False
        method = "compressed-tensors of another scheme"
    raise UserError(f"{root} is quantised by {method}: only FP8 by tensor, channel or 128 x 128")


class Tensors:
    """The tensors of a directory's safetensors files. Their headers are checked when it is opened,
    so that a file which is cut short is known by name; a tensor is read when it is asked for."""

    def __init__(self, root):
        self.entries, self.crc = {}, {}
        index, single = root / "model.safetensors.index.json", root / "model.safetensors"
        if index.is_file():
            where = read_json(index).get("weight_map")
            if not isinstance(where, dict) or not all(isinstance(v, str) for v in where.values()):
                raise UserError(f"{index} has no weight_map")
            for name, file in where.items():
                if Path(file).name != file or not (root / file).is_file():
                    raise UserError(f"{file}, the shard with tensor {name}, is not in {root}")
            shards = [root / file for file in sorted({*where.values()})]
        elif single.is_file():
            where, shards = {}, [single]
        else:
            pickled = "; a pickle is not loaded" if list(root.glob("*.bin")) else ""
            raise UserError(f"there is no model.safetensors in {root}{pickled}")
        for path in shards:
            self.read_header(path)
        for name, file in where.items():
            if name not in self.entries:
                raise UserError(f"tensor {name} is not in {root / file}: fetch it again")

    def read_header(self, path):
        size = path.stat().st_size
        try:
            with open(path, "rb") as f:
                (length,) = struct.unpack("<Q", f.read(8))
                if length > min(size, 10**8):
                    raise ValueError
                header = json.loads(f.read(length))
            meta = header.pop("__metadata__", {})
            self.crc |= json.loads(meta.get("crc32", "{}"))
            for name, entry in sorted(header.items(), key=lambda e: e[1]["data_offsets"]):
                if 8 + length + entry["data_offsets"][1] > size:
                    raise UserError(f"{path} ends within tensor {name}: fetch or export it again")
                bare = re.match(r"(wte|wpe|h\.\d+|ln_f)\.", name)  # OpenAI's GPT-2
                key = "transformer." + name if bare else name
                self.entries[key] = path, entry["dtype"], tuple(entry["shape"]), name
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
            raise UserError(f"{path} is not a whole safetensors file: fetch it again") from None

    def kind(self, name):
        return self.entries[name][1] if name in self.entries else "missing"

    def read(self, name, *shapes, raw=False):
        """A tensor of one of these shapes, as fp32 unless raw."""
        from safetensors import SafetensorError, safe_open

        if name not in self.entries:
            raise UserError(f"tensor {name} is missing")
        path, _, shape, stored = self.entries[name]
        if shape not in shapes:
            raise UserError(f"tensor {name} is {shape}, not {' or '.join(map(str, shapes))}")
        try:
            with safe_open(path, "pt") as file:
                t = file.get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise UserError(f"cannot read tensor {name} of {path}: {error}") from None
        if name in self.crc and crc32(t) != self.crc[name]:
            raise UserError(f"tensor {name} is not the one that was exported: its CRC 32 differs")
        return t if raw else t.float()


def crc32(t):
    return zlib.crc32(t.contiguous().view(-1).view(torch.uint8).numpy())


def open_source(path):
    """A Run or a HuggingFace. Raises UserError."""
    path = Path(path)
    if (path / "config.json").is_file():
        return HuggingFace(path)
    if (path / "ckpt.pt").is_file():
        return Run(path)
    raise UserError(f"{path} holds neither a run (ckpt.pt) nor a model (config.json)")


# ------------------------------------------------------------------------------------------------
# Out


def prepare_export(source, config, batches, fp8):
    """The model as it will be written -> GPT: the head in BF16, Smooth-SwiGLU absorbed, static
    scales calibrated where a recipe needs them. batches() -> what to calibrate by."""
    model = GPT(replace(config, head="bf16"))
    source.fill(model)
    smooth, own = config.smooth, calibrated(model)
    if smooth:
        model = absorb(model, batches() if fp8 else ())
    if fp8 and config.recipe.amax == "history" and (smooth or not own):
        calibrate(model, batches())
    return model.eval()


def strategy(recipe):
    """How compressed-tensors calls the tiles of a recipe's weights. Raises UserError."""
    if whole(recipe) and recipe.w_fmt is recipe.x_fmt is E4M3:
        return "tensor"
    if recipe.w_tile == recipe.x_tile == (1, None):
        return "channel"
    if recipe.w_tile == (128, 128) and recipe.x_tile == (1, 128):
        return "block"
    names = [r.name for r in RECIPES.values() if whole(r) or r.name in ("rowwise", "blockwise")]
    raise UserError(f"recipe {recipe.name} has no FP8 export: give --recipe {', '.join(names)}")


def input_scale(layer):
    """The static decode scale of a layer's x, (1,)."""
    recipe = layer.recipe
    if recipe.amax == "constant":
        return torch.tensor([2.0 ** -recipe.bias[0]])
    amax, how = layer.history()[0].cpu(), (recipe.margin[0], recipe.max_exponent)
    return encode_scale(amax, E4M3, recipe.rounding, *how).reciprocal().reshape(1)


@torch.no_grad()
def export_tensors(model, fp8):
    """{their name: tensor}. Linears of an FP8 recipe as E4M3 codes with decode scales, other
    linears as BF16; embeddings and norms as BF16, beside FP8 as they are."""
    tensors, modules = {}, dict(model.named_modules())
    for name, kind, p, parts, transposed in layout(model):
        layer, row = modules[name.rpartition(".")[0]], 0
        linear = isinstance(layer, FP8Linear) and kind == "weight"
        coded = fp8 and linear and layer.recipe.w_fmt is E4M3
        if coded:
            w8 = quantize_operand(p, "w", layer.recipe, layer.history()[1], "first")[0]
            form = strategy(layer.recipe)
        for theirs, rows in parts:
            here, row = slice(row, row + rows), row + rows
            if not coded:
                t = p[here].bfloat16() if linear or not fp8 else p[here].float()
                tensors[f"{theirs}.{kind}"] = (t.t() if transposed else t).clone().contiguous()
                continue
            if form == "block" and (rows % 128 or p.shape[1] % 128):
                raise UserError(f"{theirs} is {rows} x {p.shape[1]}, no multiple of 128: blocks of"
                                " 128 x 128 would not be whole, and vLLM refuses that")  # fmt: skip
            tensors[f"{theirs}.weight"] = w8.q[here].clone()
            if form == "block":
                s = w8.s[here.start // 128 : here.stop // 128]
                tensors[f"{theirs}.weight_scale_inv"] = s.clone()
            else:
                tensors[f"{theirs}.weight_scale"] = (
                    w8.s[here].clone() if form == "channel" else w8.s[0].clone()
                )
            if layer.recipe.amax != "now":
                tensors[f"{theirs}.input_scale"] = input_scale(layer)
    return tensors


def theirs_config(model, fp8, tokenizer):
    """config.json. "fp8gpt" in it is for `HuggingFace`: what the others have no words for."""
    c, recipe = model.config, model.config.recipe
    own = dict(tokenizer=tokenizer)
    config = dict(vocab_size=c.vocab_size, torch_dtype="bfloat16", fp8gpt=own)
    config |= dict(bos_token_id=None, eos_token_id=None, tie_word_embeddings=c.family == "gpt2")
    if c.family == "gpt2":
        config |= dict(
            architectures=["GPT2LMHeadModel"], model_type="gpt2", n_layer=c.n_layer,
            n_head=c.n_head, n_embd=c.n_embd, n_inner=c.hidden, n_positions=c.block_size,
            activation_function="gelu_new", layer_norm_epsilon=c.norm_eps,
        )  # fmt: skip
        return config
    config |= dict(
        architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, hidden_size=c.n_embd,
        intermediate_size=c.hidden, max_position_embeddings=c.block_size, hidden_act="silu",
        rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta, attention_bias=False, mlp_bias=False,
    )  # fmt: skip
    if c.rope_scaling:
        names = "factor low_freq_factor high_freq_factor original_max_position_embeddings".split()
        config["rope_scaling"] = dict(rope_type="llama3", **dict(zip(names, c.rope_scaling)))
        config["rope_scaling"][names[-1]] = int(c.rope_scaling[-1])
    if not fp8:
        return config
    own |= {n: getattr(c, n) for n in ("w3", "bf16_first", "bf16_last")}
    own |= dict(
        recipe=recipe.name, rounding=recipe.rounding, margin="/".join(map(str, recipe.margin))
    )
    own |= dict(recipe="delayed") if recipe.amax != "now" else {}  # its scales are in the file
    skipped = [theirs for name, kind, _, parts, _ in layout(model) for theirs, _ in parts
               if kind == "weight" and isinstance(m := model.get_submodule(name[:-7]), FP8Linear)
               and m.recipe.w_fmt is not E4M3]  # fmt: skip
    form = strategy(recipe)
    if form == "block":
        quantised = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic",
                         weight_block_size=[128, 128], modules_to_not_convert=skipped)  # fmt: skip
    else:
        scheme = dict(num_bits=8, type="float", symmetric=True)
        w = scheme | dict(strategy=form, dynamic=False)
        x = scheme | dict(strategy=form.replace("channel", "token"), dynamic=recipe.amax == "now")
        group = dict(targets=["Linear"], weights=w, input_activations=x, output_activations=None)
        quantised = dict(
            quant_method="compressed-tensors", format="float-quantized", kv_cache_scheme=None,
            quantization_status="compressed", ignore=skipped, config_groups=dict(group_0=group),
        )  # fmt: skip
    return config | dict(quantization_config=quantised)


def byte_tokenizer():
    """tokenizer.json of 256 ids, each a byte, which byte-level BPE writes as a visible letter."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in visible}
    letters |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in letters)}
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    vocabulary = {letters[b]: b for b in range(256)}
    return dict(version="1.0", added_tokens=[], pre_tokenizer=level, decoder=level,
                model=dict(type="BPE", vocab=vocabulary, merges=[]))  # fmt: skip


OURS = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def export(model, directory, fp8, tokenizer):
    """Write a directory in Hugging Face layout, whole or not at all -> bytes of its weights."""
    from safetensors.torch import save_file

    out = Path(directory)
    if fp8 and model.config.family != "llama":
        raise UserError("an FP8 export needs family llama: compressed-tensors reads no GPT-2 layer")
    if out.exists() and (not out.is_dir() or {p.name for p in out.iterdir()} - OURS):
        raise UserError(f"{out} holds something else than an export: choose another directory")
    tensors, config = export_tensors(model, fp8), theirs_config(model, fp8, tokenizer)
    meta = dict(format="pt", crc32=json.dumps({name: crc32(t) for name, t in tensors.items()}))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise UserError(f"cannot write to {out.parent}: {error.strerror}") from None
    try:
        save_file(tensors, scratch / "model.safetensors", meta)
        files = {"config.json": config}
        if tokenizer == "bytes":
            files["tokenizer.json"] = byte_tokenizer()
            files["tokenizer_config.json"] = dict(tokenizer_class="PreTrainedTokenizerFast")
        for name, value in files.items():
            (scratch / name).write_text(json.dumps(value, indent=1) + "\n")
        if tokenizer and Path(tokenizer).is_file():
            shutil.copy(tokenizer, scratch / "tokenizer.json")
        os.chmod(scratch, 0o755)
        os.chmod(scratch / "model.safetensors", 0o644)  # its library makes it private
        if out.exists():
            shutil.rmtree(out)
        scratch.rename(out)
    except Exception as error:  # safetensors has its own for a full disk
        raise UserError(
            f"cannot write {out}: {getattr(error, 'strerror', None) or error}"
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return sum(t.nbytes for t in tensors.values())


def export_run(args):
    source = open_source(args.run)
    fields = dict(source.fields)
    if args.recipe:
        fields |= dict.fromkeys(RECIPE_FIELDS) | dict(recipe=args.recipe)
    config, fp8 = model_config(fields, source.vocab_size), args.format == "fp8"
    if fp8:
        strategy(config.recipe)
        if args.calibrate and whole(config.recipe) and config.recipe.amax == "now":
            config = static(config)

    def batches():
        size = min(config.block_size, 1024)
        corpus = Corpus(args.data or fields.get("data", "stdlib"), source.tokenizer, size)
        for i in range(args.calibrate or 8):
            rows = torch.from_numpy(corpus.batch("train", (0, i), 8))
            yield rows[:, :-1], rows[:, 1:]

    model = prepare_export(source, config, batches, fp8)
    size = export(model, args.directory, fp8, source.tokenizer)
    count = sum(p.numel() for p in model.parameters())
    what = f"{config.recipe.name}, {strategy(config.recipe)}" if fp8 else "BF16"
    print(
        f"{args.directory}: {what}, {size:,} bytes for {count:,} weights ({size / count:.2f} each)"
    )


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error = lambda message: sys.exit(print(f"convert.py: {message}", file=sys.stderr) or 2)
    command = parser.add_subparsers(dest="command", required=True, metavar="export")
    add = command.add_parser("export", help="write Hugging Face layout", allow_abbrev=False)
    add.error = parser.error
    add.add_argument("run", metavar="RUN", help="a run of train.py, or a Hugging Face directory")
    add.add_argument("directory", metavar="DIR", help="where to write")
    add.add_argument("--format", required=True, choices=("fp8", "bf16"))
    add.add_argument("--recipe", choices=RECIPES, help="of the FP8 weights (the run's own)")
    add.add_argument("--calibrate", type=int, default=0, metavar="N",
                     help="static activation scales from N batches (0: dynamic)")  # fmt: skip
    add.add_argument("--data", help="what to calibrate by (the run's own corpus)")
    args = parser.parse_args(argv)
    try:
        if not 0 <= args.calibrate <= 10**6:
            raise UserError(f"--calibrate counts batches, from 0 on, not {args.calibrate}")
        export_run(args)
    except (UserError, OSError, MemoryError) as error:
        sys.exit(print(f"convert.py: {error or 'out of memory'}", file=sys.stderr) or 2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
