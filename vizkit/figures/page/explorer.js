"use strict";
// Draws the precomputed schedules of a pipeline explorer as figures/pipeline.py does; layouts and colours come from there.
const plot = document.querySelector(".plot");
const form = document.querySelector(".settings");
const refusal = document.querySelector(".refusal");
const summary = document.querySelector(".summary");
const { grid, start, schedules, layouts, style } = JSON.parse(document.querySelector(".data").textContent);
const ROW = style.row_scale, HALF = style.half_cell;
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const ranges = { ranks: grid.ranks, microbatches: grid.microbatches };

const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const percent = (share) => `${(100 * share).toFixed(1)}%`;
const short = (value) => String(Number(value.toPrecision(3)));
const durationText = (ms) => (ms < 1000 ? `${short(ms)} ms` : `${short(ms / 1000)} s`);
const ink = () => getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();

function chosen() {
  const settings = Object.fromEntries(Array.from(form.elements, (field) => [field.name, field.value]));
  for (const [name, values] of Object.entries(ranges)) settings[name] = values[Number(settings[name])];
  return settings;
}

// The schedule of this name as columns, times in ms; a text where it does not have these sizes.
function simulated(name, { ranks, microbatches, stages, ratio, transfer }) {
  const { fixed, sizes } = schedules[name];
  const found = sizes[`${ranks} ${microbatches} ${fixed ? "-" : stages}`];
  if (typeof found === "string") return found;
  const kind = bytes(found.kind), stage = bytes(found.stage), microbatch = bytes(found.microbatch);
  const ticks = new Uint16Array(bytes(found.starts[`${ratio} ${transfer}`]).buffer);
  const [forward, input, weight] = grid.ratios[ratio].map((ms) => ms * found.share);
  const lasting = { F: forward, B: input + weight, I: input, W: weight };
  const rank = new Uint8Array(kind.length);
  found.offsets.slice(1).forEach((end, r) => rank.fill(r, found.offsets[r], end));
  const begin = Array.from(ticks, (tick) => tick * grid.tick_ms);
  const end = begin.map((time, i) => time + lasting[grid.kinds[kind[i]]]);
  const makespan = Math.max(...end);
  const work = end.reduce((sum, time, i) => sum + time - begin[i], 0);
  const idle = ranks * makespan - work;
  return { name, ranks, kind, stage, microbatch, rank, begin, end, makespan, share: found.share,
    work: work / ranks, overTotal: idle / (ranks * makespan), overIdeal: idle / work, ...memoryOf(found, kind, rank, begin, end, ranks) };
}

// Steps [time, value] of each rank: a forward adds when it starts, a backward frees when it ends.
function memoryOf({ share }, kind, rank, begin, end, ranks) {
  const events = Array.from({ length: ranks }, () => []);
  const trains = kind.some((code) => grid.kinds[code] !== "F");
  for (let i = 0; i < kind.length; i++) {
    const letter = grid.kinds[kind[i]];
    if (letter === "F") events[rank[i]].push([begin[i], share]);
    if (letter === "B" || letter === "W" || !trains) events[rank[i]].push([end[i], -share]);
  }
  const memory = events.map((list) => {
    const steps = [];
    let held = 0;
    for (const [time, change] of list.sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
      held += change;
      if (steps.length && steps[steps.length - 1][0] === time) steps.pop();
      steps.push([time, held]);
    }
    return steps;
  });
  return { memory, peaks: memory.map((steps) => Math.max(0, ...steps.map(([, held]) => held))) };
}

function cells(side, yaxis, perPx, seen) {
  const places = new Map();
  for (let r = 0; r < side.ranks; r++) {
    const mine = [...new Set(side.stage.filter((_, i) => side.rank[i] === r))].sort((a, b) => a - b);
    mine.forEach((stage, place) => places.set(`${r} ${stage}`, [place, mine.length]));
  }
  const groups = new Map();
  for (let i = 0; i < side.kind.length; i++) {
    const [place, count] = places.get(`${side.rank[i]} ${side.stage[i]}`);
    const key = `${side.kind[i]} ${place} ${count}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(i);
  }
  return [...groups.keys()].sort().map((key) => {
    const [code, place, count] = key.split(" ").map(Number);
    const members = groups.get(key), look = style.kinds[grid.kinds[code]];
    const color = look.colors[count][place];
    const length = members.map((i) => side.end[i] - side.begin[i]);
    const showlegend = !seen.has(code);
    seen.add(code);
    return {
      type: "bar", orientation: "h", yaxis, name: look.label, legendgroup: look.label, legendrank: 100 + code, showlegend,
      base: members.map((i) => side.begin[i]), x: length, y: members.map((i) => side.rank[i] * ROW), width: 2 * HALF,
      marker: { color, line: { width: 0.7, color: length[0] >= 4 * perPx ? style.outline : color },
        pattern: { ...style.pattern, shape: look.pattern, bgcolor: color } },
      customdata: members.map((i) => [side.microbatch[i], side.stage[i], side.rank[i]]),
      hovertemplate: `<b>${look.label}</b><br>microbatch %{customdata[0]}, stage %{customdata[1]}, rank %{customdata[2]}` +
        "<br>from %{base:.6~g} to %{x:.6~g} ms<extra></extra>",
    };
  });
}

function numbers(side, yaxis, perPx) {
  const digits = String(Math.max(...side.microbatch)).length;
  const fitting = side.begin.map((time, i) => ((side.end[i] - time) / perPx - 2) / (style.digit_width * digits));
  const middle = [...fitting].sort((a, b) => a - b)[Math.floor(fitting.length / 2)];
  const size = Math.floor(Math.min(Math.max(middle, style.number_px[0]), style.number_px[1]));
  const shown = side.begin.map((_, i) => i).filter((i) => fitting[i] >= size);
  return { type: "scatter", mode: "text", yaxis, hoverinfo: "skip", showlegend: false, textfont: { size, color: "#000" },
    x: shown.map((i) => (side.begin[i] + side.end[i]) / 2), y: shown.map((i) => side.rank[i] * ROW),
    text: shown.map((i) => String(side.microbatch[i])) };
}

function bubbles(side, yaxis, showlegend) {
  const x = [], y = [];
  for (let r = 0; r < side.ranks; r++) {
    const spans = side.begin.map((time, i) => [time, side.end[i]]).filter((_, i) => side.rank[i] === r).sort((a, b) => a[0] - b[0]);
    let free = 0;
    for (const [begin, end] of [...spans, [side.makespan, side.makespan]]) {
      if (begin > free) {
        const top = r * ROW - HALF, bottom = r * ROW + HALF;
        x.push(free, begin, begin, free, null);
        y.push(top, top, bottom, bottom, null);
      }
      free = Math.max(free, end);
    }
  }
  return { type: "scatter", mode: "none", fill: "toself", fillcolor: style.bubble, x, y, yaxis, hoverinfo: "skip",
    name: "idle (bubble)", legendgroup: "idle", legendrank: 300, showlegend };
}

function memory(side, yaxis, duration, highest) {
  const x = [], y = [];
  side.memory.forEach((steps, r) => {
    const floor = r + 1, height = (held) => floor - (style.memory_height * held) / (highest || 1);
    let level = floor;
    for (const [time, held] of steps) {
      x.push(time, time);
      y.push(level, (level = height(held)));
    }
    x.push(duration, duration, null);
    y.push(level, floor, null);
  });
  const area = { type: "scatter", mode: "lines", fill: "toself", fillcolor: style.memory_area, x, y, yaxis,
    line: { width: 1, color: style.memory_line }, hoverinfo: "skip", showlegend: false };
  const peaks = { type: "scatter", mode: "text", yaxis, x: side.peaks.map(() => duration), y: side.peaks.map((_, r) => r + 0.55),
    text: side.peaks.map((peak) => `\u2002${short(peak)}`), textposition: "middle right", textfont: { size: 11, color: style.text },
    cliponaxis: false, hoverinfo: "skip", showlegend: false };
  return [area, peaks];
}

const facts = (side) => `${durationText(side.makespan)} · bubble ${percent(side.overTotal)} of the total time, ${percent(side.overIdeal)} of the ideal time`;

function verdict([a, b]) {
  if (!b) return facts(a);
  if (Math.abs(a.work - b.work) > 0.05 * Math.max(a.work, b.work)) {
    return `not the same work: a rank computes ${durationText(a.work)} and ${durationText(b.work)}`;
  }
  if (a.makespan === b.makespan) return `${a.name} and ${b.name} take the same time`;
  const [slow, fast] = a.makespan > b.makespan ? [a, b] : [b, a];
  return `${fast.name} is ${Number((slow.makespan / fast.makespan).toPrecision(3))} times as fast as ${slow.name}`;
}

function layoutOf(sides, settings, duration, highest) {
  const layout = structuredClone(layouts[`${settings.ranks} ${sides.length}`]);
  const names = sides.map((side) => side.name).join(" against ");
  const paler = sides.some((side) => Math.max(...side.stage) >= side.ranks) ? " · paler: a rank's higher-numbered stage" : "";
  layout.title.text = `${names}: ${settings.ranks} ranks, ${settings.microbatches} microbatches`;
  layout.title.subtitle.text = `${verdict(sides)} · ${style.clock}${paler}`;
  layout.xaxis.range = [0, duration];
  layout.font.color = ink();
  const captions = sides.flatMap((side) => [
    ...(sides.length > 1 ? [`<b>${side.name}</b> · ${facts(side)}`] : []),
    `memory of activations, ${style.memory_unit}; a row is ${short(highest)} high`,
  ]);
  layout.annotations.forEach((annotation, i) => { annotation.text = captions[i]; });
  return layout;
}

function show() {
  for (const name of Object.keys(ranges)) {
    const input = form.elements[name], value = String(chosen()[name]);
    input.nextElementSibling.textContent = value;
    input.setAttribute("aria-valuetext", value);
  }
  const settings = chosen();
  const names = [settings.schedule, settings.versus].filter((name) => name);
  form.elements.stages.disabled = names.every((name) => schedules[name].fixed);
  const sides = names.map((name) => simulated(name, settings));
  const refused = sides.find((side) => typeof side === "string");
  refusal.textContent = refused ? `Not drawn: ${refused}` : "";
  if (refused) return Promise.resolve();
  const duration = Math.max(...sides.map((side) => side.makespan));
  const highest = Math.max(...sides.flatMap((side) => side.peaks));
  const perPx = duration / style.width_px, seen = new Set();
  const data = sides.flatMap((side, i) => {
    const rows = i ? `y${2 * i + 1}` : "y";
    return [bubbles(side, rows, i === 0), ...cells(side, rows, perPx, seen), numbers(side, rows, perPx),
      ...memory(side, `y${2 * i + 2}`, duration, highest)];
  });
  summary.textContent = sides.map((side) => {
    const peak = Math.max(...side.peaks);
    return `${side.name}: makespan ${facts(side).replace(" · ", "; ")}; peak activations ${short(peak)} ${style.memory_unit}, on rank ${side.peaks.indexOf(peak)}`;
  }).join("\n");
  return Plotly.react(plot, data, layoutOf(sides, settings, duration, highest), { responsive: true, displaylogo: false, showSendToCloud: false });
}

function fill(name, options, value) {
  for (const [key, label] of options) form.elements[name].add(new Option(label, key, key === value, key === value));
}

const names = Object.keys(schedules);
fill("schedule", names.map((name) => [name, name]), start.schedule);
fill("versus", [["", "none"], ...names.map((name) => [name, name])], start.versus);
fill("ratio", Object.keys(grid.ratios).map((key) => [key, key]), start.ratio);
fill("transfer", grid.transfers.map((ms) => [String(ms), ms ? `${ms} ms` : "free"]), start.transfer);
fill("stages", grid.stages.map((count) => [String(count), String(count)]), start.stages);
for (const [name, values] of Object.entries(ranges)) {
  form.elements[name].max = values.length - 1;
  form.elements[name].value = values.indexOf(start[name]);
}
form.addEventListener("input", show);
form.addEventListener("submit", (event) => event.preventDefault());
dark.addEventListener("change", show);
show().then(() => { plot.dataset.ready = "true"; });
