"""Collectives whose transfers are compressed. Each function here is the body of an operation: it runs in an attempt.

Results are bit-identical on all ranks: whatever is rounded is rounded by one rank, and its bytes are decoded by all.
"""
