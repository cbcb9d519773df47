"""The example as a user starts it: torchrun, two ranks, the same loss as one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gdn_ops.context_parallel import example

ROOT = Path(__file__).resolve().parents[3]


def start(*arguments, ranks=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, "-m", "gdn_ops.context_parallel.example", *arguments],
        env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", NCCL_NVLS_ENABLE="0"),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize("arguments", [("--layout", "zigzag"), ("--fsdp",)])
def test_two_ranks_have_the_loss_of_one(arguments):
    done = start("--device", "cpu", "--steps", "3", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the losses agree" in done.stdout
    assert "exchanges a step: 4 (one a layer and direction: 4)" in done.stdout


def test_figure_of_emulated_ranks_is_a_line_for_each_number_of_pieces(monkeypatch, capsys):
    """What it prints, on a CPU, whose times mean nothing."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a CPU")
    monkeypatch.setattr(example, "HEADS", (1, 2, 16))
    options = example._parse(["--figure", "--emulate", "2", "--tokens", "600", "--repeats", "1", "--pieces", "1", "3"])
    assert example._figure(options, 0, 1, torch.device("cpu")) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("a CPU, torch")
    assert [line[:30].strip() for line in lines[2:]] == ["op on packed rows, 1 pieces", "op on packed rows, 3 pieces"]
    step, single, ratio, *hosts = map(float, lines[-1][30:].split())
    assert abs(step / single - ratio) < 0.01 and len(hosts) == 2


@pytest.mark.distributed
@pytest.mark.gpu
@pytest.mark.parametrize(
    "arguments",
    [(), ("--fsdp", "--compile", "--steps", "2"), ("--figure", "--repeats", "3", "--rows", "op", "exchange")],
)
def test_two_or_four_gpus(arguments):
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs 2 CUDA devices, there are {count}")
    done = start(*arguments, ranks=4 if count >= 4 else 2)
    assert done.returncode == 0, done.stdout + done.stderr
