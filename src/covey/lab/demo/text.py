"""The bundled text as numbers: a part for training and a held-out part for evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from covey.lab.demo.model import CONTEXT

if TYPE_CHECKING:
    from covey.lab.demo.model import Tokens

HELD_OUT_EVERY = 10
"""Every tenth paragraph is never trained on."""


@dataclass(frozen=True, slots=True)
class Text:
    """One work, cut into training and held-out characters."""

    title: str
    """The work and its author."""
    alphabet: str
    training: Tokens
    held_out: Tokens

    def encode(self, characters: str) -> Tokens:
        """Return the number of each character."""
        return np.array([self.alphabet.index(character) for character in characters], np.intp)

    def decode(self, tokens: list[int]) -> str:
        """Return the characters with these numbers."""
        return "".join(self.alphabet[token] for token in tokens)


def load() -> Text:
    """Return the bundled text; a paragraph is one line of it, without the line breaks of the file."""
    header, *paragraphs = resources.files("covey.lab.demo").joinpath("text.txt").read_text("ascii").split("\n\n")
    lines = [" ".join(paragraph.split()) + "\n" for paragraph in paragraphs]
    alphabet = "".join(sorted(set("".join(lines))))
    numbers = {character: number for number, character in enumerate(alphabet)}
    kept = [line for index, line in enumerate(lines) if index % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    held = lines[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    as_tokens = (np.array([numbers[character] for character in "".join(part)], np.intp) for part in (kept, held))
    return Text(header.partition(";")[0], alphabet, *as_tokens)


def examples(tokens: Tokens) -> tuple[Tokens, Tokens]:
    """Return every context of CONTEXT characters in `tokens`, one a row, and the character that follows each."""
    windows = np.lib.stride_tricks.sliding_window_view(tokens, CONTEXT + 1)
    return windows[:, :CONTEXT], windows[:, CONTEXT]


def pair_loss(training: Tokens, held_out: Tokens, vocabulary: int) -> float:
    """Return the held-out loss of a table of character pairs, which a useful model must beat."""
    counts = np.full((vocabulary, vocabulary), 0.1)
    np.add.at(counts, (training[:-1], training[1:]), 1)
    odds = counts / counts.sum(1, keepdims=True)
    return float(-np.log(odds[held_out[:-1], held_out[1:]]).mean())
