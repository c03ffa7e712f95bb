// Shows tokens in the colours of their sources. Draws once per frame however many tokens came, and
// only appends: work per token must not grow with the answer.

export const SOURCES = {
  target: "plain: no draft was checked",
  accepted: "draft accepted",
  block: "block draft accepted (underlined): all drafts of its step filled in by one pass",
  recovered: "recovered: the target's token where a draft was rejected",
  bonus: "bonus: the target's token after a whole draft",
  grammar: "grammar: forced, drafted for free",
  prediction: "prediction accepted",
};

// Drafters that every server has; the names of others are their users'.
const FREE = new Set(["grammar", "prediction"]);

// `blocks` are the names of the drafters that fill in whole blocks.
function sourceOf(token, blocks) {
  if (token.source !== "accepted") return token.source;
  if (blocks.has(token.drafter)) return "block";
  return FREE.has(token.drafter) ? token.drafter : "accepted";
}

export function span(name, text) {
  const made = document.createElement("span");
  made.className = name;
  made.textContent = text;
  return made;
}

function drawn(token, blocks) {
  const source = sourceOf(token, blocks);
  const made = span(source ?? "target", token.text);
  const facts = [SOURCES[source] ?? source];
  if (token.drafter) facts.push(`drafter: ${token.drafter}`);
  facts.push(`position in its step: ${token.position + 1}`);
  if (token.probability !== null) facts.push(`probability: ${(100 * token.probability).toFixed(1)} %`);
  made.title = facts.join("\n");
  return made;
}

export class Pane {
  constructor(element, onFrame, blocks = new Set()) {
    this.element = element;
    this.onFrame = onFrame;
    this.blocks = blocks;
    this.waiting = [];
    this.frame = null;
    this.frames = 0;
  }

  start(before) {
    this.finish();
    this.element.replaceChildren(...before);
    this.element.scrollTop = this.element.scrollHeight;
  }

  add(token) {
    this.waiting.push(token);
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = null;
    if (!this.waiting.length) return;
    const element = this.element;
    const atEnd = element.scrollTop + element.clientHeight >= element.scrollHeight - 4;
    element.append(...this.waiting.splice(0).map((token) => drawn(token, this.blocks)));
    if (atEnd) element.scrollTop = element.scrollHeight;
    this.frames += 1;
    this.onFrame();
  }

  // Draws what waits: a hidden page has no frames.
  finish() {
    if (this.frame !== null) cancelAnimationFrame(this.frame);
    this.draw();
  }
}
