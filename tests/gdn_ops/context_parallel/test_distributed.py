"""Real processes: gloo on the CPU in the normal run, NCCL on two GPUs where there are two.

Each world is started once and runs all its cases; the tests look at what the ranks wrote.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
WORKER = Path(__file__).with_name("worker.py")
CASES = ("layouts", "ways", "compiled", "graphs", "mesh", "conv")


def launch(backend, num_ranks, cases, folder, timeout=300):
    """Run the cases on `num_ranks` processes; returns each rank's results. Fails with the ranks' output."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(WORKER.parent)]), OMP_NUM_THREADS="1")
    if backend == "nccl":
        environment["NCCL_NVLS_ENABLE"] = "0"
    logs = [folder / f"rank{rank}.log" for rank in range(num_ranks)]
    outputs = [folder / f"rank{rank}.json" for rank in range(num_ranks)]
    processes = []
    for rank in range(num_ranks):
        arguments = [backend, str(rank), str(num_ranks), str(folder / "store"), str(outputs[rank]), *cases]
        with logs[rank].open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(WORKER), *arguments], env=environment, stdout=log, stderr=subprocess.STDOUT
                )
            )
    try:
        for process in processes:
            process.wait(timeout)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if not all(output.exists() for output in outputs):
        pytest.fail("\n".join(f"---- rank {rank}\n{log.read_text()[-4000:]}" for rank, log in enumerate(logs)))
    return [json.loads(output.read_text()) for output in outputs]


WORLDS = [
    pytest.param(("gloo", 2, (*CASES, "no_exchange")), id="gloo2"),
    pytest.param(("gloo", 4, ("layouts", "ways", "mesh", "no_exchange", "conv")), id="gloo4"),
    pytest.param(("nccl", 2, CASES), id="nccl2", marks=pytest.mark.gpu),
]
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module", params=WORLDS)
def world(request, tmp_path_factory):
    backend, num_ranks, cases = request.param
    if backend == "nccl" and torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA devices, there are {torch.cuda.device_count()}")
    return launch(backend, num_ranks, cases, tmp_path_factory.mktemp(f"{backend}{num_ranks}"))


def of(world, case):
    if case not in world[0]:
        pytest.skip(f"case {case} is not run in this world")
    return [rank[case] for rank in world]


def test_layouts_are_within_the_error_budget_with_one_exchange_a_direction(world):
    for rank in of(world, "layouts"):
        for name, result in rank.items():
            assert result["excess"] <= 1, (name, result)
            assert result["differing"] == [], name
            assert result["exchanges"] == 2, name


def test_every_way_to_call_gives_the_same_bits_and_recomputes_exchange_nothing(world):
    for rank in of(world, "ways"):
        assert len(rank) == 21
        for name, result in rank.items():
            assert result["differing"] == [], name
            assert result["exchanges"] == result["expected"], name
            if name.startswith(("packed", "packed_views")):
                assert result["packed"] == 1, name
                assert result["concatenations"] == 0, name


def test_compiled_is_bitwise_eager_with_the_row_packed(world):
    for rank in of(world, "compiled"):
        for name, result in rank.items():
            assert result["differing"] == [], name
            assert result["exchanges"] == result["expected"], name
            assert result["packed"] == 1, name


def test_ranks_trace_the_same_graphs_with_visible_collectives(world):
    for rank in of(world, "graphs"):
        assert rank["equal"]
        assert rank["gathers"] == [1, 1]
        assert rank["backwards"] == [0, 1]


def test_device_mesh_dimension_and_errors(world):
    for rank in of(world, "mesh"):
        assert rank["excess"] <= 1
        assert rank["exchanges"] == 2
        errors = rank["errors"]
        assert "one dimension of a DeviceMesh" in errors["two dimensions"]
        assert "of the group, got" in errors["wrong rank"]
        assert "ranks as the partition has, got" in errors["wrong size"]
        assert "expected the process group of the partition's" in errors["no group"]
        assert "got str" in errors["wrong type"]


def test_documents_that_do_not_cross_ranks_cost_no_exchange(world):
    for rank in of(world, "no_exchange"):
        assert rank == {"exchanges": 0, "group": ""}


def test_convolution_over_ranks_is_that_of_one(world):
    for rank in of(world, "conv"):
        for name, result in rank.items():
            # bfloat16 on GPUs: a row's gradient is rounded on each of the ranks that add to it.
            assert result["error"] < (1e-5 if "no_exchange" in world[0] else 2e-2), name
            assert result["exchanges"] == 2, name


@pytest.mark.parametrize("case", ["failing_rank", "stuck_rank"])
def test_a_rank_that_stops_gives_an_error_that_names_the_collective(case, tmp_path):
    first, last = launch("gloo", 2, (case,), tmp_path)
    assert last[case] == {"left": True}
    assert "the all-gather of segment states over process group" in first[case]["error"]
    assert "a rank may have stopped" in first[case]["error"]
    assert first[case]["cause"]
    assert first[case]["seconds"] < 30
