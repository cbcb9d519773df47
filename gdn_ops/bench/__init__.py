"""`python -m gdn_ops.bench`: times against a correctness gate, measured ceilings and the libraries users have today."""
