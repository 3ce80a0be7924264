"""Chat templates of six models, rebuilt in small, with their special tokens and stop ids.

They raise, trim, drop and rewrite like the originals, take no system prompt, and have shorter
instructions about tools. KINDS has templates of one unusual habit each."""

# ruff: noqa: E501  a line of a template is a line

import copy
from dataclasses import dataclass

from tokenizers import AddedToken

# Drops reasoning before the user's last question. The last message always has a think block. If it
# is empty, it disappears when other messages follow. The tools' answers share one user turn. The
# text about tools has tags.
QWEN3 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\n</tools>\n\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, seen=false) %}
{%- for m in messages[::-1] %}
    {%- if not ns.seen and m.role == 'user' and m.content is string and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
        {%- set ns.last = loop.revindex0 %}{%- set ns.seen = true %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'user' %}
        {{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '\n' if content or not loop.first }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' + ('<think>\n\n</think>\n\n' if enable_thinking is defined and enable_thinking is false else '') }}
{%- endif %}
"""

# Raises for more than one call in a message, and drops the text beside a call. Trims contents,
# writes tool answers as JSON, and puts the tools into the first user message. The date is constant.
LLAMA31 = r"""
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\n\n' + ('Environment: ipython\n' if tools is not none else '') }}
{{- 'Today Date: 26 Jul 2024\n\n<|eot_id|>' }}
{%- if tools is not none %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nRespond in the format {"name": function name, "parameters": dictionary}.\n\n' }}
    {%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\n\n' }}{%- endfor %}
    {{- messages[0].content | trim + '<|eot_id|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
    {%- if 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- elif m.role in ('tool', 'ipython') %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""

# Tools stand before the LAST question. Raises unless ids of calls, which are shown, have nine
# characters. Drops the text beside a call. There is no generation prompt.
MISTRAL03 = r"""
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages if m.role != 'tool' and not (m.tool_calls is defined and m.tool_calls is not none) %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and m == users[-1] %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' + eos_token if loop.last else ', ') }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content | trim + eos_token }}
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content | string + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

# No token ends a turn: the marker of the next message does. Every turn has a think block, which is
# empty before the user's last question. Trims contents. The newline after the assistant's marker is
# not part of the generation prompt.
GLM4 = r"""
{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|>\n# Tools\n\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson(ensure_ascii=False)) }}{%- endfor %}
    {{- '\n</tools>\n\n<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n</tool_call>' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content | string %}
    {%- if m.role == 'user' %}
        {{- '<|user|>\n' + content }}
    {%- elif m.role == 'assistant' %}
        {%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' %}
        {{- '<|assistant|>\n<think>' + (reasoning.strip() if loop.index0 > ns.last else '') + '</think>' + ('\n' + content.strip() if content.strip() else '') }}
        {%- for call in m.tool_calls or [] %}
            {{- '\n<tool_call>' + call.function.name + '\n' }}
            {%- for key, value in call.function.arguments.items() %}{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' + (value if value is string else value | tojson(ensure_ascii=False)) + '</arg_value>\n' }}{%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {{- '<|observation|>' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""

# Silently drops tools and calls, and accepts any role.
CHATML = r"""
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

# A call ends with <|call|>, the last answer with <|return|>, an earlier one with <|end|>. Silently
# drops all calls of a message but the first. Reads reasoning from `thinking`, and drops it except
# beside a call that no answer follows. A tool's answer gets the name of the last call: raises if
# there is none. Raises for channel tokens in texts. Tool answers are JSON. The date is today's.
GPT_OSS = r"""
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '\n\n# Valid channels: analysis, commentary, final.' }}
{{- ('\nCalls to these tools must go to the commentary channel: \'functions\'.' if tools else '') + '<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\n\n' }}
    {%- for tool in tools %}{{- (tool.function | tojson) + '\n\n' }}{%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- set ns = namespace(name=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- for key in ('content', 'thinking') if key in m and ('<|channel|>analysis<|message|>' in m[key] or '<|channel|>final<|message|>' in m[key]) %}
            {{- raise_exception('You have passed a message containing <|channel|> tags in the ' + key + ' field.') }}
        {%- endfor %}
        {%- if 'tool_calls' in m %}
            {%- set ns.answers = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') | selectattr('tool_calls', 'undefined') | list %}
            {%- if m.content and m.thinking %}{{- raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}{%- endif %}
            {%- if (m.content or m.thinking) and not ns.answers %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}{%- endif %}
            {%- set ns.name = m.tool_calls[0].function.name %}
            {{- '<|start|>assistant to=functions.' + ns.name + '<|channel|>commentary json<|message|>' + (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
        {%- elif loop.last and not add_generation_prompt %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' if 'thinking' in m }}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
            {%- set ns.name = none %}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {%- if ns.name is none %}{{- raise_exception('Message has tool role, but there was no previous assistant message with a tool call!') }}{%- endif %}
        {{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' + (m.content | tojson) + '<|end|>' }}
    {%- elif m.role == 'user' %}
        {{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""


@dataclass
class Family:
    """A model's template and tokens. Fields with several tokens separate them by blanks.

    special: special tokens. stops: what generation_config.json lists as eos_token_id; the first is
    the EOS token. answer_end, call_end: the token that the policy samples at the end of a turn
    without calls and of one with calls; by default EOS. markup: added tokens that are not
    special, so that decoding keeps them."""

    template: str
    special: str
    stops: str
    answer_end: str = ""
    call_end: str = ""
    bos: str = ""
    markup: str = ""

    def __post_init__(self):
        self.template = self.template.strip()
        self.eos = self.stops.split()[0]
        self.answer_end = self.answer_end or self.eos
        self.call_end = self.call_end or self.answer_end


IM = "<|endoftext|> <|im_start|> <|im_end|>"
IM_STOPS = "<|im_end|> <|endoftext|>"
CALL = "<tool_call> </tool_call>"
THINK = CALL + " <tool_response> </tool_response> <think> </think>"
LLAMA3_STOPS = "<|eot_id|> <|eom_id|> <|end_of_text|>"
LLAMA3 = f"<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|python_tag|> {LLAMA3_STOPS}"
TOOLS = "[AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]"
MISTRAL3 = f"<s> </s> [INST] [/INST] {TOOLS}"
GLM = "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>"
GLM_STOPS = "<|endoftext|> <|user|> <|observation|>"
GLM_MARKUP = THINK + " <arg_key> </arg_key> <arg_value> </arg_value>"
OSS_STOPS = "<|return|> <|endoftext|> <|call|>"
OSS = f"<|startoftext|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> {OSS_STOPS}"

FAMILIES = {
    "qwen3": Family(QWEN3, IM, IM_STOPS, markup=THINK),
    "llama3.1": Family(LLAMA31, LLAMA3, LLAMA3_STOPS, bos="<|begin_of_text|>"),
    "mistral0.3": Family(MISTRAL03, MISTRAL3, "</s>", bos="<s>"),
    "glm4": Family(GLM4, GLM, GLM_STOPS, "<|user|>", "<|observation|>", markup=GLM_MARKUP),
    # A base model, whose EOS token is not the token that ends a turn in the template.
    "chatml-base": Family(CHATML, IM, "<|endoftext|>", "<|im_end|>"),
    "gpt-oss": Family(GPT_OSS, OSS, OSS_STOPS, call_end="<|call|>"),
}


# What each template says of a message m; BODY has the rest. The policy's turns end with <|im_end|>.
BODY = "{{- '<|im_start|>' + m.role + '\n' + SAID + '<|im_end|>\n' }}"
CHAT = "{%- for m in messages %}" + BODY + "{%- endfor %}"
PROMPTS = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
CALLS = "(m.tool_calls | default([], true) | tojson if m.tool_calls else '')"
KINDS = {
    # Cohere numbers all calls and their results.
    "numbers messages": "loop.index | string + m.content + " + CALLS,
    # Gemma 4 shows reasoning beside calls alone.
    "a thought beside calls": "(m.reasoning_content | default('', true) if m.tool_calls else '')"
                              " + m.content + " + CALLS,
    # Mistral Small 3.2, Nemo and Solar hide a text beside a call.
    "hides text": f"({CALLS} or m.content)",
    # functionary writes arguments as Python does.
    "arguments by repr": "m.content + (m.tool_calls | string if m.tool_calls else '')",
    # Nemotron Nano v2 writes a newline after an earlier call.
    "newline after calls": "m.content + " + CALLS + " + ('\n' if m.tool_calls and not loop.last else '')",
    # Apriel 1.5 writes the ids of earlier calls alone.
    "ids of earlier calls": "m.content + "
                            f"(m.tool_calls[0].function | tojson if m.tool_calls and loop.last else {CALLS})",
}


def tokenizer_for(name: str, base_tokenizer):
    """Returns a copy of a byte-level tokenizer with a kind's or a family's template and tokens."""
    tokenizer = copy.deepcopy(base_tokenizer)
    if name in KINDS:
        tokenizer.chat_template = CHAT.replace("SAID", f"({KINDS[name]})") + PROMPTS
        return tokenizer
    of = FAMILIES[name]
    for tokens, special in ((of.special, True), (of.markup, False)):
        added = [AddedToken(token, special=special, normalized=False) for token in tokens.split()]
        tokenizer.add_tokens(added)
    tokenizer.eos_token = of.eos
    if of.bos:
        tokenizer.bos_token = of.bos
    tokenizer.chat_template = of.template
    return tokenizer


def stop_ids(name: str, tokenizer) -> list[int]:
    """Returns the ids that the family's generation_config.json lists as eos_token_id."""
    return tokenizer.convert_tokens_to_ids(FAMILIES[name].stops.split())
