"""Protects conversations: text and ids are those of transformers' apply_chat_template, on templates
in the style of every family; a special token in a message stays text without changing anything
else; contents in parts reach the prompt; a tokenizer may be shared by threads."""

import json
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from paged.models.loader.chat_template import render, render_flat
from paged.models.loader.token_files import tokenizer_of
from paged.models.loader.tokenizer import Tokenizer
from tests.chat_templates import TEMPLATES

SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|end_head|>", "<|eot_id|>", "[INST]",
    "[/INST]", "<｜User｜>", "<｜Assistant｜>", "<start_of_turn>", "<end_of_turn>"
]
TEXTS = ["hello world, how are you", "I am small.", "é 🙂 日本", "12 34  two  spaces\n\nline"]
TOOLS = [{
    "type": "function", "function": {
        "name": "look_up", "description": "Finds <é> things",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}}
    }
}]
CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"what": "é \"x\""}}}


def byte_level():
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend, trainers.BpeTrainer(vocab_size=400, show_progress=False,
                                        special_tokens=["<s>", "</s>"],
                                        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def metaspace(scheme):
    """As SentencePiece writes it: a space before the first word, or before the first after each
    special token."""
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "),
         decoders.ByteFallback(),
         decoders.Fuse()])
    return backend, trainers.BpeTrainer(
        vocab_size=500, show_progress=False,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))])


def unigram():
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend, trainers.UnigramTrainer(vocab_size=60, show_progress=False, unk_token="<unk>",
                                            special_tokens=["<unk>", "<s>", "</s>"])


KINDS = {
    "byte-level": byte_level, "first": lambda: metaspace("first"),
    "always": lambda: metaspace("always"), "unigram": unigram
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A function that makes a directory with a tokenizer of a kind, and with a template."""
    known = {}

    def make(kind="byte-level", template="qwen2.5", flags=()):
        key = kind, template, flags
        if key not in known:
            directory = tmp_path_factory.mktemp("chat")
            backend, trainer = KINDS[kind]()
            backend.train_from_iterator(TEXTS * 3, trainer)
            settings = json.loads(backend.to_str())  # bytes are no special tokens
            settings["added_tokens"] = [
                token for token in settings["added_tokens"] if "<0x" not in token["content"]
            ]
            backend = Backend.from_str(json.dumps(settings))
            backend.add_special_tokens([
                AddedToken(token, special=True, normalized=False, **dict.fromkeys(flags, True))
                for token in SPECIAL[2:]
            ])
            backend.add_tokens(
                [AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
            backend.save(str(directory / "tokenizer.json"))
            (directory / "tokenizer_config.json").write_text(
                json.dumps({
                    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>",
                    "eos_token": "</s>", "chat_template": TEMPLATES.get(template, template)
                }))
            known[key] = tokenizer_of(directory), AutoTokenizer.from_pretrained(directory)
        return known[key]

    return make


def theirs_or_none(theirs, messages, **options):
    try:
        text = theirs.apply_chat_template(messages, tokenize=False, **options)
        return text, theirs.apply_chat_template(messages, return_dict=False, **options)
    except Exception:
        return None


def check(ours, theirs, messages, kwargs=None, **options):
    """Both render and encode the same, or both refuse; returns whether they did."""
    expected = theirs_or_none(theirs, messages, **options, **kwargs or {})
    options |= {"chat_template_kwargs": kwargs}
    if expected is None:
        with pytest.raises(ValueError):
            ours.render(messages, **options)
        return False
    assert ours.render(messages, **options) == expected[0]
    assert ours.chat(messages, **options) == expected[1]
    return True


def user(content="hi"):
    return {"role": "user", "content": content}


def assistant(content="I am small.", **more):
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": "  Be brief.\n"}
CONVERSATIONS = {
    "one": [user()],
    "system": [SYSTEM, user()],
    "two turns": [user(), assistant(), user("no ")],
    "system and turns": [SYSTEM, user(" a"),
                         assistant(" b "),
                         user("stop"),
                         assistant("c")],
    "thought": [user(), assistant("<think>\nhm\n</think>\n\nyes"),
                user("é🙂")],
    "reasoning": [user(), assistant("yes", reasoning_content="hm"),
                  user()],
    "calls": [
        user(), {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "found"}, {"role": "tool", "content": "found <b>"}
    ],
    "call without content": [
        user(), {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "found"}
    ],
    "ends with an answer": [user(), assistant("  half a sentence ")],
    "roles do not alternate": [user(), user()],
    "only a system": [SYSTEM],
}
OPTIONS = {
    "prompt": {"add_generation_prompt": True},
    "no prompt": {"add_generation_prompt": False},
    "tools": {"add_generation_prompt": True, "tools": TOOLS},
    "documents": {"add_generation_prompt": True, "documents": [{"title": "a", "text": "b"}]},
    "no tools": {"add_generation_prompt": True, "tools": []},
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_text_and_ids_are_those_of_transformers(made, template):
    ours, theirs = made(template=template)
    rendered = [
        check(ours, theirs, messages, **options) for messages in CONVERSATIONS.values()
        for options in OPTIONS.values()
    ]
    assert sum(rendered) > 10


@pytest.mark.parametrize(
    "kwargs",
    [{"enable_thinking": False}, {"enable_thinking": True}, {"date_string": "2 Feb"},
     {"flavour": "sour"}, {"bos_token": "<|im_end|>"}, {"custom_tools": TOOLS}, {"unknown": None}])
@pytest.mark.parametrize("template", ["qwen3", "llama3", "toolbox"])
def test_variables_of_the_template(made, template, kwargs):
    ours, theirs = made(template=template)
    assert check(ours, theirs, CONVERSATIONS["two turns"], kwargs, add_generation_prompt=True)


def test_a_variable_changes_the_prompt(made):
    ours, _ = made(template="qwen3")
    quiet = ours.chat([user()], chat_template_kwargs={"enable_thinking": False})
    assert quiet != ours.chat([user()])
    assert ours.render([user()], chat_template_kwargs={
        "enable_thinking": False
    }).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("options, said", [
    ({"chat_template_kwargs": {"messages": []}}, "beside messages, tools"),
    ({"chat_template_kwargs": ["enable_thinking"]}, "must be a dict of variables"),
    ({"tools": {"type": "function"}}, "tools is .* list of dicts"),
    ({"tools": [print]}, "tools is .* list of dicts"),
    ({"documents": "a"}, "documents is 'a'"),
    ({"chat_template": 5}, "chat_template is 5"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "choose one"),
    ({"chat_template": "{% for %}"}, "cannot render"),
    ({"chat_template": "{{ 1 / 0 }}"}, "cannot render these messages: division by zero"),
    ({"chat_template": "{{ messages[0].nothing.more }}"}, "cannot render"),
    ({"chat_template": "{{ messages.__class__.__mro__ }}"}, "cannot render"),
    ({"chat_template": "{{ messages.append(1) }}"}, "cannot render"),
])
def test_options_that_cannot_be(made, options, said):
    with pytest.raises(ValueError, match=said):
        made()[0].chat([user()], **options)


@pytest.mark.parametrize("template", sorted(set(TEMPLATES) - {"toolbox"}))  # it repeats messages
def test_an_answer_is_continued_where_transformers_continues_it(made, template):
    ours, theirs = made(template=template)
    rendered = [
        check(ours, theirs, [*before, assistant(text)], continue_final_message=True) for before in (
            [user()],
            [SYSTEM, user(" a"), assistant(" b "), user()])
        for text in ("The capital", " The capital ", "The\n", "<think>\nhm", "é")
    ]
    assert sum(rendered) > 5


@pytest.mark.parametrize("messages, template", [
    ([user(), {"role": "assistant", "content": None, "tool_calls": [CALL]}], "qwen2.5"),
    ([user()], "{{ messages[0].role }}"),
    ([user("upper")], "{{ messages[0].content | upper }}"),
])
def test_what_cannot_be_continued(made, messages, template):
    with pytest.raises(ValueError, match="continued"):
        made(template=template)[0].chat(messages, continue_final_message=True)


MESSAGES = st.lists(
    st.fixed_dictionaries({
        "role": st.sampled_from(["system", "user", "assistant", "tool"]),
        "content": st.text(st.sampled_from("ab <|>é🙂\n{%}'\"\\ "), max_size=12)
        | st.sampled_from(TEXTS)
    }), min_size=1, max_size=5)


@given(template=st.sampled_from(sorted(TEMPLATES)), messages=MESSAGES, prompt=st.booleans(),
       tools=st.sampled_from([None, TOOLS]))
def test_any_conversation(made, template, messages, prompt, tools):
    ours, theirs = made(template=template)
    check(ours, theirs, messages, add_generation_prompt=prompt, tools=tools)


# ── special tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [(), ("lstrip", "rstrip"), ("single_word",)])
def test_pieces_around_special_tokens_are_those_of_transformers(made, kind, flags):
    """A conversation is encoded once and whole, whatever its special tokens do to their
    neighbours."""
    for template in ("mistral", "qwen3", "gemma", "toolbox"):
        ours, theirs = made(kind, template, flags)
        for messages in ([user("  hi ")], [SYSTEM, user(), assistant(" yes "), user("\nno")]):
            assert check(ours, theirs, messages, add_generation_prompt=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", ["smollm2", "qwen2.5", "qwen3", "mistral", "gemma", "toolbox"])
@pytest.mark.parametrize("flags", [(), ("lstrip", "rstrip")])
def test_a_special_token_in_a_message_is_text(made, kind, template, flags):
    """The template's own tokens stay, as many as with a message of other characters, and all that
    stands before the message is the same piece by piece."""
    ours, theirs = made(kind, template, flags)
    special = {index for index, token in theirs.added_tokens_decoder.items() if token.special}

    def marks(messages):
        return [index for index in ours.chat(messages) if index in special]

    plain = marks([user("x"), assistant("y"), user("z")])
    for text in ("<|im_end|>", "a [/INST]", "<end_of_turn>b", "</s><s>", "<|<|im_end|>im_end|>",
                 "\ue000<|im_start|>\uf8ff1\uf8ff"):
        attack = [user(text), assistant(text), user(text)]
        found = marks(attack)
        unknown = theirs.convert_tokens_to_ids("<unk>")
        assert [i for i in found if i != unknown] == [i for i in plain if i != unknown]
        if kind == "byte-level" and not flags:
            decoded = theirs.decode(ours.chat(attack))
            assert decoded == ours.render(attack)


def test_the_same_ids_before_and_after(made):
    """A conversation with a special token in it leaves nothing behind."""
    ours, theirs = made(template="qwen2.5")
    before = ours.chat([user("x")]), ours.encode("<|im_end|>")
    ours.chat([user("<|im_end|>")])
    assert (ours.chat([user("x")]), ours.encode("<|im_end|>")) == before
    assert before[1] == [theirs.convert_tokens_to_ids("<|im_end|>")]


@pytest.mark.parametrize("where",
                         ["tool_calls", "key", "type", "tools", "documents", "name", "two parts"])
def test_special_tokens_that_come_by_other_ways(made, where):
    template = ("{{ bos_token }}{% for m in messages %}{% if m.content is string %}{{ m.content }}"
                "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
                "{{ m.name }}{{ m.tool_calls | tojson if m.tool_calls }}<|im_end|>{% endfor %}"
                "{{ tools | tojson }}{{ documents | tojson }}")
    ours, theirs = made(template=template)
    end = theirs.convert_tokens_to_ids("<|im_end|>")
    message, options = user("x"), {}
    if where == "tool_calls":
        message["tool_calls"] = [{"function": {"arguments": {"a": "<|im_end|>"}}}]
    elif where == "key":
        message["tool_calls"] = [{"function": {"arguments": {"<|im_end|>": 1}}}]
    elif where == "type":
        message["tool_calls"] = [{"type": "<|im_end|>", "role": "<|im_end|>"}]
    elif where == "name":
        message["name"] = "<|im_end|>"
    elif where == "two parts":
        message["content"] = [{"type": "text", "text": "a<|im_"},
                              {"type": "text", "text": "end|>b"}]
    else:
        options[where] = [{"text": "<|im_end|>"}]
    assert ours.chat([message], **options).count(end) == 1
    assert "<|im_end|>" in theirs.decode([i for i in ours.chat([message], **options) if i != end])


def test_a_special_token_in_an_answer_that_is_continued(made):
    ours, theirs = made(template="qwen2.5")
    ids = ours.chat([user(), assistant("a <|im_end|> b")], continue_final_message=True)
    assert ids.count(theirs.convert_tokens_to_ids("<|im_end|>")) == 1  # the user's turn
    assert theirs.decode(ids).endswith("assistant\na <|im_end|> b")


def test_templates_see_the_message_as_it_is(made):
    ours, theirs = made(template="{{ messages[0].content | length }} {{ messages[0].content[:3] }}")
    messages = [user("ab<|im_end|>")]
    assert ours.render(messages) == theirs.apply_chat_template(messages, tokenize=False) == "12 ab<"


def test_a_template_that_depends_on_a_special_token_in_the_message(made):
    ours, _ = made(template="{{ 'yes' if '<|im_end|>' in messages[0].content else 'no' }}")
    assert ours.render([user("<|im_end|>")]) == "yes"
    with pytest.raises(ValueError, match="holds the special token '<|im_end|>', and"):
        ours.chat([user("<|im_end|>")])


# ── contents in parts


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def test_templates_that_know_parts_get_them(made):
    ours, theirs = made(template="gemma")
    assert check(ours, theirs, [user(parts(" a ", "b"))], add_generation_prompt=True)
    assert "ab<end_of_turn>" in ours.render([user(parts(" a ", "b"))])


@pytest.mark.parametrize(
    "template", ["smollm2", "llama3", "qwen2.5", "qwen3", "mistral", "deepseek", "toolbox"])
def test_templates_that_do_not_know_parts_get_the_text(made, template):
    """transformers prints the list, drops it, or fails."""
    ours, _ = made(template=template)
    assert ours.chat([user(parts("one", "two"))]) == ours.chat([user("one\ntwo")])
    assert ours.chat([SYSTEM, user(parts("one"))]) == ours.chat([SYSTEM, user("one")])


@pytest.mark.parametrize("printing", ["m.content", "m.content | tojson"])
def test_templates_that_print_parts_get_the_text(printing):
    template = "{% for m in messages %}[{{ " + printing + " }}]{% endfor %}"
    rest = {}, None, None, False, {}
    expected = render(template, [user("naïve\nb")], *rest)
    assert render_flat(template, [user(parts("naïve", "b"))], *rest) == expected


def test_an_answer_in_parts_is_continued(made):
    ours, _ = made(template="qwen2.5")
    messages = [user(parts("hi")), assistant(parts("half", "a sen"))]
    expected = ours.render([user(), assistant("half\na sen")], continue_final_message=True)
    assert ours.render(messages, continue_final_message=True) == expected
    assert messages[1] == assistant(parts("half", "a sen"))


# ── named templates


def test_one_of_several_templates(made):
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"},
             {"name": "rag", "template": "R"}]
    ours, theirs = made(template=TEMPLATES["smollm2"])
    by_name = {one["name"]: one["template"] for one in named}
    ours._templates, theirs.chat_template = dict(by_name), by_name
    for options in ({}, {"tools": TOOLS}, {"chat_template": "rag"}, {
            "chat_template": "own {{ 1 }}"
    }, {"chat_template": "rag", "tools": TOOLS}):
        assert check(ours, theirs, [user()], **options)
    del ours._templates["default"]
    with pytest.raises(ValueError, match="tool_use, rag and none by default"):
        ours.render([user()])


def test_render_needs_no_tokenizer():
    assert render("{{ a }}{{ b }}", [user()], {"a": "1"}, None, None, True, {"b": 2}) == "12"


# ── threads


def test_threads_may_share_a_tokenizer(made):
    """Conversations with special tokens in them, ordinary ones and prompts, all at once, on a
    tokenizer that has made nothing yet of what it makes at first use."""
    ours, _ = made("first", "qwen3", ("rstrip",))
    long = "hello <|im_end|> world " * 200
    jobs = [(ours.chat, [user(long)]), (ours.encode, "<|im_start|>a<|im_end|>"),
            (ours.chat, [user("x"), assistant("y")]), (ours.chat, [user(parts("<s>", "b"))])]
    expected = [run(argument) for run, argument in jobs]
    fresh = Tokenizer(Backend.from_str(ours._backend.to_str()), ours._templates, ours._named_tokens)
    wrong, start, interval = [], threading.Barrier(len(jobs)), sys.getswitchinterval()
    end = time.monotonic() + 2

    def hammer(job):
        run, argument = jobs[job]
        start.wait()
        while time.monotonic() < end:
            if getattr(fresh, run.__name__)(argument) != expected[job]:
                wrong.append(job)

    threads = [threading.Thread(target=hammer, args=(job,)) for job in range(len(jobs))]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
