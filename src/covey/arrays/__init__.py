"""Arrays of other libraries: where their memory is, and how they pass through host memory where covey cannot use it.

Imports `base` only; `runtime.buffers` makes operands of them. A library is imported when its first array comes.
"""
