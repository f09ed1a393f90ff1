"""Turn a user's words into the target's token ids, and back for prompts that the target invents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_dspark.errors import ConfigError

_MARKER = "\x00"


class PromptFormat:
    """The chat template of a target, or none of it.

    Args:
        tokenizer: the target's, from transformers.
        raw: prompts go to the target as they are.
        template_kwargs: further arguments of the chat template, such as ``{"enable_thinking": False}``.

    Raises:
        ConfigError: the tokenizer has no chat template, and `raw` is not set.
    """

    def __init__(self, tokenizer: Any, *, raw: bool = False, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.raw = raw
        self._template_kwargs = dict(template_kwargs or {})
        if not raw and tokenizer.chat_template is None:
            raise ConfigError(
                f"--target {tokenizer.name_or_path}: its tokenizer has no chat template; give --raw to train on plain "
                "text that continues the prompts"
            )

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, raw: bool = False, template_kwargs: Mapping[str, Any] | None = None
    ) -> PromptFormat:
        """Load the format with the tokenizer of a local checkpoint directory or a model of the Hugging Face hub."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(path), raw=raw, template_kwargs=template_kwargs)

    def encode(self, prompt: str) -> list[int]:
        """Return token ids of a user's words: the chat template, open at the assistant's answer, or plain text."""
        if not self.raw:
            return self.encode_conversation([prompt], [])
        ids: list[int] = self.tokenizer(prompt)["input_ids"]
        return ids

    def encode_conversation(self, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
        """Return token ids of a conversation, open at the answer to the last of `turns`; one answer less than turns."""
        messages = [{"role": "user", "content": turns[0]}]
        for answer, turn in zip(answers, turns[1:], strict=True):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        ids: list[int] = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, **self._template_kwargs
        )["input_ids"]
        return ids

    def answer_text(self, output_ids: Sequence[int]) -> str:
        """Return the text of an answer, as a client would get it."""
        text: str = self.tokenizer.decode(output_ids, skip_special_tokens=True)
        return text

    def open_user_turn(self, opening: str = "") -> list[int]:
        """Return token ids of the chat template up to the user's words, followed by `opening`.

        Raises:
            ConfigError: there is no template, or it begins with the user's words.
        """
        ids: list[int] = self.tokenizer(self._around_user_turn()[0] + opening, add_special_tokens=False)["input_ids"]
        if not ids:
            raise ConfigError(
                f"--invent: the chat template of {self.tokenizer.name_or_path} puts nothing before the user's words, "
                "so the target has nothing to go on; give --prompts"
            )
        return ids

    def invented_turn(self, output_ids: Sequence[int], stop_ids: frozenset[int]) -> str | None:
        """Return what the target wrote after `open_user_turn`, with leading space; None if that is no user's turn."""
        ended = bool(output_ids) and output_ids[-1] in stop_ids
        words = self.tokenizer.decode(output_ids[:-1] if ended else output_ids, skip_special_tokens=False)
        # Where the turn ends with another token than the answer, the target writes on beyond it.
        turn, tail, _ = words.partition(self._around_user_turn()[1])
        # A user does not write special tokens; a turn that has some has gone astray.
        astray = any(token in turn for token in self.tokenizer.all_special_tokens)
        return turn.rstrip() if (ended or tail) and not astray else None

    def _around_user_turn(self) -> tuple[str, str]:
        """Template text before the user's words, and the first piece after them."""
        if self.raw:
            raise ConfigError("--invent opens the chat template at the user turn; with --raw, give --prompts instead")
        text: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARKER}], tokenize=False, **self._template_kwargs
        )
        head, _, tail = text.partition(_MARKER)
        return head, (tail.split() or ["\n"])[0]
