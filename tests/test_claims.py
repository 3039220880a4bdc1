"""Each claim of tests/claims at toy size: the sentences that must hold there."""

import importlib.util
import sys
from pathlib import Path

import pytest

CLAIMS = Path(__file__).resolve().parent / "claims"
MUST_HOLD = {
    "loss_parity": ["each recipe's mean gap is within twice the deviation of bf16 over seeds"],
    "two_regions": [
        "one scale for the tensor loses the small region",
        "tiles of 128 and of 32 that fit into a region keep it, and its share of the GEMM",
        "a scale for each row keeps rows apart, and loses what meets in one row",
        "a tile wider than a region fails as one scale does: 128 on stripes of 64, and 32 holds",
        "the error under one scale is the closed form's within 15 %",
    ],
    "delayed_or_current": [
        "the injected spikes leave bf16 as it was, to the last bit",
        "the most recent of 16 is a history of 1, to the last bit",
        "current loses the other tokens in a spike's step, delayed in the steps that remember it",
    ],
    "bias_over_time": [
        "amaxes measured before every step are those of the recipe, to the last bit",
        "biases of the first step clip what outgrows them: over 5 % of x",
    ],
    "constant_bias": [
        "FP8-AMAX keeps 99.5 % of BF16's accuracy, at every width",
        "inference: a bias of -12 or of 12 does not hold, at any width",
        "inference: one constant bias keeps it in an interval, at every width",
    ],
    "fine_tuning": [
        "bf16 labels over 95 % of the sentences rightly",
        "fine-tuned: FP8-AMAX (amax) keeps 99.5 % of bf16's accuracy, mean of seeds",
        "post-training: FP8-AMAX (amax) keeps 99.5 % of bf16's accuracy, mean of seeds",
        "cast to bf16, no label changes",
    ],
    "swiglu_outliers": [
        "R1: |cos(w1, w2)| rises with L2, from every start",
        "R2: with smooth=channel or w3=bf16 less than 1 %",
        "R3: bf16 does not notice the ramp, to the last bit",
        "R4: the outlier makes over half of w3's input zero, under 1 % with smooth=channel",
    ],
    "adam_formats": [
        "more of v becomes zero in E4M3 than in E5M2, in every pairing",
        "no rule: v in E4M3 makes updates of over 1000 learning rates",
        "the rule: no update is more than 3 times what exact moments allow",
    ],
    "memory_and_throughput": [
        "the formula gives every count to the byte",
        "FP8 keeps half of BF16's inputs of linears, and scales",
        "FP8 Adam keeps a quarter of AdamW's moments, and at most 2 % more for scales",
    ],
}


@pytest.mark.parametrize("name", MUST_HOLD)
def test_a_claim_holds_at_toy_size(name, monkeypatch):
    monkeypatch.syspath_prepend(CLAIMS)  # for its `common`
    spec = importlib.util.spec_from_file_location(f"claim_{name}", CLAIMS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    result = module.claim(toy=True)
    assert {sentence: result.verdicts[sentence] for sentence in MUST_HOLD[name]} == dict.fromkeys(
        MUST_HOLD[name], True
    )
    assert {len(row) for row in result.rows} == {len(result.rows[0])}
