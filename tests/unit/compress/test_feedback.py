"""Error feedback: nothing is lost in the long run, and nothing changes before an operation has succeeded."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.in_turn import in_turn
from tests.unit.compress.arrays import decoded, gradient, normal
from tests.unit.compress.codecs import CODECS

from covey.base.errors import ConfigError
from covey.compress.codec import Codec, encode_with_residual
from covey.compress.feedback import ErrorFeedback
from covey.compress.low_rank import PowerSGD
from covey.compress.quantisers import Int4, Int8, OneBit
from covey.compress.sparse import RandomK, Sparsifier, Threshold, TopK

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.compress.codec import Floats

STEPS = 100


def send_encoded(codec: Codec, feedback: ErrorFeedback, name: str, g: Floats, salt: int) -> Floats:
    """Send a gradient as a collective does, and return what the other ranks decode."""
    step = feedback.begin(name, g)
    work = g.reshape(-1).copy()
    step.add_to(work)
    if step.step < feedback.warmup:
        step.commit()
        return work
    wire, residual = np.zeros(codec.wire_bytes(work.size), np.uint8), np.empty(work.size, np.float32)
    encode_with_residual(codec, work, wire, residual, salt)
    step.commit(residual)
    return decoded(codec, wire, work.size)


def send_selected(sparsifier: Sparsifier, feedback: ErrorFeedback, name: str, g: Floats, salt: int) -> Floats:
    """Send the selected elements of a gradient, and return what the other ranks get."""
    step = feedback.begin(name, g, is_sparse=True)
    work = g.reshape(-1).copy()
    step.add_to(work)
    if step.step < feedback.warmup:
        step.commit()
        return work
    chosen = sparsifier.select(work, salt)
    out = np.zeros_like(work)
    out[chosen] = work[chosen]
    work[chosen] = 0.0
    step.commit(work, chosen)
    return out


def send_factors(codec: PowerSGD, q: Floats, feedback: ErrorFeedback, g: Floats) -> tuple[Floats, Floats]:
    """Send a matrix as two factors, and return what the other ranks rebuild, and the next Q."""
    step = feedback.begin("matrix", g)
    work = g.reshape(-1).copy()
    step.add_to(work)
    matrix = work.reshape(g.shape)
    p = matrix @ q
    codec.orthogonalise(p)
    q, out = matrix.T @ p, np.zeros_like(g)
    codec.rebuild(p, q, out)
    step.commit((matrix - out).reshape(-1))
    return out, q


def gradients(count: int, make: Callable[[int, int], Floats] = gradient) -> list[Floats]:
    """Return gradients that share a direction, as those of successive steps do, and differ by step and position."""
    mean = make(count, 1)
    return [mean + np.float32(0.3) * make(count, 2 + step) for step in range(STEPS)]


def contents(feedback: ErrorFeedback) -> dict[str, dict[str, Any]]:
    """Return the state of a feedback as lists, which can be compared."""
    state = feedback.state_dict()
    return {part: {name: np.asarray(value).tolist() for name, value in state[part].items()} for part in state}


@in_turn(make=[normal, gradient])
@in_turn(codec=CODECS)
def test_the_sum_over_steps_converges_to_the_exact_sum(codec: Codec, make: Callable[[int, int], Floats]) -> None:
    """The distance falls with the number of steps; `onebit` with numbers of eight decades is the slowest."""
    feedback = ErrorFeedback()
    exact, sent = np.zeros(1003), np.zeros(1003)
    distances = []
    for step, g in enumerate(gradients(1003, make)):
        exact += g
        sent += send_encoded(codec, feedback, "g", g, step)
        missing = feedback.begin("g", g).residual
        assert np.allclose(exact - sent, missing, rtol=0, atol=1e-6 * (step + 1)), "only the residual is missing"
        distances.append(float(np.linalg.norm(exact - sent) / np.linalg.norm(exact)))
    assert distances[-1] < max(2e-6, distances[0] / 3)
    assert distances[-1] < max(2e-6, distances[STEPS // 4] / 1.5)


def test_without_feedback_the_sum_over_steps_stays_wrong() -> None:
    """What the test above would miss if residuals changed nothing."""
    codec = next(codec for codec in CODECS if codec.name == "onebit")
    exact, sent = np.zeros(1003), np.zeros(1003)
    for step, g in enumerate(gradients(1003)):
        exact += g
        sent += send_encoded(codec, ErrorFeedback(), "g", g, step)
    assert np.linalg.norm(exact - sent) > 0.5 * np.linalg.norm(exact)


@pytest.mark.parametrize("sparsifier", [TopK(0.05), RandomK(0.1, seed=2), Threshold(0.5)], ids=str)
def test_selected_elements_add_up_to_the_exact_sum(sparsifier: Sparsifier) -> None:
    feedback = ErrorFeedback()
    exact, sent = np.zeros(1003), np.zeros(1003)
    for step, g in enumerate(gradients(1003)):
        exact += g
        sent += send_selected(sparsifier, feedback, "g", g, step)
        missing = feedback.begin("g", g).residual
        assert np.allclose(exact - sent, missing, rtol=0, atol=1e-6 * (step + 1))
    assert np.linalg.norm(exact - sent) < 0.2 * np.linalg.norm(exact)


def test_rebuilt_matrices_add_up_to_the_exact_sum() -> None:
    codec, feedback = PowerSGD(2), ErrorFeedback()
    q = codec.start(30, 20)
    exact, sent = np.zeros((30, 20)), np.zeros((30, 20))
    for g in gradients(600):
        exact += g.reshape(30, 20)
        out, q = send_factors(codec, q, feedback, g.reshape(30, 20))
        sent += out
    assert np.linalg.norm(exact - sent) < 0.1 * np.linalg.norm(exact)


def test_nothing_changes_before_the_commit() -> None:
    """An operation that is tried again after a loss starts from the same residual."""
    feedback, g = ErrorFeedback(), normal(10, 1)
    send_selected(TopK(0.2), feedback, "g", g, 0)
    before = contents(feedback)
    step = feedback.begin("g", g)
    tries = []
    for _ in range(3):
        work = g.copy()
        step.add_to(work)
        tries.append(work.tobytes())
    assert len(set(tries)) == 1
    assert contents(feedback) == before
    assert feedback.begin("new", g).residual.tolist() == [0.0] * 10
    assert feedback.names() == ("g",), "a step that is never committed leaves nothing behind"


def test_a_retry_with_momentum_starts_from_the_same_momentum() -> None:
    feedback, g = ErrorFeedback(momentum=0.9), normal(10, 1)
    send_selected(TopK(0.2), feedback, "g", g, 0)
    step = feedback.begin("g", g, is_sparse=True)
    works = [g.copy(), g.copy()]
    for work in works:
        step.add_to(work)
    assert works[0].tobytes() == works[1].tobytes()


def test_a_step_is_committed_once() -> None:
    step = ErrorFeedback().begin("g", normal(3))
    step.commit(normal(3))
    with pytest.raises(RuntimeError, match="step 0 of 'g' was committed twice"):
        step.commit(normal(3))


def test_two_operations_of_one_name_at_once_are_an_error() -> None:
    feedback = ErrorFeedback()
    for _ in range(2):
        first, second = feedback.begin("g", normal(3)), feedback.begin("g", normal(3))
        first.commit(normal(3))
        with pytest.raises(ConfigError, match="'g' changed during a step: two operations of this name at once"):
            second.commit(normal(3))


def test_a_reset_during_a_step_is_noticed() -> None:
    feedback = ErrorFeedback()
    feedback.begin("g", normal(3)).commit(normal(3))
    step = feedback.begin("g", normal(3))
    feedback.reset()
    with pytest.raises(ConfigError, match="a reset in between"):
        step.commit(normal(3))
    assert feedback.names() == ()


def test_a_residual_is_a_copy_that_the_caller_cannot_change() -> None:
    feedback, mine = ErrorFeedback(), normal(3)
    feedback.begin("g", mine).commit(mine)
    expected = mine.tolist()
    mine[:] = 0
    step = feedback.begin("g", mine)
    assert step.residual.tolist() == expected
    with pytest.raises(ValueError, match="read-only"):
        step.residual[0] = 1.0


def test_a_residual_of_another_size_is_an_error() -> None:
    step = ErrorFeedback().begin("g", normal(3))
    with pytest.raises(ValueError, match=r"a residual of \(1,\) for 3 elements"):
        step.commit(normal(1))
    step.commit(normal(3))


def test_the_fewer_bits_the_more_steps_it_takes() -> None:
    missing = []
    for codec in (Int8(), Int4(), OneBit()):
        feedback = ErrorFeedback()
        for step, g in enumerate(gradients(1003)):
            send_encoded(codec, feedback, "g", g, step)
        missing.append(float(np.linalg.norm(feedback.begin("g", g).residual)))
    assert missing == sorted(missing)


def test_names_do_not_mix() -> None:
    feedback = ErrorFeedback()
    for number, name in enumerate("ab"):
        feedback.begin(name, normal(4)).commit(np.full(4, number + 1, np.float32))
    assert [feedback.begin(name, normal(4)).residual[0] for name in "ab"] == [1.0, 2.0]


def test_what_is_not_finite_leaves_no_residual() -> None:
    feedback = ErrorFeedback(momentum=0.5)
    g = np.array([np.nan, np.inf, -np.inf, 2.0, 3.0], np.float32)
    step = feedback.begin("g", g, is_sparse=True)
    work = g.copy()
    step.add_to(work)
    assert np.isnan(work[0]), "the call itself shows it"
    step.commit(work, np.array([4]))
    assert feedback.begin("g", g).residual.tolist() == [0.0, 0.0, 0.0, 2.0, 3.0]
    assert feedback.state_dict()["velocities"]["g"].tolist() == [0.0, 0.0, 0.0, 2.0, 0.0]


def test_a_changed_shape_is_an_error_that_says_what_to_do() -> None:
    feedback = ErrorFeedback()
    feedback.begin("g", np.zeros((2, 3), np.float32)).commit(normal(6))
    with pytest.raises(ConfigError, match=r"'g' was \(2, 3\) before and is \(6,\) now; .* reset\('g'\) first"):
        feedback.begin("g", normal(6))
    feedback.reset("g")
    assert feedback.begin("g", normal(6)).residual.tolist() == [0.0] * 6


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1, 1)])
def test_arrays_without_axes_or_elements_have_residuals(shape: tuple[int, ...]) -> None:
    feedback, x = ErrorFeedback(), np.zeros(shape, np.float32)
    feedback.begin("g", x).commit(np.full(x.size, 0.5, np.float32))
    assert feedback.begin("g", x).residual.tolist() == [0.5] * x.size
    assert feedback.state_dict()["residuals"]["g"].shape == shape


def test_the_first_steps_of_each_name_are_sent_as_they_are() -> None:
    feedback, g = ErrorFeedback(warmup=2), normal(100, 1)
    codec = next(codec for codec in CODECS if codec.name == "onebit")
    sent = [send_encoded(codec, feedback, "g", g, 0).tolist() == g.tolist() for _ in range(4)]
    assert sent == [True, True, False, False]
    assert feedback.begin("g", g).step == 4
    assert feedback.begin("other", g).step < feedback.warmup


def test_momentum_gathers_where_nothing_is_sent_and_ends_where_it_is() -> None:
    """By hand: velocity = 0.5 * velocity + g, residual += velocity; both are 0 where they were sent."""
    feedback = ErrorFeedback(momentum=0.5)
    g = np.array([1.0, 4.0], np.float32)
    assert send_selected(TopK(0.5), feedback, "g", g, 0).tolist() == [0.0, 4.0]
    assert feedback.begin("g", g).residual.tolist() == [1.0, 0.0]
    # velocity 1.5 and 4, residual 2.5 and 4
    assert send_selected(TopK(0.5), feedback, "g", g, 1).tolist() == [0.0, 4.0]
    # velocity 1.75 and 4, residual 4.25 and 4
    assert send_selected(TopK(0.5), feedback, "g", g, 2).tolist() == [4.25, 0.0]
    state = feedback.state_dict()
    assert state["residuals"]["g"].tolist() == [0.0, 4.0]
    assert state["velocities"]["g"].tolist() == [0.0, 4.0]


def test_momentum_is_that_of_sgd_while_everything_is_sent() -> None:
    feedback = ErrorFeedback(warmup=3, momentum=0.5)
    g = np.array([1.0, 2.0], np.float32)
    sent = [send_selected(TopK(0.5), feedback, "g", g, step).tolist() for step in range(3)]
    assert sent == [[1.0, 2.0], [1.5, 3.0], [1.75, 3.5]]


def test_momentum_is_for_sparsifiers_only() -> None:
    feedback, g = ErrorFeedback(momentum=0.9), normal(50)
    send_encoded(CODECS[0], feedback, "g", g, 0)
    assert feedback.state_dict()["velocities"] == {}


def test_momentum_needs_the_indices_that_were_sent() -> None:
    step = ErrorFeedback(momentum=0.9).begin("g", normal(3), is_sparse=True)
    with pytest.raises(ValueError, match="commit needs the indices that were sent"):
        step.commit(normal(3))


def test_a_lost_rank_takes_its_residual_with_it_and_a_newcomer_has_none() -> None:
    """The sum over steps misses what the lost rank had not sent yet, and nothing else."""
    sparsifier = TopK(0.05)
    ranks = {rank: ErrorFeedback() for rank in range(3)}
    exact, sent = np.zeros(1003), np.zeros(1003)
    for step in range(STEPS):
        if step == 50:
            lost = ranks.pop(1).state_dict()["residuals"]["g"]
            ranks[3] = ErrorFeedback()
        for rank, feedback in ranks.items():
            g = gradient(1003, 1000 * rank + step)
            exact += g
            sent += send_selected(sparsifier, feedback, "g", g, step)
    residuals = sum(feedback.state_dict()["residuals"]["g"].astype(np.float64) for feedback in ranks.values())
    assert np.allclose(exact - sent, residuals + lost, rtol=0, atol=1e-4)
    assert np.abs(lost).max() > 1e-2
    assert ranks[3].begin("g", lost).step == 50


def test_a_state_continues_where_it_was_saved() -> None:
    one = ErrorFeedback(warmup=1, momentum=0.9)
    for step in range(3):
        send_selected(TopK(0.1), one, "a", normal(100, step).reshape(10, 10), step)
        send_encoded(CODECS[-1], one, "b", normal(7, step), step)
    state = pickle.loads(pickle.dumps(one.state_dict()))
    other = ErrorFeedback(warmup=1, momentum=0.9)
    other.load_state_dict(state)
    state["residuals"]["a"][:] = 99.0  # a copy was loaded
    for feedback in (one, other):
        assert feedback.names() == ("a", "b")
        assert feedback.nbytes == 4 * (100 + 100 + 7)
    for step in range(3, 6):
        g = normal(100, step).reshape(10, 10)
        sent = [send_selected(TopK(0.1), feedback, "a", g, step).tolist() for feedback in (one, other)]
        assert sent[0] == sent[1]
    assert contents(one) == contents(other)


def test_a_saved_state_is_a_copy() -> None:
    feedback = ErrorFeedback()
    feedback.begin("g", normal(3)).commit(np.ones(3, np.float32))
    feedback.state_dict()["residuals"]["g"][:] = 7.0
    assert feedback.begin("g", normal(3)).residual.tolist() == [1.0] * 3


def good_state() -> dict[str, Any]:
    feedback = ErrorFeedback(momentum=0.9)
    send_selected(TopK(0.5), feedback, "g", normal(6).reshape(2, 3), 0)
    return feedback.state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("steps"), "has not the parts steps, residuals, velocities"),
        (lambda state: state.update(more={}), "has not the parts"),
        (lambda state: state.update(steps=3), "has not the parts"),
        (lambda state: state["steps"].update(h=1), "have different names"),
        (lambda state: state["velocities"].update(h=normal(6)), "have different names"),
        (lambda state: state["steps"].update(g=0), "the state of 'g' has 0 steps"),
        (lambda state: state["steps"].update(g=1.5), "the state of 'g' has 1.5 steps"),
        (lambda state: state["residuals"].update(g=[1.0, 2.0]), "not an array of finite float32 numbers"),
        (lambda state: state["residuals"].update(g=np.full((2, 3), np.nan, np.float32)), "finite float32"),
        (lambda state: state["residuals"].update(g="text"), "finite float32"),
        (lambda state: state["velocities"].update(g=normal(6)), "the state of 'g' has two shapes"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change: Any, message: str) -> None:
    state = good_state()
    change(state)
    feedback = ErrorFeedback()
    feedback.begin("x", normal(3)).commit(np.ones(3, np.float32))
    before = contents(feedback)
    with pytest.raises(ConfigError, match=message):
        feedback.load_state_dict(state)
    assert contents(feedback) == before


@pytest.mark.parametrize("state", [None, 3, [], "state", {}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(ConfigError, match="has not the parts"):
        ErrorFeedback().load_state_dict(state)


@pytest.mark.parametrize("arguments", [{"warmup": -1}, {"warmup": 1.5}, {"warmup": True}])
def test_a_warmup_is_a_number_of_steps(arguments: Any) -> None:
    with pytest.raises(ConfigError, match="give a number of steps"):
        ErrorFeedback(**arguments)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan"), "0.9", True])
def test_momentum_is_from_0_to_below_1(momentum: Any) -> None:
    with pytest.raises(ConfigError, match="give a number from 0 to below 1"):
        ErrorFeedback(momentum=momentum)
