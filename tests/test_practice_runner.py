"""Protects the runner: a case is read into steps, and a difference is named at its first place."""

import pytest

from practice import runner


@pytest.mark.parametrize("got, expected, said", [
    (True, 1, "expected an int 1, got a bool True"),
    ((1, 2), [1, 2], "expected a list [1, 2], got a tuple (1, 2)"),
    (3.0, 3, "expected an int 3, got a float 3.0"),
    (None, [1], "expected a list [1], got None"),
    (0, None, "expected None, got an int 0"),
    ([1, 2], [3], "at [0]: expected 3, got 1"),
    ([3, 2], [3], "expected 1 item, got 2"),
    ([1, 2, 4], [1, 2, 3], "at [2]: expected 3, got 4"),
    ([1, 2], [1, 2, 3], "expected 3 items, got 2"),
    ([(1, "a")], [(1, "b")], "at [0][1]: expected 'b', got 'a'"),
    ({"a": 1}, {"a": 1, "b": 2}, "the key 'b' is missing"),
    ({"a": [1], "b": 2}, {"a": [1]}, "the key 'b' is not expected"),
    (float("nan"), 1.0, "expected 1.0, got nan"),
])
def test_difference_names_the_first_place(got, expected, said):
    assert runner.difference(got, expected) == said


@pytest.mark.parametrize("got, expected, digits", [(1, 1.0, None), (0.1 + 0.2, 0.3, None),
                                                   (46.19, 46.2, 1), (0.4285714, 0.4286, 4),
                                                   ([1, (2, {})], [1, (2, {})], None),
                                                   (float("nan"), float("nan"), None)])
def test_no_difference(got, expected, digits):
    assert runner.difference(got, expected, digits) is None


def test_tensors_are_compared_by_shape_dtype_and_value():
    import torch

    ones = torch.ones(2, 3)
    assert runner.difference(ones + 1e-7, ones) is None
    assert "expected the shape [2, 3], got [3, 2]" in runner.difference(ones.T, ones)
    assert "expected the dtype torch.float32" in runner.difference(ones.double(), ones)
    assert "got a list" in runner.difference([1.0], ones)
    changed = ones.clone()
    changed[1, 2] = torch.nan
    assert runner.difference(changed,
                             ones) == "1 of 6 values differ, first at [1, 2]: expected 1, got nan"


def test_a_script_is_read_into_steps():
    steps = runner.read_script("""
        table = [1]
        f(table)        # → [
                        #    1, 2]
        for x in table:
            g(x)
        g(3)            # raises KeyError
        h()             # ≈ 1.25
    """)
    assert [(step.mark, step.expected) for step in steps] == [("", ""), ("→", "[\n1, 2]"), ("", ""),
                                                              ("raises", "KeyError"), ("≈", "1.25")]
    assert steps[1].source == "f(table)" and steps[2].source.startswith("for x in table:")
    with pytest.raises(SyntaxError):
        runner.read_script("x = 1   # → 1")
