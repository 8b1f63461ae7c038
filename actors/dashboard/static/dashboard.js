import { axis, clock, gantt, heat, lane, make, moment, niceTop, number, percent, period, seconds } from "./charts.js";

const LOOK_MS = 2000;
const COMPARE_MS = 400;
const NAMES = 186; // pixels of the names of lanes
const $ = (id) => document.getElementById(id);

const perSecond = (value) => (value === null ? "–" : `${number(value)}/s`);

// The lanes, from above: what is in each, in which colour, and how it is said.
const LANES = [
  { name: "Requests", say: (at) => perSecond(at.begun), least: 1, series: [{ key: "begun", kind: "area", colour: "blue" }] },
  {
    name: "",
    keys: [["red block", "failed"], ["orange open", "refused"]],
    say: (at, length) => `${number(Math.round(at.failed * length))}, ${number(Math.round(at.refused * length))}`,
    least: 2,
    low: true,
    series: [{ key: "failed", kind: "bar", colour: "red" }, { key: "refused", kind: "open-bar", colour: "orange" }],
  },
  { name: "Hit rate", say: (at) => percent(at.hits), top: 1, topText: "100 %", series: [{ key: "hits", kind: "area", colour: "green" }] },
  {
    name: "First token",
    keys: [["purple", "p50"], ["purple dashed", "p99"]],
    say: (at) => `${seconds(at.ttft_p50)}, ${seconds(at.ttft_p99)}`,
    least: 0.01,
    unit: seconds,
    series: [{ key: "ttft_p99", kind: "dashed", colour: "purple" }, { key: "ttft_p50", kind: "line", colour: "purple" }],
  },
  { name: "Output tokens", say: (at) => perSecond(at.output), least: 1, series: [{ key: "output", kind: "area", colour: "sky" }] },
  {
    name: "",
    keys: [["orange block", "tried again"], ["purple open", "moved"]],
    say: (at, length) => `${number(Math.round(at.retried * length))}, ${number(Math.round(at.moved * length))}`,
    least: 2,
    low: true,
    series: [{ key: "retried", kind: "bar", colour: "orange" }, { key: "moved", kind: "open-bar", colour: "purple" }],
  },
];

const MARKS = {
  fault: { name: "Faults", sign: "▲", colour: "red" },
  scaling: { name: "Scaling", sign: "■", colour: "blue" },
  instance: { name: "Instances", sign: "●", colour: "green" },
  gap: { name: "Missing records, shares", sign: "✕", colour: "orange" },
};

const RANGES = [["15 min", 900], ["1 h", 3600], ["6 h", 21600], ["All", 0]];

const STATES = {
  well: ["✓", "well", "green"],
  open: ["…", "open", "blue"],
  failed: ["▲", "failed", "red"],
  refused: ["○", "refused", "orange"],
  unknown: ["?", "no end", "grey"],
};

let state = null;
let last = null; // seconds; 0 for all, null until something is known
let part = null; // [since, until] of a part that is looked at
let cursor = null; // a bucket
let order = "latest";
let looking = false;

// Asking -------------------------------------------------------------------------------------

async function ask(path, query) {
  const response = await fetch(`${path}?${new URLSearchParams(query)}`);
  const value = await response.json();
  if (!response.ok) throw new Error(value.error || `the dashboard answers with ${response.status}`);
  return value;
}

async function look() {
  if (looking) return;
  looking = true;
  try {
    const most = Math.max(30, Math.min(240, Math.round($("lanes").clientWidth / 7)));
    const query = part ? { since: part[0], until: part[1], most } : { last: last ?? 0, most };
    const [now, requests] = await Promise.all([ask("state", query), ask("requests", { order, most: isNarrow() ? 15 : 50 })]);
    const isFirst = state === null;
    state = now;
    say(state.notice, false);
    show();
    showRequests(requests);
    if (isFirst) begin();
  } catch (error) {
    say(error instanceof TypeError ? "dynbus dashboard does not answer: it has ended" : error.message, true);
  } finally {
    looking = false;
  }
}

/** True on a phone, where all stands in one column. */
function isNarrow() {
  return matchMedia("(max-width: 860px)").matches;
}

function say(text, isBad) {
  $("notice").hidden = !text;
  $("notice").className = isBad ? "bad" : "";
  if ($("notice").textContent !== text) $("notice").textContent = text;
}

/** What needs to be known once: the range that fits, and a comparison that was asked for. */
function begin() {
  $("policies").hidden = state.is_live;
  const settings = Object.entries(state.settings);
  if (settings.length) {
    $("setting").value = settings.map(([name, value]) => `${name}=${value}`).join(" ");
    $("settings").requestSubmit();
  }
  const asked = decodeURIComponent(location.hash.slice(1));
  if (asked) openLife(asked);
}

// Showing ------------------------------------------------------------------------------------

function show() {
  const live = make("b", "", state.is_live ? "live" : "file");
  $("source").replaceChildren(live, ` ${state.title}`, ` · ${period(state.begin, state.end)}`);
  showRanges();
  showFigures();
  showLanes();
  showEvents();
  showInstances();
  const forgotten = state.forgotten ? `; ${number(state.forgotten)} earlier ones are not kept one by one` : "";
  const outside = state.outside ? `; ${number(state.outside)} records are of another time` : "";
  $("kept").textContent = `${number(state.requests)} requests${forgotten}${outside}. An id is on record as a digest: search by either.`;
}

function showRanges() {
  const length = state.end - state.begin;
  const fits = RANGES.filter(([, value]) => value < length);
  const buttons = fits.map(([text, value]) => {
    const button = make("button", "", text);
    button.type = "button";
    button.setAttribute("aria-pressed", String(!part && (last ?? 0) === value));
    button.addEventListener("click", () => {
      last = value;
      part = null;
      look();
    });
    return button;
  });
  if (part) {
    const text = `${clock(state.since)} to ${clock(state.until)}  ×`;
    const button = make("button", "", text);
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    button.setAttribute("aria-label", `${text.slice(0, -1)}: show all`);
    button.addEventListener("click", zoomOut);
    buttons.push(button);
  }
  if (!same($("ranges"), buttons)) $("ranges").replaceChildren(...buttons);
}

/** True if a group of buttons says what these do: they keep the focus then. */
function same(group, buttons) {
  const said = (list) => list.map((each) => each.textContent + each.getAttribute("aria-pressed")).join("|");
  return said([...group.children]) === said(buttons);
}

function showFigures() {
  const { totals } = state;
  const length = state.until - state.since;
  const serving = state.instances.filter((one) => one.state === "ready" || (!one.state && one.running)).length;
  const troubled = (totals.failed ?? 0) + (totals.refused ?? 0);
  const figures = [
    [number(totals.begun), `requests, ${number(totals.begun / length)}/s`],
    [number(troubled), `failed ${number(totals.failed)}, refused ${number(totals.refused)}`],
    [percent(totals.hits), "of prompts in caches"],
    [seconds(totals.ttft_p50), `first token, p99 ${seconds(totals.ttft_p99)}`],
    [number(totals.output / length), `tokens/s, ${number(totals.output)} in all`],
    [number(totals.retried + totals.moved), `tried again ${number(totals.retried)}, moved ${number(totals.moved)}`],
    [number(serving), `instances ready, ${number(state.open)} requests open`],
  ];
  $("figures").replaceChildren(...figures.map(([value, text]) => make("div", "figure", make("b", "", value), make("span", "", text))));
}

function valuesAt(bucket) {
  if (bucket === null) {
    const length = state.until - state.since;
    const whole = { ...state.totals };
    for (const name of ["begun", "ended", "failed", "refused", "output", "retried", "moved"]) whole[name] = (whole[name] ?? 0) / length;
    return whole;
  }
  return Object.fromEntries(Object.entries(state.lanes).map(([name, values]) => [name, values[bucket]]));
}

function showLanes() {
  const count = state.lanes.begun.length;
  if (cursor !== null && cursor >= count) cursor = null;
  const grid = make("div", "lanes");
  for (const spec of LANES) {
    const keys = (spec.keys ?? []).map(([classes, text]) => make("span", `key ${classes}`, text));
    const name = make("div", `lane-name ${spec.low ? "short" : "tall"}`, spec.name ? `${spec.name} ` : "", ...keys, make("b", "value"));
    // What is seldom is counted; what is not has a rate.
    const factor = spec.low ? state.width : 1;
    const all = spec.series.map((each) => ({ ...each, values: state.lanes[each.key].map((value) => (value === null ? null : value * factor)) }));
    const heights = spec.low ? all[0].values.map((value, at) => value + all[1].values[at]) : all.flatMap((each) => each.values);
    const top = spec.top ?? niceTop(heights, spec.least);
    const topText = spec.topText ?? (spec.unit ? spec.unit(top) : spec.low ? number(top) : `${number(top)}/s`);
    grid.append(name, make("div", `lane ${spec.low ? "short" : "tall"}`, lane(all, count, top), make("span", "top", topText)));
  }
  const places = Object.entries(state.places);
  if (places.length) {
    const names = places.map(([address]) => {
      const name = make("span", "place id", shortOf(address));
      name.title = address;
      return name;
    });
    const cells = make("div", "lane heat", heat(places.map(([, values]) => values), count));
    cells.style.height = `${places.length * 15 + 9}px`;
    const title = make("div", "lane-name heat", make("span", "caption", "Sent to each instance"), ...names);
    grid.append(title, cells);
  }
  for (const [kind, { name, sign, colour }] of Object.entries(MARKS)) {
    const marks = state.marks.filter((mark) => mark.kind === kind);
    if (!marks.length && kind !== "fault" && kind !== "scaling") continue;
    const row = make("div", "lane row");
    row.dataset.name = name;
    const byBucket = groupBy(marks, bucketOf);
    for (const [bucket, some] of byBucket) {
      const isLate = bucket + 1 > 0.97 * count;
      const element = make("span", `mark ${colour}${some.length > 1 ? " many" : ""}${isLate ? " late" : ""}`, sign);
      element.dataset.count = some.length;
      element.style.left = `${(100 * (bucket + 0.5)) / count}%`;
      row.append(element);
    }
    grid.append(make("div", "lane-name row", `${sign} ${name}`), row);
  }
  const room = $("lanes").clientWidth - (isNarrow() ? 0 : NAMES);
  const length = state.until - state.since;
  grid.append(make("div", "axis corner"), axis(state.since, state.until, room, (at) => moment(at, length), ofClock()));
  grid.append(make("div", "hair"), make("div", "brush"));
  $("lanes").replaceChildren(grid);
  showCursor();
}

/** The axis of a clock, which tells seconds and begins at midnight here. */
function ofClock() {
  return { offset: 60 * new Date().getTimezoneOffset(), finest: 1 };
}

function groupBy(list, key) {
  const groups = new Map();
  for (const each of list) groups.set(key(each), [...(groups.get(key(each)) ?? []), each]);
  return groups;
}

function bucketOf(mark) {
  return Math.min(state.lanes.begun.length - 1, Math.floor((mark.time - state.since) / state.width));
}

function shortOf(address) {
  const [component, id] = address.split("@");
  return id ? `${component.split(".").pop()} ${id.slice(0, 12)}` : address;
}

function showCursor() {
  const at = valuesAt(cursor);
  [...document.querySelectorAll("#lanes .value")].forEach((element, row) => {
    element.textContent = LANES[row].say(at, cursor === null ? state.until - state.since : state.width);
  });
  const hair = document.querySelector(".hair");
  hair.hidden = cursor === null;
  document.querySelector(".brush").hidden = true;
  const place = $("cursor");
  if (cursor === null) {
    place.replaceChildren(`All of ${period(state.since, state.until)}; ${seconds(state.width)} to a step`);
    return;
  }
  hair.style.left = `${left() + ((cursor + 0.5) / state.lanes.begun.length) * width()}px`;
  const since = state.since + cursor * state.width;
  const marks = state.marks.filter((mark) => bucketOf(mark) === cursor).map((mark) => `${MARKS[mark.kind].sign} ${textOf(mark)}`);
  place.replaceChildren(make("b", "", `${clock(since)} to ${clock(since + state.width)}`), ...marks.map((text) => `  ${text}`));
}

function textOf(mark) {
  const details = Object.entries(mark.details).map(([name, value]) => `${name} ${typeof value === "number" ? number(value) : value}`);
  const times = mark.count > 1 ? ` (noticed ${mark.count} times)` : "";
  return `${mark.what} ${mark.who}${details.length ? `: ${details.join(", ")}` : ""}${times}`;
}

function showEvents() {
  const items = state.marks.filter((mark) => mark.kind !== "instance").reverse().slice(0, 100).map((mark) => {
    const { sign, colour } = MARKS[mark.kind];
    const text = make("span", "who", make("span", "when", `${moment(mark.time, state.until - state.since)} `), textOf(mark));
    return make("li", "", make("span", colour, sign), text);
  });
  $("events").replaceChildren(...(items.length ? items : [make("li", "nothing", "None in this time.")]));
}

function showInstances() {
  const items = state.instances.slice(0, 100).map((one) => {
    const isGone = ["stopped", "lost", "broken", "taken over", "gone"].includes(one.state);
    const colour = isGone ? (one.state === "stopped" ? "grey" : "red") : one.state === "draining" ? "orange" : "green";
    const sign = isGone ? (one.state === "stopped" ? "○" : "▲") : one.state === "draining" ? "◐" : "●";
    const word = make("span", `state ${colour}`, `${sign} ${one.state || "seen"}`);
    const since = one.since ? `, since ${moment(one.since, 1e6)}` : "";
    const errors = one.errors ? `, ${number(one.errors)} of all ended with an error` : "";
    const facts = `${number(one.running)} running, ${number(one.sent_here)} sent here${errors}${since}`;
    return make("li", isGone ? "gone" : "", make("div", "top", make("span", "id", one.address), word), make("div", "quiet", facts));
  });
  $("instances").replaceChildren(...(items.length ? items : [make("li", "nothing", "None on record.")]));
}

// Requests -----------------------------------------------------------------------------------

function stateOf(one) {
  const [sign, word, colour] = STATES[one.state];
  return make("span", `state ${colour}`, `${sign} ${one.state === "failed" || one.state === "refused" ? one.error || one.status || word : word}`);
}

function tokensOf(one) {
  const parts = [];
  if (one.prompt_tokens !== null) {
    const cached = one.cached_tokens !== null && one.prompt_tokens ? `, ${percent(one.cached_tokens / one.prompt_tokens)} cached` : "";
    parts.push(`prompt ${number(one.prompt_tokens)}${cached}`);
  }
  if (one.output_tokens !== null) parts.push(`output ${number(one.output_tokens)}`);
  return parts.join(", ");
}

function showRequests(requests) {
  const focused = document.activeElement?.dataset?.request;
  const items = requests.map((one) => {
    const facts = [one.model, tokensOf(one), one.moves ? `moved ${one.moves}×` : "", one.retries ? `tried again ${one.retries}×` : ""];
    const button = make(
      "button",
      "",
      make("span", "when quiet", clock(one.began)),
      make("span", "id", one.request),
      stateOf(one),
      make("span", "facts", facts.filter(Boolean).join(" · ")),
      make("span", "first quiet", one.first === null ? "" : `▸ ${seconds(one.first)}`),
      make("span", "took", seconds(one.seconds)),
    );
    button.type = "button";
    button.dataset.request = one.request;
    button.title = "Open its picture. ▸ is the time to its first token, and behind it how long it took";
    button.addEventListener("click", () => openLife(one.request));
    return make("li", "", button);
  });
  const nothing = { latest: "No request yet.", slowest: "No request has ended yet.", failed: "None failed, was tried again or moved.", open: "No request is open." };
  $("requests").replaceChildren(...(items.length ? items : [make("li", "nothing", nothing[order])]));
  if (focused) document.querySelector(`[data-request="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

for (const button of document.querySelectorAll("#orders button")) {
  button.addEventListener("click", () => {
    order = button.dataset.order;
    for (const each of document.querySelectorAll("#orders button")) each.setAttribute("aria-pressed", String(each === button));
    look();
  });
}

async function openLife(id) {
  try {
    const life = await ask("request", { id });
    showLife(life);
    say("", false);
  } catch (error) {
    say(`${id.slice(0, 80)}: ${error.message}`, true);
  }
}

function showLife(life) {
  $("life-title").replaceChildren("Request ", make("span", "id", life.request));
  const facts = [
    ["state", stateOf(life)],
    ["began", moment(life.began, 1e6) + new Date(1000 * life.began).toISOString().slice(16, 23)],
    ["took", seconds(life.seconds)],
    ["first token", seconds(life.first)],
    ["model", life.model || "–"],
    ["tokens", tokensOf(life) || "–"],
    ["attempts", `${life.attempts}${life.moves ? `, moved ${life.moves}×` : ""}${life.retries ? `, tried again ${life.retries}×` : ""}`],
    ["instances", life.instances.join(", ") || "–"],
  ];
  const list = make("dl", "facts-list", ...facts.map(([name, value]) => make("div", "", make("dt", "", name), make("dd", "", value))));
  const marks = make("ul", "marks", ...life.marks.map((mark) => make("li", "", `${seconds(mark.at)}: ${mark.text}`)));
  const rows = life.steps.map((step) => {
    const details = Object.entries(step.details).map(([name, value]) => `${name}=${value}`).join(" ");
    return make("tr", "", make("td", "", seconds(Math.max(0, step.time - life.began))), make("td", "", step.what), make("td", "", step.who), make("td", "", details));
  });
  const head = make("tr", "", ...["after", "what", "who", "details"].map((text) => make("th", "", text)));
  const table = make("div", "scroll", make("table", "", make("thead", "", head), make("tbody", "", ...rows)));
  $("picture").replaceChildren(list, ...gantt(life), marks, make("details", "", make("summary", "", `${rows.length} records`), table));
  if (!$("life").open) $("life").showModal();
}

$("close").addEventListener("click", () => $("life").close());
$("life").addEventListener("click", (event) => {
  if (event.target === $("life")) $("life").close();
});
$("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const wanted = $("wanted").value.trim();
  if (wanted) openLife(wanted);
});

// Moving along the time line -----------------------------------------------------------------

function left() {
  return document.querySelector("#lanes .lane").offsetLeft;
}

function width() {
  return document.querySelector("#lanes .lane").offsetWidth;
}

function bucketAt(event) {
  const x = event.clientX - $("lanes").getBoundingClientRect().left - left();
  const count = state.lanes.begun.length;
  return Math.max(0, Math.min(count - 1, Math.floor((x / width()) * count)));
}

let dragged = null;

$("lanes").addEventListener("pointerdown", (event) => {
  if (!state || event.button !== 0) return;
  dragged = bucketAt(event);
});

$("lanes").addEventListener("pointermove", (event) => {
  if (!state) return;
  cursor = bucketAt(event);
  showCursor();
  if (dragged === null || event.pointerType === "touch") return;
  const [from, to] = [Math.min(dragged, cursor), Math.max(dragged, cursor) + 1];
  const brush = document.querySelector(".brush");
  const count = state.lanes.begun.length;
  brush.hidden = to - from < 2;
  brush.style.left = `${left() + (from / count) * width()}px`;
  brush.style.width = `${((to - from) / count) * width()}px`;
});

addEventListener("pointerup", (event) => {
  if (dragged === null) return;
  const [from, to] = [Math.min(dragged, cursor ?? dragged), Math.max(dragged, cursor ?? dragged) + 1];
  dragged = null;
  if (to - from >= 2 && event.pointerType !== "touch") zoom(from, to);
});

$("lanes").addEventListener("pointerleave", () => {
  if (dragged !== null || !state) return;
  cursor = null;
  showCursor();
});

function zoom(from, to) {
  part = [state.since + from * state.width, state.since + to * state.width - 1e-3];
  cursor = null;
  look();
}

function zoomOut() {
  part = null;
  cursor = null;
  look();
}

$("lanes").addEventListener("keydown", (event) => {
  if (!state) return;
  const count = state.lanes.begun.length;
  const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
  if (step) cursor = Math.max(0, Math.min(count - 1, cursor === null ? (step > 0 ? 0 : count - 1) : cursor + step));
  else if (event.key === "Home") cursor = 0;
  else if (event.key === "End") cursor = count - 1;
  else if (event.key === "Enter" && cursor !== null) {
    const half = Math.max(2, Math.round(count / 8));
    zoom(Math.max(0, cursor - half), Math.min(count, cursor + half + 1));
  } else if (event.key === "Escape") zoomOut();
  else return;
  event.preventDefault();
  showCursor();
});

// Two policies -------------------------------------------------------------------------------

let comparing = 0;

function sayCompared(text, isBad) {
  $("compare-state").textContent = text;
  $("compare-state").className = isBad ? "bad" : "";
}

$("settings").addEventListener("submit", async (event) => {
  event.preventDefault();
  const texts = $("setting").value.trim().split(/\s+/).filter(Boolean);
  comparing += 1;
  const mine = comparing;
  try {
    for (;;) {
      const answer = await ask("compare", texts.map((text) => ["set", text]));
      if (mine !== comparing) return;
      if (answer.error) throw new Error(answer.error);
      if (answer.result) {
        sayCompared("", false);
        showComparison(answer.result, texts.join(" "));
        return;
      }
      sayCompared(`deciding again: ${percent(answer.progress)}`, false);
      await new Promise((resolve) => setTimeout(resolve, COMPARE_MS));
    }
  } catch (error) {
    if (mine === comparing) sayCompared(error.message, true);
  }
});

function showComparison(result, name) {
  const recorded = result.recorded.parts.routing;
  const replayed = result.replayed.parts.routing;
  const box = $("comparison");
  if (!recorded || !recorded.decisions) {
    box.replaceChildren(make("p", "nothing", "No router has recorded anything."));
    return;
  }
  const elsewhere = replayed.unexplained;
  const explained = Object.values(replayed.explained).reduce((sum, one) => sum + one, 0);
  const figures = [
    [`${number(elsewhere.length)} of ${number(replayed.decisions)}`, "requests go elsewhere, or wait otherwise"],
    [number(recorded.expected_tokens.recorded), "tokens expected in caches, on record"],
    [number(replayed.expected_tokens.replayed), `tokens expected in caches, by ${name}`],
    [`${number(spread(result.recorded.load))} → ${number(spread(result.replayed.load))}`, "requests by which the busiest is ahead of the mean"],
  ];
  const pair = make("div", "pair", ...figures.map(([value, text]) => make("div", "figure", make("b", "", value), make("span", "", text))));
  const places = [...new Set([...Object.keys(recorded.placed.recorded), ...Object.keys(replayed.placed.replayed)])].sort();
  const most = Math.max(1, ...places.map((place) => Math.max(recorded.placed.recorded[place] ?? 0, replayed.placed.replayed[place] ?? 0)));
  const rows = places.map((place) => {
    const before = recorded.placed.recorded[place] ?? 0;
    const after = replayed.placed.replayed[place] ?? 0;
    return make("tr", "", make("td", "id", place), countCell(before, most, "blue"), countCell(after, most, "orange"), make("td", "n", `${after > before ? "+" : after < before ? "−" : ""}${number(Math.abs(after - before))}`));
  });
  const head = make("tr", "", make("th", "", "instance"), make("th", "", "on record"), make("th", "", name), make("th", "n", "difference"));
  const table = make("table", "placed", make("thead", "", head), make("tbody", "", ...rows));
  const samples = Math.max(1, ...Object.values(result.recorded.load).map((values) => values.length));
  const end = result.since + samples * result.width;
  const counts = new Array(samples).fill(0);
  for (const one of elsewhere) {
    const at = Math.floor((one.time - result.since) / result.width);
    if (at >= 0 && at < samples) counts[at] += 1;
  }
  const loads = [...new Set([...Object.keys(result.recorded.load), ...Object.keys(result.replayed.load)])].sort();
  const none = new Array(samples).fill(0);
  const top = niceTop(loads.flatMap((place) => [...(result.recorded.load[place] ?? none), ...(result.replayed.load[place] ?? none)]), 1);
  const grid = make("div", "lanes");
  grid.append(make("div", "lane-name short", "Decided otherwise", make("b", "", number(elsewhere.length))));
  const otherTop = niceTop(counts, 1);
  grid.append(make("div", "lane short", lane([{ values: counts, kind: "bar", colour: "red" }], samples, otherTop), make("span", "top", number(otherTop))));
  for (const place of loads) {
    const before = result.recorded.load[place] ?? none;
    const after = result.replayed.load[place] ?? none;
    const label = make("div", "lane-name short", make("span", "place id", place), make("b", "", `${number(mean(before))} → ${number(mean(after))}`));
    const series = [{ values: before, kind: "area", colour: "blue" }, { values: after, kind: "dashed", colour: "orange" }];
    grid.append(label, make("div", "lane short", lane(series, samples, top), make("span", "top", number(top))));
  }
  const room = box.clientWidth - (isNarrow() ? 0 : NAMES);
  grid.append(make("div", "axis corner"), axis(result.since, end, room, (at) => moment(at, end - result.since), ofClock()));
  const legend = make("p", "legend lane-name", make("span", "key blue block", "on record"), make("span", "key orange dashed", name));
  const some = elsewhere.slice(0, 20).map((one) => {
    return make("tr", "", make("td", "quiet", clock(one.time)), make("td", "id", one.request), make("td", "id", one.recorded), make("td", "id", one.made));
  });
  const heads = make("tr", "", ...["time", "request", "on record", name].map((text) => make("th", "", text)));
  const list = make("details", "", make("summary", "", `The first ${some.length} that go elsewhere`), make("div", "scroll", make("table", "", make("thead", "", heads), make("tbody", "", ...some))));
  const notes = [];
  if (explained) notes.push(`${number(explained)} are otherwise since what happened before the recording is not known`);
  for (const [why, count] of Object.entries(replayed.left_out)) notes.push(`${number(count)} left out: ${why}`);
  if (replayed.missing) notes.push(`${number(replayed.missing)} records are missing`);
  notes.push("What engines did stays as on record: when they were done, and what they found in their caches, is not simulated");
  box.replaceChildren(pair, table, make("h3", "", "Requests at each instance, as the router knew"), legend, grid, list, make("p", "hint", `${notes.join(". ")}.`));
}

/** How far the busiest place is ahead of the mean of all, on average over the time. */
function spread(load) {
  const all = Object.values(load);
  if (!all.length) return 0;
  const ahead = all[0].map((_, at) => Math.max(...all.map((one) => one[at])) - mean(all.map((one) => one[at])));
  return mean(ahead);
}

function mean(values) {
  return values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : 0;
}

function countCell(count, most, colour) {
  const share = make("i", "");
  share.style.width = `${(100 * count) / most}%`;
  return make("td", "", number(count), make("span", `share ${colour}`, share));
}

// Begin --------------------------------------------------------------------------------------

setInterval(() => {
  if (!document.hidden && !part && dragged === null && (state === null || state.is_live)) look();
}, LOOK_MS);
let resized = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(resized);
  resized = requestAnimationFrame(() => state && showLanes());
});
look();
