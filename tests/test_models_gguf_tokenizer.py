"""Protects the tokenizers in GGUF files: SentencePiece pieces are joined by score, as SentencePiece
and transformers join them; a missing key stands for what it stands for in llama.cpp; what cannot be
is said."""

import inspect

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from paged.models.loader.gguf_tokenizer import TEKKEN, tokenizer_in

TEXTS = [
    "Hello world", "  two  spaces\n\n and\ta tab, and more of it ", "Hello,Hello world world",
    "日本 café 🙂", "", " ", "x", "<0x41> <s> </s> [INST] hi [/INST]", "aaaaaaa",
    "hello hello [INST]world"
]
ALPHABET = "helo wrd,▁éж🙂a[INST]/<s>\n"


def pieces(size=120):
    """Tokens, scores and types of a SentencePiece model trained on a few texts: control tokens,
    bytes, then pieces in the order in which they were joined, and characters last."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False)
    backend.train_from_iterator(TEXTS[:5] * 5 + ["held world, a red hero"] * 4, trainer)
    vocab = sorted(backend.get_vocab(), key=backend.get_vocab().get)
    joined = [token for token in vocab if len(token) > 1 and "<" not in token]
    tokens = [
        "<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *joined,
        *(token for token in vocab if len(token) == 1), "[INST]", "[/INST]"
    ]
    count = len(tokens) - 259
    scores = [0.0] * 259 + [-float(i) for i in range(count)]
    types = [2, 3, 3] + [6] * 256 + [1] * (count - 2) + [4, 3]
    return tokens, scores, types


TOKENS, SCORES, TYPES = pieces()


def fields(**changes):
    found = {
        "general.architecture": "llama", "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.scores": SCORES,
        "tokenizer.ggml.token_type": TYPES, "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0
    } | {f"tokenizer.ggml.{key}": value
         for key, value in changes.items()}
    return {key: value for key, value in found.items() if value is not None}


def joined_by_score(text):
    """SentencePiece in ten lines: the neighbours that make the best piece are joined, from the
    left, until none make one; what is no piece is spelled in bytes."""
    best = {token: score for token, score, type in zip(TOKENS, SCORES, TYPES) if type in (1, 4)}
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [(-best[a + b], i) for i, (a, b) in enumerate(zip(symbols, symbols[1:]))
                 if a + b in best]
        if not pairs:
            break
        _, i = min(pairs)
        symbols[i:i + 2] = [symbols[i] + symbols[i + 1]]
    ids = {token: index for index, token in enumerate(TOKENS)}
    return [
        index for symbol in symbols
        for index in ([ids[symbol]] if symbol in best else [3 + byte for byte in symbol.encode()])
    ]


def plain(text):
    return not any(mark in text for mark in ("<s>", "</s>", "[INST]", "[/INST]", "<unk>"))


@given(st.text(st.sampled_from(ALPHABET), max_size=30))
def test_pieces_are_joined_by_score(text):
    ours = tokenizer_in(fields())
    if plain(text) and "▁" not in text:
        assert ours.encode(text) == [1] + joined_by_score(text)
        assert ours.decode(ours.encode(text)) == (" " + text if text else "")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """transformers' tokenizer of the same file, which it can read."""
    directory = tmp_path_factory.mktemp("spm")
    writer = gguf.GGUFWriter(directory / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores(SCORES)
    writer.add_token_types(TYPES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    from transformers.integrations.ggml import GGUFLlamaConverter

    reader = gguf.GGUFReader(directory / "model.gguf")
    values = {name: field.contents() for name, field in reader.fields.items()}
    converter = GGUFLlamaConverter({
        "tokens": values["tokenizer.ggml.tokens"], "scores": values["tokenizer.ggml.scores"],
        "token_type": values["tokenizer.ggml.token_type"], "tokenizer_type": "llama",
        "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0
    })
    backend = converter.converted()
    backend.add_tokens([AddedToken("[INST]", normalized=False)])  # it leaves out user-defined ones
    return backend


@given(st.text(st.sampled_from(ALPHABET), max_size=30) | st.sampled_from(TEXTS))
def test_ids_are_those_of_transformers(theirs, text):
    ours = tokenizer_in(fields(add_bos_token=False))
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids


def test_spaces_of_an_added_token():
    tokens = [*TOKENS[:-2], "▁▁x", TOKENS[-1]]
    ours = tokenizer_in(fields(tokens=tokens))
    assert ours.decode([len(tokens) - 2]) == "  x"


def test_without_a_space_before_the_text():
    ours = tokenizer_in(fields(add_space_prefix=False, add_bos_token=False))
    assert ours.decode(ours.encode("Hello world")) == "Hello world"
    assert tokenizer_in(fields()).decode(ours.encode("Hello world")) == "Hello world"


def test_what_a_file_leaves_out():
    """SentencePiece files begin texts with token 1, end them with 2, and have no byte for 0."""
    lean = tokenizer_in(fields(bos_token_id=None, eos_token_id=None, unknown_token_id=None))
    full = tokenizer_in(fields())
    assert lean.encode("Hello") == full.encode("Hello") and lean.encode("")[:1] == [1]
    assert lean.eos_token_id == full.eos_token_id == 2


def bpe(words="gpt-2", **changes):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|bos|>", "<|eos|>", *letters, "ab", "‹｜place▁holder｜>"]
    found = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": words,
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2)
    } | {f"tokenizer.ggml.{key}": value
         for key, value in changes.items()}
    return tokenizer_in(found)


def test_a_beginning_of_text_that_has_no_id_is_left_out():
    """transformers leaves it out too."""
    assert bpe(add_bos_token=True).encode("ab") == bpe().encode("ab")
    assert bpe("llama-bpe").encode("ab") == bpe().encode("ab")
    assert bpe(add_bos_token=True, bos_token_id=0).encode("ab") == [0] + bpe().encode("ab")
    assert bpe(add_eos_token=True, eos_token_id=1).encode("ab") == bpe().encode("ab") + [1]


def test_a_token_outside_the_byte_alphabet_is_its_own_text():
    ours = bpe()
    token = ours._backend.get_vocab_size() - 1
    assert ours.decode([token]) == "‹｜place▁holder｜>"
    assert ours.decode([token]) == ours._backend.decode([token])


@pytest.mark.parametrize("change, said", [
    ({"tokens": None}, "holds no tokens"),
    ({"scores": None}, "no scores"),
    ({"scores": SCORES[1:]}, "another number of scores"),
    ({"token_type": TYPES + [1]}, "another number of token_type"),
    ({"bos_token_id": len(TOKENS)}, "bos_token_id to"),
    ({"eos_token_id": -1}, "eos_token_id to -1"),
    ({"eos_token_id": "</s>"}, "eos_token_id to '</s>'"),
    ({"precompiled_charsmap": [1]}, "precompiled_charsmap"),
    ({"suppress_tokens": [5]}, "suppress_tokens"),
    ({"add_bos_token": "false"}, "add_bos_token to 'false'"),
    ({"add_eos_token": 1}, "add_eos_token to 1"),
    ({"add_space_prefix": "false"}, "add_space_prefix to 'false'"),
])
def test_damaged_tokenizers(change, said):
    with pytest.raises(ValueError, match=said):
        tokenizer_in(fields(**change))


def test_merges_that_are_no_pairs():
    with pytest.raises(ValueError, match="damaged"):
        bpe(merges=["ab"])


@given(st.text(max_size=20))
def test_words_of_mistral_are_those_of_its_tokenizer(text):
    """transformers carries the pattern to repair files that lack it."""
    assert TEKKEN in inspect.getsource(PreTrainedTokenizerFast._patch_mistral_regex)
    ours = bpe("tekken")._backend.pre_tokenizer
    split = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(TEKKEN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ])
    assert ours.pre_tokenize_str(text) == split.pre_tokenize_str(text)


LLAMA3_WORDS = ["I", "'M", "Ġ", "123", "4"]
SINGLE_DIGITS = ["I", "'M", "Ġ", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    "words, expected", {
        "gpt-2": ["I", "'", "M", "Ġ1234"], "smollm": ["I", "'", "M", "Ġ", "1", "2", "3", "4"],
        "llama-bpe": LLAMA3_WORDS, "llama3": LLAMA3_WORDS, "llama-v3": LLAMA3_WORDS,
        "qwen2": SINGLE_DIGITS, "deepseek-r1-qwen": SINGLE_DIGITS, "tekken": SINGLE_DIGITS
    }.items())
def test_every_family_cuts_texts_in_its_own_way(words, expected):
    ours = bpe(words)._backend.pre_tokenizer
    assert [word for word, _ in ours.pre_tokenize_str("I'M 1234")] == expected


@pytest.mark.parametrize("words", ["qwen2", "deepseek-r1-qwen"])
def test_digits_are_words_of_qwen(words):
    ours = bpe(words)._backend.pre_tokenizer
    assert [word
            for word, _ in ours.pre_tokenize_str("a  1 23")] == ["a", "Ġ", "Ġ", "1", "Ġ", "2", "3"]


@pytest.mark.parametrize("words", ["llama3", "llama-v3"])
def test_other_names_of_the_words_of_llama3(words):
    same = bpe("llama-bpe", bos_token_id=0)
    for text in ("I'm 12345!\n\n ok", "ab"):
        assert bpe(words, bos_token_id=0).encode(text) == same.encode(text)


def test_named_chat_templates():
    found = fields() | {
        "tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "T",
        "tokenizer.chat_templates": ["tool_use"]
    }
    tokenizer, user = tokenizer_in(found), [{"role": "user", "content": "x"}]
    assert tokenizer.render(user) == "D" and tokenizer.render(user, tools=[{}]) == "T"


def test_characters_without_a_piece_are_spelled_in_bytes():
    ours = tokenizer_in(fields(add_bos_token=False))
    ids = ours.encode("жé漢")
    assert [TOKENS[index]
            for index in ids] == ["▁", "<0xD0>", "<0xB6>", "é", "<0xE6>", "<0xBC>", "<0xA2>"]
    assert ours.decode(ids) == " жé漢"


def test_a_template_that_is_no_text():
    with pytest.raises(ValueError, match="chat template 'default' .* is 5"):
        tokenizer_in(fields() | {"tokenizer.chat_template": 5})
