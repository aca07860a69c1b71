"""Prompts of every form, and what they ask for, as an engine takes them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set

from paged.sampling import SamplingParams

Prompt = str | list[int] | list[dict[str, str]] | dict[str, list[int]]
IDS = "prompt_token_ids"


def split_prompts(prompts) -> list:
    """One prompt or several, as a list of prompts. Raises ValueError for what is neither."""
    if isinstance(prompts, str) or isinstance(prompts, Mapping) and set(prompts) == {IDS}:
        return [prompts]
    try:
        if isinstance(prompts, (Mapping, Set)):  # one message, or prompts in no order
            raise TypeError
        several = prompts if isinstance(prompts, Sequence) else list(prompts)  # arrays, generators
        first = several[0] if len(several) else None
    except TypeError:
        raise ValueError(
            f"prompts is {prompts!r}: it must be a prompt or a list of prompts") from None
    message = isinstance(first, dict) and set(first) != {IDS}
    one = message or hasattr(first, "__index__") and not getattr(first, "shape", ())
    return [several] if one else list(several)


def is_conversation(prompt) -> bool:
    """Whether it is a list of messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], dict)


def read_prompt(prompt, tokenizer, **chat) -> tuple[str | None, list[int]]:
    """The text of a prompt, None where it has none, and its token ids.

    chat: options of `tokenizer.chat` for conversations. Raises ValueError for what is no prompt,
    and for text where there is no tokenizer.
    """
    conversation = is_conversation(prompt)
    if not isinstance(prompt, str) and not conversation:
        given = prompt
        if isinstance(prompt, Mapping) and set(prompt) == {IDS}:
            given = prompt[IDS]
        try:
            if isinstance(given, (str, bytes, Mapping, Set)):
                raise TypeError
            return None, [operator.index(token) for token in given]
        except TypeError:
            raise ValueError(
                f"the prompt {prompt!r} is neither a string, nor a list of token ids, nor "
                f"{{{IDS!r}: token ids}}, nor a list of {{'role', 'content'}} messages") from None
    if tokenizer is None:
        raise ValueError("this model came without a tokenizer: give prompts as lists of token ids")
    if conversation:
        return tokenizer.render(prompt, **chat), tokenizer.chat(prompt, **chat)
    return prompt, tokenizer.encode(prompt)


def one_params_a_prompt(sampling_params, num_prompts: int) -> list[SamplingParams]:
    """One SamplingParams for all prompts, or one a prompt. Raises ValueError for anything else."""
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, str):
        raise ValueError(f"sampling_params is {sampling_params!r}: it must be a SamplingParams, or "
                         f"a list of them")
    if len(sampling_params) != num_prompts:
        raise ValueError(f"{len(sampling_params)} sampling_params for {num_prompts} prompts: give "
                         f"one, or one a prompt")
    return list(sampling_params)
