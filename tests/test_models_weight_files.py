"""Protects which files and tensors are the model: the index decides, else model.safetensors, else
the only file; stale copies, adapters and paths out of the directory are no part; a tied config with
an output layer of its own in the file is settled as transformers settles it."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from paged.models.loader import load
from paged.models.loader.weight_files import INDEX, safetensors, some
from tests.small_models import TINY_LLAMA, TINY_QWEN2, huggingface_model, logits_of

PROMPT = [3, 17, 92, 5, 41, 88]


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    """The tensors of a small model, and its logits."""
    model = huggingface_model(TINY_LLAMA)
    directory = tmp_path_factory.mktemp("whole")
    model.save_pretrained(directory)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    config = (directory / "config.json").read_text()
    return load_file(directory / "model.safetensors"), config, logits


@pytest.fixture
def directory(tensors, tmp_path):
    (tmp_path / "config.json").write_text(tensors[1])
    return tmp_path


def write_shards(directory, tensors, stale=None):
    """Two shards and their index; the second holds stale copies of what the first holds."""
    names = sorted(tensors)
    half = len(names) // 2
    first, second = ({name: tensors[name]
                      for name in part} for part in (names[:half], names[half:]))
    copies = {} if stale is None else {name: stale[name] for name in names[:half]}
    save_file(first, directory / "a.safetensors", metadata={"format": "pt"})
    save_file(second | copies, directory / "b.safetensors", metadata={"format": "pt"})
    weight_map = {name: "a.safetensors" if name in first else "b.safetensors" for name in names}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def check(directory, tensors):
    torch.testing.assert_close(logits_of(load(directory).decoder, PROMPT), tensors[2], atol=1e-4,
                               rtol=0)


def other(tensors):
    return {name: torch.full_like(tensor, 0.5) for name, tensor in tensors[0].items()}


def refused(directory, kind=ValueError):
    with pytest.raises(kind) as caught:
        load(directory)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    return str(caught.value)


def test_each_tensor_comes_from_the_file_that_the_index_names(directory, tensors):
    write_shards(directory, tensors[0], stale=other(tensors))
    check(directory, tensors)


@pytest.mark.parametrize("stale",
                         ["model.safetensors", "z.safetensors", "adapter_model.safetensors"])
def test_files_that_the_index_does_not_name_are_no_part(directory, tensors, stale):
    write_shards(directory, tensors[0])
    save_file(other(tensors), directory / stale)
    check(directory, tensors)


@pytest.mark.parametrize("stale", ["a.safetensors", "z.safetensors", "adapter_model.safetensors"])
def test_without_an_index_the_whole_file_is_the_model(directory, tensors, stale):
    save_file(tensors[0], directory / "model.safetensors")
    save_file(other(tensors), directory / stale)
    check(directory, tensors)


@pytest.mark.parametrize("name", ["weights.safetensors", "MODEL.SAFETENSORS"])
def test_the_only_file_is_the_model_whatever_its_name(directory, tensors, name):
    save_file(tensors[0], directory / name)
    save_file(other(tensors), directory / "adapter_model.safetensors")
    check(directory, tensors)


def test_two_files_and_nothing_that_chooses(directory, tensors):
    for name in ("a.safetensors", "b.safetensors"):
        save_file(tensors[0], directory / name)
    assert "2 weight files (a.safetensors, b.safetensors)" in refused(directory)


def test_an_adapter_is_no_model(directory, tensors):
    save_file(tensors[0], directory / "adapter_model.safetensors")
    assert "an adapter (adapter_model.safetensors)" in refused(directory, FileNotFoundError)


@pytest.mark.parametrize("place", [
    "../a.safetensors", "/a.safetensors", "sub/a.safetensors",
    "..\\a.safetensors", "C:a.safetensors", "..", "", ".", "a.bin", "a.safetensors\0", 3, None,
    ["a.safetensors"], {"a": 1}, True
])
def test_an_index_names_files_of_its_own_directory(directory, tensors, place):
    inside = directory / "model"
    inside.mkdir()
    (directory / "config.json").rename(inside / "config.json")
    weight_map = write_shards(inside, tensors[0])
    (inside / "a.safetensors").rename(directory / "a.safetensors")
    moved = {name: place if file == "a.safetensors" else file for name, file in weight_map.items()}
    (inside / INDEX).write_text(json.dumps({"weight_map": moved}))
    assert f"in {place!r}: it must be the name of a .safetensors file" in refused(inside)


def test_an_index_that_names_a_tensor_of_another_file(directory, tensors):
    weight_map = write_shards(directory, tensors[0])
    name = min(weight_map)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map | {name: "b.safetensors"}}))
    assert f"b.safetensors lacks {name}" in refused(directory)


def test_an_index_of_nothing(directory):
    (directory / INDEX).write_text('{"weight_map": {}}')
    assert "names no weight files" in refused(directory)


def test_links_lead_where_they_lead(directory, tensors, tmp_path_factory):
    """The Hub's cache keeps files elsewhere, under other names."""
    blob = tmp_path_factory.mktemp("blobs") / "0123"
    save_file(tensors[0], blob)
    (directory / "model.safetensors").symlink_to(blob)
    check(directory, tensors)


@given(
    st.dictionaries(st.sampled_from([f"t{i}" for i in range(6)]),
                    st.sampled_from(["a.safetensors", "b.safetensors"]), min_size=1),
    st.sets(st.sampled_from([f"t{i}" for i in range(6)])))
def test_any_index_is_obeyed(tmp_path_factory, weight_map, copies):
    """Every tensor has the value that its file holds, whatever else lies there."""
    directory = tmp_path_factory.mktemp("index")
    for value, file in enumerate(("a.safetensors", "b.safetensors", "c.safetensors")):
        names = copies | {name for name, place in weight_map.items() if place == file} | {"other"}
        save_file({name: torch.tensor([float(value)]) for name in names}, directory / file)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    found = {name: read().item() for name, read in safetensors(directory).items()}
    assert found == {name: float(file[0] == "b") for name, file in weight_map.items()}


HEADS = {
    "equal": lambda embedding: embedding.clone(),
    "another": lambda embedding: embedding.flip(0).contiguous(),
    "one number off": lambda embedding: embedding.clone().index_fill_(0, torch.tensor([5]), 0.5),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("shards", [False, True])
def test_tied_in_the_config_and_an_output_layer_in_the_file(tmp_path, head, shards):
    import transformers

    huggingface_model(TINY_QWEN2).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = HEADS[head](tensors["model.embed_tokens.weight"])
    if shards:
        (tmp_path / "model.safetensors").unlink()
        write_shards(tmp_path, tensors)
    else:
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).float().eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    loaded = load(tmp_path)
    assert loaded.config.tie_word_embeddings == (head == "equal")
    torch.testing.assert_close(logits_of(loaded.decoder, PROMPT), expected, atol=1e-4, rtol=0)


@given(tied=st.booleans(), head=st.sampled_from(["absent", *HEADS]), embedding=st.booleans(),
       half=st.booleans())
@settings(max_examples=30)
def test_any_output_layer(tmp_path_factory, tied, head, embedding, half):
    """As in transformers, but that what it would fill with random numbers is refused."""
    import transformers

    directory = tmp_path_factory.mktemp("head")
    model = huggingface_model(replace(TINY_QWEN2, tie_word_embeddings=tied))
    (model.bfloat16() if half else model).save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    if head != "absent":
        tensors["lm_head.weight"] = HEADS[head](tensors["model.embed_tokens.weight"])
    if not embedding:
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype="float32", output_loading_info=True)
    if report["missing_keys"]:
        assert "lacks" in refused(directory)
        return
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of(load(directory).decoder, PROMPT), expected, atol=1e-4,
                               rtol=0)


def test_an_output_layer_of_another_dtype_and_the_same_numbers(tmp_path):
    huggingface_model(TINY_QWEN2).bfloat16().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].float()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load(tmp_path).config.tie_word_embeddings


def test_an_output_layer_alone_is_both(tmp_path):
    import transformers

    huggingface_model(TINY_QWEN2).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).float().eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of(load(tmp_path).decoder, PROMPT), expected, atol=1e-4,
                               rtol=0)


def test_untied_in_the_config_and_no_output_layer(directory, tensors):
    rest = {name: tensor for name, tensor in tensors[0].items() if name != "lm_head.weight"}
    save_file(rest, directory / "model.safetensors")
    assert "lacks 1 of 30 tensors (lm_head.weight)" in refused(directory)


def test_a_few_names_stand_for_many():
    assert some(["a", "b", "c"]) == "a, b, c" and some(["a", "b", "c", "d"]) == "a, b, c, ..."
