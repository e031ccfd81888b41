"""Fuzzes one target with atheris, which searches for inputs that reach new code; see `python -m covey.lab.fuzz`.

Half of the mutations change the structure of a message (`mutations`), half are those of libFuzzer.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from typing import Final

import atheris

with atheris.instrument_imports(include=["covey.wire", "covey.base", "covey.net"]):
    from covey.lab.fuzz.contract import change, check
    from covey.lab.fuzz.mutations import Mutator
    from covey.lab.fuzz.targets import all_targets

MEASURED_EVERY: Final = 20
"""Memory is measured for one in this many inputs: measuring takes longer than reading most of them."""


def main() -> None:
    """Fuzz one target. Arguments: its name, a folder for inputs that reach new code, then options of libFuzzer."""
    name, folder, *options = sys.argv[1:]
    target, corpus = all_targets()[name], Path(folder)
    corpus.mkdir(parents=True, exist_ok=True)
    seeds = target.seeds()
    for number, data in enumerate(seeds):
        (corpus / f"valid-{number}").write_bytes(data)

    numbers = itertools.count()

    def read(data: bytes) -> None:
        check(target, data, is_measured=next(numbers) % MEASURED_EVERY == 0)

    def alter(data: bytes, most: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.5:
            return bytes(atheris.Mutate(data, most))
        return change(target, Mutator(chance), bytes(data), seeds)[:most]

    atheris.Setup([sys.argv[0], *options, str(corpus)], read, custom_mutator=alter)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
