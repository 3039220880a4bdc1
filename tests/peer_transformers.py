"""transformers, in a process of its own: tests/test_convert.py compares with what this writes.

    python tests/peer_transformers.py make DIR     tiny random models, saved, and their logits
    python tests/peer_transformers.py read DIR...  logits and greedy tokens of exports

A process of its own, started away from the project's root: transformers looks for a package
`kernels`, and must not find kernels.py.
"""

import os
import sys
from pathlib import Path

sys.path = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parents[1]]
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import torch  # noqa: E402
import transformers as tf  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

SIZE = dict(vocab_size=300, hidden_size=64, intermediate_size=176, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=64)  # fmt: skip
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=16)  # fmt: skip
LINEAR = dict(rope_type="linear", rope_theta=1e4, factor=4.0)


def models():
    llama = lambda **c: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZE | c))  # noqa: E731
    yield "llama2", llama(num_key_value_heads=2)
    yield "llama3", llama(num_key_value_heads=1, rope_parameters=LLAMA3, rms_norm_eps=1e-5)
    yield "linear", llama(rope_parameters=LINEAR, tie_word_embeddings=True)
    yield (
        "gpt2",
        tf.GPT2LMHeadModel(
            tf.GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=64)
        ),
    )


def make(root):
    torch.manual_seed(0)
    for name, model in models():
        for p in model.parameters():  # biases and norms, too, are not what they start as
            p.data += 0.05 * torch.randn_like(p)
        model.save_pretrained(root / name, max_shard_size="100KB")  # several shards
        idx = torch.randint(0, 300, (2, 64))
        with torch.no_grad():
            save_file(dict(idx=idx, logits=model.eval()(idx).logits), root / f"{name}.out")


def read(root):
    model = tf.AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32).eval()
    idx = load_file(f"{root}.in")["idx"]
    out = model.generate(idx[:1, :8], max_new_tokens=24, do_sample=False, eos_token_id=None)
    with torch.no_grad():
        save_file(dict(logits=model(idx).logits, tokens=out), f"{root}.out")
    if (root / "tokenizer.json").exists():
        text = "naïve:\tdef f(x):\n  …"
        tokenizer = tf.AutoTokenizer.from_pretrained(root)
        assert tokenizer(text).input_ids == list(text.encode())
        assert tokenizer.decode(tokenizer(text).input_ids) == text


if __name__ == "__main__":
    for path in map(Path, sys.argv[2:]):
        {"make": make, "read": read}[sys.argv[1]](path)
