"""Protects what a request rules out and favours: logit_bias, allowed_token_ids, bad_words and
min_tokens.

A definition in a few lines says which tokens may follow an output; the seats must come to the same
whether they follow the text token by token or are told of it in the middle, as after a preemption.
"""

import random
from types import SimpleNamespace

import pytest
import torch

from paged import LLM, SamplingParams, rules
from paged.batch import newcomer
from paged.engine import Engine, EngineConfig
from paged.lab.oracle import OracleRunner
from paged.models.decoder import random_decoder
from paged.models.loader import Loaded
from paged.rules import MOST_MARKS, MOST_WORD_TOKENS, bad_word_tokens, make_rules
from paged.sampler import amend
from tests.small_models import TINY_LLAMA
from tests.test_sampler import Request, drawn_by, seated

VOCAB = 6


def may_follow(output, params, ends, bad_words):
    """The tokens that may be drawn after an output, by what the parameters say."""
    banned = {
        word[-1]
        for word in bad_words
        if len(output) >= len(word) - 1 and output[len(output) - len(word) + 1:] == word[:-1]
    }
    if len(output) < params.min_tokens:
        banned |= set(ends)
    allowed = set(range(VOCAB) if params.allowed_token_ids is None else params.allowed_token_ids)
    return allowed - banned


def random_rules(r):
    """Parameters, end tokens and bad words, crowded so that they meet."""
    words = [[r.randrange(VOCAB) for _ in range(r.choice([1, 2, 2, 3, 4]))]
             for _ in range(r.choice([0, 1, 4]))]
    allowed = r.sample(range(VOCAB), r.randint(4, VOCAB)) if r.random() < 0.4 else None
    bias = {r.randrange(VOCAB): r.choice([-100.0, 0.1, 3.0]) for _ in range(r.choice([0, 2]))}
    return (SamplingParams(logit_bias=bias or None, allowed_token_ids=allowed, min_tokens=r.choice(
        [0, 3]), temperature=r.choice([0, 1.0, 3.0]), repetition_penalty=r.choice([1.0, 1.3]),
                           frequency_penalty=r.choice([0, 0.5]),
                           seed=r.randrange(100)), r.sample(range(VOCAB), 2), words)


def request_of(params, ends, words, output=()):
    return Request(params, params.seed or 0, [1, 2, *output], 2, make_rules(params, ends, words))


def crowd(r, rows):
    """Requests whose rules always leave a token, or might, in the end, leave none."""
    found = []
    while len(found) < rows:
        try:
            asked = random_rules(r)
            found.append((asked, request_of(*asked)))
        except ValueError:  # nothing is left of allowed_token_ids
            pass
    return found


@pytest.mark.parametrize("seed", range(4))
def test_seats_follow_the_text_as_the_parameters_say(seed):
    r, rows = random.Random(seed), 30
    people = crowd(r, rows)
    state = seated([request for _, request in people], VOCAB)
    outputs = [[] for _ in people]
    generator = torch.Generator().manual_seed(seed)
    for step in range(8):
        logits = torch.randn(rows, VOCAB, generator=generator)
        before = logits.clone()
        fresh = seated([request_of(*asked, output) for (asked, _), output in zip(people, outputs)],
                       VOCAB)
        places = torch.full((rows,), step)
        followed, told = (amend(logits, kept.floats[:rows], places, kept.history[:rows],
                                kept.marks[:rows]) for kept in (state, fresh))
        changed = state.floats[:rows, -1] > 0
        assert torch.equal(followed[changed], told[changed]), "seated anew, it is another request"
        assert torch.equal(state.words[:rows][changed], fresh.words[:rows][changed])
        for row, ((params, ends, words), _) in enumerate(people):
            if changed[row]:
                left = {token for token in range(VOCAB) if followed[row, token] > -torch.inf}
                assert left == may_follow(outputs[row], params, ends, words)
        tokens = drawn_by(state, logits, torch.full((rows,), 2 + step)).tolist()
        assert torch.equal(logits, before), "logits are only read"
        for row, (token, (asked, _)) in enumerate(zip(tokens, people)):
            params, ends, words = asked
            left = may_follow(outputs[row], params, ends, words)
            assert token in left if left else token == -1
            if token == -1:  # it has ended: let it begin anew
                token = 0
                state.marks[row, rules.FROM, 1:] = 0
                people[row] = (SamplingParams(), [], []), request_of(SamplingParams(), [], [])
                state.floats[row, -1] = 0
            outputs[row].append(token)


def test_a_bias_is_added_before_penalties_and_temperature():
    params = SamplingParams(logit_bias={2: 1.5, 3: -2.5}, repetition_penalty=2.0,
                            frequency_penalty=0.5)
    state = seated([request_of(params, [], [], output=[2, 3, 3])], VOCAB)
    found = amend(torch.ones(1, VOCAB), state.floats[:1], torch.tensor([3]), state.history[:1],
                  state.marks[:1])
    # 1 and 2 are in the prompt; 2 was drawn once, 3 twice.
    assert found[0].tolist() == [1, 0.5, 2.5 / 2 - 0.5, -1.5 * 2 - 1, 1, 1]


def test_counts_of_a_marked_token_go_on():
    params = SamplingParams(logit_bias={2: 0.5}, frequency_penalty=1.0, temperature=0)
    state = seated([request_of(params, [], [])], VOCAB)
    logits = torch.tensor([[0.0, 0.0, 2.2, 1.0, 0.0, 0.0]])
    drawn = [drawn_by(state, logits, torch.tensor([2 + step])).item() for step in range(4)]
    assert drawn == [2, 2, 3, 2]  # 2.7, 1.7, then 0.7 against 1, then 0.7 against 0


def test_what_is_asked_of_nobody_costs_nothing():
    assert make_rules(SamplingParams(), [3]) is None
    assert make_rules(SamplingParams(logit_bias={}, bad_words=[], min_tokens=0), [3]) is None
    new = newcomer(0, Request(SamplingParams()))
    assert not (new.history or new.marks or new.words or new.rest or new.numbers[-1])


def test_room_for_rules_ends_in_a_sentence():
    many = {token: 1.0 for token in range(MOST_MARKS)}
    with pytest.raises(ValueError, match=f"{MOST_MARKS + 1} tokens of logit_bias.*give fewer"):
        make_rules(SamplingParams(logit_bias=many), [])
    del many[0]
    state = seated([request_of(SamplingParams(logit_bias=many), [], [])], MOST_MARKS)
    assert (state.history[0] < 0).sum() == MOST_MARKS - 1
    word = [*range(MOST_WORD_TOKENS + 1)]
    longest = request_of(SamplingParams(bad_words="x"), [], [word])
    assert seated([longest], MOST_WORD_TOKENS + 1).words[0, rules.ENDS_IN, -1] == 1
    with pytest.raises(ValueError, match=f"{MOST_WORD_TOKENS + 1} tokens in bad_words"):
        make_rules(SamplingParams(bad_words="x"), [], [word, [1, 2]])


def test_rules_that_leave_nothing_are_refused():
    with pytest.raises(ValueError, match="leaves 2 tokens, and min_tokens=1 and bad_words"):
        make_rules(SamplingParams(allowed_token_ids=[3, 4], min_tokens=1), [3], [[4]])
    assert make_rules(SamplingParams(allowed_token_ids=[3, 4], min_tokens=1), [3], [[5]])


class Words:
    """A tokenizer of whole words: a space before one belongs to it, or is a token of its own."""

    ids = {
        "bad": [1], " bad": [2], "two words": [3, 4], " two words": [5, 4], "odd": [6],
        " odd": [7, 6], "same": [8], " same": [8], "": [], " ": [9]
    }

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return self.ids[text]

    def token_bytes(self, token):
        return b"abcdef"[token:token + 1]


def test_bad_words_are_looked_for_at_a_beginning_and_after_a_space():

    def tokens(words):
        return bad_word_tokens(SamplingParams(bad_words=words), Words())

    assert tokens("bad") == tokens([" bad"]) == [[1], [2]]
    assert tokens(["two words", "odd"]) == [[3, 4], [5, 4], [6]]  # " odd" is as long as no odd
    assert tokens("same") == [[8]]
    with pytest.raises(ValueError, match="' ', which has no tokens"):
        tokens(" ")


# ── in an engine ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def llm():
    loaded = Loaded(random_decoder(TINY_LLAMA, seed=3), TINY_LLAMA, None, {5}, 0)
    with LLM(loaded, num_blocks=40, block_size=4, use_tqdm=False) as llm:
        yield llm


def tokens_of(llm, **params):
    output = llm.generate([[7, 8, 9]], SamplingParams(**params), use_tqdm=False)[0]
    return output.outputs[0].token_ids


def test_an_engine_with_a_model_obeys(llm):
    greedy = tokens_of(llm, temperature=0, max_tokens=6)
    first, second = greedy[:2]
    assert tokens_of(llm, temperature=0, logit_bias={42: 100}, max_tokens=3) == [42] * 3
    assert first not in tokens_of(llm, temperature=0, logit_bias={first: -100}, max_tokens=6)
    drawn = tokens_of(llm, temperature=2.0, allowed_token_ids=[3, 70, 210], max_tokens=30, seed=1)
    assert set(drawn) == {3, 70, 210}
    ended = tokens_of(llm, temperature=0, stop_token_ids=[first], max_tokens=6)
    assert ended == [first]
    late = tokens_of(llm, temperature=0, stop_token_ids=[first], min_tokens=4, max_tokens=6)
    assert first not in late[:4] and len(late) >= 4
    assert second not in tokens_of(llm, temperature=0, stop_token_ids=[second], min_tokens=6,
                                   max_tokens=6)
    again = tokens_of(llm, temperature=0, stop_token_ids=[5, 400, -1], min_tokens=0, max_tokens=6)
    assert again == greedy  # ids that no vocabulary has end nothing
    late = tokens_of(llm, temperature=0, stop_token_ids=[400, -1], min_tokens=2, max_tokens=6)
    assert 5 not in late[:2]


def test_a_rule_that_removes_nothing_changes_nothing(llm):
    bare = tokens_of(llm, max_tokens=12, seed=5)
    for idle in ({"logit_bias": {3: 0.0}}, {"allowed_token_ids": list(
            range(211))}, {"min_tokens": 12, "ignore_eos": True}):
        assert tokens_of(llm, max_tokens=12, seed=5, **idle) == bare


def test_a_request_whose_rules_leave_nothing_later_fails_alone(llm):
    """A token allowed alone, and twice in a row a bad word: there is nothing to say after it."""
    other = SamplingParams(allowed_token_ids=[4], max_tokens=5)
    stuck = SamplingParams(allowed_token_ids=[4], bad_words="x", max_tokens=5)
    llm.engine.tokenizer = SimpleNamespace(encode=lambda text, **_: [4, 4],
                                           token_bytes=lambda token: b"")
    try:
        found = llm.generate([[1, 2]] * 2, [stuck, other], use_tqdm=False)
    finally:
        llm.engine.tokenizer = None
    one, two = (output.outputs[0] for output in found)
    assert (one.token_ids, one.finish_reason) == ([4], "error") and "leave no token" in one.error
    assert (two.token_ids, two.finish_reason) == ([4] * 5, "length")


@pytest.mark.parametrize(
    "name, value, said",
    [("logit_bias", {211: 1.0}, "logit_bias holds token 211: the vocabulary has 211"),
     ("allowed_token_ids", [0, 500], "allowed_token_ids holds token 500"),
     ("allowed_token_ids", [-1], "allowed_token_ids holds token -1"),
     ("bad_words", "no", "bad words need a tokenizer")])
def test_rules_about_tokens_that_are_not_there(llm, name, value, said):
    with pytest.raises(ValueError, match=said):
        tokens_of(llm, **{name: value})


def test_an_end_that_came_too_early_all_the_same_ends_nothing():
    """A runner need not know of rules: what ends a request is decided here too."""

    def run(min_tokens):
        engine = Engine(EngineConfig(num_blocks=8, block_size=4), OracleRunner(8, 4))
        engine.add_request([1, 2, 3],
                           SamplingParams(stop_token_ids=[0, 1, 2, 3], max_tokens=6,
                                          min_tokens=min_tokens))
        while engine.has_unfinished():
            (output,) = engine.step()
        return len(output.outputs[0].token_ids), output.outputs[0].finish_reason

    assert run(0) == (1, "stop") and run(2) == (3, "stop") and run(6) == (6, "length")
