// The charts of what the whole server does: reads /metrics every second and draws.

import { bars, lines, shown } from "/page/charts.js";
import { watchControl } from "/page/control.js";
import { Rates, parse } from "/page/metrics.js";

const KEPT = 120;
const at = (id) => document.getElementById(id);
const rates = new Rates();
const history = {};

function remember(name, value) {
  const values = (history[name] ??= []);
  values.push(value);
  if (values.length > KEPT) values.shift();
  return { name, values };
}

// A chart, or what it will show once there is something.
function show(id, there, draw) {
  at(id).parentElement.classList.toggle("idle", !there);
  if (there) draw(at(id));
}

const some = (series) => series.some((one) => one.values.some((value) => value > 0));

function showLines(id, series, there = some(series)) {
  show(id, there, (canvas) => lines(canvas, series, KEPT));
}

function draw() {
  const speed = rates.rate("vllm:generation_tokens_total");
  const real = rates.growth("foretoken:decoding_seconds_total");
  const plain = rates.growth("foretoken:plain_decoding_seconds_estimate_total");
  const gain = real > 0 && plain > 0 ? plain / real : null;
  at("speedup").textContent = gain === null ? "" : `(about ${shown(gain)} times plain decoding)`;
  const slower = speed === null || (speed > 0 && gain === null) ? null : speed / (gain ?? 1);
  showLines("speed", [
    remember("measured", speed),
    remember("plain, estimated", slower),
  ]);
  const drafts = rates.value("vllm:spec_decode_num_drafts_total");
  const shares = [];
  for (let position = 0; position < 16; position += 1) {
    const accepted = rates.now.get(`vllm:spec_decode_num_accepted_tokens_per_pos_total#${position}`);
    if (accepted === undefined) break;
    shares.push(drafts ? accepted / drafts : 0);
  }
  show("positions", drafts > 0 && shares.length > 0, (canvas) => bars(canvas, shares));
  const milliseconds = (value) => (value === null ? null : 1000 * value);
  showLines("latency", [
    remember("first token", milliseconds(rates.mean("vllm:time_to_first_token_seconds"))),
    remember("per token", milliseconds(rates.mean("vllm:request_time_per_output_token_seconds"))),
  ]);
  const checks = rates.growth("vllm:spec_decode_num_drafts_total");
  const per = (name) => (checks ? rates.growth(name) / checks : null);
  const accepted = per("vllm:spec_decode_num_accepted_tokens_total");
  showLines("lengths", [
    remember("drafted", per("vllm:spec_decode_num_draft_tokens_total")),
    remember("acceptance length", accepted === null ? null : 1 + accepted),
  ]);
  showLines("kv", [
    remember("KV %", 100 * rates.value("vllm:kv_cache_usage_perc")),
    remember("running", rates.value("vllm:num_requests_running")),
    remember("waiting", rates.value("vllm:num_requests_waiting")),
  ], rates.value("vllm:prompt_tokens_total") > 0);  // a short answer falls between two readings
}

export async function watch() {
  try {
    const response = await fetch("/metrics");
    rates.take(parse(await response.text()), performance.now());
    draw();
    await watchControl(rates.value("vllm:num_requests_running"));
  } catch {
    at("model").textContent = "the server does not answer";
  }
  setTimeout(watch, 1000);
}
