"""Reports about the nodes of the demo: their own, as one JSON object a line, and those of the front process."""

from __future__ import annotations

import msgspec

ROUND = 20
"""Steps between two reports. Evaluation and the decision to stop happen at the end of a round, on all ranks alike."""


class WaitingReport(msgspec.Struct, tag="waiting"):
    """The node is ready and waits: to join, or at the end for nodes that were lost."""


class JoinedReport(msgspec.Struct, tag="joined"):
    """The node is in the group of a generation, and all ranks hold the same parameters."""

    generation: int
    rank: int
    step: int
    """Steps before this generation."""
    lane: str
    """The kinds of lane to the other ranks, as in "shm"; empty if there is no other rank."""
    batch: int
    """Samples that this node takes in one step."""
    gradient_bytes: int
    """Size of the gradients that are averaged in one step."""
    held_out: float
    """Held-out loss of these parameters."""
    donors: tuple[int, ...] = ()
    """The ranks that gave their state to the others."""
    received_bytes: int = 0
    """How much state this node received."""
    restore_seconds: float = 0.0


class RecoveredReport(msgspec.Struct, tag="recovered"):
    """Ranks were lost, and this node finished its operation without them."""

    step: int
    """The current step, or the last one."""
    during: str
    """The operation that was finished without them: "step", "evaluation" or "wait"."""
    generation: int
    lost: tuple[int, ...]
    """Their ranks."""
    left: int
    """How many ranks remain."""
    seconds: float
    """How long the operation took."""
    phases: dict[str, float]
    """Milliseconds from the first sign of the loss to the end of each phase of the recovery."""


class RoundReport(msgspec.Struct, tag="round"):
    """The round that ends with `step` is done."""

    step: int
    steps: int
    """Steps of this node in the round: all of them, unless it joined during the round."""
    samples: int
    """Samples of all contributors in those steps."""
    batch_loss: float
    """Mean loss of this node's own batches in the round."""
    held_out: float
    """Loss on the held-out text after the round, the same on every rank."""
    compute: float
    """Seconds of the round spent on the model."""
    sync: float
    """Seconds of the round in `sync_gradients`, including the wait for slower ranks, and on new generations."""
    sent_bytes: int = 0
    """What this node sent of compressed gradients in the round."""
    plain_bytes: int = 0
    """What it would have sent without compression."""


class FinishedReport(msgspec.Struct, tag="finished"):
    """The node did its last step."""

    digest: str
    """SHA-256 of this node's parameters."""
    identical: bool
    """Whether all ranks gathered the same digest from all ranks."""
    writing: str
    """The model's continuation of PROMPT; only rank 0 writes one."""


class StartedReport(msgspec.Struct, tag="started"):
    """The keeper started the node's process."""

    pid: int


class KilledReport(msgspec.Struct, tag="killed"):
    """The keeper killed the node's process, or saw that a signal did."""

    signal: str


Told = WaitingReport | JoinedReport | RecoveredReport | RoundReport | FinishedReport
"""Reports of nodes."""
Report = Told | StartedReport | KilledReport

PROMPT = "The Rabbit said to Alice, "

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Told).decode
