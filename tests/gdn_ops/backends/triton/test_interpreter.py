"""The kernels' numerics on a CPU, through Triton's interpreter (float16 and float32: its bfloat16 dots are wrong).

The interpreter is chosen when Triton is imported, so the checks run in one process of their own.
"""

import ast
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

_HERE = pathlib.Path(__file__).parent
_ROOT = _HERE.parents[3]


def _names() -> tuple[list[str], list[str]]:
    """Names of the checks, without importing the module that needs the interpreter."""
    tree = ast.parse((_HERE / "interpreted.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if node.targets[0].id == "ERROR_CASES":
                assert isinstance(node.value, ast.Dict)
                cases = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
            if node.targets[0].id == "CHECKS":
                assert isinstance(node.value, ast.Tuple)
                checks = [name.id for name in node.value.elts if isinstance(name, ast.Name)]
    return cases, checks


_CASES, _CHECKS = _names()

# float32 sums in another order than the reference's, over short documents. Gates that are huge in magnitude leave their
# own rounding in the chunk's cumulative sum (2**-24 of up to 2**14), in everything that a decay multiplies.
_FLOAT32 = 3e-5
# exp(-88.7), the sigmoid of such a gate, is a denormal number of 22 bits.
_BUDGETS = {"extreme_gates": 1e-3, "largest_rate": 2e-4}
# Twice the rounding of an output to float16 (2**-11 / sqrt(3)), and of the operands before it.
_FLOAT16 = 1e-3


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    environment.pop("PYTHONWARNINGS", None)
    done = subprocess.run(
        [sys.executable, str(_HERE / "interpreted.py")], env=environment, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", _CASES)
def test_close_to_recurrence(results: dict[str, dict], name: str) -> None:
    line = results[name]
    budget = _FLOAT16 if line["dtype"] == "float16" else _BUDGETS.get(name, _FLOAT32)
    wrong = {key: error for key, error in line["errors"].items() if not error <= budget}
    assert not wrong


@pytest.mark.parametrize("name", _CHECKS)
def test_property(results: dict[str, dict], name: str) -> None:
    assert results[name]["passed"] is True
