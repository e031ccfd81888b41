"""Fuzzing of everything that reads bytes of others. `targets` lists the readers, `contract` says what each must keep.

Values and mutations come from the types, so a new message or field is covered without a change here.
"""
