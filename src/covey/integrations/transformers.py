"""Hugging Face's Trainer on covey: a callback that saves when the run asks, stops all ranks together, and reports."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import Trainer, TrainerCallback

from covey.base.errors import ConfigError, CoveyError
from covey.base.pace import Growing
from covey.integrations.process_group import ready_group
from covey.runtime.backoff import Backoff
from covey.runtime.group.internals import report_for_program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.proto.checkpointing import Checkpoint
    from covey.runtime.group.group import Group
    from covey.torch.training.together import TrainTogether

__all__ = ["CoveyCallback", "TogetherTrainer"]

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


class TogetherTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose batches and steps are those of `covey.torch.train_together`, on all machines of a run.

        covey.integrations.process_group.as_one_machine()  # before TrainingArguments
        together = covey.torch.train_together(model, optimizer, loader, epochs=3)
        trainer = TogetherTrainer(together, optimizer, model=model, args=arguments)

    The loader's `collate_fn` makes batches that the model takes. `together` counts epochs, steps its own scheduler, and
    ends the training, also after SIGTERM: `max_steps` of the arguments only has to be large enough. The model is
    evaluated and saved with the parameters that all ranks agree on. Gradients are accumulated and clipped on no rank.
    To continue from a checkpoint, load the states of the model, the optimizer and `together` before.
    """

    def __init__(self, together: TrainTogether, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        self._together = together
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        super().__init__(optimizers=(_StepsTogether(together, optimizer), constant), **options)
        if self.args.gradient_accumulation_steps != 1 or self.args.max_grad_norm:
            raise ConfigError("train_together steps for each batch: gradient_accumulation_steps=1, max_grad_norm=0")

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """Train until all epochs are done, or this process was asked to leave."""
        if resume_from_checkpoint:
            raise ConfigError(
                "a checkpoint of the Trainer lacks the position of train_together: load the states of the model, the "
                "optimizer and `together` before train(), and leave resume_from_checkpoint out"
            )
        return super().train(**options)

    def get_train_dataloader(self) -> Any:
        """Return the batches of this rank."""
        return _Batches(self, self._together)

    def evaluate(self, *args: Any, **options: Any) -> Any:
        """Evaluate what all ranks agree on."""
        with self._together.outer_parameters():
            return super().evaluate(*args, **options)

    def save_model(self, *args: Any, **options: Any) -> None:
        """Save what all ranks agree on."""
        with self._together.outer_parameters():
            super().save_model(*args, **options)


class _StepsTogether(torch.optim.Optimizer):  # type: ignore[misc]
    """The optimizer of a Trainer: its steps are those of all ranks."""

    def __init__(self, together: TrainTogether, optimizer: torch.optim.Optimizer) -> None:
        self._together, self._inner = together, optimizer  # its groups and state are the only ones

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, closure: Any = None) -> None:
        """Step once, and clear the gradients."""
        self._together.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: a step clears gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer of this rank."""
        state: dict[str, Any] = self._inner.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state."""
        self._inner.load_state_dict(state_dict)


class _Batches:
    """The batches of this rank. At their end the Trainer stops, which else asks for those of a further epoch."""

    def __init__(self, trainer: TogetherTrainer, together: TrainTogether) -> None:
        self._trainer, self._together = trainer, together

    def __iter__(self) -> Iterator[Any]:
        yield from self._together
        self._trainer.control.should_training_stop = True
