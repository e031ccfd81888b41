"""Fuzzing of everything that reads foreign bytes. `targets` lists the readers, `contract` says what each must fulfil.

Values and mutations come from the types, so a new message or field is covered without a change here.
"""
