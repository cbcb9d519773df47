"""Implementations of the ops, one a device family. Each fills the allocations of `gdn_ops.outputs`."""
