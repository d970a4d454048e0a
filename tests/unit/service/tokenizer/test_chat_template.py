"""The dialect of chat templates, where it is not plain Jinja, and the ceiling on their output."""

import json
from datetime import datetime

import pytest

from service.tokenizer.chat_template import ChatTemplate, ChatTemplateError


def rendered(source, messages=(), *, max_output_bytes=10_000, named=None, **kwargs):
    template = ChatTemplate(source, named or {}, max_output_bytes)
    return template.render(messages, add_generation_prompt=True, kwargs=kwargs)


def test_a_template_is_given_messages_named_tokens_arguments_and_no_tools():
    source = (
        "{{ bos_token }}{{ messages[0].content }}{{ add_generation_prompt }}{{ mood }}"
        "{{ tools is none }}{{ documents is none }}"
    )
    named = {"bos_token": "<s>"}
    shown = rendered(source, [{"content": "hi"}], named=named, mood="gay")
    assert shown == "<s>hiTruegayTrueTrue"
    assert rendered("{{ bos_token }}", named=named, bos_token="mine") == "mine"
    template = ChatTemplate("{{ messages }}{{ add_generation_prompt }}", {}, 100)
    hostile = {"messages": "mine", "add_generation_prompt": "mine"}
    assert template.render([], add_generation_prompt=False, kwargs=hostile) == "[]False"


def test_lines_of_blocks_leave_no_blanks():
    assert rendered("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_generation_blocks_are_transparent_and_loops_can_be_left():
    source = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}"
        "{% endif %}{% generation %}<{{ i }}>{% endgeneration %}{% endfor %}end"
    )
    assert rendered(source) == "<0><2>end"


VALUE = {"b": "é<&>", "a": [1, 2]}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"indent": 2},
        {"sort_keys": True},
        {"ensure_ascii": True},
        {"separators": (",", ":")},
        {"indent": 1, "separators": (";", "=")},
    ],
)
def test_json_is_written_as_it_is_and_not_for_html(options):
    arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
    expected = json.dumps(VALUE, **{"ensure_ascii": False, **options})
    assert rendered("{{ value | tojson(" + arguments + ") }}", value=VALUE) == expected


def test_the_date_is_todays():
    before = datetime.now().strftime("%d %b %Y")
    shown = rendered("{{ strftime_now('%d %b %Y') }}")
    assert shown in (before, datetime.now().strftime("%d %b %Y"))


def test_a_template_may_refuse_in_its_own_words():
    with pytest.raises(ChatTemplateError, match="refused the messages: only one system message"):
        rendered("{{ raise_exception('only one system message') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages[3].content.upper() }}",
        "{{ messages.missing() }}",
        "{{ 'a' + 1 }}",
        "{{ 'x'.encode('nothing') }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages.__class__.__mro__ }}",
    ],
)
def test_whatever_a_template_trips_over_is_an_error_of_the_messages(source):
    with pytest.raises(ChatTemplateError, match="refused the messages"):
        rendered(source)


def test_output_may_be_as_long_as_the_ceiling_in_bytes():
    source = "{% for i in range(n) %}é{% endfor %}"
    assert rendered(source, max_output_bytes=10, n=5) == "é" * 5
    with pytest.raises(ChatTemplateError, match="too large"):
        rendered(source, max_output_bytes=9, n=5)


def test_a_template_that_does_not_parse_is_the_models_fault():
    with pytest.raises(ChatTemplateError, match="the model's chat template is broken"):
        ChatTemplate("{% for %}", {}, 100)


def test_literals_are_the_strings_of_the_logic():
    source = "{% if m == '</think>' %}shown{% elif m[1] == 2 %}{{ 'x' ~ m }}{% endif %}"
    assert ChatTemplate(source, {}, 100).literals == {"</think>", "x"}
