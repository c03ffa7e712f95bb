// The playground: what the form asks for, both ways of answering it, and what comes of them.

import { Refused, ask } from "/page/ask.js";
import { EXAMPLES } from "/page/examples.js";
import { watch } from "/page/live.js";
import { Pane, SOURCES, span } from "/page/pane.js";
import { facts, seconds, typical, verdict } from "/page/verdict.js";

const at = (id) => document.getElementById(id);
// Drafters that fill in whole blocks, as the server names them.
const BLOCKS = new Set();
const PANES = {
  speculating: new Pane(at("output"), () => count("speculating"), BLOCKS),
  plain: new Pane(at("plain"), () => count("plain"), BLOCKS),
};
const FACTS = { speculating: at("speculating_facts"), plain: at("plain_facts") };
const conversation = [];
// Short answers are timed again, out of sight, since one run of a tenth of a second says little.
const PAIRS = 3, ENOUGH_S = 1.5;

let running = null;

function count(way) {
  if (running?.way === way) FACTS[way].textContent = `${running.count} tokens so far`;
}

function structure(text) {
  try {
    const schema = JSON.parse(text);
    if (schema !== null && typeof schema === "object") return { json: schema };
  } catch { /* not JSON: an expression */ }
  return { regex: text };
}

// The body of the request without what the two ways differ in.
function wanted() {
  const chat = at("endpoint").value === "chat";
  const body = {
    max_tokens: Number(at("max_tokens").value),
    temperature: Number(at("temperature").value),
    stream: true,
    token_sources: true,
  };
  const text = at("prompt").value;
  if (chat) body.messages = [...conversation, { role: "user", content: text }];
  else body.prompt = text;
  if (at("seed").value !== "") body.seed = Number(at("seed").value);
  // Both ways draw with one seed, or their tokens could not be compared.
  else if (body.temperature > 0) body.seed = Math.floor(Math.random() * 2 ** 31);
  if (at("structure").value.trim()) body.structured_outputs = structure(at("structure").value.trim());
  if (at("prediction").value) body.prediction = { type: "content", content: at("prediction").value };
  return body;
}

function bodyFor(way, body) {
  const speculation = { enabled: way === "speculating" };
  if (speculation.enabled && at("drafts").value !== "") {
    speculation.num_speculative_tokens = Number(at("drafts").value);
  }
  // A salt of its own: neither way finds the other's prompt in the cache, nor its answer.
  return { ...body, speculation, cache_salt: `${way}-${Date.now()}-${Math.random()}` };
}

function before(body) {
  if (!body.messages) return [span("prompt", body.prompt)];
  return body.messages.map(({ role, content }) => span(`said ${role}`, content));
}

function say(text, isError = false) {
  at("summary").textContent = text;
  at("summary").classList.toggle("error", isError);
}

function tell(text, good) {
  at("verdict").textContent = text;
  at("verdict").classList.toggle("good", good);
}

function request(way, body, onToken) {
  return ask({
    path: body.messages ? "/v1/chat/completions" : "/v1/completions",
    body: bodyFor(way, body),
    key: at("key").value,
    signal: running.control.signal,
    onToken,
  });
}

async function answer(way, body) {
  const pane = PANES[way];
  pane.start(before(body));
  FACTS[way].textContent = "waiting for the first token";
  running.way = way;
  running.count = 0;
  try {
    return await request(way, body, (token) => { running.count += 1; pane.add(token); });
  } finally {
    running.way = null;
    pane.finish();
    FACTS[way].textContent = "";
  }
}

// Both ways in turns, who goes first changing, until they were timed long enough.
async function again(body, runs) {
  const spent = () => Object.values(runs).flat().reduce((sum, one) => sum + seconds(one), 0);
  while (runs.plain.length < PAIRS && spent() < ENOUGH_S) {
    say("timing both again");
    const first = runs.plain.length % 2 ? ["plain", "speculating"] : ["speculating", "plain"];
    for (const way of first) runs[way].push(await request(way, body, () => {}));
  }
}

function explain(error) {
  if (error.name === "AbortError") return say("stopped");
  if (error instanceof Refused && error.status === 401) {
    at("key_row").hidden = false;
    at("key").focus();
    return say("Enter the API key, then continue.", true);
  }
  return say(error.message, true);
}

function ways() {
  const mode = at("mode").value;
  return mode === "both" ? ["speculating", "plain"] : [mode];
}

function arrange() {
  for (const way of Object.keys(PANES)) at(`${way}_pane`).hidden = !ways().includes(way);
  const chat = at("endpoint").value === "chat";
  at("prompt_label").textContent = chat ? "Your message" : "Text to continue";
  at("run").textContent = chat ? "Send" : "Continue";
  at("forget").hidden = !(chat && conversation.length);
}

function busy(is) {
  at("run").disabled = is;
  at("stop").disabled = !is;
}

function remember(body, found) {
  if (!body.messages) return;
  conversation.push(body.messages.at(-1), { role: "assistant", content: found.text });
  at("prompt").value = "";
}

function conditions(body, runs) {
  const times = runs.plain?.length ?? 1;
  const each = times > 1 ? `Of ${times} runs each, in turns, the middle one of either way is shown. ` : "One run each, one after the other. ";
  const seed = body.seed === undefined ? "" : `Seed ${body.seed}. `;
  const shown = runs.speculating && runs.plain ? each : "";
  return `${shown}${seed}Times are the server's, from the start of the work to the last token.`;
}

async function run() {
  arrange();
  running = { control: new AbortController(), way: null, count: 0 };
  busy(true);
  tell("", false);
  say("");
  for (const way of Object.keys(PANES)) PANES[way].start([]), FACTS[way].textContent = "";
  at("answers").classList.remove("fresh");
  if (at("answers").getBoundingClientRect().top < 0) at("answers").scrollIntoView();
  const body = wanted(), runs = {};
  try {
    for (const way of ways()) {
      runs[way] = [await answer(way, body)];
      FACTS[way].textContent = facts(runs[way][0]);
    }
    if (ways().length > 1) {
      await again(body, runs);
      for (const way of ways()) FACTS[way].textContent = facts(typical(runs[way]));
      const { text, good } = verdict(runs);
      tell(text, good);
    }
    say(conditions(body, runs));
    remember(body, (runs.speculating ?? runs.plain)[0]);
  } catch (error) {
    explain(error);
  } finally {
    running = null;
    busy(false);
    arrange();
  }
}

function fill(name) {
  const example = EXAMPLES[name];
  const empty = { endpoint: "completions", temperature: 0, seed: "", structure: "", prediction: "" };
  for (const [id, value] of Object.entries({ ...empty, ...example })) at(id).value = value;
  at("more").open = Boolean(example.structure || example.prediction);
  arrange();
}

async function introduce() {
  const version = await (await fetch("/version")).json();
  for (const name of version.block_drafters) BLOCKS.add(name);
  at("model").textContent = `${version.model}, speculation: ${version.speculation}`;
}

for (const [name, text] of Object.entries(SOURCES)) {
  const item = document.createElement("li");
  item.className = name;
  item.textContent = text;
  at("legend").append(item);
}
at("form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
at("stop").addEventListener("click", () => running?.control.abort());
at("forget").addEventListener("click", () => {
  conversation.length = 0;
  PANES.speculating.start([]);
  PANES.plain.start([]);
  arrange();
});
for (const id of ["mode", "endpoint"]) at(id).addEventListener("change", arrange);
for (const button of document.querySelectorAll("[data-example]")) {
  button.addEventListener("click", () => fill(button.dataset.example));
}
fill("code");
introduce();
watch();
