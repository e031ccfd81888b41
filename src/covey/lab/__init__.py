"""The laboratory: what measures, breaks, simulates and shows covey. Nothing in the library imports it.

`bench`, `chaos` and `demo` are commands, which `covey.cli.main` imports by name when they are called. `churn`,
`resting_churn`, `lineages`, `hostile`, `call_stress` and `fuzz` are programs: `python -m covey.lab.churn`. The others
are their parts.
"""
