"""What holds of the files themselves: budgets, imports, order, the tour and the worked example."""

import ast
import doctest
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fp8gpt

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = {"fp8gpt.py": 1000, "train.py": 800, "kernels.py": 900}


@pytest.mark.parametrize("name", BUDGETS)
def test_a_file_keeps_its_line_budget_and_100_columns(name):
    lines = (ROOT / name).read_text().splitlines()
    assert len(lines) <= BUDGETS[name]
    assert max(map(len, lines)) <= 100


def imports(name):
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


def test_the_lesson_needs_torch_alone():
    # kernels.py is imported by the two functions that need it, on a GPU
    assert set(imports("fp8gpt.py")) - sys.stdlib_module_names == {"torch", "kernels"}
    code = "import sys, torch; old = set(sys.modules); import fp8gpt; print(set(sys.modules) - old)"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for package in ("kernels", "triton", "tiktoken", "matplotlib", "safetensors", "tqdm"):
        assert f"'{package}'" not in out.stdout


def test_the_kernels_know_nothing_of_recipes_and_modules():
    assert set(imports("kernels.py")) - sys.stdlib_module_names == {"torch", "triton"}


def test_nothing_in_the_lesson_is_used_before_it_is_defined():
    tree = ast.parse((ROOT / "fp8gpt.py").read_text())
    defined_at = {}
    for node in tree.body:
        names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        if isinstance(node, ast.Assign):
            names = [t.id for target in node.targets for t in ast.walk(target)
                     if isinstance(t, ast.Name)]  # fmt: skip
        for name in names:
            defined_at.setdefault(name, node.lineno)
    for node in tree.body:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id in defined_at:
                assert defined_at[inner.id] <= inner.lineno, f"{inner.id} in line {inner.lineno}"


def test_the_worked_example_is_right():
    results = doctest.testmod(fp8gpt)
    assert results.attempted >= 6 and results.failed == 0


def test_the_tour_prints_its_table_in_ten_seconds():
    before = sum(os.times()[2:4])  # CPU seconds of children: other work on the machine is not ours
    out = subprocess.run([sys.executable, ROOT / "fp8gpt.py"], capture_output=True, text=True)
    assert out.returncode == 0 and not out.stderr and sum(os.times()[2:4]) - before < 10
    table = out.stdout.split("One outlier")[1]
    rows = {line.split()[0]: line.split() for line in table.splitlines()[2:] if line}
    assert set(rows) == set(fp8gpt.RECIPES)
    underflow = {name: float(row[-2]) for name, row in rows.items()}  # at an outlier of 1e6
    assert underflow["current"] > 90 > 1 > underflow["rowwise"] > underflow["mxfp8"]


def test_ci_runs_the_readmes_test_command():
    command = "pip install -r requirements.txt -r requirements-dev.txt && python -m pytest"
    assert command in (ROOT / "README.md").read_text()
    assert command in (ROOT / ".ci" / "run").read_text().replace(
        "pip install -q -r", "pip install -r"
    )
