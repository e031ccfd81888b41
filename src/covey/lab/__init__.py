"""The laboratory: what measures, breaks, simulates and shows covey. Nothing in the library imports it.

`bench`, `chaos` and `demo` are commands, which `covey.cli.main` imports by name when they are called. `churn`,
`resting`, `lineages`, `hostile`, `call_stress` and `fuzz` are programs: `python -m covey.lab.churn`. The others
are their parts.
"""

from typing import Final

ONE_THREAD: Final = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
"""Variables for processes that share the cores: more threads for linear algebra would slow each other down."""
