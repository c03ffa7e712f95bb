// One request to the server, token by token. Knows the API, nothing of the page.

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

// Resolves to { ids, drafted, times }; `times` are the server's own, in seconds since the request
// came. onToken is called with each token as it comes.
export async function ask({ path, body, key, signal, onToken }) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) throw new Refused(response.status, await reason(response));
  const answer = { ids: [], drafted: 0, text: "", times: null };
  for await (const event of events(response)) {
    if (event.error) throw new Refused(500, event.error.message);
    for (const choice of event.choices) {
      for (const token of choice.tokens ?? []) {
        if (token.id !== null) answer.ids.push(token.id);
        if (token.source === "accepted") answer.drafted += 1;
        answer.text += token.text;
        onToken(token);
      }
      answer.times = choice.times ?? answer.times;
    }
  }
  return answer;
}
