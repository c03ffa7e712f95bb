// Reads /metrics and turns counters into rates. Knows names, not charts.

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;

export function parse(text) {
  const found = new Map();
  const seen = new Map();
  for (const line of text.split("\n")) {
    const match = LINE.exec(line);
    if (!match || match[1].endsWith("_bucket") || match[1].endsWith("_created")) continue;
    const position = /position="(\d+)"/.exec(match[2] || "");
    const name = position ? `${match[1]}#${position[1]}` : match[1];
    found.set(name, (found.get(name) || 0) + Number(match[3]));
    seen.set(name, (seen.get(name) || 0) + 1);
  }
  // Counts of several replicas add up, shares do not.
  for (const [name, count] of seen) {
    if (name.endsWith("_perc")) found.set(name, found.get(name) / count);
  }
  return found;
}

export class Rates {
  constructor() { this.before = null; this.now = null; this.seconds = 1; }

  take(found, at) {
    this.seconds = this.before ? (at - this.at) / 1000 : 1;
    this.at = at;
    this.before = this.now;
    this.now = found;
  }

  value(name) { return this.now?.get(name) ?? 0; }

  // Growth since the last reading; null before there are two.
  growth(name) {
    if (!this.before) return null;
    return this.value(name) - (this.before.get(name) ?? 0);
  }

  rate(name) {
    const growth = this.growth(name);
    return growth === null ? null : growth / this.seconds;
  }

  // Mean of what a histogram saw since the last reading; null if nothing.
  mean(name) {
    const count = this.growth(name + "_count");
    return count ? this.growth(name + "_sum") / count : null;
  }
}
