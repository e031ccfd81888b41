"""The gateway: programs in any language are ranks through gRPC. A registered program is a member of the run here.

May import `coordinator`, `runtime`, `net`, `wire` and `base`; only `cli` imports it. `grpc` is imported only here and
in `coordinator`. `pieces` and `failures` do no I/O; `program` has what one rank may do; `ranks` where ranks come from.
"""
