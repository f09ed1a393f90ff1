"use strict";

// ---- words and numbers ---------------------------------------------------------------------------------------------

const $ = (id) => document.getElementById(id);
const NONE = "–";
const known = (value) => value !== null && value !== undefined;
const percent = (value) => (known(value) ? `${(100 * value).toFixed(value < 0.1 && value > 0 ? 1 : 0)} %` : NONE);
const whole = (value) => Math.round(value).toLocaleString("en");
const plural = (count, noun) => `${whole(count)} ${noun}${Math.round(count) === 1 ? "" : "s"}`;
const range = ([fewest, most]) => (fewest === most ? `${most}` : `${fewest}–${most}`);

function number(value) {
  if (!known(value)) return NONE;
  if (value >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (value >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return `${+value.toFixed(value < 100 ? 2 : 0)}`;
}

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

function element(tag, text, kind = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  node.className = kind;
  return node;
}

function label(root, x, y, words, attributes = {}) {
  root.append(svg("text", { x, y, "text-anchor": "middle", ...attributes }, words));
}

function nothing(host, words) {
  host.replaceChildren(element("p", words, "none"));
  host.read = null;
}

// An empty drawing with a vertical scale of round numbers from 0; gives its measures and how to place a value.
function frame(host, { most, format = number, bottom = 20 }) {
  const [width, height] = [Math.max(host.clientWidth, 120), Math.max(host.clientHeight, 80)];
  const raw = (most || 1) / 3;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw * 0.9999);
  const marks = Array.from({ length: Math.ceil(most / step - 1e-9) + 1 }, (_, index) => index * step);
  const top = marks[marks.length - 1] || 1;
  const box = { left: 38, right: width - 8, top: 10, bottom: height - bottom, width };
  const y = (value) => box.bottom - (box.bottom - box.top) * Math.min(value / top, 1.05);
  const name = host.closest("article").querySelector("h2").textContent;
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name });
  for (const mark of marks) {
    root.append(svg("line", { class: mark ? "grid" : "axis", x1: box.left, x2: box.right, y1: y(mark), y2: y(mark) }));
    label(root, box.left - 6, y(mark) + 4, format(mark), { "text-anchor": "end" });
  }
  host.replaceChildren(root);
  return { root, box, y };
}

const placeIn = (host, box, clientX) => ((clientX - host.getBoundingClientRect().left) * box.width) / host.clientWidth;

// Lines over the last minutes. `lines`: {name, style, of: point -> number or null}; those without a number are not named.
const SPAN_S = 300;

function timeChart(host, { points, now, lines: all, shaded = () => false }) {
  const lines = all.filter((line) => points.map(line.of).some(known));
  if (!lines.length) return nothing(host, "no decode step since this page was opened");
  const values = lines.flatMap((line) => points.map(line.of)).filter(known);
  const { root, box, y } = frame(host, { most: Math.max(...values) * 1.05 });
  const x = (second) => Math.max(box.right - ((box.right - box.left) * (now - second)) / SPAN_S, box.left);
  for (const point of points.filter(shaded)) {
    const begin = x(point.second - point.seconds);
    const place = { x: begin, y: box.top, width: x(point.second) - begin + 0.3, height: box.bottom - box.top };
    root.append(svg("rect", { class: "band", ...place }));
  }
  lines.forEach((line, index) => {
    let pen = "M";
    let path = "";
    for (const point of points) {
      const value = line.of(point);
      if (known(value)) path += `${pen}${x(point.second).toFixed(1)},${y(value).toFixed(1)}h0.1`;
      pen = known(value) ? "L" : "M";
    }
    root.append(svg("path", { class: `line ${line.style}`, d: path }));
    const place = { "text-anchor": "start", class: `name ${line.style}-ink` };
    if (lines.length > 1) label(root, box.left + 6 + index * 110, box.top + 2, line.name, place);
  });
  for (const minutes of box.width < 400 ? [5, 3, 1, 0] : [5, 4, 3, 2, 1, 0]) {
    const anchor = minutes === 5 ? "start" : minutes ? "middle" : "end";
    const words = minutes ? `−${minutes} min` : "now";
    label(root, x(now - 60 * minutes), box.bottom + 15, words, { "text-anchor": anchor });
  }
  host.read = (clientX) => {
    const wanted = now - ((box.right - placeIn(host, box, clientX)) * SPAN_S) / (box.right - box.left);
    const distance = (point) => Math.abs(point.second - wanted);
    const nearest = points.reduce((best, point) => (distance(point) < distance(best) ? point : best));
    if (distance(nearest) > 5) return null;
    const ago = Math.round(now - nearest.second);
    const rows = lines.map((line) => `${line.name}: ${number(line.of(nearest))}`);
    if (shaded(nearest)) rows.push("speculation parked");
    return [ago ? `${ago} s ago` : "now", ...rows].join("\n");
  };
}

// One column per entry. `columns`: {name, value, text, tip, mark}; value from 0 to `most`.
function columnChart(host, { columns, most, format, caption, style = "" }) {
  const { root, box, y } = frame(host, { most, format, bottom: 34 });
  const pitch = (box.right - box.left) / columns.length;
  const wide = Math.min(pitch * 0.62, 64);
  columns.forEach(({ name, value, text, mark }, index) => {
    const middle = box.left + pitch * (index + 0.5);
    if (known(value)) {
      const high = box.bottom - y(value);
      const place = { x: middle - wide / 2, y: y(value), width: wide, height: Math.max(high, 0) };
      root.append(svg("rect", { class: `column ${style}`, rx: 2, ...place }));
      if (pitch > 30) label(root, middle, high > 18 ? box.bottom - 6 : y(value) - 4, text, { class: "value" });
    }
    if (known(mark)) {
      const ends = { x1: middle - wide / 2 - 3, x2: middle + wide / 2 + 3, y1: y(mark), y2: y(mark) };
      root.append(svg("line", { class: "mark", ...ends }));
    }
    label(root, middle, box.bottom + 15, name);
  });
  label(root, (box.left + box.right) / 2, box.bottom + 30, caption);
  host.read = (clientX) => columns[Math.floor((placeIn(host, box, clientX) - box.left) / pitch)]?.tip;
}

// ---- what is known ---------------------------------------------------------------------------------------------------

let capabilities = null;
let answer = null; // of all replicas and of each; one replica answers for itself alone
let curves = []; // of all replicas, then of each: sums between two answers, oldest first
let shown = 0; // place of what is shown, which has these statistics:
let stats = null;

const COUNTS = "steps parked_steps rounds verified_tokens accepted_tokens committed_tokens timed_steps".split(" ");
const allAndEach = (all) => [all, ...(all.replicas ?? [])];

// The sums that figures are ratios of.
function sumsOf(stats) {
  const ms = (mean) => mean * stats.timed_steps;
  const times = { measured: ms(stats.measured_step_ms), predicted: ms(stats.predicted_step_ms) };
  return { seconds: stats.uptime_s, ...Object.fromEntries(COUNTS.map((key) => [key, stats[key]])), ...times };
}

function figuresOf(...parts) {
  const sum = (key) => parts.reduce((total, part) => total + part[key], 0);
  const ratio = (part, all) => (sum(all) ? sum(part) / sum(all) : null);
  return {
    busy: sum("steps") > 0,
    parked: sum("parked_steps") > 0,
    speed: ratio("committed_tokens", "seconds"),
    accept: ratio("committed_tokens", "rounds"),
    verify: ratio("verified_tokens", "rounds"),
    waste: sum("verified_tokens") ? 1 - ratio("accepted_tokens", "verified_tokens") : null,
    load: ratio("rounds", "steps"),
    measured: ratio("measured", "timed_steps"),
    predicted: ratio("predicted", "timed_steps") || null,
  };
}

// Keep what has happened since the last answer.
function remember(fresh) {
  const before = answer && allAndEach(answer);
  curves = allAndEach(fresh).map((now, place) => {
    if (!before) return [];
    const then = sumsOf(before[place]);
    const grown = Object.entries(sumsOf(now)).map(([key, value]) => [key, value - then[key]]);
    const curve = [...curves[place], { second: now.uptime_s, ...Object.fromEntries(grown) }];
    return curve.filter((point) => point.second > now.uptime_s - SPAN_S);
  });
  answer = fresh;
}

function show(place) {
  shown = place;
  stats = allAndEach(answer)[place];
  const names = allAndEach(answer).map((_, other) => (other ? `replica ${other - 1}` : "all replicas"));
  $("replicas").hidden = names.length === 1;
  if ($("replicas").children.length !== names.length) {
    $("replicas").replaceChildren(...names.map((name) => element("button", name)));
    [...$("replicas").children].forEach((button, other) => button.addEventListener("click", () => show(other)));
  }
  [...$("replicas").children].forEach((button, other) => button.setAttribute("aria-pressed", other === place));
  drawChips();
  draw();
}

// Each replica has a schedule of its own.
const schedules = () => (stats.replicas ?? [stats]).map((replica) => replica.schedule);
const parked = () => schedules().every((schedule) => schedule.parked);
const lastMinute = () => figuresOf(...curves[shown].filter((point) => point.second > stats.uptime_s - 60));

function draw() {
  const now = stats.uptime_s;
  const curve = curves[shown];
  // A step may take a good part of a second, so three answers are taken together.
  const points = curve.map((point, at) => ({ ...point, ...figuresOf(...curve.slice(Math.max(0, at - 2), at + 1)) }));
  drawTiles(points[points.length - 1]);
  const over = (id, lines, shaded) => timeChart($(id), { points, now, lines, shaded });
  const line = (style, name, key) => ({ style, name, of: (point) => point[key] });
  over("chart-speed", [line("one", "tokens/s", "speed")]);
  over("chart-lengths", [line("one", "accept length", "accept"), line("two", "verify length", "verify")]);
  over("chart-load", [line("two", "requests per step", "load")], (point) => point.parked);
  over("chart-step", [line("one", "measured", "measured"), line("two", "predicted", "predicted")]);
  drawLoads();
  drawPositions();
  drawFacts();
}

function drawChips() {
  const [{ verify_len: length }] = schedules();
  const list = [[`policy ${stats.policy}${known(length) ? ` ${length}` : ""}`, "plain"]];
  if (!lastMinute().busy) list.push(["idle", ""]);
  else if (parked()) list.push(["parked: steps without drafts are faster", "wait"]);
  else if (stats.policy === "off") list.push(["not speculating", "wait"]);
  else list.push(["speculating", "good"]);
  showChips(list);
}

function showChips(list) {
  const words = JSON.stringify(list);
  if ($("chips").dataset.words === words) return; // the region is read aloud when it changes
  $("chips").dataset.words = words;
  $("chips").replaceChildren(...list.map(([text, kind]) => element("span", text, `chip ${kind}`)));
}

function drawTiles(latest) {
  const minute = lastMinute();
  const figures = minute.busy ? minute : figuresOf(sumsOf(stats));
  const most = allAndEach(capabilities)[shown].max_running_requests;
  const texts = {
    "tile-span": minute.busy ? "Last minute" : "Since start: no step in the last minute",
    "tile-speed": number((latest && latest.speed) || 0),
    "tile-speed-note": minute.busy ? `${number(minute.speed)} over the last minute` : "",
    "tile-accept": number(figures.accept),
    "tile-verify": number(figures.verify),
    "tile-verify-of": `of ${capabilities.block_size} drafts`,
    "tile-waste": percent(figures.waste),
    "tile-load": number(figures.load),
    "tile-load-of": known(most) ? `of ${most} requests` : "requests",
    "tile-step": number(figures.measured),
    "tile-step-note": known(figures.predicted) ? `${number(figures.predicted)} predicted` : "",
  };
  for (const [id, text] of Object.entries(texts)) $(id).textContent = text;
}

function whyUnverified() {
  if (!stats.steps) return "no decode step yet";
  if (stats.policy === "off") return "nothing was verified: the policy off never speculates";
  if (parked()) return "nothing was verified: speculation is parked, steps without drafts are faster";
  if (capabilities.drafter === null) return "nothing was verified: no request named a text to draft from";
  return "no draft was verified";
}

function drawLoads() {
  const loads = stats.by_load.filter((load) => load.verified_tokens);
  const columns = (key, format) =>
    loads.map((load) => ({
      name: range(load.requests),
      value: load[key],
      text: format(load[key]),
      tip: `${range(load.requests)} requests
${number(load.verify_length)} drafts verified per request and step, accept length ${number(load.accept_length)}
${plural(load.verified_tokens - load.accepted_tokens, "draft")} of ${whole(load.verified_tokens)} verified were not kept
${plural(load.steps, "step")}, ${number(load.measured_step_ms)} ms each`,
    }));
  const caption = "requests in the step";
  const hosts = [$("chart-verify"), $("chart-waste")];
  if (!loads.length) return hosts.forEach((host) => nothing(host, whyUnverified()));
  columnChart(hosts[0], { most: capabilities.block_size, caption, columns: columns("verify_length", number) });
  const waste = columns("wasted_verify_fraction", percent);
  columnChart(hosts[1], { most: 1, format: percent, style: "warm", caption, columns: waste });
}

function drawPositions() {
  const { survival, predicted_survival: predicted, conditional_acceptance: conditional } = stats;
  $("legend-predicted").hidden = !predicted.some(known);
  if (!survival.some(known)) return nothing($("chart-survival"), whyUnverified());
  columnChart($("chart-survival"), {
    most: 1,
    format: percent,
    caption: "place in the block",
    columns: survival.map((value, position) => ({
      name: `${position + 1}`,
      value,
      text: percent(value),
      mark: predicted[position],
      tip: `Draft ${position + 1} of the block: ${percent(value)} of the verified were kept, and with them all before
predicted: ${percent(predicted[position])}
of those whose predecessors were kept: ${percent(conditional[position])}`,
    })),
  });
}

function facts(id, rows) {
  const cells = rows.flatMap(([name, value, off]) => [element("dt", name), element("dd", value, off ? "off" : "")]);
  $(id).replaceChildren(...cells);
}

function drawFacts() {
  const { drafter, features, versions, target, policies } = capabilities;
  const devices = features.tensor_parallel_size * features.data_parallel_size;
  const inGraphs = (yes) => (yes ? ", in CUDA graphs" : "");
  facts("facts-drafter", drafter === null ? [["none", "requests with a preset or prediction speculate"]] : [
    ["path", drafter.path],
    ["block size", `${capabilities.block_size}; of the checkpoint ${drafter.block_size}`],
    ["Markov head", drafter.markov_head_type ? `${drafter.markov_head_type}, rank ${drafter.markov_rank}` : "none"],
    ["vocabulary", `${whole(drafter.vocab_size)} of ${whole(target.vocab_size)} tokens`],
  ]);
  const { met, missed, infeasible } = stats.slos ?? { met: 0, missed: 0, infeasible: 0 };
  const answers = met + missed + infeasible;
  facts("facts-server", [
    ["target", `${target.architecture}, ${capabilities.dtype}`],
    ["engine", `${capabilities.engine}: ${capabilities.reason}`],
    ...(target.recurrence ? [["recurrent layers", target.recurrence]] : []),
    ["device", capabilities.device + (devices > 1 ? ` × ${devices}` : "")],
    ["prompts", features.prefill_attention + inGraphs(features.prefill_cuda_graphs)],
    ["decoding", features.decode_attention + inGraphs(features.cuda_graphs)],
    ["up for", duration(stats.uptime_s)],
    ["tokens committed", whole(stats.committed_tokens)],
    ...(answers ? [["SLOs met", `${met} of ${answers}, ${infeasible} infeasible`]] : []),
    ["versions", Object.entries(versions).map(([name, version]) => `${name} ${version}`).join(", ")],
  ]);
  facts(
    "facts-policies",
    Object.entries(policies).map(([name, policy]) => {
      const steps = stats.steps_by_policy[name];
      const words = [
        name === stats.policy && "in force",
        steps && plural(steps, "step"),
        !policy.available && "not on this server",
        policy.waits_for_device && "waits for the device",
      ];
      return [name, words.filter(Boolean).join(" · ") || "available", name !== stats.policy];
    }),
  );
}

// ---- talking to the server -------------------------------------------------------------------------------------------

const KEY = "dspark-api-key";
const [POLL_MS, RETRY_MS, TIMEOUT_MS] = [1000, 2000, 8000];

class Refused extends Error {}

async function get(path) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (answer.status === 401 || answer.status === 403) throw new Refused();
  if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
  return answer.json();
}

function state(name, words = "", calm = false) {
  document.body.dataset.state = name;
  $("key-form").hidden = name !== "locked";
  $("notice").hidden = !words;
  $("notice").classList.toggle("calm", calm);
  if ($("notice").textContent !== words) $("notice").textContent = words;
}

async function poll() {
  if (!capabilities) {
    capabilities = await get("dspark/capabilities");
    $("model").textContent = capabilities.target?.name ?? "";
    document.title = `DSPARK ${$("model").textContent.split("/").pop()}`;
  }
  if (capabilities.effective_decode_path !== "dspark") {
    state("target-only", `This server decodes with the target only. ${capabilities.reason}`, true);
    showChips([["target only", "wait"]]);
    return false;
  }
  const fresh = await get("dspark/stats");
  if (answer !== null && fresh.uptime_s < answer.uptime_s) {
    answer = stats = capabilities = null; // of a server that has been started anew
    return true;
  }
  remember(fresh);
  const warning = answer.drafter_fit.warning;
  state("live", warning ? `${warning[0].toUpperCase()}${warning.slice(1)}.` : "");
  show(shown);
  return true;
}

function lost() {
  const old = stats ? " The last figures are shown below." : "";
  state(stats ? "lost" : "connecting", `The server does not answer. Trying again.${old}`);
  showChips([["no answer", "bad"]]);
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
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  $("key-form").hidden = true;
  run();
});

// ---- words that appear under the pointer -------------------------------------------------------------------------------

function showTip(words, x, y) {
  const tip = $("tip");
  tip.hidden = !words;
  if (!words) return;
  tip.textContent = words;
  tip.style.left = `${Math.max(12, Math.min(x + 14, window.innerWidth - tip.offsetWidth - 12))}px`;
  const above = y - tip.offsetHeight - 12;
  tip.style.top = `${above > 12 ? above : y + 18}px`;
}

function explain(node, read) {
  const show = ({ clientX, clientY }) => showTip(read(clientX), clientX, clientY);
  for (const move of ["pointermove", "pointerdown"]) node.addEventListener(move, show);
  for (const end of ["pointerleave", "blur"]) node.addEventListener(end, () => showTip(""));
}

for (const host of document.querySelectorAll(".chart")) explain(host, (clientX) => host.read && host.read(clientX));
for (const node of document.querySelectorAll("[data-tip]")) {
  node.tabIndex = 0;
  explain(node, () => node.dataset.tip);
  node.addEventListener("focus", () => {
    const box = node.getBoundingClientRect();
    showTip(node.dataset.tip, box.left, box.top);
  });
}
window.addEventListener("resize", () => stats && draw());

if (document.documentElement.dataset.needsKey === "yes" && !sessionStorage.getItem(KEY)) locked();
else run();
