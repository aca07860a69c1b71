"""Protects what ends a text: every id that a checkpoint names, the tokens that llama.cpp knows by
their text, and the token with which the chat template closes the model's turn."""

import json

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from paged.models.loader import load
from paged.models.loader.ends import ends_by_text
from tests.small_models import TINY_LLAMA, huggingface_model
from tests.test_models_gguf_file import write

ID = gguf.GGUFValueType.UINT32
TURNS = ("{% for m in messages %}<|user|>{{ m.content }}<|done|>\n{% endfor %}"
         "{% if add_generation_prompt %}<|user|>{% endif %}")
TEMPLATES = {  # and whether they close a turn with <|done|>
    TURNS: True,
    TURNS.replace("<|done|>", ""): False,
    TURNS.replace("<|done|>", " \n<|done|>"): True,
    TURNS.replace("m.content", "m.content | trim"): True,
    TURNS.replace("<|done|>", "done"): False,
    TURNS.replace("<|done|>", "<|thought|><|done|>"): False,  # an added token that is text
    "{{ raise_exception('no') }}": False,
    "": False,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small model with a tokenizer whose eos_token is <|stop|>."""
    directory = tmp_path_factory.mktemp("ends")
    huggingface_model(TINY_LLAMA).save_pretrained(directory)
    letters = sorted(set("".join(TURNS)) | {"Ġ", "Ċ"})
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<|stop|>", "<|done|>", "<|user|>"])
    backend.add_tokens(["<|thought|>"])
    backend.save(str(directory / "tokenizer.json"))
    return directory, backend.token_to_id("<|stop|>"), backend.token_to_id("<|done|>")


def settings(directory, template, eos=None):
    config = {"chat_template": template, "eos_token": "<|stop|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_the_template_closes_turns_with_ends_a_text(saved, template):
    directory, stop, done = saved
    settings(directory, template, eos=[7])
    assert load(directory).eos_token_ids == {7, stop} | ({done} if TEMPLATES[template] else set())


def test_a_turn_end_that_is_filed_as_text(tmp_path, saved):
    """<|im_end|> is often an added token that is not special; an unknown one may be text."""
    for file in saved[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    backend = Backend.from_file(str(saved[0] / "tokenizer.json"))
    backend.add_tokens(["<|im_end|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    for end, known in (("<|im_end|>", True), ("<|thought|>", False)):
        settings(tmp_path, TURNS.replace("<|done|>", end))
        expected = {saved[1]} | ({backend.token_to_id(end)} if known else set())
        assert load(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("value", [-1, 211, True, 1.0, [0, 211], [[1]], {"a": 1}])
def test_ids_outside_the_vocabulary(saved, value):
    settings(saved[0], "", eos=value)
    with pytest.raises(ValueError, match="must be a token id of a vocabulary of 211"):
        load(saved[0])


def test_an_end_of_the_tokenizer_that_the_model_has_no_row_for(tmp_path, saved):
    """Tokens are added to a tokenizer and not to its model; the model cannot choose them."""
    for file in saved[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    backend = Backend.from_file(str(saved[0] / "tokenizer.json"))
    count = TINY_LLAMA.vocab_size - backend.get_vocab_size()
    backend.add_special_tokens([f"<{i}>" for i in range(count)] + ["<end>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    for end, expected in (("<end>", set()), (f"<{count - 1}>", {TINY_LLAMA.vocab_size - 1})):
        config = {"chat_template": "", "eos_token": end}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "generation_config.json").write_text("{}")
        assert load(tmp_path).eos_token_ids == expected


def test_null_in_the_generation_config_leaves_it_to_the_config(saved):
    directory, stop, _ = saved
    settings(directory, "")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    assert load(directory).eos_token_ids == {9, stop}


@pytest.mark.parametrize("key", ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_every_end_that_a_gguf_file_names(tmp_path, key):
    write(tmp_path / "m.gguf", TINY_LLAMA, fields=[(f"tokenizer.ggml.{key}_token_id", (5, ID))])
    assert load(tmp_path / "m.gguf").eos_token_ids == ({5} if key == "eos" else {0, 5}) | {0}


def test_an_end_outside_the_vocabulary_of_a_gguf_file(tmp_path):
    write(tmp_path / "m.gguf", TINY_LLAMA, fields=[("tokenizer.ggml.eot_token_id", (211, ID))])
    with pytest.raises(ValueError, match="eot_token_id of .* is 211"):
        load(tmp_path / "m.gguf")


def test_the_template_of_a_gguf_file(tmp_path):
    template = "{% for m in messages %}{{ m.content }}<|turn|>{% endfor %}"
    string = gguf.GGUFValueType.STRING
    write(tmp_path / "m.gguf", TINY_LLAMA, fields=[("tokenizer.chat_template", (template, string))])
    assert load(tmp_path / "m.gguf").eos_token_ids == {0, 1}


@pytest.mark.parametrize(
    "tokens, types, expected",
    [
        (["a", "<|endoftext|>", "<|im_end|>", "<|im_start|>"], [1, 3, 3, 3], {1, 2}),
        (["<|im_end|>"], [1], {0}),  # filed as an ordinary token: a slip, as llama.cpp sees it
        (["</s>", "<eos>"], [1, 1], set()),  # these may be ordinary text
        (["</s>", "<eos>"], [3, 4], {0, 1}),
        (["</s>", "<|eot_id|>"], None, {1}),
        (["<|end|>", "<|return|>", "<|call|>"], [3, 3, 3], {1, 2}),
        (["<|end|>", "<|calls|>", "<|flush|>"], [3, 3, 3], {1, 2}),
        (["<|end|>", "<|call|>"], [3, 3], {0, 1}),
        (["<|end|>", "<|assistant|>"], [3, 3], {0}),
        (["</s>", "<|tool_response>"], [3, 3], {1}),
        (["<|repo_name|>", "<|file_sep|>", "<|fim_pad|>", "<|fim_middle|>"], [3] * 4, {0, 1, 2}),
    ])
def test_ends_that_are_known_by_their_text(tokens, types, expected):
    assert ends_by_text(tokens, types) == expected
