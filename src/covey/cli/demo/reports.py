"""Reports about the nodes of the demo: their own, as JSON with one report a line, and those of the front process."""

from __future__ import annotations

import msgspec

ROUND = 20
"""Steps between two reports. Evaluation and the decision to stop happen at the end of a round, on all ranks alike."""


class Waiting(msgspec.Struct, tag="waiting"):
    """The node is ready and waits: to be let in, or at the end for those that were lost."""


class Joined(msgspec.Struct, tag="joined"):
    """The node is in the group of a generation, and all ranks hold the same parameters."""

    generation: int
    rank: int
    step: int
    """Steps that were done before this generation."""
    lane: str
    """The kinds of lane to the other ranks, as in "shm"; empty where there is no other rank."""
    batch: int
    """Samples that this node takes in one step."""
    gradient_bytes: int
    """Size of the gradients that are averaged in one step."""
    held_out: float
    """Held-out loss of these parameters."""
    donors: tuple[int, ...] = ()
    """The ranks from which all nodes have their state now."""
    received_bytes: int = 0
    """How much of it came to this node."""
    restore_seconds: float = 0.0


class Recovered(msgspec.Struct, tag="recovered"):
    """Some were lost, and this node finished what it was in without them."""

    step: int
    """The step that was being done, or that came last."""
    during: str
    """What was finished without them: "step", "evaluation" or "wait"."""
    generation: int
    lost: tuple[int, ...]
    """Their ranks."""
    left: int
    """How many go on."""
    seconds: float
    """How long that took."""
    phases: dict[str, float]
    """Milliseconds from the first sign of the loss to the end of each phase of the recovery."""


class Round(msgspec.Struct, tag="round"):
    """The round that ends with `step` is done."""

    step: int
    steps: int
    """Steps that this node did in the round: all but for one that came in the middle."""
    samples: int
    """Samples of all that contributed, in those steps."""
    batch_loss: float
    """Mean loss of this node's own batches in the round."""
    held_out: float
    """Loss on the held-out text after the round, the same on every rank."""
    compute: float
    """Seconds of the round spent on the model."""
    sync: float
    """Seconds of the round spent in `sync_gradients`, waiting for slower ranks included, and on new generations."""


class Finished(msgspec.Struct, tag="finished"):
    """The node did its last step."""

    digest: str
    """SHA-256 of this node's parameters."""
    identical: bool
    """Whether all ranks gathered the same digest from all ranks."""
    writing: str
    """What the model writes after being shown PROMPT; only rank 0 writes."""


class Started(msgspec.Struct, tag="started"):
    """The keeper started the node's process."""

    pid: int


class Killed(msgspec.Struct, tag="killed"):
    """The keeper killed the node's process, or saw that a signal did."""

    signal: str


Told = Waiting | Joined | Recovered | Round | Finished
"""What nodes tell."""
Report = Told | Started | Killed

PROMPT = "The Rabbit said to Alice, "

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Told).decode
