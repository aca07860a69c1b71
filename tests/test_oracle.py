"""The engine core cannot corrupt: thousands of random traces, with every read checked (see
tests/oracle.py).

Protects the whole block logic at once, and the oracle itself: each deliberate fault of
tests/mutations.py must be found, and a case that fails must shrink to a small one.
"""

import pytest

from tests.mutations import MUTATIONS, mutated
from tests.oracle import Arrival, Case, failure_of, random_case, run_case, run_seeds, shrink

PARTS, TRACES_PER_PART = 4, 1000


@pytest.mark.parametrize("part", range(PARTS))
def test_random_traces(part):
    seen, failed = run_seeds(range(part * TRACES_PER_PART, (part + 1) * TRACES_PER_PART))
    assert failed is None, f"seed {failed}: {shrink(random_case(failed))}"
    for event in ("preemptions", "swaps", "chunks", "mixed_steps", "copies", "cached_tokens",
                  "aborts", "refusals", "failures", "beam_searches"):
        assert seen[event] > 10, f"the traces hardly touch {event}: {dict(seen)}"


@pytest.mark.parametrize("name", MUTATIONS)
def test_oracle_finds_mutation(name):
    with mutated(name):
        seed = next((seed for seed in range(2000) if failure_of(random_case(seed))), None)
        assert seed is not None, f"2,000 traces do not notice: {name}"
        case = shrink(random_case(seed))
        assert failure_of(case) is not None
        assert len(case.arrivals) <= 4, f"the smallest input found is large: {case}"
    run_case(case)


def test_shrinking_keeps_what_matters():
    case = Case((Arrival((3, 1, 2), 5, step=4), Arrival((0, 2), 3)), num_blocks=9, block_size=4)
    small = shrink(case, lambda c: any(2 in arrival.prompt for arrival in c.arrivals))
    assert small == Case((Arrival((2,)),), num_blocks=2)
