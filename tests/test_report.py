"""data/report.py: a monitored run is the run itself, and what the monitor says of it is true."""

import json
import math
import signal

import pytest
import torch
from test_train import TINY, arm, equal, state_of

import fp8gpt
import train
from data import report
from data.prepare import UserError
from fp8gpt import E4M3, FP8Linear, Quantized, SwiGLU


@pytest.fixture
def no_picture(monkeypatch):
    """-> the titles of the pictures that were not drawn, because that takes most of the time."""
    titles = []
    monkeypatch.setattr(report, "plot_monitor", lambda rows, title, path: titles.append(title))
    return titles


def fit(a, out):
    out.mkdir(exist_ok=True)
    (out / "steps.jsonl").touch()
    return train.fit(a, out, "run")


def rows_of(path):
    """The rows of monitor.jsonl; a bare NaN or Infinity is no JSON and is refused."""

    def refuse(token):
        raise AssertionError(f"{token} in {path}")

    return [json.loads(line, parse_constant=refuse) for line in path.open()]


def is_picture(path):
    return path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 10_000


# A run and its monitor ---------------------------------------------------------------------------

KINDS = [
    dict(recipe="delayed", amax_compute_algo="most_recent", loss_scale=8.0),
    dict(recipe="mxfp8", checkpoint=True, accum=2),
    dict(recipe="delayed", smooth="channel", optimizer="fp8adam", stochastic_rounding=True),
]


@pytest.mark.parametrize("kind", KINDS, ids=["delayed", "mxfp8", "smooth and stochastic rounding"])
def test_a_monitored_run_equals_the_unmonitored_one_bit_for_bit(kind, text, tmp_path, no_picture):
    ends = []
    for monitor in (0, 1):
        a = arm(text, steps=5, monitor=monitor, eval_every=3, **kind)
        rows, _ = fit(a, tmp_path / str(monitor))
        ends.append((state_of(a), [(r["loss"], r["grad_norm"]) for r in rows]))
    assert ends[0][1] == ends[1][1] and equal(ends[0][0], ends[1][0])
    assert len(rows_of(tmp_path / "1" / "monitor.jsonl")) == 6


def test_without_monitor_there_are_no_hooks_no_looks_and_no_files(text, tmp_path, monkeypatch):
    a = arm(text, steps=2)
    monkeypatch.setattr(report, "look", lambda *_: pytest.fail("looked"))
    step, hooks = a.train_step, []

    def spied():
        hooks.extend(h for m in a.model.modules() for h in m._forward_hooks)
        hooks.extend(a.optimizer._optimizer_step_pre_hooks)
        hooks.extend(a.optimizer._optimizer_step_post_hooks)
        return step()

    monkeypatch.setattr(a, "train_step", spied)
    fit(a, tmp_path)
    assert not hooks and not list(tmp_path.glob("monitor*"))


def test_a_monitored_run_writes_a_line_a_look_and_a_picture(text, tmp_path):
    fit(arm(text, steps=5, monitor=2, lr=1e-2), tmp_path)
    rows = rows_of(tmp_path / "monitor.jsonl")
    assert [r["step"] for r in rows] == [0, 2, 4] and is_picture(tmp_path / "monitor.png")
    for r in rows:
        assert len(r["operands"]) == 2 * 4 * 3 and {*r["blocks"]} == {
            "blocks.0.mlp",
            "blocks.1.mlp",
        }
        for seen in r["operands"].values():
            assert seen["exponent_min"] <= seen["exponent"] <= seen["exponent_max"]
            assert 20 < seen["sqnr"] < 45 and seen["clip"] == 0 and seen["peak"] > 1
        for seen in r["blocks"].values():
            assert 0 < seen["cos_rms"] < seen["cos_max"] < 1 < seen["kurtosis"]
    assert rows[0]["optimizer"] == dict(update_ratio=None, update_ratio_of=None)  # no step yet
    last = rows[2]["optimizer"]
    assert 1e-3 < last["update_ratio"] < 1 and last["update_ratio_of"].endswith(".weight")
    assert 0 < last["v_zero"] < 0.5 and last["v_floored"] == 0  # zero: bytes that were never seen


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bf16_and_a_model_without_swiglu_are_monitored_too(family, text, tmp_path):
    a = arm(text, monitor=2, recipe="bf16", family=family)
    with report.Monitor(a, tmp_path) as monitor:
        pass
    assert is_picture(tmp_path / "monitor.png")
    operands = monitor.rows[0]["operands"]
    assert len(operands) == (2 * 4 + 1) * 3 and min(o["sqnr"] for o in operands.values()) > 50
    assert {o["exponent"] for o in operands.values()} == {None}  # there are no scales
    assert len(monitor.rows[0]["blocks"]) == (2 if family == "llama" else 0)


def test_a_resumed_run_keeps_the_rows_up_to_its_checkpoint_and_a_fresh_one_none(
    text, tmp_path, no_picture
):
    fit(arm(text, steps=5, monitor=2), tmp_path)
    path = tmp_path / "monitor.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert [json.loads(line)["step"] for line in lines] == [0, 2, 4]
    later = lines[2].replace('"step": 4', '"step": 6')
    path.write_text("".join(lines) + later + later[:50])  # killed beyond the checkpoint, mid-line
    a = arm(text, steps=8, monitor=2)
    a.restore(train.load_checkpoint(tmp_path)[0])
    fit(a, tmp_path)
    assert [r["step"] for r in rows_of(path)] == [0, 2, 4, 6, 8]
    assert path.read_text().startswith("".join(lines)) and later not in path.read_text()
    fit(arm(text, steps=2, monitor=2), tmp_path)
    assert [r["step"] for r in rows_of(path)] == [0, 2]


def test_an_arm_of_a_comparison_can_be_monitored(text, tmp_path, no_picture, capsys):
    arms = ["bf16", "mxfp8,monitor=2"]
    flags = [*TINY, "--data", text, "--steps", 2, "--out", tmp_path, "--compare", *arms]
    train.main([*map(str, flags)])
    found = [p.parent.name for p in tmp_path.rglob("monitor.jsonl")]
    assert found == ["mxfp8,monitor=2-1337"] and "warning" not in capsys.readouterr().out


def test_ctrl_c_leaves_the_picture_and_so_does_a_run_that_breaks(
    text, tmp_path, no_picture, monkeypatch
):
    a = arm(text, steps=100, monitor=1)
    step = a.train_step

    def interrupted():
        if a.step == 2:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(a, "train_step", interrupted)
    assert fit(a, tmp_path / "ctrl-c")[1] and a.step == 3 and len(no_picture) == 1
    a = arm(text, recipe="current", loss_scale=3e38, steps=100, monitor=1)
    with pytest.raises(UserError, match="5 times in a row"):
        fit(a, tmp_path / "breaks")
    operands = rows_of(tmp_path / "breaks" / "monitor.jsonl")[0]["operands"]
    gradients = [seen for name, seen in operands.items() if name.endswith(".g")]
    assert len(no_picture) == 2 and any(seen["amax"] is None for seen in gradients)


@pytest.mark.parametrize("value, says", [("-1", "cannot be -1"), ("x", "a whole number")])
def test_a_wrong_interval_is_one_sentence(value, says, text):
    assert train.convert("monitor", "0") == 0  # off is a value, also in a checkpoint
    with pytest.raises(UserError, match=says):
        train.main(["--data", str(text), "--monitor", value])


# The numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=["delayed", "mxfp8", "smooth"])
def test_a_look_sees_what_the_next_step_casts(kind, text, monkeypatch):
    a, casts = arm(text, **kind), []
    quantize_operand = fp8gpt.quantize_operand

    def spy(x, operand, *args, **kwargs):
        x8, x8_t = quantize_operand(x, operand, *args, **kwargs)
        if x8 is not None:  # the copy for the first GEMM
            casts.append((operand, x.abs().max().item(), report.exponents(x8)["exponent"]))
        return x8, x8_t

    for _ in range(2):
        a.train_step()
    operands = report.look(a, "train", a.c.seed, a.step, 0)["operands"]
    looked = {(n[-1], seen["amax"], seen["exponent"]) for n, seen in operands.items()}
    monkeypatch.setattr(fp8gpt, "quantize_operand", spy)
    a.train_step()
    assert len(looked) > 16 and looked <= {*casts}


def test_exponents_are_those_of_the_tiles_that_hold_numbers():
    s = torch.tensor([[1.0, 0.25, 0.1, 2.0**-20, math.nan]])
    amax = torch.tensor([[0.0, 1.0, 1.0, 1.0, math.inf]])  # a tile of zeros has s = 1, says nothing
    x8 = Quantized(torch.zeros(1, 5), s, (1, 1), E4M3, amax)
    assert report.exponents(x8) == dict(exponent=-4, exponent_min=-20, exponent_max=-2)
    assert report.exponents(x8._replace(amax=0 * amax))["exponent"] is None
    assert report.exponents(x8._replace(amax=None))["exponent"] is None  # BF16


def test_the_numbers_of_a_swiglu_are_right_by_hand():
    m = SwiGLU(2, 2, fp8gpt.RECIPES["bf16"])
    up, gate = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[-2.0, 0.0], [1.0, 1.0]])
    m.w12.weight.data = torch.cat((up, gate))  # cosines -1 and sqrt(1/2)
    big = 100.0  # silu(100) = 100
    y = torch.tensor([[1.0, -3.0, big, big], [0.0, 0.0, 0.0, 0.0]])  # h: 100, -300; 0, 0
    got = report.swiglu_health(m, y)
    assert (got["amax"], got["channel"]) == (300, 1) and got["cos_max"] == pytest.approx(1)
    assert got["cos_rms"] == pytest.approx(math.sqrt(0.75))
    h = torch.tensor([100.0, -300.0, 0.0, 0.0]) + 50
    assert got["kurtosis"] == pytest.approx((h**4).mean().item() / (h**2).mean().item() ** 2)


def test_floored_and_zero_second_moments_are_counted_apart(text, tmp_path):
    a = arm(text, optimizer="fp8adam", monitor=1)
    a.train_step()
    states = [s["v"].view(torch.uint8).flatten() for s in a.optimizer.state.values()]
    for v in states:
        v.fill_(7)
    states[0][:3], states[0][3:8] = 0, 1
    monitor = report.Monitor(a, tmp_path)
    monitor.look()
    seen, n = monitor.rows[0]["optimizer"], a.model.num_params()
    assert seen["v_zero"] == 3 / n and seen["v_floored"] == 5 / n


def test_the_update_ratio_names_the_matrix_that_moved_most(text, tmp_path):
    a = arm(text, monitor=1)
    for group in a.optimizer.param_groups:
        group["weight_decay"] = 0.0
    with report.Monitor(a, tmp_path) as monitor:
        weight = a.model.blocks[1].attn.wo.weight
        weight.data /= 100  # Adam's steps do not depend on it
        before = weight.detach().clone()
        a.train_step()
        monitor.after_step()
    seen = monitor.rows[-1]["optimizer"]
    assert seen["update_ratio_of"] == "blocks.1.attn.wo.weight"
    moved = (weight - before).norm() / weight.norm()
    assert seen["update_ratio"] == pytest.approx(moved.item())
    assert not a.optimizer._optimizer_step_pre_hooks and not a.optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("smooth", [None, "channel"])
def test_an_exploding_layer_is_named_in_the_title_and_in_a_line(
    smooth, text, tmp_path, no_picture, capsys
):
    a = arm(text, monitor=1, smooth=smooth, n_layer=3)
    with report.Monitor(a, tmp_path) as monitor:
        assert not report.exploding(monitor.rows)
    assert not capsys.readouterr().out
    with report.Monitor(a, tmp_path) as monitor:
        a.model.blocks[1].mlp.w12.weight.data[5] *= 1000  # of w1
        monitor.look()
    name = "blocks.1.mlp" if smooth else "blocks.1.mlp.w3.x"  # smoothed, the operand is in order
    assert f"{name} explodes" in no_picture[1] and no_picture[1] in capsys.readouterr().out
    assert monitor.rows[-1]["blocks"]["blocks.1.mlp"]["channel"] == 5


def test_no_number_that_is_no_json_reaches_a_file():
    row = dict(a=math.nan, b=dict(c=math.inf, d=1.5), e="NaN", f=None, g=3)
    assert report.strict(row) == dict(a=None, b=dict(c=None, d=1.5), e="NaN", f=None, g=3)


# The picture -------------------------------------------------------------------------------------


def test_a_heat_map_puts_every_value_at_its_step_and_layer():
    plt = report.pyplot()
    figure, ax = plt.subplots()
    report.heat_map(figure, ax, [0, 10, 40], {"a": [1, 2, None], "b": [4, 5, 6]}, "title")
    mesh = ax.collections[0]
    assert mesh.get_array().reshape(2, 3).tolist() == [[1, 2, None], [4, 5, 6]]
    edges = mesh.get_coordinates()[0, :, 0].tolist()
    assert edges == [-5, 5, 25, 55] and ax.yaxis_inverted()
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "b"]
    plt.close(figure)


def test_of_two_hundred_layers_one_name_in_four_is_written():
    plt = report.pyplot()
    figure, ax = plt.subplots()
    report.heat_map(figure, ax, [3], {f"layer {i}": [i] for i in range(200)}, "title")
    assert [t.get_text() for t in ax.get_yticklabels()] == [f"layer {i}" for i in range(0, 200, 4)]
    assert ax.collections[0].get_coordinates()[0, :, 0].tolist() == [2.5, 3.5]
    plt.close(figure)


def test_a_look_leaves_no_hook_behind(text):
    a = arm(text)
    report.look(a, "val", 0, 0)
    layers = [m for m in a.model.modules() if isinstance(m, FP8Linear)]
    assert not any(m._forward_hooks for m in layers) and a.model.training
    assert all(p.grad is None for p in a.model.parameters())
