"""What a policy turn says: parsing tool calls and answers, checking arguments, making foreign markup inert."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Answer:
    """The turn ends the session with this text."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """The turn asks for one call, its arguments checked against the tool's schema."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Malformed:
    """The turn is neither; `reason` tells the policy what was wrong."""

    reason: str


_TAGS = "tool_call|tool_response|tools|function|parameter|think|answer|summary|session_history|subagent_results"
_MARKUP = re.compile(rf"<(?=/?(?:{_TAGS})\b|/?\|)", re.IGNORECASE)
_FIRST_TAG = re.compile(r"<(tool_call|answer)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>")
# A value ends where the next parameter, or the end of the function, follows: tags inside the value do not end it.
_PARAMETER_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_FUNCTION_END = re.compile(r"\s*</function>")
_CALL_END = re.compile(r"\s*</tool_call>\s*")
_JSON = json.JSONDecoder(strict=False)  # models write raw newlines and tabs inside strings
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "array": (list,),
    "object": (dict,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}


def escape(text: str) -> str:
    """`text` with protocol tags and <|control|> markup made inert; everything else, other tags too, stays.

    >>> escape("<b>x</b> </tool_response> <|im_end|>")
    '<b>x</b> &lt;/tool_response> &lt;|im_end|>'
    """
    return _MARKUP.sub("&lt;", text)


def split_thinking(text: str, *, opened: bool = False) -> tuple[str, str]:
    """(thinking, what follows it); `opened`: the generation prefix already holds the opening tag.

    Thinking stands at the start of a turn. A closing tag without an opening one ends it too, unless it lies inside a
    call or an answer, where it is part of a value. Thinking that never closes is all of the turn.

    >>> split_thinking("<think>a</think>b"), split_thinking("a</think>b"), split_thinking("ab", opened=True)
    (('a', 'b'), ('a', 'b'), ('ab', ''))
    """
    thinking, body = [], text
    while opened or body.lstrip().startswith("<think>"):
        body = body if opened else body.lstrip()[len("<think>") :]
        opened = False
        part, _, body = body.partition("</think>")
        thinking.append(part)
    if not thinking and "</think>" in text:
        blocks = _complete_blocks(text)
        for close in re.finditer("</think>", text):
            if not any(start < close.start() < end for start, end in blocks):
                return text[: close.start()].strip(), text[close.end() :]
    return "\n".join(thinking).strip(), body


def _complete_blocks(text: str) -> list[tuple[int, int]]:
    blocks = [match.span() for match in _block("answer").finditer(text)]
    for opening in re.finditer("<tool_call>", text):
        try:
            blocks.append((opening.start(), _parse_call(text, opening.end())[-1]))
        except _BadTurn:  # only the word, not a call
            pass
    return blocks


def extract_answer(text: str, *, opened: bool = False) -> str | None:
    """The last non-empty <answer> block after the thinking, or None."""
    return _last_block("answer", split_thinking(text, opened=opened)[1])


def extract_summary(text: str, *, opened: bool = False) -> str | None:
    """The last non-empty <summary> block after the thinking, or None."""
    return _last_block("summary", split_thinking(text, opened=opened)[1])


def _block(tag: str) -> re.Pattern[str]:
    return re.compile(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", re.DOTALL)


def _last_block(tag: str, text: str) -> str | None:
    contents = [content.strip() for content in _block(tag).findall(text)]
    return next((content for content in reversed(contents) if content), None)


def parse_turn(
    text: str, tools: Mapping[str, Mapping[str, Any]], *, opened: bool = False
) -> Answer | ToolCall | Malformed:
    """Reads one policy turn: exactly one tool call (Qwen-style XML or Hermes JSON) or exactly one answer.

    Args:
        text: the decoded turn without its end-of-turn token.
        tools: function schema (OpenAI style) of each tool by name.
        opened: the generation prefix already opened the thinking.

    >>> parse_turn("so <answer>Paris</answer>", {})
    Answer(text='Paris')
    """
    _, body = split_thinking(text, opened=opened)
    first = _FIRST_TAG.search(body)
    if first is None:
        unclosed = (opened or "<think>" in text) and "</think>" not in text
        return Malformed("the thinking was not closed" if unclosed else "it held neither a tool call nor an answer")
    try:
        if first[1] == "answer":
            return _parse_answer(body, first.end())
        name, arguments, is_text, end = _parse_call(body, first.end())
        _check_end(body[end:])
        return ToolCall(name, _check_arguments(name, arguments, tools, is_text))
    except _BadTurn as error:
        return Malformed(str(error))


class _BadTurn(Exception):
    pass


def _parse_answer(body: str, start: int) -> Answer:
    end = body.find("</answer>", start)
    if end < 0:
        raise _BadTurn("the <answer> tag was not closed")
    rest = _FIRST_TAG.search(body, end)
    if rest is not None:
        raise _BadTurn("it held several answers" if rest[1] == "answer" else "it held both an answer and a tool call")
    answer = body[start:end].strip()
    if not answer:
        raise _BadTurn("the answer was empty")
    return Answer(answer)


def _parse_call(body: str, start: int) -> tuple[str, dict[str, Any], bool, int]:
    """(name, arguments, whether the values are still text, end) of the call that opens at `start`."""
    function = _FUNCTION.match(body, start)
    if function is not None:
        name, arguments, end = function[1].strip(), *_parse_parameters(body, function.end())
    else:
        name, arguments, end = _parse_json_call(body, start)
    close = _CALL_END.match(body, end)
    if close is None:
        raise _BadTurn("the <tool_call> tag was not closed right after the call")
    return name, arguments, function is not None, close.end()


def _parse_parameters(body: str, at: int) -> tuple[dict[str, Any], int]:
    arguments: dict[str, Any] = {}
    while (opening := _PARAMETER.match(body, at)) is not None:
        close = _PARAMETER_END.search(body, opening.end())
        if close is None:
            raise _BadTurn("a <parameter> or <function> tag was not closed")
        name = opening[1].strip()
        if name in arguments:
            raise _BadTurn(f"the argument {name!r} was given twice")
        arguments[name] = body[opening.end() : close.start()].removeprefix("\n").removesuffix("\n")
        at = close.end()
    end = _FUNCTION_END.match(body, at)
    if end is None:
        raise _BadTurn("the <function> tag was not closed, or held something else than parameters")
    return arguments, end.end()


def _parse_json_call(body: str, start: int) -> tuple[str, dict[str, Any], int]:
    start += len(body[start:]) - len(body[start:].lstrip())
    try:
        call, end = _JSON.raw_decode(body, start)
    except (ValueError, RecursionError) as error:
        if "</tool_call>" not in body[start:]:
            raise _BadTurn("the <tool_call> tag was not closed") from None
        raise _BadTurn(f"the call was no valid JSON ({getattr(error, 'msg', 'nested too deeply')})") from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise _BadTurn('the call must be a JSON object with "name" and "arguments"')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise _BadTurn('"arguments" must be a JSON object')
    return call["name"], arguments, end


def _check_end(rest: str) -> None:
    if not rest:
        return
    follow = _FIRST_TAG.search(rest)
    if follow is None:
        raise _BadTurn("it held text after the tool call")
    several = "several tool calls, and one a turn is allowed"
    raise _BadTurn(f"it held {several if follow[1] == 'tool_call' else 'both a tool call and an answer'}")


def _check_arguments(
    name: str, arguments: dict[str, Any], tools: Mapping[str, Mapping[str, Any]], is_text: bool
) -> dict[str, Any]:
    """The arguments, those that came as text in the types of the schema."""
    if name not in tools:
        raise _BadTurn(f"there is no tool {name!r}; the tools are {', '.join(tools)}")
    schema = parameters_of(tools[name])
    known = schema.get("properties", {})
    for key in arguments:
        if key not in known:
            raise _BadTurn(f"{name} has no argument {key!r}; it takes {', '.join(known)}")
    if is_text:
        arguments = {key: _from_text(f"{name}.{key}", value, known[key]) for key, value in arguments.items()}
    _check_value(name, arguments, schema)
    return arguments


def parameters_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON schema of a tool's arguments."""
    return schema.get("function", schema).get("parameters", {})


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    kinds = schema.get("type", [])
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _from_text(where: str, value: str, schema: Mapping[str, Any]) -> Any:
    kinds = _kinds(schema)
    if not kinds or "string" in kinds:
        return value
    try:
        return _JSON.decode(value.strip())
    except (ValueError, RecursionError):
        raise _BadTurn(f"{where} must be {' or '.join(kinds)}, written as JSON") from None


def _check_value(where: str, value: Any, schema: Mapping[str, Any]) -> None:
    """The subset of JSON schema that tool arguments use; unknown keywords do not constrain."""
    kinds = _kinds(schema)
    if kinds and not any(_has_type(value, kind) for kind in kinds):
        raise _BadTurn(f"{where} must be {' or '.join(kinds)}")
    if "enum" in schema and value not in schema["enum"]:
        raise _BadTurn(f"{where} must be one of {', '.join(map(str, schema['enum']))}")
    if isinstance(value, str) and len(value.strip()) < schema.get("minLength", 0):
        raise _BadTurn(f"{where} must not be shorter than {schema['minLength']}")
    if isinstance(value, list):
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if len(value) < low or (high is not None and len(value) > high):
            raise _BadTurn(f"{where} must have {low} to {'any number of' if high is None else high} items")
        for at, item in enumerate(value):
            _check_value(f"{where}[{at}]", item, schema.get("items", {}))
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        for key in schema.get("required", ()):
            if key not in value:
                raise _BadTurn(f"{where} needs {key!r}")
        for key, item in value.items():
            if key not in properties and schema.get("additionalProperties", True) is False:
                raise _BadTurn(f"{where} has no {key!r}")
            _check_value(f"{where}.{key}", item, properties.get(key, {}))


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind != "boolean":  # in Python True is an int, in JSON it is not
        return False
    return isinstance(value, _TYPES.get(kind, (object,)))


def plain(value: Any) -> str:
    """An argument as text: strings as they are, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def render_call(call: ToolCall, tool_format: Literal["xml", "hermes"]) -> str:
    """The call as a policy writes it; `parse_turn` reads it back.

    >>> render_call(ToolCall("search", {"query": "Oslo"}), "hermes")
    '<tool_call>\\n{"name": "search", "arguments": {"query": "Oslo"}}\\n</tool_call>'
    """
    if tool_format == "hermes":
        body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    else:
        parts = [f"<parameter={key}>\n{plain(value)}\n</parameter>" for key, value in call.arguments.items()]
        body = "\n".join([f"<function={call.name}>", *parts, "</function>"])
    return f"<tool_call>\n{body}\n</tool_call>"
