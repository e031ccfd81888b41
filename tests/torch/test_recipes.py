"""The recipes of the guide train on covey: its code, as it stands there, with the real packages, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.torch import recipe_ranks
from tests.torch.test_examples import run

pytestmark = pytest.mark.thorough  # needs packages of requirements-all.txt

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "recipes.md"
RECIPES = ("Hugging Face Accelerate", "Hugging Face Trainer", "Lightning")
TOGETHER = ("Accelerate", "Trainer", "Lightning")
PROGRAMS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
CHECK = """
parameters = [each.detach().double().sum().item() for each in model.parameters()]
told = [together.done, together.group.size, together.samples, losses[-1] < 0.8 * losses[0]]
print("so:", told, parameters)
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What two ranks said about each recipe."""
    folder = tmp_path_factory.mktemp("recipes")
    for title, program in zip(RECIPES, PROGRAMS[: len(RECIPES)], strict=True):
        (folder / title).write_text(program)
    return run("covey", "run", "-n", "2", recipe_ranks.__file__, *RECIPES, cwd=folder)


def test_the_trainer_saves_the_checkpoint_that_the_run_requests(output: str) -> None:
    for rank in (0, 1):
        assert re.search(rf"\[{rank}\] checkpoints: \['begun asked', 'ended asked'\], \['checkpoint-\d+'\]", output), (
            output
        )


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipe_trains_one_model_on_covey(recipe: str, output: str) -> None:
    for rank in (0, 1):
        assert f"[{rank}] {recipe}: covey, 2 ranks, one model, a loss that fell" in output, output


@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_and_losses_are_reported_by_themselves(recipe: str, output: str) -> None:
    for rank in (0,) if "Accelerate" in recipe else (0, 1):  # which logs on its first rank only
        told = re.search(rf"\[{rank}\] {recipe}: .*; step (\d+) is reported with (.*)", output)
        assert told is not None, output
        assert int(told[1]) >= 8
        assert any("loss" in name for name in told[2].split(", ")), told[2]


@pytest.mark.parametrize("recipe", TOGETHER)
def test_the_recipe_with_train_together_makes_one_model_of_what_both_ranks_learn(recipe: str, tmp_path: Path) -> None:
    programs = dict(zip(TOGETHER, PROGRAMS[len(RECIPES) :], strict=True))
    (tmp_path / "recipe.py").write_text(programs[recipe] + CHECK)
    output = run("covey", "run", "-n", "2", "recipe.py", cwd=tmp_path)
    said = [re.search(rf"\[{rank}\] so: (.*)", output) for rank in (0, 1)]
    assert said[0] is not None, output
    assert said[1] is not None, output
    assert said[0][1] == said[1][1]
    assert said[0][1].startswith(f"[True, 2, {256 if recipe == 'Trainer' else 4 * 256}, True]")


LEAVE = """
import os, signal
from transformers import TrainerCallback
class Leave(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if together.group.rank == 1 and state.global_step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
try:
    trainer.train(resume_from_checkpoint=True)
except covey.ConfigError as error:
    print("refused:", error)
trainer.add_callback(Leave())
trainer.train()
"""


def test_a_trainer_that_is_asked_to_leave_ends_and_the_other_one_trains_on_the_rest(tmp_path: Path) -> None:
    program = dict(zip(TOGETHER, PROGRAMS[len(RECIPES) :], strict=True))["Trainer"]
    (tmp_path / "recipe.py").write_text(program.replace("trainer.train()\n", LEAVE) + CHECK)
    output = run("covey", "run", "-n", "2", "recipe.py", cwd=tmp_path)
    assert re.search(r"\[0\] so: \[True, 1, 256, True\]", output), output
    assert re.search(r"\[1\] so: \[False, ", output), output
    assert output.count("refused: a checkpoint of the Trainer lacks the position") == 2, output
