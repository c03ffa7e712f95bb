// Small charts on canvases: lines over time and bars. Knows nothing of metrics.

const RIGHT = 5;
const COLORS = ["--bonus", "--recovered", "--accepted", "--grammar"];

function prepare(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  const style = getComputedStyle(document.documentElement);
  return { context, width, height, color: (name) => style.getPropertyValue(name).trim() };
}

function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value);
}

export function shown(value) {
  if (value === 0) return "0";
  if (value >= 100) return value.toFixed(0);
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function tick(value) { return String(Number(value.toPrecision(3))); }

// Room above bars, so that the label of a whole one stands clear of the top.
const HEAD = 26;

function frame({ context, width, height, color }, top, left, bottom, head = 14) {
  context.strokeStyle = color("--line");
  context.fillStyle = color("--soft");
  context.textAlign = "right";
  for (const share of [0, 0.5, 1]) {
    const y = head + (height - bottom - head) * (1 - share);
    context.beginPath();
    context.moveTo(left, y);
    context.lineTo(width - RIGHT, y);
    context.stroke();
    context.fillText(tick(top * share), left - 4, y + 4);
  }
}

// series: [{ name, values }], oldest value first, null where there is none.
export function lines(canvas, series, length) {
  const area = prepare(canvas);
  const { context, width, height, color } = area;
  const left = 42, bottom = 6;
  const known = series.flatMap((one) => one.values.filter((value) => value !== null));
  const top = niceTop(Math.max(0, ...known));
  frame(area, top, left, bottom);
  series.forEach((one, number) => {
    context.strokeStyle = context.fillStyle = color(COLORS[number]);
    context.lineWidth = 1.6;
    context.beginPath();
    let down = false;
    one.values.forEach((value, index) => {
      if (value === null) { down = false; return; }
      const x = left + ((index + length - one.values.length) / (length - 1)) * (width - left - RIGHT);
      const y = 14 + (height - bottom - 14) * (1 - value / top);
      if (down) context.lineTo(x, y); else context.moveTo(x, y);
      down = true;
      const next = one.values[index + 1] ?? null, before = one.values[index - 1] ?? null;
      if (next === null && before === null) context.fillRect(x - 1.5, y - 1.5, 3, 3);
    });
    context.stroke();
    context.textAlign = "left";
    const last = one.values.findLast((value) => value !== null);
    const text = one.name + (last === undefined ? "" : " " + shown(last));
    context.fillText(text, left + number * ((width - left) / series.length), 10);
  });
}

// values: shares from 0 to 1.
export function bars(canvas, values) {
  const area = prepare(canvas);
  const { context, width, height, color } = area;
  const left = 42, bottom = 18;
  frame(area, 1, left, bottom, HEAD);
  const each = (width - left - RIGHT) / Math.max(values.length, 1);
  values.forEach((value, index) => {
    const tall = (height - bottom - HEAD) * value;
    context.fillStyle = color("--accepted");
    context.fillRect(left + index * each + each * 0.15, height - bottom - tall, each * 0.7, tall);
    context.fillStyle = color("--soft");
    context.textAlign = "center";
    context.fillText(String(index + 1), left + (index + 0.5) * each, height - 5);
    context.fillText((100 * value).toFixed(0) + "%", left + (index + 0.5) * each, height - bottom - tall - 3);
  });
}
