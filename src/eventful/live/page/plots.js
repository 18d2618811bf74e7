// Plots on a canvas: one line for each stream, and a dashed one for the dense model.

export const COLOURS = ["#1f66b5", "#c2410c", "#15803d", "#8a4bb3", "#b3223f", "#0e7490", "#8a6d00", "#4b5563"];
const LIGHT = ["#62aef2", "#ff9d5c", "#6fd198", "#c792ea", "#ff8aa0", "#5fd0e6", "#ffd24a", "#b8c0cc"];
const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3]]; // not by colour alone
const dark = matchMedia("(prefers-color-scheme: dark)");

export function lineOf(index) {
  const colours = dark.matches ? LIGHT : COLOURS;
  return { colour: colours[index % colours.length], dash: DASHES[Math.floor(index / colours.length) % DASHES.length] };
}

export function whenColoursChange(call) {
  dark.addEventListener("change", call);
}

// Steps of 1, 2 or 5 times a power of ten, at most about four of them.
function step(top) {
  const rough = top / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
}

// lines: [{values: [..], colour, dash}], newest value last; dense: a number or null.
export function plot(canvas, lines, dense, { unit, steps }) {
  const style = getComputedStyle(document.documentElement);
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width || !height) return;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  // The first steps of a stream take much longer than the others: they do not set the scale.
  const all = lines.flatMap((line) => line.values).sort((one, other) => one - other);
  const usual = all.length ? all[Math.floor(0.95 * (all.length - 1))] : 0;
  const top = Math.max(usual, dense ?? 0, 1e-9) * 1.12;
  const left = 38, bottom = height - 6, high = 6;
  const y = (value) => bottom - (bottom - high) * Math.min(value / top, 1);
  const x = (index, count) => width - 4 - (count - 1 - index) * ((width - left - 4) / Math.max(steps - 1, 1));
  context.font = "12px system-ui, sans-serif";
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.lineWidth = 1;
  for (let value = 0; value <= top; value += step(top)) {
    context.strokeStyle = style.getPropertyValue("--rule");
    context.beginPath();
    context.moveTo(left, y(value));
    context.lineTo(width, y(value));
    context.stroke();
    context.fillStyle = style.getPropertyValue("--faint");
    context.fillText(Number(value.toPrecision(3)), left - 6, y(value));
  }
  if (dense !== null) {
    draw(context, [[left, y(dense)], [width, y(dense)]], style.getPropertyValue("--dense"), [3, 4], 2);
  }
  for (const line of lines) {
    const points = line.values.map((value, index) => [x(index, line.values.length), y(value)]);
    draw(context, points.filter((point) => point[0] >= left), line.colour, line.dash, 1.75);
  }
  context.setLineDash([]);
  canvas.dataset.points = Math.max(0, ...lines.map((line) => line.values.length));
  const words = lines.map((line) => `${line.name} ${shown(line.values.at(-1))} ${unit}`).join("; ");
  const label = `${canvas.dataset.title}: ${words || "no frames yet"}${dense === null ? "" : `; dense ${shown(dense)} ${unit}`}`;
  if (canvas.getAttribute("aria-label") !== label) canvas.setAttribute("aria-label", label);
}

function draw(context, points, colour, dash, width) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.setLineDash(dash);
  context.beginPath();
  points.forEach(([left, top], index) => (index ? context.lineTo(left, top) : context.moveTo(left, top)));
  context.stroke();
}

function shown(value) {
  return value === undefined ? "none" : Number(value.toPrecision(3)).toString();
}
