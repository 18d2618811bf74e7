import { lineOf, plot, whenColoursChange } from "/plots.js";

const $ = (id) => document.getElementById(id);
const KEPT = 240; // steps in the plots, at most
const LEAST = 60; // steps that their width stands for, at least
const still = matchMedia("(prefers-reduced-motion: reduce)");
const tiles = new Map(); // by id: {item, canvas, points, status, index, text}
let state = null;
let socket = null;
let wait = 500;
let notice = 0;
let plotted = 0;
let used = 0; // colours given so far

// Requests

async function ask(method, path, body) {
  try {
    const options = { method, headers: {} };
    if (body instanceof Blob) options.body = body;
    else if (body !== undefined) {
      options.headers["Content-Type"] = "application/json";
      options.body = JSON.stringify(body);
    }
    const answer = await fetch(path, options);
    const content = await answer.json();
    if (!answer.ok) throw new Error(content.error || `The page answered with ${answer.status}.`);
    complain("");
    return content;
  } catch (error) {
    complain(error.message);
    return null;
  }
}

function complain(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

function announce(text) {
  $("announce").textContent = text;
}

// Of many moves of the slider the last one counts: one request at a time.
let wanted = null;
let asking = false;
async function change(values) {
  wanted = { ...wanted, ...values };
  if (asking) return;
  asking = true;
  while (wanted) {
    const now = wanted;
    wanted = null;
    const answer = await ask("PATCH", "/api/settings", now);
    if (answer) Object.assign(state, answer); // not only at the next state: a second key follows at once
    if (!wanted) showSettings(state);
  }
  asking = false;
}

// The connection

function connect() {
  const scheme = location.protocol === "https:" ? "wss:" : "ws:";
  socket = new WebSocket(`${scheme}//${location.host}/ws`);
  socket.binaryType = "arraybuffer";
  socket.onopen = () => {
    wait = 500;
    link("open", "connected");
    for (const tile of tiles.values()) tile.points = [];
    look();
  };
  socket.onmessage = (message) => {
    if (typeof message.data === "string") {
      send({ type: "seen", state: true });
      show(JSON.parse(message.data));
    } else {
      picture(message.data);
    }
  };
  socket.onclose = () => {
    link("lost", "connection lost, trying again");
    setTimeout(connect, wait);
    wait = Math.min(2 * wait, 8000);
  };
}

function send(message) {
  if (socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify(message));
}

function look() {
  const overlay = document.querySelector("input[name=overlay]:checked").value;
  const width = Math.min(1280, Math.max(320, Math.round(tileWidth() * (window.devicePixelRatio || 1))));
  const hidden = document.hidden;
  send(hidden ? { type: "view", hidden } : { type: "view", overlay, predictions: $("predictions").checked, width });
}

function tileWidth() {
  const first = tiles.values().next().value;
  return first ? first.canvas.clientWidth || 640 : 640;
}

function link(kind, text) {
  $("link").dataset.state = kind;
  if ($("link").textContent !== text) $("link").textContent = text;
}

async function picture(data) {
  const view = new DataView(data);
  const length = view.getUint32(0);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length)));
  const tile = tiles.get(header.source);
  try {
    if (tile) {
      const image = await createImageBitmap(new Blob([new Uint8Array(data, 4 + length)], { type: "image/jpeg" }));
      if (tile.canvas.width !== image.width || tile.canvas.height !== image.height) {
        tile.canvas.width = image.width;
        tile.canvas.height = image.height;
      }
      tile.canvas.getContext("2d").drawImage(image, 0, 0);
      image.close();
      tile.canvas.dataset.number = header.number;
      tile.text = header.text;
    }
  } finally {
    const confirm = () => send({ type: "seen", source: header.source });
    if (still.matches) setTimeout(confirm, 1000); // one picture a second
    else confirm();
  }
}

// What is shown

function show(next) {
  const before = state;
  state = next;
  const title = `${next.model}${next.random ? ", random weights" : ""}, eventful ${next.version}`;
  if ($("about").textContent !== title) $("about").textContent = title;
  if (!before) {
    $("preset").replaceChildren(...next.presets.map((name) => new Option(name, name)));
    $("kinds").textContent = `You can add: ${next.kinds.join(", ")}${next.upload_mb ? `, an upload of at most ${next.upload_mb} MB` : ""}; ${next.most_sources} sources at one time.`;
    $("upload-part").hidden = !next.upload_mb;
    notice = next.notice[0];
  }
  if (!asking) showSettings(next);
  if (next.notice[0] > notice) complain(next.notice[1]);
  notice = next.notice[0];
  showTiles(next.sources);
  showNumbers(next.sources);
  if (Date.now() - plotted > (still.matches ? 2000 : 400)) drawPlots();
}

function showSettings(next) {
  if (document.activeElement !== $("preset")) $("preset").value = next.preset;
  const dense = next.preset === "dense";
  $("pause").setAttribute("aria-pressed", String(next.paused));
  $("pause").textContent = next.paused ? "Go on" : "Pause";
  $("automatic").checked = next.automatic && !next.needs_share && !dense;
  $("automatic").disabled = next.needs_share || dense;
  $("share").disabled = dense;
  if (next.share !== null) $("share").value = Math.round(100 * next.share);
  const free = next.share === null && !dense;
  $("share-value").textContent = dense ? "all" : free ? "auto" : `${$("share").value} %`;
  $("share").setAttribute("aria-valuetext", free ? "automatic" : `${$("share").value} percent of the tokens`);
}

function showTiles(sources) {
  const there = new Set(sources.map((source) => source.id));
  for (const [id, tile] of tiles) {
    if (there.has(id)) continue;
    const focused = tile.item.contains(document.activeElement);
    tile.item.remove();
    tiles.delete(id);
    announce(`${tile.name} was removed`);
    if (focused) $("streams").focus();
  }
  for (const source of sources) showTile(source, tiles.get(source.id) || newTile(source));
  $("streams").dataset.count = sources.length;
  $("empty").hidden = sources.length > 0;
  showKey(sources);
}

function newTile(source) {
  const item = $("tile").content.firstElementChild.cloneNode(true);
  const tile = { item, canvas: item.querySelector("canvas"), points: [], status: "", index: used++, name: source.name, text: "" };
  item.querySelector("h3").textContent = source.name;
  item.dataset.id = source.id;
  const reset = item.querySelector("[data-do=reset]"), remove = item.querySelector("[data-do=remove]");
  reset.setAttribute("aria-label", `Reset ${source.name}`);
  remove.setAttribute("aria-label", `Remove ${source.name}`);
  reset.onclick = () => ask("POST", "/api/reset", { source: source.id });
  remove.onclick = () => ask("DELETE", `/api/sources/${source.id}`);
  $("streams").append(item);
  tiles.set(source.id, tile);
  if (state.sources.length !== 1) setTimeout(look); // tiles have another width now
  return tile;
}

function showTile(source, tile) {
  const status = state.paused && source.status === "running" ? "paused" : source.status;
  if (tile.status !== status) {
    if (tile.status) announce(`${source.name} is ${status}`);
    tile.status = tile.item.dataset.state = status;
    const badge = tile.item.querySelector(".badge");
    badge.dataset.state = badge.textContent = status;
    const why = tile.item.querySelector(".why");
    why.textContent = source.message;
    why.hidden = !source.message;
  }
  tile.points = tile.points.concat(source.points).filter((point) => point[0] >= source.first).slice(-KEPT);
  const shown = numbers(source);
  for (const place of tile.item.querySelectorAll("[data-of]")) {
    if (place.textContent !== shown[place.dataset.of]) place.textContent = shown[place.dataset.of];
  }
  const label = `${source.name}, ${status}${tile.text ? `: ${tile.text}` : ""}`;
  if (tile.canvas.getAttribute("aria-label") !== label) tile.canvas.setAttribute("aria-label", label);
}

function numbers(source) {
  const share = (part, whole) => (part === null || !whole ? "–" : `${Math.round((100 * part) / whole)} %`);
  const number = (value) => (value === null ? "–" : value >= 100 ? value.toFixed(0) : value.toFixed(1));
  return {
    fps: number(source.fps),
    ms: number(source.ms),
    dense: number(source.dense_ms),
    tokens: share(source.updated, source.tokens),
    operations: share(source.operations, source.dense_operations),
    latency: source.latency === null ? "–" : `${number(source.latency)} ms`,
    dropped: String(source.dropped),
    staleness: source.frames ? `${source.staleness.toFixed(1)} s ago` : "none",
  };
}

function showNumbers(sources) {
  const order = ["fps", "ms", "dense", "tokens", "operations", "latency", "dropped", "staleness"];
  while ($("numbers").rows.length > sources.length) $("numbers").deleteRow(-1);
  sources.forEach((source, place) => {
    let row = $("numbers").rows[place];
    if (!row) {
      row = $("numbers").insertRow();
      const head = document.createElement("th");
      head.scope = "row";
      row.append(head);
      for (let cell = 0; cell <= order.length; cell++) row.insertCell();
    }
    const shown = numbers(source);
    [source.name, source.status, ...order.map((name) => shown[name])].forEach((text, cell) => {
      if (row.cells[cell].textContent !== text) row.cells[cell].textContent = text;
    });
  });
}

function showKey(sources) {
  const names = [...sources.map((source) => [source.name, lineOf(tiles.get(source.id).index)]), ["dense", null]];
  const text = JSON.stringify(names);
  if ($("key").dataset.of === text) return;
  $("key").dataset.of = text;
  $("key").replaceChildren(...names.map(([name, line]) => {
    const item = document.createElement("li");
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg"), path = document.createElementNS(space, "path");
    svg.setAttribute("aria-hidden", "true");
    svg.setAttribute("viewBox", "0 0 26 11");
    path.setAttribute("d", "M0 5.5H26");
    path.setAttribute("stroke", line ? line.colour : getComputedStyle(document.documentElement).getPropertyValue("--dense"));
    path.setAttribute("stroke-width", "2.5");
    path.setAttribute("stroke-dasharray", line ? line.dash.join(" ") : "3 4");
    svg.append(path);
    item.append(svg, name);
    return item;
  }));
}

const PLOTS = { "plot-ms": [1, 1, "ms"], "plot-tokens": [2, 100, "percent"], "plot-operations": [3, 100, "percent"] };
for (const id of Object.keys(PLOTS)) $(id).dataset.title = $(id).getAttribute("aria-label");

function drawPlots() {
  if (!state || document.hidden) return;
  plotted = Date.now();
  const shown = state.sources.map((source) => [source, tiles.get(source.id)]);
  const measured = state.sources.map((source) => source.dense_ms).filter((value) => value !== null);
  for (const [id, [column, factor, unit]] of Object.entries(PLOTS)) {
    const lines = shown.map(([source, tile]) => ({
      ...lineOf(tile.index), name: source.name, values: tile.points.map((point) => point[column] * factor),
    })).filter((line) => line.values.length);
    const dense = id === "plot-ms" ? (measured.length ? Math.max(...measured) : null) : 100;
    const longest = Math.max(LEAST, ...lines.map((line) => line.values.length));
    plot($(id), lines, dense, { unit, steps: longest });
  }
}

// What a user does

$("pause").onclick = () => change({ paused: !state.paused });
$("reset").onclick = () => ask("POST", "/api/reset", {});
$("preset").onchange = () => change({ preset: $("preset").value });
$("share").oninput = () => {
  $("automatic").checked = false;
  $("share-value").textContent = `${$("share").value} %`;
  change({ share: Number($("share").value) / 100 });
};
$("automatic").onchange = () => change({ share: $("automatic").checked ? null : Number($("share").value) / 100 });
$("predictions").onchange = look;
for (const radio of document.querySelectorAll("input[name=overlay]")) radio.onchange = look;
$("add").onsubmit = async (event) => {
  event.preventDefault();
  const source = $("source").value.trim() || $("source").placeholder;
  const made = await ask("POST", "/api/sources", { source, loop: $("loop").checked });
  if (!made) return $("source").focus();
  $("source").value = "";
  announce(`${made.name} was added`);
};
$("file").onchange = async () => {
  const file = $("file").files[0];
  if (!file) return;
  announce(`Uploading ${file.name}`);
  const made = await ask("POST", `/api/uploads?name=${encodeURIComponent(file.name)}`, file);
  $("file").value = "";
  if (made) announce(`${made.name} was added`);
};

const overlay = (value) => () => {
  document.querySelector(`input[name=overlay][value=${value}]`).checked = true;
  look();
};
const turn = (by) => () => {
  $("share").value = Number($("share").value) + by;
  $("share").oninput();
};
const KEYS = {
  " ": () => $("pause").click(), r: () => $("reset").click(), m: overlay("mask"), e: overlay("error"), n: overlay("none"),
  p: () => $("predictions").click(), a: () => $("automatic").click(), "+": turn(5), "=": turn(5), "-": turn(-5),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !state) return;
  if (event.target.closest("input, select, button, textarea, a, .scroll")) {
    const typing = event.target.closest("input[type=text], select");
    if (typing || event.key === " " || event.target.type === "radio" || event.target.type === "range") return;
  }
  const action = KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});
document.addEventListener("visibilitychange", () => { look(); drawPlots(); });
addEventListener("resize", () => { drawPlots(); look(); });
whenColoursChange(() => { if (state) showKey(state.sources); drawPlots(); });
connect();
