"""Messages to token ids, once: a session's prompt, then only pieces that are appended behind it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mosaic.agents.prompts import tool_list

# Private-use characters stand in for foreign text while the template is rendered, so that the template never sees it.
_SLOT = "\ue000{}\ue001"
_SLOTS = re.compile("\ue000(\\d+)\ue001")


class ChatFormat:
    """How one tokenizer's chat template frames a conversation, as token pieces.

    The template is rendered for a session's start only; what follows a policy turn is cut out of a rendered sample
    conversation. Template text may hold special tokens. Foreign text (every message but the system prompt) is a piece
    of its own and never yields a control token, whatever is written in it.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        tool_format: call syntax named in the system prompt where the template cannot show tools; a template that can
            (it prints `tools`) names its own.

    Attributes:
        supports_tools: whether the template prints tool schemas and knows tool messages.
        end_of_turn: id of the template's end-of-turn token.
        stop_token_ids: end_of_turn and the tokenizer's end-of-sequence id.
        generation_prefix: ids that open an assistant turn.
        thinking_open: whether they open its thinking too.

    Raises:
        ValueError: there is no template, or it closes an assistant turn without a special token.
    """

    def __init__(self, tokenizer: Any, *, tool_format: Literal["xml", "hermes"] = "xml"):
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError("tokenizer has no chat template: set tokenizer.chat_template")
        self.tokenizer, self.tool_format = tokenizer, tool_format
        self._learn_markup()
        start = [{"role": "system", "content": "s"}, {"role": "user", "content": _SLOT.format(0)}]
        probe = {"type": "function", "function": {"name": "probe\ue002", "description": "", "parameters": {}}}
        self.supports_tools = "probe\ue002" in self._render(start, [probe])
        opening = self._render(start)[len(self._render(start, generation=False)) :]
        self.generation_prefix = self._encode_markup(opening)
        self.thinking_open = opening.rstrip().endswith("<think>")
        response = ("tool", "{}") if self.supports_tools else ("user", "<tool_response>\n{}\n</tool_response>")
        self._after_turn = {"user": self._suffix(start, "user", "{}"), "tool": self._suffix(start, *response)}
        closing = [token_id for token_id in self._after_turn["user"][0] if token_id in self._special]
        if not closing:
            raise ValueError("the chat template of tokenizer ends a turn without a special token: use another template")
        self.end_of_turn = closing[0]
        self._reopening = self._encode_markup(self._behind_turn(start, []))
        stops = (self.end_of_turn, tokenizer.eos_token_id)
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(stop for stop in stops if stop is not None))

    def prompt_ids(self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """The context at a session's start, generation prefix included.

        Args:
            messages: role and content of each; the system prompt is ours, every other content is foreign text.
            tools: function schemas, shown by the template or, if it cannot, as text behind the system prompt.
        """
        framed = [
            dict(message) if message["role"] == "system" else {**message, "content": _SLOT.format(at)}
            for at, message in enumerate(messages)
        ]
        if tools and not self.supports_tools:
            if framed[0]["role"] != "system":
                raise ValueError("messages must begin with a system prompt: the chat template shows tools nowhere else")
            framed[0]["content"] += "\n" + tool_list(tools, self.tool_format)
        # re.split keeps the slot numbers: text, number, text, number, ..., text
        text, *rest = _SLOTS.split(self._render(framed, tools if self.supports_tools else ()))
        ids = self._encode_markup(text)
        for number, text in zip(rest[::2], rest[1::2], strict=True):
            ids += self.encode(messages[int(number)]["content"])
            ids += self._encode_markup(text)
        return ids

    def observation_ids(self, text: str, *, ended: bool) -> list[int]:
        """What follows a policy turn that made a call: the end of the turn unless the policy sampled it (`ended`), a
        tool response with `text`, and the next generation prefix."""
        return self._follow("tool", text, ended)

    def user_ids(self, text: str, *, ended: bool) -> list[int]:
        """As `observation_ids`, for a plain message of the environment."""
        return self._follow("user", text, ended)

    def reopen_ids(self, *, ended: bool) -> list[int]:
        """What opens another assistant turn right behind one: its end, unless the policy sampled it, and the prefix."""
        return self._reopening[self._reopening.index(self.end_of_turn) + 1 if ended else 0 :]

    def encode(self, text: str) -> list[int]:
        """`text` as data: markup in it is spelt out in ordinary tokens."""
        ids: list[int] = []
        start = 0
        while (found := self._markup.search(text, start)) is not None:
            ids += self._encode_plain(text[start : found.start() + 1])  # cut the markup after its first character
            start = found.start() + 1
        ids += self._encode_plain(text[start:])
        return [token_id for token_id in ids if token_id not in self._control]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def decode_turn(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        """(text without the stop token, whether the policy sampled the template's end-of-turn)."""
        stopped = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        return self.decode(token_ids[:-1] if stopped else token_ids), stopped and token_ids[-1] == self.end_of_turn

    def truncate(self, text: str, max_tokens: int) -> str:
        """The longest beginning of `text` that `encode` turns into at most `max_tokens` tokens."""
        ids = self.encode(text)
        if len(ids) <= max_tokens:
            return text
        for keep in range(max(0, max_tokens), 0, -1):
            # A cut character decodes to U+FFFD; and what was cut may merge otherwise when it is encoded again.
            beginning = self.decode(ids[:keep]).rstrip("\ufffd")
            if len(self.encode(beginning)) <= max_tokens:
                return beginning
        return ""

    def _learn_markup(self) -> None:
        """The ids that foreign text must not yield, and how they are spelt: special tokens, and other added ones such
        as <tool_call> (an added single character is no markup, and cannot be spelt otherwise)."""
        added = self.tokenizer.added_tokens_decoder
        markup = {token_id: token.content for token_id, token in added.items() if len(token.content.strip()) > 1}
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._special |= set(self.tokenizer.all_special_ids)
        self._control = self._special | set(markup)
        spelled = sorted(markup.values(), key=len, reverse=True)
        self._markup = re.compile("|".join(map(re.escape, spelled)) or "(?!)")

    def _render(
        self, messages: list[dict[str, str]], tools: Sequence[Mapping[str, Any]] = (), *, generation=True
    ) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=generation
        )

    def _suffix(self, start: list[dict[str, str]], role: str, frame: str) -> tuple[list[int], list[int]]:
        """The pieces around the text of a `role` message that follows an assistant turn."""
        message = {"role": role, "content": frame.format(_SLOT.format(1))}
        before, slot, behind = self._behind_turn(start, [message]).partition(_SLOT.format(1))
        if not slot:
            raise ValueError(f"the chat template of tokenizer leaves out a {role} message behind an assistant turn")
        return self._encode_markup(before), self._encode_markup(behind)

    def _behind_turn(self, start: list[dict[str, str]], messages: list[dict[str, str]]) -> str:
        """What the template writes behind the text of an assistant turn that `messages` follow."""
        turn = {"role": "assistant", "content": _SLOT.format(2)}
        return self._render([*start, turn, *messages]).partition(_SLOT.format(2))[2]

    def _follow(self, role: str, text: str, ended: bool) -> list[int]:
        before, behind = self._after_turn[role]
        start = before.index(self.end_of_turn) + 1 if ended else 0
        return [*before[start:], *self.encode(text), *behind]

    def _encode_markup(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def _encode_plain(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] if text else []
