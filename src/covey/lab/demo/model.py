"""What the demo trains: the bundled text as numbers, and a small character model in numpy.

The model has an embedding, two hidden layers, softmax, and a backward pass written by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

HELD_OUT_EVERY = 10
"""Every tenth paragraph is never trained on."""
CONTEXT = 12
"""How many characters the model sees before it guesses the next one."""
ADAM_MEANS, MEMORY = 0.9, 0.99
"""How much of the running mean of the gradient, and of its square, a step keeps."""


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


if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.floating[Any]]
    Tokens = NDArray[np.intp]
    Arrays = dict[str, Floats]


def initial(vocabulary: int, seed: int, *, embedding: int = 16, hidden: int = 256, dtype: str = "float32") -> Arrays:
    """Return random parameters whose first guess is close to uniform, so that training starts near ln(vocabulary)."""
    rng = np.random.default_rng(seed)
    width = CONTEXT * embedding
    scales = {
        "embed": ((vocabulary, embedding), 1.0),
        "w1": ((width, hidden), width**-0.5),
        "b1": ((hidden,), 0.0),
        "w2": ((hidden, hidden), hidden**-0.5),
        "b2": ((hidden,), 0.0),
        "w3": ((hidden, vocabulary), 0.1 * hidden**-0.5),
        "b3": ((vocabulary,), 0.0),
    }
    return {name: (scale * rng.standard_normal(shape)).astype(dtype) for name, (shape, scale) in scales.items()}


def loss(parameters: Arrays, contexts: Tokens, targets: Tokens) -> float:
    """Return the mean cross-entropy in nats per character."""
    *_, log_odds = _forward(parameters, contexts)
    return _cross_entropy(log_odds, targets)


def loss_and_gradients(parameters: Arrays, contexts: Tokens, targets: Tokens) -> tuple[float, Arrays]:
    """Return the mean cross-entropy of a batch and its gradient by every parameter."""
    p = parameters
    inputs, first, second, log_odds = _forward(p, contexts)
    batch = len(targets)

    d_scores = np.exp(log_odds)
    d_scores[np.arange(batch), targets] -= 1
    d_scores /= batch
    d_second = (d_scores @ p["w3"].T) * (1 - second**2)
    d_first = (d_second @ p["w2"].T) * (1 - first**2)
    d_inputs = d_first @ p["w1"].T
    # A product with one-hot rows adds up what belongs to one character five times as fast as np.add.at does.
    one_hot = np.zeros((contexts.size, len(p["embed"])), d_inputs.dtype)
    one_hot[np.arange(contexts.size), contexts.ravel()] = 1
    return _cross_entropy(log_odds, targets), {
        "embed": one_hot.T @ d_inputs.reshape(contexts.size, -1),
        "w1": inputs.T @ d_first,
        "b1": d_first.sum(0),
        "w2": first.T @ d_second,
        "b2": d_second.sum(0),
        "w3": second.T @ d_scores,
        "b3": d_scores.sum(0),
    }


class Adam:
    """Adam with decoupled weight decay: equal gradients on all ranks keep equal parameters equal to the last bit."""

    def __init__(self, parameters: Arrays, *, rate: float = 2e-3, decay: float = 0.8) -> None:
        self._rate, self._decay = rate, decay
        self._mean = {name: np.zeros_like(value) for name, value in parameters.items()}
        self._square = {name: np.zeros_like(value) for name, value in parameters.items()}

    @property
    def state(self) -> Arrays:
        """All arrays that it keeps between steps, by name."""
        means = {f"mean {name}": array for name, array in self._mean.items()}
        return means | {f"square {name}": array for name, array in self._square.items()}

    def step(self, parameters: Arrays, gradients: Arrays, number: int) -> None:
        """Move each parameter against its gradient, in place; the first step has number 1."""
        rate = self._rate * (1 - MEMORY**number) ** 0.5 / (1 - ADAM_MEANS**number)
        for name, gradient in gradients.items():
            mean, square = self._mean[name], self._square[name]
            mean += (1 - ADAM_MEANS) * (gradient - mean)
            square += (1 - MEMORY) * (gradient * gradient - square)
            parameters[name] *= 1 - self._rate * self._decay
            parameters[name] -= rate * mean / (np.sqrt(square) + 1e-8)


def write(parameters: Arrays, start: Tokens, length: int, seed: int, *, temperature: float = 0.5) -> list[int]:
    """Return `length` characters that the model writes after `start`, which holds at least CONTEXT of them."""
    rng = np.random.default_rng(seed)
    seen = [int(token) for token in start[-CONTEXT:]]
    for _ in range(length):
        *_, log_odds = _forward(parameters, np.array([seen[-CONTEXT:]]))
        odds = np.exp(log_odds[0].astype(np.float64) / temperature)
        seen.append(int(rng.choice(len(odds), p=odds / odds.sum())))
    return seen[CONTEXT:]


def _forward(p: Arrays, contexts: Tokens) -> tuple[Floats, Floats, Floats, Floats]:
    inputs = p["embed"][contexts].reshape(len(contexts), -1)
    first = np.tanh(inputs @ p["w1"] + p["b1"])
    second = np.tanh(first @ p["w2"] + p["b2"])
    scores = second @ p["w3"] + p["b3"]
    scores -= scores.max(1, keepdims=True)
    return inputs, first, second, scores - np.log(np.exp(scores).sum(1, keepdims=True))


def _cross_entropy(log_odds: Floats, targets: Tokens) -> float:
    return float(-log_odds[np.arange(len(targets)), targets].mean())
