"""Plans give the bits of the host code that they repeat: every op, on a CPU through Triton's interpreter."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

_HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def results():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(_HERE.parents[3])}
    done = subprocess.run(
        [sys.executable, str(_HERE / "planned.py")], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {line["check"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", ["contiguous", "packed", "row", "row_"])
def test_a_repeated_call_gives_the_same_bits(results, name):
    found = results[name]
    assert found["differ"] == []
    assert found["recorded"] > 0, "the second call of a kind is recorded"
    assert found["launched"] == found["recorded"], "the third repeats every launch once"
