"""Which tokens end a text, beside the one that a checkpoint calls its end-of-sequence token.

Models that chat end a turn with a token of their own, and files often name only the other one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged.models.loader.tokenizer import Tokenizer

# How families write them; llama.cpp goes by the same texts (`llama-vocab.cpp`, special_eog_ids).
TEXTS = {
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>",
    "<end_of_turn>", "<turn|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<EOT>",
    "_<EOT>", "<end_of_utterance>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>",
    "<reponame>", "<|file_sep|>"
}
# These may be the text of an ordinary token too, of HTML for one.
TEXTS_OF_CONTROL = {"</s>", "<eos>", "[EOS]", "[EOT]", "<PAD>", "[PAD]", "<REPO>"}
NORMAL = 1  # token types of a GGUF file


def ends_by_text(tokens: list[str], types: list[int] | None = None) -> set[int]:
    """Ids of the tokens that end a text by what they are called."""
    found = {
        index: token
        for index, token in enumerate(tokens) if token in TEXTS
        or token in TEXTS_OF_CONTROL and types is not None and types[index] != NORMAL
    }
    names = set(found.values())
    # Harmony and Solar end messages with <|end|> and go on; Gemma 4 has another use for </s>.
    more = {"<|return|>", "<|call|>"} <= names or {"<|calls|>", "<|flush|>"} <= names
    dropped = {"<|end|>"} if more else set()
    dropped |= {"</s>"} if "<|tool_response>" in names else set()
    return {index for index, token in found.items() if token not in dropped}


def turn_end(tokenizer: Tokenizer) -> int | None:
    """Id of the token with which the chat template closes the model's turn, if it does with one
    that is special, or known to end texts."""
    word = "\ue000answer\ue000"
    try:
        text = tokenizer.render(
            [{"role": "user", "content": "question"}, {"role": "assistant", "content": word}],
            add_generation_prompt=False)
    except ValueError:  # no template, or one that takes no such conversation
        return None
    _, found, rest = text.rpartition(word)
    token = tokenizer.token_at_start(rest.lstrip()) if found else None
    return tokenizer.added_id(token, special=token not in TEXTS) if token else None
