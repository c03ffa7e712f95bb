// The playground and its live charts.

import { bars, lines, shown } from "/page/charts.js";
import { Rates, parse } from "/page/metrics.js";

const SOURCES = {
  target: "plain: no draft was checked",
  accepted: "draft accepted",
  recovered: "recovered: the target's token where a draft was rejected",
  bonus: "bonus: the target's token after a whole draft",
  grammar: "grammar: forced, drafted for free",
  prediction: "prediction accepted",
};
const KEPT = 120;
const at = (id) => document.getElementById(id);

let running = null;

function headers() {
  const key = at("key").value;
  return {
    "content-type": "application/json",
    ...(key ? { authorization: `Bearer ${key}` } : {}),
  };
}

function body() {
  const wanted = {
    prompt: at("prompt").value,
    max_tokens: Number(at("max_tokens").value),
    temperature: Number(at("temperature").value),
    stream: true,
    stream_options: { include_usage: true },
    token_sources: true,
    speculation: { enabled: at("speculate").checked },
  };
  if (at("seed").value !== "") wanted.seed = Number(at("seed").value);
  if (at("drafts").value !== "") wanted.speculation.num_speculative_tokens = Number(at("drafts").value);
  if (at("regex").value) wanted.structured_outputs = { regex: at("regex").value };
  if (at("prediction").value) wanted.prediction = { type: "content", content: at("prediction").value };
  return wanted;
}

function sourceOf(token) {
  const own = token.source === "accepted" && token.drafter in SOURCES;
  return own ? token.drafter : token.source;
}

function show(token) {
  const span = document.createElement("span");
  const source = sourceOf(token);
  span.className = source ?? "target";
  span.textContent = token.text;
  const facts = [SOURCES[source] ?? source];
  if (token.drafter) facts.push(`drafter: ${token.drafter}`);
  facts.push(`position in its step: ${token.position + 1}`);
  if (token.probability !== null) facts.push(`probability: ${(100 * token.probability).toFixed(1)} %`);
  span.title = facts.join("\n");
  const output = at("output");
  const atEnd = output.scrollTop + output.clientHeight >= output.scrollHeight - 4;
  output.append(span);
  if (atEnd) output.scrollTop = output.scrollHeight;
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

function say(text, isError = false) {
  at("summary").textContent = text;
  at("summary").classList.toggle("error", isError);
}

async function run() {
  running = new AbortController();
  at("run").disabled = true;
  at("stop").disabled = false;
  const prompt = document.createElement("span");
  prompt.className = "prompt";
  prompt.textContent = at("prompt").value;
  at("output").replaceChildren(prompt);
  say("waiting for the first token");
  const began = performance.now();
  let first = null, count = 0, drafted = 0;
  const tell = () => {
    const seconds = (performance.now() - first) / 1000;
    const speed = count > 1 ? `, ${shown((count - 1) / seconds)} tokens/s` : "";
    say(`${count} tokens${speed}, ${drafted} of them drafted, first after ${shown(first - began)} ms`);
  };
  try {
    const response = await fetch("/v1/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(body()), signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) {
        for (const token of choice.tokens) {
          first ??= performance.now();
          if (token.id !== null) count += 1;
          if (token.source === "accepted") drafted += 1;
          show(token);
        }
      }
      if (first !== null && event.choices.length) tell();
    }
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, true);
  } finally {
    at("run").disabled = false;
    at("stop").disabled = true;
  }
}

const rates = new Rates();
const history = {};

function remember(name, value) {
  const values = (history[name] ??= []);
  values.push(value);
  if (values.length > KEPT) values.shift();
  return { name, values };
}

function draw() {
  const speed = rates.rate("vllm:generation_tokens_total");
  const real = rates.growth("foretoken:decoding_seconds_total");
  const plain = rates.growth("foretoken:plain_decoding_seconds_estimate_total");
  const gain = real > 0 && plain > 0 ? plain / real : null;
  at("speedup").textContent = gain === null ? "" : `(about ${shown(gain)} times plain decoding)`;
  const slower = speed === null || (speed > 0 && gain === null) ? null : speed / (gain ?? 1);
  lines(at("speed"), [
    remember("measured", speed),
    remember("without speculation, estimated", slower),
  ], KEPT);
  const drafts = rates.value("vllm:spec_decode_num_drafts_total");
  const shares = [];
  for (let position = 0; position < 16; position += 1) {
    const accepted = rates.now.get(`vllm:spec_decode_num_accepted_tokens_per_pos_total#${position}`);
    if (accepted === undefined) break;
    shares.push(drafts ? accepted / drafts : 0);
  }
  bars(at("positions"), shares);
  const milliseconds = (value) => (value === null ? null : 1000 * value);
  lines(at("latency"), [
    remember("first token", milliseconds(rates.mean("vllm:time_to_first_token_seconds"))),
    remember("per token", milliseconds(rates.mean("vllm:request_time_per_output_token_seconds"))),
  ], KEPT);
  const checks = rates.growth("vllm:spec_decode_num_drafts_total");
  const per = (name) => (checks ? rates.growth(name) / checks : null);
  const accepted = per("vllm:spec_decode_num_accepted_tokens_total");
  lines(at("lengths"), [
    remember("drafted", per("vllm:spec_decode_num_draft_tokens_total")),
    remember("acceptance length", accepted === null ? null : 1 + accepted),
  ], KEPT);
  lines(at("kv"), [
    remember("KV %", 100 * rates.value("vllm:kv_cache_usage_perc")),
    remember("running", rates.value("vllm:num_requests_running")),
    remember("waiting", rates.value("vllm:num_requests_waiting")),
  ], KEPT);
}

async function watch() {
  try {
    const response = await fetch("/metrics");
    rates.take(parse(await response.text()), performance.now());
    draw();
  } catch {
    at("model").textContent = "the server does not answer";
  }
  setTimeout(watch, 1000);
}

async function introduce() {
  const version = await (await fetch("/version")).json();
  at("model").textContent = `${version.model}, speculation: ${version.speculation}`;
}

for (const [name, text] of Object.entries(SOURCES)) {
  const item = document.createElement("li");
  item.className = name;
  item.textContent = text;
  at("legend").append(item);
}
at("form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
at("stop").addEventListener("click", () => running?.abort());
introduce();
watch();
