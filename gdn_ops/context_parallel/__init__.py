"""Context parallelism: documents cut over ranks, which exchange small states instead of queries, keys and values."""

from gdn_ops.context_parallel import ops as _ops  # noqa: F401  (registers the ops)
from gdn_ops.context_parallel.checkpointing import RecomputeHandle, checkpoint_policy
from gdn_ops.context_parallel.context import Context
from gdn_ops.context_parallel.conv import causal_conv1d
from gdn_ops.context_parallel.partition import ExchangeBytes, Fragment, Partition, partition

__all__ = [
    "Context",
    "ExchangeBytes",
    "Fragment",
    "Partition",
    "RecomputeHandle",
    "causal_conv1d",
    "checkpoint_policy",
    "partition",
]
