"""Hugging Face's Trainer on covey: a callback that saves when the run asks, stops all ranks together, and reports."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from transformers import TrainerCallback

from covey.base.errors import CoveyError
from covey.base.pace import Growing
from covey.integrations.process_group import ready_group
from covey.runtime.backoff import Backoff
from covey.runtime.group.internals import report_for_program

if TYPE_CHECKING:
    from covey.proto.checkpointing import Checkpoint
    from covey.runtime.group.group import Group

__all__ = ["CoveyCallback"]

STOP: Final = "stop"
"""The id and the path of the checkpoint after which all ranks stop."""
REQUEST_PAUSES: Final = Growing(0.1, 1.0)
"""Between requests for the last checkpoint, while another one is under way."""


class CoveyCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by mypy
    """Saves a checkpoint of the Trainer when the run requests one, stops the training after SIGTERM, and reports.

        callback = CoveyCallback()  # before the Trainer: it makes the process group
        trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
        trainer.train(resume_from_checkpoint=True)

    `callback.group.request_checkpoint()` and SIGUSR2 request a checkpoint; all ranks save after the same step. When a
    rank gets SIGTERM, all ranks save and stop after the same step: torchrun sends it when machines join or leave (with
    `--rdzv-backend covey`), and then starts the script anew, which resumes from there. A program that handles SIGTERM
    itself keeps its handler.
    """

    def __init__(self) -> None:
        self.group: Group = ready_group()
        self._saving: Checkpoint | None = None
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=self._stop, daemon=True).start())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Report the step; ask the Trainer to save, or to stop, after it."""
        report_for_program(self.group, state.global_step, {})
        self._saving = self.group.checkpoint_pending
        if self._saving is not None:
            control.should_save = True
            control.should_training_stop = self._saving.path == STOP
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Report what the Trainer logs."""
        report_for_program(self.group, state.global_step, logs or {})

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell the run that this rank has saved."""
        if self._saving is not None:
            self._saving = None
            self.group.end_checkpoint()

    def _stop(self) -> None:
        """Request a checkpoint after which all ranks stop; again, if another one is under way."""
        with contextlib.suppress(CoveyError):  # the group has ended, and so has the training
            tries = Backoff("the end of the checkpoint that is under way", REQUEST_PAUSES)  # ends with the group
            while (under_way := self.group.request_checkpoint(STOP, id=STOP)) != STOP:
                tries.failed(f"checkpoint {under_way} is not saved on all ranks")
                time.sleep(tries.pause)
