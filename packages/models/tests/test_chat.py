import time

import pytest

from octavo_core.errors import CheckpointError, RequestError
from octavo_models._src import sandbox
from octavo_models.text import ChatTemplate, load_chat_template

USER = [{"role": "user", "content": "Hi"}]
LINES = "{% for m in messages %}\n{{ m.role }}: {{ m.content | trim }}\n{% endfor %}\n{% if add_generation_prompt %}\nassistant:{% endif %}"


def test_chat_prompts_have_the_reference_ids(smollm2, reference_prompts):
    tokenizer, template = smollm2
    prompts = {p["name"]: p for p in reference_prompts}
    text = template.render([{"role": "user", "content": "What is gravity?"}])
    assert text == prompts["chat-simple"]["prompt"]
    assert tokenizer.encode(text, add_special_tokens=False) == prompts["chat-simple"]["prompt_ids"]


def test_a_system_message_replaces_the_default_one(smollm2):
    _, template = smollm2
    messages = [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": [{"type": "text", "text": "Name three fruits."}]},
    ]
    assert template.render(messages) == (
        "<|im_start|>system\nYou answer in one short sentence.<|im_end|>\n<|im_start|>user\nName three fruits.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not template.render(messages, add_generation_prompt=False).endswith("assistant\n")


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatTemplate(LINES).render([{"role": "user", "content": parts}]) == "user: ab\nassistant:"


def test_absent_content_is_empty():
    assert ChatTemplate(LINES).render([{"role": "assistant", "content": None}], add_generation_prompt=False) == "assistant: \n"


def test_a_final_message_is_continued():
    messages = [*USER, {"role": "assistant", "content": "Hel"}]
    template = ChatTemplate(LINES)
    assert template.render(messages, add_generation_prompt=False, continue_final_message=True) == "user: Hi\nassistant: Hel"
    with pytest.raises(RequestError, match="cannot end and go on"):
        template.render(messages, continue_final_message=True)
    with pytest.raises(RequestError, match="does not show the last message"):
        ChatTemplate("x").render(messages, add_generation_prompt=False, continue_final_message=True)


def test_template_sees_what_transformers_templates_expect():
    source = (
        "{{ bos_token }}|{{ tools is none }}|{{ extra }}|{{ {'ä': '<b>'} | tojson }}|{{ strftime_now('%Y') | length }}|"
        "{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}|{% generation %}g{% endgeneration %}"
    )
    assert ChatTemplate(source, special_tokens={"bos_token": "<s>"}).render(USER, extra=1) == '<s>|True|1|{"ä": "<b>"}|4|1|g'


def test_loop_variables_and_filters_still_work():
    source = (
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{% for x in [1, 2] %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}"
        "{{ ['a', 'b'] | join('-') }}{{ '%03d' | format(7) }}{{ 'aXb' | replace('X', '-') }}{{ 'a' ~ 1 ~ 2 }}{{ '%s!' % 'x' }}{{ 'abc'[::-1] }}"
        "{{ 'a\\nb' | indent(2) }}{{ '-'.join(['x', 'y']) }}{{ '{}:{:>3}'.format('k', 1) }}{{ [1, 2] | map('string') | join }}{{ {'a': [1]} | tojson(indent=1) }}"
        "{% set ns = namespace(n=0) %}{% for x in range(3) %}{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n }}"
    )
    text = 'a11/2,2/2a-b007a-ba12x!cbaa\n  bx-yk:  112{\n "a": [\n  1\n ]\n}3'
    assert ChatTemplate(source).render(USER) == text


def test_a_model_without_a_template_says_so():
    with pytest.raises(RequestError, match="no chat template"):
        ChatTemplate(None).render(USER)


def test_the_templates_own_refusal_reaches_the_caller():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        template.render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[9].content }}",
        "{{ 1 + 'a' }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
        "{% include 'x' %}",
    ],
)
def test_a_template_that_fails_is_the_requests_fault(source):
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% for a in range(90000) %}{% for b in range(90000) %}{{ b }}{% endfor %}{% endfor %}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% for a in [[]] recursive %}{{ loop([a, a]) }}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for a in range(100) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for a in range(100) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for a in range(100) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for a in range(100) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 9 ** 99999 }}",
        "{{ 'a' | center(10 ** 9) }}",
        "{{ 'a'.center(10 ** 9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=10 ** 9) }}",
        "{% set x = 'a' * 10000000 %}{{ x.replace('a', x) }}",
        "{% set x = 'a' * 10000000 %}{{ x | replace('a', x) }}",
        "{% set x = 'a' * 10000000 %}{{ x }}{{ x }}",
        "{% set x = 'a' * 10000000 %}{{ x.join(x) }}",
        "{% set x = 'a' * 10000000 %}{{ [1] * 1000000 | join(x) }}",
        "{% set x = [1] * 1000000 %}{{ x | join('a' * 10000) }}",
        "{% set x = '\\n' * 100000 %}{{ x | indent(1000) }}",
        "{% set x = '\\t' * 100000 %}{{ x.expandtabs(1000) }}",
        "{% set x = 'a' * 10000000 %}{{ x.translate({97: x}) }}",
        "{{ [[1]] | tojson(indent=1000000000) }}",
    ],
)
def test_a_template_can_neither_hang_nor_fill_the_memory(source, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_TURNS", 5000)  # with every call type-checked the real budget takes seconds
    start = time.monotonic()
    with pytest.raises(RequestError):
        ChatTemplate(source).render(USER)
    assert time.monotonic() - start < 20


def test_a_long_conversation_stays_within_the_budget():
    messages = [{"role": "user", "content": "x" * 100}] * 5000
    assert len(ChatTemplate(LINES).render(messages)) > 5000 * 100


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"content": "x"}], "messages[0]"),
        ([*USER, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "\ud800"}], "messages"),
    ],
)
def test_malformed_messages_are_refused_by_place(messages, param):
    with pytest.raises(RequestError) as caught:
        ChatTemplate(LINES).render(messages)
    assert caught.value.param == param


def test_a_template_that_is_no_jinja_is_a_broken_checkpoint(hf_folder):
    (hf_folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja.*line 1") as caught:
        load_chat_template(hf_folder)
    assert "\n" not in str(caught.value)


def test_a_folder_gives_its_template_and_a_jinja_file_wins(hf_folder):
    assert load_chat_template(hf_folder).render(USER) == "<s>user: Hi\nassistant:"
    (hf_folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    assert load_chat_template(hf_folder).render(USER) == "<s>Hi"
