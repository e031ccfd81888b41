"""What a rank of the demo tells the front: JSON, one report a line."""

from __future__ import annotations

import msgspec

ROUND = 20
"""Steps between two reports. Evaluation and the decision to stop happen at the end of a round, on all ranks alike."""


class Joined(msgspec.Struct, tag="joined"):
    """The rank is in the group, and all ranks hold rank 0's parameters."""

    pid: int
    lane: str
    """The kinds of lane to the other ranks, as in "shm"; empty where there is no other rank."""
    batch: int
    """Samples that this rank takes in one step."""
    gradient_bytes: int
    """Size of the gradients that are averaged in one step."""
    held_out: float
    """Held-out loss before the first step."""


class Round(msgspec.Struct, tag="round"):
    """ROUND more steps are done."""

    step: int
    batch_loss: float
    """Mean loss of this rank's own batches in the round."""
    held_out: float
    """Loss on the held-out text after the round, the same on every rank."""
    compute: float
    """Seconds of the round spent on the model."""
    sync: float
    """Seconds of the round spent in `sync_gradients`, waiting for slower ranks included."""


class Finished(msgspec.Struct, tag="finished"):
    """The rank did its last step."""

    digest: str
    """SHA-256 of this rank's parameters."""
    identical: bool
    """Whether all ranks gathered the same digest from all ranks."""
    writing: str
    """What the model writes after being shown PROMPT; only rank 0 writes."""


Report = Joined | Round | Finished

PROMPT = "The Rabbit said to Alice, "

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Report).decode
