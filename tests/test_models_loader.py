"""Protects loading: what transformers saves, whole or in shards, computes the same here; every
weight arrives and none is left over; and whatever is wrong with a checkpoint is said in one
sentence."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
import tokenizers
import torch
from huggingface_hub import errors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from paged.device import enough_memory, use_device
from paged.models.loader import load
from paged.models.loader.checkpoint import generation_defaults, open_directory
from paged.models.loader.placing import choose_dtype
from paged.sampling import SamplingParams
from tests.small_models import TINY_LLAMA, TINY_MODELS, TINY_QWEN2, huggingface_model, logits_of

PROMPT = [3, 17, 92, 5, 41, 88]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that saves a small model once, and gives its directory and its logits."""
    known = {}

    def save(name, **arguments):
        key = name, *arguments
        if key not in known:
            model = huggingface_model(TINY_MODELS[name])
            directory = tmp_path_factory.mktemp(name)
            model.save_pretrained(directory, **arguments)
            with torch.no_grad():
                known[key] = directory, model(torch.tensor([PROMPT])).logits[0]
        return known[key]

    return save


@pytest.fixture
def broken(saved, tmp_path):
    """A copy of a saved llama whose files a test may damage."""
    for file in saved("llama")[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def refused(directory, kind=ValueError):
    """The sentence with which a model is refused."""
    with pytest.raises(kind) as caught:
        load(directory)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    return sentence


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "40KB"}], ids=["whole", "sharded"])
def test_what_transformers_saves_computes_the_same(saved, name, shards):
    directory, expected = saved(name, **shards)
    assert len(list(directory.glob("*.safetensors"))) == 1 or shards
    loaded = load(str(directory))
    assert loaded.config == TINY_MODELS[name] and loaded.tokenizer is None
    assert loaded.num_weights == len(list(huggingface_model(TINY_MODELS[name]).parameters()))
    torch.testing.assert_close(logits_of(loaded.decoder, PROMPT), expected, atol=1e-4, rtol=0)


def test_the_spelling_of_transformers_4(broken, saved):
    config = json.loads((broken / "config.json").read_text())
    rope = config.pop("rope_parameters", {})
    config["rope_theta"] = rope.get("rope_theta", config.get("rope_theta"))
    config["torch_dtype"] = config.pop("dtype", "float32")
    (broken / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(logits_of(load(broken).decoder, PROMPT),
                               saved("llama")[1], atol=1e-4, rtol=0)


def test_redundant_tensors_are_passed_over(tmp_path):
    model = huggingface_model(TINY_QWEN2)
    model.save_pretrained(tmp_path)

    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(5)

    edit(tmp_path, change)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of(load(tmp_path).decoder, PROMPT), expected, atol=1e-4,
                               rtol=0)


def test_a_missing_tensor(broken):
    edit(broken, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    sentence = refused(broken)
    assert "lacks 1 of 30 tensors (model.layers.1.self_attn.k_proj.weight)" in sentence


def test_many_missing_tensors_are_not_all_listed(broken):
    edit(broken, lambda tensors: [tensors.pop(name) for name in list(tensors) if "mlp" in name])
    assert "lacks 9 of 30" in refused(broken) and len(refused(broken)) < 500


@pytest.mark.parametrize("layers", [4, 10**12])
def test_more_layers_than_there_are(broken, layers):
    config = json.loads((broken / "config.json").read_text()) | {"num_hidden_layers": layers}
    (broken / "config.json").write_text(json.dumps(config))
    assert f"holds 3 layers, and its config says {layers}" in refused(broken)


def test_fewer_layers_than_there_are(broken):
    config = json.loads((broken / "config.json").read_text()) | {"num_hidden_layers": 2}
    (broken / "config.json").write_text(json.dumps(config))
    assert "9 tensors too many" in refused(broken)


def test_an_extra_tensor(broken):
    edit(broken,
         lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(72)}))
    sentence = refused(broken)
    assert "1 tensors too many for a llama model (model.layers.0.self_attn.q_proj.bias)" in sentence


def test_a_tensor_of_the_wrong_shape(broken):
    edit(broken, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(71)}))
    assert "model.norm.weight" in refused(
        broken) and "[71], and the config asks for [72]" in refused(broken)


def test_a_scalar_does_not_spread_over_a_weight(broken):
    edit(broken, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(1)}))
    assert "[1], and the config asks for [72]" in refused(broken)


def test_a_config_and_no_weights(broken):
    (broken / "model.safetensors").unlink()
    assert "no weights in .safetensors files" in refused(broken, FileNotFoundError)
    (broken / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin" in refused(broken, FileNotFoundError)


def test_a_missing_shard(saved, tmp_path):
    for file in saved("llama", max_shard_size="40KB")[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refused(tmp_path, FileNotFoundError)


def test_a_file_cut_short(broken):
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    assert "not a whole safetensors file" in refused(broken)


def test_weights_without_a_config(broken):
    (broken / "config.json").unlink()
    assert "no config.json" in refused(broken, FileNotFoundError)


def test_a_config_that_is_not_json(broken):
    (broken / "config.json").write_text("{'model_type': ")
    assert "not valid JSON" in refused(broken)


@pytest.mark.parametrize("name", [
    "no-such-model", "./no/such/directory", "/no/such/directory", "no/such/model.gguf",
    "owner/model.GGUF", ""
])
def test_a_name_that_is_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sentence = refused(name, FileNotFoundError)
    assert repr(name) in sentence and "'default'" in sentence


def test_a_file_that_is_not_a_model(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"")
    assert "not a .gguf file" in refused(path)


@pytest.mark.parametrize("error, kind, said", [
    (ConnectionError("no route"), ConnectionError, "cannot be reached"),
    (errors.LocalEntryNotFoundError("nothing cached"), ConnectionError, "cannot be reached"),
    (errors.OfflineModeIsEnabled("offline"), ConnectionError, "cannot be reached"),
])
def test_a_hub_id_without_a_network(error, kind, said, monkeypatch):

    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    sentence = refused("some-owner/some-model", kind)
    assert "'some-owner/some-model'" in sentence and said in sentence


def test_a_hub_id_is_downloaded_and_read(saved, monkeypatch):
    asked = []

    def download(name, **options):
        asked.append((name, options))
        return str(saved("llama")[0])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load("some-owner/some-model").config == TINY_LLAMA
    (name, options), = asked
    assert name == "some-owner/some-model"
    files = {
        "config.json": True, "model-00001-of-00002.safetensors": True, "tokenizer.model": True,
        "chat_template.jinja": True, "additional_chat_templates/tool_use.jinja": True,
        "merges.txt": True, "onnx/model.safetensors": False, "original/params.json": False,
        "consolidated.safetensors": False, "adapter_model.safetensors": False, "a.bin": False
    }
    assert options.pop("revision") is None
    chosen = huggingface_hub.utils.filter_repo_objects(files, **options)
    assert list(chosen) == [name for name, wanted in files.items() if wanted]
    load("some-owner/some-model", revision="refs/pr/3")
    assert asked[1][1]["revision"] == "refs/pr/3"


@pytest.mark.parametrize("revision", ["", 5, "a b", "../main", "-x"])
def test_a_revision_that_is_none(revision, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **o: pytest.fail("asked"))
    with pytest.raises(ValueError, match=re.escape(f"revision is {revision!r}: it must be")):
        load("some-owner/some-model", revision=revision)


def test_a_revision_of_what_is_here(saved, monkeypatch):
    with pytest.raises(ValueError, match="revision is 'main'.* is here"):
        load(saved("llama")[0], revision="main")
    monkeypatch.setattr("paged.models.loader.default_model.default_model",
                        lambda: pytest.fail("it was fetched"))
    with pytest.raises(ValueError, match="revision is 'main'.* default is here"):
        load("default", revision="main")


def test_a_revision_that_the_hub_does_not_have(monkeypatch):

    def fail(*arguments, **options):
        raise errors.RevisionNotFoundError("none", response=Mock())

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(FileNotFoundError, match="'a/b' has no revision 'v9'"):
        load("a/b", revision="v9")


def test_a_tokenizer_from_elsewhere(saved, tmp_path, monkeypatch):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 7, "<end>": 9}, "a"))
    backend.add_special_tokens(["<end>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    model = saved("llama")[0]
    bare = load(model)
    found = load(model, tokenizer=str(tmp_path))
    assert bare.tokenizer is None and found.tokenizer.encode("a") == [7]
    assert found.eos_token_ids == bare.eos_token_ids | {9}
    assert load(model, tokenizer=found.tokenizer).tokenizer is found.tokenizer
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: asked.append(
        (name, options)) or str(tmp_path))
    assert load(model, tokenizer="a/b").tokenizer.encode("a") == [7]
    assert asked[0][0] == "a/b" and "*.safetensors" not in asked[0][1]["allow_patterns"]
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        load(model, tokenizer=str(model))


@pytest.mark.parametrize("bad", [5, "", ["a"], "default", "no/such/place", "tokenizer.json"])
def test_a_tokenizer_that_is_none_is_refused_before_a_model_is_fetched(bad, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **o: pytest.fail("asked"))
    with pytest.raises(ValueError, match=re.escape(f"tokenizer is {bad!r}: it must be")):
        load("some-owner/some-model", tokenizer=bad)


@pytest.mark.parametrize("config, generation, expected", [
    (7, None, {7}),
    (7, 9, {9}),
    (7, [9, 11], {9, 11}),
    ([5, 6], None, {5, 6}),
    (None, None, set()),
])
def test_end_of_sequence_ids(broken, config, generation, expected):
    values = json.loads((broken / "config.json").read_text()) | {"eos_token_id": config}
    (broken / "config.json").write_text(json.dumps(values))
    (broken / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (broken / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load(broken).eos_token_ids == expected


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtype(saved, dtype):
    directory, expected = saved("llama")
    decoder = load(directory, dtype=dtype).decoder
    assert decoder.embedding.dtype == torch.bfloat16
    assert (logits_of(decoder, PROMPT) - expected).abs().max() / expected.abs().max() < 0.05


def test_float32_is_the_dtype_of_the_cpu(tmp_path):
    huggingface_model(TINY_LLAMA).bfloat16().save_pretrained(tmp_path)
    assert load(tmp_path).decoder.embedding.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float8", "int8", torch.float64, None])
def test_a_dtype_that_is_not_supported(saved, dtype):
    with pytest.raises(ValueError, match="is not supported; use 'auto', 'float32'"):
        load(saved("llama")[0], dtype=dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there(saved):
    with pytest.raises(ValueError, match="sees no GPU"):
        load(saved("llama")[0], device="cuda")


@pytest.mark.parametrize("device, words", [("cuda:99", "'cuda:99' was asked for and "),
                                           ("xpu", "device is 'xpu': cho"),
                                           ("gpu", "device is 'gpu': choose"),
                                           (None, "device is None: choose")])
def test_a_device_that_is_not_here(saved, device, words):
    with pytest.raises(ValueError, match=words):
        load(saved("llama")[0], device=device)


@pytest.mark.parametrize("place", ["Decoder.pack", "fill"])
@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory."),
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")
])
def test_weights_without_room_are_a_sentence(saved, monkeypatch, place, error):

    def full(*args):
        raise error

    monkeypatch.setattr(f"paged.models.loader.{place}", full)
    with pytest.raises(
            MemoryError,
            match="no room for 0.00 GiB of weights in float32: .* Choose a smaller model"):
        load(saved("llama")[0])
    monkeypatch.setattr(f"paged.models.loader.{place}", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load(saved("llama")[0])


def test_memory_that_ran_out_on_the_way_to_another_error():
    """Triton and cuBLAS say something else, and what they say follows from it."""
    with pytest.raises(MemoryError, match="no room for x: .* Do y"):
        with enough_memory("x", "Do y", torch.device("cpu")):
            try:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            except RuntimeError:
                raise RuntimeError("the kernel did not start")  # noqa: B904
    with pytest.raises(RuntimeError, match="^another$"):
        with enough_memory("x", "Do y", torch.device("cpu")):
            raise RuntimeError("another")


def test_a_bar_shows_what_loads_slowly(saved, monkeypatch, capsys):
    monkeypatch.setattr("paged.models.loader.weights.tqdm",
                        lambda *args, **kwargs: tqdm(*args, **kwargs | {"delay": 0}))
    load(saved("llama")[0])
    assert "Loading weights: 100%" in capsys.readouterr().err
    load(saved("llama")[0], use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.gpu
def test_the_checkpoints_own_dtype_on_a_gpu(tmp_path):
    huggingface_model(TINY_LLAMA).half().save_pretrained(tmp_path)
    assert load(tmp_path, device="cuda").decoder.embedding.dtype == torch.float16


@pytest.mark.parametrize("file", [
    "config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"
])
@pytest.mark.parametrize("text", ["[]", "null", "{", '{"weight_map": []}'])
def test_json_of_another_shape_names_the_file(broken, file, text):
    if text == '{"weight_map": []}' and file != "model.safetensors.index.json":
        pytest.skip("an index only")
    (broken / file).write_text(text)
    assert file in refused(broken)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_weights_are_not_taken_for_plain_ones(broken, dtype):
    name = "model.norm.weight"
    edit(broken, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    assert f"is stored as {str(dtype)[6:]}" in refused(broken)


def test_an_end_of_sequence_id_that_is_no_id(broken):
    (broken / "generation_config.json").write_text('{"eos_token_id": "<eos>"}')
    assert "'<eos>'" in refused(broken)


@pytest.mark.parametrize("values, expected", [
    ({}, {}),
    ({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1
      }, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}),
    ({"temperature": 0, "top_p": 1, "top_k": 0}, {"temperature": 0, "top_p": 1, "top_k": 0}),
    ({"temperature": None, "top_k": 5}, {"top_k": 5}),
    ({"do_sample": False, "temperature": 0.7}, {}),
])
def test_what_the_author_samples_with(broken, values, expected):
    (broken / "generation_config.json").write_text(json.dumps(values))
    assert load(broken).generation_defaults == expected


@pytest.mark.parametrize(
    "values", [{"temperature": -1}, {"temperature": "0.7"}, {"temperature": float("nan")},
               {"top_p": 0}, {"top_p": 1.5}, {"top_p": True}, {"top_p": 1e-46},
               {"temperature": True}, {"top_k": 2.5}, {"top_k": -1}, {"top_k": [1]}])
def test_sampling_defaults_that_cannot_be(broken, values):
    (broken / "generation_config.json").write_text(json.dumps(values))
    (name, value), = values.items()
    sentence = refused(broken)
    assert "generation_config.json sets what cannot be" in sentence
    assert f"{name} is {value!r}: it must be" in sentence


VALUES = (st.none() | st.booleans() | st.integers(-3, 300) | st.text(max_size=3)
          | st.floats(width=32, allow_subnormal=False) | st.lists(st.integers(0, 3), max_size=2))


@given(st.dictionaries(st.sampled_from(["temperature", "top_p", "top_k", "do_sample", "n"]),
                       VALUES))
def test_any_sampling_defaults_are_refused_or_can_be_sampled_with(values):
    source = Path("generation_config.json")
    try:
        found = generation_defaults(values, source)
    except ValueError as error:
        assert str(source) in str(error) or "true or false" in str(error)
    else:
        SamplingParams(**found)
        assert found == {} or found == {
            name: values[name]
            for name in ("temperature", "top_p", "top_k") if values.get(name) is not None
        }


@given(eos=st.none() | st.integers(0, 210) | st.lists(st.integers(0, 210), max_size=3),
       config_eos=st.none() | st.integers(0, 210))
def test_any_ends_are_those_of_transformers(saved, tmp_path_factory, eos, config_eos):
    """Those of the generation config, and where it names none, those of the config."""
    from transformers import GenerationConfig

    directory = tmp_path_factory.mktemp("ends")
    (directory / "model.safetensors").symlink_to(saved("llama")[0] / "model.safetensors")
    config = json.loads((saved("llama")[0] / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": config_eos}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    theirs = GenerationConfig.from_pretrained(directory).eos_token_id
    theirs = config_eos if theirs is None else theirs
    expected = set(theirs) if isinstance(theirs, list) else {theirs} - {None}
    assert open_directory(directory).eos_token_ids == expected


def test_a_switch_that_is_a_text(broken):
    (broken / "generation_config.json").write_text(json.dumps({"do_sample": "false"}))
    assert "do_sample to 'false': it must be true or false" in refused(broken)


def test_a_dtype_that_is_no_name(broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"dtype": {"default": "float32"}}))
    assert "must be the name of one" in refused(broken)


@pytest.mark.parametrize("device", ["cpu:0", torch.device("cpu"), "auto"])
def test_devices_by_other_names(saved, device):
    decoder = load(saved("llama")[0], device=device).decoder
    gpu = device == "auto" and torch.cuda.is_available()
    assert decoder.embedding.device.type == ("cuda" if gpu else "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "auto"])
def test_a_gpu_by_its_names(saved, device):
    found = use_device(device)
    assert found.type == "cuda" and torch.cuda.current_device() == (found.index or 0)
    assert load(saved("llama")[0], device=device).decoder.embedding.device.type == "cuda"


def test_a_gpu_with_a_number_becomes_the_current_one(monkeypatch):
    """Kernels, graphs and events go to the current device."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert use_device("cuda:1") == torch.device("cuda:1") and chosen == [torch.device("cuda:1")]
    assert use_device("cuda") == use_device("auto") == torch.device("cuda") and len(chosen) == 1
    with pytest.raises(ValueError, match="last GPU that PyTorch sees is 'cuda:1'"):
        use_device("cuda:2")


@pytest.mark.parametrize("wanted, device, stored, expected", [
    ("auto", "cpu", "float16", torch.float32),
    ("auto", "cuda", "float16", torch.float16),
    ("auto", "cuda", None, torch.bfloat16),
    ("float16", "cuda", "bfloat16", torch.float16),
    (torch.bfloat16, "cpu", None, torch.bfloat16),
])
def test_the_dtype_that_is_chosen(wanted, device, stored, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose_dtype(wanted, torch.device(device), stored) == expected


def test_a_card_without_bfloat16_takes_float16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    cuda = torch.device("cuda")
    assert choose_dtype("auto", cuda, "bfloat16") == choose_dtype("auto", cuda,
                                                                  None) == torch.float16
    assert choose_dtype("bfloat16", cuda, None) == torch.bfloat16  # asked for by name


def test_a_stored_dtype_that_is_not_supported():
    with pytest.raises(ValueError, match="'float8_e4m3fn' is not supported"):
        choose_dtype("auto", torch.device("cuda"), "float8_e4m3fn")


def test_upper_case_endings(tmp_path):
    (tmp_path / "MODEL.GGUF").write_bytes(b"nothing")
    assert "not a whole GGUF file" in refused(tmp_path / "MODEL.GGUF")
