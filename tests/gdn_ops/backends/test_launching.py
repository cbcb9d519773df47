"""Which compiled kernel a launch takes: by everything that Triton specialises on, and by nothing else."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from gdn_ops.backends import launching


class Kernel:
    """A kernel that is compiled anew at each launch through Triton; compiled ones note their arguments."""

    arg_names = ("a", "b", "CONSTANT")

    def __init__(self):
        self.compiled, self.launched, self.warmed = 0, [], 0

    def __getitem__(self, grid):
        def run(*args, **options):
            self.compiled += 1
            return Compiled(self)

        return run

    def warmup(self, *args, grid, **options):
        self.warmed += 1
        return Compiled(self)


class Compiled:
    def __init__(self, kernel):
        self.kernel, self.metadata = kernel, SimpleNamespace(global_scratch_size=0)

    def __getitem__(self, grid):
        return lambda *args: self.kernel.launched.append((grid, args))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


def launch(kernel, a, b=32, constant=1, **options):
    launching.launch(kernel, (3, 1, 1), (a, b), {"CONSTANT": constant, "num_warps": 4, **options})


BASE = torch.zeros(64)


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.zeros(64, dtype=torch.float16)},
        {"a": BASE[1:]},  # off 16 bytes
        {"a": None},
        {"b": 1},
        {"b": 33},  # not divisible by 16
        {"b": 2**31},  # a 64-bit integer
        {"b": 32.0},
        {"b": None},
        {"b": True},
        {"constant": 2},
        {"num_warps": 8},
    ],
)
def test_another_kind_of_launch_is_compiled_anew(kernel, other):
    launch(kernel, BASE)
    launch(kernel, **{"a": BASE, **other})
    assert kernel.compiled == 2
    launch(kernel, **{"a": BASE, **other})
    assert kernel.compiled == 2


def test_the_same_kind_goes_straight_to_the_compiled_kernel(kernel):
    launch(kernel, BASE)
    launch(kernel, BASE[16:], 64)
    assert kernel.compiled == 1
    ((grid, (a, b, constant)),) = kernel.launched
    assert (grid, a.data_ptr(), b, constant) == ((3, 1, 1), BASE[16:].data_ptr(), 64, 1)


def test_another_device_and_another_kernel_are_compiled_anew(kernel, monkeypatch):
    launch(kernel, BASE)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch(kernel, BASE)
    assert kernel.compiled == 2
    other = Kernel()
    launch(other, BASE)
    assert other.compiled == 1


def test_descriptors_are_told_apart_by_dtype_and_block(kernel):
    def descriptor(dtype, *block):
        return SimpleNamespace(base=torch.zeros(4, dtype=dtype), block_shape=list(block))

    for x in (
        descriptor(torch.float32, 64, 64),
        descriptor(torch.float16, 64, 64),
        descriptor(torch.float32, 64, 128),
        descriptor(torch.float32, 64, 64),
    ):
        launch(kernel, x)
    assert kernel.compiled == 3


def test_the_memory_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(launching, "_MOST_KEPT", 3)
    for constant in range(10):
        launch(kernel, BASE, constant=constant)
        assert len(launching._compiled) <= 3


def test_recording_compiles_for_stand_ins_what_tensors_would_get(kernel):
    launch(kernel, BASE)
    stand_in = torch.empty(64, device="meta")
    options = {"CONSTANT": 1, "num_warps": 4}
    _, constants = launching.compiled_for(kernel, (3, 1, 1), (stand_in, 32), options)
    assert constants == (1,)
    assert (kernel.compiled, kernel.warmed) == (1, 0), "already compiled"
    launching.compiled_for(kernel, (3, 1, 1), (stand_in, 33), options)
    assert kernel.warmed == 1
    launch(kernel, BASE, 33)
    assert kernel.compiled == 1, "and the other way round"
