// The agent of agent.py with the public npm package `openai`: it lets the model call a calculator until it answers.
//
//   node agent.mjs [--stream]               one task from standard input; the mesh starts it once per episode
//   node agent.mjs [--stream] --serve PORT  a service that gets tasks by POST /run, as for `rollout.agent: {name: url, ...}`
//
// `new OpenAI()` reads the address and the key of the model from the environment. It needs `npm install` in this folder.

import { createServer } from "node:http";
import { text } from "node:stream/consumers";
import OpenAI from "openai";

const stream = process.argv.includes("--stream");
const serve = process.argv.indexOf("--serve");

/** Return the result of a call as text for the model. It has one operation. */
function calculator(args) {
  try {
    const [expression] = Object.values(JSON.parse(args));
    const [, a, operator, b] = /^\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*$/.exec(expression);
    const [x, y] = [BigInt(a), BigInt(b)];
    return String(operator === "+" ? x + y : operator === "-" ? x - y : x * y);
  } catch (error) {
    return `error: ${error.message}`;
  }
}

/** Return the next message of the model. */
async function ask(client, messages, tools) {
  const request = { model: "policy", messages, tools };
  const reply = stream
    ? await client.chat.completions.stream(request).finalChatCompletion()
    : await client.chat.completions.create(request);
  return reply.choices[0].message;
}

/** Solve a task. */
async function work(client, { messages, tools }) {
  for (let turns = 0; turns < 8; turns++) {
    const turn = await ask(client, messages, tools);
    messages.push(turn);
    if (!turn.tool_calls?.length) return;
    for (const call of turn.tool_calls) {
      messages.push({ role: "tool", tool_call_id: call.id, content: calculator(call.function.arguments) });
    }
  }
}

if (serve === -1) {
  await work(new OpenAI(), JSON.parse(await text(process.stdin)));
} else {
  const server = createServer(async (request, response) => {
    try {
      const { task, base_url: baseURL, api_key: apiKey } = JSON.parse(await text(request));
      await work(new OpenAI({ baseURL, apiKey }), task);
      response.end();
    } catch (error) {
      response.writeHead(500).end(String(error));
    }
  });
  server.listen(Number(process.argv[serve + 1]), "127.0.0.1", () => console.log(server.address().port));
}
