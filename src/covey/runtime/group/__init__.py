"""The public `Group`: checks arguments, describes each operation, and hands it to `collectives` or `messages`.

Imports the rooms below it. Used by programs, `joining` and `covey.torch`. Runs on the thread that calls.
"""
