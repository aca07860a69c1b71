"""Chat templates in the styles of the families in the wild, with what each of them makes use of."""

# A loop that looks at its place, strings that are added up.
SMOLLM2 = """{% for m in messages %}
{% if loop.first and m['role'] != 'system' %}
{{ '<|im_start|>system\\nSmall and kind.<|im_end|>\\n' }}
{% endif %}
{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}"""

# Variables that may not be there, `none` beside undefined, today's date, objections.
LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- set day = date_string if date_string is defined else strftime_now("%Y") %}
{%- set turns = messages %}
{%- set words = "" %}
{%- if messages[0].role == "system" %}
    {%- set words = messages[0]["content"] | trim %}
    {%- set turns = messages[1:] %}
{%- endif %}
{{- "<|head|>system<|end_head|>\\n\\n" }}
{%- if tools is not none %}
    {{- "You may call:\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) + "\\n" }}
    {%- endfor %}
{%- endif %}
{{- "It is " + day + ".\\n" + words + "<|eot_id|>" }}
{%- for turn in turns %}
    {%- if "tool_calls" in turn %}
        {%- if turn.tool_calls | length > 1 %}
            {{- raise_exception("one call a turn") }}
        {%- endif %}
        {%- set call = turn.tool_calls[0].function %}
        {{- '<|head|>assistant<|end_head|>\\n\\n{"call": "' + call.name + '", "with": ' }}
        {{- call.arguments | tojson + "}<|eot_id|>" }}
    {%- elif turn.role in ["tool", "ipython"] %}
        {{- "<|head|>ipython<|end_head|>\\n\\n" }}
        {%- if turn.content is mapping or turn.content is iterable %}
            {{- turn.content | tojson }}
        {%- else %}
            {{- turn.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- "<|head|>" + turn["role"] + "<|end_head|>\\n\\n" }}
        {{- turn["content"] | trim + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|head|>assistant<|end_head|>\\n\\n" }}
{%- endif %}
"""

# Tools that are true or not, a name set anew inside a loop, neighbours by their index.
QWEN25 = """{%- set first = messages[0] %}
{%- if tools or first.role == 'system' %}
    {{- '<|im_start|>system\\n' }}
    {{- first.content if first.role == 'system' else 'Helpful.' }}
    {%- if tools %}
        {{- "\\n\\nTools:" }}
        {%- for tool in tools %}
            {{- "\\n" }}
            {{- tool | tojson }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == "assistant" and m.tool_calls %}
        {{- '<|im_start|>' + m.role }}
        {%- if m.content %}
            {{- '\\n' + m.content }}
        {%- endif %}
        {%- for call in m.tool_calls %}
            {%- if call.function is defined %}
                {%- set call = call.function %}
            {%- endif %}
            {{- '\\n<call>{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<found>' + m.content + '</found>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif not (m.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# A namespace, a list read backwards, methods of strings, a switch that may not be there.
QWEN3 = """{%- set seen = namespace(looking=true, query=messages | length - 1) %}
{%- for m in messages[::-1] %}
    {%- set at = (messages | length - 1) - loop.index0 %}
    {%- if seen.looking and m.role == "user" and m.content is string %}
        {%- if not m.content.startswith('<found>') and not m.content.endswith('</found>') %}
            {%- set seen.looking = false %}
            {%- set seen.query = at %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set text = m.content if m.content is string else '' %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == "assistant" %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in text %}
            {%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > seen.query and (loop.last or thought) %}
            {{- '<think>\\n' + thought.rstrip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
    {%- endif %}
    {{- text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

# Filters on lists of messages, messages that are compared, a loop over the items of an object.
MISTRAL = """{%- set turns = messages %}
{%- if messages[0]["role"] == "system" %}
    {%- set words = messages[0]["content"] %}
    {%- set turns = messages[1:] %}
{%- endif %}
{%- set asked = turns | selectattr("role", "equalto", "user") | list %}
{%- set count = namespace() %}
{%- set count.turn = 0 %}
{%- for turn in turns if turn.role != "tool" and turn.tool_calls is not defined %}
    {%- if (turn["role"] == "user") != (count.turn % 2 == 0) %}
        {{- raise_exception("turns must take turns") }}
    {%- endif %}
    {%- set count.turn = count.turn + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for turn in turns %}
    {%- if turn["role"] == "user" %}
        {%- if tools is not none and turn == asked[-1] %}
            {{- "[TOOLS] [" }}
            {%- for tool in tools %}
                {{- "{" }}
                {%- for key, value in tool.function.items() if key != "return" %}
                    {%- if value is string %}
                        {{- '"' + key + '": "' + value + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + value | tojson }}
                    {%- endif %}
                    {{- ", " if not loop.last }}
                {%- endfor %}
                {{- "}" }}
            {%- endfor %}
            {{- "][/TOOLS]" }}
        {%- endif %}
        {%- if loop.last and words is defined %}
            {{- "[INST] " + words + "\\n\\n" + turn["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + turn["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif turn.tool_calls is defined and turn.tool_calls is not none %}
        {{- "[CALLS] " + turn.tool_calls | tojson }}
    {%- elif turn["role"] == "assistant" %}
        {{- " " + turn["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# Blocks without a line break between them, text that is gathered first.
DEEPSEEK = ("{% if not add_generation_prompt is defined %}"
            "{% set add_generation_prompt = false %}{% endif %}"
            "{% set state = namespace(words='', tool=false) %}"
            "{%- for m in messages %}{%- if m['role'] == 'system' %}"
            "{% set state.words = state.words + m['content'] %}{%- endif %}{%- endfor %}"
            "{{ bos_token }}{{ state.words }}"
            "{%- for m in messages %}{%- if m['role'] == 'user' %}{%- set state.tool = false -%}"
            "{{ '<｜User｜>' + m['content'] }}{%- endif %}"
            "{%- if m['role'] == 'assistant' and m['content'] is not none %}"
            "{% set said = m['content'].split('</think>') | last %}"
            "{{ '<｜Assistant｜>' + said + eos_token }}{%- endif %}{%- endfor -%}"
            "{% if add_generation_prompt and not state.tool %}"
            "{{ '<｜Assistant｜><think>\\n' }}{% endif %}")

# Contents in parts, line breaks inside strings, other names of roles.
GEMMA = """{{ bos_token }}{%- set before = "" -%}
{%- set turns = messages -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set before = messages[0]['content'] if messages[0]['content'] is string
                     else messages[0]['content'][0]['text'] -%}
    {%- set before = before + '

' -%}
    {%- set turns = messages[1:] -%}
{%- endif -%}
{%- for turn in turns -%}
    {%- if (loop.index0 % 2 == 0) != (turn['role'] == 'user') -%}
        {{ raise_exception("whose turn is it?") }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if turn['role'] == 'assistant' else turn['role']) + '
' + (before if loop.first else '') }}
    {%- if turn['content'] is string -%}
        {{ turn['content'] | trim }}
    {%- elif turn['content'] is iterable -%}
        {%- for part in turn['content'] -%}
            {%- if part['type'] == 'text' -%}
                {{ part['text'] | trim }}
            {%- else -%}
                {{ '<picture>' }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("what is this?") }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
"""

# Block tags, macros, loop controls, whitespace and every helper that a template may call.
TOOLBOX = """{# a comment #}
{% macro line(role, text='-') %}
    <|im_start|>{{ role }}
  {{ text }}<|im_end|>
{% endmacro %}
  {% if documents %}
  {% for document in documents %}
{{ document['title'] | upper }}: {{ document.text }}
  {% endfor %}
  {% elif documents is none and tools is none %}
nothing given
  {% endif %}
{% set mark = 'outside' %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% if message.content == 'stop' %}
        {% break %}
    {% endif %}
    {% if message.role == 'assistant' %}
        {% generation %}
            {% set mark = 'inside' %}
{{ line(message.role, message.content | default('none', true)) }}
        {% endgeneration %}
    {% else %}
{{ line(message.role, message.content | default('none', true)) }}
    {% endif %}
    {{ message | tojson }} {{ message.content | length }} {{ mark }}
{% endfor %}
{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true) }} {{ [1, 2] | tojson(separators=(',', ':')) }}
{{ 'é' | tojson(true) }} {{ {'a': [1]} | tojson(indent=2) }}
{{ undefined_thing }}{{ pad_token }} {{ messages | map(attribute='role') | join(', ') }}
{{ flavour | default('plain') }} {{ strftime_now('%Y') }}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

TEMPLATES = {
    "smollm2": SMOLLM2, "llama3": LLAMA3, "qwen2.5": QWEN25, "qwen3": QWEN3, "mistral": MISTRAL,
    "deepseek": DEEPSEEK, "gemma": GEMMA, "toolbox": TOOLBOX
}
