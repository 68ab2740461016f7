// SPDX-License-Identifier: Apache-2.0
#pragma once
// The page of kept_page(): everything but the data, which replaces kKeptData.

namespace kvkeep::io {

inline constexpr const char* kKeptData = "/*DATA*/null";

inline constexpr const char* kKeptPage = R"html(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>kvkeep: what stayed</title>
<style>
:root { color-scheme: light dark; --paper: #fbfaf7; --ink: #1d1d1f; --soft: #6e6e73; --line: #d8d5cc; --gone: #b4b1a9; --hue: 28, 110, 164; --mark: #b3541e; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #ececec; --soft: #9a9a9f; --line: #34373d; --gone: #5c5f66; --hue: 96, 170, 222; --mark: #f0a36b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
header, main { max-width: 1080px; margin: 0 auto; padding: 0 20px; }
header { position: sticky; top: 0; z-index: 2; background: var(--paper); border-bottom: 1px solid var(--line); padding-top: 14px; padding-bottom: 10px; }
h1 { font-size: 17px; margin: 0 0 2px; }
code { font-family: ui-monospace, monospace; font-size: 13px; }
.about { color: var(--soft); font-size: 13px; margin-bottom: 8px; overflow-wrap: anywhere; }
.controls { display: flex; flex-wrap: wrap; gap: 8px 18px; align-items: center; }
.controls label { display: flex; gap: 6px; align-items: center; font-size: 13px; color: var(--soft); }
.controls input[type=range] { width: 260px; }
select, button { font: inherit; font-size: 13px; color: inherit; background: transparent; border: 1px solid var(--line); border-radius: 6px; padding: 2px 6px; }
select option { color: #1d1d1f; background: #fff; }
#when { font-variant-numeric: tabular-nums; color: var(--ink); min-width: 16em; }
#map { width: 100%; height: 120px; display: block; margin-top: 10px; cursor: crosshair; image-rendering: pixelated; border: 1px solid var(--line); border-radius: 4px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; align-items: center; font-size: 12px; color: var(--soft); margin-top: 6px; }
.scale { width: 120px; height: 10px; border-radius: 3px; background: linear-gradient(to right, rgba(var(--hue), .06), rgba(var(--hue), .62)); display: inline-block; }
#text { white-space: pre-wrap; overflow-wrap: anywhere; font: 15px/1.75 ui-serif, Georgia, serif; padding: 18px 0 30vh; }
#text span { border-radius: 3px; }
#text .gone { color: var(--gone); }
#text .later { color: var(--gone); opacity: .35; }
#text .written { box-shadow: inset 0 -2px 0 var(--mark); }
#text .seen { outline: 2px solid var(--mark); }
#tip { position: fixed; z-index: 3; pointer-events: none; background: var(--ink); color: var(--paper); font-size: 12px; padding: 4px 8px; border-radius: 6px; display: none; max-width: 320px; }
</style>
</head>
<body>
<header>
  <h1>What stayed in the cache</h1>
  <div class="about" id="about"></div>
  <div class="controls">
    <label>Event <input type="range" id="event" min="0" value="0" aria-label="event"></label><span id="when"></span>
    <label>Layer <select id="layer"></select></label>
    <label>KV head <select id="head"></select></label>
  </div>
  <canvas id="map" aria-label="rows of layers and heads by position"></canvas>
  <div class="legend"><span>held by few <span class="scale"></span> by all heads</span><span class="gone" style="color:var(--gone)" id="gone">dropped everywhere</span>
    <span style="box-shadow:inset 0 -2px 0 var(--mark)">written by the model</span><span>Above: a row for each layer and head, a column for each token. Click a row to choose it.</span></div>
</header>
<main><div id="text"></div></main>
<div id="tip"></div>
<script>
"use strict";
const data = /*DATA*/null;
const by = (id) => document.getElementById(id);
const stops = data.stops, heads = data.kv_heads, layers = data.layers, rows = layers.length * heads, tokens = data.pieces.length;

// Ranges [first, length, ...] of every row become one byte per row and token.
const held = stops.map((stop) => {
  const bits = new Uint8Array(rows * tokens);
  stop.kept.forEach((ranges, row) => {
    for (let i = 0; i < ranges.length; i += 2) bits.fill(1, row * tokens + ranges[i], row * tokens + ranges[i] + ranges[i + 1]);
  });
  return bits;
});

by("about").textContent = `${data.policy} · ${data.model} · ${data.prompt} tokens of prompt, ${tokens - data.prompt} written`;
if (data.folds) by("gone").textContent = "folded or dropped everywhere";
const spans = data.pieces.map((piece, position) => {
  const span = document.createElement("span");
  span.textContent = piece;
  span.dataset.at = position;
  by("text").append(span);
  return span;
});
const option = (select, value, name) => select.append(new Option(name, value));
option(by("layer"), -1, "all");
layers.forEach((layer, i) => option(by("layer"), i, layer));
option(by("head"), -1, "all");
for (let head = 0; head < heads; ++head) option(by("head"), head, head);
by("event").max = stops.length - 1;
by("event").value = stops.length - 1;

const chosenRows = () => {
  const layer = Number(by("layer").value), head = Number(by("head").value), chosen = [];
  for (let row = 0; row < rows; ++row)
    if ((layer < 0 || Math.floor(row / heads) === layer) && (head < 0 || row % heads === head)) chosen.push(row);
  return chosen;
};
let counts = [];
const mebibytes = (bytes) => bytes >= 1048576 ? (bytes / 1048576).toFixed(1) + " MiB" : (bytes / 1024).toFixed(1) + " KiB";

function draw() {
  const at = Number(by("event").value), stop = stops[at], bits = held[at], chosen = chosenRows();
  counts = new Array(tokens).fill(0);
  for (const row of chosen)
    for (let t = 0; t < tokens; ++t) counts[t] += bits[row * tokens + t];
  spans.forEach((span, t) => {
    const later = t >= stop.present, share = counts[t] / chosen.length;
    span.className = (later ? "later" : counts[t] === 0 ? "gone" : "") + (t >= data.prompt && !later ? " written" : "");
    span.style.background = later || counts[t] === 0 ? "" : `rgba(var(--hue), ${(0.06 + 0.56 * share).toFixed(3)})`;
  });
  by("when").textContent = `${stop.name}: ${mebibytes(stop.bytes)}`;
  drawMap(bits, chosen);
}

function drawMap(bits, chosen) {
  const canvas = by("map"), context = canvas.getContext("2d");
  canvas.width = tokens;
  canvas.height = rows;
  const style = getComputedStyle(document.documentElement), hue = style.getPropertyValue("--hue").split(",").map(Number), image = context.createImageData(tokens, rows);
  const bright = new Set(chosen);
  for (let row = 0; row < rows; ++row)
    for (let t = 0; t < tokens; ++t) {
      const pixel = 4 * (row * tokens + t);
      image.data[pixel] = hue[0];
      image.data[pixel + 1] = hue[1];
      image.data[pixel + 2] = hue[2];
      image.data[pixel + 3] = bits[row * tokens + t] ? (bright.has(row) ? 230 : 70) : 0;
    }
  context.putImageData(image, 0, 0);
}

const describe = (t) => {
  const stop = stops[Number(by("event").value)];
  return `position ${t}: ` + (t >= stop.present ? "not there yet" : `held by ${counts[t]} of ${chosenRows().length} heads`);
};
function tip(event, words) {
  by("tip").textContent = words;
  by("tip").style.display = "block";
  by("tip").style.left = Math.min(event.clientX + 14, innerWidth - 220) + "px";
  by("tip").style.top = event.clientY + 16 + "px";
}
const hide = () => { by("tip").style.display = "none"; };
by("text").addEventListener("mousemove", (event) => event.target.dataset.at === undefined ? hide() : tip(event, describe(Number(event.target.dataset.at))));
by("text").addEventListener("mouseleave", hide);
const place = (event) => {
  const box = by("map").getBoundingClientRect();
  return { row: Math.min(rows - 1, Math.floor((event.clientY - box.top) / box.height * rows)), token: Math.min(tokens - 1, Math.floor((event.clientX - box.left) / box.width * tokens)) };
};
by("map").addEventListener("mousemove", (event) => {
  const { row, token } = place(event);
  tip(event, `layer ${layers[Math.floor(row / heads)]}, head ${row % heads}, position ${token}: “${data.pieces[token].trim()}”`);
});
by("map").addEventListener("mouseleave", hide);
by("map").addEventListener("click", (event) => {
  const { row, token } = place(event), layer = Math.floor(row / heads), head = row % heads;
  const same = Number(by("layer").value) === layer && Number(by("head").value) === head;
  by("layer").value = same ? -1 : layer;
  by("head").value = same ? -1 : head;
  spans.forEach((span) => span.classList.remove("seen"));
  draw();
  spans[token].classList.add("seen");
  spans[token].scrollIntoView({ block: "center", behavior: "smooth" });
});
for (const id of ["event", "layer", "head"]) by(id).addEventListener("input", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
</script>
</body>
</html>
)html";

}  // namespace kvkeep::io
