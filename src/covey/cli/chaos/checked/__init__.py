"""`covey chaos --check`: a workload of our own under faults, whose every operation is checked afterwards.

`workload` is the program, and writes down what each operation came to (`records`). `checked_run` starts it on this
machine or on hosts made of namespaces (`hosts`) and does to it what a seed decides (`plan`). `checker` then holds all
records of a run against each other and against the exact values (`operations`).
"""
