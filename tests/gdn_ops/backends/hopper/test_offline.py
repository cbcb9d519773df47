"""Every kernel compiles for sm_90 without a GPU, with the installed Triton and with a second one if it is named."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")

HERE = pathlib.Path(__file__).parent
OTHER_TRITON = os.environ.get("GDN_OPS_TEST_TRITON_PATH")
"""A folder that holds another version of the package `triton`."""

SHARED_MEMORY_OF_SM_90 = 232448
PLAIN = [
    "_chunk_table_kernel", "_gates_kernel", "_solve_kernel", "_forward_kernel",
    "_chunk_table_kernel", "_gates_kernel", "_forward_kernel", "_reverse_kernel", "_gradients_kernel",
    "_epilogue_kernel",
]  # fmt: skip
LONG = [
    "_chunk_table_kernel", "_gates_kernel", "_solve_kernel", "_forward_kernel", "_combine_kernel", "_forward_kernel",
    "_chunk_table_kernel", "_gates_kernel", "_recurrences_kernel", "_combine_kernel", "_reverse_kernel",
    "_gradients_kernel", "_epilogue_kernel",
]  # fmt: skip
"""With cut documents: ends and summaries, their combination, and the rest, forward and backward."""
PARTS = [
    "_chunk_table_kernel", "_gates_kernel", "_solve_kernel", "_forward_kernel", "_clear_ownerless_kernel",
    "_chunk_table_kernel", "_gates_kernel",
    *["_recurrences_kernel", "_gradients_kernel", "_epilogue_kernel"] * 6,
    "_clear_ownerless_kernel",
]  # fmt: skip
"""In two groups of heads and three parts of documents."""
TENSOR_CORE_KERNELS = {
    "_solve_kernel", "_forward_kernel", "_reverse_kernel", "_recurrences_kernel", "_gradients_kernel",
    "_combine_kernel", "_walk_tma_kernel",
}  # fmt: skip


def compile_offline(*cases: str, triton_path: str | None = None, early: bool = True, waits: bool = False) -> list[dict]:
    root = str(HERE.parents[3])
    paths = [triton_path, root] if triton_path else [root]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "GDN_OPS_CUT_DOCUMENTS": "1"}
    done = subprocess.run(
        [
            sys.executable, str(HERE / "offline.py"), *cases, "--early", "1" if early else "0",
            *(["--waits"] if waits else []),
        ],
        env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check(kernels: list[dict], early: bool = True) -> None:
    for kernel in kernels:
        assert kernel["early"] == early, kernel
        assert kernel["waits"] == int(early), kernel
        assert kernel["releases"] == 0, kernel
        assert kernel["ahead"] == [], "memory is touched, or a program ends, before earlier kernels have ended"
        assert kernel["target"] == 90
        assert kernel["shared"] <= SHARED_MEMORY_OF_SM_90, kernel
        assert (kernel["wgmma"] > 0) == (kernel["name"] in TENSOR_CORE_KERNELS), kernel
        if kernel["name"] in TENSOR_CORE_KERNELS:
            assert kernel["tma"] > 0, kernel


def test_kernels_compile_for_sm_90() -> None:
    kernels = compile_offline("plain", "full", "stretches", "parts")
    check(kernels)
    parts = [x for x in kernels if x["case"] == "parts"]
    assert [x["name"] for x in parts] == PARTS
    assert len({x["hash"] for x in parts if x["name"] == "_epilogue_kernel"}) == 1, "one order of sums for all groups"
    assert [x["name"] for x in kernels if x["case"] == "stretches"] == LONG
    assert [x["name"] for x in kernels if x["case"] == "plain"] == PLAIN
    full = [x["name"] for x in kernels if x["case"] == "full"]
    assert full.count("_solve_kernel") == 2, "save='inputs' prepares again in the backward"
    assert full.count("_gates_kernel") == 4, "with norms before `solve` and after it"
    assert full.count("_clear_ownerless_kernel") == 2, "one for o, one for dq, dk, dv, dg and dbeta"


@pytest.mark.slow
def test_every_case_compiles_for_sm_90() -> None:
    check(compile_offline("states", "states_long", "parts_full", "stretches_full", "long_full", "states_only", "half"))


@pytest.mark.slow
def test_where_ptxas_puts_waits_for_products_in() -> None:
    """Where it does, products run one after the other. In `forward` without states, alone or beside `reverse`, that
    was found to cost nothing (docs/experiments.md)."""
    kernels = compile_offline("stretches", "parts", "states_long", waits=True)
    assert {x["name"] for x in kernels} >= TENSOR_CORE_KERNELS - {"_walk_tma_kernel"}
    found = {(x["name"], x["case"] == "states_long") for x in kernels if x["injected"] > 0}
    assert found <= {("_forward_kernel", False), ("_recurrences_kernel", False)}


@pytest.mark.slow
def test_kernels_of_ordinary_launches_know_nothing_of_earlier_ones() -> None:
    check(compile_offline("plain", early=False), early=False)


@pytest.mark.slow
@pytest.mark.skipif(OTHER_TRITON is None, reason="GDN_OPS_TEST_TRITON_PATH names no other Triton")
def test_kernels_compile_with_another_triton() -> None:
    kernels = compile_offline("plain", "full", "stretches", "long_full", "parts", triton_path=OTHER_TRITON)
    check(kernels)
    import triton

    assert {x["triton"] for x in kernels} != {triton.__version__}
