"""The smallest program: `covey run -n 4 examples/hello.py`."""

import numpy as np

import covey

with covey.join() as group:
    x = np.arange(4, dtype=np.float32) + group.rank
    group.all_reduce(x)
    print(f"rank {group.rank} of {group.size}: {x} by {group.lanes() or 'no lane'}")
