"""What starts ranks on the workers of an engine that is there already; `covey.ray` and `covey.dask` use it."""
