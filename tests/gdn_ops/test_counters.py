"""Counts are exact, also from several threads, and a copy that was handed out does not change."""

import threading

from gdn_ops import counters


def test_counts_are_exact_over_threads():
    counters.reset_stats()
    before = counters.stats()
    threads = [threading.Thread(target=lambda: [counters.count("input_copies") for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.stats().input_copies == 4000
    assert before.input_copies == 0
    assert counters.stats().as_dict().keys() == {
        "packed_gradients",
        "concatenations",
        "input_copies",
        "gradient_copies",
        "context_exchanges",
    }
    counters.reset_stats()
    assert counters.stats() == before
