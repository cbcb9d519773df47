"""Timing: events on a GPU, the clock on a CPU; ceilings measured in the same run; peak memory beyond the inputs."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Milliseconds: median, and the 20th and 80th percentile of the repetitions."""

    median: float
    low: float
    high: float


def summarise(samples: list[float]) -> Timing:
    """Median and spread of a list of milliseconds."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Timing(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)])


CACHE_BYTES = 1 << 28
"""Written before every timed call on a GPU: five times an H200's L2, so that no call finds its inputs there."""


def time_ms(
    run: Callable[[], object], device: str, repeats: int, warmup: int, prepare: Callable[[], object] | None = None
) -> Timing:
    """Time `run`, each repetition after an untimed `prepare` and, on a GPU, with a cold L2 cache."""
    for _ in range(warmup):
        if prepare is not None:
            prepare()
        run()
    samples = []
    if device == "cpu":
        for _ in range(repeats):
            if prepare is not None:
                prepare()
            start = time.perf_counter()
            run()
            samples.append((time.perf_counter() - start) * 1e3)
        return summarise(samples)
    events = []
    flush = torch.empty(CACHE_BYTES, dtype=torch.int8, device=device)
    for i in range(repeats):
        if prepare is not None:
            prepare()
        flush.fill_(i % 100 + 1)
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        run()
        end_event.record()
        events.append((start_event, end_event))
    torch.cuda.synchronize()
    return summarise([a.elapsed_time(b) for a, b in events])


def wall_ms(run: Callable[[], object], device: str, repeats: int) -> float:
    """Wall-clock milliseconds a call, back to back, host time included."""
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    if device != "cpu":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / repeats


HOST_CALLS = 8
"""Calls in a row that `host_us` times; few enough for the device's queue of launches."""


def host_us(run: Callable[[], object], device: str, repeats: int = 20) -> float | None:
    """Microseconds that a call, one of several in a row, keeps the host busy; None on a CPU, which does the work.

    As in a model, whose layers do not wait for the device and whose backward changes to autograd's own thread once for
    all of them: the device is idle when the row begins, so that nothing waits for a full queue, and autograd runs in
    the calling thread.
    """
    if device == "cpu":
        return None
    samples = []
    with torch.autograd.set_multithreading_enabled(False):
        run()
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                run()
            samples.append((time.perf_counter() - start) * 1e6 / HOST_CALLS)
    torch.cuda.synchronize()
    return statistics.median(samples)


def graph_ms(run: Callable[[], object], device: str, repeats: int, clear: Callable[[], None]) -> Timing | None:
    """Time replays of a CUDA graph of the call: device time without the host's; None on a CPU.

    Raises RuntimeError where the call cannot be captured, for instance because it waits for the device.
    """
    if device == "cpu":
        return None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    timing = time_ms(graph.replay, device, repeats, 3)
    clear()  # gradients that live in the graph's memory
    return timing


def peak_bytes(run: Callable[[], object], device: str, clear: Callable[[], None]) -> int | None:
    """Most memory that a call allocates beyond its inputs, outputs and gradients included; None on a CPU.

    `clear` drops the results of earlier calls: freed inside the call, they would hide as much of what it allocates.
    """
    if device == "cpu":
        return None
    clear()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@dataclass(frozen=True)
class Ceilings:
    """What this device reached: bytes a second of a large copy (read plus written), bf16 matrix operations a second."""

    bytes_per_s: float
    flops_per_s: float


def ceilings(device: str) -> Ceilings:
    """Measure the two ceilings: a copy of 2 GiB (64 MiB on a CPU) and a square matrix product on random data."""
    if device == "cpu":
        source = torch.randn(1 << 24)
        matrices = [torch.randn(1024, 1024) for _ in range(2)]
    else:
        source = torch.randn(1 << 30, device=device, dtype=torch.bfloat16)
        matrices = [torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2)]
    target = torch.empty_like(source)
    copy = time_ms(lambda: target.copy_(source), device, 10, 3)
    product = time_ms(lambda: matrices[0] @ matrices[1], device, 10, 3)
    size = 2 * source.numel() * source.element_size()
    return Ceilings(size / copy.median * 1e3, 2 * matrices[0].shape[0] ** 3 / product.median * 1e3)
