"""Real processes: gloo on the CPU in the normal run, NCCL on two and on four GPUs where there are so many.

Each world is started once and runs all its cases; the tests look at what the ranks wrote.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
WORKER = Path(__file__).with_name("worker.py")
CASES = ("layouts", "ways", "compiled", "overlap", "graphs", "mesh", "conv")
FAULTS = ("stuck_rank", "failing_rank")
"""Last: a rank leaves in the second."""


def launch(backend, num_ranks, cases, folder, timeout=300):
    """Run the cases on `num_ranks` processes; returns each rank's results. Fails with the ranks' output."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(WORKER.parent)]), OMP_NUM_THREADS="1")
    # Inductor's folder is the run's: what it finds out about the processor and its compiler takes ten seconds. No graph
    # comes out of it: what is looked at here happens while graphs are compiled.
    environment |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
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
    pytest.param(("gloo", 2, (*CASES, "no_exchange", *FAULTS)), id="gloo2"),
    # The ways to call differ on one rank, whichever; `test_emulation.py` has them on three.
    pytest.param(("gloo", 4, ("layouts", "mesh", "no_exchange", "conv_direct")), id="gloo4"),
    pytest.param(("nccl", 2, CASES), id="nccl2", marks=pytest.mark.gpu),
    pytest.param(("nccl", 4, CASES), id="nccl4", marks=pytest.mark.gpu),
]
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


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
            assert result["bytes"] == result["said"], name


def test_every_way_to_call_gives_the_same_bits_and_recomputes_exchange_nothing(world):
    for rank in of(world, "ways"):
        assert len(rank) == 6 * 4 + 4 * 4 + 2
        for name, result in rank.items():
            assert result["differing"] == [], name
            assert result["retained"], name
            assert result["exchanges"] == result["expected"], name
            if name.startswith(("packed", "packed_views")):
                assert result["packed"] == 1, name
                assert result["concatenations"] == 0, name


def test_compiled_is_bitwise_eager_in_every_mode(world):
    for rank in of(world, "compiled"):
        for name, result in rank.items():
            assert result["differing"] == [], name
            assert result["exchanges"] == result["expected"], name
            assert result["packed"] == result["expected_packed"], name


def test_matmuls_run_between_the_start_of_a_collective_and_its_wait(world):
    for rank in of(world, "overlap"):
        assert rank["differing"] == []
        assert rank["exchanges"] == 2
        assert rank["packed"] == 1
        assert len(rank["orders"]) == 2
        for order, products, after in zip(rank["orders"], (1, 2), ("chunk_fwd", "chunk_bwd_row"), strict=True):
            start, wait = order.index("all_gather_into_tensor"), order.index("wait_tensor")
            assert order[start + 1 : wait] == ["mm"] * products, order  # nothing waits for them
            assert after in order[wait:], order


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
    for rank in of(world, "conv_direct" if "conv_direct" in world[0] else "conv"):
        for name, result in rank.items():
            # bfloat16 on GPUs: the weight's gradient is rounded on each rank before they are added.
            assert result["error"] < (1e-5 if "no_exchange" in world[0] else 2e-2), name
            assert result["exchanges"] == 2, name
            assert result["forward_bits"], name
            assert result["bytes"] in (None, result["said"]), name


def test_a_rank_that_stops_gives_errors_that_name_the_collective(world):
    errors, last = of(world, "failing_rank")
    assert last == {"left": True}
    for name, what in (("backward", "segment state gradients"), ("forward", "segment states")):
        assert f"the all-gather of {what} over process group" in errors[name]["error"], name
        assert "a rank may have stopped" in errors[name]["error"]
        assert errors[name]["cause"]
        assert errors[name]["seconds"] < 30
    # Compiled code is torch's own: its traceback shows the line of the collective.
    assert errors["compiled"]["error"]
    assert re.search(r"_c10d_functional\.(all_gather_into_tensor|wait_tensor)", errors["compiled"]["trace"])


def test_a_rank_that_never_calls_gives_an_error_when_the_group_times_out(world):
    first, last = of(world, "stuck_rank")
    assert last == {"left": True}
    found = first["forward"]
    assert "the all-gather of segment states over process group" in found["error"]
    assert "a rank may have stopped" in found["error"]
    assert found["seconds"] < 30
