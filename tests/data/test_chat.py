"""Chat templates: the same prompts as transformers, a sandbox, and helpful errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from clearhead.data import chat as chat_module
from clearhead.data import load_tokenizer, train_tokenizer
from clearhead.data.isolated_process import IsolatedProcesses
from clearhead.errors import InputError

TEMPLATE_HANDLER = Path(chat_module.__file__).with_name("chat_template.py")
TOKENIZER = train_tokenizer(kind="bytes")
MESSAGES = [
    {"role": "system", "content": "Be <b>brief</b> & kind."},
    {"role": "user", "content": "Grüße, {{ 7 * 7 }}"},
]
CHATML = """{{ bos_token }}{% for message in messages %}
    {% if loop.first and message['role'] == 'tool' %}{{ raise_exception('a tool cannot start') }}{% endif %}
    {% if message['content'] == 'skip' %}{% continue %}{% endif %}
{{ '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}
{% endfor %}
{{ messages[0] | tojson }}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def chat(template: str | None, messages: object = MESSAGES, **options: object) -> str:
    TOKENIZER.chat_template = template
    return TOKENIZER.chat(messages, **options)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_same_prompt_as_transformers(add_generation_prompt: bool, tmp_path: Path, transformers) -> None:
    ours = chat(CHATML, add_generation_prompt=add_generation_prompt)
    TOKENIZER.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert ours.startswith("<s>")
    assert "<b>" in ours
    assert "{{ 7 * 7 }}" in ours


def test_a_template_file_takes_precedence_and_named_templates_are_found(tmp_path: Path) -> None:
    TOKENIZER.chat_template = None
    TOKENIZER.save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]}')
    assert load_tokenizer(tmp_path).chat_template == "d"
    (tmp_path / "chat_template.jinja").write_text("beside")
    assert load_tokenizer(tmp_path).chat_template == "beside"


@pytest.mark.parametrize(
    "hostile",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{% set x = messages.append(1) %}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_hostile_template_is_harmless(hostile: str) -> None:
    before = [dict(message) for message in MESSAGES]
    try:
        shown = chat(hostile)
    except InputError:
        shown = ""
    # Some are refused; others get an undefined value, which prints as an empty text.
    assert shown == ""
    assert before == MESSAGES


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (None, MESSAGES, r"no chat template.*2 messages.*chat_template\.jinja"),
        ("{% if %}", MESSAGES, r"template failed on these 2 messages: TemplateSyntaxError"),
        ("{{ 1 / 0 }}", MESSAGES, r"ZeroDivisionError"),
        ("{{ messages[0].nothing.more }}", MESSAGES, r"UndefinedError"),
        (CHATML, [{"role": "tool", "content": ""}], r"refuses these messages: a tool cannot start; change"),
        (CHATML, [{"content": "no role"}], r"message 0 is .*without a role"),
        (CHATML, ["plain text"], r"message 0 is 'plain text'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_refusals(template: str | None, messages: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        chat(template, messages)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
            "it took more than 1 seconds",
        ),
        (
            "{% macro f(n) %}{{ f(n - 1) if n else '' }}{{ f(n - 1) if n else '' }}{% endmacro %}{{ f(90) }}",
            "1 seconds",
        ),
        (
            "{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
            "it took more than 64 MB of memory",
        ),
        ("{{ 'a' * 10 ** 12 }}", "64 MB of memory"),
    ],
)
def test_a_template_that_spins_or_swells_is_stopped(template: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = IsolatedProcesses(TEMPLATE_HANDLER, seconds=1.0, megabytes=64)
    monkeypatch.setattr(chat_module, "_processes", lambda: processes)
    before = chat(CHATML)
    with pytest.raises(InputError, match=f"template failed on these 2 messages: .*{words}"):
        chat(template)
    assert chat(CHATML) == before


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(InputError, match=r"plain texts, numbers, lists and dicts; got others .*set.*; convert"):
        chat(CHATML, [{"role": "user", "content": {1, 2}}])


def test_the_handlers_process_finds_no_module_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jinja2.py").write_text("raise SystemExit('planted')")
    monkeypatch.chdir(tmp_path)
    processes = IsolatedProcesses(TEMPLATE_HANDLER, seconds=5.0, megabytes=64)
    assert processes.call({"template": "{{ messages }}", "messages": 7, "variables": {}}) == "7"
