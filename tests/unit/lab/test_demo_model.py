"""The demo's character model and its text."""

from __future__ import annotations

import math

import numpy as np
import pytest

from covey.lab.demo import model


def test_every_gradient_agrees_with_finite_differences() -> None:
    rng = np.random.default_rng(5)
    parameters = model.initial(7, 3, embedding=3, hidden=5, dtype="float64")
    contexts, targets = rng.integers(7, size=(9, model.CONTEXT)), rng.integers(7, size=9)
    _, gradients = model.loss_and_gradients(parameters, contexts, targets)
    assert gradients.keys() == parameters.keys()
    step = 1e-6
    for name, values in parameters.items():
        for place in np.ndindex(values.shape):
            kept = values[place]
            values[place] = kept + step
            above = model.loss(parameters, contexts, targets)
            values[place] = kept - step
            below = model.loss(parameters, contexts, targets)
            values[place] = kept
            slope = (above - below) / (2 * step)
            assert gradients[name][place] == pytest.approx(slope, rel=1e-5, abs=1e-8), (name, place)


def test_the_first_guess_is_nearly_uniform_and_training_on_a_batch_learns_it() -> None:
    rng = np.random.default_rng(0)
    contexts, targets = rng.integers(20, size=(32, model.CONTEXT)), rng.integers(20, size=32)
    parameters = model.initial(20, 1)
    optimizer = model.Adam(parameters)
    first = model.loss(parameters, contexts, targets)
    assert first == pytest.approx(math.log(20), abs=0.1)
    for number in range(1, 61):
        optimizer.step(parameters, model.loss_and_gradients(parameters, contexts, targets)[1], number)
    assert model.loss(parameters, contexts, targets) < 0.2 * first


def test_training_goes_on_to_the_last_bit_where_its_state_was_put_into_another_copy() -> None:
    rng = np.random.default_rng(2)
    contexts, targets = rng.integers(9, size=(8, model.CONTEXT)), rng.integers(9, size=8)
    one, other = model.initial(9, 1), model.initial(9, 2)
    trained, fresh = model.Adam(one), model.Adam(other)
    for number in range(1, 8):
        if number == 5:
            for name in one:
                other[name][...] = one[name]
            for name, array in trained.state.items():
                fresh.state[name][...] = array
        for parameters, optimizer in ((one, trained), (other, fresh)):
            optimizer.step(parameters, model.loss_and_gradients(parameters, contexts, targets)[1], number)
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_gradients_have_the_type_and_shape_of_their_parameters() -> None:
    parameters = model.initial(11, 2)
    contexts = np.zeros((4, model.CONTEXT), np.intp)
    _, gradients = model.loss_and_gradients(parameters, contexts, np.array([1, 2, 3, 10]))
    assert {name: (g.shape, g.dtype) for name, g in gradients.items()} == {
        name: (p.shape, p.dtype) for name, p in parameters.items()
    }


def test_writing_is_as_long_as_asked_and_the_same_for_the_same_seed() -> None:
    parameters = model.initial(9, 4)
    start = np.arange(model.CONTEXT) % 9
    one, again, other = (model.write(parameters, start, 50, seed) for seed in (1, 1, 2))
    assert len(one) == 50
    assert set(one) <= set(range(9))
    assert one == again != other


def test_the_bundled_text_is_plain_names_its_author_and_holds_paragraphs_back() -> None:
    book = model.load()
    everything = len(book.training) + len(book.held_out)
    assert "Lewis Carroll" in book.title
    assert 20_000 < everything < 60_000
    assert book.alphabet.isascii()
    assert 0.05 < len(book.held_out) / everything < 0.2
    kept, held = (set(book.decode(list(part)).splitlines()) for part in (book.training, book.held_out))
    assert kept.isdisjoint(held)


def test_encoding_and_decoding_are_inverse() -> None:
    book = model.load()
    words = "The Rabbit said to Alice, "
    assert book.decode([int(token) for token in book.encode(words)]) == words


def test_an_example_is_a_context_and_the_character_after_it() -> None:
    tokens = np.arange(100, 100 + model.CONTEXT + 3)
    contexts, targets = model.examples(tokens)
    assert len(contexts) == len(targets) == 3
    for index in range(3):
        assert list(contexts[index]) == list(tokens[index : index + model.CONTEXT])
        assert targets[index] == tokens[index + model.CONTEXT]


def test_letter_pairs_predict_a_strict_alternation_and_nothing_of_noise() -> None:
    alternation = np.tile([0, 1], 500)
    assert model.pair_loss(alternation, alternation, 2) < 0.01
    noise, other = np.random.default_rng(1).integers(4, size=(2, 5000))
    assert model.pair_loss(noise, other, 4) == pytest.approx(math.log(4), abs=0.05)
