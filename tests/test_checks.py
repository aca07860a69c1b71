"""Arguments: integers of any kind are taken, everything else is refused in a sentence that names
it.

Protects callers who count with NumPy, and sizes and sampling parameters from values that do harm
later.
"""

import re

import numpy as np
import pytest

from paged import BeamSearchParams, BlockPool, EngineConfig, SamplingParams
from paged.checks import whole_number


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_integers_of_any_kind_become_ints(value):
    assert type(whole_number("n", value)) is int and whole_number("n", value, least=3) == 3


@pytest.mark.parametrize("value", [2, np.int64(2), 3.0, "3", None, True, [3], float("nan")])
def test_others_and_smaller_ones_are_refused_by_name_and_value(value):
    with pytest.raises(ValueError,
                       match=re.escape(f"n is {value!r}: it must be an integer of at least 3")):
        whole_number("n", value, least=3)


def test_sizes_and_parameters_from_numpy():
    config = EngineConfig(num_blocks=np.int64(8), block_size=np.int32(2),
                          num_host_blocks=np.int64(4))
    assert {type(n)
            for n in (config.num_blocks, config.block_size, config.num_host_blocks)} == {int}
    assert BlockPool(np.int64(4)).allocate(np.int64(2)) == [0, 1]
    params = SamplingParams(max_tokens=np.int64(4), seed=np.int64(-3), temperature=np.float32(0.5),
                            stop_token_ids=np.array([3, 5]))
    assert params == SamplingParams(max_tokens=4, seed=-3, temperature=0.5, stop_token_ids=(3, 5))
    assert type(params.seed) is int and type(params.stop_token_ids[0]) is int


@pytest.mark.parametrize("name, value", [("stop", 5), ("stop", b"x"), ("stop", [5]),
                                         ("stop_token_ids", 5), ("stop_token_ids", "abc"),
                                         ("stop_token_ids", [1.5]), ("ignore_eos", "no"),
                                         ("temperature", "1"), ("seed", 1.5), ("logprobs", True)])
def test_sampling_parameters_of_a_wrong_type(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})
    with pytest.raises(ValueError):
        BeamSearchParams(**{name: value})


@pytest.mark.parametrize("name, value", [("seed", "x"), ("seed", None),
                                         ("enable_prefix_caching", "no")])
def test_an_engine_of_a_wrong_type(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        EngineConfig(num_blocks=8, **{name: value})
