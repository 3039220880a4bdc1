"""Text, static scales and post-training quantisation; --init-from, --eval and --sample."""

import json
from dataclasses import replace

import pytest
import torch
from test_train import TINY, run

import train
from data.infer import ENOUGH, calibrate, generate, score, static
from data.prepare import UserError
from fp8gpt import GPT, RECIPES, FP8Linear, GPTConfig

# A row of x meets the same weights in another matrix shape: fp32 sums in another order, and, where
# that crosses the middle of two codes, another code. Measured 2e-7 for bf16, 6e-4 for FP8.
CACHE_TOLERANCE = 5e-3
FINE = ["bf16", "rowwise", "blockwise", "mxfp8"]  # tiles of one token: its neighbours do not matter


def model_of(recipe, family="llama", **changes):
    torch.manual_seed(3)
    n_kv_head = 2 if family == "llama" else None
    model = GPT(GPTConfig(256, 24, 2, 4, n_kv_head, 64, family, recipe=recipe, **changes))
    with torch.no_grad():
        for p in model.parameters():  # else all logits are nearly equal
            p += 0.1 * torch.randn_like(p)
    return model.eval()


def batches(n=3, length=24):
    generator = torch.Generator().manual_seed(1)
    for _ in range(n):
        rows = torch.randint(0, 256, (4, length + 1), generator=generator)
        yield rows[:, :-1], rows[:, 1:]


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("recipe", FINE)
def test_a_cache_changes_no_logit(recipe, family):
    model, idx = model_of(recipe, family), torch.randint(0, 256, (2, 24))
    whole = model(idx, idx)[0].view(2, 24, -1)
    cache, got = [[] for _ in model.blocks], []
    for piece in idx.split([1, 7, 1, 15], dim=1):  # a token, several on top of some
        got.append(model(piece, piece, cache)[0].view(2, piece.shape[1], -1))
    assert (torch.cat(got, 1) - whole).abs().max() < CACHE_TOLERANCE * whole.abs().max()
    assert cache[1][0].shape == (2, model.config.n_kv_head, 24, 16)
    with pytest.raises(ValueError, match="25 tokens in a row"):
        model(idx[:, :1], cache=cache)


@pytest.mark.parametrize("recipe", FINE)
@pytest.mark.parametrize("length", [1, 5, 23, 24, 25, 60])
def test_a_cache_changes_no_text_before_and_after_the_context_is_full(recipe, length):
    model, prompt = model_of(recipe), torch.randint(0, 256, (1, length))
    with_cache = generate(model, prompt, 12, temperature=0)
    assert with_cache.shape == (1, length + 12) and torch.equal(with_cache[:, :length], prompt)
    assert torch.equal(with_cache, generate(model, prompt, 12, temperature=0, cached=False))


@pytest.mark.parametrize("recipe", FINE)
def test_a_prompt_says_the_same_alone_and_in_a_batch(recipe):
    model, prompts = model_of(recipe), torch.randint(0, 256, (5, 9))
    prompts[2] *= 0  # of another magnitude
    together = generate(model, prompts, 20, temperature=0)
    alone = torch.cat([generate(model, p[None], 20, temperature=0) for p in prompts])
    assert torch.equal(together, alone)


def test_one_scale_for_the_tensor_couples_a_batch_unless_it_is_static():
    """What the row recipes do not do: a neighbour moves the scale."""
    calm, loud = torch.randn(1, 64), 1e6 * torch.randn(1, 64)
    for still, moved in ((False, True), (True, False)):
        recipe = replace(RECIPES["current"], amax="history" if still else "now")
        layer = FP8Linear(64, 64, recipe=recipe).eval()
        if still:
            layer.amax_history[0] = 4.0
        with torch.no_grad():
            differs = not torch.equal(layer(torch.cat((calm, loud)))[:1], layer(calm))
        assert differs == moved


@pytest.mark.parametrize("recipe", ["amax", "current", "delayed"])
def test_calibration_fills_the_histories_and_nothing_else(recipe):
    model = GPT(static(model_of(recipe).config))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    seen = {}
    for name, m in model.named_modules():
        if isinstance(m, FP8Linear) and m.recipe.amax == "history":
            seen[name] = []
            hook = lambda m, args, name=name: seen[name].append(args[0].abs().max())  # noqa: E731
            m.register_forward_pre_hook(hook)
    calibrate(model, batches())
    maxima = {name: max(amaxes).item() for name, amaxes in seen.items()}
    assert len(maxima) == 8 and all(len(a) == 3 for a in seen.values())
    for name, m in model.named_modules():
        if name in maxima:
            assert m.history()[0].item() == maxima[name]
            assert m.history()[1] == m.weight.abs().max()
    after = model.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items() if "history" not in k)
    assert all(p.grad is None for p in model.parameters())
    histories = {k: v.clone() for k, v in after.items() if "history" in k}
    score(model, batches(1))  # reads them
    assert all(torch.equal(model.state_dict()[k], v) for k, v in histories.items())
    calibrate(model, batches(1))  # anew, not on top
    assert all(m.history()[0] == seen[n][-1] for n, m in model.named_modules() if n in maxima)


def test_a_score_is_the_loss_and_the_share_of_likeliest_tokens():
    model, (x, y) = model_of("bf16"), (t.clone() for t in next(batches(1)))
    logits, loss = model(x, y)
    for i in range(10):  # of 96 tokens the model guesses at least these
        y[0, i] = logits[0, i].argmax()
    logits, loss = model(x, y)
    got = score(model, [(x, y)])
    want = (logits.argmax(-1) == y).double().mean().item()
    assert got == [pytest.approx(loss.item()), pytest.approx(want)] and want >= 10 / 96


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """A bf16 run and its flags."""
    out = tmp_path_factory.mktemp("runs")
    flags = [*TINY, "--data", str(text), "--out", str(out)]
    train.main([*flags, "--recipe", "bf16", "--steps", "4", "--rounding", "pow2"])
    return out


def lines(capsys, *argv):
    train.main([*map(str, argv)])
    return capsys.readouterr().out.splitlines()


def test_a_run_goes_on_in_another_recipe_and_says_so(trained, capsys):
    out = lines(capsys, "--init-from", trained / "bf16", "--recipe", "delayed", "--steps", 3,
                "--out", trained, "--lr", 1e-9, "--min-lr", 1e-9, "--weight-decay", 0)  # fmt: skip
    assert f"init     {trained / 'bf16'}: bf16, step 4 -> delayed" in out
    old, new = (train.read_checkpoint(trained / name) for name in ("bf16", "delayed"))
    for name, t in old["model"].items():
        assert torch.allclose(new["model"][name], t, atol=1e-6), name
    assert new["step"] == 3 and new["config"]["n_embd"] == 32  # its own steps, the same shape
    again = lines(capsys, "--resume", trained / "delayed", "--steps", 5)
    assert any("steps 4 to 5" in line for line in again)


def test_arms_can_start_from_a_run(trained, capsys):
    lines(capsys, "--init-from", trained / "bf16", "--compare", "bf16", "current", "--steps", 2,
          "--out", trained)  # fmt: skip
    report = json.loads((trained / "compare" / "compare.json").read_text())
    first = json.loads((trained / "bf16" / "steps.jsonl").read_text().splitlines()[-1])["loss"]
    assert all(abs(a["losses"][0] - first) < 0.3 for a in report["arms"])  # not 5.5, a new model's


def test_evaluation_has_a_row_for_every_recipe_and_kind_of_scale(trained, capsys):
    out = lines(capsys, "--eval", "--init-from", trained / "bf16", "--eval-batches", 2)
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in out if line.startswith("| ")]
    kinds = [tuple(r[:2]) for r in rows[2:]]
    assert kinds == [("bf16", "-"), ("constant", "constant"), ("amax", "dynamic"),
                     ("amax", "static"), ("delayed", "static"), ("current", "dynamic"),
                     ("current", "static"), ("rowwise", "dynamic"), ("blockwise", "dynamic"),
                     ("mxfp8", "dynamic")]  # fmt: skip
    assert all(abs(float(r[4])) < 0.05 for r in rows[2:])
    assert f"{ENOUGH:.1%}" in out[-1]
    out = lines(capsys, "--eval", "--init-from", trained / "bf16", "--recipe", "mxfp8")
    assert sum(line.startswith("| ") for line in out) == 4
    out = lines(capsys, "--eval", "--init-from", trained / "bf16", "--recipe", "current",
                "--calibrate", 0)  # fmt: skip
    assert sum(line.startswith("| ") for line in out) == 4 and "static" not in "".join(out)


def test_evaluation_is_that_of_the_run(trained, capsys):
    report = json.loads((trained / "bf16" / "run.json").read_text())
    out = lines(capsys, "--eval", "--init-from", trained / "bf16", "--recipe", "bf16",
                "--eval-batches", 2)  # fmt: skip
    assert f"{report['val_loss']:.4f}" in "".join(out)


def test_a_sample_from_a_run_is_the_one_at_its_end_and_at_0_always_the_same(trained, capsys):
    flags = ["--init-from", trained / "bf16", "--tokens", 30]
    samples = [lines(capsys, *flags, "--sample", "def ", "--temperature", 0, "--seed", s)[-1]
               for s in (1, 2)]  # fmt: skip
    assert samples[0] == samples[1] and samples[0].startswith("sample   'def ")
    odd = [lines(capsys, *flags, "--sample", "def ", "--seed", s)[-1] for s in (1, 2)]
    assert odd[0] != odd[1]
    long = lines(capsys, *flags, "--sample", "x" * 100)[-1]  # longer than the block
    assert long.startswith("sample   '" + "x" * 100)
    assert lines(capsys, *flags, "--sample", "")[-1].startswith("sample   '\\n")


@pytest.mark.parametrize("flags, says", [
    (["--eval"], "give --init-from"),
    (["--init-from", "{out}/nothing"], "neither a run"),
    (["--init-from", "{run}", "--n-embd", "64"], "n_embd is 32 in"),
    (["--init-from", "{run}", "--family", "gpt2"], "family is llama in"),
    (["--init-from", "{run}", "--tokenizer", "gpt2x"], "unknown tokenizer"),
    (["--init-from", "{run}", "--sample", "x", "--steps", "3"], "nothing else"),
    (["--init-from", "{run}", "--resume", "{run}"], "choose one"),
    (["--init-from", "{run}", "--eval", "--compare", "bf16"], "choose one"),
    (["--init-from", "{run}", "--eval", "--calibrate", "-1"], "calibrate takes"),
    (["--init-from", "{run}", "--sample", "x", "--tokens", "0"], "tokens takes"),
    (["--init-from", "{run}", "--sample", "x", "--temperature", "nan"], "temperature takes"),
    (["--rope-scaling", "8/1/4"], "factor/low/high"),
    (["--size", "gpt-5"], "size 'gpt-5' is unknown"),
    (["--init-from", "{run}", "--size", "gpt-111m"], "its own size"),
])  # fmt: skip
def test_a_mistake_is_one_sentence(trained, flags, says, text):
    flags = [f.format(run=trained / "bf16", out=trained) for f in flags]
    data = ["--data", str(text.parent / "text.txt")] if "gpt2x" in flags else []
    with pytest.raises(UserError, match=says) as e:
        train.main([*flags, *data])
    assert "\n" not in str(e.value)


def test_an_unknown_run_is_a_sentence_and_exit_code_2(tmp_path):
    out = run("--init-from", tmp_path, "--sample", "x")
    assert out.returncode == 2 and out.stderr.count("\n") == 1


def test_longer_context_and_published_sizes_are_flags():
    known = train.SIZES["llama2-7b"]
    c = train.Config(**known | dict(rope_scaling="8/1/4/8192", rope_theta=5e5, n_layer=1, n_embd=64,
                                    n_head=2, n_kv_head=1, hidden=32))  # fmt: skip
    config = train.model_config(c, 256)
    assert config.rope_scaling == (8, 1, 4, 8192) and config.rope_theta == 5e5
    assert config.block_size == 4096
