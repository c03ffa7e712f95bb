// The panel of what control is doing and why: reads /control and writes it down in words.

const SHOWN = 5;
const at = (id) => document.getElementById(id);

function element(tag, text, className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

const ms = (seconds) => `${(1000 * seconds).toFixed(seconds < 0.01 ? 2 : 1)} ms`;
const percent = (share) => `${(100 * share).toFixed(0)} %`;

const DECIDES = {
  adaptive: "Lengths follow what drafts are expected to bring.",
  fixed: "Lengths are as configured.",
};

function step(found, running) {
  const parts = [DECIDES[found.mode] ?? ""];
  if (running === 0) parts.unshift("No request runs now; this is how the last one went.");
  const last = found.step;
  if (last) {
    let line = `Last step: ${last.running} running, ${last.output_tokens} tokens in ${ms(last.measured_s)}`;
    if (last.predicted_s) line += `, ${ms(last.predicted_s)} predicted, ${ms(last.plain_s)} without drafts`;
    parts.push(line + ".");
  }
  const error = found.prediction_error;
  if (error) parts.push(`Predictions are off by ${percent(error.p50)} (P50), ${percent(error.p90)} (P90).`);
  if (found.exploring_s) parts.push(`Trials took ${ms(found.exploring_s)} so far.`);
  if (found.forgone_tokens) parts.push(`${found.forgone_tokens.toFixed(0)} tokens forgone so that nobody waits.`);
  return parts.join(" ");
}

function row(name, drafter, running) {
  const made = element("tr", "", drafter.state);
  made.append(element("th", name));
  const rests = running === 0 ? "rested" : "rests";
  const drafts = drafter.state === "resting" ? rests : drafter.draft_length.toFixed(1);
  made.append(element("td", `${drafts}${drafter.pass_s ? `, ${ms(drafter.pass_s)} a pass` : ""}`));
  const chances = element("td", "", "chances");
  for (const chance of drafter.chances.slice(0, 8)) {
    const bar = element("i", "");
    bar.style.height = `${Math.max(1, Math.round(18 * chance))}px`;
    bar.title = percent(chance);
    chances.append(bar);
  }
  if (drafter.chances.length) chances.append(` ${percent(drafter.chances[0])}`);
  made.append(chances, element("td", drafter.why, "why"));
  return made;
}

function ago(seconds) {
  if (seconds < 90) return `${Math.max(0, seconds).toFixed(0)} s ago`;
  return seconds < 5400 ? `${(seconds / 60).toFixed(0)} min ago` : `${(seconds / 3600).toFixed(0)} h ago`;
}

// `running`: requests that run now.
export async function watchControl(running) {
  const response = await fetch("/control");
  const found = response.ok ? await response.json() : null;
  at("control").hidden = found === null;  // nothing drafts here
  if (found === null) return;
  at("control").classList.toggle("idle", !found.step);
  at("control_step").textContent = step(found, running);
  at("control_drafters").replaceChildren(...Object.entries(found.drafters).map(([name, one]) => row(name, one, running)));
  const now = Date.now() / 1000;
  const last = found.changes.slice(-SHOWN).reverse();
  at("control_changes").replaceChildren(...last.map((one) => {
    const item = element("li", one.sentence);
    item.append(element("small", ` ${ago(now - one.at)}`));
    return item;
  }));
}
