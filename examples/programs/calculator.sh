#!/bin/sh
# The calculator agent as a program of curl calls (and jq), for examples/program.py: a row on stdin, the answer on stdout.
set -eu

tools='[{"type": "function", "function": {"name": "calculator", "description": "Evaluate an arithmetic expression.",
  "parameters": {"type": "object", "required": ["expression"],
    "properties": {"expression": {"type": "string", "description": "for example \"37*48\""}}}}}]'

calculate() { # N+N, N-N or N*N and nothing else: the policy wrote it
    if printf %s "$1" | tr '\n' ';' | grep -Eqx '[1-9][0-9]{0,8}[-+*][1-9][0-9]{0,8}'; then
        echo $(($1))
    else
        echo "Error: the expression must be like 37*48"
    fi
}

messages=$(jq -c .prompt)
while true; do
    message=$(jq -nc --argjson messages "$messages" --argjson tools "$tools" \
        '{model: "policy", messages: $messages, tools: $tools}' |
        curl -sS --fail -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \
            --data-binary @- "$OPENAI_BASE_URL/chat/completions" | jq -c '.choices[0].message')
    [ -n "$message" ] || exit 1 # curl has said why
    messages=$(jq -nc --argjson messages "$messages" --argjson message "$message" '$messages + [$message]')
    calls=$(printf %s "$message" | jq '.tool_calls | length')
    [ "$calls" -gt 0 ] || break
    i=0
    while [ $i -lt "$calls" ]; do
        expression=$(printf %s "$message" | jq -r ".tool_calls[$i].function.arguments | fromjson | .expression")
        messages=$(jq -nc --argjson messages "$messages" --argjson message "$message" \
            --arg content "$(calculate "$expression")" \
            "\$messages + [{role: \"tool\", tool_call_id: \$message.tool_calls[$i].id, content: \$content}]")
        i=$((i + 1))
    done
done
printf %s "$message" | jq .content # as a JSON string: on one line, whatever is in it
