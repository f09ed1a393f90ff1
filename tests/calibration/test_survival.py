"""The outcome of a round judges its survivals."""

import numpy as np

from sglang_dspark.calibration.survival import as_shown


def test_what_was_not_verified_goes_on_as_predicted_if_all_before_it_was_accepted():
    predicted = np.tile([0.8, 0.4, 0.2, np.nan], (5, 1))
    shown = as_shown(predicted, np.array([3, 3, 2, 1, 0]), np.array([3, 1, 2, 0, 0]))
    expected = [[1, 1, 1], [1, 0, 0], [1, 1, 0.5], [0, 0, 0], [0.8, 0.4, 0.2]]
    np.testing.assert_allclose(shown, [[*row, np.nan] for row in expected])


def test_a_broken_heads_nothing_divides_nothing():
    assert as_shown(np.zeros((1, 2)), np.array([1]), np.array([1])).tolist() == [[1.0, 0.0]]
