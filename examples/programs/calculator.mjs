// The calculator agent in JavaScript, on the npm package `openai`, for examples/program.py: a row on stdin, the answer on
// stdout. The client finds OPENAI_BASE_URL and OPENAI_API_KEY in the environment.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const client = new OpenAI({ maxRetries: 0 });
const tools = [{
  type: "function",
  function: {
    name: "calculator",
    description: "Evaluate an arithmetic expression.",
    parameters: {
      type: "object",
      properties: { expression: { type: "string", description: 'for example "37*48"' } },
      required: ["expression"],
    },
  },
}];

function calculator({ expression }) {
  const found = /^([0-9]{1,9})([-+*])([0-9]{1,9})$/.exec(expression);
  if (!found) return "Error: the expression must be like 37*48";
  const [a, b] = [BigInt(found[1]), BigInt(found[3])];
  return String({ "+": a + b, "-": a - b, "*": a * b }[found[2]]);
}

const messages = JSON.parse(readFileSync(0, "utf8")).prompt;
while (true) {
  const { choices } = await client.chat.completions.create({ model: "policy", messages, tools });
  const message = choices[0].message;
  messages.push(message);
  if (!message.tool_calls?.length) break;
  for (const call of message.tool_calls) {
    const content = calculator(JSON.parse(call.function.arguments));
    messages.push({ role: "tool", tool_call_id: call.id, content });
  }
}
console.log(JSON.stringify(messages.at(-1).content)); // on one line, whatever is in it
