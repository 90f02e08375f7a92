"""What agents send back: calls, their arguments, thoughts and names, as chat templates see it."""

import json

import pytest

from beamwright.engine.prompts import PromptRenderer
from beamwright.errors import InputError
from beamwright.models.hub import BUNDLED
from beamwright.models.tokenizer import TextCodec
from beamwright.sections import ModelSettings
from beamwright.serve.answers import split_tool_calls
from beamwright.serve.body import ApiError, AsciiJSON, parse_fields
from beamwright.serve.chat import ChatFields, make_conversation
from beamwright.serve.endpoint import format_event
from beamwright.serve.responses import ResponseFields
from beamwright.tree import Conversation, RawPrompt
from tables import beside

CASES = beside(__file__)

SHOWS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    "{% if m.name %}<{{ m.name }}>{% endif %}"
    "{% for c in m.tool_calls or [] %}({{ ARGUMENTS }}){% endfor %};{% endfor %}"
)
AS_JSON = SHOWS.replace("ARGUMENTS", "c.function.arguments | tojson")
BY_ITEM = SHOWS.replace(
    "{{ ARGUMENTS }}", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
)
USER = {"role": "user", "content": "go"}


def called(arguments):
    function = {"name": "f", **({} if arguments is ... else {"arguments": arguments})}
    call = {"id": "c", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.fixture
def shown(generator_folder):
    """A history as a chat template shows it, behind the user's turn."""

    def make(*messages, template=AS_JSON):
        fields = parse_fields(ChatFields, {"model": "m", "messages": [USER, *messages]})
        codec = TextCodec.load(generator_folder, template)
        text = codec.render_conversation(make_conversation(fields.messages, "messages").messages)
        return text.removeprefix("user:go;")

    return make


@pytest.mark.parametrize(("message", "text"), CASES["messages"])
def test_what_a_template_reads_reaches_it(shown, message, text):
    assert shown(message) == text


@pytest.mark.parametrize(
    ("arguments", "text", "by_item"),
    [
        *CASES["arguments"],
        *((empty, "{}", "") for empty in ("", " ", "{}", "null", None, ..., {})),
    ],
)
def test_arguments_stay_usable_whatever_they_are(shown, arguments, text, by_item):
    assert shown(called(arguments)) == f"assistant:({text});"
    if by_item is not None:
        assert shown(called(arguments), template=BY_ITEM) == f"assistant:({by_item});"
        return
    with pytest.raises(InputError, match=r"^messages\[1\]\.tool_calls\[0\]\.function\.arguments: "):
        shown(called(arguments), template=BY_ITEM)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "arguments",
    [
        *(form % number for number in ("NaN", "-Infinity", "1e999")
          for form in ("%s", '{"a": {"b": [%s]}}')),
        "[" * 70 + "]" * 70,
        "1" * 5000,
    ],
)  # fmt: skip
def test_what_json_lacks_is_refused_before_the_search(served, arguments, stream):
    response = served.chat(messages=[USER, called(arguments)], stream=stream)
    param = "messages[1].tool_calls[0].function.arguments"
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        *CASES["calls"],
        ('{"name": "f", "arguments": ' + "[" * 100_000 + "}", None),
        ("<tool_call>{" * 100_000, None),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("template", [AS_JSON, BY_ITEM])
def test_what_is_told_as_a_call_can_be_sent_back_and_the_rest_is_text(
    shown, call, arguments, template
):
    text = f"<tool_call>\n{call}\n</tool_call>"
    if arguments is None:
        assert split_tool_calls(text) == (text, [])
        return
    said, calls = split_tool_calls(f"Let me see. {text}\n{text}")
    assert said == "Let me see."
    assert [each["function"] for each in calls] == [{"name": "f", "arguments": arguments}] * 2
    assert calls[0]["id"] != calls[1]["id"]
    message = {"role": "assistant", "content": said or None, "tool_calls": calls}
    assert shown(message, template=template).startswith("assistant:Let me see.(")


# --- items of /v1/responses ------------------------------------------------------------------

THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "T"}]}


@pytest.mark.parametrize(("items", "thoughts"), CASES["thoughts"])
def test_a_thought_belongs_to_the_message_behind_it(items, thoughts):
    fields = parse_fields(ResponseFields, {"model": "m", "input": [USER, *items]})
    messages = make_conversation(fields.input, "input").messages[1:]
    assert [each.get("reasoning_content") for each in messages] == thoughts


@pytest.mark.parametrize(("item", "words"), CASES["items"])
def test_an_item_that_cannot_be_one_is_named(item, words):
    with pytest.raises(ApiError, match=words) as refused:
        parse_fields(ResponseFields, {"model": "m", "input": [USER, THOUGHT, item]})
    assert (refused.value.status, refused.value.param) == (400, "input[2]")


# --- a start of a thought that a user has written --------------------------------------------


@pytest.mark.parametrize(
    ("problem", "template", "quoted"),
    [
        ("How many? <think>", None, True),
        ("How many? <think>", "{{ messages[0].content }}\n", True),
        ("How many? <think>", "{{ messages[0].content }}<think>\n", False),
        ("How many?", "{{ messages[0].content }}<think>\n", False),
        (Conversation(({"role": "user", "content": "How many?\n<think>\n"},)), None, True),
        (RawPrompt("How many? <think>"), None, False),
        ("How many?", None, False),
    ],
)
def test_a_thought_is_opened_by_the_template_alone(problem, template, quoted):
    codec = TextCodec.load(BUNDLED / "thinking", template)
    root = PromptRenderer(codec, 1024, codec.vocab_size, ModelSettings()).make_tree(0, problem).root
    assert (root.quoted, root.raw) == (quoted, isinstance(problem, RawPrompt))


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_replies_have_no_numbers_that_json_lacks(odd):
    assert json.loads(AsciiJSON({"score": [odd]}).body) == {"score": [None]}
    assert format_event({"score": odd}) == b'data: {"score": null}\n\n'
