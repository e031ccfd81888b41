"""The coordinator of runs, a gRPC service, and `WorkerNode`, a process that gets its rank from one.

May import `base`, `wire`, `net` and `runtime`; only `cli` and the package's public names import it. `grpc` is imported
only here, when a coordinator or a worker starts. The cores (`run`, `ranks`, `checkpoints`) are pure.
"""
