"""Protects the reading of token files: whichever of them names or adds a token, the ids and the
names are those of transformers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from paged.models.loader.token_files import tokenizer_of

TEXT = " <a> hi <b>  <c>hi<d> <A> <e> <|end|>\n<f>"


def save(directory, **files):
    """A byte-level tokenizer of one special token and the files beside it."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(["hi"],
                                trainers.BpeTrainer(
                                    vocab_size=259, special_tokens=["<|end|>"], show_progress=False,
                                    initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    backend.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return backend.get_vocab_size()


def token(content, **flags):
    return {
        "content": content, "lstrip": False, "rstrip": False, "single_word": False,
        "normalized": False, "special": True
    } | flags


def config(**values):
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | values


FIRST = 258  # id of the first token that is added
CASES = {
    "names only in the map": {
        "tokenizer_config": config(),
        "special_tokens_map": {"eos_token": "<|end|>", "bos_token": token("<a>", rstrip=True)}
    },
    "the map comes before the config": {
        "tokenizer_config": config(eos_token="<a>"), "special_tokens_map": {"eos_token": "<|end|>"}
    },
    "no config at all": {"special_tokens_map": {"eos_token": "<|end|>"}},
    "a map that is not read": {
        "tokenizer_config": config(eos_token="<|end|>", added_tokens_decoder={}),
        "special_tokens_map": {"eos_token": "<a>", "bos_token": "<b>"}
    },
    "added_tokens.json": {
        "tokenizer_config": config(eos_token="<b>"),
        "added_tokens": {"<a>": FIRST, "<b>": FIRST + 1}
    },
    "added_tokens.json that is not read": {
        "tokenizer_config": config(added_tokens_decoder={}), "added_tokens": {"<a>": FIRST}
    },
    "added_tokens_decoder": {
        "tokenizer_config": config(
            eos_token="<|end|>", added_tokens_decoder={
                "0": token("<|end|>"),
                str(FIRST + 1): token("<b>", special=False, rstrip=True),
                str(FIRST): token("<a>", lstrip=True)
            })
    },
    "other flags than in tokenizer.json": {
        "tokenizer_config": config(
            added_tokens_decoder={"0": token("<|end|>", lstrip=True, rstrip=True)})
    },
    "additional_special_tokens": {
        "tokenizer_config": config(additional_special_tokens=["<a>", "<b>"])
    },
    "extra_special_tokens": {"tokenizer_config": config(extra_special_tokens=["<b>"])},
    "by name": {"tokenizer_config": config(extra_special_tokens={"image_token": "<c>"})},
    "another name": {"tokenizer_config": config(image_token="<d>", sep_token="<e>")},
    "lists in both files": {
        "tokenizer_config": config(additional_special_tokens=["<a>"]),
        "special_tokens_map": {"additional_special_tokens": ["<b>"]}
    },
    "lists that add up": {
        "tokenizer_config": config(extra_special_tokens=["<a>"]),
        "special_tokens_map": {"extra_special_tokens": ["<b>", "<a>"]}
    },
    "split_special_tokens": {
        "tokenizer_config": config(split_special_tokens=True, eos_token="<|end|>")
    },
}


def check(directory):
    ours, theirs = tokenizer_of(directory), AutoTokenizer.from_pretrained(directory)
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert ours._named_tokens == theirs.special_tokens_map
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours._backend.get_added_tokens_decoder() == theirs.added_tokens_decoder
    flags = [repr(ours._backend.get_added_tokens_decoder()[i]) for i in sorted(ours._added)]
    assert flags == [repr(theirs.added_tokens_decoder[i]) for i in sorted(ours._added)]
    decoded = theirs.decode(theirs.encode(TEXT), skip_special_tokens=True)
    assert ours.decode(ours.encode(TEXT)) == decoded


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(tmp_path, case):
    assert save(tmp_path, **CASES[case]) == FIRST
    check(tmp_path)


def test_a_model_that_splits_special_tokens_splits_its_templates_too(tmp_path):
    save(tmp_path, **CASES["split_special_tokens"])
    ours, theirs = tokenizer_of(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for content in ("hi", "<|end|>"):
        messages = [{"role": "user", "content": content}]
        template = "{{ messages[0].content }}<|end|>"
        assert ours.chat(messages, chat_template=template) == theirs.apply_chat_template(
            messages, chat_template=template, return_dict=False)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("cls", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("more", [{}, {"legacy": True}, {"legacy": False},
                                  {"add_prefix_space": False}, {"add_prefix_space": True}], ids=str)
@pytest.mark.parametrize("old", [True, False])
def test_spaces_of_llama_are_where_transformers_puts_them(tmp_path, kind, cls, more, old):
    """An older tokenizer.json has one behind each special token, and transformers corrects it."""
    letters = {letter: 3 + i for i, letter in enumerate("▁hi\nab")}
    backend = Backend(
        models.BPE(vocab={"<unk>": 0, "<s>": 1, "</s>": 2, **letters}, merges=[], unk_token="<unk>",
                   fuse_unk=True, byte_fallback=True))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    if old:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    settings = {
        "tokenizer_class": cls, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"
    } | more
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours, theirs = tokenizer_of(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("hi</s>\nhi <s>ab", "hi hi", "<s>hi", " hi", "", "</s> "):
        if old or cls == "PreTrainedTokenizerFast" or not more:  # a new file is obeyed
            assert ours.encode(text) == theirs.encode(text)


SOME = st.lists(st.sampled_from(["<a>", "<b>", "<c>", "<A>"]), unique=True, max_size=3)
FLAGS = st.fixed_dictionaries(
    {name: st.booleans()
     for name in ("lstrip", "rstrip", "normalized", "special")})


@given(in_decoder=st.none() | SOME, in_file=SOME, listed=SOME, eos=st.sampled_from(
    [None, "<|end|>", "<a>", "<e>"]), mapped=st.sampled_from([None, "<|end|>", "<b>", "<f>"]),
       flags=FLAGS)
def test_any_mixture_of_files(tmp_path_factory, in_decoder, in_file, listed, eos, mapped, flags):
    directory = tmp_path_factory.mktemp("tokens")
    settings = config(additional_special_tokens=listed)
    if eos:
        settings["eos_token"] = eos
    if in_decoder is not None:
        settings["added_tokens_decoder"] = {
            str(FIRST + i): token(content, **flags)
            for i, content in enumerate(in_decoder)
        }
    save(directory, tokenizer_config=settings,
         added_tokens={content: FIRST + i
                       for i, content in enumerate(in_file)},
         special_tokens_map={"eos_token": mapped} if mapped else {})
    check(directory)


@pytest.mark.parametrize("files, said", [
    ({"added_tokens": {"<a>": FIRST + 1}}, "'<a>' the id 259, .* leaves it 258"),
    ({"added_tokens": {"<a>": "258x"}}, "id '258x'"),
    ({"tokenizer_config": {"added_tokens_decoder": []}}, "added_tokens_decoder"),
    ({"tokenizer_config": {"added_tokens_decoder": {"5": "<a>x", "x": "<b>"}}}, "id 'x'"),
    ({"tokenizer_config": {"added_tokens_decoder": {"5": {"content": 5}}}}, "A token of"),
    ({"tokenizer_config": {"eos_token": 5}}, "A token of .* is 5"),
    ({"tokenizer_config": {"eos_token": token("<a>", lstrip="no")}}, "'lstrip': 'no'"),
    ({"tokenizer_config": {"additional_special_tokens": "<a>"}}, "must be a list"),
    ({"tokenizer_config": {"split_special_tokens": "false"}}, "must be true or false"),
    ({"tokenizer_config": {"chat_template": 5}}, "chat_template of"),
    ({"tokenizer_config": {"chat_template": [{"name": "default"}]}}, "chat_template of"),
    ({"tokenizer_config": {"chat_template": []}}, "chat_template of"),
    ({"tokenizer_config": {"chat_template": {"default": None}}}, "chat_template of"),
    ({"tokenizer_config": {"chat_template": ["default"]}}, "chat_template of"),
])
def test_damaged_token_files(tmp_path, files, said):
    save(tmp_path, **files)
    with pytest.raises(ValueError, match=said):
        tokenizer_of(tmp_path)


def test_templates_in_files_of_their_own(tmp_path):
    save(tmp_path, tokenizer_config=config(chat_template="C"))
    user = [{"role": "user", "content": "x"}]
    assert tokenizer_of(tmp_path).render(user) == "C"
    save(tmp_path, tokenizer_config=config(chat_template={"default": "O"}))
    assert tokenizer_of(tmp_path).render(user) == "O"
    (tmp_path / "chat_template.jinja").write_text("F")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    ours, theirs = tokenizer_of(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for tools in (None, [{"type": "function"}]):
        assert ours.render(user, tools=tools) == theirs.apply_chat_template(
            user, tools=tools, tokenize=False) == ("F" if tools is None else "T")
