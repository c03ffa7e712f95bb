// What answers to one question say: how much faster one way was, and whether all tokens are equal.

import { shown } from "/page/charts.js";

// Seconds that the engine worked on a request, waiting for its turn left out.
export function seconds(answer) { return answer.times.finished_s - answer.times.queued_s; }

export function facts(answer) {
  if (!answer.times) return "";
  const took = seconds(answer), count = answer.ids.length;
  const first = 1000 * (answer.times.first_token_s - answer.times.queued_s);
  const speed = took > 0 ? `, ${shown(count / took)} tokens/s` : "";
  const drafted = answer.drafted ? `, ${answer.drafted} drafted` : "";
  return `${count} tokens in ${shown(took)} s${speed}${drafted}, first after ${shown(first)} ms`;
}

function faster(ratio) {
  const times = ratio < 10 ? ratio.toFixed(1) : ratio.toFixed(0);
  if (times === "1.0") return "As fast as plain";
  return ratio > 1 ? `${times} times as fast as plain` : `Slower than plain: ${times} times its speed`;
}

// Seconds per token, since other tokens may be fewer.
function each(answer) { return seconds(answer) / Math.max(answer.ids.length, 1); }

// The answer in the middle by time per token, the faster of two: everything that is shown is its.
export function typical(answers) {
  return [...answers].sort((a, b) => each(a) - each(b))[(answers.length - 1) >> 1];
}

// The number of the first token that differs from the others' in any answer; null: none does.
function firstDifference(answers) {
  const [one, ...others] = answers.map((answer) => answer.ids);
  const found = others.map((ids) => {
    const at = ids.findIndex((id, index) => id !== one[index]);
    if (at >= 0) return at + 1;
    return ids.length === one.length ? Infinity : ids.length + 1;
  });
  const first = Math.min(...found);
  return first === Infinity ? null : first;
}

// Of { speculating: answers, plain: answers } what they come to, { text, good }: `good` only if it
// was faster and nothing else was written. Of the same two answers as the facts below it.
export function verdict({ speculating, plain }) {
  const ratio = each(typical(plain)) / each(typical(speculating));
  const differs = firstDifference([...speculating, ...plain]);
  const tokens = differs === null
    ? "same tokens"
    : `tokens differ from number ${differs} on (equal with --batch-invariant on)`;
  return { text: `${faster(ratio)}, ${tokens}`, good: differs === null && ratio >= 1.05 };
}
