// Shows one still and one source at a time, and reads values from the charts. Without it, all
// stills and all sources are on the page.
"use strict";

function show(items, chosen) {
  items.forEach((item, place) => { item.hidden = place !== chosen; });
}

const stills = [...document.querySelectorAll(".still")];
const slider = document.querySelector(".slider");
if (slider && stills.length > 1) {
  const input = slider.querySelector("input");
  const output = slider.querySelector("output");
  const turn = () => {
    const place = Number(input.value) - 1;
    const title = stills[place].querySelector("h3").textContent;
    show(stills, place);
    output.textContent = `${place + 1} of ${stills.length}`;
    input.setAttribute("aria-valuetext", `${place + 1} of ${stills.length}: ${title}`);
  };
  input.value = "1"; // browsers keep the old value when a page is loaded again
  input.addEventListener("input", turn);
  slider.hidden = false;
  turn();
}

const sources = [...document.querySelectorAll(".source")];
const chooser = document.querySelector(".chooser");
if (chooser) {
  const select = chooser.querySelector("select");
  const turn = () => show(sources, select.selectedIndex);
  select.selectedIndex = 0;
  select.addEventListener("change", turn);
  chooser.hidden = false;
  turn();
}

// The value of a number on an axis: as many digits as can be read from the drawing.
function written(value, unit) {
  const digits = Math.abs(value) >= 100
    ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  return unit ? `${digits} ${unit}` : digits;
}

function readLines(plot) {
  return [...plot.querySelectorAll("path[data-line]")].map((path) => {
    const numbers = path.getAttribute("d").match(/\d+/g).map(Number);
    const points = [];
    for (let i = 0; i < numbers.length; i += 2) points.push([numbers[i], numbers[i + 1]]);
    return points;
  }).reverse(); // the key is in the opposite order of the drawing
}

function nearest(points, x) {
  let low = 0;
  let high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1; else high = middle;
  }
  const before = points[Math.max(0, low - 1)];
  return Math.abs(before[0] - x) <= Math.abs(points[low][0] - x) ? before : points[low];
}

function prepare(figure) {
  const plot = figure.querySelector(".plot");
  const values = [...figure.querySelectorAll(".key b")];
  return {
    cursor: plot.querySelector(".cursor"),
    where: figure.querySelector(".where"),
    lines: readLines(plot),
    values,
    medians: values.map((value) => value.textContent),
    first: Number(plot.dataset.first),
    last: Number(plot.dataset.last),
    top: Number(plot.dataset.top),
  };
}

function point(chart, share) {
  const span = chart.last - chart.first;
  const frame = span ? chart.first + Math.round(share * span) : chart.first;
  const x = span ? (frame - chart.first) / span : 0.5;
  chart.cursor.hidden = false;
  chart.cursor.style.left = `${100 * x}%`;
  if (!chart.where) return;
  chart.where.textContent = `frame ${frame.toLocaleString("en")}`;
  chart.lines.forEach((points, place) => {
    const [, y] = nearest(points, 4000 * x);
    const text = written(chart.top * (1 - y / 1000), chart.values[place].dataset.unit);
    chart.values[place].textContent = y > 0 ? text : `${text} or more`;
  });
}

function leave(chart) {
  chart.cursor.hidden = true;
  if (chart.where) chart.where.textContent = "median";
  chart.values.forEach((value, place) => { value.textContent = chart.medians[place]; });
}

for (const source of sources) {
  const figures = [...source.querySelectorAll(".chart")];
  const charts = figures.map(prepare);
  for (const field of source.querySelectorAll(".field")) {
    // All charts of a source show the same frame.
    const follow = (event) => {
      const box = field.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      charts.forEach((chart) => point(chart, share));
    };
    field.addEventListener("pointermove", follow);
    field.addEventListener("pointerdown", follow);
    field.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") charts.forEach(leave); // a finger leaves at once
    });
  }
}
for (const hint of document.querySelectorAll(".hint")) hint.hidden = false;
