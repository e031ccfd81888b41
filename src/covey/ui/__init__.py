"""The page of `covey ui`: a view of `watch` in a browser of this machine, and the gate in front of it.

`PageServer` serves the files in `page/`, a stream of overviews, and a few actions; `Gate` judges every request before
anything else does; `Admission` knows who has proved what. Imports `watch`, `runtime` and what is below. Used by `cli`.
"""
