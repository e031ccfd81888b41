"""Starting the processes of a run on this host, and looking after them: `covey run` and `covey.launch`.

Imports the rooms below it. Used by commands. Runs in a process of its own, which takes no part in the run's operations.
"""
