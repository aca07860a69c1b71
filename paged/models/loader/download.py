"""Models from the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

TOKENIZER = ("*.json", "*.jinja", "*.txt", "*.model")
WANTED = ("*.safetensors", *TOKENIZER)
# Folders hold other formats, but for further chat templates; so do these files.
UNWANTED = ("*/*.safetensors", "*/*.json", "*/*.txt", "*/*.model", "consolidated*.safetensors",
            "adapter_*")


def is_id(name: str) -> bool:
    """Whether a model on the Hub can have this name."""
    return (re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not name.startswith(".")
            and not name.lower().endswith(".gguf"))


def download(model: str, revision: str | None = None, wanted: Sequence[str] = WANTED) -> Path:
    """Fetch a model into the Hub's own cache; only what is read here, only once.

    revision: a branch, a tag or a commit; None is the newest.

    Raises FileNotFoundError for what is no id, has no model or no such revision, ValueError for
    what needs a permission, and ConnectionError without a network.
    """
    if not is_id(model):
        raise FileNotFoundError(
            f"There is no model at {model!r}: give a Hugging Face directory, a .gguf "
            "file, a Hub id like 'Qwen/Qwen3-0.6B', or 'default'.")
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(
            snapshot_download(model, revision=revision, allow_patterns=list(wanted),
                              ignore_patterns=list(UNWANTED)))
    except errors.GatedRepoError as error:
        raise ValueError(
            f"The Hub gives {model!r} only to those who have accepted its terms: do so on its "
            "page, log in with `hf auth login`, and try again.") from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(
            f"The Hub's model {model!r} has no revision {revision!r}: give a branch, a tag or a "
            "commit of it.") from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"There is no directory {model!r} here and no such model on the Hugging Face "
            "Hub; check the name (a private model needs `hf auth login`).") from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise ConnectionError(
            f"{model!r} is no directory here, and the Hugging Face Hub cannot be reached "
            "to download it: connect to a network, or name a local directory, a .gguf "
            "file or 'default'.") from error
