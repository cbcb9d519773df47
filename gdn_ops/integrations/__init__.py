"""Other libraries' models on these kernels; each module imports its library only when it is itself imported."""
