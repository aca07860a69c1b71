"""The simulated fleet: its clock against arithmetic, its rules against their definition, its
figures against its samples.

Protects what the book says about routing.
"""

import json
import math
import random
from dataclasses import asdict

import pytest

from paged.__main__ import main
from paged.bench.conversations import Load, conversations
from paged.bench.fleet import Fleet, Sizes, StepTime, packed, step_time_of, unpacked
from paged.bench.routing import ROUTERS, LongestMatch
from paged.bench.workload import with_other_first_tokens, workload
from paged.engine import Engine, EngineConfig
from paged.lab.notebook import record

CONFIG = EngineConfig(num_blocks=400, block_size=16, max_num_seqs=64, max_num_batched_tokens=512,
                      max_model_len=2000)
PLANTED = StepTime(fixed=3e-3, token=2e-5, context=1e-7)
LOAD = Load(rate=20, seconds=2, system_prompts=3, system_tokens=(50, 200), turns=3,
            user_tokens=(5, 50), answer_tokens=(3, 12), pause=0.1, longest=900)


def run(rule, load=LOAD, replicas=4, config=CONFIG):
    return Fleet(load, rule, replicas, config, PLANTED).run()


def test_one_turn_takes_what_its_steps_take():
    load = Load(rate=1, seconds=0.14, system_prompts=1, system_tokens=(700, 700), turns=1,
                user_tokens=(100, 100), answer_tokens=(4, 4), seed=1)
    assert len(conversations(load, 16)) == 1
    (turn,) = run("round robin", load).served
    # Of the system prompt, 43 blocks of 16 were there; the rest of the prompt is one step.
    first = PLANTED.seconds(800 - 688, 800)
    rest = sum(PLANTED.seconds(1, 801 + number) for number in range(3))
    assert turn.first_token == pytest.approx(first) and turn.end == pytest.approx(first + rest)
    assert (turn.prompt_tokens, turn.cached_tokens, turn.answer_tokens) == (800, 688, 4)


def test_every_turn_is_served_once_whatever_the_rule():
    """And asks the same, so that rules can be compared."""
    wanted = {(c.number, at): turn
              for c in conversations(LOAD, 16)
              for at, turn in enumerate(c.turns, 1)}
    lengths = []
    for rule in ROUTERS:
        served = run(rule).served
        found = {(row.conversation, row.turn): row for row in served}
        assert found.keys() == wanted.keys() and len(served) == len(found)
        for key, row in found.items():
            assert row.answer_tokens == wanted[key].answer_tokens
            assert 0 <= row.cached_tokens < row.prompt_tokens and row.cached_tokens % 16 == 0
            assert 0 < row.first_token <= row.end
            before = found.get((key[0], key[1] - 1))
            if before is not None:
                asked = wanted[key]
                assert row.arrival == pytest.approx(before.arrival + before.end + asked.pause)
                assert row.prompt_tokens == (before.prompt_tokens + before.answer_tokens
                                             + asked.user_tokens)
        lengths.append({key: row.prompt_tokens for key, row in found.items()})
    assert lengths[0] == lengths[1] == lengths[2]


def test_the_same_arguments_give_the_same_result():
    assert run("longest match") == run("longest match")
    assert run("longest match") != run("longest match", Load(**{**asdict(LOAD), "seed": 1}))


def test_one_replica_leaves_nothing_to_choose():
    assert run("round robin", replicas=1) == run("first blocks", replicas=1) == run(
        "longest match", replicas=1)


def test_prefixes_are_found_where_a_rule_goes_back_to_them():
    rates = {rule: run(rule).figures()["hit_rate"] for rule in ROUTERS}
    assert rates["round robin"] < min(rates["first blocks"], rates["longest match"]) - 0.05


def hashes(rng):
    """Chained hashes of a prompt: a path in a tree."""
    path = [(rng.randrange(3),)]
    while rng.random() < 0.8:
        path.append((*path[-1], rng.randrange(3)))
    return [hash(node) for node in path]


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_match_is_that_of_the_definition(seed):
    """Against a search through sets, with requests that end at random."""
    rng = random.Random(seed)
    n = rng.randint(1, 6)
    router, sets, under_way = LongestMatch(n, 10_000), [set() for _ in range(n)], []
    for _ in range(200):
        prompt, loads = hashes(rng), list(router.loads)
        most = math.ceil(1.25 * (sum(loads) + 1) / n)
        ranks = {}
        for one in range(n):
            matched = next((i for i, h in enumerate(prompt) if h not in sets[one]), len(prompt))
            ranks[one] = (-matched, loads[one], one)
        want = min((one for one in range(n) if loads[one] < most), key=ranks.__getitem__)
        assert router.send(prompt) == want
        sets[want].update(prompt)
        under_way.append((want, prompt))
        while under_way and rng.random() < 0.5:
            one, prompt = under_way.pop(rng.randrange(len(under_way)))
            router.done(one, prompt)


@pytest.mark.parametrize("rule", ROUTERS)
@pytest.mark.parametrize("n", [1, 2, 7])
def test_nobody_is_overrun(rule, n):
    """One prefix for everybody: each replica has its share, and no more than 1.25 times that."""
    router, sent = ROUTERS[rule](n, 1000), [0] * n
    for number in range(50 * n):
        one = router.send([1, 2, 3, 4, number])
        sent[one] += 1
        assert sent == router.loads and sent[one] <= math.ceil(1.25 * (number + 1) / n)
    for one in range(n):
        for _ in range(sent[one]):
            router.done(one, [1, 2, 3, 4])
    assert router.loads == [0] * n


def test_consistent_hashing_moves_few_prompts_when_a_replica_comes():
    """A tenth of them at ten replicas, where a remainder would move nine tenths."""
    rng = random.Random(0)
    prompts = [[rng.getrandbits(64) for _ in range(6)] for _ in range(2000)]

    def where(n):
        router = ROUTERS["first blocks"](n, 1000)
        placed = []
        for prompt in prompts:
            placed.append(router.send(prompt))
            router.done(placed[-1], prompt)
        return placed

    before, after = where(9), where(10)
    moved = [(a, b) for a, b in zip(before, after) if a != b]
    assert {b for _, b in moved} == {9} and 0.05 < len(moved) / len(prompts) < 0.2


def test_a_router_remembers_as_much_as_a_replica_holds():
    router, rng = LongestMatch(2, 30), random.Random(0)
    for _ in range(500):
        prompts = [[rng.getrandbits(64) for _ in range(rng.randint(1, 9))] for _ in range(2)]
        for replica, prompt in [(router.send(prompt), prompt) for prompt in prompts]:
            router.done(replica, prompt)
    assert sum(map(len, router._where.values())) == sum(map(len, router._held)) == 60


def planted_record(steps_time=PLANTED):
    """As `bench workload` writes it, but with times that are known."""
    found: dict = {
        "budget": {"num_blocks": 4000}, "block_size": 16, "max_num_batched_tokens": 2048,
        "longest": 105, "command": "none", "commit": "none", "device": "none", "model": "none"
    }
    sizes = Sizes()
    engine = Engine(
        EngineConfig(num_blocks=4000, block_size=16, max_num_seqs=256, max_num_batched_tokens=2048),
        sizes)
    prompts, params = workload(high=105)
    for prompt, param in zip(with_other_first_tokens(prompts, 77), params):
        engine.add_request(prompt, param)
    steps: list[list[float]] = []
    while engine.has_unfinished():
        requests = len(engine.step())
        seconds = steps_time.seconds(sizes.num_tokens, sizes.num_context)
        steps.append([sizes.num_tokens, requests, 1e3 * seconds])
    return {**found, "steps": [*steps, [0, 0, 1.0]]}


@pytest.fixture(scope="module")
def planted():
    return planted_record()


def test_the_time_of_a_step_is_found_in_a_record(planted):
    found, error = step_time_of(planted)
    assert found == pytest.approx(PLANTED, rel=1e-6) and error < 1e-9
    planted = {**planted, "steps": [*planted["steps"][:5], [7, 7, 1.0], *planted["steps"][6:]]}
    with pytest.raises(ValueError, match="step 5 of the record has 7 tokens"):
        step_time_of(planted)


def test_samples_come_back_as_they_were():
    rows = run("round robin").counted
    found = unpacked(json.loads(json.dumps(packed(rows))))
    assert found["cached_tokens"] == [row.cached_tokens for row in rows]
    assert found["prompt_tokens"] == [row.prompt_tokens for row in rows]
    assert found["first_token"] == pytest.approx([row.first_token for row in rows], abs=5.1e-5)


def test_the_command_prints_and_saves(planted, tmp_path, capsys):
    (tmp_path / "steps.json").write_text(json.dumps(planted))
    path = tmp_path / "fleet.json"
    argv = ["bench", "fleet", "--step-time", str(tmp_path / "steps.json"), "--save", str(path)]
    argv += ["--replicas", "2", "--rates", "3", "--seconds", "1", "--weights", "1", "--jobs", "1"]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert all(f"3     {rule}" in printed for rule in ROUTERS)
    found = json.loads(path.read_text())
    assert [one["rule"] for one in found["runs"]] == list(ROUTERS)
    assert StepTime(**found["step_time"]) == pytest.approx(PLANTED, rel=1e-6)
    assert main([*argv, "--replicas", "0"]) == 2


def test_the_books_record_is_what_its_samples_say():
    found = record("fleet")
    assert {one["rule"] for one in found["runs"]} == set(ROUTERS)
    for one in found["runs"]:
        samples = unpacked(one["samples"])
        waits = sorted(samples["first_token"])
        assert len(waits) == one["turns"] > 1000
        hits = sum(samples["cached_tokens"]) / sum(samples["prompt_tokens"])
        assert hits == pytest.approx(one["hit_rate"])
        assert waits[len(waits) // 2] == pytest.approx(one["first_token_p50"], abs=1e-4)
        assert waits[int(0.99 * len(waits))] == pytest.approx(one["first_token_p99"], abs=1e-4)
