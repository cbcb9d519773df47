"""What every test shares: devices that are not there are skipped with a reason; memory can be poisoned."""

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Several test processes share the processors instead of each taking all of them; C++ is compiled quickly."""
    # Inductor's loops are compiled without vector instructions, in half of the time, and are not tried in any first.
    # No test is about them but test_inductor.py's, which switches them on.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    # Bits are compared between calls whose tensors lie at other addresses. On an AMD processor they differed until MKL
    # was asked for sums that do not depend on these.
    os.environ.setdefault("MKL_CBWR", "AUTO")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        threads = max(1, (os.cpu_count() or 1) // workers)
        torch.set_num_threads(threads)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # of the processes that tests start
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # pytest-xdist would start the files with the most tests first


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and say why; put first the files that take longest."""
    has_gpu = torch.cuda.is_available()
    has_distributed = torch.distributed.is_available()
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device and there is none"))
        if item.get_closest_marker("distributed") and not has_distributed:
            item.add_marker(pytest.mark.skip(reason="needs a PyTorch built with torch.distributed"))
    # A long file that starts last keeps one process busy while the others wait. Files stay whole.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in slow, -tests[item.path]))


@pytest.fixture
def poison_memory() -> Iterator[None]:
    """Fill every uninitialised tensor with NaN (floating) or the largest integer: a value never written shows."""
    was_on = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=was_warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = was_filling
