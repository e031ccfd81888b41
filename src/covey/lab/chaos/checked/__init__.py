"""`covey chaos --check`: runs a workload under faults, and checks every operation of it afterwards.

`workload` is the program; it records the outcome of each operation (`records`). `checked_run` starts it on this machine
or on hosts made of namespaces (`hosts`), and injects (`injector`) the faults that a seed decides (`plan`). `checker`
then compares all records of a run with each other and with the exact values (`operations`).
"""
