"""Exact counts of what happened to packed rows, in eager and in compiled code alike (counted where the op runs)."""

import threading
from dataclasses import asdict, dataclass, fields

_lock = threading.Lock()


@dataclass
class Stats:
    """Counts since the process started, or since `reset_stats()`.

    packed_gradients: backward calls whose kernel wrote into one gradient row, each of q, k and v that lies in it (a
        compiled call's report names them);
    concatenations: rows that `packed_qkv_views` had to build from separate gradients;
    input_copies: q, k, v or rows copied because their last axis was not dense;
    gradient_copies: incoming output gradients copied for the same reason (`sum().backward()` sends one), or because
        their tokens are 2^25 elements or more apart;
    context_exchanges: collectives that context parallelism started.
    """

    packed_gradients: int = 0
    concatenations: int = 0
    input_copies: int = 0
    gradient_copies: int = 0
    context_exchanges: int = 0

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)


_stats = Stats()


def count(name: str, amount: int = 1) -> None:
    """Add to one counter; safe from several threads (backward runs on autograd's own)."""
    with _lock:
        setattr(_stats, name, getattr(_stats, name) + amount)


def stats() -> Stats:
    """A copy of the counts as they are now."""
    with _lock:
        return Stats(**asdict(_stats))


def reset_stats() -> None:
    """Set every count to zero."""
    with _lock:
        for field in fields(_stats):
            setattr(_stats, field.name, 0)
