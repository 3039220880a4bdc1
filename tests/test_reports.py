"""Reports from people who train in FP8: inputs that broke other trainers, and what is right.

`HELD_BY` names, for every report, the tests that hold its right value: some stand in this file
(`here::name`; the docstring begins with the report's number), most in the file of their subject.
"""

import ast
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train
from data import checkpoint
from data.prepare import Corpus
from fp8gpt import (
    E4M3,
    E5M2,
    GPT,
    RECIPES,
    FP8Adam,
    FP8Linear,
    GPTConfig,
    choose_backend,
    decode,
    dequantize,
    end_step,
    gemm_nt,
    health,
    quantize,
    quantize_operand,
    weights_cast,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy meets inf and NaN

TESTS = Path(__file__).resolve().parent
ALL, FP8 = list(RECIPES), [name for name in RECIPES if name != "bf16"]
NAN, INF = float("nan"), float("inf")
FP32_SUM = 1e-6  # relative: sums of up to 13,000 products in fp32, in another order
TILES = {"tensor": (None, None), "row": (1, None), "block": (1, 128), "square": (128, 128),
         "mx": (1, 32)}  # fmt: skip

KILLED = "test_survival.py::test_a_run_that_is_killed_and_resumed_has_the_bits_of_one_that_was_not"
HELD_BY = {
    "N01 overflow in an E4M3 cast": [
        "here::test_scaled_values_beyond_the_largest_number_become_it",
        "here::test_no_cast_is_left_to_torch_that_some_version_makes_differently",
        "test_formats.py::test_known_answers_of_e4m3",
        "test_kernels.py::test_codes_of_every_kind_of_number",
    ],
    "N02 overflow in an E5M2 cast": [
        "here::test_scaled_values_beyond_the_largest_number_become_it",
        "here::test_no_cast_is_left_to_torch_that_some_version_makes_differently",
        "here::test_a_gradient_ten_times_too_large_saturates_and_no_weight_becomes_infinite",
        "test_formats.py::test_known_answers_of_e5m2",
    ],
    "N03 a saturating cast hides inf and NaN": [
        "test_linear.py::test_a_non_finite_activation_or_gradient_is_seen",
        "test_scaling.py::test_a_non_finite_number_makes_its_tile_nan_in_both_copies",
        "test_kernels.py::test_a_known_amax_scales_and_the_own_one_comes_back",
    ],
    "N04 zeros": [
        "here::test_one_operand_of_zeros_gives_zeros_and_finite_gradients",
        "here::test_zeros_have_a_usable_scale_on_kernels_too",
        "test_scaling.py::test_zeros_stay_zeros",
        "test_linear.py::test_zero_operands_give_zero",
    ],
    "N07 NaN and inf in the amax history": [
        "test_linear.py::test_non_finite_and_zero_amax_never_enter_the_history",
        "test_train.py::test_a_skipped_step_leaves_no_trace",
    ],
    "N08 a scale that is rounded down clips": [
        "here::test_known_largest_numbers_of_blocks_that_are_rounded_up",
        "test_scaling.py::test_known_mx_blocks",
        "test_scaling.py::test_round_up_never_clips_and_floor_does",
    ],
    "N10 torch rounds to E8M0 to the nearest": [
        "here::test_no_cast_is_left_to_torch_that_some_version_makes_differently",
        "here::test_e8m0_scales_round_up_and_know_zero_inf_and_nan",
        "test_scaling.py::test_known_e8m0_bytes",
    ],
    "N11 the smallest E8M0 scales and flushed subnormal numbers": [
        "here::test_a_block_of_1e37th_survives_flushed_denormals_on_kernels",
        "test_scaling.py::test_tiny_blocks_survive_flushed_denormals",
        "test_kernels.py::test_scales_of_the_ends_of_the_range_decode",
    ],
    "N12 NaN is lost in the maximum of a block": [
        "here::test_a_nan_in_a_block_of_ones_makes_all_of_that_block_nan_both_ways",
        "test_scaling.py::test_a_non_finite_number_makes_its_tile_nan_in_both_copies",
        "test_kernels.py::test_casts_equal_the_lesson_bit_for_bit",
    ],
    "N16 double quantisation of the transposed operand": [
        "here::test_dw_reads_an_x_that_was_rounded_once",
        "test_scaling.py::test_the_transposed_copy_is_cut_from_the_original_and_not_from_the_first"
        "_copy",
        "test_linear.py::test_y_dx_dw_and_db_equal_float64",
    ],
    "N19 a delayed scale lags": [
        "here::test_a_margin_is_headroom_for_a_jump_and_clipping_is_counted",
        "test_linear.py::test_a_jump_saturates_for_exactly_one_step",
        "test_scaling.py::test_history_and_constant_replace_the_amax",
    ],
    "S01 sizes that are no multiples of 16": [
        "here::test_a_layer_from_767_to_3072_features_equals_float64",
        "here::test_models_of_odd_widths_learn",
        "test_linear.py::test_y_dx_dw_and_db_equal_float64",
        "test_scaling.py::test_an_edge_equals_the_same_operand_padded_with_zeros",
        "test_model.py::test_impossible_configurations_are_refused_with_a_sentence",
    ],
    "S02 a vocabulary of 50257": [
        "here::test_padded_ids_do_not_set_the_scale_of_an_fp8_head",
        "test_model.py::test_padded_ids_have_no_probability_no_gradient_and_are_never_sampled",
        "test_train.py::test_a_run_prints_and_writes_what_it_promises",  # the list of layers
    ],
    "S05 a K that fills no tile": [
        "here::test_kernels_stop_at_k",
        "here::test_kernels_sum_twelve_thousand_products_as_in_float64",
        "here::test_twelve_thousand_products_sum_as_in_float64",
        "test_kernels.py::test_gemms_equal_the_lesson",
    ],
    "S06 views": [
        "here::test_kernels_cast_a_view_like_its_contiguous_copy",
        "test_scaling.py::test_views_quantise_like_their_contiguous_copies",
        "test_linear.py::test_inputs_of_any_rank_and_strides",
    ],
    "S09 empty tensors": [
        "here::test_an_empty_batch_between_others_changes_no_history",
        "test_linear.py::test_no_tokens_are_no_trouble",
        "test_model.py::test_too_many_tokens_and_none_are_refused",
    ],
    "T01 activation checkpointing": [
        "here::test_five_steps_with_recomputed_blocks_are_the_same_and_fill_five_entries",
        "test_model.py::test_activation_checkpointing_changes_no_bit",
        "test_linear.py::test_recomputed_activations_change_no_bit_and_no_history",
    ],
    "T04 a stale cast of the weights": [
        "here::test_every_change_of_the_weights_is_seen",
        "test_linear.py::test_casting_weights_once_changes_no_bit_and_leaves_nothing_behind",
    ],
    "T06 evaluation touches the scales": [
        "here::test_evaluation_on_numbers_100_times_larger_changes_no_buffer",
        "test_linear.py::test_a_skipped_step_and_evaluation_leave_the_history_alone",
    ],
    "T07 resume is not exact": ["test_train.py::test_resume_is_exact", KILLED],
    "T09 autocast": [
        "here::test_a_model_with_biases_and_bf16_layers_trains_under_autocast",
        "test_linear.py::test_autocast_gives_bf16_out_and_fp32_gradients",
    ],
    "T12 tied embeddings": [
        "here::test_the_gradient_of_a_tied_head_is_the_sum_of_both_uses",
        "here::test_a_tied_head_is_still_one_parameter_after_three_steps_and_a_load",
        "test_model.py::test_a_tied_head_is_one_parameter_with_both_gradients_decayed_once",
    ],
    "T13 a bad batch": [
        "here::test_a_model_that_broke_does_not_replace_a_good_checkpoint",
        "test_train.py::test_a_skipped_step_leaves_no_trace",
        "test_train.py::test_a_gradient_that_overflows_is_skipped_and_then_stops_the_run",
    ],
    "T15 flags that are ignored": [
        "here::test_flags_of_other_trainers_are_refused",
        "here::test_the_start_up_lines_say_what_is_in_use",
        "here::test_a_flag_that_this_family_or_command_does_not_read_is_named",
        "test_train.py::test_a_mistake_is_explained_in_one_sentence",
        "test_train.py::test_a_flag_that_nothing_reads_is_named",
    ],
    "O02 a moving average stalls": [
        "here::test_known_stalls_of_averages_rounded_to_nearest",
        "test_adam.py::test_round_to_nearest_stalls_a_slow_average_"
        "and_stochastic_rounding_does_not",
        "test_adam.py::test_500_steps_end_near_adamw",
    ],
    "O05 the optimizer's state in a checkpoint": [
        "here::test_fp8_moments_do_not_resume_as_fp32_ones",
        "test_adam.py::test_state_dict_round_trip_is_bit_for_bit_and_so_is_the_next_step",
        "test_adam.py::test_the_state_of_another_optimizer_format_or_block_is_refused_"
        "and_nothing_is"
        "_loaded",
    ],
    "K01 the interpreter's FP8 cast": [
        "here::test_the_interpreter_quantises_reported_numbers_like_the_lesson",
        "test_kernels.py::test_codes_of_every_kind_of_number",
        "test_kernels.py::test_casts_equal_the_lesson_bit_for_bit",
    ],
    "K02 offsets of more than 32 bits": [
        "here::test_a_row_that_lies_2_to_the_31_elements_further_is_read",
        # A tensor of 50304 x 65536 itself needs a GPU: the interpreter would take hours.
    ],
    "U01 no GPU, no driver, no Triton": [
        "here::test_the_default_device_without_a_gpu_is_the_cpu_and_one_line_says_so",
        "test_train.py::test_an_nvidia_gpu_that_torch_cannot_use_is_named",
        "test_train.py::test_a_mistake_is_explained_in_one_sentence",  # --device cuda, --device mps
        "test_train.py::test_it_runs_without_triton_and_without_a_network",
        "test_model.py::test_every_recipe_learns_in_both_families",
    ],
    "U03 offline": [
        "here::test_bytes_need_no_tiktoken_and_gpt2_says_what_to_install",
        "test_train.py::test_it_runs_without_triton_and_without_a_network",
        "test_data.py::test_gpt2_tokens_offline_are_an_explained_error",
        "test_data.py::test_bad_directories_are_refused_with_a_sentence",
    ],
}  # fmt: skip


def functions(path):
    return {n.name: n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}


def test_every_report_is_held_by_tests_that_exist():
    here, reports = functions(Path(__file__)), {}
    files = {path.name: functions(path) for path in TESTS.glob("test_*.py")} | {"here": here}
    for report, held_by in HELD_BY.items():
        for test in held_by:
            file, name = test.split("::")
            assert name in files[file], f"{report}: there is no {test}"
            if file == "here":
                reports.setdefault(name, set()).add(report.split()[0])
        assert held_by, report
    for name, node in here.items():  # and what stands here says for which report
        if name in reports:
            numbers = ast.get_docstring(node).split(":")[0]
            assert set(numbers.split(", ")) == reports[name], name
    unlisted = {n for n in here if n.startswith("test_")} - reports.keys()
    assert unlisted == {"test_every_report_is_held_by_tests_that_exist"}


@pytest.fixture
def kernels():
    pytest.importorskip("triton")
    import kernels

    return kernels


def codes(q):
    return q.contiguous().view(torch.uint8)


def exact(a8, b8):
    """A . B^T in float64: of bare codes where the scales leave the sum, else of what they mean."""
    if a8.tile[1] is None and b8.tile[1] is None:
        return (a8.q.double() @ b8.q.double().t()) * a8.s.double() * b8.s.double().t()
    return dequantize(a8).double() @ dequantize(b8).double().t()


def error(y, expected):
    return ((y.double() - expected.double()).norm() / expected.double().norm()).item()


def tiny(**changes):
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, block_size=16, n_layer=2, n_head=2, n_embd=32)
    return GPT(GPTConfig(**sizes | changes))


def tokens(seed=0, vocab_size=64):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (2, 4, 16), generator=g).unbind()


@pytest.fixture(scope="session")
def words(tmp_path_factory):
    """A prepared directory."""
    root = tmp_path_factory.mktemp("words")
    for split, n in (("train", 2000), ("val", 200)):
        (np.arange(n) ** 2 % 61).astype(np.uint16).tofile(root / f"{split}.bin")
    meta = dict(name="words", tokenizer="bytes", vocab_size=256)
    (root / "meta.json").write_text(json.dumps(meta))
    return root


SMALL = dict(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=4, eval_batches=1, warmup=1)
FLAGS = [part for n, v in SMALL.items() for part in ("--" + n.replace("_", "-"), str(v))]


def arm(words, **changes):
    c = replace(train.Config(data=str(words), steps=20), **SMALL | changes)
    corpus = Corpus(c.data, c.tokenizer, c.block_size, say=lambda line: None)
    return train.Arm(c, corpus, torch.device("cpu"))


# Formats and scales ------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("by", ["torch", "triton"])
def test_scaled_values_beyond_the_largest_number_become_it(by, fmt, kernels):
    """N01, N02: with a forced scale of 1, on both paths, also rounded stochastically."""
    x = torch.tensor([[448, 464, 465, 480, 1e4, -1e4, 57344, 61439, 61440, 1e6, -1e6, 3e38]])
    wanted = x.clamp(-448, 448) if fmt is E4M3 else x.clone()
    if fmt is E5M2:  # half a step is 32 near 464, and 1024 near 1e4
        wanted[0, :6] = torch.tensor([448, 448, 448, 512, 10240, -10240])
        wanted[0, 6:] = torch.tensor([57344, 57344, 57344, 57344, -57344, 57344])
    if by == "triton":
        (q, s), _, _ = kernels.cast(x, fmt.dtype, (None, None), known=torch.tensor(fmt.max))
        assert s.item() == 1 and q.float().equal(wanted)
        return
    x8 = quantize(x, fmt, amax=fmt.max)
    assert x8.s.item() == 1 and dequantize(x8).equal(wanted)
    y = decode(quantize(x, fmt, amax=fmt.max, stochastic=True).q)
    assert y.abs().max() == fmt.max and y.isfinite().all()


class Conversions(TorchDispatchMode):
    """Notes the largest number that each conversion to 8 bits inside is given, by dtype."""

    def __init__(self):
        super().__init__()
        self.largest = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            given = args[-1]
            if out.dtype.is_floating_point and out.dtype.itemsize < given.dtype.itemsize == 4:
                largest = given.abs().nan_to_num(0, posinf=INF).max().item()
                self.largest[out.dtype] = max(self.largest.get(out.dtype, 0), largest)
        return out


@pytest.mark.parametrize("recipe", FP8)
def test_no_cast_is_left_to_torch_that_some_version_makes_differently(recipe):
    """N01, N02, N10: versions of torch differ beyond the largest number, so none gets there; and
    E8M0, which torch rounds to the nearest, is never asked for."""
    layer = FP8Linear(64, 64, recipe=recipe)
    with Conversions() as conversions:
        for size in (1, 1e6, INF):  # the second is beyond a history and a constant bias
            x, g = torch.ones(2, 64, 64).unbind()
            x[3, 5] = g[5, 3] = size
            layer(x.requires_grad_()).backward(g)
            end_step(layer)
    limits = {E4M3.dtype: E4M3.max, E5M2.dtype: E5M2.max}
    assert conversions.largest and conversions.largest.keys() <= limits.keys()
    assert all(largest <= limits[dtype] for dtype, largest in conversions.largest.items())


def test_a_gradient_ten_times_too_large_saturates_and_no_weight_becomes_infinite():
    """N02: under delayed scaling the outlier counts as the largest that the history knows."""
    layer, x = FP8Linear(48, 32, False, "delayed"), torch.randn(16, 48)
    g = torch.randn(16, 32).clamp(-1, 1)
    g[0, 0] = 1
    grads = []
    for outlier in (1, 1, 10, 1e30):  # the first step fills the history
        layer.zero_grad()
        g[0, 0] = outlier
        layer(x.requires_grad_()).backward(g)
        grads.append(layer.weight.grad.clone())
        end_step(layer, keep=outlier == 1)
    assert all(torch.equal(grad, grads[1]) for grad in grads[2:])
    FP8Adam(layer.parameters()).step()
    assert layer.weight.isfinite().all()


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("zero", ["x", "w", "g"])
def test_one_operand_of_zeros_gives_zeros_and_finite_gradients(zero, recipe):
    """N04: in the first step, and in the second, when delayed scaling has a history."""
    layer = FP8Linear(64, 48, False, recipe)
    for _ in range(2):
        x, g = torch.randn(32, 64), torch.randn(32, 48) * 1e-3
        if zero == "w":
            layer.weight.data.zero_()
        else:
            (x if zero == "x" else g).zero_()
        layer.zero_grad()
        y = layer(x.requires_grad_())
        y.backward(g)
        end_step(layer)
        results = dict(y=y, dx=x.grad, dw=layer.weight.grad)
        for name in {"x": ("y", "dw"), "w": ("y", "dx"), "g": ("dx", "dw")}[zero]:
            assert not results.pop(name).any()
        (left,) = results.values()
        assert left.isfinite().all() and left.any()


@pytest.mark.parametrize("tile", TILES)
def test_zeros_have_a_usable_scale_on_kernels_too(tile, kernels):
    """N04: finite and positive; in MX any byte but 255."""
    first, second, _ = kernels.cast(torch.zeros(64, 128), E4M3.dtype, TILES[tile], "pow2")
    for q, s in (first, second):
        assert not codes(q).any() and bool((s.float().isfinite() & (s.float() > 0)).all())
        assert tile != "mx" or s.view(torch.uint8).max() < 255


@pytest.mark.parametrize(
    "top, byte, after",
    [(500, 128, 512), (449, 128, 448), (511, 128, 512), (150, 126, 144), (448, 127, 448)],
)
def test_known_largest_numbers_of_blocks_that_are_rounded_up(top, byte, after, kernels):
    """N08: the scale is 2^ceil(log2(amax / 448)); OCP's "ceil" would give 150 a byte of 127."""
    x = torch.ones(1, 32)
    x[0, 7] = top
    x8 = quantize(x, E4M3, (1, 32), "pow2")
    assert x8.s.item() == 2.0 ** (byte - 127) and dequantize(x8)[0, 7] == after
    (q, s), _, _ = kernels.cast(x, E4M3.dtype, (1, 32), "pow2")
    assert s.view(torch.uint8).item() == byte and torch.equal(codes(q), codes(x8.q))


def test_e8m0_scales_round_up_and_know_zero_inf_and_nan(kernels):
    """N10: 1.4 becomes 2, where torch's cast says 1; 0 becomes 1, so that 1 / s exists."""
    sizes = [1.0, 1.4, 1.5, 1.75, 0, INF, NAN, -1]
    x = torch.zeros(8, 32)
    x[:, 3] = torch.tensor(sizes) * 448
    s = quantize(x, E4M3, (1, 32), "pow2").s.flatten()
    assert s.nan_to_num(255).tolist() == [1, 2, 2, 2, 1, 255, 255, 1]
    (_, s), _, _ = kernels.cast(x, E4M3.dtype, (1, 32), "pow2")
    assert s.view(torch.uint8).flatten().tolist() == [127, 128, 128, 128, 127, 255, 255, 127]


@pytest.mark.parametrize("flush", [False, True])
def test_a_block_of_1e37th_survives_flushed_denormals_on_kernels(flush, kernels):
    """N11: 1e-37 / 448 has no E8M0 scale that is a normal number; 2^-126 stands for it."""
    torch.set_flush_denormal(flush)
    try:
        x = torch.full((32, 32), 1e-37)
        for q, s in kernels.cast(x, E4M3.dtype, (1, 32), "pow2")[:2]:
            assert (s.view(torch.uint8) == 1).all()
            y = q.float() * 2.0**-126  # 8.5 is between 8 and 9
            assert bool((y / 1e-37 - 1).abs().max() < 2**-4)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("at", [0, 1, 31])
def test_a_nan_in_a_block_of_ones_makes_all_of_that_block_nan_both_ways(at, kernels):
    """N12: along rows and along columns, with the byte 255, and no other block."""
    x = torch.ones(32, 96, dtype=torch.bfloat16)
    x[at, 32 + at] = NAN
    pairs = zip(quantize_operand(x, "x", RECIPES["mxfp8"]),
                kernels.cast(x, E4M3.dtype, (1, 32), "pow2")[:2])  # fmt: skip
    rows = torch.zeros(32, 96, dtype=torch.bool)
    rows[at, 32:64] = True
    columns = torch.zeros(96, 32, dtype=torch.bool)
    columns[32 + at] = True
    for (x8, (q, s)), lost in zip(pairs, (rows, columns)):
        assert torch.equal(dequantize(x8).isnan(), lost)
        assert torch.equal(s.view(torch.uint8) == 255, x8.s.isnan())
        assert torch.equal(codes(q)[~lost], codes(x8.q)[~lost])


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_dw_reads_an_x_that_was_rounded_once(recipe):
    """N16: dw is made of the copy that is cut out of x, and not of a copy of a copy."""
    size = torch.logspace(-3, 3, 64)[torch.randperm(64), None]
    x, g = torch.randn(64, 96) * size, torch.randn(64, 32) / size
    layer = FP8Linear(96, 32, False, recipe)
    layer(x).backward(g)

    def cut(x, operand):  # tiles along the tokens, which wgrad contracts
        return quantize_operand(x.t(), operand, RECIPES[recipe], copies="first")[0]

    x8, _ = quantize_operand(x, "x", RECIPES[recipe])
    once, twice = (gemm_nt(cut(g, "g"), cut(v, "x")) for v in (x, dequantize(x8)))
    assert error(layer.weight.grad, once) < FP32_SUM < 1e-4 < error(layer.weight.grad, twice)


def test_a_margin_is_headroom_for_a_jump_and_clipping_is_counted():
    """N19: the history says 1, and 2 comes; a margin of 1 is made for that, and not for 4."""
    x = torch.tensor([[2.0, 1.0, 0.5]])
    for margin, jump, after, clip in ((0, 2, 1, 1 / 3), (1, 2, 2, 0), (1, 4, 2, 1 / 3)):
        x[0, 0] = jump
        recipe = replace(RECIPES["delayed"], margin=(margin, 0, 0))
        x8, _ = quantize_operand(x, "x", recipe, torch.tensor(1.0))
        assert dequantize(x8).tolist() == [[after, 1, 0.5]]
        assert health(x, x8)["clip"] == pytest.approx(clip)


# Shapes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ALL)
def test_a_layer_from_767_to_3072_features_equals_float64(recipe):
    """S01"""
    layer = FP8Linear(767, 3072, False, recipe)
    x, g = torch.randn(3, 767, requires_grad=True), torch.randn(3, 3072) * 1e-4
    y = layer(x)
    y.backward(g)
    operands = dict(x=x.detach(), w=layer.weight.detach(), g=g)
    (x8, x8_t), (w8, w8_t), (g8, g8_t) = (
        quantize_operand(v, k, RECIPES[recipe]) for k, v in operands.items()
    )
    assert error(y, exact(x8, w8)) < FP32_SUM and error(x.grad, exact(g8, w8_t)) < FP32_SUM
    assert error(layer.weight.grad, exact(g8_t, x8_t)) < FP32_SUM


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize(
    "shape",
    [dict(n_embd=50, n_head=5, n_kv_head=1, hidden=33, vocab_size=61),
     dict(n_embd=100, n_head=4, family="gpt2")],
    ids=str,
)  # fmt: skip
def test_models_of_odd_widths_learn(shape, recipe):
    """S01: width 50 with heads of 10, width 100 with heads of 25, and an MLP of 33."""
    model, losses = tiny(n_layer=1, recipe=recipe, head="fp8", **shape), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(3):
        loss = model(*tokens(vocab_size=model.config.vocab_size))[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end_step(model)
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("recipe", ["current", "rowwise", "blockwise", "mxfp8"])
def test_padded_ids_do_not_set_the_scale_of_an_fp8_head(recipe):
    """S02: 65 ids are padded to 128, and share tiles with those. Were their weights 0, not a bit
    would change."""
    model, results = tiny(vocab_size=65, n_layer=1, head="fp8", recipe=recipe), []
    for _ in range(2):
        model.zero_grad()
        loss = model(*tokens(vocab_size=65))[1]
        loss.backward()
        results.append([loss, *(p.grad.clone() for p in model.parameters())])
        model.lm_head.weight.data[65:] = 0
    assert all(map(torch.equal, *results))


TAILS = [(3, 17, 1), (3, 1, 31), (1, 17, 33), (8, 1, 127), (1, 1, 129), (8, 17, 160)]  # M, N, K
LONG = (8, 17, 12800)


def among_nan(x, pitch=None):
    """The same matrix, as a part of a larger one that is NaN all around."""
    R, C = x.shape
    around = torch.full((R + 2, pitch or C + 7), NAN).to(x.dtype)
    start = 0 if pitch else 3
    return around[1:-1, start : C + start].copy_(x)


@pytest.mark.parametrize("tile", ["tensor", "block", "square", "mx"])
def test_kernels_stop_at_k(tile, kernels):
    """S05: beyond K lie NaN, in what is cast and in the codes; nobody reads them."""
    for M, N, K in TAILS:
        made, expected = [], []
        for rows, (r, c) in ((M, TILES["block" if tile == "square" else tile]), (N, TILES[tile])):
            x = among_nan(torch.randn(rows, K))
            (q, s), _, _ = kernels.cast(x, E4M3.dtype, (r, c), "pow2", copies="first")
            expected.append(quantize(x, E4M3, (r, c), "pow2"))
            assert s.shape[1] == -(-K // (c or K)) and torch.equal(s.float(), expected[-1].s)
            assert torch.equal(codes(q), codes(expected[-1].q))
            made += [among_nan(q, q.stride(0)), s]
        assert error(kernels.gemm_nt(*made), exact(*expected)) < FP32_SUM


def test_kernels_sum_twelve_thousand_products_as_in_float64(kernels):
    """S05: K = 12800 is 100 groups of scales."""
    M, N, K = LONG
    a8, b8 = (quantize(torch.randn(rows, K), E4M3, (1, 128), "pow2") for rows in (M, N))
    assert error(kernels.gemm_nt(a8.q, a8.s, b8.q, b8.s), exact(a8, b8)) < FP32_SUM


@pytest.mark.parametrize("tile", TILES)
def test_twelve_thousand_products_sum_as_in_float64(tile):
    """S05: K = 12800 on the path without kernels."""
    M, N, K = LONG
    a8 = quantize(torch.randn(M, K), E4M3, TILES["block" if tile == "square" else tile], "pow2")
    b8 = quantize(torch.randn(N, K), E4M3, TILES[tile], "pow2")
    assert error(gemm_nt(a8, b8), exact(a8, b8)) < FP32_SUM


@pytest.mark.parametrize("tile", TILES)
def test_kernels_cast_a_view_like_its_contiguous_copy(tile, kernels):
    """S06: codes, scales and shapes."""
    base, fused = torch.randn(40, 60), torch.randn(20, 3 * 48)
    views = [base.t(), base[:, ::2], base[1:2].expand(40, 60), fused[:, 48:96]]
    views += [base.flatten()[1 : 1 + 36 * 50].view(36, 50)]
    for view in views:
        plain = view.clone(memory_format=torch.contiguous_format)
        (q, s), (q_t, s_t), _ = kernels.cast(view, E4M3.dtype, TILES[tile], "pow2")
        for ours, scale, x in ((q, s, plain), (q_t, s_t, plain.t().contiguous())):
            x8 = quantize(x, E4M3, TILES[tile], "pow2")
            assert torch.equal(codes(ours), codes(x8.q)) and torch.equal(scale.float(), x8.s)


def test_an_empty_batch_between_others_changes_no_history():
    """S09: alone in a step it leaves no entry, and beside others it changes none."""
    layer, histories = FP8Linear(64, 32, recipe="delayed"), []
    for sizes in ((4, 0), (0,), (0, 4)):
        for n in sizes:
            layer(torch.ones(n, 64, requires_grad=True)).sum().backward()
        end_step(layer)
        histories.append(layer.amax_history.clone())
    assert torch.equal(histories[0], histories[1]) and (histories[0][0] > 0).all()
    assert torch.equal(histories[2][0], histories[2][1]) and not histories[2][2:].any()
    with weights_cast(layer):
        assert layer(torch.empty(2, 0, 64)).shape == (2, 0, 32)


# Training ----------------------------------------------------------------------------------------


def test_five_steps_with_recomputed_blocks_are_the_same_and_fill_five_entries(words):
    """T01: two micro-batches each, so that their cast weights are in use as well."""
    results = []
    for again in (False, True):
        a = arm(words, recipe="delayed", checkpoint=again, accum=2)
        losses = [a.train_step() for _ in range(5)]
        histories = [b for n, b in a.model.named_buffers() if n.endswith("amax_history")]
        assert all((h[:5] > 0).all() and not h[5:].any() for h in histories)
        results.append([torch.tensor(losses), *histories, *a.model.parameters()])
    assert len(results[0]) > 10 and all(map(torch.equal, *results))


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "mxfp8"])
def test_every_change_of_the_weights_is_seen(recipe):
    """T04: after a step, p.data.mul_ and load_state_dict a model that has cast its weights before
    is a fresh one with these weights; and dw is the sum over the micro-batches."""
    model, other = tiny(recipe=recipe, n_layer=1), tiny(recipe=recipe, n_layer=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    other.load_state_dict({k: v + 0.01 for k, v in model.state_dict().items()})
    changes = [lambda: None, optimizer.step, lambda: [p.data.mul_(2) for p in model.parameters()],
               lambda: model.load_state_dict(other.state_dict())]  # fmt: skip

    def run(model, seeds):
        model.zero_grad()
        losses = [model(*tokens(seed))[1] for seed in seeds]
        sum(losses).backward()
        return torch.stack(losses).detach(), [p.grad.clone() for p in model.parameters()]

    for change in changes:
        change()
        with model.weights_cast():
            losses, grads = run(model, range(4))
        fresh = tiny(recipe=recipe, n_layer=1)
        fresh.load_state_dict(model.state_dict())
        theirs, their_grads = run(fresh, range(4))
        assert torch.equal(losses, theirs) and all(map(torch.equal, grads, their_grads))
        end_step(model)
    for grad, *four in zip(grads, *(run(fresh, [seed])[1] for seed in range(4))):
        torch.testing.assert_close(grad, sum(four), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("recipe", ["delayed", "constant", "mxfp8"])
@pytest.mark.parametrize("training", [False, True])
def test_evaluation_on_numbers_100_times_larger_changes_no_buffer(training, recipe, words):
    """T06: in eval() or in train(), under no_grad a history is read and nothing is recorded."""
    a = arm(words, recipe=recipe, smooth="channel")
    for _ in range(10):
        a.train_step()
    before = {n: b.clone() for n, b in a.model.named_buffers()}
    a.model.train(training)
    for block in a.model.blocks:
        block.register_forward_pre_hook(lambda m, args: (100 * args[0], *args[1:]))
    with torch.no_grad():
        assert a.model(*a.batch("val", 0))[1].isfinite()
    end_step(a.model)
    assert all(torch.equal(b, before[n]) for n, b in a.model.named_buffers())


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_with_biases_and_bf16_layers_trains_under_autocast(family, recipe):
    """T09: backward stands outside. The layers give BF16, the logits are fp32 by design."""
    smooth = "token" if family == "llama" else None
    model = tiny(family=family, recipe=recipe, bf16_first=1, w3="bf16", smooth=smooth)
    dtypes = set()
    for m in model.modules():
        if isinstance(m, FP8Linear):
            m.register_forward_hook(lambda m, args, y: dtypes.add(y.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(*tokens())
    loss.backward()
    assert dtypes == {torch.bfloat16} and logits.dtype is torch.float32
    assert all(p.grad.dtype is p.dtype and p.grad.isfinite().all() for p in model.parameters())


def test_the_gradient_of_a_tied_head_is_the_sum_of_both_uses():
    """T12: beside a model whose head is a copy of the table."""
    tied = tiny(family="gpt2", head="fp8", recipe="current")
    split = tiny(family="gpt2", head="fp8", recipe="current")
    split.lm_head.weight = torch.nn.Parameter(split.wte.weight.detach().clone())
    losses = [m(*tokens())[1] for m in (tied, split)]
    sum(losses).backward()
    assert torch.equal(*losses)
    assert torch.equal(tied.wte.weight.grad, split.wte.weight.grad + split.lm_head.weight.grad)
    assert split.wte.weight.grad.any() and split.lm_head.weight.grad.any()


def test_a_tied_head_is_still_one_parameter_after_three_steps_and_a_load(words, tmp_path):
    """T12: in the model and in its checkpoint."""
    kind = dict(family="gpt2", head="fp8", recipe="current")
    a, b = arm(words, **kind), arm(words, **kind)
    for _ in range(3):
        a.train_step()
    a.save(tmp_path / "ckpt.pt")
    b.restore(train.load_checkpoint(tmp_path)[0])
    for m in (a.model, b.model):
        assert m.lm_head.weight is m.wte.weight
        tables = [p for p in m.parameters() if p.shape == m.wte.weight.shape]
        assert len(tables) == 1 and m.num_params() == a.model.num_params()
    assert torch.equal(a.model.wte.weight, b.model.wte.weight)
    assert a.train_step() == b.train_step()


def test_a_model_that_broke_does_not_replace_a_good_checkpoint(words, tmp_path, monkeypatch):
    """T13: the loss and the gradient of a step may be finite, and its weights not."""
    a = arm(words, recipe="current", steps=4, eval_every=2)
    step = a.optimizer.step

    def breaking():
        step()
        if a.step == 3:
            a.model.blocks[0].attn.wo.weight.data[3, 5] = INF

    monkeypatch.setattr(a.optimizer, "step", breaking)
    with checkpoint.alone_in(tmp_path):
        rows, _ = train.fit(a, tmp_path, "current")
    assert rows[1]["val_loss"] < 6 and np.isnan(rows[3]["val_loss"])
    state = train.read_checkpoint(tmp_path)
    assert state["step"] == 2 and all(v.isfinite().all() for v in state["model"].values())


@pytest.mark.parametrize(
    "flags, says",
    [("--recipe rowwise --amax_history 16", "did you mean --amax-history-len?"),
     ("--recipe bf16 --fp8_adam", "unknown argument '--fp8-adam'")],
)  # fmt: skip
def test_flags_of_other_trainers_are_refused(flags, says, words):
    """T15"""
    with pytest.raises(train.UserError) as error:
        train.main(["--data", str(words), *flags.split()])
    assert says in str(error.value)


def test_the_start_up_lines_say_what_is_in_use(words, capsys):
    """T15: formats, tiles, where the scales come from, and the optimizer's formats."""
    train.announce(arm(words, recipe="blockwise", optimizer="fp8adam", v_fmt="E4M3"))
    said = capsys.readouterr().out
    assert "recipe   blockwise: x/w/g E4M3/E4M3/E4M3, tiles 1x128 128x128 1x128, amax now" in said
    assert "fp8adam, E4M3/E4M3 moments, fp32 weights" in said
    train.announce(arm(words, recipe="delayed", w3="bf16"))
    said = capsys.readouterr().out
    assert "x/w/g E4M3/E4M3/E5M2, tiles allxall allxall allxall, amax history, scales fp32" in said
    assert "linears  delayed: 0.attn.wqkv 0.attn.wo 0.mlp.w12\n" in said
    assert "linears  bf16: 0.mlp.w3 lm_head\n" in said
    assert "adamw, fp32 moments and weights" in said


UNREAD = [
    ("--family gpt2 --rope-theta 5000", "rope_theta"),
    ("--family gpt2 --rope-scaling 8/1/4/8192", "rope_scaling"),
    ("--tokenizer gpt2", "tokenizer"),  # the directory holds bytes
    ("--calibrate 3", "calibrate"),
    ("--compare bf16 --tokens 3", "tokens"),
    ("--compare bf16 --temperature 0.1", "temperature"),
]


@pytest.mark.parametrize("flags, name", UNREAD)
def test_a_flag_that_this_family_or_command_does_not_read_is_named(
    flags, name, words, tmp_path, capsys, monkeypatch
):
    """T15: by a warning or by a refusal."""
    argv = [*FLAGS, "--data", str(words), "--out", str(tmp_path), *flags.split()]
    monkeypatch.setattr(train, "fit", lambda *args: ([], False))  # what comes before is enough
    try:
        train.main(argv)
        said = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    except train.UserError as refusal:
        said = [str(refusal)]
    assert len(said) == 1 and name in said[0]


# The optimizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "moment, beta, start, target, steps, stalls_at",
    [("v", 0.95, 0, 0.25, 60, 0.143), ("m", 0.9, 0, 0.25, 60, 0.179),
     ("v", 0.999, 11 / 256 / 448, 0, 200, 11 / 256 / 448)],
)  # fmt: skip
def test_known_stalls_of_averages_rounded_to_nearest(moment, beta, start, target, steps, stalls_at):
    """O02: E4M3 beside an element that stands at 1. To nearest, an average stops where its change
    is half a step of the grid (1e-4, of which 11 / 256 / 448 is the code, never decays); rounded
    stochastically it is right in the mean."""
    reached = {}
    for stochastic in (False, True):
        p = torch.nn.Parameter(torch.zeros(400))
        betas = (beta, 0.999) if moment == "m" else (0.9, beta)
        optimizer = FP8Adam([p], betas=betas, v_fmt=E4M3, stochastic_rounding=stochastic)
        state = optimizer.state[p]
        state |= optimizer.blank(p)
        before = torch.full((1, 400), float(start))
        before[0, 0] = 1
        state[moment], state[moment + "_scale"] = quantize(before)[:2]
        p.grad = torch.full((400,), target if moment == "m" else target**0.5)
        p.grad[0] = 1
        for _ in range(steps):
            optimizer.step()
        reached[stochastic] = (decode(state[moment]) * state[moment + "_scale"])[0, 1:].clone()
        last = codes(state[moment]).clone()
        optimizer.step()
        if not stochastic:  # and it will never move again
            assert torch.equal(last, codes(state[moment]))
    assert reached[False].mean().item() == pytest.approx(stalls_at, rel=0.01)
    right = target + (start - target) * beta**steps
    assert reached[True].mean().item() == pytest.approx(right, rel=0.05)


@pytest.mark.parametrize("saved, given", [("fp8adam", "adamw"), ("adamw", "fp8adam")])
def test_fp8_moments_do_not_resume_as_fp32_ones(saved, given, words, tmp_path):
    """O05: nor the other way round; the moments of a checkpoint are not thrown away in silence."""
    a = arm(words, optimizer=saved)
    a.train_step()
    a.save(tmp_path / "ckpt.pt")
    with pytest.raises(train.UserError, match="that cannot change"):
        train.main(["--resume", str(tmp_path), "--optimizer", given])


# Kernels and bare machines -----------------------------------------------------------------------


@pytest.mark.parametrize("tile", TILES)
def test_the_interpreter_quantises_reported_numbers_like_the_lesson(tile, kernels):
    """K01: randn * 30 and 126.24, which the interpreter's own cast rounds wrongly."""
    x = torch.randn(33, 64) * 30
    x[5, 6] = 126.24
    (r, c), rounding = TILES[tile], "pow2" if tile != "tensor" else "fp32"
    expected = quantize(x, E4M3, (r, c), rounding), quantize(x, E4M3, (c, r), rounding).t()
    for (q, s), x8 in zip(kernels.cast(x, E4M3.dtype, (r, c), rounding), expected):
        assert torch.equal(codes(q), codes(x8.q)) and torch.equal(s.float(), x8.s)
    q = kernels.cast(torch.tensor([[126.24]]), E4M3.dtype, (None, None), known=torch.tensor(448.0))
    assert q[0][0].float().item() == 128  # the neighbours are 120 and 128


@pytest.mark.parametrize("tile", TILES)
def test_a_row_that_lies_2_to_the_31_elements_further_is_read(tile, kernels):
    """K02: of what is cast, and of codes; no memory is touched between the two rows."""
    x = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((2, 64), (2**31, 1))
    x.copy_(torch.randn(2, 64))
    (q, s), (q_t, s_t), _ = kernels.cast(x, E4M3.dtype, TILES[tile], "pow2")
    x8 = quantize(x.contiguous(), E4M3, TILES[tile], "pow2")
    assert torch.equal(codes(q), codes(x8.q)) and torch.equal(s.float(), x8.s)
    x8 = quantize(x.t().contiguous(), E4M3, TILES[tile], "pow2")
    assert torch.equal(codes(q_t), codes(x8.q)) and torch.equal(s_t.float(), x8.s)
    far = torch.empty(2**31 + 64, dtype=torch.uint8).as_strided((2, 64), (2**31, 1)).view(q.dtype)
    far.copy_(q)
    assert torch.equal(kernels.gemm_nt(far, s, q, s), kernels.gemm_nt(q, s, q, s))


def test_the_default_device_without_a_gpu_is_the_cpu_and_one_line_says_so(monkeypatch):
    """U01: every recipe finds a place to run there; whoever asks for CUDA gets a sentence."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "triton", None)
    device, line = train.pick_device(train.Config().device)
    assert device.type == "cpu" and line.startswith("CPU, ") and "\n" not in line
    assert {choose_backend(r, device)[:2] for r in RECIPES.values()} == {("torch", "emulated")}
    with pytest.raises(train.UserError, match="use --device cpu") as error:
        train.pick_device("cuda")
    assert "\n" not in str(error.value)


def test_bytes_need_no_tiktoken_and_gpt2_says_what_to_install(words, tmp_path, monkeypatch):
    """U03: a corpus of bytes is prepared, read and written out with the standard library."""
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    path = TESTS.parent / "data" / "prepare.py"
    spec = importlib.util.spec_from_file_location("prepare_without_tiktoken", path)
    p = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(p)  # its imports are lazy
    text = "def naïve():\n\treturn '€'"
    (tmp_path / "text.txt").write_text(text * 100, "utf-8")
    meta = p.prepare("file", tmp_path / "text.txt", out=tmp_path / "text")
    assert meta["vocab_size"] == 256
    encoding = p.get_tokenizer("bytes")
    assert encoding.encode_ordinary(text) == list(text.encode())
    assert encoding.decode(encoding.encode_ordinary(text)) == text
    assert encoding.decode([0xFF, 0x41]) == "\ufffdA"
    with pytest.raises(p.UserError, match="pip install tiktoken"):
        p.get_tokenizer("gpt2")
