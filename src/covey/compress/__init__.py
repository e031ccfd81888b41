"""Arrays of floats in fewer bytes: codecs, sparsifiers, low rank, the policy that chooses, and error feedback.

Pure: no socket, thread, clock or file. It imports `base` only; `runtime`, `torch` and `cli` call it.
"""
