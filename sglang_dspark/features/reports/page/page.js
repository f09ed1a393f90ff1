"use strict";

// ---- words and numbers ---------------------------------------------------------------------------------------------

const $ = (id) => document.getElementById(id);
const NONE = "–";
const known = (value) => value !== null && value !== undefined;
const fixed = (digits) => (value) => (known(value) ? value.toFixed(digits) : NONE);
const number = (value) => {
  if (!value) return known(value) ? "0" : NONE;
  return value >= 100 ? Math.round(value).toLocaleString("en") : value >= 10 ? value.toFixed(1) : value.toFixed(2);
};
const percent = (value) => (known(value) ? `${(100 * value).toFixed(value < 0.1 && value > 0 ? 1 : 0)} %` : NONE);
const plural = (count, noun) => `${Math.round(count).toLocaleString("en")} ${noun}${Math.round(count) === 1 ? "" : "s"}`;
const range = ([fewest, most]) => (fewest === most ? `${most}` : `${fewest}–${most}`);
const sum = (points, key) => points.reduce((total, point) => total + (point[key] || 0), 0);
const ratio = (part, whole) => (whole ? part / whole : null);

function duration(seconds) {
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} days`;
}

// ---- drawing ---------------------------------------------------------------------------------------------------------

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Round numbers from 0 up to the first one that is not below `most`.
function ticks(most, count) {
  const raw = (most || 1) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw * 0.9999);
  return Array.from({ length: Math.ceil(most / step - 1e-9) + 1 }, (_, index) => index * step);
}

// An empty drawing with a vertical scale from 0; gives its measures and how to place a value.
function frame(host, { most, format, left = 38, bottom = 20, steps = 3 }) {
  const width = Math.max(host.clientWidth, 120);
  const height = Math.max(host.clientHeight, 80);
  const marks = ticks(most, steps);
  const top = marks[marks.length - 1] || 1;
  const box = { left, right: width - 8, top: 10, bottom: height - bottom, width, height };
  const y = (value) => box.bottom - (box.bottom - box.top) * Math.min(value / top, 1.05);
  const name = host.closest("article").querySelector("h2").textContent;
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name });
  for (const mark of marks) {
    root.append(
      svg("line", { class: mark ? "grid" : "axis", x1: left, x2: box.right, y1: y(mark), y2: y(mark) }),
      svg("text", { x: left - 6, y: y(mark) + 4, "text-anchor": "end" }, format(mark)),
    );
  }
  host.replaceChildren(root);
  return { root, box, y };
}

function nothing(host, words) {
  const note = document.createElement("p");
  note.className = "none";
  note.textContent = words;
  host.replaceChildren(note);
}

function label(root, x, y, words, attributes = {}) {
  root.append(svg("text", { x, y, "text-anchor": "middle", ...attributes }, words));
}

// Lines over the last minutes. `lines`: {name, style, of: point -> number or null, area}; those without a number are
// not named.
const SPAN_S = 300;
const SMOOTH_S = 3;

function timeChart(host, { points, now, lines: all, format, shaded }) {
  const lines = all.filter((line) => points.map(line.of).some(known));
  if (!lines.length) return nothing(host, "no decode step in the last minutes");
  const values = lines.flatMap((line) => points.map(line.of)).filter(known);
  const { root, box, y } = frame(host, { most: Math.max(...values, 0) * 1.05, format });
  const x = (second) => box.right - ((box.right - box.left) * (now - second)) / SPAN_S;
  const shown = points.filter((point) => point.second > now - SPAN_S);
  const start = (point) => Math.max(x(point.second - point.seconds), box.left);
  if (shaded) {
    for (const point of shown.filter(shaded)) {
      const place = { x: start(point), y: box.top, width: x(point.second) - start(point) + 0.3, height: box.bottom - box.top };
      root.append(svg("rect", { class: "band", ...place }));
    }
  }
  for (const line of lines) {
    let path = "";
    let area = "";
    let run = [];
    const flush = () => {
      if (run.length) {
        const drawn = run.map(([px, py]) => `${px.toFixed(1)},${py.toFixed(1)}`).join("L");
        path += `M${drawn}${run.length === 1 ? "h0.1" : ""}`;
        area += `M${run[0][0]},${box.bottom}L${drawn}L${run[run.length - 1][0]},${box.bottom}Z`;
      }
      run = [];
    };
    for (const point of shown) {
      const value = line.of(point);
      if (!known(value)) flush();
      else {
        if (point.seconds > SMOOTH_S) run.push([start(point), y(value)]); // a mean of a span that nothing else is known of
        run.push([x(point.second), y(value)]);
      }
    }
    flush();
    if (line.area) root.append(svg("path", { class: "area", d: area }));
    root.append(svg("path", { class: `line ${line.style}`, d: path }));
  }
  for (const minutes of box.width < 400 ? [5, 3, 1, 0] : [5, 4, 3, 2, 1, 0]) {
    const end = minutes === 5 ? "start" : minutes ? "middle" : "end";
    label(root, x(now - 60 * minutes), box.bottom + 15, minutes ? `−${minutes} min` : "now", { "text-anchor": end });
  }
  if (lines.length > 1) {
    lines.forEach((line, index) => {
      label(root, box.left + 6 + index * 110, box.top + 2, line.name, { "text-anchor": "start", class: `name ${line.ink}` });
    });
  }
  const cursor = svg("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
  root.append(cursor);
  host.read = (clientX) => {
    const place = ((clientX - host.getBoundingClientRect().left) * box.width) / host.clientWidth;
    const wanted = now - ((box.right - place) * SPAN_S) / (box.right - box.left);
    const distance = (point) => Math.max(wanted - point.second, point.second - point.seconds - wanted, 0);
    const nearest = shown.reduce((best, point) => (!best || distance(point) < distance(best) ? point : best), null);
    if (!nearest || distance(nearest) > 5) return null;
    cursor.setAttribute("x1", x(nearest.second));
    cursor.setAttribute("x2", x(nearest.second));
    cursor.setAttribute("visibility", "visible");
    const ago = Math.max(0, Math.round(now - nearest.second));
    const rows = lines.map((line) => `${line.name}: ${number(line.of(nearest))}`);
    if (shaded && shaded(nearest)) rows.push("speculation parked");
    return [ago ? `${ago} s ago` : "now", ...rows].join("\n");
  };
}

// One column per entry. `columns`: {name, value, text, tip, mark, point}; value from 0 to `most`.
function columnChart(host, { columns, most, format, caption, warm }) {
  const { root, box, y } = frame(host, { most, format, bottom: caption ? 34 : 20 });
  const pitch = (box.right - box.left) / columns.length;
  const wide = Math.min(pitch * 0.62, 64);
  const dots = [];
  columns.forEach((column, index) => {
    const middle = box.left + pitch * (index + 0.5);
    if (known(column.value)) {
      const top = y(column.value);
      const place = { x: middle - wide / 2, y: top, width: wide, height: Math.max(box.bottom - top, 0) };
      root.append(svg("rect", { class: warm ? "column warm" : "column", rx: 2, ...place }));
      const inside = box.bottom - top > 18;
      if (column.text && pitch > 30) label(root, middle, inside ? box.bottom - 6 : top - 4, column.text, { class: "value" });
    }
    if (known(column.mark)) {
      const level = y(column.mark);
      root.append(svg("line", { class: "mark", x1: middle - wide / 2 - 3, x2: middle + wide / 2 + 3, y1: level, y2: level }));
    }
    if (known(column.point)) dots.push([middle, y(column.point)]);
    label(root, middle, box.bottom + 15, column.name);
  });
  if (dots.length) root.append(svg("path", { class: "thread", d: `M${dots.map((dot) => dot.join(",")).join("L")}` }));
  for (const [cx, cy] of dots) root.append(svg("circle", { class: "point", cx, cy, r: 3.5 }));
  if (caption) label(root, (box.left + box.right) / 2, box.bottom + 30, caption);
  host.read = (clientX) => {
    const place = ((clientX - host.getBoundingClientRect().left) * box.width) / host.clientWidth;
    const column = columns[Math.floor((place - box.left) / pitch)];
    return column ? column.tip : null;
  };
}

function scatterChart(host, { points, now, gamma, loads }) {
  const { root, box, y } = frame(host, { most: gamma, format: compact, bottom: 34, steps: Math.min(gamma, 4) });
  const most = Math.max(...points.map((point) => point.running_requests), ...loads.map((load) => load.running_requests), 1);
  const marks = ticks(most, 5).filter((mark) => Number.isInteger(mark));
  const top = Math.max(marks[marks.length - 1], most);
  const x = (requests) => box.left + 6 + ((box.right - box.left - 12) * requests) / top;
  for (const mark of marks) label(root, x(mark), box.bottom + 15, `${mark}`);
  label(root, (box.left + box.right) / 2, box.bottom + 30, "requests per step");
  for (const point of points) {
    const opacity = 0.08 + 0.6 * Math.max(0, 1 - (now - point.second) / SPAN_S) ** 2;
    const place = { cx: x(point.running_requests), cy: y(point.verify_length), r: 3 };
    root.append(svg("circle", { class: "spot", "fill-opacity": opacity.toFixed(2), ...place }));
  }
  for (const load of loads) {
    root.append(svg("circle", { class: "spot mean", cx: x(load.running_requests), cy: y(load.verify_length), r: 5 }));
  }
  host.read = (clientX) => {
    const place = ((clientX - host.getBoundingClientRect().left) * box.width) / host.clientWidth;
    const nearest = loads.reduce((best, load) => {
      const distance = Math.abs(x(load.running_requests) - place);
      return !best || distance < best.distance ? { load, distance } : best;
    }, null);
    if (!nearest) return null;
    const { load } = nearest;
    return `${range(load.requests)} requests (ring: the mean)\n${number(load.verify_length)} drafts verified per request and step
accept length ${number(load.accept_length)}\n${plural(load.steps, "step")}`;
  };
}

// ---- what is known ---------------------------------------------------------------------------------------------------

let capabilities = null;
let answer = null; // of all replicas and of each; one replica answers for itself alone
let curves = []; // of all replicas, then of each: spans of about a second, oldest first
let shown = 0; // place of what is shown, which has these statistics and curves:
let stats = null;
let points = [];
let chosenSpan = "recent";

// The sums that the curves are ratios of.
function sumsOf({ measured_step_ms, predicted_step_ms, ...counts }) {
  const keys = ["steps", "parked_steps", "rounds", "verified_tokens", "committed_tokens", "timed_steps"];
  const times = { measured: measured_step_ms * counts.timed_steps, predicted: predicted_step_ms * counts.timed_steps };
  return { ...Object.fromEntries(keys.map((key) => [key, counts[key]])), ...times };
}

const allAndEach = (whole) => [whole, ...(whole.replicas ?? [])];

// Keep what has happened since the last answer; the first one tells of the minute before.
function remember(fresh) {
  const before = answer && allAndEach(answer);
  curves = allAndEach(fresh).map((now, place) =>
    before ? grown(curves[place], before[place], now) : [{ second: now.uptime_s, seconds: now.recent.seconds, ...sumsOf(now.recent) }],
  );
  answer = fresh;
}

function grown(curve, then, now) {
  const before = sumsOf(then);
  const sums = Object.entries(sumsOf(now)).map(([key, value]) => [key, value - before[key]]);
  const point = { second: now.uptime_s, seconds: now.uptime_s - then.uptime_s, ...Object.fromEntries(sums) };
  return [...curve, point].filter((point) => point.second > now.uptime_s - SPAN_S - SMOOTH_S);
}

function show(place) {
  shown = place;
  stats = allAndEach(answer)[place];
  points = curves[place];
  const names = allAndEach(answer).map((_, other) => (other ? `replica ${other - 1}` : "all replicas"));
  $("replicas").hidden = names.length === 1;
  if ($("replicas").children.length !== names.length) {
    $("replicas").replaceChildren(
      ...names.map((name, other) => {
        const button = document.createElement("button");
        button.textContent = name;
        button.addEventListener("click", () => show(other));
        return button;
      }),
    );
  }
  [...$("replicas").children].forEach((button, other) => button.setAttribute("aria-pressed", other === place));
  chips();
  draw();
}

// Each replica has a schedule of its own.
const schedules = () => (stats.replicas ?? [stats]).map((replica) => replica.schedule);
const parked = () => schedules().every((schedule) => schedule.parked);

// Figures of a span and of those that ended in the two seconds before: a step may take a good part of a second.
function smooth(all) {
  return all.map((point, index) => {
    const beside = (other) => other.second > point.second - SMOOTH_S && other.seconds < SMOOTH_S;
    const part = [...all.slice(Math.max(0, index - SMOOTH_S), index).filter(beside), point];
    const mean = (key, over) => ratio(sum(part, key), sum(part, over));
    return {
      second: point.second,
      seconds: point.seconds,
      speed: mean("committed_tokens", "seconds"),
      accept_length: mean("committed_tokens", "rounds"),
      verify_length: mean("verified_tokens", "rounds"),
      running_requests: mean("rounds", "steps"),
      parked: point.parked_steps > 0,
      measured: mean("measured", "timed_steps"),
      predicted: mean("predicted", "timed_steps") || null,
    };
  });
}

function draw() {
  const recent = stats.recent;
  const now = stats.uptime_s;
  const idle = recent.steps === 0;
  const span = chosenSpan === "recent" && !idle ? recent : stats;
  const drawn = smooth(points);

  const latest = drawn[drawn.length - 1];
  $("tile-speed").textContent = latest && latest.speed ? number(latest.speed) : "0";
  $("tile-speed-note").textContent = `${number(recent.tokens_per_s)} over the last minute`;
  $("tile-accept").textContent = fixed(2)(recent.accept_length);
  $("tile-verify").textContent = fixed(2)(recent.verify_length);
  $("tile-verify-of").textContent = `of ${capabilities.block_size} drafts`;
  $("tile-waste").textContent = percent(recent.wasted_verify_fraction);
  $("tile-waste-note").textContent = idle ? "" : `${number(recent.verified_tokens - recent.accepted_tokens)} of ${number(recent.verified_tokens)} drafts`;
  $("tile-load").textContent = idle ? "0" : fixed(1)(recent.running_requests);
  const most = allAndEach(capabilities)[shown].max_running_requests;
  $("tile-load-of").textContent = known(most) ? `of ${most} requests` : "requests";
  $("tile-step").textContent = number(recent.measured_step_ms);
  $("tile-step-note").textContent = known(recent.predicted_step_ms) ? `${number(recent.predicted_step_ms)} predicted` : "";

  const one = { style: "one", ink: "one-ink" };
  const two = { style: "two", ink: "two-ink" };
  const over = (id, options) => timeChart($(id), { points: drawn, now, format: compact, ...options });
  over("chart-speed", { lines: [{ ...one, name: "tokens/s", of: (point) => point.speed, area: true }] });
  over("chart-lengths", {
    lines: [
      { ...one, name: "accept length", of: (point) => point.accept_length },
      { ...two, name: "verify length", of: (point) => point.verify_length },
    ],
  });
  over("chart-load", {
    lines: [{ ...two, name: "requests per step", of: (point) => point.running_requests ?? 0 }],
    shaded: (point) => point.parked,
  });
  over("chart-step", {
    lines: [
      { ...one, name: "measured", of: (point) => point.measured },
      { ...two, style: "two dashed", name: "predicted", of: (point) => point.predicted },
    ],
  });
  const busy = drawn.filter((point) => known(point.running_requests));
  if (busy.length) scatterChart($("chart-scatter"), { points: busy, now, gamma: capabilities.block_size, loads: span.by_load });
  else nothing($("chart-scatter"), "no decode step in the last minutes");
  drawSpan(span);
  drawFacts();
  document.querySelectorAll(".span-name").forEach((node) => {
    node.textContent = span === recent ? "last minute" : "since start";
  });
  readPointer();
}

const compact = (value) => {
  if (value >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  return value >= 10000 ? `${+(value / 1000).toPrecision(3)}k` : `${+value.toFixed(2)}`;
};

function whyUnverified(span) {
  if (!span.steps) return "no decode step yet";
  if (stats.policy === "off") return "nothing was verified: the policy off never speculates";
  if (parked()) return "nothing was verified: speculation is parked, plain steps are faster";
  if (capabilities.drafter === null) return "nothing was verified: no request named a text to draft from";
  return "no draft was verified";
}

function drawSpan(span) {
  const waste = span.by_load.filter((load) => load.verified_tokens);
  if (waste.length) {
    columnChart($("chart-waste"), {
      most: 1,
      format: percent,
      warm: true,
      caption: "requests in the step",
      columns: waste.map((load) => ({
        name: range(load.requests),
        value: load.wasted_verify_fraction,
        text: percent(load.wasted_verify_fraction),
        tip: `${range(load.requests)} requests\n${plural(load.verified_tokens - load.accepted_tokens, "draft")} of ${number(load.verified_tokens)} verified were not kept
${plural(load.steps, "step")}, ${number(load.measured_step_ms)} ms each`,
      })),
    });
  } else nothing($("chart-waste"), whyUnverified(span));

  if (span.survival.some(known)) {
    columnChart($("chart-survival"), {
      most: 1,
      format: percent,
      caption: "place in the block",
      columns: span.survival.map((value, position) => ({
        name: `${position + 1}`,
        value,
        text: percent(value),
        mark: span.predicted_survival[position],
        point: span.conditional_acceptance[position],
        tip: `Draft ${position + 1} of the block
observed: ${percent(value)} of the verified were kept
predicted: ${percent(span.predicted_survival[position])}
given its predecessors: ${percent(span.conditional_acceptance[position])}`,
      })),
    });
  } else nothing($("chart-survival"), whyUnverified(span));
  $("legend-predicted").hidden = !span.predicted_survival.some(known);

  const counts = [
    ["drafted", span.drafted_tokens],
    ["verified", span.verified_tokens],
    ["accepted", span.accepted_tokens],
    ["committed", span.committed_tokens],
  ];
  if (span.committed_tokens) {
    columnChart($("chart-tokens"), {
      most: Math.max(...counts.map(([, count]) => count)) * 1.05,
      format: compact,
      columns: counts.map(([name, count]) => ({
        name,
        value: count,
        text: compact(count),
        tip: `${plural(count, "token")} ${name}\n${number(ratio(count, span.rounds))} per request and step`,
      })),
    });
  } else nothing($("chart-tokens"), "no decode step yet");
}

function facts(id, rows) {
  $(id).replaceChildren(
    ...rows.flatMap(([name, value, off]) => {
      const term = document.createElement("dt");
      const text = document.createElement("dd");
      term.textContent = name;
      text.textContent = value;
      if (off) text.className = "off";
      return [term, text];
    }),
  );
}

function drawFacts() {
  const { drafter, features, versions, target, policies } = capabilities;
  const devices = features.tensor_parallel_size * features.data_parallel_size;
  facts("facts-drafter", drafter === null ? [["none", "requests that name a text speculate"]] : [
    ["path", drafter.path],
    ["block size", `${capabilities.block_size}${capabilities.block_size < drafter.block_size ? ` of ${drafter.block_size}` : ""}`],
    ["layers", drafter.num_hidden_layers],
    ["reads target layers", drafter.target_layer_ids.join(", ")],
    ["Markov head", drafter.markov_head_type ? `${drafter.markov_head_type}, rank ${drafter.markov_rank}` : "none"],
    ["confidence head", drafter.confidence_head ? "yes" : "none"],
    ["vocabulary", `${drafter.vocab_size.toLocaleString("en")} of ${target.vocab_size.toLocaleString("en")} tokens`],
  ]);
  facts("facts-server", [
    ["target", `${target.architecture}, ${capabilities.dtype}`],
    ["engine", `${capabilities.engine}: ${capabilities.reason}`],
    ...(target.recurrence ? [["recurrent layers", target.recurrence]] : []),
    ["device", capabilities.device + (devices > 1 ? ` × ${devices}` : "")],
    ["prompts", features.prefill_attention + (features.prefill_cuda_graphs ? ", in CUDA graphs" : "")],
    ["decoding", features.decode_attention + (features.cuda_graphs ? ", in CUDA graphs" : "")],
    ["overlap scheduling", features.overlap ? "on" : "off"],
    ["up for", duration(stats.uptime_s)],
    ["tokens committed", stats.committed_tokens.toLocaleString("en")],
    ...promises(),
    ["versions", Object.entries(versions).map(([name, version]) => `${name} ${version}`).join(", ")],
  ]);
  facts(
    "facts-policies",
    Object.entries(policies).map(([name, policy]) => {
      const steps = stats.steps_by_policy[name];
      const words = [policy.available ? "" : "not on this server", policy.waits_for_device ? "waits for the device" : ""];
      if (steps) words.unshift(plural(steps, "step"));
      if (name === stats.policy) words.unshift("in force");
      return [name, words.filter(Boolean).join(" · ") || "available", name !== stats.policy];
    }),
  );
}

function promises() {
  const facts = [];
  for (const [kind, what] of [["tpot", "times per token"], ["ttft", "first tokens"]]) {
    const sum = (counts) =>
      Object.entries(counts || {}).reduce((total, [name, value]) => total + (name.startsWith(kind) ? value : 0), 0);
    const answers = sum(stats.promises);
    if (!answers) continue;
    const kept = stats.promises[`${kind}_kept`];
    const mean = answers > kept ? `, others ${(sum(stats.promises_late_seconds) / (answers - kept)).toFixed(1)} s late` : "";
    facts.push([`promised ${what} kept`, `${kept} of ${answers}${mean}`]);
  }
  return facts;
}

function chips() {
  const [{ verify_len: length }] = schedules();
  const list = [[`policy ${stats.policy}${known(length) ? ` ${length}` : ""}`, "plain"]];
  if (stats.recent.steps === 0) list.push(["idle", ""]);
  else if (parked()) list.push(["parked: plain steps are faster", "wait"]);
  else if (stats.policy === "off") list.push(["not speculating", "wait"]);
  else list.push(["speculating", "good"]);
  showChips(list);
}

function showChips(list) {
  const words = JSON.stringify(list);
  if ($("chips").dataset.words === words) return; // the region is read aloud when it changes
  $("chips").dataset.words = words;
  $("chips").replaceChildren(
    ...list.map(([text, kind]) => {
      const chip = document.createElement("span");
      chip.className = `chip ${kind}`;
      chip.textContent = text;
      return chip;
    }),
  );
}

// ---- talking to the server -------------------------------------------------------------------------------------------

const KEY = "dspark-api-key";
const POLL_MS = 1000;
const RETRY_MS = 2000;
const TIMEOUT_MS = 8000;
let lostSince = null;

class Refused extends Error {}

async function get(path) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (answer.status === 401 || answer.status === 403) throw new Refused();
  if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
  return answer.json();
}

function state(name) {
  document.body.dataset.state = name;
  $("key-form").hidden = name !== "locked";
}

function notice(words, calm) {
  $("notice").hidden = !words;
  $("notice").classList.toggle("calm", Boolean(calm));
  if ($("notice").textContent !== words) $("notice").textContent = words;
}

async function poll() {
  if (!capabilities) {
    capabilities = await get("dspark/capabilities");
    const name = capabilities.target ? capabilities.target.name : "";
    $("model").textContent = name;
    document.title = name ? `DSPARK · ${name.split("/").pop()}` : "DSPARK";
  }
  if (capabilities.effective_decode_path !== "dspark") {
    state("target-only");
    showChips([["target only", "wait"]]);
    notice(`This server decodes with the target alone. ${capabilities.reason}`, true);
    return false;
  }
  const fresh = await get("dspark/stats");
  if (answer !== null && fresh.uptime_s < answer.uptime_s) {
    answer = stats = capabilities = null; // of a server that has been started anew
    return true;
  }
  remember(fresh);
  lostSince = null;
  const warning = answer.drafter_fit.warning;
  notice(warning ? `${warning[0].toUpperCase()}${warning.slice(1)}.` : "");
  state("live");
  show(shown);
  return true;
}

function lost() {
  lostSince = lostSince || Date.now();
  const since = duration((Date.now() - lostSince) / 1000);
  const old = stats ? " The last figures are shown below." : "";
  notice(`The server does not answer (for ${since}). Trying again.${old}`);
  showChips([["no answer", "bad"]]);
  state(stats ? "lost" : "connecting");
}

async function run() {
  let wait = POLL_MS;
  try {
    // A page that nobody sees asks for nothing; of the seconds that it missed it shows the mean.
    if (!document.hidden && !(await poll())) return;
  } catch (error) {
    if (error instanceof Refused) {
      $("key-refused").hidden = !sessionStorage.getItem(KEY);
      sessionStorage.removeItem(KEY);
      locked();
      return;
    }
    lost();
    wait = RETRY_MS;
  }
  setTimeout(run, wait);
}

function locked() {
  state("locked");
  showChips([]);
  notice("");
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  $("key-form").hidden = true;
  run();
});

$("span").addEventListener("click", (event) => {
  if (!event.target.dataset.span) return;
  chosenSpan = event.target.dataset.span;
  for (const button of $("span").children) {
    button.setAttribute("aria-pressed", button.dataset.span === chosenSpan);
  }
  if (stats) draw();
});

// ---- words that appear under the pointer -------------------------------------------------------------------------------

let pointer = null; // over a chart: {host, x, y}

// What the chart under the pointer says there; again after every drawing, which moves the chart on.
function readPointer() {
  if (!pointer) return;
  const drawn = pointer.host.firstElementChild?.tagName === "svg";
  showTip(drawn && pointer.host.read(pointer.x), pointer.x, pointer.y, true);
}

function showTip(words, x, y, above) {
  const tip = $("tip");
  tip.hidden = !words;
  if (!words) return;
  tip.textContent = words;
  const room = 12;
  const left = Math.min(Math.max(x + 14, room), window.innerWidth - tip.offsetWidth - room);
  const below = !above && y + 18 + tip.offsetHeight < window.innerHeight;
  tip.style.left = `${Math.max(left, room)}px`;
  tip.style.top = `${below ? y + 18 : Math.max(y - tip.offsetHeight - 12, room)}px`;
}

for (const node of document.querySelectorAll("[data-tip]")) {
  node.tabIndex = 0;
  node.addEventListener("pointermove", (event) => showTip(node.dataset.tip, event.clientX, event.clientY));
  node.addEventListener("pointerleave", () => showTip(""));
  node.addEventListener("focus", () => {
    const box = node.getBoundingClientRect();
    showTip(node.dataset.tip, box.left, box.bottom - 10);
  });
  node.addEventListener("blur", () => showTip(""));
}
for (const host of document.querySelectorAll(".chart")) {
  const read = (event) => {
    pointer = { host, x: event.clientX, y: event.clientY };
    readPointer();
  };
  host.addEventListener("pointermove", read);
  host.addEventListener("pointerdown", read);
  host.addEventListener("pointerleave", () => {
    pointer = null;
    showTip("");
    if (stats) draw();
  });
}
window.addEventListener("resize", () => stats && draw());

if (document.documentElement.dataset.needsKey === "yes" && !sessionStorage.getItem(KEY)) locked();
else run();
