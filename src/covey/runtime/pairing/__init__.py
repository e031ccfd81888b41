"""Pairing: a machine of a cluster shows a code of six digits, and a machine on which it is typed gets the secret.

`inviter.py` is the first, `applicant.py` the second; what they say is in `wire/pairing.py`, and its rules in
`proto/pairing.py`. Used by `covey init`, `pair` and `enroll`, and by the page of `covey ui`.
"""
