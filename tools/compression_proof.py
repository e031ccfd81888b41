"""Train a small character model on four ranks with every codec, and draw how the loss falls, as an SVG.

    python -m tools.compression_proof docs/compression.svg

Prints a table of the final losses. All trainings start from the same parameters and draw the same batches. They differ
only in how gradients are sent, with and without error feedback. Takes about four minutes of processor time.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from xml.sax.saxutils import escape

import numpy as np

import covey
from covey.cli.status.drawing import DARK, STYLE
from covey.compress.policy import make_policy
from covey.lab.demo import model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from covey import Group

RANKS: Final = 4
CODECS: Final = (
    *("fp16", "bf16", "fp8", "fp8(e5m2)", "int8", "int4", "onebit"),
    *("topk(0.01)", "threshold(0.03)", "randomk(0.1)", "powersgd(4)"),
)
NONE: Final = "none"
SMALLEST: Final = 1024
"""Bytes of the smallest gradient that is compressed: all but the biases."""
MOMENTUM: Final = 0.9
TRAINING_STRIDE: Final = 7
"""The loss of the training text is that of every seventh character."""
ONE_THREAD: Final = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
"""Four ranks share the cores; threads of their own would only take turns."""

COLUMNS: Final = 4
PANEL_WIDTH, PANEL_HEIGHT = 190, 130
CELL_WIDTH, CELL_HEIGHT = 232, 184
TOP: Final = 104
HIGHEST_LOSS: Final = 3.0
"""Where the pictures end: the first steps are steep and all alike."""


class Training(NamedTuple):
    """What all trainings have in common."""

    steps: int = 900
    batch: int = 64
    """Characters that each rank guesses in a step."""
    hidden: int = 128
    rate: float = 1.0
    """The first learning rate. It falls to 0 in a straight line."""
    points: int = 30
    """How many times the loss is measured."""
    seed: int = 1


class Trial(NamedTuple):
    """How gradients are sent in one training."""

    codec: str
    has_feedback: bool


class Curve(NamedTuple):
    """How one training went; the same on all ranks."""

    losses: tuple[float, ...]
    """Of the held-out text, in nats per character, at equal distances; the first before the first step."""
    training_loss: float
    """Of the training text, in the end."""
    ratio: float
    """How many times fewer bytes of gradients were sent, where they were compressed."""
    digest: str
    """Of the final parameters."""


TRIALS: Final = (Trial(NONE, False), *(Trial(codec, with_it) for codec in CODECS for with_it in (False, True)))


def train(group: Group, trial: Trial, training: Training) -> Curve:
    """Train a model from the beginning, as one rank, by gradient descent with momentum."""
    book = model.load()
    contexts, targets = model.examples(book.training)
    held_out = model.examples(book.held_out)
    parameters = model.initial(len(book.alphabet), training.seed, hidden=training.hidden)
    velocities = {name: np.zeros_like(array) for name, array in parameters.items()}
    policy = make_policy(trial.codec, smallest=SMALLEST)
    feedback = covey.ErrorFeedback() if trial.has_feedback else False
    losses = [model.loss(parameters, *held_out)]
    before = group.compression
    for step in range(training.steps):
        draw = np.random.default_rng((training.seed, group.rank, step))
        batch = draw.integers(len(targets), size=training.batch)
        _, gradients = model.loss_and_gradients(parameters, contexts[batch], targets[batch])
        group.sync_gradients(gradients, compress=policy, feedback=feedback)
        rate = np.float32(training.rate * (1 - step / training.steps) * (1 - MOMENTUM))
        for name, velocity in velocities.items():
            velocity *= np.float32(MOMENTUM)
            velocity += gradients[name]
            parameters[name] -= rate * velocity
        if (step + 1) * training.points // training.steps > step * training.points // training.steps:
            losses.append(model.loss(parameters, *held_out))
    sent, plain = (now - then for now, then in zip(group.compression[1:3], before[1:3], strict=True))
    training_loss = model.loss(parameters, contexts[::TRAINING_STRIDE], targets[::TRAINING_STRIDE])
    digest = hashlib.sha256(b"".join(array.tobytes() for array in parameters.values())).hexdigest()
    return Curve(tuple(losses), training_loss, plain / sent if sent else 1.0, digest)


def train_all(group: Group, trials: Sequence[Trial], training: Training) -> list[Curve]:
    """Train once for each trial, as one rank."""
    curves = []
    for trial in trials:
        curves.append(train(group, trial, training))
        if group.rank == 0:
            print(f"{trial.codec}{' with feedback' * trial.has_feedback}: {curves[-1].losses[-1]:.3f}", flush=True)
    return curves


def measure(trials: Sequence[Trial], training: Training) -> dict[Trial, Curve]:
    """Train once for each trial, on new processes; all ranks must end with the same parameters."""
    os.environ |= ONE_THREAD  # the ranks inherit it
    by_rank = covey.launch(train_all, RANKS, trials, training)
    for trial, *curves in zip(trials, *by_rank, strict=True):
        if len({curve.digest for curve in curves}) > 1:
            raise SystemExit(f"{trial}: the parameters of the ranks differ")
    return dict(zip(trials, by_rank[0], strict=True))


def table(curves: Mapping[Trial, Curve]) -> str:
    """Return the final losses as a table in Markdown, with their distance from those without compression."""
    plain = curves[Trial(NONE, False)]
    lines = [
        "| codec | fewer bytes | held-out text, without feedback | with feedback | training text, without | with |",
        "|---|---|---|---|---|---|",
        f"| none | | {plain.losses[-1]:.3f} | | {plain.training_loss:.3f} | |",
    ]
    for codec in dict.fromkeys(trial.codec for trial in curves if trial.codec != NONE):
        pair = [curves[Trial(codec, has_feedback)] for has_feedback in (False, True)]
        held_out = [_compared(curve.losses[-1], plain.losses[-1]) for curve in pair]
        trained = [_compared(curve.training_loss, plain.training_loss) for curve in pair]
        lines.append(
            " | ".join([f"| `{codec}`", f"{pair[1].ratio:.1f}x", *held_out, *trained, "|"]).rstrip(" |") + " |"
        )
    return "\n".join(lines)


def _compared(loss: float, plain: float) -> str:
    return f"{loss:.3f} ({100 * (loss / plain - 1):+.1f} %)"


def draw(curves: Mapping[Trial, Curve], training: Training) -> str:
    """Return the SVG text: a panel for each codec, with the curve of no compression behind its own two."""
    codecs = list(dict.fromkeys(trial.codec for trial in curves if trial.codec != NONE))
    width, height = 28 + COLUMNS * CELL_WIDTH + 4, TOP + -(-len(codecs) // COLUMNS) * CELL_HEIGHT
    title = "Loss of the held-out text with compressed gradients"
    note = f"{RANKS} ranks, {training.steps} steps of {RANKS * training.batch} characters; nats per character by step"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' role="img" aria-labelledby="t d">',
        f'<title id="t">{title}</title>',
        f'<desc id="d">{escape(note)}; a panel for each of {escape(", ".join(codecs))}</desc>',
        f"<style>{STYLE} .plain {{ stroke: #94a3b8; stroke-width: 5; opacity: 0.6; }} .with {{ stroke: #0f766e; }}"
        f" .without {{ stroke: #c2410c; stroke-dasharray: 5 4; }} @media (prefers-color-scheme: dark) {{ {DARK}"
        " .plain { stroke: #64748b; } .with { stroke: #2dd4bf; } .without { stroke: #fb923c; } }</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="10"/>',
        f'<text class="title" x="28" y="38">{title}</text>',
        f'<text class="note" x="28" y="60">{escape(note)}</text>',
        f'<clipPath id="c"><rect width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}"/></clipPath>',
    ]
    across = 28
    for kind, words in (("plain", "no compression"), ("with", "with feedback"), ("without", "without feedback")):
        parts.append(f'<line class="line {kind}" x1="{across}" x2="{across + 28}" y1="84" y2="84"/>')
        parts.append(f'<text x="{across + 36}" y="88">{words}</text>')
        across += 60 + 8 * len(words)
    lowest = min(min(curve.losses) for curve in curves.values())
    for number, codec in enumerate(codecs):
        row, column = divmod(number, COLUMNS)
        parts += _panel(56 + column * CELL_WIDTH, TOP + 24 + row * CELL_HEIGHT, codec, curves, training, lowest)
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    left: int, top: int, codec: str, curves: Mapping[Trial, Curve], training: Training, lowest: float
) -> list[str]:
    low = int(lowest * 10) / 10

    def down(loss: float) -> float:
        return PANEL_HEIGHT * (HIGHEST_LOSS - loss) / (HIGHEST_LOSS - low)

    parts = [f'<g transform="translate({left} {top})">', f'<text class="heading" y="-8">{escape(codec)}</text>']
    for tick in (2.0, 2.5, 3.0):
        parts.append(f'<line class="grid" x2="{PANEL_WIDTH}" y1="{down(tick):.1f}" y2="{down(tick):.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="-8" y="{down(tick) + 4:.1f}">{tick:g}</text>')
    for share in (0, 0.5, 1):
        anchor, at = "middle" if share else "start", share * PANEL_WIDTH
        text_at = f'<text class="tick" text-anchor="{anchor}" x="{at:g}" y="{PANEL_HEIGHT + 16}">'
        parts.append(f"{text_at}{share * training.steps:g}</text>")
    parts.append('<g clip-path="url(#c)">')
    shown = (("plain", Trial(NONE, False)), ("without", Trial(codec, False)), ("with", Trial(codec, True)))
    for kind, trial in shown:
        losses = curves[trial].losses
        points = " ".join(
            f"{PANEL_WIDTH * at / (len(losses) - 1):.1f},{down(loss):.1f}" for at, loss in enumerate(losses)
        )
        parts.append(f'<polyline class="line {kind}" points="{points}"/>')
    return [*parts, "</g>", "</g>"]


def main() -> None:
    """Measure, print the table, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="the SVG to write")
    parser.add_argument("--seed", type=int, default=Training().seed, help="of the parameters and the batches")
    asked = parser.parse_args()
    training = Training(seed=asked.seed)
    curves = measure(TRIALS, training)
    asked.picture.write_text(draw(curves, training))
    print(table(curves))


if __name__ == "__main__":
    main()
