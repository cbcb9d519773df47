"""Gated DeltaNet training ops that read q, k, v in a packed row and write its gradient as one row."""

from gdn_ops import autograd as _autograd  # noqa: F401  (registers the ops' gradients)
from gdn_ops.context_parallel.checkpointing import checkpoint_policy
from gdn_ops.counters import Stats, reset_stats, stats
from gdn_ops.functional import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_packed,
    chunk_gdn,
    packed_qkv_views,
)
from gdn_ops.memory import saved_bytes, scratch_bytes
from gdn_ops.version import __version__
from inductor_passes import install as _install_passes

# From here on torch.compile rewrites plain split views of a packed row; Inductor itself is not loaded yet.
_install_passes()

__all__ = [
    "Stats",
    "__version__",
    "checkpoint_policy",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_packed",
    "chunk_gdn",
    "packed_qkv_views",
    "reset_stats",
    "saved_bytes",
    "scratch_bytes",
    "stats",
]
