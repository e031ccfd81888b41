"""Tagged messages: numbers pass from rank to rank, and the last rank prints them.

covey run -n 3 examples/relay.py
"""

import numpy as np

import covey

with covey.join() as group:
    first, last = group.rank == 0, group.rank == group.size - 1
    for item in range(5):
        value = np.array([float(item)]) if first else group.recv(group.rank - 1, tag=item)
        value = value * 2 + group.rank
        if last:
            print(f"item {item} came out as {value[0]:g}")
        else:
            group.send(value, group.rank + 1, tag=item)
